//! Pinned host memory: kept for later calls, within a limit.
//!
//! Pinning memory takes longer than copying it, and training repeats calls of the same sizes. This module owns which
//! memory is kept and which is freed. Freeing can wait for a device, so only [`PinnedMemory::free_excess`] frees, on a
//! thread that may block. Read [`PinnedMemory::lend`] first.

use std::collections::BTreeMap;
use std::sync::Arc;

use accl_engine::LentMemory;
use parking_lot::Mutex;

use crate::streams::{Pinning, StreamEvent};

/// Size of the smallest block.
const LEAST_BYTES: usize = 64 << 10;

/// Bytes of pinned memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PinnedCounts {
    /// Bytes that calls in flight use.
    pub used_bytes: usize,
    /// Bytes that are kept for later calls.
    pub idle_bytes: usize,
}

/// Pinned memory of the process.
#[derive(Debug)]
pub(crate) struct PinnedMemory {
    pinning: Arc<dyn Pinning>,
    /// Maximum bytes of idle memory.
    most_idle: usize,
    state: Mutex<BlockPool>,
}

#[derive(Debug, Default)]
struct BlockPool {
    counts: PinnedCounts,
    /// Idle blocks by size. The blocks of one size are used last in, first out, because the last one is in the cache.
    idle: BTreeMap<usize, Vec<LentMemory>>,
    /// Blocks to be freed.
    excess: Vec<LentMemory>,
    /// Blocks that copies still use, each with the event behind these copies.
    in_flight: Vec<(LentMemory, Box<dyn StreamEvent>)>,
}

impl PinnedMemory {
    pub(crate) fn new(pinning: Arc<dyn Pinning>, most_idle: usize) -> Arc<Self> {
        Arc::new(Self { pinning, most_idle, state: Mutex::default() })
    }

    /// Prepares the calling thread for calls to the device.
    pub(crate) fn enter_thread(&self) {
        self.pinning.enter_thread();
    }

    /// Returns at least `len_bytes` bytes of pinned memory; `None` if this system cannot pin so much. `freed` is called,
    /// under the engine's lock, if [`PinnedMemory::free_excess`] is due.
    pub(crate) fn lend(
        self: &Arc<Self>,
        len_bytes: usize,
        freed: impl Fn() + Send + Sync + 'static,
    ) -> Option<LentMemory> {
        self.take_back();
        let wanted = rounded(len_bytes);
        let block = match self.take_idle(wanted) {
            Some(block) => block,
            // The allocator is asked without the lock, because pinning is slow.
            None => self.pinning.allocate(wanted)?,
        };
        let bytes = block.len_bytes();
        self.state.lock().counts.used_bytes += bytes;
        let home = self.clone();
        Some(block.returned_to(move |block| {
            if home.give_back(block) {
                freed();
            }
        }))
    }

    /// Keeps lent memory from other calls until an event has come.
    pub(crate) fn give_back_after(&self, memory: LentMemory, event: Box<dyn StreamEvent>) {
        self.state.lock().in_flight.push((memory, event));
    }

    /// Takes back memory whose events have come. Streams are independent, so one late event holds up no other.
    fn take_back(&self) {
        // The devices are asked without the lock, because the engine's lock waits for it.
        let in_flight = std::mem::take(&mut self.state.lock().in_flight);
        if in_flight.is_empty() {
            return;
        }
        let mut left = Vec::new();
        for (memory, event) in in_flight {
            match event.has_come() {
                // Gives the block back.
                Ok(true) => drop(memory),
                Ok(false) => left.push((memory, event)),
                // The device has failed, so no event shows when the copies have been made.
                Err(_) => std::mem::forget(memory),
            }
        }
        self.state.lock().in_flight.append(&mut left);
    }

    fn take_idle(&self, wanted: usize) -> Option<LentMemory> {
        let mut state = self.state.lock();
        // A block of more than twice the size would be missing for the calls that need it.
        let (&bytes, blocks) = state.idle.range_mut(wanted..=wanted.saturating_mul(2)).next()?;
        let block = blocks.pop();
        if blocks.is_empty() {
            state.idle.remove(&bytes);
        }
        state.counts.idle_bytes -= bytes;
        block
    }

