//! Combinations of encoded calls, computed by kernels where the tensors lie.
//!
//! This module owns which kernels compute which part of a combination, and in what order. `gpu_codecs` has the kernels, and
//! `worker` decides when tiles are due. Kernels read and write encoded tiles in pinned memory directly, so only encoded bytes cross
//! the bus. Read [`TileLauncher::issue`] first.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use accl_engine::codec::Summary;
use accl_engine::{ExternalCombination, SampleCopy, TILE_HEADER_BYTES, TileCode, TileOperand, TileResidual, TileRun};
use accl_gpu::kernels::{CAPACITY, Kernel, KernelSet, Options, Span};
use accl_gpu::{Argument, Grid, Stream};
use accl_types::{Dtype, Result};

use crate::copies::{Issued, SharedStreams};
use crate::figures::{Figures, MOST_TILES, SQUARES_BYTES, Slot};
use crate::gpu_codecs::CallKernels;
use crate::streams::{Direction, StreamEvent};

/// Bytes of device memory for the float32 sums of a launch. Longer runs are computed in pieces of this size.
pub(crate) const SUMS_BYTES: u64 = 8 << 20;

/// Where the kernels of a call run, and what they use there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaunchTarget {
    /// Native handle of the stream.
    pub(crate) stream: u64,
    /// Address of [`SUMS_BYTES`] bytes of the device. The kernels of all calls on a stream share them, so the thread that follows
    /// these calls alone enqueues such kernels.
    pub(crate) sums: u64,
}

/// Enqueues the kernels of one combination.
#[derive(Debug)]
pub(crate) struct TileLauncher {
    streams: SharedStreams,
    kernels: Arc<CallKernels>,
    target: LaunchTarget,
    figures: Arc<Figures>,
    /// Whether the call's stream has come to the call. Shared by all combinations of the call.
    may_launch: Arc<AtomicBool>,
    measured: VecDeque<Measured>,
    /// Number of sampled results whose copies are enqueued.
    sampled: usize,
}

/// Figures that a launch in flight writes.
#[derive(Debug)]
struct Measured {
    /// The figures are final once this many tiles are made.
    ready: usize,
    slot: Slot,
    /// Runs of the launch, with the number of tiles of each whose squares are measured.
    runs: Vec<(usize, usize)>,
}

impl TileLauncher {
    pub(crate) fn new(
        streams: SharedStreams,
        kernels: Arc<CallKernels>,
        target: LaunchTarget,
        figures: Arc<Figures>,
        may_launch: Arc<AtomicBool>,
    ) -> Self {
        Self { streams, kernels, target, figures, may_launch, measured: VecDeque::new(), sampled: 0 }
    }

    /// Adds figures of the launches that made the first `made` tiles of a combination to its figures.
    pub(crate) fn collect(&mut self, combination: &ExternalCombination, made: usize) {
        let done = self.measured.iter().take_while(|measured| measured.ready <= made).count();
        for Measured { slot, runs, .. } in self.measured.drain(..done) {
            let tiles = runs.iter().map(|(_, tiles)| tiles).sum();
            let (counts, squares) = self.figures.take_back(slot, tiles);
            // The runs of a launch belong to one tensor.
            runs.first().into_iter().for_each(|&(run, _)| combination.count(run, counts));
            let mut squares = squares.into_iter();
            runs.iter().for_each(|&(run, tiles)| combination.add_squares(run, squares.by_ref().take(tiles)));
        }
    }

    /// Records an event behind all kernels that were enqueued.
    pub(crate) fn record(&mut self) -> Result<Box<dyn StreamEvent>> {
        self.streams.lock().record(Direction::Out)
    }

    /// Ends the work for a combination. `may_run` says whether kernels may still be in flight.
    pub(crate) fn end(self, may_run: bool) {
        for Measured { slot, .. } in self.measured {
            if may_run { self.figures.lose(slot) } else { drop(self.figures.take_back(slot, 0)) }
        }
    }

