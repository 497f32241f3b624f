//! The memory of a point-to-point message.
//!
//! This module copies between frames and the one tensor of a message, within bounds. If only external operations can
//! access the tensor, the bytes pass through a ring of host memory. `exec::transfer` decides the order of the bytes.
//! Read [`MessageMemory`] first.

use accl_types::{Collective, Error, Result};

use super::buffers::Buffers;
use super::message_references::{REFERENCE_SLOT, message_tiles};
use super::staged::RING_SLOTS;
use crate::call::{CallDesc, ExternalHandle, ExternalReduction, ExternalState, ExternalWork, TensorDesc, Wake};
use crate::plan::ExternalStep;

/// Number in the signatures of messages by reference.
pub(crate) const BY_REFERENCE: u32 = 1;

/// Bytes at the end of a message by reference. The receiver grants them when it has read everything, so the sender may use the
/// published memory again, and the receiver knows that the sender lived until then.
const CONFIRMATION: u64 = 1;

/// Memory that a send reads or a receive writes.
pub(crate) struct MessageMemory {
    buffers: Buffers,
    /// Bytes of the message: of the tensor, or of its references and their confirmation.
    total: u64,
    ring: Option<Ring>,
    /// Why the copies cannot go on.
    failure: Option<Error>,
}

/// A ring through which the bytes of a message pass, a slot at a time.
struct Ring {
    slot: u64,
    is_send: bool,
    /// The copy of a message by reference: each slot is the reference of a tile, and none is used twice.
    references: Option<ExternalReduction>,
    is_by_reference: bool,
    /// Slots that the worker may copy, as it knows.
    ready: u32,
    /// The copy in flight; `None` until it has begun.
    handle: Option<ExternalHandle>,
    wake: Option<Wake>,
}

impl Ring {
    /// Returns the number of slots of the first `bytes` bytes of a message of `total` bytes; the last may be short.
    fn whole_slots(&self, bytes: u64, total: u64) -> u64 {
        match bytes == total && !self.is_by_reference {
            true => total.div_ceil(self.slot),
            false => bytes / self.slot,
        }
    }

    fn made(&self) -> u64 {
        self.handle.as_ref().map_or(0, |handle| u64::from(handle.made()))
    }
}

impl MessageMemory {
    /// Creates the memory of a call. `buffers` were prepared for that call, and `tensor` is its tensor. `wake` is called
    /// when the copies go on.
    ///
    /// # Errors
    /// `Internal` if a ring has no room for a frame of `segment` bytes.
    pub(crate) fn new(
        buffers: Buffers,
        desc: &CallDesc,
        tensor: &TensorDesc,
        segment: u64,
        wake: impl FnOnce() -> Wake,
    ) -> Result<Self> {
        let is_send = desc.collective == Collective::Send;
        if desc.is_by_reference {
            return Ok(Self::by_reference(buffers, tensor, is_send, wake()));
        }
        let slot = buffers.ring_slot().filter(|_| tensor.len_bytes() > 0);
        if let Some(slot) = slot.filter(|slot| slot * (RING_SLOTS - 1) < segment.min(tensor.len_bytes())) {
            let text = format!("the ring of a staged message has slots of {slot} bytes, for frames of {segment}");
            return Err(Error::internal(text));
        }
        let ring = slot.map(|slot| {
            let ready = if is_send { RING_SLOTS.min(tensor.len_bytes().div_ceil(slot)) as u32 } else { 0 };
            let wake = Some(wake());
            Ring { slot, is_send, references: None, is_by_reference: false, ready, handle: None, wake }
        });
        let mut memory = Self { buffers, total: tensor.len_bytes(), ring, failure: None };
        if is_send {
            memory.begin_copies(ExternalStep::CopyIn);
        }
        Ok(memory)
    }

