//! Queue pairs: the data that both ends exchange, and the words that the card takes.

use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

/// One end of a queue pair, with the data that the other end needs. Ranks exchange ends as text before their devices are set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct QueuePair {
    /// IPv4 address of the card.
    pub(super) ip: Ipv4Addr,
    /// Number of the queue pair on the card.
    pub(super) number: u32,
    /// Sequence number of the first packet, in 24 bits.
    pub(super) first_packet: u32,
    /// Key of the queue pair's memory.
    pub(super) key: u16,
    /// Address of the queue pair's page of memory.
    pub(super) address: u64,
    /// Size of that page in bytes.
    pub(super) bytes: u64,
}

/// Bits of a queue pair's number and of a packet's sequence number.
const NUMBER_BITS: u32 = 10;
const PACKET_BITS: u32 = 24;
const REGION_MASK: u32 = 0xF;
const CONTEXT_MASK: u32 = 0x3F;
const CONTEXT_BITS: u32 = 6;
const ADDRESS_BITS: u32 = 48;
/// Bit positions of fields in the words.
const CONTEXT_NUMBER_SHIFT: u32 = 32;
const CONTEXT_ADDRESS_SHIFT: u32 = 16;
const CONNECTION_REMOTE_SHIFT: u32 = 16;
const CONNECTION_PORT_SHIFT: u32 = 40;
const CONNECTION_NUMBER_MASK: u64 = 0xFFFF;

impl QueuePair {
    /// Serializes the ends of a rank: one for each other rank, and `None` for the rank itself.
    pub(super) fn all_to_text(ends: &[Option<Self>]) -> String {
        // Serialization of numbers cannot fail.
        serde_json::to_string(ends).unwrap_or_default()
    }

    /// Parses the ends of a rank.
    pub(super) fn all_from_text(text: &str) -> Result<Vec<Option<Self>>, serde_json::Error> {
        serde_json::from_str(text)
    }

    /// Returns whether the numbers fit into their fields on the card.
    pub(super) fn is_sound(&self) -> bool {
        self.number < 1 << NUMBER_BITS && self.first_packet < 1 << PACKET_BITS
    }

    /// Returns the queue pair number for a context in a region.
    pub(super) fn number_of(region: u32, context: u64) -> u32 {
        (region & REGION_MASK) << CONTEXT_BITS | context as u32 & CONTEXT_MASK
    }

    /// Reduces a random number to a packet sequence number of 24 bits.
    pub(super) fn first_packet_of(random: u64) -> u32 {
        random as u32 & ((1 << PACKET_BITS) - 1)
    }

    /// Returns the words that set up this end.
    pub(super) fn context_words(&self, remote: &Self) -> [u64; 3] {
        let number = u64::from(self.number) & ((1 << NUMBER_BITS) - 1);
        let address = remote.address & ((1 << ADDRESS_BITS) - 1);
        [
            number << CONTEXT_NUMBER_SHIFT,
            u64::from(self.first_packet) << PACKET_BITS | u64::from(remote.first_packet),
            address << CONTEXT_ADDRESS_SHIFT | u64::from(remote.key),
        ]
    }

    /// Returns the words that connect this end. The other end's global identifier is its IPv4 address, four times.
    pub(super) fn connection_words(&self, remote: &Self, port: u64) -> [u64; 3] {
        let [local, other] = [self.number, remote.number].map(|number| u64::from(number) & CONNECTION_NUMBER_MASK);
        let ip = u64::from(remote.ip.to_bits());
        let twice = ip << u32::BITS | ip;
        [local | other << CONNECTION_REMOTE_SHIFT | port << CONNECTION_PORT_SHIFT, twice, twice]
    }
}
