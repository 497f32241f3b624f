//! The memory of one call: base addresses of its pieces, staging for tensors that are not plain, scratch.
//!
//! Owns packing before and unpacking after a call. Which bytes of a piece belong to which chunk is the layout's matter.
//! Read [`Buffers`] first.

use accl_schedule::{Buf, Extent};
use accl_types::{Collective, Elems, Error, ReduceOp, Result};
use smallvec::SmallVec;

use crate::desc::{Blocks, CallDesc, TensorDesc};

type Bases = SmallVec<[*mut u8; 4]>;

/// Memory with the alignment of a cache line.
#[derive(Default)]
pub(crate) struct Storage {
    words: Vec<Line>,
}

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

impl Storage {
    pub(crate) fn new(len_bytes: usize) -> Result<Self> {
        let lines = len_bytes.div_ceil(64);
        let mut words = Vec::new();
        words
            .try_reserve_exact(lines)
            .map_err(|_| Error::exhausted(format!("no memory for a staging buffer of {len_bytes} bytes")))?;
        // Zeroed, so that what lies between pieces is never a stranger's data.
        words.resize(lines, Line([0; 64]));
        Ok(Self { words })
    }

    pub(crate) fn ptr(&mut self) -> *mut u8 {
        self.words.as_mut_ptr().cast()
    }

    pub(crate) fn len_bytes(&self) -> usize {
        self.words.len() * 64
    }

    /// Makes room for `len_bytes`; what was in it is lost.
    pub(crate) fn grow(&mut self, len_bytes: usize) -> Result<()> {
        if self.len_bytes() < len_bytes {
            *self = Self::new(len_bytes)?;
        }
        Ok(())
    }
}

/// Rooms for encoded chunks between calls: calls of one kind need the same again and again, and new memory is slow.
#[derive(Default)]
pub(crate) struct Rooms(Vec<Storage>);

/// Most rooms that are kept.
const MAX_ROOMS: usize = 8;

impl Rooms {
    /// One of at least `len_bytes`: the smallest that fits, or a new one.
    pub(crate) fn take(&mut self, len_bytes: usize) -> Result<Storage> {
        let fitting = self.0.iter().enumerate().filter(|(_, room)| room.len_bytes() >= len_bytes);
        match fitting.min_by_key(|(_, room)| room.len_bytes()).map(|(index, _)| index) {
            Some(index) => Ok(self.0.swap_remove(index)),
            None => Storage::new(len_bytes),
        }
    }

    /// Keeps a room for later calls; the largest ones, if there are many.
    pub(crate) fn give(&mut self, room: Option<Storage>) {
        self.0.extend(room);
        if self.0.len() > MAX_ROOMS {
            let smallest = self.0.iter().enumerate().min_by_key(|(_, room)| room.len_bytes());
            if let Some((index, _)) = smallest {
                self.0.swap_remove(index);
            }
        }
    }
}

/// Base addresses and owned memory of a call in flight.
///
/// The addresses come from the caller's descriptors; the contract of `Group::submit` keeps them valid until the call ends.
#[derive(Default)]
pub(crate) struct Buffers {
    inputs: Bases,
    outputs: Bases,
    scratch: Option<Storage>,
    scratch_base: Option<*mut u8>,
    codes: Option<Storage>,
    codes_base: Option<*mut u8>,
    /// Outputs to be unpacked when the call is done: the tensor and where its dense copy lies.
    staged: Vec<(TensorDesc, *mut u8)>,
    _staging: Vec<Storage>,
}

// SAFETY: the addresses are used by one thread at a time, under the engine's lock, and stay valid by the contract above.
unsafe impl Send for Buffers {}

impl Buffers {
    /// Prepares the memory of `desc` for rank `rank`: packs what is not plain, stages inputs that overlap outputs,
    /// multiplies by the factor of `PREMUL_SUM`.
    ///
    /// # Errors
    /// `InvalidArgument` for outputs that share memory with themselves or, unless the call works in place, with each
    /// other; `Exhausted` without memory for staging.
    pub(crate) fn prepare(desc: &CallDesc, rank: usize) -> Result<Self> {
        let mut buffers = Self::default();
        if desc.uses_tensors_as_they_are() && buffers.take_addresses(desc, rank) {
            return Ok(buffers);
        }
        let in_place = desc.inputs.is_empty();
        let premul = desc.collective.reduces() && desc.op == ReduceOp::PremulSum;
        let shared = outputs_are_entangled(&desc.outputs) && outputs_share_elements(&desc.outputs)?;
        if shared && !in_place {
            return Err(Error::invalid_argument("two output tensors share memory; give each its own"));
        }
        for tensor in desc.outputs.pieces() {
            refuse_self_overlap(tensor)?;
            // In place, the outputs hold the contribution and are packed with their contents. Where two of them share
            // memory, every rank writes the same into both.
            let base =
                if tensor.is_plain() && !shared { tensor.ptr } else { buffers.stage_output(tensor, in_place)? };
            buffers.outputs.push(base);
        }
        if in_place {
            buffers.prepare_in_place(desc, premul)?;
            return Ok(buffers);
        }
        let overlap = inputs_need_copy(desc, rank);
        for tensor in desc.inputs.pieces() {
            let base =
                if tensor.is_plain() && !overlap && !premul { tensor.ptr } else { buffers.stage_input(tensor)? };
            if premul {
                // SAFETY: `base` is staging of this many elements, made just now; source and destination are the same.
                unsafe { accl_kernels::scale(desc.dtype, base, base, tensor.count_elems() as usize, desc.factor)? };
            }
            buffers.inputs.push(base);
        }
        Ok(buffers)
    }

