//! Counters in pinned memory that kernels increase: buckets that became NaN.
//!
//! This module owns one block of memory for all calls of a type of device, and which counters are free. A counter whose launch may
//! still run is never given to another one. Read [`Counters::take`] first.

use std::sync::Arc;

use accl_engine::LentMemory;
use accl_engine::codec::NonFinite;
use parking_lot::Mutex;

use crate::pinned::PinnedMemory;

/// Number of counters.
const COUNT: usize = 2048;
/// Bytes of a counter: two 64-bit numbers.
const BYTES: usize = 16;

/// The counters of a type of device.
#[derive(Debug)]
pub(crate) struct Counters {
    pinned: Arc<PinnedMemory>,
    block: Mutex<Option<Block>>,
}

#[derive(Debug)]
struct Block {
    memory: LentMemory,
    free: Vec<usize>,
}

/// Right to a counter. If it is dropped, the counter is never used again.
#[derive(Debug)]
pub(crate) struct Counter(usize);

impl Counters {
    pub(crate) fn new(pinned: Arc<PinnedMemory>) -> Arc<Self> {
        Arc::new(Self { pinned, block: Mutex::default() })
    }

    /// Returns a counter of zeros; `None` if none is free, or no memory can be pinned.
    pub(crate) fn take(&self) -> Option<Counter> {
        let mut block = self.block.lock();
        if block.is_none() {
            let memory = self.pinned.lend(COUNT * BYTES, || {})?;
            *block = Some(Block { memory, free: (0..COUNT).collect() });
        }
        let Block { memory, free } = block.as_mut()?;
        let index = free.pop()?;
        // SAFETY: the block has this counter, and no launch uses it.
        unsafe { std::ptr::write_bytes(memory.address().wrapping_add(index * BYTES), 0, BYTES) };
        Some(Counter(index))
    }

    /// Returns the address of a counter.
    pub(crate) fn address(&self, counter: &Counter) -> u64 {
        let block = self.block.lock();
        block.as_ref().map_or(0, |block| block.memory.address().wrapping_add(counter.0 * BYTES).addr() as u64)
    }

    /// Frees a counter whose launch is done. Returns its counts.
    pub(crate) fn take_back(&self, counter: Counter) -> NonFinite {
        let mut block = self.block.lock();
        let Some(Block { memory, free }) = block.as_mut() else { return NonFinite::default() };
        let number = |word: usize| {
            let at = memory.address().wrapping_add(counter.0 * BYTES).cast::<u64>().wrapping_add(word);
            // SAFETY: the block has this counter, and the launch that wrote it is done.
            unsafe { at.read() as usize }
        };
        let counts = NonFinite { not_finite: number(0), too_large: number(1) };
        free.push(counter.0);
        counts
    }
}
