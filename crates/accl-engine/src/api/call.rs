//! A call in flight as its caller holds it: waiting, its end, what is to be run then.
//!
//! Owns nothing but the way to the driver; the state is in `in_flight`, waiting in `driver`. Read [`Call`] first.

use std::sync::Weak;
use std::time::Duration;

use accl_types::{Error, Rank, Result};

use crate::driver::Driver;
use crate::in_flight::{InFlight, Kept};
use accl_executor::call::Waited;

/// A call in flight. Dropping it does not cancel the call.
#[derive(Clone)]
pub struct Call {
    pub(crate) state: InFlight,
    pub(crate) driver: Weak<Driver>,
}

impl Call {
    /// Whether the call is done or failed. Neither blocks nor makes progress.
    pub fn is_done(&self) -> bool {
        self.state.is_done()
    }

    /// Makes one pass of progress, then says whether the call is done or failed.
    pub fn test(&self) -> bool {
        if !self.is_done()
            && let Some(driver) = self.driver.upgrade()
            && !driver.is_forked()
        {
            driver.try_pass(Some(&self.state));
        }
        self.is_done()
    }

    /// Waits until the call is done, failed, `timeout` passed or `interrupt` returned true.
    ///
    /// `interrupt` is called on this thread about every 50 ms while it waits, and when a signal arrived.
    pub fn wait(&self, timeout: Option<Duration>, interrupt: &mut dyn FnMut() -> bool) -> Waited {
        match self.driver.upgrade() {
            Some(driver) => driver.wait(&self.state, timeout, interrupt),
            None => {
                let ended = || Waited::Failed(self.state.in_context(Error::aborted("the engine has ended")));
                self.state.outcome().unwrap_or_else(ended)
            }
        }
    }

    /// The error of a failed call.
    pub fn error(&self) -> Option<Error> {
        self.state.error()
    }

    /// The call's number in its group.
    pub fn seq(&self) -> u64 {
        self.state.seq
    }

    /// Where a receive's data came from, once that is known.
    pub fn source_rank(&self) -> Option<Rank> {
        self.state.source_rank()
    }

    /// From submission to the last byte; `None` while it runs or when timing is off.
    pub fn duration(&self) -> Option<Duration> {
        self.state.duration()
    }

    /// Runs `f` on a completion thread once the call is done or failed; at once if it is. One per call.
    ///
    /// # Errors
    /// `Exhausted` when the system has no thread for it; `Aborted` when the engine has ended, and in a forked child; `Internal` when the
    /// call has a callback.
    pub fn when_done(&self, f: Box<dyn FnOnce() + Send>) -> Result<()> {
        let ended = || Error::aborted("the engine has ended");
        let driver = self.driver.upgrade().ok_or_else(ended)?;
        driver.refuse_if_forked()?;
        driver.completions().expect()?;
        match self.state.keep_callback(f) {
            Kept::ForTheEnd => Ok(()),
            Kept::Ended(f) => {
                driver.completions().post(f);
                Ok(())
            }
            Kept::Refused => {
                driver.completions().withdraw();
                Err(self.state.in_context(Error::internal("a call has one callback, and this one has its own")))
            }
        }
    }
}
