//! Calls that have failed while external operations worked on their memory.
//!
//! Such a call has not ended: its caller may free the tensors when it has, and an operation that is under way may still write into them.
//! It has been asked to stop, and the call ends when it has said that it has, or, of a collective, when it has no hand on the memory. One that
//! never says so is given up after a while, with an error that tells the caller not to touch the memory. Owns these calls, of all groups.
//! Read [`Stopping::advance`] first.

use std::time::Duration;

use accl_types::{Error, Moment};

use super::completed::Completed;
use crate::exec::Run;

/// How long an external operation may take to stop.
pub const STOP_WITHIN: Duration = Duration::from_secs(10);

/// A call that waits for the end of its external operations, with its error.
struct Stop {
    run: Run,
    error: Error,
    until: Moment,
}

/// The calls that have failed and not ended.
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

    /// A call whose external operations have been asked to stop.
    pub(super) fn add(&mut self, run: Run, error: Error, now: Moment) {
        self.calls.push(Stop { run, error, until: now + STOP_WITHIN });
    }

    /// The calls of a group.
    pub(super) fn runs_of(&self, group: u64) -> impl Iterator<Item = &Run> {
        self.calls.iter().map(|stop| &stop.run).filter(move |run| run.call.group_id == group)
    }

    /// When the first of them is given up.
    pub(super) fn next_deadline(&self) -> Option<Moment> {
        self.calls.iter().map(|stop| stop.until).min()
    }

    /// Ends the calls whose external operations have stopped, or will not. Returns whether there were any.
    pub(super) fn advance(&mut self, completed: &mut Completed, now: Moment) -> bool {
        let before = self.calls.len();
        self.calls.retain(|Stop { run, error, until }| {
            if !run.may_be_touched() {
                let error = match run.abandoned() {
                    Some(why) => {
                        let text = format!("{}; {}", error.message, why.message);
                        Error { message: text, ..error.clone() }.holding_memory()
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
                "{what} was asked to stop and has not done so within {} ms; the call failed before of this: {}",
                STOP_WITHIN.as_millis(),
                error.message
            );
            completed.end(&run.call, Some(run.call.in_context(Error::device(text).holding_memory())), now);
            false
        });
        self.calls.len() != before
    }
}
