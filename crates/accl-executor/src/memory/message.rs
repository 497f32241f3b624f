//! The memory of a point-to-point message.
//!
//! This module copies between frames and the one tensor of a message, within bounds. `exec::transfer` decides the order
//! of the bytes. Read [`MessageMemory`] first.

use super::buffers::Buffers;
use crate::call::TensorDesc;

/// Memory that a send reads or a receive writes.
pub(crate) struct MessageMemory {
    buffers: Buffers,
    total: u64,
}

impl MessageMemory {
    /// Creates the memory of a call. `buffers` were prepared for that call, and `tensor` is its tensor.
    pub(crate) fn new(buffers: Buffers, tensor: &TensorDesc) -> Self {
        Self { buffers, total: tensor.len_bytes() }
    }

    /// Returns the size of the message in bytes.
    #[inline]
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Returns whether `len` bytes from `at` on lie within the message.
    fn holds(&self, at: u64, len: usize) -> bool {
        at.checked_add(len as u64).is_some_and(|end| end <= self.total)
    }

    /// Copies the bytes from `at` on into a frame.
    ///
    /// # Panics
    /// Panics if they end beyond the message.
    pub(crate) fn read(&self, at: u64, into: &mut [u8]) {
        assert!(self.holds(at, into.len()), "a fragment ends within its message");
        if !into.is_empty() {
            let from = self.buffers.input(0).wrapping_add(at as usize);
            // SAFETY: the input holds `total` bytes that stay readable until the call completes, and `holds` was
            // checked.
            unsafe { accl_kernels::copy(into.as_mut_ptr(), from, into.len()) };
        }
    }

    /// Copies the payload of a frame to byte `at`.
    ///
    /// # Panics
    /// Panics if it ends beyond the message.
    pub(crate) fn write(&mut self, at: u64, data: &[u8]) {
        assert!(self.holds(at, data.len()), "a fragment ends within its message");
        if !data.is_empty() {
            let at = self.buffers.output(0).wrapping_add(at as usize);
            // SAFETY: the output holds `total` bytes that stay writable until the call completes, and `holds` was
            // checked.
            unsafe { accl_kernels::copy(at, data.as_ptr(), data.len()) };
        }
    }

    /// Copies a staged receive into the caller's tensor.
    pub(crate) fn unpack(&mut self) {
        self.buffers.unpack();
    }
}