    /// As [`Buffers::prepare`], for a call that uses its tensors as they are. `false`: they overlap, and it needs more than
    /// their addresses.
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
        let contributes = matches!(desc.collective, Collective::AllReduce | Collective::Reduce);
        let inputs = if in_place && contributes { &desc.outputs } else { &desc.inputs };
        self.inputs.clear();
        self.inputs.extend(inputs.pieces().iter().map(|tensor| tensor.ptr));
        self.outputs.clear();
        self.outputs.extend(desc.outputs.pieces().iter().map(|tensor| tensor.ptr));
        true
    }

    /// Calls that work in place: all_reduce and reduce contribute what the output holds, a broadcast has no input.
    fn prepare_in_place(&mut self, desc: &CallDesc, premul: bool) -> Result<()> {
        match desc.collective {
            Collective::AllReduce => self.inputs = self.outputs.clone(),
            Collective::Reduce => {
                // Off the root the tensor is only read: a factor must not show in it.
                self.inputs = self.outputs.clone();
                if premul {
                    self.inputs.clear();
                    for tensor in desc.outputs.pieces() {
                        let base = self.stage_input(tensor)?;
                        self.inputs.push(base);
                    }
                }
            }
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
        if premul {
            for (base, tensor) in self.inputs.iter().zip(desc.outputs.pieces()) {
                // SAFETY: `base` is the plain tensor or its staging, of this many elements; in place.
                unsafe { accl_kernels::scale(desc.dtype, *base, *base, tensor.count_elems() as usize, desc.factor)? };
            }
        }
        Ok(())
    }

    fn stage_input(&mut self, tensor: &TensorDesc) -> Result<*mut u8> {
        let base = self.storage(tensor)?;
        // SAFETY: `base` has room for the tensor's elements; the tensor is readable by the contract of `submit`.
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
        self._staging.push(storage);
        Ok(base)
    }

    /// Forgets staged outputs of a rank that only contributes: nothing is written back.
    pub(crate) fn discard_outputs(&mut self) {
        self.staged.clear();
    }

    /// Adds the call's scratch memory.
    pub(crate) fn add_scratch(&mut self, len_bytes: u64) -> Result<()> {
        if len_bytes > 0 {
            let mut storage = Storage::new(len_bytes as usize)?;
            self.scratch_base = Some(storage.ptr());
            self.scratch = Some(storage);
        }
        Ok(())
    }

    /// Lets the call use memory that stays where it is until [`Buffers::own_scratch`] or the call's end.
    pub(crate) fn borrow_scratch(&mut self, scratch: &mut Storage) {
        self.scratch_base = Some(scratch.ptr());
    }

    /// Takes over the memory that was borrowed.
    pub(crate) fn own_scratch(&mut self, scratch: Storage) {
        self.scratch = Some(scratch);
    }

    /// Adds the room for encoded chunks.
    pub(crate) fn add_codes(&mut self, mut storage: Storage) {
        self.codes_base = Some(storage.ptr());
        self.codes = Some(storage);
    }

    /// Gives that room back, for another call.
    pub(crate) fn take_codes(&mut self) -> Option<Storage> {
        self.codes_base = None;
        self.codes.take()
    }

    /// The address of an extent's first byte.
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

    pub(crate) fn input(&self, piece: usize) -> *mut u8 {
        self.inputs[piece]
    }

    pub(crate) fn output(&self, piece: usize) -> *mut u8 {
        self.outputs[piece]
    }

    /// Writes staged outputs back into their tensors.
    pub(crate) fn unpack(&mut self) {
        for (tensor, base) in self.staged.drain(..) {
            // SAFETY: `base` holds the dense elements of this tensor; the tensor is writable until the call ends.
            unsafe { accl_kernels::unpack(&tensor.view(&mut [0; 2]), base) };
        }
    }
}