    /// Enqueues kernels for the tiles up to number `ready`, and records an event behind each launch. Until the call's stream has
    /// come to the call it enqueues none, and [`Issued::is_held_up`] is set: a kernel that waits in the side stream would hold up
    /// other calls. It is also set while no memory for figures is free.
    ///
    /// # Errors
    /// The error of the device. Kernels may be in flight nevertheless.
    pub(crate) fn issue(&mut self, combination: &ExternalCombination, ready: usize, issued: &mut Issued) -> Result<()> {
        let streams = self.streams.clone();
        let mut streams = streams.lock();
        let may_launch = self.may_launch.load(Ordering::Relaxed) || streams.may_copy(Direction::Out)?;
        self.may_launch.store(may_launch, Ordering::Relaxed);
        issued.is_held_up = !may_launch && ready > issued.count;
        if !may_launch {
            return Ok(());
        }
        for batch in batches(combination, issued.count as u32..ready as u32) {
            let end = batch.end as usize;
            let mut outputs = FigureOutputs::default();
            if combination.is_measured() {
                let Some(slot) = self.figures.take()? else {
                    issued.is_held_up = true;
                    break;
                };
                outputs = FigureOutputs { counters: slot.counters(), squares: slot.squares() };
                self.measured.push_back(Measured { ready: end, slot, runs: batch.measured_runs() });
            }
            issued.has_unknown = true;
            if let Some(sample) = &combination.sample {
                sample.make_once(|copies| copy(&self.kernels, self.target, copies))?;
            }
            launch(&self.kernels, self.target, combination.dtype, &batch, outputs)?;
            let sampled = &combination.sampled[self.sampled..];
            let sampled = &sampled[..sampled.partition_point(|sampled| sampled.tile < batch.end)];
            let copies: Vec<SampleCopy> = sampled.iter().map(|sampled| sampled.copy).collect();
            copy(&self.kernels, self.target, &copies)?;
            self.sampled += copies.len();
            issued.events.push_back((end, streams.record(Direction::Out)?));
            (issued.count, issued.has_unknown) = (end, false);
        }
        Ok(())
    }
}

/// Addresses of figures that a launch writes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FigureOutputs {
    /// Two 64-bit numbers, which count buckets that become NaN; 0 counts nothing.
    pub(crate) counters: u64,
    /// Two 64-bit floats for each tile with a residual that is measured.
    pub(crate) squares: u64,
}

/// Enqueues the kernels that compute a batch.
///
/// # Errors
/// `Device` if the device does not take one. Earlier ones may be in flight.
pub(crate) fn launch(
    kernels: &CallKernels,
    target: LaunchTarget,
    dtype: Dtype,
    batch: &Batch<'_>,
    figures: FigureOutputs,
) -> Result<()> {
    Launches { target, kernels, dtype, batch, figures }.compute()
}

/// Enqueues copies of values.
///
/// # Errors
/// `Device` if the device does not take one. Earlier ones may be in flight.
fn copy(kernels: &CallKernels, target: LaunchTarget, copies: &[SampleCopy]) -> Result<()> {
    for copies in copies.chunks(CAPACITY) {
        let span = |copy: &SampleCopy| Span {
            values: copy.from.addr() as u64,
            sums: copy.to.addr() as u64,
            elements: copy.elems,
            ..Span::default()
        };
        let spans: Vec<Span> = copies.iter().map(span).collect();
        enqueue(kernels, target, None, Kernel::Copy, &spans, &Options::default())?;
    }
    Ok(())
}

/// Enqueues a kernel of a codec, or of unencoded sums.
fn enqueue(
    kernels: &CallKernels,
    target: LaunchTarget,
    codec: Option<Summary>,
    kernel: Kernel,
    spans: &[Span],
    options: &Options,
) -> Result<()> {
    let (set, module) = kernels.find(codec, kernel)?;
    let launch = set.launch(kernel, spans, options);
    let grid = Grid::line(launch.blocks, launch.threads);
    // SAFETY: the stream belongs to the call's device and lives as long as the process, as do the module, the memory for sums
    // and the memory for figures. The other addresses belong to a task's tiles that are ready, or to samples of its call, and the
    // task is not given back before an event behind the kernel has come. Every kernel has one parameter of this type.
    unsafe { module.launch(set.entry(kernel), grid, &[Argument::of(&launch.args)], Stream::new(target.stream)) }
}

/// Tiles that the same kernels compute, at most as many as one launch takes.
#[derive(Default)]
pub(crate) struct Batch<'a> {
    parts: Vec<RunPart<'a>>,
    /// Index behind the last tile in the combination.
    end: u32,
    /// Number of elements.
    elems: u64,
    /// Number of tiles.
    tiles: u64,
}

