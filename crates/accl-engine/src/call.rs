//! A call in flight as its caller sees it: state, error, waiting, completion.
//!
//! Owns the state word and what hangs on it; the work itself is in `run` and `p2p`, waiting in `drive`.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use accl_types::{Collective, Error, Rank, Result, Seq};

use crate::engine::Engine;
use crate::sync::{Condvar, Mutex};

const RUNNING: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;
const NO_SOURCE: u32 = u32::MAX;

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

/// A call in flight. Shared between the caller and the engine; dropping it does not cancel the call.
pub struct Call {
    pub(crate) engine: Weak<Engine>,
    pub(crate) group_id: u64,
    pub(crate) group: Arc<str>,
    pub(crate) rank: Rank,
    pub(crate) collective: Collective,
    pub(crate) seq: u64,
    pub(crate) started: Instant,
    /// Whether its caller went on and waits later, or never.
    pub(crate) is_async: bool,
    timed: bool,
    state: AtomicU8,
    source: AtomicU32,
    /// The word that came with a message.
    note: AtomicU64,
    duration_ns: AtomicU64,
    bell: Arc<Bell>,
}

/// What sleepers on a call wait for.
#[derive(Default)]
pub(crate) struct Bell {
    inner: Mutex<Inner>,
    changed: Condvar,
}

impl Bell {
    /// Wakes whoever sleeps in [`Call::sleep_until`].
    pub(crate) fn nudge(&self) {
        self.inner.lock().nudged = true;
        self.changed.notify_all();
    }
}

#[derive(Default)]
struct Inner {
    error: Option<Error>,
    callback: Option<Box<dyn FnOnce() + Send>>,
    /// Somebody asks the waiters to look whether the turn to drive is theirs.
    nudged: bool,
}

/// What identifies a call; the engine fills it in at submission.
pub(crate) struct CallPlace {
    pub engine: Weak<Engine>,
    pub group_id: u64,
    pub group: Arc<str>,
    pub rank: Rank,
    pub collective: Collective,
    pub seq: u64,
    pub is_async: bool,
    pub timed: bool,
}

impl Call {
    pub(crate) fn new(place: CallPlace, now: Instant) -> Arc<Self> {
        Arc::new(Self {
            engine: place.engine,
            group_id: place.group_id,
            group: place.group,
            rank: place.rank,
            collective: place.collective,
            seq: place.seq,
            started: now,
            is_async: place.is_async,
            timed: place.timed,
            state: AtomicU8::new(RUNNING),
            source: AtomicU32::new(NO_SOURCE),
            note: AtomicU64::new(0),
            duration_ns: AtomicU64::new(0),
            bell: Arc::default(),
        })
    }

    /// Whether the call is done or failed. Neither blocks nor makes progress.
    pub fn is_done(&self) -> bool {
        // Acquire: whoever sees the end also sees the outputs.
        self.state.load(Ordering::Acquire) != RUNNING
    }

    /// Makes one pass of progress, then says whether the call is done or failed.
    pub fn test(&self) -> bool {
        if !self.is_done()
            && let Some(engine) = self.engine.upgrade()
            && !engine.is_forked()
        {
            engine.try_pass();
        }
        self.is_done()
    }

    /// Waits until the call is done, failed, `timeout` passed or `interrupt` returned true.
    ///
    /// `interrupt` is called on this thread about every 50 ms while it waits, and when a signal arrived.
    pub fn wait(&self, timeout: Option<Duration>, interrupt: &mut dyn FnMut() -> bool) -> Waited {
        match self.engine.upgrade() {
            Some(engine) => engine.wait(self, timeout, interrupt),
            None => {
                self.outcome().unwrap_or_else(|| Waited::Failed(self.placed(Error::aborted("the engine has ended"))))
            }
        }
    }

    /// The error of a failed call.
    pub fn error(&self) -> Option<Error> {
        self.bell.inner.lock().error.clone()
    }

    /// The call's number in its group.
    pub fn seq(&self) -> u64 {
        self.seq
    }

    /// Where a receive's data came from, once that is known.
    pub fn source_rank(&self) -> Option<u32> {
        Some(self.source.load(Ordering::Relaxed)).filter(|&source| source != NO_SOURCE)
    }

    /// From submission to the last byte; `None` while it runs or when timing is off.
    pub fn duration(&self) -> Option<Duration> {
        let nanos = self.duration_ns.load(Ordering::Relaxed);
        (self.timed && nanos > 0).then(|| Duration::from_nanos(nanos))
    }

    /// Runs `f` on a completion thread once the call is done or failed; at once if it is. One per call.
    ///
    /// # Errors
    /// `Exhausted` when the system has no thread for it; `Aborted` when the engine has ended.
    pub fn when_done(&self, f: Box<dyn FnOnce() + Send>) -> Result<()> {
        let ended = || Error::aborted("the engine has ended");
        let engine = self.engine.upgrade().ok_or_else(ended)?;
        engine.completions().expect()?;
        let mut inner = self.bell.inner.lock();
        if !self.is_done() {
            inner.callback = Some(f);
            return Ok(());
        }
        drop(inner);
        engine.completions().post(f);
        Ok(())
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

    /// Ends the call. Called once, by whoever holds the engine's lock; from here on the engine does not touch the
    /// call's tensors. Returns the callback to be posted.
    #[must_use]
    pub(crate) fn finish(&self, now: Instant, error: Option<Error>) -> Option<Box<dyn FnOnce() + Send>> {
        let nanos = now.saturating_duration_since(self.started).as_nanos().max(1);
        self.duration_ns.store(u64::try_from(nanos).unwrap_or(u64::MAX), Ordering::Relaxed);
        let mut inner = self.bell.inner.lock();
        let state = if error.is_some() { FAILED } else { DONE };
        inner.error = error;
        // Release: the outputs were written before. Under the lock, so that `when_done` cannot miss it.
        self.state.store(state, Ordering::Release);
        self.bell.changed.notify_all();
        inner.callback.take()
    }

    /// How the call ended, or `None` while it runs.
    pub(crate) fn outcome(&self) -> Option<Waited> {
        match self.state.load(Ordering::Acquire) {
            RUNNING => None,
            DONE => Some(Waited::Done),
            _ => {
                let error = self.bell.inner.lock().error.clone();
                Some(Waited::Failed(error.unwrap_or_else(|| Error::internal("a call failed without a cause"))))
            }
        }
    }

    /// Sleeps until the call ends, someone nudges, or `until`.
    pub(crate) fn sleep_until(&self, until: Option<Instant>) {
        let mut inner = self.bell.inner.lock();
        if !inner.nudged && !self.is_done() {
            match until {
                Some(until) => drop(self.bell.changed.wait_until(&mut inner, until)),
                None => self.bell.changed.wait(&mut inner),
            }
        }
        inner.nudged = false;
    }

    /// For waking this call's sleepers without the call.
    pub(crate) fn bell(&self) -> Arc<Bell> {
        self.bell.clone()
    }
}
