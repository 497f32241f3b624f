//! The memory of one call: base addresses of its pieces, staging for tensors that are not plain, and scratch.
//!
//! This module packs tensors before a call and unpacks them after it. The layout decides which bytes of a piece belong
//! to which chunk. Read [`Buffers`] first.

use std::any::Any;
use std::sync::Arc;

use accl_schedule::{Buf, Extent};
use accl_types::{Collective, Elems, Error, Moment, ReduceOp, Result};
use smallvec::SmallVec;

use super::message_references::{message_bytes, message_needs};
use super::overlap::{
    inputs_need_copy, inputs_need_publishing_copy, outputs_are_entangled, outputs_share_elements, refuse_self_overlap,
    shared_outputs,
};
use super::staged::{Side, StagedMemory};
use super::storage::Storage;
use crate::call::{
    Blocks, CallDesc, External, ExternalCollective, ExternalHandle, ExternalWork, Keeps, Meeting, MemoryKind,
    PUBLISHED_ALIGN, Publisher, PublishingNeeds, SampleCopies, SampleCopy, TensorDesc, Wake,
};
use crate::plan::{ExternalStep, StagedCopies};

type Bases = SmallVec<[*mut u8; 4]>;

/// Base addresses and owned memory of a call in flight.
///
/// The addresses come from the caller's descriptors. The contract of `Group::submit` keeps them valid until the call
/// completes.
#[derive(Default)]
pub(crate) struct Buffers {
    inputs: Bases,
    outputs: Bases,
    scratch: Option<Storage>,
    scratch_base: Option<*mut u8>,
    codes: Option<Storage>,
    codes_base: Option<*mut u8>,
    /// Outputs to unpack when the call is done: the tensor, and the address of its dense copy.
    staged: Vec<(TensorDesc, *mut u8)>,
    /// Staging memory, shared with external operations, which may outlive the call.
    staging: Vec<Arc<Storage>>,
    /// Host memory of tensors that only external operations can access.
    staged_memory: Option<Box<StagedMemory>>,
    /// Computes the combinations of a call where its tensors lie.
    tensor_coder: Option<Arc<dyn External>>,
    /// Whether the inputs are copied to temporary memory first, and these copies.
    copies_inputs: bool,
    input_copies: Option<Arc<SampleCopies>>,
    /// Memory of the sample of such a call.
    sample: Option<Arc<dyn Keeps>>,
    offload: Option<Box<Offload>>,
    /// Where the parts of a staged call meet.
    meeting: Option<Arc<dyn Meeting>>,
    /// Operation that ends when other lanes have done their parts of the call.
    joins: Option<Arc<dyn External>>,
}

/// A collective to be offloaded, and the worker that does it.
struct Offload {
    by: Arc<dyn External>,
    collective: ExternalCollective,
}

// SAFETY: only one thread at a time uses the addresses, under the driver's lock. The contract of `Group::submit` keeps
// them valid.
unsafe impl Send for Buffers {}