impl Batch<'_> {
    /// Returns the runs of the parts, with the number of tiles of each part whose squares are measured.
    fn measured_runs(&self) -> Vec<(usize, usize)> {
        let is_measured = |part: &RunPart<'_>| part.run.residual.is_some_and(|residual| residual.is_measured);
        let of_part = |part: &RunPart<'_>| (part.number, if is_measured(part) { part.tiles as usize } else { 0 });
        self.parts.iter().map(of_part).collect()
    }
}

/// Some tiles of a run.
#[derive(Clone, Copy)]
struct RunPart<'a> {
    run: &'a TileRun,
    /// Index of the run in the combination. A batch may have several parts of one run.
    number: usize,
    /// Index of the first tile in the run.
    tile: u64,
    /// Number of elements, and of tiles.
    elems: u64,
    tiles: u64,
    /// Index of the first sum in the memory for sums.
    first_sum: u64,
    /// Index of the first tile in the launch.
    first_tile: u64,
}

/// Divides tiles of a combination into batches.
pub(crate) fn batches(combination: &ExternalCombination, tiles: Range<u32>) -> Vec<Batch<'_>> {
    let most = SUMS_BYTES / size_of::<f32>() as u64;
    let mut batches: Vec<Batch<'_>> = Vec::new();
    for (number, run) in combination.runs.iter().enumerate() {
        let here = tiles.start.max(run.tiles.start)..tiles.end.min(run.tiles.end);
        let (mut tile, mut left) = (u64::from(here.start - run.tiles.start), here.len() as u64);
        while left > 0 {
            // A tile is smaller than the memory for sums.
            let count = left.min(most / run.tile_elems).min(MOST_TILES as u64);
            let elems = (count * run.tile_elems).min(run.elems - tile * run.tile_elems);
            let fits = |batch: &&mut Batch<'_>| {
                let is_alike = batch.parts.first().is_some_and(|first| {
                    // A launch counts for one tensor.
                    is_alike(first.run, run) && (first.run.piece == run.piece || !combination.is_measured())
                });
                let fits = batch.elems + elems <= most && batch.tiles + count <= MOST_TILES as u64;
                batch.parts.len() < CAPACITY && fits && is_alike
            };
            if batches.last_mut().filter(fits).is_none() {
                batches.push(Batch::default());
            }
            if let Some(batch) = batches.last_mut() {
                let (first_sum, first_tile) = (batch.elems, batch.tiles);
                batch.parts.push(RunPart { run, number, tile, elems, tiles: count, first_sum, first_tile });
                (batch.elems, batch.tiles) = (batch.elems + elems, batch.tiles + count);
                batch.end = run.tiles.start + (tile + count) as u32;
            }
            (tile, left) = (tile + count, left - count);
        }
    }
    batches
}

/// Returns whether the same kernels with the same options compute both runs.
fn is_alike(a: &TileRun, b: &TileRun) -> bool {
    let code = |a: &TileCode, b: &TileCode| a.codec.summary() == b.codec.summary();
    let operand = |pair: (&TileOperand, &TileOperand)| match pair {
        (TileOperand::Values(_), TileOperand::Values(_)) => true,
        (TileOperand::Code(a), TileOperand::Code(b)) => code(a, b),
        (TileOperand::Values(_), TileOperand::Code(_)) | (TileOperand::Code(_), TileOperand::Values(_)) => false,
    };
    let codes = match (&a.code, &b.code) {
        (Some(a), Some(b)) => code(a, b),
        (a, b) => a.is_none() && b.is_none(),
    };
    a.operands.len() == b.operands.len()
        && a.operands.iter().zip(&b.operands).all(operand)
        && codes
        && a.values.is_some() == b.values.is_some()
        && a.divisor == b.divisor
        && feedback(a) == feedback(b)
}

/// Returns what kernels with error feedback do for a run.
fn feedback(run: &TileRun) -> Option<(bool, bool)> {
    run.residual.map(|TileResidual { skips_zeros, is_measured, .. }| (skips_zeros, is_measured))
}

/// Memory that a kernel uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// An operand, by its index.
    Operand(usize),
    /// The float32 sums of the launch.
    Sums,
    /// Encoded tiles to make.
    Code,
    /// Values to make.
    Values,
    /// The residual, and the flag that says whether it is used.
    Residual,
    Flag,
    /// Figures of the launch.
    Squares,
    /// None: the kernel does not use the field.
    Unused,
}