/// Element counts of blocks of pieces, for a layout over elements of `elem_bytes` (1: bytes).
pub(crate) fn block_elems(blocks: &Blocks, elem_bytes: u64) -> Vec<Vec<Elems>> {
    let count = |tensor: &TensorDesc| Elems(tensor.len_bytes() / elem_bytes);
    blocks.iter().map(|block| block.iter().map(count).collect()).collect()
}

/// An expanded output has several elements at one address: what it would hold afterwards is undefined.
fn refuse_self_overlap(tensor: &TensorDesc) -> Result<()> {
    if tensor.is_expanded() {
        return Err(Error::invalid_argument(
            "an output tensor has several elements at one address (it was expanded); give a tensor of its own, for instance tensor.clone()",
        ));
    }
    Ok(())
}

/// Whether the memory of two outputs is not one after the other: they share elements, or lie between each other as the columns of
/// a matrix do.
#[inline]
fn outputs_are_entangled(outputs: &Blocks) -> bool {
    outputs.pieces().len() > 1 && several_are_entangled(outputs)
}

fn several_are_entangled(outputs: &Blocks) -> bool {
    let bounds = || outputs.pieces().iter().map(TensorDesc::bounds).filter(|(start, end)| start < end);
    // Most often they follow each other.
    let mut end_of_last = 0;
    if bounds().all(|(start, end)| start >= std::mem::replace(&mut end_of_last, end)) {
        return false;
    }
    let mut sorted: Vec<_> = bounds().collect();
    sorted.sort_unstable();
    sorted.windows(2).any(|pair| pair[1].0 < pair[0].1)
}

