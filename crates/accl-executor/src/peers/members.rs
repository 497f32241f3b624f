//! The ranks of a group: which peer process each is, how far we may be ahead of it, whether it has left.
//!
//! Owns the eager windows, and what the group's calls have sent to each rank. Read [`Members`] first.

use std::collections::HashMap;

use accl_types::{Bytes, Rank};
use accl_wire::frame::{Header, Kind};

use super::net::{Net, PeerId};
use super::traffic::Traffic;

/// What a message counts against the window beyond its payload: about what its receiver keeps to remember it, so that
/// messages of few bytes, or of none, have a limit, too.
const MESSAGE_BYTES: u64 = 128;
/// Messages that fit into a window besides as many bytes as were set.
const FREE_MESSAGES: u64 = 16;

struct Member {
    peer: PeerId,
    /// Bytes that may still be sent ahead of the receiver's calls.
    eager_left: u64,
    /// Eager bytes consumed here and not yet given back.
    owed: u64,
    /// Number of the last call that the rank was seen to take part in.
    last_seq: Option<u64>,
    left: bool,
    /// It has spoken of the group's failure.
    knows: bool,
    /// Of frames that carry data of this group's calls: grants and other control frames are counted with the link alone.
    traffic: Traffic,
}

/// The ranks a power of two before and behind a rank, without itself: they are linked from the beginning. What each rank passes
/// on to its own reaches all of them within a logarithm of their number, also when some of the links between them are broken.
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
    /// `eager`: how far to be ahead of each rank; 0 is not at all.
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

    /// Number of ranks.
    pub fn world(&self) -> u32 {
        self.members.len() as u32
    }

    /// All ranks in order.
    pub fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        (0..self.world()).map(Rank)
    }

    /// See [`neighbours`].
    pub fn neighbours(&self, rank: Rank) -> impl Iterator<Item = Rank> + use<> {
        neighbours(rank, self.world())
    }

    /// The peer that a rank is.
    #[inline]
    pub fn peer(&self, rank: Rank) -> PeerId {
        self.members[rank.index()].peer
    }

    #[inline]
    pub(crate) fn rank_of(&self, peer: PeerId) -> Option<Rank> {
        self.by_peer.get(&peer).copied()
    }

    /// Whether a message of so many bytes may be sent ahead of the receiver's call.
    #[inline]
    pub(crate) fn has_eager_room(&self, rank: Rank, bytes: u64) -> bool {
        self.members[rank.index()].eager_left >= bytes + MESSAGE_BYTES
    }

    /// Counts a message that is sent ahead.
    #[inline]
    pub(crate) fn take_eager(&mut self, rank: Rank, bytes: u64) {
        self.members[rank.index()].eager_left -= bytes + MESSAGE_BYTES;
    }

    /// The peer gave back what it consumed.
    pub(crate) fn on_window(&mut self, rank: Rank, bytes: u64) {
        let window = self.window;
        let member = &mut self.members[rank.index()];
        member.eager_left = member.eager_left.saturating_add(bytes).min(window);
    }

    /// Returns the credit of a message that was sent ahead and is consumed to its sender, in batches of half a window.
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

    /// A frame of a call was sent to a rank.
    #[inline]
    pub(crate) fn note_sent(&mut self, rank: Rank, payload_bytes: u64) {
        self.members[rank.index()].traffic.add_sent(payload_bytes);
    }

    /// One has come from a rank.
    #[inline]
    pub(crate) fn note_received(&mut self, rank: Rank, payload_bytes: u64) {
        self.members[rank.index()].traffic.add_received(payload_bytes);
    }

    /// A frame of a call found no room, or no link yet.
    pub(crate) fn note_stall(&mut self, rank: Rank) {
        self.members[rank.index()].traffic.stalls += 1;
    }

    /// What has gone to a rank and come from there for this group.
    pub fn traffic(&self, rank: Rank) -> Traffic {
        self.members[rank.index()].traffic
    }

    /// What may still be sent ahead of a rank, what is owed to it, and the window, in bytes.
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

    /// A rank has spoken of the group's failure.
    pub(crate) fn set_knows(&mut self, rank: Rank) {
        self.members[rank.index()].knows = true;
    }

    pub(crate) fn knows(&self, rank: Rank) -> bool {
        self.members[rank.index()].knows
    }

    pub(crate) fn has_left(&self, rank: Rank) -> bool {
        self.members[rank.index()].left
    }

    /// Whether nothing more comes from a rank: it has left the group, or its process has gone.
    pub(crate) fn is_absent(&self, rank: Rank, net: &Net) -> bool {
        self.has_left(rank) || net.peer(self.peer(rank)).gone().is_some()
    }

    /// `rank 1 (host a, pid 7)`
    pub fn describe(&self, rank: Rank, net: &Net) -> String {
        format!("rank {rank} ({})", net.host_and_pid(self.peer(rank)))
    }
}