impl Buffers {
    /// Prepares the memory of `desc` for rank `rank`: packs tensors that are not plain, stages inputs that overlap
    /// outputs, and multiplies by the factor of `PREMUL_SUM`.
    ///
    /// # Errors
    /// `InvalidArgument` for an output with several elements at one address and, unless the call works in place, for
    /// outputs that share memory with each other. `Exhausted` if there is no memory for staging.
    pub(crate) fn prepare(desc: &CallDesc, rank: usize) -> Result<Self> {
        let mut buffers = Self::default();
        if desc.is_by_reference {
            buffers.copies_inputs = inputs_need_publishing_copy(desc, rank)?;
            buffers.set_addresses(desc);
            buffers.add_message_publisher(desc)?;
            return Ok(buffers);
        }
        if desc.tensor_coder.is_some() {
            // The worker uses the tensors where they lie, and none shares memory in a way that the schedules do not allow.
            buffers.tensor_coder = desc.tensor_coder.clone();
            buffers.sample = desc.sample_memory();
            buffers.set_addresses(desc);
            return Ok(buffers);
        }
        if desc.uses_tensors_as_they_are() && buffers.take_addresses(desc, rank) {
            return Ok(buffers);
        }
        buffers.meeting = desc.meeting.clone();
        let in_place = desc.inputs.is_empty();
        let premul = desc.collective.reduces() && desc.op == ReduceOp::PremulSum;
        let shared = outputs_are_entangled(&desc.outputs) && outputs_share_elements(&desc.outputs)?;
        if shared && !in_place {
            return Err(shared_outputs());
        }
        let overlap = !in_place && inputs_need_copy(desc, rank);
        buffers.staged_memory = StagedMemory::new(desc, overlap || shared)?.map(Box::new);
        for tensor in desc.outputs.pieces() {
            refuse_self_overlap(tensor)?;
            // In place, the outputs hold the contribution and are packed with their contents. If two outputs share
            // memory, every rank writes the same values into both.
            let base = match buffers.place_staged(tensor) {
                Some(base) => base,
                None if tensor.is_plain() && !shared => tensor.ptr,
                None => buffers.stage_output(tensor, in_place)?,
            };
            buffers.outputs.push(base);
        }
        if in_place {
            buffers.prepare_in_place(desc, premul)?;
            return Ok(buffers);
        }
        for tensor in desc.inputs.pieces() {
            if let Some(base) = buffers.place_staged(tensor) {
                buffers.inputs.push(base);
                continue;
            }
            let base =
                if tensor.is_plain() && !overlap && !premul { tensor.ptr } else { buffers.stage_input(tensor)? };
            if premul {
                // SAFETY: `base` is new staging memory of `count_elems` elements; source and destination may be the
                // same.
                unsafe { accl_kernels::scale(desc.dtype, base, base, tensor.count_elems() as usize, desc.factor)? };
            }
            buffers.inputs.push(base);
        }
        Ok(buffers)
    }

    /// Takes the addresses of a call that uses its tensors directly, in place of [`Buffers::prepare`]. Returns `false`
    /// if tensors overlap, so that the call needs [`Buffers::prepare`].
    #[inline]
    pub(crate) fn take_addresses(&mut self, desc: &CallDesc, rank: usize) -> bool {
        if let Some(tensor) = desc.alone().filter(|_| desc.collective == Collective::AllReduce) {
            for bases in [&mut self.inputs, &mut self.outputs] {
                bases.clear();
                bases.push(tensor.ptr);
            }
            return true;
        }
        let in_place = desc.inputs.is_empty();
        if outputs_are_entangled(&desc.outputs) || !in_place && inputs_need_copy(desc, rank) {
            return false;
        }
        self.set_addresses(desc);
        true
    }

    /// Takes the addresses of the tensors.
    #[inline]
    fn set_addresses(&mut self, desc: &CallDesc) {
        let in_place = desc.inputs.is_empty();
        let contributes = matches!(desc.collective, Collective::AllReduce | Collective::Reduce);
        let inputs = if in_place && contributes { &desc.outputs } else { &desc.inputs };
        self.inputs.clear();
        self.inputs.extend(inputs.pieces().iter().map(|tensor| tensor.ptr));
        self.outputs.clear();
        self.outputs.extend(desc.outputs.pieces().iter().map(|tensor| tensor.ptr));
    }

