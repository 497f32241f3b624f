//! A memory of an engine or of its host: bytes from address 0 on, which reach as far as somebody has asked for.

/// Addresses are kept in signed 32 bits by the original, so memory stays below this.
const MOST_BYTES: u64 = 1 << 31;

/// A memory.
#[derive(Debug, Default)]
pub struct Memory {
    bytes: Vec<u8>,
}

impl Memory {
    /// Has it reach so far at least. `false`: nobody has so much.
    pub fn grow(&mut self, address: u64, bytes: u64) -> bool {
        let Some(end) = address.checked_add(bytes).filter(|&end| end < MOST_BYTES) else { return false };
        let end = end as usize;
        if end > self.bytes.len() {
            self.bytes.resize(end, 0);
        }
        true
    }

    /// So many bytes at an address; `None` if it does not reach so far.
    pub fn read(&self, address: u64, bytes: usize) -> Option<&[u8]> {
        let begin = usize::try_from(address).ok()?;
        self.bytes.get(begin..begin.checked_add(bytes)?)
    }

    /// The same, to be written.
    pub fn read_mut(&mut self, address: u64, bytes: usize) -> Option<&mut [u8]> {
        let begin = usize::try_from(address).ok()?;
        self.bytes.get_mut(begin..begin.checked_add(bytes)?)
    }

    /// How far it reaches.
    pub fn len_bytes(&self) -> usize {
        self.bytes.len()
    }
}
