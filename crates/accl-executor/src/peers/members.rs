//! The ranks of a group: the peer process of each rank, the eager window towards it, and whether it has left.
//!
//! This module owns the eager windows, and the counters of what the group's calls sent to each rank. Read [`Members`]
//! first.

use std::collections::HashMap;

use accl_types::{Bytes, Rank};
use accl_wire::frame::{Header, Kind};

use super::net::{Net, PeerId};
use super::traffic::Traffic;

/// Bytes of the eager window that a message costs in addition to its payload. This is about the memory that its
/// receiver needs to remember it, so that the number of tiny and empty messages is limited as well.
const MESSAGE_BYTES: u64 = 128;
/// Number of messages whose fixed cost fits into a window in addition to the configured bytes.
const FREE_MESSAGES: u64 = 16;

struct Member {
    peer: PeerId,
    /// Bytes that may still be sent before the receiver issues the matching calls.
    eager_left: u64,
    /// Eager bytes consumed here whose credit has not been returned yet.
    owed: u64,
    /// Highest sequence number of a call in which the rank was seen to participate.
    last_seq: Option<u64>,
    left: bool,
    /// Whether the rank has reported the group's failure.
    knows: bool,
    /// Counters of frames that carry data of this group's calls. Grants and other control frames are counted only for
    /// the link.
    traffic: Traffic,
}

/// Returns the ranks a power of two before and behind `rank`, without `rank` itself. Ranks link to these when the group
/// is created. If each rank forwards a message to its neighbours, the message reaches all ranks in a logarithmic number
/// of steps. This holds even if some of the links are broken.
pub fn neighbours(rank: Rank, world: u32) -> impl Iterator<Item = Rank> + use<> {
    let steps = (0..u32::BITS).map(|bit| 1 << bit).take_while(move |&step| step < world);
    let mut ranks: Vec<Rank> =
        steps.flat_map(|step| [Rank((rank.0 + step) % world), Rank((rank.0 + world - step) % world)]).collect();
    ranks.sort_unstable();
    ranks.dedup();
    ranks.into_iter()
}

/// The ranks of one group.
pub struct Members {
    members: Vec<Member>,
    by_peer: HashMap<PeerId, Rank>,
    window: u64,
}

impl Members {
    /// Creates the ranks of a group from their peers in rank order. `eager` is the eager window towards each rank in
    /// bytes; 0 turns eager sends off.
    pub fn new(peers: Vec<PeerId>, eager: Bytes) -> Self {
        let window = if eager.0 == 0 { 0 } else { eager.0 + FREE_MESSAGES * MESSAGE_BYTES };
        let by_peer = peers.iter().enumerate().map(|(rank, &peer)| (peer, Rank(rank as u32))).collect();
        let member = |peer| Member {
            peer,
            eager_left: window,
            owed: 0,
            last_seq: None,
            left: false,
            knows: false,
            traffic: Traffic::default(),
        };
        Self { members: peers.into_iter().map(member).collect(), by_peer, window }
    }

    /// Returns the number of ranks.
    pub fn world(&self) -> u32 {
        self.members.len() as u32
    }

    /// Returns all ranks in order.
    pub fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        (0..self.world()).map(Rank)
    }

    /// Returns the [`neighbours`] of a rank in this group.
    pub fn neighbours(&self, rank: Rank) -> impl Iterator<Item = Rank> + use<> {
        neighbours(rank, self.world())
    }

    /// Returns the peer process of a rank.
    #[inline]
    pub fn peer(&self, rank: Rank) -> PeerId {
        self.members[rank.index()].peer
    }

    #[inline]
    pub(crate) fn rank_of(&self, peer: PeerId) -> Option<Rank> {
        self.by_peer.get(&peer).copied()
    }

    /// Returns whether a message of `bytes` bytes may be sent before the receiver issues the matching call.
    #[inline]
    pub(crate) fn has_eager_room(&self, rank: Rank, bytes: u64) -> bool {
        self.members[rank.index()].eager_left >= bytes + MESSAGE_BYTES
    }

    /// Takes the credit of a message that is sent eagerly.
    #[inline]
    pub(crate) fn take_eager(&mut self, rank: Rank, bytes: u64) {
        self.members[rank.index()].eager_left -= bytes + MESSAGE_BYTES;
    }

    /// Adds credit that the peer gave back to the eager window towards it.
    pub(crate) fn on_window(&mut self, rank: Rank, bytes: u64) {
        let window = self.window;
        let member = &mut self.members[rank.index()];
        member.eager_left = member.eager_left.saturating_add(bytes).min(window);
    }

    /// Gives the credit of a consumed eager message back to its sender, in batches of half a window.
    pub(crate) fn return_credit(&mut self, rank: Rank, bytes: u64, group: u64, net: &mut Net) {
        let half = self.window / 2;
        let member = &mut self.members[rank.index()];
        member.owed += bytes + MESSAGE_BYTES;
        if member.owed >= half {
            let mut header = Header::new(Kind::Window);
            header.group = group;
            header.value = std::mem::take(&mut member.owed);
            net.send_control(member.peer, header, &[]);
        }
    }

    /// Counts a frame of a call that was sent to a rank.
    #[inline]
    pub(crate) fn note_sent(&mut self, rank: Rank, payload_bytes: u64) {
        self.members[rank.index()].traffic.add_sent(payload_bytes);
    }

    /// Counts a frame of a call that was received from a rank.
    #[inline]
    pub(crate) fn note_received(&mut self, rank: Rank, payload_bytes: u64) {
        self.members[rank.index()].traffic.add_received(payload_bytes);
    }

    /// Counts a frame of a call that found no room, or no link yet.
    pub(crate) fn note_stall(&mut self, rank: Rank) {
        self.members[rank.index()].traffic.stalls += 1;
    }

    /// Returns the counters of frames sent to and received from a rank for this group.
    pub fn traffic(&self, rank: Rank) -> Traffic {
        self.members[rank.index()].traffic
    }

    /// Returns, in bytes: the eager bytes that may still be sent to a rank, the credit owed to it, and the window.
    pub fn credit(&self, rank: Rank) -> (u64, u64, u64) {
        let member = &self.members[rank.index()];
        (member.eager_left, member.owed, self.window)
    }

    pub(crate) fn saw(&mut self, rank: Rank, seq: u64) {
        let last = &mut self.members[rank.index()].last_seq;
        *last = (*last).max(Some(seq));
    }

    pub(crate) fn last_seq(&self, rank: Rank) -> Option<u64> {
        self.members[rank.index()].last_seq
    }

    pub(crate) fn set_left(&mut self, rank: Rank) {
        self.members[rank.index()].left = true;
    }

    /// Records that a rank has reported the group's failure.
    pub(crate) fn set_knows(&mut self, rank: Rank) {
        self.members[rank.index()].knows = true;
    }

    pub(crate) fn knows(&self, rank: Rank) -> bool {
        self.members[rank.index()].knows
    }

    pub(crate) fn has_left(&self, rank: Rank) -> bool {
        self.members[rank.index()].left
    }

    /// Returns whether a rank sends nothing more: it has left the group, or its process is gone.
    pub(crate) fn is_absent(&self, rank: Rank, net: &Net) -> bool {
        self.has_left(rank) || net.peer(self.peer(rank)).gone().is_some()
    }

    /// Returns rank and process: `rank 1 (host a, pid 7)`.
    pub fn describe(&self, rank: Rank, net: &Net) -> String {
        format!("rank {rank} ({})", net.host_and_pid(self.peer(rank)))
    }
}
