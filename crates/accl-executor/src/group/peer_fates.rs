//! Knowledge about processes: whether a peer is here, left or is lost, and the questions and answers about it.
//!
//! Owns the links' appearance and loss as groups see them, and out-of-band notes. `pass` handles frames of groups. Read
//! [`PeerFate`] first.

use accl_types::{Error, Moment, Result};
use accl_wire::frame::{Groups, Header, Kind, LAST, OVERHEAD_BYTES};
use accl_wire::{EndpointInfo, Link, Slot, Stance};

use super::core::Core;
use crate::peers::{Gone, PeerId};

/// Maximum number of processes asked what happened to a peer.
const MAX_ASKED_NEIGHBOURS: usize = 4;

/// Fate of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerFate {
    /// The process sent a disconnect message, and exited.
    Left,
    /// The process was lost without a disconnect message.
    Lost,
    /// The process has a link to this process.
    Here,
    /// Nothing certain is known about the process, or the question was invalid.
    Unknown,
}

impl PeerFate {
    const ALL: [PeerFate; 4] = [PeerFate::Left, PeerFate::Lost, PeerFate::Here, PeerFate::Unknown];

    /// Returns the name that an answer contains.
    pub fn name(self) -> &'static str {
        match self {
            PeerFate::Left => "left",
            PeerFate::Lost => "lost",
            PeerFate::Here => "here",
            PeerFate::Unknown => "unknown",
        }
    }

    /// Returns the fate that an answer contains.
    pub fn of(name: &str) -> Self {
        Self::ALL.into_iter().find(|fate| fate.name() == name).unwrap_or(PeerFate::Unknown)
    }
}

impl Core {
    /// Gives a peer its new link: see [`crate::peers::Net::attach`]. A sleeping driver must be woken to poll again, because it has
    /// not armed this link.
    pub fn attach(&mut self, id: PeerId, link: Box<dyn Link>, slot: Option<Slot>, now: Moment) {
        let _ = self.guarded(|core| {
            core.net.attach(id, link, slot);
            core.net.await_greeting(id);
            let expected = core.expected.iter().filter(|(_, peers)| peers.contains(&id)).map(|(group, _)| *group);
            let made = core.groups.values_mut().filter_map(|group| group.note_link(id));
            let shared: Vec<u64> = made.chain(expected).collect();
            // Each side may have left groups, or seen them fail, when there was no link to report it.
            core.ask_about(id, &shared, LAST);
            core.pass_whole(now);
        });
    }

    /// Records that a peer without a link cannot be reached. The calls that need it fail.
    pub fn lose(&mut self, id: PeerId, error: Error, now: Moment) {
        if self.net.is_unlinked(id) {
            self.net.mark_gone(id, error);
            let _ = self.guarded(|core| core.check_absentees(now));
        }
    }

    /// Records that a process without a link has exited after it sent disconnect messages to others. With `is_assumed`
    /// this is only assumed. If other processes ask, this process then answers [`PeerFate::Unknown`].
    pub fn depart(&mut self, id: PeerId, is_assumed: bool, now: Moment) {
        if self.net.is_unlinked(id) {
            self.net.note_disconnect(id, is_assumed);
            self.lose(id, Error::peer_lost("it has left"), now);
        }
    }

    /// Returns the stance towards a peer that connects: whether its link works, as far as the system knows.
    pub fn stance_to(&mut self, uuid: &[u8; 16], now: Moment) -> Stance {
        let Some(id) = self.net.find(uuid) else {
            // This process would ignore what the peer reports about its earlier groups, and the peer would wait for
            // answers.
            return if self.net.gone(uuid).is_some() { Stance::GivenUp } else { Stance::Unlinked };
        };
        if !self.net.is_linked(id) {
            return Stance::Unlinked;
        }
        self.poll_peer(id, now);
        match self.net.is_linked(id) {
            true => Stance::Linked,
            false => Stance::GivenUp,
        }
    }

    /// Handles everything that a peer has sent, and detects whether it has disconnected.
    fn poll_peer(&mut self, id: PeerId, now: Moment) {
        self.net.force_poll(id);
        let checked = self.guarded(|core| {
            // The end of the peer is detected only after all its frames were handled.
            core.pass_whole(now);
            core.net.check(id)
        });
        if let Ok(Err(error)) = checked {
            self.net.mark_gone(id, error);
            let _ = self.guarded(|core| core.check_absentees(now));
        }
    }

