//! The bytes of a reference: which window, and where in it.
//!
//! Owns the layout. All ranks of a call are on one host and have one version, so numbers have the host's byte order. Read
//! [`Reference`] first.
//!
//! ```text
//! 0   handle with which a process imports the window   64 bytes
//! 64  number of the window, drawn at random             8
//! 72  bytes of the window                               8
//! 80  first byte of the chunk in the window             8
//! ```

use accl_engine::REFERENCE_BYTES;
use accl_gpu::IpcHandle;

const HANDLE_BYTES: usize = 64;

/// Device memory that a process lets other processes import.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WindowId {
    pub(crate) handle: IpcHandle,
    /// Number that no other window has.
    pub(crate) number: u64,
    pub(crate) len_bytes: u64,
}

/// Place of a published chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reference {
    pub(crate) window: WindowId,
    pub(crate) offset: u64,
}

impl Reference {
    pub(crate) fn to_bytes(self) -> [u8; REFERENCE_BYTES] {
        let mut bytes = [0; REFERENCE_BYTES];
        bytes[..HANDLE_BYTES].copy_from_slice(&self.window.handle.to_bytes());
        let words = [self.window.number, self.window.len_bytes, self.offset];
        for (room, word) in bytes[HANDLE_BYTES..].chunks_exact_mut(8).zip(words) {
            room.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8; REFERENCE_BYTES]) -> Self {
        let mut handle = [0; HANDLE_BYTES];
        handle.copy_from_slice(&bytes[..HANDLE_BYTES]);
        let word = |index: usize| {
            let at = HANDLE_BYTES + 8 * index;
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_ne_bytes(word)
        };
        let window = WindowId { handle: IpcHandle::from_bytes(handle), number: word(0), len_bytes: word(1) };
        Self { window, offset: word(2) }
    }

    /// Returns whether the window has `len_bytes` bytes from this place on.
    pub(crate) fn has(&self, len_bytes: u64) -> bool {
        self.offset.checked_add(len_bytes).is_some_and(|end| end <= self.window.len_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reference_is_read_as_it_was_written() {
        let handle = IpcHandle::from_bytes(std::array::from_fn(|index| index as u8));
        let window = WindowId { handle, number: 7, len_bytes: 1 << 21 };
        let reference = Reference { window, offset: 4096 };
        assert_eq!(Reference::from_bytes(&reference.to_bytes()), reference);
        assert!(reference.has((1 << 21) - 4096) && !reference.has((1 << 21) - 4095) && !reference.has(u64::MAX));
    }
}
