//! State of a call in flight: whether it has completed, its result, and the observer that is notified.
//!
//! This module owns the state word and the values that depend on it. It does not know the engine. `exec` does the work
//! of the call; the [`CallObserver`] that is passed in wakes waiting threads. Read [`CallState`] first.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use accl_types::{Collective, Error, Moment, Rank, Seq};
use smallvec::SmallVec;

use super::phases::Phases;
use super::waits::Waits;

const RUNNING: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;
const NO_SOURCE: u32 = u32::MAX;

/// Function that runs when a call has completed.
pub type Callback = Box<dyn FnOnce() + Send>;

/// Callbacks of one call. Most calls have none.
pub type Callbacks = SmallVec<[Callback; 1]>;

/// Result of a wait.
#[derive(Clone, Debug, PartialEq)]
pub enum Waited {
    /// The call succeeded: its outputs are written.
    Done,
    /// The call failed, and no thread accesses its tensors any more.
    Failed(Error),
    /// The timeout of the wait itself passed; the call continues.
    TimedOut(Error),
    /// The interrupt hook asked the wait to stop; the call continues.
    Interrupted,
}

/// Observer that is notified when a call completes.
pub trait CallObserver: Send + Sync {
    /// Called once when the call has completed: from then on, [`CallState::is_done`] returns `true`. `error` is set if
    /// the call failed. Runs under the driver's lock, so it must neither block nor call the engine. Returns functions
    /// to run after the lock is released.
    fn ended(&self, error: Option<&Error>) -> Callbacks;
}

/// A call in flight, shared between the caller's handle and the code that executes it.
pub struct CallState {
    info: CallInfo,
    started: Moment,
    state: AtomicU8,
    /// Error of a failed call, written before the state changes to failed.
    error: OnceLock<Error>,
    source: AtomicU32,
    /// The `note` word that came with the received message.
    note: AtomicU64,
    duration_ns: AtomicU64,
    observer: Arc<dyn CallObserver>,
}

/// Identity and options of a call.
pub struct CallInfo {
    /// Number of the call's group.
    pub group_id: u64,
    /// Name of the call's group.
    pub group: Arc<str>,
    /// This process's rank in the group.
    pub rank: Rank,
    /// Collective or point-to-point operation.
    pub collective: Collective,
    /// Sequence number of the call in its group.
    pub seq: u64,
    /// Whether the caller continues and waits later, or never.
    pub is_async: bool,
    /// Whether other lanes do parts of the call.
    pub is_cut: bool,
    /// Whether [`CallState::duration`] returns the duration of the call.
    pub is_timed: bool,
    /// Phase timing of the call, if the caller requested it.
    pub phases: Option<Arc<Phases>>,
    /// Wait counters of the group.
    pub waits: Arc<Waits>,
}

impl std::ops::Deref for CallState {
    type Target = CallInfo;

    fn deref(&self) -> &CallInfo {
        &self.info
    }
}

impl CallState {
    /// Creates the state of a call that started at `now`.
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

    /// Returns whether the call has succeeded or failed. Neither blocks nor makes progress.
    pub fn is_done(&self) -> bool {
        // Acquire: a thread that sees the completion also sees the outputs.
        self.state.load(Ordering::Acquire) != RUNNING
    }

    /// Returns when the call was submitted.
    #[inline]
    pub fn started(&self) -> Moment {
        self.started
    }

    /// Returns the error of a failed call.
    pub fn error(&self) -> Option<Error> {
        self.error.get().cloned()
    }

    /// Returns the rank that sent the received data, or `None` while it is unknown.
    pub fn source_rank(&self) -> Option<Rank> {
        Some(self.source.load(Ordering::Relaxed)).filter(|&source| source != NO_SOURCE).map(Rank)
    }

    /// Returns the time from submission to completion; `None` while the call runs or if timing is off.
    pub fn duration(&self) -> Option<Duration> {
        let nanos = self.duration_ns.load(Ordering::Relaxed);
        (self.is_timed && nanos > 0).then(|| Duration::from_nanos(nanos))
    }

    /// Returns the time from submission to completion; zero while the call runs.
    pub fn elapsed(&self) -> Duration {
        Duration::from_nanos(self.duration_ns.load(Ordering::Relaxed))
    }

    /// Adds collective, sequence number, group and rank of this call to `error`.
    pub fn in_context(&self, error: Error) -> Error {
        error.in_call(self.collective, Seq(self.seq)).in_group(&self.group).on_rank(self.rank)
    }

    pub(crate) fn set_source(&self, source: Rank, note: u64) {
        self.source.store(source.0, Ordering::Relaxed);
        self.note.store(note, Ordering::Relaxed);
    }

    /// Returns the `note` word that came with the message that this call received.
    pub fn note(&self) -> u64 {
        self.note.load(Ordering::Relaxed)
    }

    /// Completes the call. The code that executes the call invokes this once. From then on, only the caller accesses
    /// the call's tensors. Returns the callbacks to run.
    #[must_use]
    pub fn finish(&self, now: Moment, error: Option<Error>) -> Callbacks {
        let nanos = now.since(self.started).as_nanos().max(1);
        self.duration_ns.store(u64::try_from(nanos).unwrap_or(u64::MAX), Ordering::Relaxed);
        if let Some(phases) = &self.phases {
            phases.end(now, error.is_some());
        }
        let state = if error.is_some() { FAILED } else { DONE };
        if let Some(error) = error {
            let _ = self.error.set(error);
        }
        // Release: a thread that sees this state also sees the outputs and the error, which were written before.
        self.state.store(state, Ordering::Release);
        self.observer.ended(self.error.get())
    }

    /// Returns the result of the call, or `None` while it runs.
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