    /// Prepares a call in place: all_reduce and reduce contribute the contents of the output, and a broadcast has no
    /// input.
    fn prepare_in_place(&mut self, desc: &CallDesc, premul: bool) -> Result<()> {
        match desc.collective {
            Collective::AllReduce | Collective::Reduce if premul => {
                // The factor is not applied to the tensor itself: the call may still be refused, and a reduce only
                // reads the tensor on non-root ranks.
                for (index, tensor) in desc.outputs.pieces().iter().enumerate() {
                    if tensor.memory() != MemoryKind::Host {
                        // The copy in host memory is scaled when it has arrived.
                        self.inputs.push(self.outputs[index]);
                        continue;
                    }
                    let base = self.stage_input(tensor)?;
                    // SAFETY: `base` is new staging memory of `count_elems` elements; source and destination may be the
                    // same.
                    unsafe { accl_kernels::scale(desc.dtype, base, base, tensor.count_elems() as usize, desc.factor)? };
                    self.inputs.push(base);
                }
            }
            Collective::AllReduce | Collective::Reduce => self.inputs = self.outputs.clone(),
            Collective::Broadcast
            | Collective::ReduceScatter
            | Collective::AllGather
            | Collective::Gather
            | Collective::Scatter
            | Collective::AllToAll
            | Collective::Barrier
            | Collective::Send
            | Collective::Recv => {}
        }
        Ok(())
    }

    fn stage_input(&mut self, tensor: &TensorDesc) -> Result<*mut u8> {
        let base = self.storage(tensor)?;
        // SAFETY: `base` has room for the tensor's elements, and the contract of `Group::submit` makes the tensor
        // readable.
        unsafe { accl_kernels::pack(base, &tensor.view(&mut [0; 2])) };
        Ok(base)
    }

    fn stage_output(&mut self, tensor: &TensorDesc, with_contents: bool) -> Result<*mut u8> {
        let base = if with_contents { self.stage_input(tensor)? } else { self.storage(tensor)? };
        self.staged.push((tensor.clone(), base));
        Ok(base)
    }

    fn storage(&mut self, tensor: &TensorDesc) -> Result<*mut u8> {
        let mut storage = Storage::new(tensor.len_bytes() as usize)?;
        let base = storage.ptr();
        self.staging.push(Arc::new(storage));
        Ok(base)
    }

    /// Drops the staged outputs of a rank that only contributes, so that nothing is written back.
    pub(crate) fn discard_outputs(&mut self) {
        self.staged.clear();
    }

    /// Returns the host memory of a tensor that only external operations can access; `None` for any other tensor.
    fn place_staged(&mut self, tensor: &TensorDesc) -> Option<*mut u8> {
        let staged_memory = self.staged_memory.as_deref_mut().filter(|_| tensor.memory() != MemoryKind::Host)?;
        Some(staged_memory.place(tensor))
    }

    /// Returns whether results are copied to other memory.
    pub(crate) fn copies_out(&self) -> bool {
        self.staged_memory.as_deref().is_some_and(StagedMemory::copies_out)
    }

    /// Returns whether tensors of the call are copied in before it uses them.
    pub(crate) fn are_staged(&self) -> bool {
        self.staged_memory.is_some()
    }

    pub(crate) fn has_overlap(&self) -> bool {
        self.staged_memory.as_deref().is_some_and(StagedMemory::has_overlap)
    }

    pub(crate) fn meeting(&self) -> Option<&Arc<dyn Meeting>> {
        self.meeting.as_ref()
    }

    /// Begins to copy in what a plan needs of tensors that only external operations can access.
    ///
    /// # Errors
    /// The errors of [`crate::call::Staging::copy_in`].
    pub(crate) fn begin_copies(&mut self, desc: &CallDesc, plan: &StagedCopies) -> Result<()> {
        let Some(mut staged_memory) = self.staged_memory.take() else { return Ok(()) };
        let host = |side, piece: u32| match side {
            Side::Inputs => self.input(piece as usize),
            Side::Outputs => self.output(piece as usize),
        };
        staged_memory.begin(desc, plan, host)?;
        self.staged_memory = Some(staged_memory);
        Ok(())
    }

    /// Begins to copy in the tensor of a message, if only external operations can access it.
    ///
    /// # Errors
    /// The errors of [`crate::call::Staging::copy_in`].
    pub(crate) fn begin_message(&mut self, desc: &CallDesc) -> Result<()> {
        self.staged_memory.as_deref_mut().map_or(Ok(()), |staged_memory| staged_memory.begin_message(desc))
    }

