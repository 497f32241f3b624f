//! Eager rx buffers, which hold messages that no call has asked for yet.

use crate::words::{address, halves, words};

words! {
    /// An entry of the table of rx buffers. The host writes addresses and zeros; the engine writes the rest.
    pub struct RxBuffer: 7 words {
        0 status: "Status: see [`RxStatus`].",
        1 address_low: "Address in device memory, low word.",
        2 address_high: "Address in device memory, high word.",
        3 tag: "Tag of the message in the buffer.",
        4 bytes: "Bytes of the message in the buffer.",
        5 source: "Rank of the sender in its communicator.",
        6 sequence: "Sequence number of the message in the buffer.",
    }
}

/// State of an rx buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RxStatus {
    /// Unused.
    Idle,
    /// The engine has handed the buffer to a DMA engine, which waits for a packet.
    Filling,
    /// The buffer holds a message.
    Full,
    /// The data that arrived for the buffer was faulty.
    Failed,
}

impl RxBuffer {
    /// Returns the entry that the host writes: idle, at this address.
    pub fn idle(at: u64) -> Self {
        let [address_low, address_high] = halves(at);
        Self { address_low, address_high, ..Self::default() }
    }

    /// Returns the address of the buffer in device memory.
    pub fn address(&self) -> u64 {
        address(self.address_low, self.address_high)
    }

    /// Returns the state of the buffer, or `None` if the status word is unknown.
    pub fn status(&self) -> Option<RxStatus> {
        RxStatus::from_word(self.status)
    }
}

impl RxStatus {
    const TABLE: [(u32, Self); 4] = [(0, Self::Idle), (1, Self::Filling), (2, Self::Full), (4, Self::Failed)];

    /// Returns the status word in the table.
    pub fn word(self) -> u32 {
        Self::TABLE.iter().find(|(_, status)| *status == self).map_or(0, |(word, _)| *word)
    }

    /// Returns the state for a status word, or `None` if the word is unknown.
    pub fn from_word(word: u32) -> Option<Self> {
        Self::TABLE.iter().find(|(known, _)| *known == word).map(|(_, status)| *status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_keep_their_places() {
        let entry = RxBuffer {
            status: RxStatus::Full.word(),
            tag: 7,
            bytes: 16,
            source: 1,
            sequence: 4,
            ..RxBuffer::idle(0x1_0000_2000)
        };
        assert_eq!(entry.to_words(), [2, 0x2000, 1, 7, 16, 1, 4]);
        assert_eq!(RxBuffer::from_words(&entry.to_words()), entry);
        assert_eq!((entry.address(), entry.status()), (0x1_0000_2000, Some(RxStatus::Full)));
        assert_eq!(RxStatus::from_word(3), None);
        assert!(RxBuffer::WORDS.iter().enumerate().all(|(index, word)| word.index == index));
    }
}
