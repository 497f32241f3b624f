//! The failure of a group: every call in flight fails, other ranks learn the cause, later calls are refused.
//!
//! Owns the reports of the cause to other ranks. `first_cause` keeps the cause. Read [`GroupState::fail`] first.

use std::sync::Arc;

use accl_types::{Collective, Error, Rank, Seq};
use accl_wire::frame::{Cause, Header, Kind, OVERHEAD_BYTES};

use super::completed::{FailedGroup, Notes, Notify};
use super::context::Context;
use super::state::GroupState;
use super::stopping::Stopped;
use crate::call::CallState;
use crate::peers::{Net, PeerId};

/// Maximum bytes of a report that the group has failed.
const MAX_CAUSE_BYTES: usize = 1024;

impl GroupState {
    /// Fails the group with its first cause. Every call in flight fails. `notify` specifies which ranks are notified.
    pub fn fail(&mut self, error: Error, context: &mut Context<'_>, notify: Notify) {
        if self.failure.has_come() {
            return;
        }
        let failed = FailedGroup { group: self.id, error, notify };
        self.fail_on_lane(&failed, Notes::Sent, context);
        if self.sequence.has_lanes() {
            context.completed.fail_on_other_lanes(failed);
        }
    }

    /// Returns the failure that other lanes must adopt, if this lane has failed.
    pub fn failed(&self) -> Option<FailedGroup> {
        let error = self.failure.cause()?.clone();
        let notify = if self.failure.announcement().is_some() { Notify::Neighbours } else { Notify::NoRank };
        Some(FailedGroup { group: self.id, error, notify })
    }

    /// Fails the group like [`GroupState::fail`], on this lane alone. The lane that failed first passes the failure on
    /// to each other lane.
    pub(super) fn fail_on_lane(&mut self, failed: &FailedGroup, notes: Notes, context: &mut Context<'_>) {
        if self.failure.has_come() {
            return;
        }
        let error = failed.error.clone();
        let origin = match failed.notify {
            Notify::Peers => {
                self.notify_cause(self.members.ranks(), self.rank, &error, context);
                Some(self.rank)
            }
            Notify::Neighbours => {
                // The rank that detected the failure notifies all ranks, but may not reach all of them. A link between
                // two ranks can break alone.
                let origin = error.context.peer.unwrap_or(self.rank);
                self.notify_cause(self.members.neighbours(self.rank), origin, &error, context);
                Some(origin)
            }
            Notify::NoRank => None,
        };
        if let Some(origin) = origin.filter(|_| notes == Notes::Sent) {
            self.note_cause(origin, &error, context);
        }
        self.failure.set(error.clone(), failed.announced_by());
        self.inbox.clear();
        let own_error = |call: &CallState| {
            let is_own = error.context.seq == Some(Seq(call.seq)) && error.context.collective == Some(call.collective);
            if is_own { error.clone() } else { call.in_context(Error::new(error.kind, brief(&error))) }
        };
        // Memory of external operations is not given back before they have stopped.
        let runs = std::mem::take(&mut self.runs).into_values().map(|run| Stopped::Run(run.into()));
        let failed = runs.chain(self.p2p.take_all().into_iter().map(|message| Stopped::Message(message.into())));
        let (stopping, over): (Vec<_>, Vec<_>) = failed.partition(Stopped::cancel_externals);
        for stopped in stopping {
            self.failure.raise();
            self.calls_failed += 1;
            let own = own_error(stopped.call());
            context.stopping.add(stopped, own, context.now);
        }
        let calls: Vec<Arc<CallState>> = over.iter().map(|stopped| stopped.call().clone()).collect();
        if !calls.is_empty() {
            self.failure.raise();
        }
        self.calls_failed += calls.len() as u64;
        for call in calls {
            let own = own_error(&call);
            context.completed.end(&call, Some(own), context.now);
        }
    }

