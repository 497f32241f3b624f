//! A call in flight as the threads of this process see it: which threads sleep until it completes, and which callback
//! runs then.
//!
//! Owns the lock that the sleepers of a call share. The call's state is in `call::state`; `election` decides which
//! thread makes progress meanwhile. Read [`InFlight`] first.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use accl_types::Error;

use crate::offload::Offload;
use crate::sync::{Condvar, Mutex};
use accl_executor::call::{CallObserver, CallState, Callback, Callbacks, Enqueued, Waited};

/// A call in flight, and the means to wake the threads that wait for it.
#[derive(Clone)]
pub struct InFlight {
    state: Arc<CallState>,
    notifier: Arc<Notifier>,
    /// Whether the call's parts were left to the thread that waits for it.
    pub is_left_to_waiter: bool,
    /// The component that executes the call, if it needs the help of waiting threads.
    pub helped: Option<Arc<dyn Offload>>,
    /// Set when a staged call releases its waiters, before it completes.
    enqueued: Option<Arc<dyn Enqueued>>,
}

/// Wakes the threads that sleep on a call.
#[derive(Default)]
pub struct Notifier {
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Default)]
struct Inner {
    callback: Option<Callback>,
    /// Runs when the call completes, which may be later.
    end_callback: Option<Callback>,
    /// Set when the waiters must check whether they are elected to drive.
    notified: bool,
}

/// Step of a call that releases its waiters.
pub enum Release {
    /// The callback is to be run. Waiting threads do not continue before this.
    Callback(Callback),
    /// Waiting threads continue: the thread that makes progress may be one of them.
    Wake,
}

/// Result of offering a callback to a call.
pub enum Kept {
    /// The callback runs when the call completes or releases its waiters.
    ForTheEnd,
    /// The call has completed or released its waiters: the caller must run the callback at once.
    Ended(Callback),
    /// The call already has a callback.
    Refused,
}

impl Notifier {
    /// Wakes the threads that sleep in [`InFlight::sleep`].
    pub fn notify(&self) {
        self.inner.lock().notified = true;
        self.changed.notify_all();
    }
}

impl CallObserver for Notifier {
    fn ended(&self, _: Option<&Error>) -> Callbacks {
        // The state was written before. A thread that takes the lock after this sees the state. A thread that held the
        // lock before sleeps now, or has left its callback.
        let mut inner = self.inner.lock();
        self.changed.notify_all();
        let Inner { callback, end_callback, .. } = &mut *inner;
        callback.take().into_iter().chain(end_callback.take()).collect()
    }
}

impl InFlight {
    /// Wraps a call that was started with this notifier as its observer.
    pub fn new(state: Arc<CallState>, notifier: Arc<Notifier>) -> Self {
        Self { state, notifier, is_left_to_waiter: false, helped: None, enqueued: None }
    }

    /// Makes the call release its waiters when `enqueued` is set, if it has not completed by then. Then `act` is called
    /// for each step.
    pub fn release_when(&mut self, enqueued: Arc<dyn Enqueued>, act: impl Fn(Release) + Send + 'static) {
        self.enqueued = Some(enqueued.clone());
        let notifier = self.notifier.clone();
        enqueued.notify_with(Box::new(move |is_set| {
            if is_set {
                notifier.notify();
                act(Release::Wake);
            } else if let Some(callback) = { notifier.inner.lock().callback.take() } {
                act(Release::Callback(callback));
            }
        }));
    }

    /// Returns the result of a wait; `None` while threads must wait for the call.
    #[inline]
    pub fn released(&self) -> Option<Waited> {
        self.state.outcome().or_else(|| self.has_enqueued().then_some(Waited::Done))
    }

    fn has_enqueued(&self) -> bool {
        self.enqueued.as_ref().is_some_and(|enqueued| enqueued.is_set())
    }

    /// Keeps a callback until the call completes or releases its waiters, unless the call already has one.
    pub fn keep_callback(&self, callback: Callback) -> Kept {
        self.keep(callback, || self.state.is_done() || self.has_enqueued(), |inner| &mut inner.callback)
    }

    /// Keeps a callback until the call completes, unless the call already has one of this kind.
    pub fn keep_end_callback(&self, callback: Callback) -> Kept {
        self.keep(callback, || self.state.is_done(), |inner| &mut inner.end_callback)
    }

    fn keep(
        &self,
        callback: Callback,
        has_come: impl Fn() -> bool,
        slot: impl Fn(&mut Inner) -> &mut Option<Callback>,
    ) -> Kept {
        let mut inner = self.notifier.inner.lock();
        if has_come() {
            return Kept::Ended(callback);
        }
        if slot(&mut inner).is_some() {
            // Unlocked first: the values that the caller's closure owns must not be dropped under the lock.
            drop(inner);
            return Kept::Refused;
        }
        *slot(&mut inner) = Some(callback);
        Kept::ForTheEnd
    }

    /// Sleeps until the call completes or releases its waiters, or its notifier is notified, for `at_most` at the
    /// longest; `None` means no limit.
    pub fn sleep(&self, at_most: Option<Duration>) {
        let mut inner = self.notifier.inner.lock();
        if !inner.notified && !self.state.is_done() && !self.has_enqueued() {
            match at_most {
                Some(at_most) => drop(self.notifier.changed.wait_for(&mut inner, at_most)),
                None => self.notifier.changed.wait(&mut inner),
            }
        }
        inner.notified = false;
    }

    /// Returns the notifier, which wakes this call's sleepers without the call itself.
    pub fn notifier(&self) -> Arc<Notifier> {
        self.notifier.clone()
    }
}

impl Deref for InFlight {
    type Target = CallState;

    fn deref(&self) -> &CallState {
        &self.state
    }
}
