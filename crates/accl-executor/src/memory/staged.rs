//! Host memory for the tensors of a call that only external operations can access, and the copies between both.
//!
//! This module allocates the memory and describes the copies. `plan::staging` decides which bytes they have, and the
//! worker of the call makes them. Read [`StagedMemory`] first.

use std::any::Any;
use std::sync::Arc;

use accl_types::{Collective, Dtype, Elems, ReduceOp, Result};

use super::storage::Storage;
use crate::call::{AfterCopy, CallDesc, External, ExternalCopies, ExternalCopy, MemoryKind, Staging, TensorDesc};
use crate::plan::{Segment, StagedCopies};

/// Alignment of each tensor's host memory: a cache line.
const ALIGN: u64 = 64;

/// Number of pieces of a message for which a ring has room.
pub(super) const RING_SLOTS: u64 = 8;

fn slot_bytes(staging: &dyn Staging) -> u64 {
    (staging.ring_bytes() / RING_SLOTS).max(1).next_multiple_of(ALIGN)
}

/// Host memory of the tensors of one call.
pub(crate) struct StagedMemory {
    staging: Arc<dyn Staging>,
    /// The memory, and the offset at which the next tensor begins.
    storage: Arc<Storage>,
    base: *mut u8,
    next: u64,
    /// Whether outputs share memory with inputs or with each other.
    has_overlap: bool,
    copies: Option<Copies>,
}

/// Copies of one part of a call, and their workers.
struct Copies {
    copy_in: Option<(Arc<dyn External>, ExternalCopies)>,
    copy_out: Option<(Arc<dyn External>, ExternalCopies)>,
}

impl StagedMemory {
    /// Allocates memory for the staged tensors of a call; `None` if there are none. `has_overlap` says whether outputs
    /// share memory with inputs or with each other.
    ///
    /// # Errors
    /// `Exhausted` if there is no memory. `Unsupported` if the operator scales tensors and their dtype has no product.
    pub(crate) fn new(desc: &CallDesc, has_overlap: bool) -> Result<Option<Self>> {
        let Some(staging) = desc.staging.as_ref().filter(|_| desc.is_staged()) else { return Ok(None) };
        if let Some(after) = scale(desc) {
            // The dtype is checked before anything begins.
            after(&[])?;
        }
        let staged = |tensor: &&TensorDesc| tensor.memory() != MemoryKind::Host;
        let pieces = desc.inputs.pieces().iter().chain(desc.outputs.pieces()).filter(staged);
        let mut total: u64 = pieces.map(|tensor| tensor.len_bytes().next_multiple_of(ALIGN)).sum();
        if desc.collective.is_point_to_point() {
            total = total.min(RING_SLOTS * slot_bytes(&**staging));
        }
        let lent = if total > 0 { staging.lend(total as usize)? } else { None };
        let mut storage = lent.map_or_else(|| Storage::new(total as usize), |lent| Ok(Storage::lent(lent)))?;
        let (staging, base) = (staging.clone(), storage.ptr());
        Ok(Some(Self { staging, storage: Arc::new(storage), base, next: 0, has_overlap, copies: None }))
    }

    /// Returns the address of the host memory for the next tensor.
    pub(crate) fn place(&mut self, tensor: &TensorDesc) -> *mut u8 {
        let at = self.base.wrapping_add(self.next as usize);
        self.next += tensor.len_bytes().next_multiple_of(ALIGN);
        at
    }

    /// Returns the owner of the memory.
    pub(crate) fn keeps(&self) -> Arc<dyn Any + Send + Sync> {
        self.storage.clone()
    }

    /// Returns the same memory for another part of the call.
    pub(crate) fn share(&self) -> Self {
        let (staging, storage) = (self.staging.clone(), self.storage.clone());
        Self { staging, storage, base: self.base, next: self.next, has_overlap: self.has_overlap, copies: None }
    }

    pub(super) fn has_overlap(&self) -> bool {
        self.has_overlap
    }

    pub(super) fn ring_slot(&self) -> u64 {
        slot_bytes(&*self.staging)
    }

