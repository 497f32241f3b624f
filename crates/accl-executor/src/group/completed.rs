//! Calls that have ended, and groups that have failed, for whoever holds the lock to tell of them without it.
//!
//! Owns the lists. Read [`Completed`] first.

use std::sync::Arc;

use accl_types::{Error, Moment, Rank};

use crate::call::{CallState, Callback};

/// What is to be done when the lock has been given back.
#[derive(Default)]
pub struct Completed {
    /// To be run.
    pub callbacks: Vec<Callback>,
    /// To be told of, if somebody follows calls.
    pub calls: Vec<Arc<CallState>>,
    /// Groups that are to fail on the other lanes as well.
    pub failed: Vec<FailedGroup>,
    /// With what groups have failed because this process has seen a rank go without a word: to be told of, since nobody may be left to raise it.
    pub losses: Vec<Error>,
    is_followed: bool,
    /// There is something in one of the lists.
    has_any: bool,
}

/// A group that has failed on one of its lanes.
pub struct FailedGroup {
    /// Its number.
    pub group: u64,
    /// The first cause.
    pub error: Error,
    /// Who has yet to learn of it.
    pub tell: Notify,
}

impl FailedGroup {
    /// The rank that announced the cause, if it did not begin here.
    pub(super) fn announced_by(&self) -> Option<Rank> {
        self.error.context.peer.filter(|_| self.tell == Notify::Neighbours)
    }
}

/// Whether the other ranks have yet to learn of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notify {
    /// All of them: it began here.
    Peers,
    /// Those that pass it on: another rank tells all of them.
    Neighbours,
    /// All know it.
    Nobody,
}

/// Whether neighbours that look at no link are sent a note of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Notes {
    /// Unless they speak of it before.
    Sent,
    /// The first lane sends them.
    LeftToFirstLane,
}

impl Completed {
    /// Somebody follows calls: all that end from now on are kept for that.
    pub(super) fn follow(&mut self) {
        self.is_followed = true;
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        !self.has_any
    }

    /// Ends a call.
    pub(super) fn end(&mut self, call: &Arc<CallState>, error: Option<Error>, now: Moment) {
        self.callbacks.extend(call.finish(now, error));
        if self.is_followed {
            self.calls.push(call.clone());
        }
        self.has_any |= !self.callbacks.is_empty() || !self.calls.is_empty();
    }

    /// A group has failed that has more lanes.
    pub(super) fn fail_elsewhere(&mut self, failed: FailedGroup) {
        self.failed.push(failed);
        self.has_any = true;
    }

    /// A group has failed because a rank has gone without a word, and nobody has said so before.
    pub(super) fn note_loss(&mut self, error: Error) {
        self.losses.push(error);
        self.has_any = true;
    }

    /// All that there is; it stays followed.
    pub(super) fn take(&mut self) -> Self {
        let is_followed = self.is_followed;
        std::mem::replace(self, Self { is_followed, ..Self::default() })
    }
}
