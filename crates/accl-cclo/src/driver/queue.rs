//! Queue of posted calls, each with a deadline.
//!
//! Owns the order and the state of the calls. A device runs one call at a time, in the order of posting. A call that depends on another one therefore
//! only needs to be posted later. Read [`Queue::post`] first.

use std::collections::{BTreeMap, VecDeque};

use accl_types::Moment;

use crate::call::Descriptor;

/// Result of a call that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finished {
    /// Duration in nanoseconds, as counted by the device.
    pub nanos: u64,
}

/// Id of a posted call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(u64);

#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    pub(super) id: RequestId,
    pub(super) call: Descriptor,
    pub(super) deadline: Moment,
}

/// Calls in order; only the first may run.
#[derive(Debug, Default)]
pub(super) struct Queue {
    next: u64,
    waiting: VecDeque<Waiting>,
    finished: BTreeMap<RequestId, Finished>,
}

/// State of a posted call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallState {
    Waits,
    Ended(Finished),
    Unknown,
}

impl Queue {
    pub(super) fn post(&mut self, call: Descriptor, deadline: Moment) -> RequestId {
        let id = RequestId(self.next);
        self.next += 1;
        self.waiting.push_back(Waiting { id, call, deadline });
        id
    }

    /// Returns the call that runs or is next to run.
    pub(super) fn first(&self) -> Option<Waiting> {
        self.waiting.front().copied()
    }

    /// Removes the first call and stores its result.
    pub(super) fn finish(&mut self, finished: Finished) {
        if let Some(first) = self.waiting.pop_front() {
            self.finished.insert(first.id, finished);
        }
    }

    /// Returns a call whose deadline has passed.
    pub(super) fn overdue(&self, now: Moment) -> Option<Waiting> {
        self.waiting.iter().copied().find(|one| one.deadline <= now)
    }

    /// Returns the state of a call, and forgets its result.
    pub(super) fn take(&mut self, id: RequestId) -> CallState {
        match self.finished.remove(&id) {
            Some(finished) => CallState::Ended(finished),
            None if self.waiting.iter().any(|one| one.id == id) => CallState::Waits,
            None => CallState::Unknown,
        }
    }

    /// Returns whether a call with this id was ever posted.
    pub(super) fn has_seen(&self, id: RequestId) -> bool {
        id.0 < self.next
    }
}
