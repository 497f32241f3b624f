//! Failed calls whose external operations still work on their memory.
//!
//! Such a call has not completed. Its caller may free the tensors on completion, and an operation in flight may still
//! write into them. The operation was asked to stop. The call completes when the operation has ended or, for a
//! collective, when it no longer accesses the memory. After a timeout the call completes with an error that asks the
//! caller not to touch the memory. This module owns these calls of all groups. Read [`Stopping::advance`] first.

use std::sync::Arc;
use std::time::Duration;

use accl_types::{Error, Moment};

use super::completed::Completed;
use crate::call::CallState;
use crate::exec::{Message, Run};

/// Maximum time for an external operation to stop.
pub const STOP_WITHIN: Duration = Duration::from_secs(10);

/// A collective or a message that has failed.
pub(super) enum Stopped {
    Run(Box<Run>),
    Message(Box<Message>),
}

impl Stopped {
    pub(super) fn call(&self) -> &Arc<CallState> {
        match self {
            Stopped::Run(run) => &run.call,
            Stopped::Message(message) => &message.call,
        }
    }

    /// Asks the external operations in flight to stop. Returns whether the call must wait for that, or must report that
    /// its memory stays in use.
    pub(super) fn cancel_externals(&self) -> bool {
        match self {
            Stopped::Run(run) => run.cancel_externals(),
            Stopped::Message(message) => message.memory.cancel(),
        }
    }

    fn may_be_touched(&self) -> bool {
        match self {
            Stopped::Run(run) => run.may_be_touched(),
            Stopped::Message(message) => message.memory.may_be_touched(),
        }
    }

    fn abandoned(&self) -> Option<&Error> {
        match self {
            Stopped::Run(run) => run.abandoned(),
            Stopped::Message(message) => message.memory.abandoned(),
        }
    }

    fn external_under_way(&self) -> Option<String> {
        match self {
            Stopped::Run(run) => run.any_external_under_way(),
            Stopped::Message(message) => message.memory.external_under_way(),
        }
    }
}

/// A failed call that waits for its external operations, with its error.
struct Stop {
    what: Stopped,
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
    pub(super) fn add(&mut self, what: Stopped, error: Error, now: Moment) {
        self.calls.push(Stop { what, error, until: now + STOP_WITHIN });
    }

    /// Returns the calls of a group, each with a description of its external operation.
    pub(super) fn of_group(&self, group: u64) -> impl Iterator<Item = (&Arc<CallState>, Option<String>)> {
        let calls = self.calls.iter().map(|stop| &stop.what).filter(move |what| what.call().group_id == group);
        calls.map(|what| (what.call(), what.external_under_way()))
    }

    /// Returns when the first of the calls is given up.
    pub(super) fn next_deadline(&self) -> Option<Moment> {
        self.calls.iter().map(|stop| stop.until).min()
    }

    /// Completes the calls whose external operations have stopped, or did not stop in time. Returns whether there were
    /// any.
    pub(super) fn advance(&mut self, completed: &mut Completed, now: Moment) -> bool {
        let before = self.calls.len();
        self.calls.retain(|Stop { what, error, until }| {
            if !what.may_be_touched() {
                let error = match what.abandoned() {
                    Some(why) => {
                        let text = format!("{}; {}", error.message, why.message);
                        Error { message: text, ..error.clone() }.leaking_memory()
                    }
                    None => error.clone(),
                };
                completed.end(what.call(), Some(error), now);
                return false;
            }
            if now < *until {
                return true;
            }
            let external = what.external_under_way().unwrap_or_default();
            let text = format!(
                "{external} did not stop within {} ms when asked; the call had already failed: {}",
                STOP_WITHIN.as_millis(),
                error.message
            );
            completed.end(what.call(), Some(what.call().in_context(Error::device(text).leaking_memory())), now);
            false
        });
        self.calls.len() != before
    }
}