impl RunPart<'_> {
    /// Returns the address of the part's first element, or of its first tile behind the header. 0 if there is none.
    fn address(&self, at: At, dtype: Dtype, target: LaunchTarget, figures: FigureOutputs) -> u64 {
        let float = size_of::<f32>() as u64;
        let start = self.tile * self.run.tile_elems;
        let values = |base: *const u8| base.addr() as u64 + start * dtype.size_bytes() as u64;
        let code = |code: &TileCode| code.address.addr() as u64 + self.tile * code.stride + TILE_HEADER_BYTES as u64;
        match at {
            At::Operand(index) => match &self.run.operands[index] {
                TileOperand::Values(base) => values(*base),
                TileOperand::Code(of) => code(of),
            },
            At::Sums => target.sums + self.first_sum * float,
            At::Residual => self.run.residual.map_or(0, |of| of.address.addr() as u64 + start * float),
            At::Flag => self.run.residual.and_then(|of| of.used).map_or(0, |used| used.addr() as u64),
            At::Squares => figures.squares + self.first_tile * SQUARES_BYTES as u64,
            At::Code => self.run.code.as_ref().map_or(0, code),
            At::Values => self.run.values.map_or(0, |base| values(base)),
            At::Unused => 0,
        }
    }

    fn code(&self, at: At) -> Option<&TileCode> {
        match at {
            At::Operand(index) => match &self.run.operands[index] {
                TileOperand::Code(code) => Some(code),
                TileOperand::Values(_) => None,
            },
            At::Code => self.run.code.as_ref(),
            At::Sums | At::Values | At::Residual | At::Flag | At::Squares | At::Unused => None,
        }
    }
}

/// The kernels of one batch, on the side stream of a call.
struct Launches<'a> {
    target: LaunchTarget,
    kernels: &'a CallKernels,
    dtype: Dtype,
    batch: &'a Batch<'a>,
    figures: FigureOutputs,
}

/// Returns where the values and the encoded elements lie, if a run adds just these two and encodes with the same codec.
fn pair(run: &TileRun, dtype: Dtype) -> Option<(At, At)> {
    let code = run.code.as_ref().filter(|_| run.residual.is_none())?;
    KernelSet::of_codec(code.codec.summary(), dtype).filter(|set| set.kernels().contains(&Kernel::Combine))?;
    let is_same = |other: &TileCode| other.codec.summary() == code.codec.summary();
    match &run.operands[..] {
        [TileOperand::Values(_), TileOperand::Code(other)] if is_same(other) => Some((At::Operand(0), At::Operand(1))),
        [TileOperand::Code(other), TileOperand::Values(_)] if is_same(other) => Some((At::Operand(1), At::Operand(0))),
        _ => None,
    }
}