    /// Asks a linked peer for the state of groups. `last` is the flag of the last frame.
    pub(super) fn ask_about(&mut self, id: PeerId, groups: &[u64], last: u8) {
        let mut payloads = Groups::payloads(groups, self.segment as usize + OVERHEAD_BYTES).peekable();
        while let Some(payload) = payloads.next() {
            let flags = if payloads.peek().is_none() { last } else { 0 };
            self.net.send_control(id, Header { flags, ..Header::new(Kind::Hello) }, &payload);
        }
    }

    /// Returns processes that may know better what happened to a peer: its neighbours in shared groups, which linked to
    /// it when the group was created.
    pub fn neighbours_of(&self, uuid: &[u8; 16]) -> Vec<EndpointInfo> {
        let Some(id) = self.net.find(uuid) else { return Vec::new() };
        let mut found: Vec<PeerId> = Vec::new();
        for group in self.groups.values() {
            let Some(rank) = group.members().rank_of(id) else { continue };
            let near = group.members().neighbours(rank).filter(|&rank| rank != group.rank());
            let there = near.filter(|&rank| !group.members().is_absent(rank, &self.net));
            for peer in there.map(|rank| group.members().peer(rank)) {
                if !found.contains(&peer) {
                    found.push(peer);
                }
            }
            if found.len() >= MAX_ASKED_NEIGHBOURS {
                break;
            }
        }
        found.into_iter().take(MAX_ASKED_NEIGHBOURS).map(|id| self.net.peer(id).info().clone()).collect()
    }

    /// Returns whether a process should still get a note that a group has failed.
    pub fn is_note_needed(&self, uuid: &[u8; 16], group: u64) -> bool {
        let Some(id) = self.net.find(uuid) else { return false };
        self.groups.get(&group).is_none_or(|group| group.may_not_know(id, &self.net))
    }

    /// Handles an out-of-band frame, and returns the answer.
    pub fn on_note(&mut self, from: &[u8; 16], note: &[u8], now: Moment) -> PeerFate {
        let Some((head, payload)) = note.split_first_chunk() else { return PeerFate::Unknown };
        let Ok(header) = Header::parse(head) else { return PeerFate::Unknown };
        match (header.kind, self.net.find(from)) {
            (Kind::Cause, Some(id)) => {
                let _ = self.guarded(|core| {
                    core.on_frame(id, &header, payload, now);
                    core.pass_whole(now);
                });
                PeerFate::Unknown
            }
            (Kind::PeerFate, _) => payload.try_into().map_or(PeerFate::Unknown, |uuid: &[u8; 16]| self.fate(uuid, now)),
            _ => PeerFate::Unknown,
        }
    }

    /// Returns what happened to a process, as far as it is known here.
    fn fate(&mut self, uuid: &[u8; 16], now: Moment) -> PeerFate {
        let linked = self.net.find(uuid).filter(|&id| self.net.is_linked(id));
        if let Some(id) = linked {
            self.poll_peer(id, now);
            if self.net.is_linked(id) {
                return PeerFate::Here;
            }
        }
        let Some(peer) = self.net.gone(uuid).map(|id| self.net.peer(id)) else { return PeerFate::Unknown };
        match peer.gone() {
            // Others may know better, so an assumption is not reported.
            Some(Gone::Left) if peer.is_disconnect_assumed() => PeerFate::Unknown,
            Some(Gone::Left) => PeerFate::Left,
            Some(Gone::Lost(_)) => PeerFate::Lost,
            None => PeerFate::Unknown,
        }
    }

    /// Reports to a newly linked peer which of its groups have failed, or were left, here.
    pub(super) fn answer_groups(&mut self, id: PeerId, payload: &[u8], now: Moment) -> Result<()> {
        for group in Groups::parse(payload)?.iter() {
            let header = |kind| Header { group, ..Header::new(kind) };
            if let Some(cause) = self.ended.cause(group) {
                if let Some(cause) = cause {
                    self.net.send_control(id, header(Kind::Cause), cause);
                }
                self.net.send_control(id, header(Kind::Disconnect), &[]);
            } else if self.groups.get(&group).is_some_and(|group| group.members().rank_of(id).is_none()) {
                // This process has left the group, and the peer is again a peer in another group.
                self.net.send_control(id, header(Kind::Disconnect), &[]);
            } else {
                self.with_group(group, now, |group, context| group.notify_of_failure(id, context));
            }
        }
        Ok(())
    }
}
