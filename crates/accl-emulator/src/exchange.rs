//! Exchange memory, as firmware reads and writes it.

use accl_cclo::memory_map::{
    ArithmeticHead, Communicator, EXCHANGE_MEMORY_BYTES, RX_BUFFER_COUNT, RankEntry, Register, RxBuffer, SPARE_BUFFERS,
    TABLES_BEGIN,
};

const WORDS: usize = EXCHANGE_MEMORY_BYTES as usize / 4;
/// Word offsets, in a rank's entry, of the sequence numbers that the engine counts.
const INBOUND: usize = 2;
const OUTBOUND: usize = 3;

/// Exchange memory.
pub(crate) struct Exchange {
    words: Box<[u32; WORDS]>,
}

/// How an engine treats the elements of a call.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Elements {
    /// Size of an element in memory, in bytes.
    pub(crate) uncompressed: usize,
    /// Size of an element on a compressed wire, in bytes.
    pub(crate) compressed: usize,
    /// Whether arithmetic works on the compressed form.
    pub(crate) adds_compressed: bool,
    /// Stream destinations of SUM and MAX.
    pub(crate) functions: [Option<u32>; 2],
}

impl Default for Exchange {
    fn default() -> Self {
        Self { words: Box::new([0; WORDS]) }
    }
}

impl Exchange {
    /// Returns a word, or `None` if there is none at this byte offset.
    pub(crate) fn word(&self, offset: u32) -> Option<u32> {
        offset.is_multiple_of(4).then(|| self.words.get(offset as usize / 4).copied()).flatten()
    }

    /// Sets a word. Returns `false` if there is none at this byte offset.
    pub(crate) fn set_word(&mut self, offset: u32, value: u32) -> bool {
        let word = self.words.get_mut(offset as usize / 4).filter(|_| offset.is_multiple_of(4));
        word.map(|word| *word = value).is_some()
    }

    pub(crate) fn get(&self, register: Register) -> u32 {
        self.words[register.offset as usize / 4]
    }

    pub(crate) fn set(&mut self, register: Register, value: u32) {
        self.words[register.offset as usize / 4] = value;
    }

    fn words_at<const COUNT: usize>(&self, offset: u32) -> Option<&[u32; COUNT]> {
        let begin = (offset as usize / 4).min(WORDS);
        self.words[begin..].first_chunk()
    }

    pub(crate) fn spare_buffer(&self, index: usize) -> u64 {
        let [low, high] = SPARE_BUFFERS[index];
        u64::from(self.get(high)) << 32 | u64::from(self.get(low))
    }

    fn rx_buffer_at(index: usize) -> u32 {
        TABLES_BEGIN + (4 * RxBuffer::COUNT * index) as u32
    }

    /// Returns the byte offset at which the table of rx buffers ends.
    pub(crate) fn rx_buffers_end(&self) -> u32 {
        let bytes = u64::from(self.get(RX_BUFFER_COUNT)) * 4 * RxBuffer::COUNT as u64;
        u32::try_from(u64::from(TABLES_BEGIN) + bytes).unwrap_or(u32::MAX)
    }

    pub(crate) fn rx_buffer(&self, index: usize) -> Option<RxBuffer> {
        self.words_at(Self::rx_buffer_at(index)).map(RxBuffer::from_words)
    }

    pub(crate) fn set_rx_buffer(&mut self, index: usize, buffer: &RxBuffer) {
        for (word, at) in buffer.to_words().into_iter().zip((Self::rx_buffer_at(index)..).step_by(4)) {
            self.set_word(at, word);
        }
    }

    pub(crate) fn communicator(&self, offset: u32) -> Option<Communicator> {
        Communicator::from_words(self.words.get(offset as usize / 4..)?)
    }

    /// Returns the byte offset of a rank's entry; beyond exchange memory if the entry cannot exist.
    fn entry_at(communicator: u32, rank: u32) -> u32 {
        let behind = u32::try_from(4 * Communicator::entry_at(rank as usize)).unwrap_or(u32::MAX);
        communicator.saturating_add(behind)
    }

    pub(crate) fn rank(&self, communicator: u32, rank: u32) -> Option<RankEntry> {
        self.words_at(Self::entry_at(communicator, rank)).map(RankEntry::from_words)
    }

    /// Counts a message that arrived from a rank.
    pub(crate) fn count_inbound(&mut self, communicator: u32, rank: u32) {
        self.count(communicator, rank, INBOUND);
    }

    /// Counts a message that goes to a rank.
    pub(crate) fn count_outbound(&mut self, communicator: u32, rank: u32) {
        self.count(communicator, rank, OUTBOUND);
    }

    fn count(&mut self, communicator: u32, rank: u32, word: usize) {
        let at = Self::entry_at(communicator, rank).saturating_add(4 * word as u32);
        let next = self.word(at).unwrap_or_default().wrapping_add(1);
        self.set_word(at, next);
    }

    pub(crate) fn elements(&self, offset: u32) -> Option<Elements> {
        let head = ArithmeticHead::from_words(self.words_at(offset)?);
        let function = |index: u32| {
            let at = offset.saturating_add(4 * (ArithmeticHead::COUNT as u32 + index));
            (index < head.functions).then(|| self.word(at)).flatten()
        };
        Some(Elements {
            uncompressed: head.uncompressed_bytes as usize,
            compressed: head.compressed_bytes as usize,
            adds_compressed: head.adds_compressed != 0,
            functions: [function(0), function(1)],
        })
    }
}
