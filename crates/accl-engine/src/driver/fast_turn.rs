//! One turn of a caller on the fast path: the driver's lock, and what is due when the turn ends.
//!
//! Owns how long such a call polls, the watch in place of a sleeping driver, and polls that are due. The call's steps
//! are in accl-executor. Read [`Driver::fast_turn`] first.

use std::time::Duration;

use accl_executor::call::CallDesc;
use accl_executor::exec::SpinLimit;
use accl_executor::group::{Core, FastStart};
use accl_types::Moment;

use super::{Driver, Locked};
use crate::events;
use crate::sync::MutexGuard;
use crate::time;

/// Number of polls of a call on the fast path when every rank has a core of its own: a few microseconds.
const SPINS: u32 = 300;
/// The same when ranks share cores: polls before each yield, which are far cheaper than a pass, and number of yields.
const SPINS_SHARED: u32 = 20;
const YIELDS: u32 = 8;

/// A caller's turn. The driver's lock is held until [`FastTurn::end`].
#[must_use]
pub(crate) struct FastTurn<'a> {
    driver: &'a Driver,
    core: MutexGuard<'a, Core>,
    /// Whether this thread polls in place of a sleeping driver.
    is_watch: bool,
    /// Start of the turn, if a log or profile follows calls.
    begin: Option<Moment>,
}

impl Driver {
    /// Begins a turn. Returns `None` in a forked child, where the lock may be held for ever.
    #[inline]
    pub(crate) fn fast_turn(&self) -> Option<FastTurn<'_>> {
        if self.is_forked() {
            return None;
        }
        let begin = events::follows_calls().then(time::now);
        let mut core = self.core.lock();
        let is_watch = core.watch();
        Some(FastTurn { driver: self, core, is_watch, begin })
    }

    /// Returns how long a call on the fast path polls for a frame. The time is short because the call holds the lock.
    #[inline]
    fn spin_limit(&self) -> SpinLimit {
        let (spins, yields) = match self.spin {
            Some(spin) if spin.is_zero() => (0, 0),
            _ if self.shares_cores() => (SPINS_SHARED, YIELDS),
            _ => (SPINS, 0),
        };
        SpinLimit { spins, yields, yield_now: std::thread::yield_now }
    }

    /// Releases the lock as dropping a [`Locked`] does.
    #[inline]
    fn unlock(&self, core: MutexGuard<'_, Core>) {
        if core.has_deferred() {
            drop(Locked { core: Some(core), driver: self });
        }
    }
}

impl FastTurn<'_> {
    /// Starts a call on the fast path: see [`Core::start_fast`].
    #[inline]
    pub(crate) fn start(&mut self, group: u64, desc: &CallDesc) -> Option<FastStart> {
        self.core.start_fast(group, desc, self.driver.spin_limit())
    }

    /// Returns the core, for a call that continues in flight.
    pub(crate) fn core(&mut self) -> &mut Core {
        &mut self.core
    }

    /// Ends the turn. Returns its time, if a log or profile follows calls.
    #[inline]
    pub(crate) fn end(mut self) -> Option<Duration> {
        let poll_due = self.core.take_poll_due();
        if poll_due || self.is_watch {
            return self.end_with_poll(poll_due);
        }
        let Self { driver, core, begin, .. } = self;
        driver.unlock(core);
        begin.map(|begin| time::now().since(begin))
    }

    #[cold]
    fn end_with_poll(self, poll_due: bool) -> Option<Duration> {
        let Self { driver, mut core, is_watch, begin } = self;
        if poll_due {
            driver.poll(&core);
            core.pass_whole(time::now());
        }
        let decision = is_watch.then(|| core.unwatch(time::now()));
        driver.unlock(core);
        if let Some(decision) = decision {
            driver.apply_wake(decision);
        }
        begin.map(|begin| time::now().since(begin))
    }
}
