//! Answers about the calls of a group: what they wait for, what is late, and which ranks are absent.
//!
//! Owns the texts of timeouts and absences. Changes nothing. Read [`GroupState::timeout_text`] first.

use std::sync::Arc;
use std::time::Duration;

use accl_types::{Error, Rank};

use super::context::Context;
use super::state::GroupState;
use crate::call::CallState;
use crate::exec::{FromAny, Run};
use crate::peers::{Gone, Net};

/// A call in flight, and the ranks or operations for which it waits.
pub struct CallInFlight {
    /// State of the call.
    pub call: Arc<CallState>,
    /// The ranks for which the call waits; empty if it waits for any rank, or for its turn.
    pub awaits: Vec<Rank>,
    /// Description of an external operation in flight.
    pub external: Option<String>,
}

impl CallInFlight {
    pub(super) fn of(run: &Run, awaits: Vec<Rank>) -> Self {
        Self { call: run.call.clone(), awaits, external: run.external_under_way() }
    }
}

impl GroupState {
    /// Returns why a rank sends nothing more; `None` while it is present.
    pub fn absence(&self, rank: Rank, net: &Net) -> Option<String> {
        if !self.members.is_absent(rank, net) {
            return None;
        }
        let who = self.members.describe(rank, net);
        Some(match net.peer(self.members.peer(rank)).gone() {
            Some(Gone::Lost(error)) if !self.members.has_left(rank) => {
                format!("{who} is lost: {}; see that rank's own output for the reason", error.message)
            }
            Some(Gone::Lost(_) | Gone::Left) | None => {
                format!("{who} has left the group and issues no more calls")
            }
        })
    }

    pub(super) fn overdue(&self, context: &Context<'_>) -> Option<Error> {
        let due = self.due();
        let late = |run: &&Run| due(run).is_some_and(|due| due <= context.now);
        let (call, deadline, awaited, under_way) = match self.runs.values().find(late) {
            Some(run) => (&run.call, run.deadline, run.awaited(&self.members), run.external_under_way()),
            None => {
                let message = self.p2p.overdue(context.now)?;
                let awaited = message.peer.into_iter().collect();
                (&message.call, message.deadline, awaited, message.memory.external_due())
            }
        };
        // The error states the allowed time, and not the time that passed until the check.
        let allowed = deadline.unwrap_or(context.now).since(call.started());
        let text = match under_way {
            // Other ranks may wait for this operation, and it waits for none of them.
            Some(what) => format!(
                "Timed out waiting {}ms for {}: {what} on this rank has not completed; check its own output, or raise \
                 the timeout",
                allowed.as_millis(),
                call.collective
            ),
            None => self.timeout_text(call, &awaited, allowed, context.net),
        };
        Some(call.in_context(Error::timeout(text)))
    }

    /// Returns the numbers of collectives and of messages issued here, and how many of these calls have failed.
    pub fn counts(&self) -> (u64, u64, u64) {
        (self.sequence.next(), self.next_message, self.calls_failed)
    }

    /// Returns the calls in flight that have not failed.
    pub(super) fn in_flight(&self) -> Vec<CallInFlight> {
        let messages = self.p2p.messages().map(|message| CallInFlight {
            call: message.call.clone(),
            awaits: message.peer.filter(|_| message.memory.external_due().is_none()).into_iter().collect(),
            external: message.memory.external_due(),
        });
        self.runs.values().map(|run| CallInFlight::of(run, run.awaited(&self.members))).chain(messages).collect()
    }

    /// Returns the ranks for which a call in flight waits.
    pub fn awaited(&self, call: &CallState) -> Vec<Rank> {
        if let Some(run) = self.runs.get(&call.seq).filter(|run| std::ptr::eq(&*run.call, call)) {
            return run.awaited(&self.members);
        }
        self.p2p.peer_of(call).flatten().into_iter().collect()
    }

