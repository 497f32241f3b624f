//! The sleep of a driver, and the threads that poll the links in its place.
//!
//! Owns the work before, during and after a sleep: arming links, and polling them once more. `driver_sleep` has the
//! protocol, and the engine has the thread and the poller. Read [`Core::park`] first.

use accl_types::{Moment, Result};

use super::core::Core;
use super::driver_sleep::{WakeDecision, Watch};
use crate::call::CallState;

/// Maximum number of polls of the links before a sleeping driver is woken to poll by itself.
const ROUNDS_BEFORE_WAKE: u32 = 4;

impl Core {
    /// Prepares the sleep of a driver until news arrive, at most until `until`. `call` is the call for which the driver
    /// waits, if any. Does everything that can be done before the sleep. Returns until when to sleep ([`Moment::FAR`]:
    /// until an event); then [`Core::unpark`] must follow. Returns `None` if there was progress, or nothing is left to
    /// wait for. Without `ticks`, unresponsive hosts are not checked.
    ///
    /// # Errors
    /// Returns the error of [`Core::guarded`] after a panic: every call has failed.
    pub fn park(
        &mut self,
        call: Option<&CallState>,
        until: Option<Moment>,
        ticks: bool,
        now: Moment,
    ) -> Result<Option<Moment>> {
        self.guarded(|core| {
            // While a large message arrives, more of it is usually available. Asking for it costs less than sleeping
            // until the system announces it.
            if core.idle == 0
                && let Some(call) = call
            {
                core.streams_of(call).into_iter().for_each(|peer| core.net.force_poll_if_flowing(peer));
            }
            if core.pass(now) || core.pass_whole(now) {
                return None;
            }
            core.check(now);
            if call.is_some_and(CallState::is_done) || (call.is_none() && !core.has_work()) {
                return None;
            }
            // All work that needs no peer is done. What remains waits for frames or for room.
            if core.net.prepare_park() {
                core.net.unpark();
                return None;
            }
            let silence = core.next_silence_check(now).filter(|_| ticks);
            let poll = core.net.poll_interval().map(|interval| now + interval);
            let deadline = core.next_deadline();
            let until = until.into_iter().chain(deadline).chain(silence).chain(poll).min().unwrap_or(Moment::FAR);
            core.driver_sleep.sleep(until);
            Some(until)
        })
    }

    /// Ends the sleep of the driver.
    pub fn unpark(&mut self, now: Moment) {
        self.driver_sleep.wake();
        // After a panic every call has failed, and each waiting thread finds its own call failed.
        let _ = self.guarded(|core| {
            core.net.unpark();
            core.pass(now);
            core.check(now);
        });
    }

    /// Announces that a thread starts to poll the links in a loop. Returns `true` if a driver sleeps meanwhile. Peers
    /// then need not wake the driver, and [`Core::unwatch`] must follow.
    #[inline]
    pub fn watch(&mut self) -> bool {
        let is_parked = self.driver_sleep.is_asleep();
        if is_parked {
            self.watch_for_the_driver();
        }
        is_parked
    }

    #[cold]
    fn watch_for_the_driver(&mut self) {
        if self.driver_sleep.begin_watch() == Watch::First {
            self.net.mute();
        }
    }

    /// Ends a [`Core::watch`]. All calls that have taken their sequence number must have started, because frames are
    /// handled here.
    pub fn unwatch(&mut self, now: Moment) -> WakeDecision {
        let decision = if self.driver_sleep.has_last_watcher() {
            self.guarded(|core| core.resume_parked(now)).unwrap_or(WakeDecision::Wake)
        } else {
            WakeDecision::KeepAsleep
        };
        self.driver_sleep.end_watch();
        match decision {
            // The progress may have completed the driver's call, or brought an earlier deadline.
            WakeDecision::KeepAsleep | WakeDecision::CheckCall if self.take_driver_unnotified() => {
                if self.must_wake_driver(self.next_deadline()) { WakeDecision::Wake } else { WakeDecision::CheckCall }
            }
            decision => decision,
        }
    }

    /// Lets peers wake a sleeping driver again.
    fn resume_parked(&mut self, now: Moment) -> WakeDecision {
        let mut decision = WakeDecision::KeepAsleep;
        for _ in 0..ROUNDS_BEFORE_WAKE {
            if !self.net.prepare_park() {
                return decision;
            }
            // Usually, a fast peer has begun the next call.
            self.net.mute();
            let departures = self.net.departures();
            self.pass_whole(now);
            if self.net.departures() != departures {
                return WakeDecision::Wake;
            }
            decision = WakeDecision::CheckCall;
        }
        WakeDecision::Wake
    }

    /// Returns whether a driver sleeps in the poller.
    pub fn is_parked(&self) -> bool {
        self.driver_sleep.is_asleep()
    }

    /// Returns, and clears, whether progress was made while the driver sleeps, of which it was not notified. Its call
    /// may be done, so the caller must wake it.
    #[inline]
    pub fn take_driver_unnotified(&mut self) -> bool {
        self.driver_sleep.take_news()
    }

    /// Returns whether the sleeping driver must poll again: a call has an earlier deadline, or something may happen
    /// that wakes no thread. Links polled by a watching thread are armed when that thread stops.
    pub fn must_wake_driver(&self, deadline: Option<Moment>) -> bool {
        self.driver_sleep.must_wake(deadline, || self.net.is_unarmed())
    }
}
