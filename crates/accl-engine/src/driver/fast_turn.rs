//! One turn of a caller on the fast path: the driver's lock, and what is due when the turn ends.
//!
//! Owns how long such a call polls, the watch in place of a sleeping driver, and polls that are due. The call's steps
//! are in accl-executor. Read [`Driver::start_fast`] first.

use std::time::Duration;

use accl_executor::call::CallDesc;
use accl_executor::exec::SpinLimit;
use accl_executor::group::{Core, FastStart, Stopped};
use accl_types::{Error, Moment};

use super::{Driver, Locked};
use crate::events;
use crate::sync::MutexGuard;
use crate::time;

/// Number of polls of a call on the fast path when every rank has a core of its own: a few microseconds.
const SPINS: u32 = 300;
/// The same when ranks share cores: polls before each yield, which are far cheaper than a pass, and number of yields.
const SPINS_SHARED: u32 = 20;
const YIELDS: u32 = 8;

/// How far a call came in a turn.
pub(crate) enum FastEnd<'a> {
    /// The call is done, and the turn has ended.
    Done {
        /// Sequence number of the call in the group.
        seq: u64,
        /// Time of the turn, if a log or profile follows calls.
        took: Option<Duration>,
    },
    /// The call stopped. It must continue in this turn, before another thread takes another frame.
    Stopped(FastTurn<'a>, Box<Stopped>),
    /// The call panicked, all groups have failed, and the turn has ended.
    Failed(Box<Error>),
}

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
    /// Starts a call on the fast path, in a turn. Returns `None` if the call cannot take it; then nothing has changed.
    #[inline]
    pub(crate) fn start_fast(&self, group: u64, desc: &CallDesc) -> Option<FastEnd<'_>> {
        // In a forked child, the lock may be held for ever.
        if self.is_forked() {
            return None;
        }
        let begin = events::follows_calls().then(time::now);
        let mut core = self.core.lock();
        let is_watch = core.watch();
        let mut turn = FastTurn { driver: self, core, is_watch, begin };
        match turn.core.start_fast(group, desc, self.spin_limit()) {
            Some(FastStart::Done { seq, .. }) => Some(FastEnd::Done { seq, took: turn.end() }),
            Some(FastStart::Stopped(stopped)) => Some(FastEnd::Stopped(turn, stopped)),
            Some(FastStart::Failed(error)) => {
                turn.end();
                Some(FastEnd::Failed(error))
            }
            None => {
                turn.end();
                None
            }
        }
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
