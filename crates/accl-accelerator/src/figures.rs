//! Figures that kernels write to pinned memory: buckets that became NaN, and squares of tiles.
//!
//! This module owns one block of memory for all calls of a type of device, and which slots of it are free. A slot whose launch may
//! still run is never given to another one. The block is pinned in a thread that issues a call: pinning may wait for the device,
//! and the thread that follows kernels must not. Read [`Figures::take`] first.

use std::sync::Arc;

use accl_engine::codec::NonFinite;
use accl_engine::{LentMemory, Squares};
use accl_types::{Error, Result};
use parking_lot::Mutex;

use crate::pinned::PinnedMemory;

/// Maximum tiles of a launch.
pub(crate) const MOST_TILES: usize = 512;

/// Number of slots: launches in flight that are measured. Others wait. Together they have almost 1 MiB.
const SLOTS: usize = 127;
/// Bytes of the two counters of a slot.
const COUNTS_BYTES: usize = 16;
/// Bytes of the squares of a tile.
pub(crate) const SQUARES_BYTES: usize = 16;
const SLOT_BYTES: usize = COUNTS_BYTES + MOST_TILES * SQUARES_BYTES;

/// Figures of the launches of a type of device.
#[derive(Debug)]
pub(crate) struct Figures {
    pinned: Arc<PinnedMemory>,
    block: Mutex<Option<Block>>,
}

#[derive(Debug)]
struct Block {
    /// Owner of the slots.
    _memory: LentMemory,
    free: Vec<Slot>,
    /// Number of slots that launches have.
    used: usize,
}

/// Memory for the figures of one launch. If it is dropped, the memory is never used again.
#[derive(Debug)]
pub(crate) struct Slot(*mut u8);

// SAFETY: the owner of a slot has exclusive access to its memory, which lives as long as the process.
unsafe impl Send for Slot {}

// SAFETY: a shared reference gives access to nothing but the address.
unsafe impl Sync for Slot {}

impl Slot {
    /// Returns the address of two 64-bit counters: buckets that are not finite, and buckets that are too large.
    pub(crate) fn counters(&self) -> u64 {
        self.0.addr() as u64
    }

    /// Returns the address of [`SQUARES_BYTES`] bytes for each of [`MOST_TILES`] tiles.
    pub(crate) fn squares(&self) -> u64 {
        self.0.wrapping_add(COUNTS_BYTES).addr() as u64
    }
}

impl Figures {
    pub(crate) fn new(pinned: Arc<PinnedMemory>) -> Arc<Self> {
        Arc::new(Self { pinned, block: Mutex::default() })
    }

    /// Pins the memory, unless that was done. Returns whether there is memory.
    pub(crate) fn reserve(&self) -> bool {
        let mut block = self.block.lock();
        if block.is_none()
            && let Some(memory) = self.pinned.lend(SLOTS * SLOT_BYTES, || {})
        {
            let slots = (0..SLOTS).map(|index| Slot(memory.address().wrapping_add(index * SLOT_BYTES)));
            *block = Some(Block { free: slots.collect(), used: 0, _memory: memory });
        }
        block.is_some()
    }

    /// Returns a slot whose counters are zeros; `None` if one becomes free later.
    ///
    /// # Errors
    /// `Exhausted` if none becomes free. `Internal` before [`Figures::reserve`].
    pub(crate) fn take(&self) -> Result<Option<Slot>> {
        let mut block = self.block.lock();
        let block = block.as_mut().ok_or_else(|| Error::internal("no memory was reserved for figures"))?;
        let Some(slot) = block.free.pop() else {
            let none =
                || Error::exhausted("all memory for figures was lost with calls that failed: restart the process");
            return if block.used > 0 { Ok(None) } else { Err(none()) };
        };
        block.used += 1;
        // SAFETY: the slot has these bytes, and no launch uses it.
        unsafe { std::ptr::write_bytes(slot.0, 0, COUNTS_BYTES) };
        Ok(Some(slot))
    }

    /// Frees a slot whose launch is done. Returns its counts, and the squares of the first `tiles` tiles.
    pub(crate) fn take_back(&self, slot: Slot, tiles: usize) -> (NonFinite, Vec<Squares>) {
        let word = |index: usize| {
            // SAFETY: the slot has this word, and the launch that wrote it is done.
            unsafe { slot.0.cast::<u64>().wrapping_add(index).read() }
        };
        let counts = NonFinite { not_finite: word(0) as usize, too_large: word(1) as usize };
        let squares = (1..=tiles).map(|tile| {
            let [gradient, lost] = [2 * tile, 2 * tile + 1].map(|index| f64::from_bits(word(index)));
            Squares { gradient, lost }
        });
        let squares = squares.collect();
        if let Some(block) = self.block.lock().as_mut() {
            block.used -= 1;
            block.free.push(slot);
        }
        (counts, squares)
    }

    /// Gives up a slot whose launch may run for ever.
    pub(crate) fn lose(&self, _: Slot) {
        if let Some(block) = self.block.lock().as_mut() {
            block.used -= 1;
        }
    }
}
