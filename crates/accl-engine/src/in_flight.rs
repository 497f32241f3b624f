//! A call in flight as threads of this process see it: who sleeps until its end, and what is run then.
//!
//! Owns the lock that sleepers of a call share. What the call's state is, is the matter of `call::state`; who makes progress meanwhile
//! that of `election`. Read [`InFlight`] first.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use accl_types::Error;

use crate::sidestep::Worker;
use crate::sync::{Condvar, Mutex};
use accl_executor::call::{CallObserver, CallState, Callback};

/// A call in flight and the way to wake who waits for it.
#[derive(Clone)]
pub(crate) struct InFlight {
    state: Arc<CallState>,
    notifier: Arc<Notifier>,
    /// Its parts were left to who waits for it.
    pub(crate) is_left_to_waiter: bool,
    /// Who has a library do it as a whole, once all ranks have made it.
    pub(crate) worker: Option<Arc<Worker>>,
}

/// What sleepers on a call wait for.
#[derive(Default)]
pub(crate) struct Notifier {
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Default)]
struct Inner {
    callback: Option<Callback>,
    /// Somebody asks the waiters to look whether they are elected to drive.
    notified: bool,
}

/// What became of a callback.
pub(crate) enum Kept {
    /// It is run when the call ends.
    ForTheEnd,
    /// The call has ended: it is to be run at once.
    Ended(Callback),
    /// The call has one.
    Refused,
}

impl Notifier {
    /// Wakes whoever sleeps in [`InFlight::sleep`].
    pub(crate) fn notify(&self) {
        self.inner.lock().notified = true;
        self.changed.notify_all();
    }
}

impl CallObserver for Notifier {
    fn ended(&self, _: Option<&Error>) -> Option<Callback> {
        // The state was written before: whoever has the lock after this sees it, and whoever had it before sleeps or has left a callback.
        let mut inner = self.inner.lock();
        self.changed.notify_all();
        inner.callback.take()
    }
}

impl InFlight {
    /// A call that was started with this notifier as its observer.
    pub(crate) fn new(state: Arc<CallState>, notifier: Arc<Notifier>) -> Self {
        Self { state, notifier, is_left_to_waiter: false, worker: None }
    }

    /// Keeps a callback for the end, if there is none.
    pub(crate) fn keep_callback(&self, callback: Callback) -> Kept {
        let mut inner = self.notifier.inner.lock();
        if self.state.is_done() {
            return Kept::Ended(callback);
        }
        if inner.callback.is_some() {
            // What the caller's closure owns is dropped without the lock.
            drop(inner);
            return Kept::Refused;
        }
        inner.callback = Some(callback);
        Kept::ForTheEnd
    }

    /// Sleeps until the call ends or somebody notifies, at most for so long.
    pub(crate) fn sleep(&self, at_most: Option<Duration>) {
        let mut inner = self.notifier.inner.lock();
        if !inner.notified && !self.state.is_done() {
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

impl Deref for InFlight {
    type Target = CallState;

    fn deref(&self) -> &CallState {
        &self.state
    }
}
