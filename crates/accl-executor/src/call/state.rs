//! A call in flight as the protocol sees it: whether it has ended and how, and who is told.
//!
//! Owns the state word and what hangs on it; knows no engine. The work itself is in `exec`; who sleeps until the end is the matter of
//! the [`CallObserver`] that is handed in. Read [`CallState`] first.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use accl_types::{Collective, Error, Moment, Rank, Seq};

use super::phases::Phases;
use super::waits::Waits;

const RUNNING: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;
const NO_SOURCE: u32 = u32::MAX;

/// What a caller has run when its call has ended.
pub type Callback = Box<dyn FnOnce() + Send>;

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

/// Who is told that a call has ended.
pub trait CallObserver: Send + Sync {
    /// The call has ended: [`CallState::is_done`] says so from now on. Runs under the driver's lock, once, so it must neither block
    /// nor call the engine. It has failed if there is an error. Returns what is to be run without the lock.
    fn ended(&self, error: Option<&Error>) -> Option<Callback>;
}

/// A call in flight. Shared between the handle and whoever works on it.
pub struct CallState {
    info: CallInfo,
    started: Moment,
    state: AtomicU8,
    /// Written before the state says that the call has failed.
    error: OnceLock<Error>,
    source: AtomicU32,
    /// The word that came with a message.
    note: AtomicU64,
    duration_ns: AtomicU64,
    observer: Arc<dyn CallObserver>,
}

/// What identifies a call.
pub struct CallInfo {
    /// The number of its group.
    pub group_id: u64,
    /// The name of its group.
    pub group: Arc<str>,
    /// Who made it.
    pub rank: Rank,
    /// What it is.
    pub collective: Collective,
    /// Its number in the group.
    pub seq: u64,
    /// Whether its caller went on and waits later, or never.
    pub is_async: bool,
    /// Whether other lanes do parts of it.
    pub is_cut: bool,
    /// Whether [`CallState::duration`] tells how long it took.
    pub is_timed: bool,
    /// Where its time goes, if somebody asked.
    pub phases: Option<Arc<Phases>>,
    /// Of the group.
    pub waits: Arc<Waits>,
}

impl std::ops::Deref for CallState {
    type Target = CallInfo;

    fn deref(&self) -> &CallInfo {
        &self.info
    }
}

impl CallState {
    /// A call that runs since `now`.
    pub fn new(info: CallInfo, observer: Arc<dyn CallObserver>, now: Moment) -> Arc<Self> {
        Arc::new(Self {
            info,
            started: now,
            state: AtomicU8::new(RUNNING),
            error: OnceLock::new(),
            source: AtomicU32::new(NO_SOURCE),
            note: AtomicU64::new(0),
            duration_ns: AtomicU64::new(0),
            observer,
        })
    }

    /// Whether the call is done or failed. Neither blocks nor makes progress.
    pub fn is_done(&self) -> bool {
        // Acquire: whoever sees the end also sees the outputs.
        self.state.load(Ordering::Acquire) != RUNNING
    }

    /// When it was made.
    #[inline]
    pub fn started(&self) -> Moment {
        self.started
    }

    /// The error of a failed call.
    pub fn error(&self) -> Option<Error> {
        self.error.get().cloned()
    }

    /// Where a receive's data came from, once that is known.
    pub fn source_rank(&self) -> Option<Rank> {
        Some(self.source.load(Ordering::Relaxed)).filter(|&source| source != NO_SOURCE).map(Rank)
    }

    /// From submission to the last byte; `None` while it runs or when timing is off.
    pub fn duration(&self) -> Option<Duration> {
        let nanos = self.duration_ns.load(Ordering::Relaxed);
        (self.is_timed && nanos > 0).then(|| Duration::from_nanos(nanos))
    }

    /// From submission to the last byte, once it has ended.
    pub fn elapsed(&self) -> Duration {
        Duration::from_nanos(self.duration_ns.load(Ordering::Relaxed))
    }

    /// An error with this call's place.
    pub fn in_context(&self, error: Error) -> Error {
        error.in_call(self.collective, Seq(self.seq)).in_group(&self.group).on_rank(self.rank)
    }

    pub(crate) fn set_source(&self, source: Rank, note: u64) {
        self.source.store(source.0, Ordering::Relaxed);
        self.note.store(note, Ordering::Relaxed);
    }

    /// The word that came with the message that this call received.
    pub fn note(&self) -> u64 {
        self.note.load(Ordering::Relaxed)
    }

    /// Ends the call. Called once, by whoever works on it; from here on nobody but the caller touches the
    /// call's tensors. Returns the callback to be run.
    #[must_use]
    pub fn finish(&self, now: Moment, error: Option<Error>) -> Option<Callback> {
        let nanos = now.since(self.started).as_nanos().max(1);
        self.duration_ns.store(u64::try_from(nanos).unwrap_or(u64::MAX), Ordering::Relaxed);
        if let Some(phases) = &self.phases {
            phases.end(now, error.is_some());
        }
        let state = if error.is_some() { FAILED } else { DONE };
        if let Some(error) = error {
            let _ = self.error.set(error);
        }
        // Release: the outputs and the error were written before.
        self.state.store(state, Ordering::Release);
        self.observer.ended(self.error.get())
    }

    /// How the call ended, or `None` while it runs.
    pub fn outcome(&self) -> Option<Waited> {
        match self.state.load(Ordering::Acquire) {
            RUNNING => None,
            DONE => Some(Waited::Done),
            _ => {
                let error = self.error();
                Some(Waited::Failed(error.unwrap_or_else(|| Error::internal("a call failed without a cause"))))
            }
        }
    }
}
