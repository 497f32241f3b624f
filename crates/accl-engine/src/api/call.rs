//! A call in flight as its caller holds it: waiting, its completion, its callback.
//!
//! Owns only the connection to the driver; the state is in `in_flight`, waiting in `driver`. Read [`Call`] first.

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
    /// Returns whether the call has completed or failed. Neither blocks nor makes progress.
    pub fn is_done(&self) -> bool {
        self.state.is_done()
    }

    /// Makes one pass of progress, then returns whether the call has completed or failed.
    pub fn test(&self) -> bool {
        if !self.is_done()
            && let Some(driver) = self.driver.upgrade()
            && !driver.is_forked()
        {
            driver.try_pass(Some(&self.state));
        }
        self.is_done()
    }

    /// Waits until the call completes or fails, `timeout` has passed, or `interrupt` returns true. `None` means no
    /// timeout. Of a staged call with [`Enqueued`](accl_executor::call::Enqueued), the wait already ends when all copies
    /// are enqueued; then it returns `Done`, and the caller must not access the tensors but behind these copies.
    ///
    /// `interrupt` is called on this thread about every 50 ms while it waits, and when a signal arrived.
    pub fn wait(&self, timeout: Option<Duration>, interrupt: &mut dyn FnMut() -> bool) -> Waited {
        match self.driver.upgrade() {
            Some(driver) => driver.wait(&self.state, timeout, interrupt),
            None => {
                let ended = || Waited::Failed(self.state.in_context(Error::aborted("the engine was shut down")));
                self.state.released().unwrap_or_else(ended)
            }
        }
    }

    /// Returns the error of a failed call; `None` if the call has not failed.
    pub fn error(&self) -> Option<Error> {
        self.state.error()
    }

    /// Returns the call's sequence number in its group.
    pub fn seq(&self) -> u64 {
        self.state.seq
    }

    /// Returns the rank that sent a receive's data; `None` until that rank is known.
    pub fn source_rank(&self) -> Option<Rank> {
        self.state.source_rank()
    }

    /// Returns the time from submission to the last byte; `None` while the call runs or when timing is off.
    pub fn duration(&self) -> Option<Duration> {
        self.state.duration()
    }

    /// Runs `f` on a completion thread when [`Call::wait`] returns without a timeout or interrupt; at once if that would
    /// return now. A call accepts one callback.
    ///
    /// # Errors
    /// * `Exhausted` when the system has no thread for it.
    /// * `Aborted` when the engine has ended, and in a forked child.
    /// * `Internal` when the call already has a callback.
    pub fn when_done(&self, f: Box<dyn FnOnce() + Send>) -> Result<()> {
        self.keep(|state| state.keep_callback(f))
    }

    /// Runs `f` on a completion thread once the call completes or fails, also if waiting threads continue before; at once
    /// if it already has. A call accepts one such callback.
    ///
    /// # Errors
    /// The errors of [`Call::when_done`].
    pub fn when_through(&self, f: Box<dyn FnOnce() + Send>) -> Result<()> {
        self.keep(|state| state.keep_end_callback(f))
    }

    fn keep(&self, keep: impl FnOnce(&InFlight) -> Kept) -> Result<()> {
        let ended = || Error::aborted("the engine was shut down");
        let driver = self.driver.upgrade().ok_or_else(ended)?;
        driver.refuse_if_forked()?;
        driver.completions().expect()?;
        match keep(&self.state) {
            Kept::ForTheEnd => Ok(()),
            Kept::Ended(f) => {
                driver.completions().post(f);
                Ok(())
            }
            Kept::Refused => {
                driver.completions().withdraw();
                Err(self
                    .state
                    .in_context(Error::internal("the call already has a callback, and only one is supported")))
            }
        }
    }
}