    /// Returns the bytes of a slot of the ring of a staged message.
    pub(super) fn ring_slot(&self) -> Option<u64> {
        self.staged_memory.as_deref().map(StagedMemory::ring_slot)
    }

    /// Begins to let the worker compute a combination. Returns `None` if the call has no worker for combinations.
    pub(crate) fn begin_combine(&self, work: ExternalWork, wake: &Wake) -> Option<ExternalHandle> {
        let keeps = Arc::new((self.staging.clone(), self.sample.clone()));
        Some(ExternalHandle::begin(self.tensor_coder.as_ref()?, work, keeps, wake.clone()))
    }

    /// Begins an external operation of the plan. Returns `None` if this call has no work for it.
    pub(crate) fn begin_external(&mut self, step: ExternalStep, wake: &Wake) -> Option<ExternalHandle> {
        let staged = self.staged_memory.as_deref().map(StagedMemory::keeps);
        let keeps: Arc<dyn Any + Send + Sync> = Arc::new((self.staging.clone(), staged));
        let (by, work) = match step {
            // A combination begins with `begin_combine`.
            ExternalStep::Combine => return None,
            ExternalStep::Join => (self.joins.take()?, ExternalWork::Parts),
            ExternalStep::Offload => {
                let Offload { by, collective } = *self.offload.take()?;
                (by, ExternalWork::Collective(collective.into()))
            }
            ExternalStep::CopyIn => {
                let (by, copies) = self.staged_memory.as_deref_mut()?.take_copy_in()?;
                (by, ExternalWork::CopyIn(copies))
            }
            ExternalStep::CopyOut => {
                let (by, copies) = self.staged_memory.as_deref_mut()?.take_copy_out()?;
                (by, ExternalWork::CopyOut(copies))
            }
        };
        Some(ExternalHandle::begin(&by, work, keeps, wake.clone()))
    }

    /// Prepares the offload of the collective, with the memory that was prepared for the call.
    pub(crate) fn offload(&mut self, desc: &CallDesc) {
        let Some(by) = &desc.offload else { return };
        let inputs = match desc.collective {
            // The contribution may be a scaled copy.
            Collective::AllReduce | Collective::Reduce if desc.inputs.is_empty() => {
                dense_blocks(&desc.outputs, &self.inputs)
            }
            Collective::Broadcast if desc.inputs.is_empty() => dense_blocks(&desc.outputs, &self.outputs),
            Collective::AllReduce
            | Collective::Reduce
            | Collective::Broadcast
            | Collective::ReduceScatter
            | Collective::AllGather
            | Collective::Gather
            | Collective::Scatter
            | Collective::AllToAll
            | Collective::Barrier
            | Collective::Send
            | Collective::Recv => dense_blocks(&desc.inputs, &self.inputs),
        };
        let collective = ExternalCollective {
            collective: desc.collective,
            dtype: desc.dtype,
            op: desc.op,
            root: desc.root,
            seq: 0,
            started: Moment::from_nanos(0),
            deadline: None,
            inputs,
            outputs: dense_blocks(&desc.outputs, &self.outputs),
        };
        self.offload = Some(Box::new(Offload { by: by.clone(), collective }));
    }

    /// Returns the same memory for another part of the call. The first part alone packs before and unpacks after the
    /// call.
    pub(crate) fn share(&self) -> Self {
        Self {
            inputs: self.inputs.clone(),
            outputs: self.outputs.clone(),
            staging: self.staging.clone(),
            staged_memory: self.staged_memory.as_deref().map(|memory| Box::new(memory.share())),
            tensor_coder: self.tensor_coder.clone(),
            sample: self.sample.clone(),
            meeting: self.meeting.clone(),
            ..Self::default()
        }
    }

    /// Makes the call wait until other lanes have done their parts.
    pub(crate) fn join(&mut self, desc: &CallDesc) {
        self.joins = desc.joins.clone();
    }