impl Launches<'_> {
    /// Computes the batch with the operations of the host's codecs, in their order.
    fn compute(&self) -> Result<()> {
        let Some(RunPart { run, .. }) = self.batch.parts.first() else { return Ok(()) };
        let results = if run.values.is_some() { At::Values } else { At::Unused };
        match (&run.operands[..], run.code.is_some()) {
            ([TileOperand::Values(_)], true) => self.encode(Kernel::Encode, At::Operand(0))?,
            ([TileOperand::Values(_)], false) => return self.launch(Kernel::Copy, At::Unused, At::Operand(0), results),
            ([TileOperand::Code(_)], false) => {
                return self.launch(Kernel::Decode, At::Operand(0), results, At::Unused);
            }
            _ if let Some((values, other)) = pair(run, self.dtype) => {
                return self.launch_adding(Kernel::Combine, At::Code, values, results, other);
            }
            (_, true) => {
                self.sum(run)?;
                self.encode(Kernel::EncodeSums, At::Sums)?;
            }
            (_, false) => {
                self.sum(run)?;
                return self.launch(Kernel::Write, At::Unused, results, At::Sums);
            }
        }
        match run.values {
            Some(_) => self.launch(Kernel::Decode, At::Code, At::Values, At::Unused),
            None => Ok(()),
        }
    }

    /// Encodes values or sums, with the residual if there is one.
    fn encode(&self, kernel: Kernel, values: At) -> Result<()> {
        let Some(residual) = self.batch.parts.first().and_then(|part| part.run.residual) else {
            return self.launch(kernel, At::Code, values, At::Unused);
        };
        let has_sums = kernel == Kernel::EncodeSums;
        let (feedback, squares) = match has_sums {
            true => (Kernel::FeedbackSums, Kernel::SquaresOfSums),
            false => (Kernel::Feedback, Kernel::Squares),
        };
        self.launch_adding(feedback, At::Code, values, At::Residual, At::Flag)?;
        // Results may be written over the values afterwards.
        if residual.is_measured && self.figures.squares != 0 {
            self.launch(squares, At::Squares, values, At::Residual)?;
        }
        Ok(())
    }

    /// Adds the operands up, and finishes the sums.
    fn sum(&self, run: &TileRun) -> Result<()> {
        for (index, operand) in run.operands.iter().enumerate() {
            let at = At::Operand(index);
            match operand {
                TileOperand::Values(_) if index == 0 => self.launch(Kernel::Read, At::Unused, at, At::Sums)?,
                TileOperand::Values(_) => self.launch(Kernel::Add, At::Unused, at, At::Sums)?,
                TileOperand::Code(_) if index == 0 => self.launch(Kernel::DecodeSums, at, At::Sums, At::Unused)?,
                TileOperand::Code(_) => self.launch(Kernel::DecodeAdd, at, At::Unused, At::Sums)?,
            }
        }
        match run.divisor.is_none() && self.dtype == Dtype::F32 {
            // Every sum is finished already.
            true => Ok(()),
            false => self.launch(Kernel::Finish, At::Unused, At::Unused, At::Sums),
        }
    }

    /// Enqueues a kernel. `code`, `values` and `sums` say where these fields of its spans lie.
    fn launch(&self, kernel: Kernel, code: At, values: At, sums: At) -> Result<()> {
        self.launch_adding(kernel, code, values, sums, At::Unused)
    }

    /// Enqueues a kernel like [`Launches::launch`], with one more field of its spans.
    fn launch_adding(&self, kernel: Kernel, code: At, values: At, sums: At, other: At) -> Result<()> {
        let Some(first) = self.batch.parts.first() else { return Ok(()) };
        let codec: Option<Summary> = first.code(code).map(|code| code.codec.summary());
        let stride = |code: &TileCode| code.stride as u32;
        let span = |part: &RunPart<'_>| {
            let address = |at| part.address(at, self.dtype, self.target, self.figures);
            Span {
                values: address(values),
                code: address(code),
                sums: address(sums),
                other: address(other),
                elements: part.elems,
                first: part.run.first + part.tile * part.run.tile_elems,
                key: part.run.rng_key.into(),
                tile: part.run.tile_elems as u32,
                stride: part.code(code).map_or(SQUARES_BYTES as u32, stride),
            }
        };
        let spans: Vec<Span> = self.batch.parts.iter().map(span).collect();
        let keeps_zeros = first.run.residual.is_some_and(|residual| residual.skips_zeros);
        let options = Options { counters: self.figures.counters, divisor: first.run.divisor, keeps_zeros };
        enqueue(self.kernels, self.target, codec, kernel, &spans, &options)
    }
}

#[cfg(test)]
mod tests {
    use accl_engine::codec::{RngKey, parse};

    use super::*;

    /// With buckets of 512, a tile of float32 has 15,872 elements, and the last tile of 2^21 elements is shorter. The batch has room
    /// for it, but not for one more whole tile.
    #[test]
    fn figures_of_two_parts_of_one_run_in_a_batch_belong_to_this_run() {
        let codec = parse("maxmin:4,bucket=512").unwrap();
        let run = |first: u32, elems: u64| {
            let tiles = first..first + elems.div_ceil(15_872) as u32;
            let address = std::ptr::without_provenance_mut(64);
            TileRun {
                tiles,
                piece: 0,
                elems,
                tile_elems: 15_872,
                first: 0,
                operands: [TileOperand::Values(address)].into_iter().collect(),
                code: Some(TileCode { address, stride: 64, codec: codec.clone() }),
                values: None,
                residual: Some(TileResidual { address, skips_zeros: false, used: None, is_measured: true }),
                divisor: None,
                rng_key: RngKey::keyed(&[1]),
            }
        };
        let runs = vec![run(0, 1 << 21), run(133, 100), run(134, (1 << 21) + 15_873)];
        let combination = ExternalCombination::new(Dtype::F32, runs, true);
        let batches = batches(&combination, 0..combination.tiles());
        assert!(batches[0].parts.len() == 2 && batches[0].elems == 1 << 21, "the batch is full");
        let mut tiles = [0; 3];
        batches.iter().flat_map(Batch::measured_runs).for_each(|(run, count)| tiles[run] += count);
        let expected: Vec<usize> = combination.runs.iter().map(|run| run.tiles.len()).collect();
        assert_eq!(tiles.to_vec(), expected);
    }
}
