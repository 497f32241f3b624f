//! Request word that precedes each packet over RDMA and instructs the network engine.

use super::WORD_BYTES;

/// Request to the network engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verb {
    /// Write data to an address of the peer, without a header.
    Write,
    /// Send a message with a header.
    Send,
}

/// The word before a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestWord {
    /// Destination address of this and the following packets of a write.
    pub address: u64,
    /// Bytes of this packet and of those after it in the message.
    pub bytes: u32,
    /// Whether `address` is in host memory.
    pub is_host: bool,
    /// Queue pair of the peer.
    pub queue_pair: u16,
    /// Request to the network engine.
    pub verb: Verb,
}

impl RequestWord {
    /// Returns the word as it is sent.
    pub fn to_bytes(&self) -> [u8; WORD_BYTES] {
        let mut bytes = [0; WORD_BYTES];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.bytes.to_le_bytes());
        bytes[12] = u8::from(self.is_host);
        bytes[13..15].copy_from_slice(&self.queue_pair.to_le_bytes());
        bytes[15] = self.verb.number();
        bytes
    }

    /// Parses a received word. Returns `None` if its verb is unknown.
    pub fn from_bytes(bytes: &[u8; WORD_BYTES]) -> Option<Self> {
        let (words, _) = bytes.as_chunks::<4>();
        let word = |index: usize| u32::from_le_bytes(words[index]);
        Some(Self {
            address: crate::words::address(word(0), word(1)),
            bytes: word(2),
            is_host: bytes[12] != 0,
            queue_pair: u16::from_le_bytes([bytes[13], bytes[14]]),
            verb: Verb::from_number(bytes[15])?,
        })
    }
}

impl Verb {
    /// Returns the verb's number in a request word.
    pub fn number(self) -> u8 {
        match self {
            Self::Write => 1,
            Self::Send => 2,
        }
    }

    /// Returns the verb with this number in a request word, or `None` if there is none.
    pub fn from_number(number: u8) -> Option<Self> {
        [Self::Write, Self::Send].into_iter().find(|verb| verb.number() == number)
    }
}
