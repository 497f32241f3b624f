//! Memory of an engine or of its host: bytes from address 0 up to the largest size that was requested.

/// Maximum size of a memory. The original keeps addresses in signed 32-bit integers.
const MOST_BYTES: u64 = 1 << 31;
/// Page size of the operating system in bytes.
const PAGE_BYTES: usize = 4096;
static ZEROS: [u8; PAGE_BYTES] = [0; PAGE_BYTES];

/// A memory. Parts that were never written take up address space only.
#[derive(Debug, Default)]
pub struct Memory {
    /// Contents; zero from `reach` on.
    bytes: Vec<u8>,
    reach: usize,
}

impl Memory {
    /// Grows the memory to include this range. Returns `false` if the range exceeds the maximum size.
    pub fn grow(&mut self, address: u64, bytes: u64) -> bool {
        let Some(end) = address.checked_add(bytes).filter(|&end| end < MOST_BYTES) else { return false };
        let end = end as usize;
        if end > self.bytes.len() {
            // A new zeroed allocation stays untouched, while `resize` would write every byte. Its size doubles, so that small steps do not copy each
            // time.
            let more = (2 * self.bytes.len()).clamp(end, MOST_BYTES as usize);
            let old = std::mem::replace(&mut self.bytes, vec![0; more]);
            let pages = self.bytes[..self.reach].chunks_mut(PAGE_BYTES).zip(old.chunks(PAGE_BYTES));
            for (to, from) in pages {
                let from = &from[..to.len()];
                // Pages that were never written stay untouched.
                if *from != ZEROS[..from.len()] {
                    to.copy_from_slice(from);
                }
            }
        }
        self.reach = self.reach.max(end);
        true
    }

    /// Returns `bytes` bytes at an address, or `None` if the range exceeds the memory.
    pub fn read(&self, address: u64, bytes: usize) -> Option<&[u8]> {
        let begin = usize::try_from(address).ok()?;
        self.bytes[..self.reach].get(begin..begin.checked_add(bytes)?)
    }

    /// Same as [`Memory::read`], for writing.
    pub fn read_mut(&mut self, address: u64, bytes: usize) -> Option<&mut [u8]> {
        let begin = usize::try_from(address).ok()?;
        self.bytes[..self.reach].get_mut(begin..begin.checked_add(bytes)?)
    }

    /// Returns the size of the memory in bytes.
    pub fn len_bytes(&self) -> usize {
        self.reach
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_stays_while_it_grows() {
        let mut memory = Memory::default();
        for step in 0..100u64 {
            assert!(memory.grow(10 * step, 10));
            memory.read_mut(10 * step, 10).unwrap().fill(step as u8);
        }
        assert_eq!(memory.len_bytes(), 1000);
        assert!((0..100u64).all(|step| memory.read(10 * step, 10).unwrap() == [step as u8; 10]));
        assert!(memory.grow(5000, 0));
        assert_eq!(memory.read(1000, 4000), Some(&[0; 4000][..]));
        assert_eq!((memory.read(4999, 2), memory.read(u64::MAX, 2)), (None, None));
    }

    #[test]
    fn a_memory_of_two_gibibytes_is_refused() {
        let mut memory = Memory::default();
        assert!(!memory.grow(0, 1 << 31) && !memory.grow(1 << 40, 1) && !memory.grow(u64::MAX, 1));
        assert_eq!(memory.len_bytes(), 0);
    }
}