    /// Creates the memory of a message whose tensor is published, or read where it was published.
    fn by_reference(buffers: Buffers, tensor: &TensorDesc, is_send: bool, wake: Wake) -> Self {
        let references = message_tiles(tensor, buffers.output(0), is_send);
        let tiles = references.tiles.len() as u32;
        let ready = if is_send { tiles } else { 0 };
        let total = u64::from(tiles) * REFERENCE_SLOT + CONFIRMATION;
        let ring = Ring {
            slot: REFERENCE_SLOT,
            is_send,
            references: Some(references),
            is_by_reference: true,
            ready,
            handle: None,
            wake: Some(wake),
        };
        let mut memory = Self { buffers, total, ring: Some(ring), failure: None };
        if is_send {
            memory.begin_copies(ExternalStep::CopyIn);
        }
        memory
    }

    fn begin_copies(&mut self, step: ExternalStep) {
        let Some(ring) = &mut self.ring else { return };
        let Some(wake) = ring.wake.take() else { return };
        ring.handle = match ring.references.take() {
            Some(references) => self.buffers.begin_combine(ExternalWork::Reduce(references.into()), &wake),
            None => self.buffers.begin_external(step, &wake),
        };
        if let Some(handle) = ring.handle.as_ref().filter(|_| ring.is_by_reference && ring.is_send) {
            let failed = handle.set_ready(ring.ready).err().map(|why| step.failure(handle.name(), why));
            self.failure = self.failure.take().or(failed);
        }
    }

    /// Returns the size of the message in bytes.
    #[inline]
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Returns the bytes at the end that the receiver grants when it has finished with the others.
    pub(crate) fn withheld(&self) -> u64 {
        if self.ring.as_ref().is_some_and(|ring| ring.is_by_reference) { CONFIRMATION } else { 0 }
    }

    /// Returns whether the bytes pass through a ring.
    pub(crate) fn is_staged(&self) -> bool {
        self.ring.is_some()
    }

    /// Returns how many bytes of the message may be read, or written.
    #[inline]
    pub(crate) fn limit(&self) -> u64 {
        let Some(ring) = &self.ring else { return self.total };
        if ring.is_by_reference {
            let references = self.total - CONFIRMATION;
            let made = ring.made() * ring.slot;
            return match made == references {
                true => self.total,
                false if ring.is_send => made,
                false => references,
            };
        }
        let slots = if ring.is_send { ring.made() } else { ring.made() + RING_SLOTS };
        self.total.min(slots * ring.slot)
    }

    /// Records that the first `done` bytes were read or written, so that the copies can go on.
    pub(crate) fn note_done(&mut self, done: u64) {
        let total = self.total;
        let Some(ring) = &mut self.ring else { return };
        if ring.is_by_reference && ring.is_send {
            return;
        }
        let whole = ring.whole_slots(done, total);
        let ready = if ring.is_send { (whole + RING_SLOTS).min(total.div_ceil(ring.slot)) } else { whole } as u32;
        if ready <= ring.ready {
            return;
        }
        ring.ready = ready;
        if ring.handle.is_none() {
            self.begin_copies(ExternalStep::CopyOut);
        }
        if let Some(handle) = self.ring.as_ref().and_then(|ring| ring.handle.as_ref()) {
            let step = self.step();
            let failed = handle.set_ready(ready).err().map(|why| step.failure(handle.name(), why));
            self.failure = self.failure.take().or(failed);
        }
    }

