//! Election of the thread that drives: one of the waiting threads, or the background thread when no thread waits.
//!
//! One thread, the *driver*, parks in the poller, while others sleep on their calls. When the driver leaves, it elects
//! a sleeper, or the background thread if there is work. So no thread sleeps without a driver. Owns that protocol and
//! its lock. The [`Host`] defines a pass and a sleep in the poller: `driver` implements it, and in tests a model that
//! loom runs in every interleaving. Read [`Election::wait`] first.

#[cfg(all(test, accl_loom))]
mod loom_tests;

use std::sync::Arc;
use std::time::Duration;

use accl_types::Moment;

use crate::in_flight::{InFlight, Notifier};
use crate::sync::{Condvar, Mutex};
use accl_executor::call::Waited;

/// One stay of a thread in a wait, or the background thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Waiter(pub(crate) u64);

/// The background thread; no stay has this number.
pub(crate) const BACKGROUND: Waiter = Waiter(0);

/// How long the background thread of an ending engine waits before it checks again whether another driver has left.
const RECHECK: Duration = Duration::from_millis(10);

/// The operations that the election needs from its environment.
pub(crate) trait Host {
    /// Sleeps in the poller once, with a pass before and after. Does not sleep if something has moved, the call has
    /// completed, or nothing is left to wait for. Only the driver calls this.
    fn park(&self, call: Option<&InFlight>, until: Option<Moment>);

    /// Returns whether a call is in flight or something remains to be sent.
    fn has_work(&self) -> bool;

    /// Returns whether failed calls wait for external operations to stop. That wait is bounded.
    fn has_stopping(&self) -> bool {
        false
    }

    /// Wakes the driver so that it checks everything again.
    fn wake(&self);

    /// Starts the background thread, which calls [`Election::background_turn`]. Returns `false` if the system has no
    /// thread.
    fn start_background(&self) -> bool;

    fn now(&self) -> Moment;
}

/// How a turn of the background thread ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stint {
    /// Another thread drives, or there is nothing to do.
    Over,
    /// The engine ends.
    Last,
}

/// The current driver and the threads that could become it.
#[derive(Default)]
pub(crate) struct Election {
    state: Mutex<State>,
    background: Condvar,
}

#[derive(Default)]
struct State {
    /// The thread that is parked in the poller, or about to be.
    driver: Option<Waiter>,
    /// The threads that sleep on a call, oldest first, each with the notifier that wakes it.
    sleepers: Vec<(Waiter, Arc<Notifier>)>,
    background_started: bool,
    /// The background thread is asked to drive.
    background_wanted: bool,
    background_stopped: bool,
    stopping: bool,
}

impl State {
    /// Wakes the oldest sleeper to drive.
    fn elect(&self) {
        if let Some((_, notifier)) = self.sleepers.first() {
            notifier.notify();
        }
    }
}

impl Election {
    /// Waits until the call completes or releases its waiters, as the driver or asleep. Calls `turn` before each sleep: it returns how long the
    /// sleep may last, or the outcome of a wait that ends before the call does. The caller must call
    /// [`Election::leave`] afterwards.
    pub(crate) fn wait(
        &self,
        me: Waiter,
        call: &InFlight,
        host: &impl Host,
        mut turn: impl FnMut() -> Result<Option<Moment>, Waited>,
    ) -> Waited {
        loop {
            if let Some(outcome) = call.released() {
                return outcome;
            }
            let until = match turn() {
                Ok(until) => until,
                Err(waited) => return waited,
            };
            if self.take_turn(me, call) {
                host.park(Some(call), until);
            } else {
                call.sleep(until.map(|until| until.since(host.now())));
            }
        }
    }

    /// Makes a waiter the driver (`true`), or puts it on the list of sleepers (`false`).
    fn take_turn(&self, me: Waiter, call: &InFlight) -> bool {
        let mut state = self.state.lock();
        if state.driver.is_some_and(|driver| driver != me) {
            if !state.sleepers.iter().any(|(waiter, _)| *waiter == me) {
                state.sleepers.push((me, call.notifier()));
            }
            return false;
        }
        state.driver = Some(me);
        state.sleepers.retain(|(waiter, _)| *waiter != me);
        true
    }