    /// Sets sequence number, submission time and deadline of an offloaded collective.
    pub(crate) fn number(&mut self, seq: u64, started: Moment, deadline: Option<Moment>) {
        if let Some(Offload { collective, .. }) = self.offload.as_deref_mut() {
            (collective.seq, collective.started, collective.deadline) = (seq, started, deadline);
        }
    }

    /// Allocates the call's scratch memory.
    pub(crate) fn add_scratch(&mut self, len_bytes: u64) -> Result<()> {
        if len_bytes > 0 {
            let mut storage = Storage::new(len_bytes as usize)?;
            self.scratch_base = Some(storage.ptr());
            self.scratch = Some(storage);
        }
        Ok(())
    }

    /// Lets the call use `scratch`, which must keep its address until [`Buffers::own_scratch`] or the completion of the
    /// call.
    pub(crate) fn borrow_scratch(&mut self, scratch: &mut Storage) {
        self.scratch_base = Some(scratch.ptr());
    }

    /// Takes ownership of the memory that was borrowed.
    pub(crate) fn own_scratch(&mut self, scratch: Storage) {
        self.scratch = Some(scratch);
    }

    /// Borrows the memory for encoded chunks from the staging of a call whose combinations a worker computes. The worker shares
    /// it, and may outlive the call.
    ///
    /// # Errors
    /// `Exhausted` if no memory is lent, since the worker can use no other.
    pub(crate) fn lend_codes(&mut self, desc: &CallDesc, len_bytes: usize) -> Result<()> {
        let lent = desc.staging.as_ref().map_or(Ok(None), |staging| staging.lend(len_bytes))?;
        let none = || Error::exhausted(format!("no memory is lent for {len_bytes} encoded bytes"));
        let mut storage = Storage::lent(lent.ok_or_else(none)?);
        self.codes_base = Some(storage.ptr());
        self.staging.push(Arc::new(storage));
        Ok(())
    }

    /// Adds the worker of a call by reference, its temporary memory, and host memory for references, which the worker shares.
    ///
    /// # Errors
    /// The errors of [`crate::call::Staging::publisher`]; `Exhausted`.
    pub(crate) fn add_publisher(&mut self, desc: &CallDesc, needs: PublishingNeeds, code_bytes: u64) -> Result<()> {
        let Some(staging) = &desc.staging else { return Err(Error::internal("a call by reference has no staging")) };
        let room = |tensor: &TensorDesc| tensor.len_bytes().next_multiple_of(PUBLISHED_ALIGN);
        let copied_bytes = match self.copies_inputs {
            true => desc.inputs.pieces().iter().map(room).sum(),
            false => 0,
        };
        let before = needs.scratch_bytes.next_multiple_of(PUBLISHED_ALIGN);
        let needs = PublishingNeeds { scratch_bytes: before + copied_bytes, ..needs };
        let Publisher { worker, scratch } = staging.publisher(needs)?;
        self.tensor_coder = Some(worker);
        self.scratch_base = Some(scratch);
        if self.copies_inputs {
            let mut to = scratch.wrapping_add(before as usize);
            let mut copies = Vec::new();
            for (base, tensor) in self.inputs.iter_mut().zip(desc.inputs.pieces()) {
                copies.push(SampleCopy { from: *base, to, elems: tensor.len_bytes() });
                *base = to;
                to = to.wrapping_add(room(tensor) as usize);
            }
            self.input_copies = Some(Arc::new(SampleCopies::new(copies)));
        }
        let mut storage = Storage::new(code_bytes as usize)?;
        self.codes_base = Some(storage.ptr());
        self.staging.push(Arc::new(storage));
        Ok(())
    }

    /// Lets a message by reference use the memory of its references in place of its tensor. Does nothing for other calls.
    fn add_message_publisher(&mut self, desc: &CallDesc) -> Result<()> {
        let is_send = desc.collective == Collective::Send;
        if !desc.collective.is_point_to_point() {
            return Ok(());
        }
        let blocks = if is_send { &desc.inputs } else { &desc.outputs };
        let Some(tensor) = blocks.alone() else { return Err(Error::internal("a message by reference has one tensor")) };
        self.add_publisher(desc, message_needs(tensor, is_send), message_bytes(tensor))?;
        for bases in [&mut self.inputs, &mut self.outputs] {
            bases.clear();
            bases.extend(self.codes_base);
        }
        Ok(())
    }

