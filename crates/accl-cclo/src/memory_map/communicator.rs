//! Communicators: the ranks that take part in a call, and how an engine reaches each of them.

use std::net::Ipv4Addr;

use crate::words::words;

/// Session number of a rank that has no session.
pub const NO_SESSION: u32 = u32::MAX;
/// Words before the entries of ranks: the number of ranks, and this engine's rank.
const HEAD_WORDS: usize = 2;
/// Index of [`RankEntry::inbound`] within the entry of a rank.
const INBOUND: usize = 2;

words! {
    /// A communicator's entry for one rank.
    pub struct RankEntry: 6 words {
        0 ip: "IPv4 address, the first octet in the top byte.",
        1 port: "Port of the rank.",
        2 inbound: "Sequence number of the next message from the rank, counted by the engine.",
        3 outbound: "Sequence number of the next message to the rank, counted by the engine.",
        4 session: "Socket index (UDP), session (TCP) or number of the queue pair (RDMA); in the emulator, the rank.",
        5 segment_bytes: "Maximum bytes of a segment: a multiple of 64, and at most the size of an rx buffer.",
    }
}

/// A communicator. Firmware caches its head by address, so each communicator is placed at a new address and none is overwritten.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Communicator {
    /// Rank of the engine that holds this communicator.
    pub local: u32,
    /// Entries of all ranks, by rank.
    pub ranks: Vec<RankEntry>,
}

impl RankEntry {
    /// Returns the entry of a rank to which no message was sent yet.
    pub fn new(ip: Ipv4Addr, port: u16, session: u32, segment_bytes: u32) -> Self {
        Self { ip: ip.to_bits(), port: u32::from(port), session, segment_bytes, ..Self::default() }
    }

    /// Returns the rank's IPv4 address.
    pub fn address(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.ip)
    }
}

impl Communicator {
    /// Returns the length in words of a communicator of `ranks` ranks.
    pub const fn word_count(ranks: usize) -> usize {
        HEAD_WORDS + RankEntry::COUNT * ranks
    }

    /// Returns where the entry of a rank begins, in words from the start of the communicator.
    pub const fn entry_at(rank: usize) -> usize {
        Self::word_count(rank)
    }

    /// Returns where the sequence number of the next message from a rank lies, in words from the start of the communicator.
    pub const fn inbound_at(rank: usize) -> usize {
        Self::entry_at(rank) + INBOUND
    }

    /// Returns the communicator as it lies in exchange memory.
    pub fn to_words(&self) -> Vec<u32> {
        let entries = self.ranks.iter().flat_map(RankEntry::to_words);
        [self.ranks.len() as u32, self.local].into_iter().chain(entries).collect()
    }

    /// Parses a communicator from exchange memory. `words` may be longer than the communicator. Returns `None` if `words` is shorter than its head
    /// requires.
    pub fn from_words(words: &[u32]) -> Option<Self> {
        let (head, entries) = words.split_at_checked(HEAD_WORDS)?;
        let (entries, _) = entries.as_chunks::<{ RankEntry::COUNT }>();
        let entries = entries.get(..usize::try_from(head[0]).ok()?)?;
        Some(Self { local: head[1], ranks: entries.iter().map(RankEntry::from_words).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_follow_the_head() {
        let rank =
            |last: u8| RankEntry::new(Ipv4Addr::new(127, 0, 0, last), 5500 + u16::from(last), u32::from(last), 1024);
        let communicator = Communicator { local: 1, ranks: vec![rank(1), rank(2)] };
        let words = communicator.to_words();
        assert_eq!(words.len(), Communicator::word_count(2));
        assert_eq!(words[..4], [2, 1, 0x7F00_0001, 5501]);
        assert_eq!(words[Communicator::entry_at(1)], 0x7F00_0002);
        assert_eq!(Communicator::from_words(&words), Some(communicator.clone()));
        assert_eq!(RankEntry::WORDS[INBOUND].name, "inbound");
        assert_eq!(Communicator::inbound_at(1), Communicator::entry_at(1) + 2);
        assert_eq!(communicator.ranks[1].address(), Ipv4Addr::new(127, 0, 0, 2));
        assert_eq!(Communicator::from_words(&words[..words.len() - 1]), None);
        assert_eq!(Communicator::from_words(&[1]), None);
    }
}
