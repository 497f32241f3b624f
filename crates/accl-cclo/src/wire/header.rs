//! The header of a message: one word of 64 bytes, little-endian.

use super::WORD_BYTES;

/// Kernel streams are numbered on the wire from here on; zero is memory.
pub const STREAM_OFFSET: u32 = 9;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MessageKind {
    /// Data that waits in an rx buffer until somebody asks for them.
    Eager,
    /// Data for an address that the receiver has said.
    Rendezvous,
    /// The address that a receiver wants its data at; counts elements.
    Address,
    /// All data of a rendezvous are there; counts bytes.
    Done,
}

/// The header of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Bytes of payload; elements if the message says an address.
    pub count: u32,
    /// Its tag.
    pub tag: u32,
    /// Rank in the communicator that sends it.
    pub source: u32,
    /// Number of the message between two ranks of a communicator, in one direction.
    pub sequence: u32,
    /// Zero for memory; else a kernel stream, [`STREAM_OFFSET`] higher.
    pub stream: u32,
    /// Session or queue pair that it goes to.
    pub destination: u16,
    /// What it is.
    pub kind: MessageKind,
    /// The address is one in host memory.
    pub is_host: bool,
    /// Where its data go, if a receiver has said so.
    pub address: u64,
    /// Which communicator it is of, as its ranks agree on; zero in the original, which does not tell.
    pub communicator: u32,
    /// Number of its first packet among all packets to the same engine, from one on; zero in the original, which does not count them.
    pub packet_number: u32,
}

impl MessageKind {
    const ALL: [Self; 4] = [Self::Eager, Self::Rendezvous, Self::Address, Self::Done];

    /// As a header has it.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// From a header.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.number() == number)
    }
}

impl Header {
    /// As it is sent.
    pub fn to_bytes(&self) -> [u8; WORD_BYTES] {
        let mut bytes = [0; WORD_BYTES];
        for (index, word) in [self.count, self.tag, self.source, self.sequence, self.stream].iter().enumerate() {
            bytes[4 * index..4 * index + 4].copy_from_slice(&word.to_le_bytes());
        }
        bytes[20..22].copy_from_slice(&self.destination.to_le_bytes());
        (bytes[22], bytes[23]) = (self.kind.number(), u8::from(self.is_host));
        bytes[24..32].copy_from_slice(&self.address.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.communicator.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.packet_number.to_le_bytes());
        bytes
    }

    /// As it comes. `None`: its kind means nothing.
    pub fn from_bytes(bytes: &[u8; WORD_BYTES]) -> Option<Self> {
        let (words, _) = bytes.as_chunks::<4>();
        let word = |index: usize| u32::from_le_bytes(words[index]);
        Some(Self {
            count: word(0),
            tag: word(1),
            source: word(2),
            sequence: word(3),
            stream: word(4),
            destination: u16::from_le_bytes([bytes[20], bytes[21]]),
            kind: MessageKind::from_number(bytes[22])?,
            is_host: bytes[23] != 0,
            address: crate::words::address(word(6), word(7)),
            communicator: word(8),
            packet_number: word(9),
        })
    }

    /// The number of the packet after the one with this number, which is never zero.
    pub fn packet_number_after(number: u32) -> u32 {
        number.checked_add(1).unwrap_or(1)
    }

    /// Bytes of payload that follow.
    pub fn payload_bytes(&self) -> usize {
        match self.kind {
            MessageKind::Eager | MessageKind::Rendezvous => self.count as usize,
            MessageKind::Address | MessageKind::Done => 0,
        }
    }
}