    /// Adds the memory for encoded chunks.
    pub(crate) fn add_codes(&mut self, mut storage: Storage) {
        self.codes_base = Some(storage.ptr());
        self.codes = Some(storage);
    }

    /// Returns the memory for encoded chunks, so that another call can use it.
    pub(crate) fn take_codes(&mut self) -> Option<Storage> {
        self.codes_base = None;
        self.codes.take()
    }

    /// Returns the address of an extent's first byte.
    #[inline]
    pub(crate) fn address(&self, extent: &Extent) -> *mut u8 {
        let base = match extent.buf {
            Buf::In => self.inputs[extent.piece as usize],
            Buf::Out => self.outputs[extent.piece as usize],
            Buf::Scratch => self.scratch_base.unwrap_or(std::ptr::null_mut()),
            Buf::Code => self.codes_base.unwrap_or(std::ptr::null_mut()),
        };
        base.wrapping_add(extent.offset as usize)
    }

    /// Returns the copies that precede all tasks of a call by reference.
    pub(super) fn input_copies(&self) -> Option<&Arc<SampleCopies>> {
        self.input_copies.as_ref()
    }

    pub(crate) fn input(&self, piece: usize) -> *mut u8 {
        self.inputs[piece]
    }

    pub(crate) fn output(&self, piece: usize) -> *mut u8 {
        self.outputs[piece]
    }

    /// Copies staged outputs back into their tensors.
    pub(crate) fn unpack(&mut self) {
        for (tensor, base) in self.staged.drain(..) {
            // SAFETY: `base` holds the dense elements of this tensor, and the tensor is writable until the call
            // completes.
            unsafe { accl_kernels::unpack(&tensor.view(&mut [0; 2]), base) };
        }
    }
}

/// Returns the blocks of a call as dense tensors at the addresses `bases`.
fn dense_blocks(blocks: &Blocks, bases: &[*mut u8]) -> Blocks {
    let mut bases = bases.iter();
    let dense = |tensor: &TensorDesc| bases.next().map(|&base| dense_like(tensor, base));
    let mut dense = dense;
    blocks.iter().map(|block| block.iter().filter_map(&mut dense).collect::<SmallVec<[TensorDesc; 2]>>()).collect()
}

/// Returns a dense tensor at `base` with the same dtype and number of elements.
fn dense_like(tensor: &TensorDesc, base: *mut u8) -> TensorDesc {
    TensorDesc::dense(base, tensor.dtype, Elems(tensor.count_elems()))
}

#[cfg(test)]
mod tests {
    use accl_types::{Dtype, Elems};

    use super::*;
    use crate::call::Blocks;

    #[test]
    fn a_call_that_may_still_be_refused_has_not_scaled_its_tensor() {
        let mut data = [1.0_f32, 2.0];
        let base = data.as_mut_ptr();
        let mut desc = CallDesc::new(Collective::AllReduce, Dtype::F32);
        desc.outputs = Blocks::of(TensorDesc::dense(base.cast(), Dtype::F32, Elems(2)));
        (desc.op, desc.factor) = (ReduceOp::PremulSum, 3.0);
        // SAFETY: no other code uses the array, which outlives this read.
        let now = || unsafe { std::slice::from_raw_parts(base, 2).to_vec() };
        let buffers = Buffers::prepare(&desc, 0).unwrap();
        assert_eq!(now(), [1.0, 2.0]);
        // SAFETY: `inputs[0]` is staging memory of two elements.
        let contributed = unsafe { std::slice::from_raw_parts(buffers.inputs[0].cast::<f32>(), 2) };
        assert_eq!((contributed, buffers.outputs[0]), ([3.0, 6.0].as_slice(), base.cast()));
    }
}