    /// Ends a waiter's part in the election; another thread drives if needed.
    pub(crate) fn leave(&self, me: Waiter, host: &impl Host) {
        {
            let mut state = self.state.lock();
            state.sleepers.retain(|(waiter, _)| *waiter != me);
            if state.driver.is_some_and(|driver| driver != me) {
                return;
            }
            // Also if there is no driver: this waiter may have been elected and have ended before it took its turn.
            state.driver = None;
            state.elect();
        }
        if host.has_work() {
            self.ensure_driver(host);
        }
    }

    /// Takes a waiter out of the election while it does something else.
    pub(crate) fn stand_aside(&self, me: Waiter, host: &impl Host) {
        let takes_part = {
            let state = self.state.lock();
            state.driver == Some(me) || state.sleepers.iter().any(|(waiter, _)| *waiter == me)
        };
        if takes_part {
            self.leave(me, host);
        }
    }

    /// Ensures that some thread makes progress while no thread waits.
    pub(crate) fn ensure_driver(&self, host: &impl Host) {
        {
            let mut state = self.state.lock();
            if state.driver.is_some() || state.stopping {
                return;
            }
            if !state.sleepers.is_empty() {
                state.elect();
                return;
            }
            state.background_wanted = true;
            if state.background_started {
                self.background.notify_all();
                return;
            }
            state.background_started = true;
        }
        if !host.start_background() {
            self.state.lock().background_started = false;
        }
    }

    /// Starts the background thread before it is needed. Returns `false` if the system has no thread.
    pub(crate) fn start_background(&self, host: &impl Host) -> bool {
        if std::mem::replace(&mut self.state.lock().background_started, true) {
            return true;
        }
        let is_started = host.start_background();
        self.state.lock().background_started = is_started;
        is_started
    }

    /// Follows another thread's pass. The driver must not sleep on if its own call may have completed, or if it `must`
    /// check again.
    pub(crate) fn wake_driver_if(&self, must: bool, host: &impl Host) {
        // Takes the lock even if a third thread holds it. Skipping the wake-up would leave a parked driver asleep until
        // its tick.
        let state = self.state.lock();
        // The background thread waits for no call of its own.
        if state.driver.is_some_and(|driver| must || driver != BACKGROUND) {
            drop(state);
            host.wake();
        }
    }

    // ---- the background thread

    /// Waits until the background thread is needed, then drives until it is not.
    pub(crate) fn background_turn(&self, host: &impl Host) -> Stint {
        {
            let mut state = self.state.lock();
            while !state.stopping && (state.driver.is_some() || !state.background_wanted) {
                self.background.wait(&mut state);
            }
            if state.stopping {
                drop(state);
                self.await_stopping(host);
                self.state.lock().background_stopped = true;
                self.background.notify_all();
                return Stint::Last;
            }
            state.driver = Some(BACKGROUND);
        }
        loop {
            host.park(None, None);
            let has_work = host.has_work();
            let mut state = self.state.lock();
            if !has_work || state.stopping || !state.sleepers.is_empty() {
                state.driver = None;
                state.background_wanted = false;
                state.elect();
                break;
            }
        }
        // A call that was issued in between found a driver and relied on it.
        if host.has_work() {
            let mut state = self.state.lock();
            if state.driver.is_none() && state.sleepers.is_empty() {
                state.background_wanted = true;
            }
        }
        Stint::Over
    }

    /// Drives while the engine ends. Memory that an external operation uses is kept until the operation has stopped or
    /// is abandoned.
    fn await_stopping(&self, host: &impl Host) {
        while host.has_stopping() {
            let mut state = self.state.lock();
            if state.driver.is_some() {
                self.background.wait_for(&mut state, RECHECK);
                continue;
            }
            state.driver = Some(BACKGROUND);
            drop(state);
            host.park(None, None);
            let mut state = self.state.lock();
            state.driver = None;
            state.elect();
        }
    }

    /// Follows a panic in the background thread: another thread drives.
    pub(crate) fn depose_background(&self) {
        let mut state = self.state.lock();
        if state.driver == Some(BACKGROUND) {
            state.driver = None;
            state.elect();
        }
    }

    /// Asks the background thread to end.
    pub(crate) fn stop_background(&self, host: &impl Host) {
        self.state.lock().stopping = true;
        self.background.notify_all();
        host.wake();
    }

    /// Waits until the background thread has ended, for `patience` at the longest.
    pub(crate) fn await_background(&self, patience: Duration) {
        let mut state = self.state.lock();
        if state.background_started {
            let running = |state: &mut State| !state.background_stopped;
            self.background.wait_while_for(&mut state, running, patience);
        }
    }
}