/// Whether an element of an output is also one of another, or twice in one. Looks at every element of those that are entangled.
fn outputs_share_elements(outputs: &Blocks) -> Result<bool> {
    let mut pieces: Vec<_> = outputs.pieces().iter().map(|tensor| (tensor.bounds(), tensor)).collect();
    pieces.retain(|((start, end), _)| start < end);
    pieces.sort_unstable_by_key(|(bounds, _)| *bounds);
    let mut rest = &pieces[..];
    while let Some(((start, mut end), first)) = rest.first().copied() {
        let mut count = 1;
        while let Some(((_, next_end), _)) = rest.get(count).filter(|((next, _), _)| *next < end) {
            end = end.max(*next_end);
            count += 1;
        }
        let (cluster, others) = rest.split_at(count);
        rest = others;
        let size = first.dtype.size_bytes();
        // Tensors of one type that do not even lie on one grid are not worth more.
        if cluster.iter().any(|((at, _), _)| (at - start) % size != 0) {
            return Ok(true);
        }
        if count > 1 {
            let mut seen = Marks::new((end - start) / size)?;
            if cluster.iter().any(|(_, tensor)| !seen.add(tensor, start)) {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// One bit for each place where an element can be.
struct Marks(Vec<u64>);

impl Marks {
    fn new(places: usize) -> Result<Self> {
        let words = places.div_ceil(64);
        let mut marks = Vec::new();
        marks.try_reserve_exact(words).map_err(|_| {
            Error::exhausted("no memory to see whether output tensors that lie between each other share elements")
        })?;
        marks.resize(words, 0);
        Ok(Self(marks))
    }

    /// Marks the elements of a tensor, counted from `origin`; `false` when one was marked.
    fn add(&mut self, tensor: &TensorDesc, origin: usize) -> bool {
        let mut dense = [0; 2];
        let view = tensor.view(&mut dense);
        let first = (tensor.ptr as usize - origin) / tensor.dtype.size_bytes();
        let (Some((&inner, sizes)), Some((&step, strides))) = (view.sizes.split_last(), view.strides.split_last())
        else {
            return self.run(first, 1, 1);
        };
        let mut index = vec![0; sizes.len()];
        loop {
            let offset: i64 = index.iter().zip(strides).map(|(&at, &stride)| at * stride).sum();
            if !self.run(first + offset as usize, inner as usize, step as usize) {
                return false;
            }
            // The next one, as an odometer counts.
            let Some(dim) = (0..sizes.len()).rev().find(|&dim| index[dim] + 1 < sizes[dim]) else { return true };
            index[dim] += 1;
            index[dim + 1..].fill(0);
        }
    }

    fn run(&mut self, first: usize, count: usize, step: usize) -> bool {
        if step == 1 {
            return self.dense_run(first, first + count);
        }
        (0..count).all(|index| {
            let place = first + index * step;
            let (word, bit) = (&mut self.0[place / 64], 1 << (place % 64));
            std::mem::replace(word, *word | bit) & bit == 0
        })
    }

    fn dense_run(&mut self, mut first: usize, end: usize) -> bool {
        while first < end {
            let count = (64 - first % 64).min(end - first);
            let (word, bits) = (&mut self.0[first / 64], u64::MAX >> (64 - count) << (first % 64));
            if std::mem::replace(word, *word | bits) & bits != 0 {
                return false;
            }
            first += count;
        }
        true
    }
}

/// Whether inputs share memory with outputs in another way than the schedules allow.
fn inputs_need_copy(desc: &CallDesc, rank: usize) -> bool {
    // Most often they are not even near each other.
    let span = |blocks: &Blocks| {
        let bounds = blocks.pieces().iter().map(TensorDesc::bounds).filter(|(start, end)| start < end);
        bounds.fold((usize::MAX, 0), |(low, high), (start, end)| (low.min(start), high.max(end)))
    };
    let (inputs, outputs) = (span(&desc.inputs), span(&desc.outputs));
    if inputs.1 <= outputs.0 || outputs.1 <= inputs.0 {
        return false;
    }
    // The allowed way: the one block that stands alone is this rank's block on the other side.
    let same = |alone: &[TensorDesc], block: &[TensorDesc]| {
        alone.len() == block.len()
            && alone.iter().zip(block).all(|(a, b)| a.ptr == b.ptr && a.is_plain() && b.is_plain())
    };
    let own_block_shared = match desc.collective {
        Collective::AllGather | Collective::Gather => {
            desc.outputs.get(rank).is_some_and(|block| same(desc.inputs.pieces(), block))
        }
        Collective::ReduceScatter | Collective::Scatter => {
            desc.inputs.get(rank).is_some_and(|block| same(desc.outputs.pieces(), block))
        }
        Collective::AllReduce
        | Collective::Broadcast
        | Collective::Reduce
        | Collective::AllToAll
        | Collective::Barrier
        | Collective::Send
        | Collective::Recv => false,
    };
    let bounds = |blocks: &Blocks, skip: Option<usize>| -> Vec<(usize, usize)> {
        let kept = blocks.iter().enumerate().filter(|(index, _)| Some(*index) != skip).flat_map(|(_, block)| block);
        kept.map(TensorDesc::bounds).filter(|(start, end)| start < end).collect()
    };
    // Of a shared pair the side in the list is left out: its other blocks must still be apart from the lone block.
    let many_is_output = matches!(desc.collective, Collective::AllGather | Collective::Gather);
    let skip = own_block_shared.then_some(rank);
    let inputs = bounds(&desc.inputs, if many_is_output { None } else { skip });
    let mut outputs = bounds(&desc.outputs, if many_is_output { skip } else { None });
    outputs.sort_unstable();
    // Outputs may lie between each other: each counts as far as those before it reach.
    let mut reach = 0;
    for (_, end) in &mut outputs {
        reach = reach.max(*end);
        *end = reach;
    }
    inputs.iter().any(|&(start, end)| {
        let before = outputs.partition_point(|&(out_start, _)| out_start < end);
        before > 0 && outputs[before - 1].1 > start
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use accl_types::Dtype;
    use proptest::prelude::*;

    use super::*;

    /// Sizes and strides of a tensor, where it begins in a room, and its type's size.
    fn tensors() -> impl Strategy<Value = Vec<(Vec<i64>, Vec<i64>, usize)>> {
        let tensor = (1_usize..4).prop_flat_map(|dims| {
            (prop::collection::vec(1_i64..6, dims), prop::collection::vec(1_i64..130, dims), 0_usize..300)
        });
        prop::collection::vec(tensor, 2..4)
    }

    proptest! {
        #[test]
        fn tensors_share_elements_if_an_address_is_found_twice(tensors in tensors()) {
            let base = 4096 as *mut f32;
            let mut outputs = Blocks::default();
            let mut seen = HashSet::new();
            let mut is_shared = false;
            for (sizes, strides, at) in &tensors {
                let start = base.wrapping_add(*at);
                outputs.push([TensorDesc::strided(start.cast(), Dtype::F32, sizes, strides).unwrap()]);
                let mut offsets = vec![0_i64];
                for (&size, &stride) in sizes.iter().zip(strides) {
                    offsets = offsets.iter().flat_map(|&at| (0..size).map(move |index| at + index * stride)).collect();
                }
                // One that has an element twice says so only where it is looked at.
                prop_assume!(offsets.iter().collect::<HashSet<_>>().len() == offsets.len());
                is_shared |= offsets.iter().any(|&offset| !seen.insert(*at as i64 + offset));
            }
            prop_assert_eq!(outputs_are_entangled(&outputs) && outputs_share_elements(&outputs).unwrap(), is_shared);
        }
    }
}
