//! Calls that wait for their turn on a device, each with a deadline.
//!
//! Owns their order and what has become of each. Devices do one call at a time, in the order in which calls were posted, so a call after
//! another one needs no more than to be posted later. Read [`Queue::post`] first.

use std::collections::{BTreeMap, VecDeque};

use accl_types::Moment;

use crate::call::Descriptor;

/// How a call has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finished {
    /// As the device has counted, in nanoseconds.
    pub nanos: u64,
}

/// A call that was posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(u64);

#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    pub(super) id: RequestId,
    pub(super) call: Descriptor,
    pub(super) deadline: Moment,
}

/// Calls in order; the first may run.
#[derive(Debug, Default)]
pub(super) struct Queue {
    next: u64,
    waiting: VecDeque<Waiting>,
    finished: BTreeMap<RequestId, Finished>,
}

/// What has become of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
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

    /// The one that is next, or runs.
    pub(super) fn first(&self) -> Option<Waiting> {
        self.waiting.front().copied()
    }

    /// The first has ended.
    pub(super) fn finish(&mut self, finished: Finished) {
        if let Some(first) = self.waiting.pop_front() {
            self.finished.insert(first.id, finished);
        }
    }

    /// One whose time is over.
    pub(super) fn overdue(&self, now: Moment) -> Option<Waiting> {
        self.waiting.iter().copied().find(|one| one.deadline <= now)
    }

    /// Its end is said once.
    pub(super) fn take(&mut self, id: RequestId) -> State {
        match self.finished.remove(&id) {
            Some(finished) => State::Ended(finished),
            None if self.waiting.iter().any(|one| one.id == id) => State::Waits,
            None => State::Unknown,
        }
    }

    /// Whether it was ever posted.
    pub(super) fn has_seen(&self, id: RequestId) -> bool {
        id.0 < self.next
    }
}
