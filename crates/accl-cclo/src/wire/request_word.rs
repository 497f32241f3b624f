//! The word before each packet over RDMA: what the network engine is to do with it.

use super::WORD_BYTES;

/// What is asked of the network engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verb {
    /// Data for an address of the peer, without a header.
    Write,
    /// A message with a header.
    Send,
}

/// The word before a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestWord {
    /// Where the rest of a write goes.
    pub address: u64,
    /// Bytes of this packet and those after it.
    pub bytes: u32,
    /// The address is one in host memory.
    pub is_host: bool,
    /// Queue pair of the peer.
    pub queue_pair: u16,
    /// What is asked.
    pub verb: Verb,
}

impl RequestWord {
    /// As it is sent.
    pub fn to_bytes(&self) -> [u8; WORD_BYTES] {
        let mut bytes = [0; WORD_BYTES];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.bytes.to_le_bytes());
        bytes[12] = u8::from(self.is_host);
        bytes[13..15].copy_from_slice(&self.queue_pair.to_le_bytes());
        bytes[15] = self.verb.number();
        bytes
    }

    /// As it comes. `None`: its verb means nothing.
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
    /// As a request word has it.
    pub fn number(self) -> u8 {
        match self {
            Self::Write => 1,
            Self::Send => 2,
        }
    }

    /// From a request word.
    pub fn from_number(number: u8) -> Option<Self> {
        [Self::Write, Self::Send].into_iter().find(|verb| verb.number() == number)
    }
}