    /// Returns the message of a timeout: which ranks are missing, and what is known about them.
    pub fn timeout_text(&self, call: &CallState, awaited: &[Rank], waited: Duration, net: &Net) -> String {
        let mut text = format!("Timed out waiting {}ms for {}", waited.as_millis(), call.collective);
        if awaited.is_empty() {
            let external = self.runs.get(&call.seq).and_then(Run::external_under_way);
            match external {
                Some(what) => text.push_str(&format!("; {what} is still in flight")),
                None if call.collective.is_point_to_point() => {
                    text.push_str(" from any rank: no rank sent a message with this tag");
                }
                None => text.push_str(
                    "; no rank is missing: an earlier call has not completed, or an operation did not stop when asked",
                ),
            }
        }
        for (index, &rank) in awaited.iter().filter(|&&rank| rank != self.rank).take(8).enumerate() {
            text.push_str(if index == 0 { "; missing: " } else { ", " });
            text.push_str(&self.members.describe(rank, net));
            if let Some(why) = net.trouble(self.members.peer(rank)) {
                text.push_str(&format!(" with no link yet: {why}"));
            }
            if let Some(silence) = net.peer(self.members.peer(rank)).silent_for() {
                text.push_str(&format!(" whose host has not answered for {} ms", silence.as_millis()));
            }
            if !call.collective.is_point_to_point() {
                match self.members.last_seq(rank) {
                    Some(seq) if seq >= call.seq => text.push_str(" which has entered this call"),
                    Some(seq) => text.push_str(&format!(" whose last call seen here was seq {seq}")),
                    None => text.push_str(" with no call on this group seen here"),
                }
            }
        }
        text.push_str("; check whether these ranks are stuck or skip the call, or raise the timeout");
        text
    }

    /// Returns the error if a rank that a call in flight needs is absent.
    pub(super) fn departed(&self, context: &Context<'_>) -> Option<Error> {
        if !self.has_absentees {
            return None;
        }
        let mut others = self.members.ranks().filter(|&rank| rank != self.rank);
        let is_alone = others.all(|rank| self.members.is_absent(rank, context.net));
        for rank in self.members.ranks() {
            if !self.members.is_absent(rank, context.net) {
                continue;
            }
            let is_lost = self.is_lost(rank, context.net);
            // A call that needs nothing more from the rank may still succeed. A call that needs it fails, and all other
            // ranks are notified.
            let any_run = self
                .runs
                .values()
                .find(|run| run.needs(rank) || is_lost && run.offload_in_flight())
                .map(|run| &run.call);
            // A receive from any source may still be matched by another rank, as long as one is present.
            let from_any = if is_lost || is_alone { FromAny::Counts } else { FromAny::DoesNot };
            let any_message = || self.p2p.needs(rank, from_any).map(|message| &message.call);
            let Some(call) = any_run.or_else(any_message) else { continue };
            let why = self.absence(rank, context.net).unwrap_or_default();
            return Some(call.in_context(Error::peer_lost(why).with_peer(rank)));
        }
        None
    }

    /// Returns whether a call is in flight whose caller has continued and relies on it. This is a collective, a call whose
    /// results are still copied, or a send for which there is no link yet. With a link, a small message is already in
    /// flight when the send was issued.
    pub fn has_async_calls(&self, net: &Net) -> bool {
        if !self.failure.has_come() && self.p2p.has_sends_to(|rank| net.is_unlinked(self.members.peer(rank))) {
            return true;
        }
        let is_relied_on = |run: &Run| run.call.is_async || run.awaits_copies();
        self.sequence.has_composed() && !self.failure.has_come()
            || self.runs.values().any(is_relied_on)
            || self.p2p.awaits_copies()
    }

    /// Returns whether a rank was lost without a disconnect message.
    pub(super) fn is_lost(&self, rank: Rank, net: &Net) -> bool {
        matches!(net.peer(self.members.peer(rank)).gone(), Some(Gone::Lost(_))) && !self.members.has_left(rank)
    }

    /// Returns the calls in flight that need something from a rank, or have something to send to it.
    pub fn calls_that_need(&self, rank: Rank) -> Vec<Arc<CallState>> {
        let runs = self.runs.values().filter(|run| run.needs(rank)).map(|run| run.call.clone());
        runs.chain(self.p2p.needs(rank, FromAny::DoesNot).map(|message| message.call.clone())).collect()
    }

    /// Returns the offloaded calls whose external operation is in flight. They cannot succeed if a rank is lost without
    /// a disconnect message.
    pub fn offloaded_calls(&self) -> impl Iterator<Item = &Arc<CallState>> {
        self.runs.values().filter(|run| run.offload_in_flight()).map(|run| &run.call)
    }

    /// Returns the receives in flight that accept a message from any rank.
    pub fn receives_from_any(&self) -> impl Iterator<Item = &Arc<CallState>> {
        self.p2p.messages().filter(|message| message.peer.is_none() && !message.is_private).map(|message| &message.call)
    }

    /// Describes what still exists in this group, like [`super::core::Core::residue`].
    pub(crate) fn residue(&self) -> Vec<String> {
        let counts = [
            ("calls", self.runs.len()),
            ("calls that other ranks have begun", self.inbox.calls()),
            ("messages", self.p2p.messages().count()),
            ("reserved numbers", self.sequence.promised()),
        ];
        let left = counts.into_iter().filter(|(_, count)| *count > 0);
        left.map(|(what, count)| format!("{count} {what} of group {}", self.name)).collect()
    }
}
