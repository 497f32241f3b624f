//! Header of a message: one word of 64 bytes, little-endian.

use super::WORD_BYTES;

/// Offset added to a kernel stream's number on the wire, where zero means memory.
pub const STREAM_OFFSET: u32 = 9;

/// Kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MessageKind {
    /// Data that is kept in an rx buffer until a call asks for it.
    Eager,
    /// Data for an address that the receiver has announced.
    Rendezvous,
    /// Announces the address at which a receiver wants its data; the count is in elements.
    Address,
    /// Reports that all data of a rendezvous was sent; the count is in bytes.
    Done,
}

/// The header of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Bytes of payload; for [`MessageKind::Address`], elements.
    pub count: u32,
    /// Tag of the message.
    pub tag: u32,
    /// Rank of the sender in the communicator.
    pub source: u32,
    /// Sequence number of the message, per communicator, pair of ranks and direction.
    pub sequence: u32,
    /// Zero for memory; otherwise the number of a kernel stream plus [`STREAM_OFFSET`].
    pub stream: u32,
    /// Session or queue pair that the message goes to.
    pub destination: u16,
    /// Kind of the message.
    pub kind: MessageKind,
    /// Whether `address` is in host memory.
    pub is_host: bool,
    /// Destination address of the data, if the receiver has announced one.
    pub address: u64,
    /// Identifier of the communicator, on which its ranks agree. Zero in the original, which does not send it.
    pub communicator: u32,
    /// Number of the message's first packet among all packets to the same engine, starting at one. Zero in the original, which does not count
    /// packets.
    pub packet_number: u32,
}

impl MessageKind {
    const ALL: [Self; 4] = [Self::Eager, Self::Rendezvous, Self::Address, Self::Done];

    /// Returns the kind's number in a header.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// Returns the kind with this number in a header, or `None` if there is none.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.number() == number)
    }
}

impl Header {
    /// Returns the header as it is sent.
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

    /// Parses a received header. Returns `None` if its kind is unknown.
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

    /// Returns the number of the packet after packet `number`. It is never zero.
    pub fn packet_number_after(number: u32) -> u32 {
        number.checked_add(1).unwrap_or(1)
    }

    /// Returns the number of payload bytes that follow the header.
    pub fn payload_bytes(&self) -> usize {
        match self.kind {
            MessageKind::Eager | MessageKind::Rendezvous => self.count as usize,
            MessageKind::Address | MessageKind::Done => 0,
        }
    }
}
