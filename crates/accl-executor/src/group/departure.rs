//! Leaving a group: the other ranks are notified, and calls that are still in flight fail.
//!
//! Owns what remains to be done afterwards, when the group is gone. Read [`GroupState::leave`] first.

use std::time::Duration;

use accl_types::Error;
use accl_wire::frame::{Header, Kind};

use super::completed::Notify;
use super::context::Context;
use super::state::GroupState;
use crate::peers::{Mark, Net};

/// Remaining duties after a rank has left a group.
pub struct Departure {
    /// A disagreement about calls that no call could raise.
    pub unreported_mismatch: Option<Error>,
    /// Marks of the frames on which the group's calls rely.
    pub sent: Vec<Mark>,
    /// Whether the group had failed before.
    pub has_failed: bool,
    /// Timeout of the group's calls.
    pub timeout: Duration,
}

impl GroupState {
    /// Returns marks for everything sent to the other ranks so far. In a failed group, no rank relies on frames without
    /// room or link.
    fn marks(&self, net: &Net) -> Vec<Mark> {
        let marks = self.members.ranks().map(|rank| net.mark(self.members.peer(rank)));
        marks.map(|mark| if self.failure.has_come() { mark.of_link_alone() } else { mark }).collect()
    }

    /// Leaves the group like [`GroupState::leave`]. Returns what remains to be done without the group.
    pub(super) fn depart(&mut self, context: &mut Context<'_>) -> Departure {
        let departure = Departure {
            has_failed: self.failure.has_come(),
            // The marks exclude the disconnect messages: waiting for these would mean waiting for ranks that do not
            // need them.
            sent: self.marks(context.net),
            unreported_mismatch: self.unreported_mismatch(),
            timeout: self.timeout,
        };
        self.leave(context);
        departure
    }

    /// Sends a disconnect message to all linked ranks. Calls that are still in flight fail.
    pub fn leave(&mut self, context: &mut Context<'_>) {
        // Internal messages that were not received. The code that issued them has continued.
        for message in self.p2p.take_private(|_| true) {
            let error = message.call.in_context(Error::aborted("the group was destroyed"));
            context.completed.end(&message.call, Some(error), context.now);
        }
        let in_flight = !self.is_idle();
        if in_flight {
            let error = Error::aborted("the group was destroyed while calls were in flight");
            self.fail(self.in_context(error), context, Notify::Peers);
        }
        // A rank that does not know the cause would take the disconnect message as the cause. It may have been linked
        // after the group failed, or still wait for the origin's own report.
        if let Some(cause) = self.failure.cause() {
            let origin = self.failure.announcement().map_or(self.rank, |(origin, _)| origin);
            self.notify_cause(self.members.ranks().filter(|&rank| !self.members.knows(rank)), origin, cause, context);
        }
        let mut header = Header::new(Kind::Disconnect);
        header.group = self.id;
        for rank in self.members.ranks().filter(|&rank| rank != self.rank) {
            context.net.send_if_linked(self.members.peer(rank), header, &[]);
        }
    }
}