    /// Reports the first cause to `ranks`, except this rank and the rank where it began.
    pub(super) fn notify_cause(
        &self,
        ranks: impl Iterator<Item = Rank>,
        origin: Rank,
        error: &Error,
        context: &mut Context<'_>,
    ) {
        let cause = announcement(origin, error, cause_bytes(context.segment));
        let header = Header { group: self.id, ..Header::new(Kind::Cause) };
        for rank in ranks.filter(|&rank| rank != self.rank && rank != origin) {
            // A rank without a link receives the report from its neighbours, or when it makes a link.
            context.net.send_if_linked(self.members.peer(rank), header, &cause);
        }
    }

    /// Queues out-of-band reports of the first cause to the neighbours, which arrive even if they poll no link. A
    /// report is not sent if the neighbour reports the failure first. Neighbours do the same, so waiting ranks learn of
    /// the failure even if the ranks between them and its origin are computing.
    fn note_cause(&self, origin: Rank, error: &Error, context: &mut Context<'_>) {
        let cause = announcement(origin, error, cause_bytes(context.segment));
        let header = Header { group: self.id, ..Header::new(Kind::Cause) };
        for rank in self.members.neighbours(self.rank).filter(|&rank| rank != self.rank && rank != origin) {
            context.net.note(self.members.peer(rank), header, &cause);
        }
    }

    /// Reports the group's failure to a peer, if the group has failed.
    pub(super) fn notify_of_failure(&self, peer: PeerId, context: &mut Context<'_>) {
        if let Some((origin, cause)) = self.announced_cause(cause_bytes(context.segment))
            && self.members.rank_of(peer) != Some(origin)
        {
            context.net.send_control(peer, Header { group: self.id, ..Header::new(Kind::Cause) }, &cause);
        }
    }

    /// Returns the rank where the failure began, and the payload that reports it.
    pub(super) fn announced_cause(&self, most: usize) -> Option<(Rank, Box<[u8]>)> {
        let error = self.failure.cause()?;
        let origin = self.failure.announcement().map_or(self.rank, |(origin, _)| origin);
        Some((origin, announcement(origin, error, most).into()))
    }

    /// Returns whether a peer may not know yet that this group has failed.
    pub(super) fn may_not_know(&self, peer: PeerId, net: &Net) -> bool {
        let rank = self.members.rank_of(peer);
        rank.is_some_and(|rank| !self.members.knows(rank) && !self.members.is_absent(rank, net))
    }

    /// Returns a disagreement about calls of this rank that no call of this rank can raise any more.
    pub(super) fn unreported_mismatch(&self) -> Option<Error> {
        let has_made_calls = self.sequence.next() + self.next_message > 0;
        self.failure.unreported_mismatch().filter(|_| has_made_calls).cloned()
    }

    /// Returns the error for calls issued after the group failed; `None` if it has not failed. The first call to learn of
    /// the failure gets the kind of its cause, later calls get `Aborted`.
    pub fn aborted(&mut self, collective: Option<Collective>) -> Option<Error> {
        let kind = self.failure.kind_of_refusal();
        let cause = self.failure.raise()?;
        let text = format!(
            "the group failed earlier and accepts no more calls; destroy it and create a new one. First cause: {}",
            brief(cause)
        );
        let mut error = Error::new(kind, text).in_group(&self.name).on_rank(self.rank);
        if let Some(collective) = collective {
            error = error.of(collective);
        }
        Some(error)
    }
}

/// Returns the payload that reports a group's failure and its cause.
fn announcement(origin: Rank, error: &Error, most: usize) -> Vec<u8> {
    Cause { kind: error.kind, origin, text: brief(error) }.to_bytes(most)
}

/// Returns the maximum bytes of a failure report for this segment size.
pub(super) fn cause_bytes(segment: u64) -> usize {
    MAX_CAUSE_BYTES.min(segment as usize + OVERHEAD_BYTES)
}

/// Returns the text of an error with its call, but without rank and group. The code that quotes it adds its own rank
/// and group in front.
fn brief(error: &Error) -> String {
    match (error.context.collective, error.context.seq) {
        (Some(collective), Some(seq)) => format!("{collective} seq {seq}: {}", error.message),
        (Some(collective), None) => format!("{collective}: {}", error.message),
        (None, _) => error.message.clone(),
    }
}