    /// Keeps a block that a call has used. Returns whether there is a block to be freed.
    fn give_back(&self, block: LentMemory) -> bool {
        let bytes = block.len_bytes();
        let mut state = self.state.lock();
        state.counts.used_bytes -= bytes;
        if state.counts.idle_bytes + bytes > self.most_idle {
            state.excess.push(block);
            return true;
        }
        state.counts.idle_bytes += bytes;
        state.idle.entry(bytes).or_default().push(block);
        false
    }

    /// Frees the blocks that are not kept. May block.
    pub(crate) fn free_excess(&self) {
        let excess = std::mem::take(&mut self.state.lock().excess);
        drop(excess);
    }

    /// Frees all idle blocks. May block.
    pub(crate) fn free_idle(&self) {
        self.take_back();
        let mut state = self.state.lock();
        state.counts.idle_bytes = 0;
        let (idle, excess) = (std::mem::take(&mut state.idle), std::mem::take(&mut state.excess));
        drop(state);
        drop((idle, excess));
    }

    pub(crate) fn counts(&self) -> PinnedCounts {
        self.take_back();
        self.state.lock().counts
    }
}

/// Returns the size of the block for a number of bytes: a power of two, so that similar calls share memory. torch's
/// allocator rounds in the same way, so the counters show what is really pinned.
fn rounded(len_bytes: usize) -> usize {
    len_bytes.max(LEAST_BYTES).next_power_of_two()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Memory that is not pinned, in place of pinned memory.
    #[derive(Debug, Default)]
    struct Heap {
        allocations: AtomicUsize,
        frees: Arc<AtomicUsize>,
    }

    impl Heap {
        fn allocations(&self) -> usize {
            self.allocations.load(Ordering::Relaxed)
        }

        fn frees(&self) -> usize {
            self.frees.load(Ordering::Relaxed)
        }
    }

    impl Pinning for Heap {
        fn allocate(&self, len_bytes: usize) -> Option<LentMemory> {
            self.allocations.fetch_add(1, Ordering::Relaxed);
            let frees = self.frees.clone();
            let memory = LentMemory::pageable(vec![0; len_bytes].into());
            Some(memory.returned_to(move |memory| {
                frees.fetch_add(1, Ordering::Relaxed);
                drop(memory);
            }))
        }
    }

    #[test]
    fn sizes_are_rounded_to_the_powers_of_two_that_the_allocator_pins() {
        assert_eq!([0, 1, 65_536, 65_537, 100_000].map(rounded), [65_536, 65_536, 65_536, 131_072, 131_072]);
    }

    #[test]
    fn memory_is_kept_for_later_calls_up_to_the_limit() {
        let heap = Arc::new(Heap::default());
        let memory = PinnedMemory::new(heap.clone(), 400 << 10);
        let due = Arc::new(AtomicUsize::new(0));
        let lend = |bytes: usize| {
            let due = due.clone();
            let freed = move || {
                due.fetch_add(1, Ordering::Relaxed);
            };
            memory.lend(bytes, freed).unwrap()
        };
        drop(lend(100 << 10));
        let first = lend(100 << 10);
        assert_eq!(heap.allocations(), 1, "the same block again");
        let second = lend(200 << 10);
        let counts = memory.counts();
        assert_eq!((counts.idle_bytes, counts.used_bytes), (0, first.len_bytes() + second.len_bytes()));
        let third = lend(200 << 10);
        drop((second, first));
        assert_eq!(due.load(Ordering::Relaxed), 0);
        // A block of more than twice the size is not used.
        let [near, new] = [lend(40 << 10), lend(40 << 10)];
        assert!(near.len_bytes() > 100 << 10 && new.len_bytes() < 100 << 10);
        drop(new);
        drop((near, third));
        assert_eq!((due.load(Ordering::Relaxed), heap.frees()), (2, 0), "nothing is freed under a lock");
        memory.free_excess();
        assert!(heap.frees() > 0 && memory.counts().idle_bytes <= 400 << 10 && memory.counts().used_bytes == 0);
        memory.free_idle();
        assert_eq!((heap.allocations(), heap.frees()), (4, 4));
        assert_eq!(memory.counts(), PinnedCounts::default());
    }
}
