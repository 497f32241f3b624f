//! The memory of a message between two ranks.
//!
//! Owns the copying between frames and the one tensor that a message has, within its bounds. In which order bytes come is the matter of
//! `exec::transfer`. Read [`MessageMemory`] first.

use super::buffers::Buffers;
use crate::call::TensorDesc;

/// What a send reads or a receive writes.
pub(crate) struct MessageMemory {
    buffers: Buffers,
    total: u64,
}

impl MessageMemory {
    /// Of the call that these buffers were prepared for, which has this tensor.
    pub(crate) fn new(buffers: Buffers, tensor: &TensorDesc) -> Self {
        Self { buffers, total: tensor.len_bytes() }
    }

    /// Its size in bytes.
    #[inline]
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Whether so many bytes from `at` on are within.
    fn holds(&self, at: u64, len: usize) -> bool {
        at.checked_add(len as u64).is_some_and(|end| end <= self.total)
    }

    /// Copies the bytes from `at` on into a frame.
    ///
    /// # Panics
    /// When they end beyond the message.
    pub(crate) fn read(&self, at: u64, into: &mut [u8]) {
        assert!(self.holds(at, into.len()), "a fragment ends within its message");
        if !into.is_empty() {
            let from = self.buffers.input(0).wrapping_add(at as usize);
            // SAFETY: the input holds `total` bytes that stay readable until the call ends, and these are within.
            unsafe { accl_kernels::copy(into.as_mut_ptr(), from, into.len()) };
        }
    }

    /// Copies what a frame has brought to `at`.
    ///
    /// # Panics
    /// When it ends beyond the message.
    pub(crate) fn write(&mut self, at: u64, data: &[u8]) {
        assert!(self.holds(at, data.len()), "a fragment ends within its message");
        if !data.is_empty() {
            let at = self.buffers.output(0).wrapping_add(at as usize);
            // SAFETY: the output holds `total` bytes that stay writable until the call ends, and these are within.
            unsafe { accl_kernels::copy(at, data.as_ptr(), data.len()) };
        }
    }

    /// Writes what was received into the caller's tensor, where that was not written at once.
    pub(crate) fn unpack(&mut self) {
        self.buffers.unpack();
    }
}