    /// Describes the copies of a plan, and begins to copy in. `host` returns the host memory of a piece: of an output,
    /// or of an input.
    ///
    /// # Errors
    /// The errors of [`Staging::copy_in`].
    pub(crate) fn begin(
        &mut self,
        desc: &CallDesc,
        plan: &StagedCopies,
        host: impl Fn(Side, u32) -> *mut u8,
    ) -> Result<()> {
        let side_in = if desc.inputs.is_empty() { Side::Outputs } else { Side::Inputs };
        let has_sample = desc.has_sample();
        let copy = |side: Side, Segment { piece, range }: &Segment| {
            let blocks = match side {
                Side::Inputs => &desc.inputs,
                Side::Outputs => &desc.outputs,
            };
            let tensor = blocks.pieces()[*piece as usize].clone();
            let bytes = host(side, *piece).wrapping_add(range.start as usize);
            let host = TensorDesc::dense(bytes, Dtype::U8, Elems(range.end - range.start));
            // The caller's call has no sample, which here is the last piece of each block.
            let samples = if has_sample { blocks.ends().partition_point(|end| end <= piece) as u32 } else { 0 };
            ExternalCopy { piece: *piece - samples, at: range.start, host, tensor }
        };
        let copy_in: Vec<_> = plan.copy_in.iter().map(|segment| copy(side_in, segment)).collect();
        let copy_out = plan.copy_out.iter().map(|segment| copy(Side::Outputs, segment)).collect();
        let ready = copy_in.len();
        self.begin_with(copy_in, ready, scale(desc), copy_out)
    }

    fn begin_with(
        &mut self,
        copy_in: Vec<ExternalCopy>,
        ready: usize,
        after: Option<AfterCopy>,
        copy_out: Vec<ExternalCopy>,
    ) -> Result<()> {
        let copy_in = match copy_in.is_empty() {
            true => None,
            false => {
                let by = self.staging.copy_in(&copy_in, ready, &self.keeps())?;
                Some((by, ExternalCopies { copies: copy_in, ready: ready as u32, after }))
            }
        };
        let copies = ExternalCopies { copies: copy_out, ..ExternalCopies::default() };
        let copy_out = (!copies.copies.is_empty()).then(|| (self.staging.copy_out(), copies));
        self.copies = Some(Copies { copy_in, copy_out });
        Ok(())
    }

    /// Describes the copies of a message, and begins to copy in.
    ///
    /// # Errors
    /// The errors of [`Staging::copy_in`].
    pub(super) fn begin_message(&mut self, desc: &CallDesc) -> Result<()> {
        let slot = self.ring_slot();
        let is_send = desc.collective == Collective::Send;
        let blocks = if is_send { &desc.inputs } else { &desc.outputs };
        let copies = blocks.pieces().iter().take(1).flat_map(|tensor| {
            (0..tensor.len_bytes().div_ceil(slot)).map(|index| {
                let at = index * slot;
                let host = self.base.wrapping_add((index % RING_SLOTS * slot) as usize);
                let host = TensorDesc::dense(host, Dtype::U8, Elems(slot.min(tensor.len_bytes() - at)));
                ExternalCopy { piece: 0, tensor: tensor.clone(), at, host }
            })
        });
        let copies: Vec<_> = copies.collect();
        let ready = copies.len().min(RING_SLOTS as usize);
        let (copy_in, copy_out) = if is_send { (copies, Vec::new()) } else { (Vec::new(), copies) };
        self.begin_with(copy_in, ready, None, copy_out)
    }

    /// Returns whether results are copied to the tensors.
    pub(super) fn copies_out(&self) -> bool {
        self.copies.as_ref().is_some_and(|copies| copies.copy_out.is_some())
    }

    /// Takes the worker and the copies of the copy-in.
    pub(crate) fn take_copy_in(&mut self) -> Option<(Arc<dyn External>, ExternalCopies)> {
        self.copies.as_mut()?.copy_in.take()
    }

    /// Takes the worker and the copies of the copy-out, of which none may be made yet.
    pub(crate) fn take_copy_out(&mut self) -> Option<(Arc<dyn External>, ExternalCopies)> {
        self.copies.as_mut()?.copy_out.take()
    }
}

/// Side of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// The contributions of this rank.
    Inputs,
    /// Its results; of a call in place, also its contributions.
    Outputs,
}

/// Returns what scales the contributions of a call, if its operator does.
fn scale(desc: &CallDesc) -> Option<AfterCopy> {
    if !desc.collective.reduces() || desc.op != ReduceOp::PremulSum {
        return None;
    }
    let (dtype, factor) = (desc.dtype, desc.factor);
    Some(Arc::new(move |copies: &[ExternalCopy]| {
        let hosts = copies.iter().map(|copy| (copy.host.ptr, copy.host.len_bytes() as usize / dtype.size_bytes()));
        // Without copies, only the dtype is checked.
        let hosts = hosts.chain(copies.is_empty().then_some((std::ptr::dangling_mut(), 0)));
        for (host, elems) in hosts {
            // SAFETY: `host` is host memory of the call with these elements. Only the worker that has just copied them
            // accesses it, until it reports the copy. Source and destination may be the same.
            unsafe { accl_kernels::scale(dtype, host, host, elems, factor)? };
        }
        Ok(())
    }))
}
