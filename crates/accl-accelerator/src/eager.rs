//! Calls of few bytes: their caller copies the tensors on its own stream, and issues the call on host memory.
//!
//! No other thread takes part, so such a call costs two copies and one look at an event more than a call on the CPU. This
//! module owns the host memory and the order of the copies; the caller decides which calls are small. Read
//! [`Accelerators::begin_eager`] first.

use std::sync::Arc;

use accl_engine::{Blocks, CallDesc, LentMemory, TensorDesc};
use accl_types::{Elems, Result};

use crate::pinned::PinnedMemory;
use crate::staging::Accelerators;
use crate::streams::{CallStreams, Direction, StreamCopy, StreamEvent};

/// Alignment of each tensor's host memory: a cache line.
const ALIGN: usize = 64;

/// A call on host memory in place of a call on tensors of an accelerator.
#[derive(Debug)]
pub struct EagerCall {
    streams: Box<dyn CallStreams>,
    pinned: Arc<PinnedMemory>,
    /// `None` once the memory was given back.
    memory: Option<LentMemory>,
    /// Comes when the copies that were enqueued last have been made.
    last: Option<Box<dyn StreamEvent>>,
    /// Whether copies were enqueued behind which no event was recorded.
    has_unknown: bool,
    desc: CallDesc,
}

impl Accelerators {
    /// Enqueues the copies into host memory for a call, on the stream of its caller: both directions of `streams` are that
    /// stream. The outputs of the call must not overlap. Returns `None` if there is no pinned memory.
    ///
    /// # Errors
    /// `Device` if the device does not take the copies.
    pub fn begin_eager(&self, desc: &CallDesc, streams: Box<dyn CallStreams>) -> Result<Option<EagerCall>> {
        let pieces = || desc.inputs.pieces().iter().chain(desc.outputs.pieces());
        let room = |tensor: &TensorDesc| (tensor.len_bytes() as usize).next_multiple_of(ALIGN);
        let pinned = self.pinned_memory();
        // There may be no thread that frees it, and this one may block.
        pinned.free_excess();
        let Some(memory) = pinned.lend(pieces().map(room).sum(), || {}) else { return Ok(None) };
        let mut next = memory.address();
        let mut host = |blocks: &Blocks| -> Blocks {
            let mut place = |tensor: &TensorDesc| {
                let count = tensor.len_bytes() / tensor.dtype().size_bytes() as u64;
                let host = TensorDesc::dense(next, tensor.dtype(), Elems(count));
                next = next.wrapping_add(room(tensor));
                host
            };
            blocks.iter().map(|block| block.iter().map(&mut place).collect::<Vec<_>>()).collect()
        };
        let desc = CallDesc { inputs: host(&desc.inputs), outputs: host(&desc.outputs), ..desc.clone() };
        let mut call =
            EagerCall { streams, pinned: pinned.clone(), memory: Some(memory), last: None, has_unknown: false, desc };
        call.copy_in()?;
        Ok(Some(call))
    }
}

impl EagerCall {
    fn copy_in(&mut self) -> Result<()> {
        // A call in place contributes its outputs.
        let inputs = if self.desc.inputs.is_empty() { &self.desc.outputs } else { &self.desc.inputs };
        self.has_unknown = true;
        for (piece, tensor) in (0..).zip(inputs.pieces()) {
            self.streams.copy(whole(Direction::In, piece, tensor))?;
        }
        self.record(Direction::In)
    }

    fn record(&mut self, direction: Direction) -> Result<()> {
        self.last = Some(self.streams.record(direction)?);
        self.has_unknown = false;
        Ok(())
    }

    /// Returns whether the host memory holds the contributions, so that the call may be issued.
    ///
    /// # Errors
    /// `Device` if the device has failed.
    pub fn is_copied_in(&self) -> Result<bool> {
        self.last.as_ref().map_or(Ok(true), |event| event.has_come())
    }

    /// Returns the call on host memory.
    pub fn desc(&mut self) -> &mut CallDesc {
        &mut self.desc
    }

    /// Ends a call whose host memory may still be written, which is never lent again.
    pub fn leak_memory(mut self) {
        std::mem::forget(self.memory.take());
    }

    /// Enqueues the copies of the results, after the call has succeeded.
    ///
    /// # Errors
    /// `Device` if the device does not take the copies.
    pub fn copy_out(mut self) -> Result<()> {
        self.has_unknown = true;
        for (piece, tensor) in (0..).zip(self.desc.outputs.pieces()) {
            self.streams.copy(whole(Direction::Out, piece, tensor))?;
        }
        self.streams.finish()?;
        self.record(Direction::Out)
    }
}

impl Drop for EagerCall {
    /// Lends the memory to no other call before the copies have been made.
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        match self.last.take() {
            // No event shows when the copies have been made.
            _ if self.has_unknown => std::mem::forget(memory),
            Some(event) => self.pinned.give_back_after(memory, event),
            None => drop(memory),
        }
    }
}

fn whole(direction: Direction, piece: u32, tensor: &TensorDesc) -> StreamCopy {
    StreamCopy { direction, piece, at: 0, host: tensor.address(), len_bytes: tensor.len_bytes(), is_pinned: true }
}
