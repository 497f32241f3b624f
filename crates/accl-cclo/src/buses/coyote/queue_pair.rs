//! Queue pairs: what the ends of one tell each other, and the words that the card takes of both.

use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

/// One end of a queue pair, as the other end needs to know it. Ranks exchange these, as text, before their devices are set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct QueuePair {
    /// Address of the card.
    pub(super) ip: Ipv4Addr,
    /// Number of the queue pair on it.
    pub(super) number: u32,
    /// Number of the first packet, of 24 bits.
    pub(super) first_packet: u32,
    /// Key of its memory.
    pub(super) key: u16,
    /// Where its page of memory is.
    pub(super) address: u64,
    /// Bytes of that page.
    pub(super) bytes: u64,
}

/// Bits of the numbers of a queue pair and of a packet.
const NUMBER_BITS: u32 = 10;
const PACKET_BITS: u32 = 24;
const REGION_MASK: u32 = 0xF;
const CONTEXT_MASK: u32 = 0x3F;
const CONTEXT_BITS: u32 = 6;
const ADDRESS_BITS: u32 = 48;
/// Where fields stand in the words.
const CONTEXT_NUMBER_SHIFT: u32 = 32;
const CONTEXT_ADDRESS_SHIFT: u32 = 16;
const CONNECTION_REMOTE_SHIFT: u32 = 16;
const CONNECTION_PORT_SHIFT: u32 = 40;
const CONNECTION_NUMBER_MASK: u64 = 0xFFFF;

impl QueuePair {
    /// The ends of a rank, as text: one for each rank, and none for itself.
    pub(super) fn all_to_text(ends: &[Option<Self>]) -> String {
        // Structures of numbers always have a text.
        serde_json::to_string(ends).unwrap_or_default()
    }

    /// From their text; an error says why they are none.
    pub(super) fn all_from_text(text: &str) -> Result<Vec<Option<Self>>, serde_json::Error> {
        serde_json::from_str(text)
    }

    /// Whether its numbers fit where the card has room for them.
    pub(super) fn is_sound(&self) -> bool {
        self.number < 1 << NUMBER_BITS && self.first_packet < 1 << PACKET_BITS
    }

    /// The number of the queue pair of a context in a region.
    pub(super) fn number_of(region: u32, context: u64) -> u32 {
        (region & REGION_MASK) << CONTEXT_BITS | context as u32 & CONTEXT_MASK
    }

    /// A number of 24 bits out of more.
    pub(super) fn first_packet_of(random: u64) -> u32 {
        random as u32 & ((1 << PACKET_BITS) - 1)
    }

    /// The words that set up this end of a queue pair.
    pub(super) fn context_words(&self, remote: &Self) -> [u64; 3] {
        let number = u64::from(self.number) & ((1 << NUMBER_BITS) - 1);
        let address = remote.address & ((1 << ADDRESS_BITS) - 1);
        [
            number << CONTEXT_NUMBER_SHIFT,
            u64::from(self.first_packet) << PACKET_BITS | u64::from(remote.first_packet),
            address << CONTEXT_ADDRESS_SHIFT | u64::from(remote.key),
        ]
    }

    /// The words that connect it. The global identifier of the other end is its address, four times.
    pub(super) fn connection_words(&self, remote: &Self, port: u64) -> [u64; 3] {
        let [local, other] = [self.number, remote.number].map(|number| u64::from(number) & CONNECTION_NUMBER_MASK);
        let ip = u64::from(remote.ip.to_bits());
        let twice = ip << u32::BITS | ip;
        [local | other << CONNECTION_REMOTE_SHIFT | port << CONNECTION_PORT_SHIFT, twice, twice]
    }
}
