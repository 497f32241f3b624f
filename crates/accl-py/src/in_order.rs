//! Order of a group's collectives on accelerators that share memory: a later one follows an earlier one, as with NCCL.
//!
//! Owns which asynchronous collectives are in flight, and the addresses that they read and write. Calls on the CPU are not
//! ordered, because c10d leaves that to the program. Messages are not ordered either: their order may differ between ranks, so
//! a wait for one could hold up another. Read [`InOrder::follow`] first.

use std::sync::{Mutex, MutexGuard, PoisonError};

use accl_engine::{Blocks, Call, CallDesc, Waited};
use accl_types::{Error, Result};
use cxx::{SharedPtr, WeakPtr};

use crate::bridge::ffi::{self, AcceleratorCall};

/// The asynchronous collectives of a group that are in flight on accelerators.
#[derive(Default)]
pub(crate) struct InOrder(Mutex<Vec<Earlier>>);

#[derive(Clone)]
struct Earlier {
    call: Call,
    /// Empty once the call is through: the shim then drops its reference.
    tensors: WeakPtr<AcceleratorCall>,
    memory: Memory,
}

impl InOrder {
    /// Makes a call follow earlier ones with which it shares memory that one of them writes. Blocks until these are enqueued;
    /// Python's signal handlers run meanwhile. Returns false if one of them raised.
    ///
    /// # Errors
    /// `Device` if the device has failed.
    pub(crate) fn follow(&self, memory: &Memory, tensors: &AcceleratorCall) -> Result<bool> {
        let earlier: Vec<_> = {
            let mut calls = self.lock();
            calls.retain(|earlier| !earlier.call.is_done());
            calls.iter().filter(|earlier| earlier.memory.is_shared_with(memory)).cloned().collect()
        };
        for Earlier { call, tensors: earlier, .. } in earlier {
            // A call has a deadline of its own. If it fails, so does this one.
            match call.wait(None, &mut ffi::python_interrupted) {
                Waited::Interrupted => return Ok(false),
                Waited::Failed(_) | Waited::TimedOut(_) => return Ok(true),
                Waited::Done => {}
            }
            if let Some(earlier) = earlier.upgrade().as_ref() {
                tensors.follow(earlier).map_err(|error| Error::device(error.what()))?;
            }
        }
        Ok(true)
    }

    /// Records a call that was issued.
    pub(crate) fn add(&self, call: Call, tensors: &SharedPtr<AcceleratorCall>, memory: Memory) {
        self.lock().push(Earlier { call, tensors: tensors.downgrade(), memory });
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Earlier>> {
        // The list is consistent at every step, so a panic of an earlier holder does not matter.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The memory of a call: ranges of addresses in ascending order. Ranges of tensors that are not dense contain gaps.
#[derive(Clone)]
pub(crate) struct Memory {
    reads: Box<[(usize, usize)]>,
    writes: Box<[(usize, usize)]>,
}

impl Memory {
    pub(crate) fn of(desc: &CallDesc) -> Self {
        let writes = ranges(&desc.outputs);
        // A call in place reads its outputs.
        let reads = if desc.inputs.is_empty() { writes.clone() } else { ranges(&desc.inputs) };
        Self { reads, writes }
    }

    fn is_shared_with(&self, other: &Self) -> bool {
        have_overlap(&self.writes, &other.writes)
            || have_overlap(&self.writes, &other.reads)
            || have_overlap(&self.reads, &other.writes)
    }
}

fn ranges(blocks: &Blocks) -> Box<[(usize, usize)]> {
    let mut ranges: Vec<_> = blocks.pieces().iter().map(|tensor| tensor.bounds()).collect();
    ranges.retain(|(start, end)| start < end);
    ranges.sort_unstable();
    ranges.into()
}

/// Returns whether a range of one list overlaps a range of the other.
fn have_overlap(mut one: &[(usize, usize)], mut other: &[(usize, usize)]) -> bool {
    while let (Some(&(start, end)), Some(&(other_start, other_end))) = (one.first(), other.first()) {
        if start < other_end && other_start < end {
            return true;
        }
        if end <= other_start {
            one = &one[1..];
        } else {
            other = &other[1..];
        }
    }
    false
}
