//! Memory of frames: buffers of a few sizes that are reused.
//!
//! Owns the unused buffers. Knows neither MPI nor links.

/// Maximum number of unused buffers of one size that are kept.
const KEPT: usize = 32;
/// Size of the smallest buffer, as a power of two.
const LEAST_SHIFT: u32 = 8;

/// Memory for one frame. Its address stays the same when the buffer is moved.
#[derive(Debug)]
pub(crate) struct Buffer(Box<[u64]>);

impl Buffer {
    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.0.as_ptr().cast()
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }

    fn shift(&self) -> u32 {
        (self.0.len() * size_of::<u64>()).trailing_zeros()
    }
}

/// Unused buffers, by size.
#[derive(Debug, Default)]
pub(crate) struct Spare(Vec<Vec<Buffer>>);

impl Spare {
    /// Returns a buffer of at least `bytes` bytes.
    pub(crate) fn take(&mut self, bytes: usize) -> Buffer {
        let shift = bytes.next_power_of_two().trailing_zeros().max(LEAST_SHIFT);
        self.of(shift).pop().unwrap_or_else(|| Buffer(vec![0; (1_usize << shift) / size_of::<u64>()].into()))
    }

    pub(crate) fn give_back(&mut self, buffer: Buffer) {
        let kept = self.of(buffer.shift());
        if kept.len() < KEPT {
            kept.push(buffer);
        }
    }

    fn of(&mut self, shift: u32) -> &mut Vec<Buffer> {
        let index = (shift - LEAST_SHIFT) as usize;
        if self.0.len() <= index {
            self.0.resize_with(index + 1, Vec::new);
        }
        &mut self.0[index]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_has_room_and_is_used_again() {
        let mut spare = Spare::default();
        for bytes in [1, 256, 257, 65_536 + 104] {
            let mut buffer = spare.take(bytes);
            assert!(buffer.0.len() * 8 >= bytes && buffer.as_ptr().cast::<u64>().is_aligned());
            let address = buffer.as_mut_ptr();
            spare.give_back(buffer);
            assert_eq!(spare.take(bytes).as_mut_ptr(), address);
        }
    }
}
