//! Checks whether tensors of a call share memory.
//!
//! This module only answers the question; `buffers` decides the consequences. Read [`outputs_are_entangled`] first.

use accl_types::{Collective, Error, Result};

use crate::call::{Blocks, CallDesc, TensorDesc};

/// Refuses an expanded output. It has several elements at one address, so its contents after the call would be
/// undefined.
pub(crate) fn refuse_self_overlap(tensor: &TensorDesc) -> Result<()> {
    if tensor.is_expanded() {
        return Err(Error::invalid_argument(
            "an output tensor has several elements at one address (it was expanded); pass a tensor with its own \
             memory, for instance tensor.clone()",
        ));
    }
    Ok(())
}

/// Refuses outputs with several elements at one address, and different outputs that share elements. Results of a call in place
/// may share them, because all ranks write the same values.
///
/// # Errors
/// `InvalidArgument` for such outputs.
pub fn refuse_undefined_outputs(desc: &CallDesc) -> Result<()> {
    desc.outputs.pieces().iter().try_for_each(refuse_self_overlap)?;
    if !desc.inputs.is_empty() && outputs_are_entangled(&desc.outputs) && outputs_share_elements(&desc.outputs)? {
        return Err(shared_outputs());
    }
    Ok(())
}

/// Returns the error of a call whose outputs share memory.
pub(crate) fn shared_outputs() -> Error {
    Error::invalid_argument("two output tensors share memory; give each its own")
}

/// Returns whether contributions of a call by reference have to be copied first, because they share memory with results in a way
/// that the schedules do not allow.
///
/// # Errors
/// `InvalidArgument` if results share memory. `Internal` if a tensor is not dense.
pub(super) fn inputs_need_publishing_copy(desc: &CallDesc, rank: usize) -> Result<bool> {
    let pieces = || desc.inputs.pieces().iter().chain(desc.outputs.pieces());
    if let Some(tensor) = pieces().find(|tensor| !tensor.is_dense_value()) {
        return Err(Error::internal(format!("a tensor of a call by reference in {} is not dense", tensor.memory())));
    }
    if outputs_are_entangled(&desc.outputs) {
        return Err(Error::invalid_argument(
            "output tensors of the call share memory; give each tensor its own, or set ACCL_GPU_ROUTE=staged on all ranks",
        ));
    }
    Ok(!desc.inputs.is_empty() && inputs_share_memory(desc, rank, TensorDesc::is_dense_value))
}

/// Returns whether the address ranges of two outputs overlap. The outputs share elements, or are interleaved like the
/// columns of a matrix.
#[inline]
pub(crate) fn outputs_are_entangled(outputs: &Blocks) -> bool {
    outputs.pieces().len() > 1 && several_are_entangled(outputs)
}

fn several_are_entangled(outputs: &Blocks) -> bool {
    let placed = |tensor: &TensorDesc| (tensor.memory(), tensor.bounds());
    let bounds = || outputs.pieces().iter().map(placed).filter(|(_, (start, end))| start < end);
    // Outputs usually follow each other in memory.
    let mut end_of_last = 0;
    if bounds().all(|(_, (start, end))| start >= std::mem::replace(&mut end_of_last, end)) {
        return false;
    }
    let mut sorted: Vec<_> = bounds().collect();
    sorted.sort_unstable();
    // Addresses of different memories cannot be compared.
    sorted.windows(2).any(|pair| pair[0].0 == pair[1].0 && pair[1].1.0 < pair[0].1.1)
}

/// Returns whether two outputs share an element, or one output contains an element twice. Checks every element of the
/// outputs whose address ranges overlap.
pub(crate) fn outputs_share_elements(outputs: &Blocks) -> Result<bool> {
    let mut pieces: Vec<_> = outputs.pieces().iter().map(|tensor| (tensor.bounds(), tensor)).collect();
    pieces.retain(|((start, end), _)| start < end);
    pieces.sort_unstable_by_key(|(bounds, tensor)| (tensor.memory(), *bounds));
    let mut rest = &pieces[..];
    while let Some(((start, mut end), first)) = rest.first().copied() {
        let mut count = 1;
        while let Some(((_, next_end), _)) =
            rest.get(count).filter(|((next, _), other)| *next < end && other.memory() == first.memory())
        {
            end = end.max(*next_end);
            count += 1;
        }
        let (cluster, others) = rest.split_at(count);
        rest = others;
        let size = first.dtype.size_bytes();
        // Tensors that do not lie on one grid of elements are treated as sharing.
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

/// One bit for each position that an element can have.
struct Marks(Vec<u64>);

impl Marks {
    fn new(places: usize) -> Result<Self> {
        let words = places.div_ceil(64);
        let mut marks = Vec::new();
        marks.try_reserve_exact(words).map_err(|_| {
            Error::exhausted("out of memory while checking whether interleaved output tensors share elements")
        })?;
        marks.resize(words, 0);
        Ok(Self(marks))
    }

    /// Marks the elements of a tensor, counted from `origin`. Returns `false` if one was already marked.
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
            // Advances to the next index, as an odometer counts.
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

/// Returns whether inputs share memory with outputs in a way that the schedules do not allow.
pub(crate) fn inputs_need_copy(desc: &CallDesc, rank: usize) -> bool {
    inputs_share_memory(desc, rank, TensorDesc::is_plain)
}

/// Returns whether inputs share memory with outputs in another way than the allowed one. `is_used_directly` says whether the
/// call uses a tensor where it lies.
pub(super) fn inputs_share_memory(
    desc: &CallDesc,
    rank: usize,
    is_used_directly: impl Fn(&TensorDesc) -> bool,
) -> bool {
    // Inputs and outputs usually do not overlap at all.
    let span = |blocks: &Blocks| {
        let bounds = blocks.pieces().iter().map(TensorDesc::bounds).filter(|(start, end)| start < end);
        bounds.fold((usize::MAX, 0), |(low, high), (start, end)| (low.min(start), high.max(end)))
    };
    let (inputs, outputs) = (span(&desc.inputs), span(&desc.outputs));
    if inputs.1 <= outputs.0 || outputs.1 <= inputs.0 {
        return false;
    }
    // The allowed way: the single block on one side is this rank's block on the other side.
    let same = |alone: &[TensorDesc], block: &[TensorDesc]| {
        alone.len() == block.len()
            && alone.iter().zip(block).all(|(a, b)| a.ptr == b.ptr && is_used_directly(a) && is_used_directly(b))
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
    // A shared pair is left out on the side with the list of blocks. The other blocks of that side must still not
    // overlap the single block.
    let many_is_output = matches!(desc.collective, Collective::AllGather | Collective::Gather);
    let skip = own_block_shared.then_some(rank);
    let inputs = bounds(&desc.inputs, if many_is_output { None } else { skip });
    let mut outputs = bounds(&desc.outputs, if many_is_output { skip } else { None });
    outputs.sort_unstable();
    // Outputs may be interleaved: the end of each is raised to the highest end of those before it.
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

    /// Sizes and strides of a tensor, and its start in a range of memory, all in elements.
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
                // A tensor that contains an element twice is found only if it is checked, so it is skipped here.
                prop_assume!(offsets.iter().collect::<HashSet<_>>().len() == offsets.len());
                is_shared |= offsets.iter().any(|&offset| !seen.insert(*at as i64 + offset));
            }
            prop_assert_eq!(outputs_are_entangled(&outputs) && outputs_share_elements(&outputs).unwrap(), is_shared);
        }
    }
}
