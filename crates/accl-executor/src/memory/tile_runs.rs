//! Combinations as runs of tiles, for workers that compute them where the tensors lie.
//!
//! This module decides which calls are computed there, and translates the regions of a plan to addresses. `coder` owns the
//! settings. Read [`tensor_coder`] first, then [`combination`].

use std::sync::Arc;

use accl_types::{Dtype, Rank, ReduceOp};

use super::buffers::Buffers;
use super::coder::Coder;
use super::error_probe::{RUN, Sample};
use super::overlap::{inputs_share_memory, outputs_are_entangled};
use crate::call::{
    CallDesc, CoderNeeds, External, ExternalCombination, SampleCopy, SampledResult, TensorDesc, TileCode, TileOperand,
    TileResidual, TileRun,
};
use crate::plan::{Coded, Combination, Operand};

/// Returns the worker that computes the combinations of a call where its tensors lie. `None` if the host does: the tensors are
/// host memory, share memory, or are not dense; the call is not encoded, or scales its tensors; the residuals lie elsewhere; or the
/// staging has no worker for these codecs. A call that is measured must have no sample yet.
pub(crate) fn tensor_coder(desc: &CallDesc, rank: Rank, world: u32) -> Option<Arc<dyn External>> {
    let (staging, encoding) = desc.staging.as_ref().zip(desc.encoding(world))?;
    // A tensor without elements lies nowhere.
    let has_elements = |tensor: &&TensorDesc| tensor.count_elems() > 0;
    let mut pieces = desc.inputs.pieces().iter().chain(desc.outputs.pieces()).filter(has_elements);
    let memory = pieces.next()?.memory();
    let lie_together = desc.is_staged() && pieces.all(|tensor| tensor.memory() == memory);
    let are_dense = || desc.inputs.pieces().iter().chain(desc.outputs.pieces()).all(|tensor| tensor.is_dense_value());
    let residuals_fit = || encoding.residuals.as_ref().is_none_or(|residuals| residuals.memory == memory);
    // Rare calls, such as those that share memory, are not worth another order of operations on the device.
    let shares_memory = || {
        outputs_are_entangled(&desc.outputs)
            || !desc.inputs.is_empty() && inputs_share_memory(desc, rank.index(), TensorDesc::is_dense_value)
    };
    let fits = desc.op != ReduceOp::PremulSum && lie_together && are_dense() && residuals_fit() && !shares_memory();
    // If the sample's codec cannot be had, the call fails where the sample is added.
    let codecs = fits.then(|| Sample::codecs_of(desc, encoding).ok()).flatten()?;
    let needs = CoderNeeds { residuals: encoding.residuals.is_some(), figures: encoding.probe.is_some() };
    staging.coder(&codecs, desc.dtype, needs)
}

/// Describes a combination with the addresses of one call.
pub(super) fn combination(coder: &Coder, buffers: &Buffers, op: &Combination) -> ExternalCombination {
    let mut runs: Vec<TileRun> = Vec::new();
    let sample = coder.sample_copies();
    let mut sampled = Vec::new();
    let mut before = None;
    for (index, tile) in op.tiles.iter().enumerate() {
        let run = run_of(coder, buffers, op, index);
        let tensor = (tile.piece, tile.block);
        if let Some((sample, values)) = sample.zip(run.values) {
            sampled.extend(
                within(&sample.results, values, run.elems, coder.dtype())
                    .map(|copy| SampledResult { tile: index as u32, copy }),
            );
        }
        match runs.last_mut().filter(|last| before == Some(tensor) && follows(&run, last, coder.dtype())) {
            Some(last) => {
                last.tiles.end += 1;
                last.elems += run.elems;
            }
            None => runs.push(run),
        }
        before = Some(tensor);
    }
    let mut combination = ExternalCombination::new(coder.dtype(), runs, coder.is_probed());
    combination.sample = sample.map(|sample| sample.contributions.clone());
    combination.sampled = sampled;
    combination
}

