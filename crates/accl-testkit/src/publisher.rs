//! Calls by reference on host memory: what a stand-in for a device does with the tasks of a
//! [publisher](accl_engine::Staging::publisher).
//!
//! This module owns the published chunks of one call. A reference holds an address, because all ranks of a test are in one
//! process. Published memory is filled with garbage when it is given back, so that a rank that leaves too early is seen. Read
//! [`Published::reduce`] first.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Mutex;

use accl_engine::{
    ExternalReduction, PUBLISHED_ALIGN, PublishedOperand, PublishedResult, PublishingNeeds, REFERENCE_BYTES,
};
use accl_kernels::{Finish, Reducer};
use accl_types::ReduceOp;

const GARBAGE: u8 = 0xcc;
/// Maximum bytes of memory that is kept after its call.
const MOST_RETIRED: usize = 256 << 20;

/// The published chunks and the temporary memory of one call.
#[derive(Debug)]
pub struct Published {
    memory: Box<[u8]>,
    scratch: Box<[u8]>,
    /// Where the results of a task lie, by the address of its first reference; and the first free byte.
    placed: Mutex<(HashMap<usize, usize>, usize)>,
}

impl Published {
    /// Creates the memory of a call.
    pub fn new(needs: PublishingNeeds) -> Self {
        let room = |len: u64| vec![GARBAGE; len as usize + PUBLISHED_ALIGN as usize].into_boxed_slice();
        Self { memory: room(needs.published_bytes), scratch: room(needs.scratch_bytes), placed: Mutex::default() }
    }

    /// Returns the address of the temporary memory.
    pub fn scratch(&self) -> *mut u8 {
        self.scratch.as_ptr().cast_mut()
    }

    /// Copies or reduces some tiles.
    ///
    /// # Safety
    /// The addresses of the task can be accessed by this process, and its references are those that such a function has
    /// written. The tiles are ready in a task that the caller owns and have not been reported.
    pub unsafe fn reduce(&self, task: &ExternalReduction, tiles: Range<usize>) {
        let size = task.dtype.size_bytes();
        if let Some(first) = &task.first {
            let made = first.make_once(|copies| {
                for copy in copies {
                    // SAFETY: both addresses have these bytes, by this function's contract.
                    unsafe { std::ptr::copy(copy.from, copy.to, copy.elems as usize) };
                }
                Ok(())
            });
            made.expect("copies on the host do not fail");
        }
        let mut start = task.tiles[..tiles.start].iter().map(|tile| tile.elems as usize * size).sum::<usize>();
        for tile in &task.tiles[tiles] {
            let len = tile.elems as usize * size;
            let operand = |operand: &PublishedOperand| match *operand {
                PublishedOperand::Values(at) => at,
                // SAFETY: references lie in memory of the task, and are complete when their tile is ready.
                PublishedOperand::Reference(at) => unsafe { at.cast::<*const u8>().read_unaligned() },
            };
            let operands: Vec<*const u8> = tile.operands.iter().map(operand).collect();
            let to = match tile.result {
                PublishedResult::Values(to) => to,
                PublishedResult::Reference(at) => {
                    let to = self.place(task).wrapping_add(start);
                    // SAFETY: the task has room for a reference at this address.
                    unsafe {
                        at.write_bytes(0, REFERENCE_BYTES);
                        at.cast::<*const u8>().write_unaligned(to);
                    }
                    to
                }
            };
            match &operands[..] {
                // SAFETY: both sides have the elements of the tile, by this function's contract.
                [only] => unsafe { std::ptr::copy(*only, to, len) },
                operands => {
                    let op = task.op.unwrap_or(ReduceOp::Sum);
                    let reducer = Reducer::new(op, task.dtype, task.world).expect("the call was checked");
                    let finish = if task.finishes { Finish::Yes } else { Finish::No };
                    // SAFETY: both sides have the elements of the tile; the result is one of the operands or overlaps none.
                    unsafe { reducer.many(to, operands, tile.elems as usize, finish) };
                }
            }
            start += len;
        }
    }

    /// Returns the address of the first byte that a task publishes.
    fn place(&self, task: &ExternalReduction) -> *mut u8 {
        let PublishedResult::Reference(key) = task.tiles[0].result else {
            unreachable!("a task publishes all or nothing")
        };
        let mut placed = self.placed.lock().expect("no thread panics");
        let (known, next) = &mut *placed;
        let at = *known.entry(key.addr()).or_insert_with(|| {
            let len = task.tiles.iter().map(|tile| tile.elems).sum::<u64>() * task.dtype.size_bytes() as u64;
            std::mem::replace(next, *next + len.next_multiple_of(PUBLISHED_ALIGN) as usize)
        });
        assert!(*next < self.memory.len(), "a call publishes more than it said");
        self.memory.as_ptr().cast_mut().wrapping_add(at)
    }
}

impl Drop for Published {
    /// Fills the memory with garbage, and keeps it for a while: other ranks of a call that has failed may still read it, as they
    /// may read the memory of a process that has died.
    fn drop(&mut self) {
        static RETIRED: Mutex<(VecDeque<Box<[u8]>>, usize)> = Mutex::new((VecDeque::new(), 0));
        self.memory.fill(GARBAGE);
        let memory = std::mem::take(&mut self.memory);
        let Ok(mut retired) = RETIRED.lock() else { return };
        let (queue, bytes) = &mut *retired;
        *bytes += memory.len();
        queue.push_back(memory);
        while *bytes > MOST_RETIRED && queue.len() > 1 {
            *bytes -= queue.pop_front().map_or(0, |oldest| oldest.len());
        }
    }
}
