//! Failed calls whose external operations still work on their memory.
//!
//! Such a call has not completed. Its caller may free the tensors on completion, and an operation in flight may still
//! write into them. The operation was asked to stop. The call completes when the operation has ended or, for a
//! collective, when it no longer accesses the memory. After a timeout the call completes with an error that asks the
//! caller not to touch the memory. This module owns these calls of all groups. Read [`Stopping::advance`] first.

use std::time::Duration;

use accl_types::{Error, Moment};

use super::completed::Completed;
use crate::exec::Run;

/// Maximum time for an external operation to stop.
pub const STOP_WITHIN: Duration = Duration::from_secs(10);

/// A failed call that waits for its external operations, with its error.
struct Stop {
    run: Run,
    error: Error,
    until: Moment,
}

/// The calls that have failed and not completed.
#[derive(Default)]
pub(crate) struct Stopping {
    calls: Vec<Stop>,
}

impl Stopping {
    pub(super) fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.calls.len()
    }

    /// Adds a call whose external operations were asked to stop.
    pub(super) fn add(&mut self, run: Run, error: Error, now: Moment) {
        self.calls.push(Stop { run, error, until: now + STOP_WITHIN });
    }

    /// Returns the calls of a group.
    pub(super) fn runs_of(&self, group: u64) -> impl Iterator<Item = &Run> {
        self.calls.iter().map(|stop| &stop.run).filter(move |run| run.call.group_id == group)
    }

    /// Returns when the first of the calls is given up.
    pub(super) fn next_deadline(&self) -> Option<Moment> {
        self.calls.iter().map(|stop| stop.until).min()
    }

    /// Completes the calls whose external operations have stopped, or did not stop in time. Returns whether there were
    /// any.
    pub(super) fn advance(&mut self, completed: &mut Completed, now: Moment) -> bool {
        let before = self.calls.len();
        self.calls.retain(|Stop { run, error, until }| {
            if !run.may_be_touched() {
                let error = match run.abandoned() {
                    Some(why) => {
                        let text = format!("{}; {}", error.message, why.message);
                        Error { message: text, ..error.clone() }.leaking_memory()
                    }
                    None => error.clone(),
                };
                completed.end(&run.call, Some(error), now);
                return false;
            }
            if now < *until {
                return true;
            }
            let what = run.any_external_under_way().unwrap_or_default();
            let text = format!(
                "{what} did not stop within {} ms when asked; the call had already failed: {}",
                STOP_WITHIN.as_millis(),
                error.message
            );
            completed.end(&run.call, Some(run.call.in_context(Error::device(text).leaking_memory())), now);
            false
        });
        self.calls.len() != before
    }
}