/// Returns the parts of copies that lie in `elems` values from `values` on. The copies are in the order of their addresses.
fn within(copies: &[SampleCopy], values: *const u8, elems: u64, dtype: Dtype) -> impl Iterator<Item = SampleCopy> + '_ {
    let size = dtype.size_bytes();
    let end_of = move |copy: &SampleCopy| copy.from.addr() + copy.elems as usize * size;
    let (start, end) = (values.addr(), values.addr() + elems as usize * size);
    // Two runs of a sample may share elements, but all have at most one length.
    let first = copies.partition_point(|copy| copy.from.addr() < start.saturating_sub(RUN as usize * size));
    copies[first..].iter().take_while(move |copy| copy.from.addr() < end).filter_map(move |copy| {
        let (from, to) = (copy.from.addr().max(start), end_of(copy).min(end));
        let skipped = from - copy.from.addr();
        let elems = to.checked_sub(from).filter(|&len| len > 0)? / size;
        let [from, to] = [copy.from, copy.to.cast_const()].map(|base| base.wrapping_add(skipped));
        Some(SampleCopy { from, to: to.cast_mut(), elems: elems as u64 })
    })
}

/// Returns the run of one tile alone.
fn run_of(coder: &Coder, buffers: &Buffers, op: &Combination, index: usize) -> TileRun {
    let tile = &op.tiles[index];
    let at = op.starts[index] * coder.dtype().size_bytes() as u64;
    let tiles_of = |code: &Coded| {
        let (start, len) = code.range(index);
        let codec = coder.codecs().codec(code.role, code.tiles[index].piece).clone();
        TileCode { address: buffers.address(&code.region.at(start)), stride: len as u64, codec }
    };
    let operand = |operand: &Operand| match operand {
        Operand::Values(src) => TileOperand::Values(buffers.address(&src.at(at))),
        Operand::Code(code) => TileOperand::Code(tiles_of(code)),
    };
    let residual = op.code.as_ref().and_then(|code| {
        let skips_zeros = op.pass > 0;
        Some(TileResidual {
            address: coder.residual(op, code, index)?,
            skips_zeros,
            used: coder.residual_flag(op, code, index),
            is_measured: coder.is_probed() && !skips_zeros,
        })
    });
    TileRun {
        tiles: index as u32..index as u32 + 1,
        piece: tile.piece,
        elems: tile.elems,
        tile_elems: tile.elems,
        first: tile.first,
        operands: op.srcs.iter().map(operand).collect(),
        code: op.code.as_ref().map(tiles_of),
        values: op.out.as_ref().map(|out| buffers.address(&out.at(at))),
        residual,
        divisor: coder.finishing(op),
        rng_key: coder.rng_key(tile, op.pass),
    }
}

/// Returns whether a run of one tile follows another run of the same tensor, in each part of memory.
fn follows(next: &TileRun, run: &TileRun, dtype: Dtype) -> bool {
    let tiles = run.tiles.len() as u64;
    let is_behind =
        |address: *const u8, base: *const u8, stride: u64| address == base.wrapping_add((tiles * stride) as usize);
    let values = |address, base| is_behind(address, base, run.tile_elems * dtype.size_bytes() as u64);
    let code = |next: &TileCode, run: &TileCode| {
        Arc::ptr_eq(&next.codec, &run.codec) && is_behind(next.address, run.address, run.stride)
    };
    let operand = |pair: (&TileOperand, &TileOperand)| match pair {
        (TileOperand::Values(next), TileOperand::Values(run)) => values(*next, *run),
        (TileOperand::Code(next), TileOperand::Code(run)) => code(next, run),
        (TileOperand::Values(_), TileOperand::Code(_)) | (TileOperand::Code(_), TileOperand::Values(_)) => false,
    };
    next.first == run.first + run.elems
        && run.elems == tiles * run.tile_elems
        && next.elems <= run.tile_elems
        && next.operands.iter().zip(&run.operands).all(operand)
        && both(next.code.as_ref(), run.code.as_ref(), code)
        && both(next.values, run.values, |next, run| values(next, run))
        && both(next.residual, run.residual, |next, of| {
            next.used == of.used && is_behind(next.address, of.address, run.tile_elems * size_of::<f32>() as u64)
        })
}

/// Returns whether both are absent, or both are there and `fit`.
fn both<T>(next: Option<T>, run: Option<T>, fit: impl Fn(T, T) -> bool) -> bool {
    match (next, run) {
        (Some(next), Some(run)) => fit(next, run),
        (None, None) => true,
        (Some(_), None) | (None, Some(_)) => false,
    }
}
