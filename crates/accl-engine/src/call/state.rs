//! A call in flight as the protocol sees it: whether it has ended and how, and who is told.
//!
//! Owns the state word and what hangs on it; knows no engine. The work itself is in `exec`, the handle that callers have in
//! `api::call`. Read [`CallState`] first.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use accl_types::{Collective, Error, Moment, Rank, Seq};

use super::waits::Waits;
use crate::sync::{Condvar, Mutex};

const RUNNING: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;
const NO_SOURCE: u32 = u32::MAX;

/// What a caller has run when its call has ended.
pub(crate) type Callback = Box<dyn FnOnce() + Send>;

/// How a wait ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Waited {
    /// The outputs are written.
    Done,
    /// The call failed; no thread touches its tensors any more.
    Failed(Error),
    /// The wait's own timeout passed; the call runs on.
    TimedOut(Error),
    /// The interrupt hook asked to stop; the call runs on.
    Interrupted,
}

/// A call in flight. Shared between the handle and whoever works on it.
pub(crate) struct CallState {
    pub(crate) place: CallPlace,
    pub(crate) started: Moment,
    state: AtomicU8,
    source: AtomicU32,
    /// The word that came with a message.
    note: AtomicU64,
    duration_ns: AtomicU64,
    notifier: Arc<Notifier>,
}

/// What sleepers on a call wait for.
#[derive(Default)]
pub(crate) struct Notifier {
    inner: Mutex<Inner>,
    changed: Condvar,
}

impl Notifier {
    /// Wakes whoever sleeps in [`CallState::sleep`].
    pub(crate) fn notify(&self) {
        self.inner.lock().notified = true;
        self.changed.notify_all();
    }
}

#[derive(Default)]
struct Inner {
    error: Option<Error>,
    callback: Option<Callback>,
    /// Somebody asks the waiters to look whether they are elected to drive.
    notified: bool,
}

/// What identifies a call.
pub(crate) struct CallPlace {
    pub(crate) group_id: u64,
    pub(crate) group: Arc<str>,
    pub(crate) rank: Rank,
    pub(crate) collective: Collective,
    pub(crate) seq: u64,
    /// Whether its caller went on and waits later, or never.
    pub(crate) is_async: bool,
    pub(crate) timed: bool,
    /// Of the group.
    pub(crate) waits: Arc<Waits>,
}

impl std::ops::Deref for CallState {
    type Target = CallPlace;

    fn deref(&self) -> &CallPlace {
        &self.place
    }
}

impl CallState {
    pub(crate) fn new(place: CallPlace, now: Moment) -> Arc<Self> {
        Arc::new(Self {
            place,
            started: now,
            state: AtomicU8::new(RUNNING),
            source: AtomicU32::new(NO_SOURCE),
            note: AtomicU64::new(0),
            duration_ns: AtomicU64::new(0),
            notifier: Arc::default(),
        })
    }

    /// Whether the call is done or failed. Neither blocks nor makes progress.
    pub(crate) fn is_done(&self) -> bool {
        // Acquire: whoever sees the end also sees the outputs.
        self.state.load(Ordering::Acquire) != RUNNING
    }

    /// The error of a failed call.
    pub(crate) fn error(&self) -> Option<Error> {
        self.notifier.inner.lock().error.clone()
    }

    /// Where a receive's data came from, once that is known.
    pub(crate) fn source_rank(&self) -> Option<u32> {
        Some(self.source.load(Ordering::Relaxed)).filter(|&source| source != NO_SOURCE)
    }

    /// From submission to the last byte; `None` while it runs or when timing is off.
    pub(crate) fn duration(&self) -> Option<Duration> {
        let nanos = self.duration_ns.load(Ordering::Relaxed);
        (self.timed && nanos > 0).then(|| Duration::from_nanos(nanos))
    }

    /// From submission to the last byte, once it has ended.
    pub(crate) fn elapsed(&self) -> Duration {
        Duration::from_nanos(self.duration_ns.load(Ordering::Relaxed))
    }

    /// Keeps a callback for the end; gives it back when the call has ended.
    pub(crate) fn keep_callback(&self, callback: Callback) -> Option<Callback> {
        let mut inner = self.notifier.inner.lock();
        if self.is_done() {
            return Some(callback);
        }
        inner.callback = Some(callback);
        None
    }

    /// An error with this call's place.
    pub(crate) fn placed(&self, error: Error) -> Error {
        error.in_call(self.collective, Seq(self.seq)).in_group(&self.group).on_rank(self.rank)
    }

    pub(crate) fn set_source(&self, source: Rank, note: u64) {
        self.source.store(source.0, Ordering::Relaxed);
        self.note.store(note, Ordering::Relaxed);
    }

    /// The word that came with the message that this call received.
    pub(crate) fn note(&self) -> u64 {
        self.note.load(Ordering::Relaxed)
    }

    /// Ends the call. Called once, by whoever works on it; from here on nobody but the caller touches the
    /// call's tensors. Returns the callback to be run.
    #[must_use]
    pub(crate) fn finish(&self, now: Moment, error: Option<Error>) -> Option<Callback> {
        let nanos = now.since(self.started).as_nanos().max(1);
        self.duration_ns.store(u64::try_from(nanos).unwrap_or(u64::MAX), Ordering::Relaxed);
        let mut inner = self.notifier.inner.lock();
        let state = if error.is_some() { FAILED } else { DONE };
        inner.error = error;
        // Release: the outputs were written before. Under the lock, so that `when_done` cannot miss it.
        self.state.store(state, Ordering::Release);
        self.notifier.changed.notify_all();
        inner.callback.take()
    }

    /// How the call ended, or `None` while it runs.
    pub(crate) fn outcome(&self) -> Option<Waited> {
        match self.state.load(Ordering::Acquire) {
            RUNNING => None,
            DONE => Some(Waited::Done),
            _ => {
                let error = self.notifier.inner.lock().error.clone();
                Some(Waited::Failed(error.unwrap_or_else(|| Error::internal("a call failed without a cause"))))
            }
        }
    }

    /// Sleeps until the call ends or somebody notifies, at most for so long.
    pub(crate) fn sleep(&self, at_most: Option<Duration>) {
        let mut inner = self.notifier.inner.lock();
        if !inner.notified && !self.is_done() {
            match at_most {
                Some(at_most) => drop(self.notifier.changed.wait_for(&mut inner, at_most)),
                None => self.notifier.changed.wait(&mut inner),
            }
        }
        inner.notified = false;
    }

    /// For waking this call's sleepers without the call.
    pub(crate) fn notifier(&self) -> Arc<Notifier> {
        self.notifier.clone()
    }
}
