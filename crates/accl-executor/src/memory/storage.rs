//! Memory that the executor allocates or borrows: aligned, counted, and kept for reuse.
//!
//! This module allocates staging, scratch and encoded chunks. Read [`Storage`] first.

use accl_types::{Error, Result};

use crate::call::LentMemory;

/// Memory with the alignment of a cache line.
pub(crate) struct Storage(Memory);

enum Memory {
    Owned(Vec<Line>),
    Lent(LentMemory),
}

// SAFETY: a shared reference gives access to nothing but the length.
unsafe impl Sync for Storage {}

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

impl Default for Storage {
    fn default() -> Self {
        Self(Memory::Owned(Vec::new()))
    }
}

impl Storage {
    pub(crate) fn new(len_bytes: usize) -> Result<Self> {
        let lines = len_bytes.div_ceil(64);
        let mut words = Vec::new();
        words
            .try_reserve_exact(lines)
            .map_err(|_| Error::exhausted(format!("no memory for a staging buffer of {len_bytes} bytes")))?;
        // Zeroed, so that gaps between pieces never expose data of other owners.
        words.resize(lines, Line([0; 64]));
        Ok(Self(Memory::Owned(words)))
    }

    pub(crate) fn lent(memory: LentMemory) -> Self {
        Self(Memory::Lent(memory))
    }

    pub(crate) fn ptr(&mut self) -> *mut u8 {
        match &mut self.0 {
            Memory::Owned(words) => words.as_mut_ptr().cast(),
            Memory::Lent(memory) => memory.bytes.ptr,
        }
    }

    pub(crate) fn len_bytes(&self) -> usize {
        match &self.0 {
            Memory::Owned(words) => words.len() * 64,
            Memory::Lent(memory) => memory.bytes.len_bytes() as usize,
        }
    }

    /// Makes room for `len_bytes` bytes. The contents are lost if the memory grows.
    pub(crate) fn grow(&mut self, len_bytes: usize) -> Result<()> {
        if self.len_bytes() < len_bytes {
            *self = Self::new(len_bytes)?;
        }
        Ok(())
    }
}

/// Cache of buffers for encoded chunks. Calls of one kind need equal buffers repeatedly, and new memory is slow.
#[derive(Default)]
pub(crate) struct BufferPool(Vec<Storage>);

/// Maximum number of cached buffers.
const MAX_KEPT: usize = 8;

impl BufferPool {
    /// Returns a buffer of at least `len_bytes` bytes: the smallest cached one that fits, or a new one.
    pub(crate) fn take(&mut self, len_bytes: usize) -> Result<Storage> {
        let fitting = self.0.iter().enumerate().filter(|(_, buffer)| buffer.len_bytes() >= len_bytes);
        match fitting.min_by_key(|(_, buffer)| buffer.len_bytes()).map(|(index, _)| index) {
            Some(index) => Ok(self.0.swap_remove(index)),
            None => Storage::new(len_bytes),
        }
    }

    /// Caches a buffer for later calls. If the cache is full, the smallest buffer is freed.
    pub(crate) fn give(&mut self, buffer: Option<Storage>) {
        self.0.extend(buffer);
        if self.0.len() > MAX_KEPT {
            let smallest = self.0.iter().enumerate().min_by_key(|(_, buffer)| buffer.len_bytes());
            if let Some((index, _)) = smallest {
                self.0.swap_remove(index);
            }
        }
    }
}
