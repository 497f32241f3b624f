//! Completed calls and failed groups, which the lock's holder reports after it has released the lock.
//!
//! This module owns the lists. Read [`Completed`] first.

use std::sync::Arc;

use accl_types::{Error, Moment, Rank};

use crate::call::{CallState, Callback};

/// Work to do after the lock is released.
#[derive(Default)]
pub struct Completed {
    /// Callbacks to run.
    pub callbacks: Vec<Callback>,
    /// Completed calls to report, if calls are followed.
    pub calls: Vec<Arc<CallState>>,
    /// Groups that must fail on the other lanes as well.
    pub failed: Vec<FailedGroup>,
    /// Errors of groups that failed because this process detected a lost rank. They are logged, because no call may be
    /// left to raise them.
    pub losses: Vec<Error>,
    is_followed: bool,
    /// Whether any list has an entry.
    has_any: bool,
}

/// A group that has failed on one of its lanes.
pub struct FailedGroup {
    /// Number of the group.
    pub group: u64,
    /// First cause of the failure.
    pub error: Error,
    /// Ranks that must still be notified.
    pub notify: Notify,
}

impl FailedGroup {
    /// Returns the rank where the failure began; `None` if it began here or all ranks know it.
    pub(super) fn announced_by(&self) -> Option<Rank> {
        self.error.context.peer.filter(|_| self.notify == Notify::Neighbours)
    }
}

/// Which other ranks must still be notified of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notify {
    /// All other ranks, because the failure began here.
    Peers,
    /// The neighbours, which forward the report; another rank notifies all ranks.
    Neighbours,
    /// No ranks: all of them know it.
    NoRank,
}

/// Whether neighbours that may poll no link are sent an out-of-band report of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Notes {
    /// Sent, unless the neighbour reports the failure first.
    Sent,
    /// Not sent here, because the first lane sends them.
    LeftToFirstLane,
}

impl Completed {
    /// Requests that calls that complete from now on are kept in `calls`.
    pub(super) fn follow(&mut self) {
        self.is_followed = true;
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        !self.has_any
    }

    /// Completes a call.
    pub(super) fn end(&mut self, call: &Arc<CallState>, error: Option<Error>, now: Moment) {
        self.callbacks.extend(call.finish(now, error));
        if self.is_followed {
            self.calls.push(call.clone());
        }
        self.has_any |= !self.callbacks.is_empty() || !self.calls.is_empty();
    }

    /// Records that a group with several lanes has failed.
    pub(super) fn fail_on_other_lanes(&mut self, failed: FailedGroup) {
        self.failed.push(failed);
        self.has_any = true;
    }

    /// Records that a group has failed because a rank was lost. Only the lane that detected the loss first calls this.
    pub(super) fn note_loss(&mut self, error: Error) {
        self.losses.push(error);
        self.has_any = true;
    }

    /// Takes all entries. Calls stay followed.
    pub(super) fn take(&mut self) -> Self {
        let is_followed = self.is_followed;
        std::mem::replace(self, Self { is_followed, ..Self::default() })
    }
}