    /// Returns whether all copies have been made and the worker has ended.
    ///
    /// # Errors
    /// The failure of the worker.
    pub(crate) fn has_ended(&self) -> Result<bool> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        let Some(ring) = &self.ring else { return Ok(true) };
        let Some(handle) = &ring.handle else { return Ok(false) };
        let step = self.step();
        match handle.state() {
            ExternalState::UnderWay => Ok(false),
            ExternalState::Done => Ok(true),
            ExternalState::Failed(why) => Err(step.failure(handle.name(), why)),
        }
    }

    /// Asks the worker to stop. Returns whether the message must wait for that, or must report that its memory stays in
    /// use.
    pub(crate) fn cancel(&self) -> bool {
        self.handle().is_some_and(|handle| {
            handle.cancel();
            !handle.is_away() || handle.abandoned().is_some()
        })
    }

    /// Returns whether the worker may access the message's memory.
    pub(crate) fn may_be_touched(&self) -> bool {
        self.handle().is_some_and(|handle| !handle.is_away())
    }

    /// Returns why the worker was abandoned, if it was. The memory must then stay.
    pub(crate) fn abandoned(&self) -> Option<&Error> {
        self.handle().and_then(ExternalHandle::abandoned)
    }

    /// Describes the copy in flight, for messages.
    pub(crate) fn external_under_way(&self) -> Option<String> {
        let ring = self.ring.as_ref()?;
        let handle = ring.handle.as_ref().filter(|handle| !handle.has_ended())?;
        Some(self.step().describe(handle.name()))
    }

    /// Describes the copy in flight, if the message waits for it rather than for its peer.
    pub(crate) fn external_due(&self) -> Option<String> {
        let ring = self.ring.as_ref()?;
        let owes = ring.made() < u64::from(ring.ready) || ring.made() == ring.whole_slots(self.total, self.total);
        self.external_under_way().filter(|_| owes)
    }

    fn step(&self) -> ExternalStep {
        let is_send = self.ring.as_ref().is_some_and(|ring| ring.is_send);
        if is_send { ExternalStep::CopyIn } else { ExternalStep::CopyOut }
    }

    fn handle(&self) -> Option<&ExternalHandle> {
        self.ring.as_ref()?.handle.as_ref()
    }

    /// Returns whether `len` bytes from `at` on lie within the part of the message that is in memory.
    fn holds(&self, at: u64, len: usize) -> bool {
        at.checked_add(len as u64).is_some_and(|end| end <= self.limit())
    }

    /// Returns the position of byte `at` in the memory, and how many bytes follow without a gap.
    fn position(&self, at: u64) -> (usize, usize) {
        match &self.ring {
            Some(ring) if !ring.is_by_reference => {
                let capacity = RING_SLOTS * ring.slot;
                ((at % capacity) as usize, (capacity - at % capacity) as usize)
            }
            None | Some(_) => (at as usize, (self.total - at) as usize),
        }
    }

    /// Copies the bytes from `at` on into a frame.
    ///
    /// # Panics
    /// Panics if they end beyond the bytes that may be read.
    pub(crate) fn read(&self, mut at: u64, mut into: &mut [u8]) {
        assert!(self.holds(at, into.len()), "a fragment ends within its message");
        while !into.is_empty() {
            let (position, room) = self.position(at);
            let (head, rest) = into.split_at_mut(room.min(into.len()));
            let from = self.buffers.input(0).wrapping_add(position);
            // SAFETY: the input, or its ring, holds `room` bytes from there on that stay readable until the call
            // completes. `holds` was checked, so the worker does not write these slots of a ring.
            unsafe { accl_kernels::copy(head.as_mut_ptr(), from, head.len()) };
            at += head.len() as u64;
            into = rest;
        }
    }

    /// Copies the payload of a frame to byte `at`.
    ///
    /// # Panics
    /// Panics if it ends beyond the bytes that may be written.
    pub(crate) fn write(&mut self, mut at: u64, mut data: &[u8]) {
        assert!(self.holds(at, data.len()), "a fragment ends within its message");
        while !data.is_empty() {
            let (position, room) = self.position(at);
            let (head, rest) = data.split_at(room.min(data.len()));
            let to = self.buffers.output(0).wrapping_add(position);
            // SAFETY: the output, or its ring, holds `room` bytes from there on that stay writable until the call
            // completes. `holds` was checked, so the worker does not read these slots of a ring.
            unsafe { accl_kernels::copy(to, head.as_ptr(), head.len()) };
            at += head.len() as u64;
            data = rest;
        }
    }

    /// Copies a packed receive into the caller's tensor.
    pub(crate) fn unpack(&mut self) {
        self.buffers.unpack();
    }
}
