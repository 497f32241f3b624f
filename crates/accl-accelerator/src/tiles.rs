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
use accl_engine::{ExternalCombination, TILE_HEADER_BYTES, TileCode, TileOperand, TileRun};
use accl_gpu::kernels::{CAPACITY, Kernel, KernelSet, Options, Span};
use accl_gpu::{Argument, Grid, Stream};
use accl_types::{Dtype, Result};

use crate::copies::{Issued, SharedStreams};
use crate::counters::{Counter, Counters};
use crate::gpu_codecs::CallKernels;
use crate::streams::Direction;

/// Bytes of device memory for the float32 sums of a launch. Longer runs are computed in pieces of this size.
pub(crate) const SUMS_BYTES: u64 = 8 << 20;

/// Where the kernels of a call run, and what they use there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaunchTarget {
    /// Native handle of the stream.
    pub(crate) stream: u64,
    /// Address of [`SUMS_BYTES`] bytes of the device. The kernels of one stream share them.
    pub(crate) sums: u64,
}

/// Enqueues the kernels of one combination.
#[derive(Debug)]
pub(crate) struct TileLauncher {
    streams: SharedStreams,
    kernels: Arc<CallKernels>,
    target: LaunchTarget,
    counters: Arc<Counters>,
    /// Whether the call's stream has come to the call. Shared by all combinations of the call.
    may_launch: Arc<AtomicBool>,
    counted: VecDeque<Counted>,
}

/// Counters that a launch in flight increases.
#[derive(Debug)]
struct Counted {
    /// Number of tiles after whose report the counters are final.
    ready: usize,
    counter: Counter,
    /// Run of the launch.
    run: usize,
}

impl TileLauncher {
    pub(crate) fn new(
        streams: SharedStreams,
        kernels: Arc<CallKernels>,
        target: LaunchTarget,
        counters: Arc<Counters>,
        may_launch: Arc<AtomicBool>,
    ) -> Self {
        Self { streams, kernels, target, counters, may_launch, counted: VecDeque::new() }
    }

    /// Adds counters of the launches that made the first `made` tiles of a combination to its counts.
    pub(crate) fn collect(&mut self, combination: &ExternalCombination, made: usize) {
        let done = self.counted.iter().take_while(|counted| counted.ready <= made).count();
        for Counted { counter, run, .. } in self.counted.drain(..done) {
            combination.count(run, self.counters.take_back(counter));
        }
    }

    /// Enqueues kernels for the tiles up to number `ready`, and records an event behind each launch. Until the call's stream has
    /// come to the call it enqueues none, and [`Issued::awaits_stream`] is set: a kernel that waits in the side stream would hold up
    /// other calls.
    ///
    /// # Errors
    /// The error of the device. Kernels may be in flight nevertheless.
    pub(crate) fn issue(&mut self, combination: &ExternalCombination, ready: usize, issued: &mut Issued) -> Result<()> {
        let streams = self.streams.clone();
        let mut streams = streams.lock();
        let may_launch = self.may_launch.load(Ordering::Relaxed) || streams.may_copy(Direction::Out)?;
        self.may_launch.store(may_launch, Ordering::Relaxed);
        issued.awaits_stream = !may_launch && ready > issued.count;
        if !may_launch {
            return Ok(());
        }
        for batch in batches(combination, issued.count as u32..ready as u32) {
            let end = batch.end as usize;
            // Without a free counter, buckets of this launch are not counted.
            let counter = if combination.is_counted() { self.counters.take() } else { None };
            let address = counter.as_ref().map_or(0, |counter| self.counters.address(counter));
            self.counted.extend(counter.map(|counter| Counted { ready: end, counter, run: batch.first_run }));
            issued.has_unknown = true;
            launch(&self.kernels, self.target, combination.dtype, &batch, address)?;
            issued.events.push_back((end, streams.record(Direction::Out)?));
            (issued.count, issued.has_unknown) = (end, false);
        }
        Ok(())
    }
}

/// Enqueues the kernels that compute a batch. `counters` is the address of two 64-bit numbers, which count buckets that become
/// NaN; 0 counts nothing.
///
/// # Errors
/// `Device` if the device does not take one. Earlier ones may be in flight.
pub(crate) fn launch(
    kernels: &CallKernels,
    target: LaunchTarget,
    dtype: Dtype,
    batch: &Batch<'_>,
    counters: u64,
) -> Result<()> {
    Launches { target, kernels, dtype, batch, counters }.compute()
}

/// Tiles that the same kernels compute, at most as many as one launch takes.
#[derive(Default)]
pub(crate) struct Batch<'a> {
    parts: Vec<RunPart<'a>>,
    /// Index of the first run.
    first_run: usize,
    /// Index behind the last tile in the combination.
    end: u32,
    /// Number of elements.
    elems: u64,
}

/// Some tiles of a run.
#[derive(Clone, Copy)]
struct RunPart<'a> {
    run: &'a TileRun,
    /// Index of the first tile in the run.
    tile: u64,
    /// Number of elements.
    elems: u64,
    /// Index of the first sum in the memory for sums.
    first_sum: u64,
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
            let count = left.min(most / run.tile_elems);
            let elems = (count * run.tile_elems).min(run.elems - tile * run.tile_elems);
            let fits = |batch: &&mut Batch<'_>| {
                let is_alike = batch.parts.first().is_some_and(|first| {
                    // A launch counts for one tensor.
                    is_alike(first.run, run) && (first.run.piece == run.piece || !combination.is_counted())
                });
                batch.parts.len() < CAPACITY && batch.elems + elems <= most && is_alike
            };
            if batches.last_mut().filter(fits).is_none() {
                batches.push(Batch { first_run: number, ..Batch::default() });
            }
            if let Some(batch) = batches.last_mut() {
                batch.parts.push(RunPart { run, tile, elems, first_sum: batch.elems });
                batch.elems += elems;
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
    /// None: the kernel does not use the field.
    Unused,
}

impl RunPart<'_> {
    /// Returns the address of the part's first element, or of its first tile behind the header. 0 if there is none.
    fn address(&self, at: At, dtype: Dtype, sums: u64) -> u64 {
        let start = self.tile * self.run.tile_elems;
        let values = |base: *const u8| base.addr() as u64 + start * dtype.size_bytes() as u64;
        let code = |code: &TileCode| code.address.addr() as u64 + self.tile * code.stride + TILE_HEADER_BYTES as u64;
        match at {
            At::Operand(index) => match &self.run.operands[index] {
                TileOperand::Values(base) => values(*base),
                TileOperand::Code(of) => code(of),
            },
            At::Sums => sums + self.first_sum * size_of::<f32>() as u64,
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
            At::Sums | At::Values | At::Unused => None,
        }
    }
}

/// The kernels of one batch, on the side stream of a call.
struct Launches<'a> {
    target: LaunchTarget,
    kernels: &'a CallKernels,
    dtype: Dtype,
    batch: &'a Batch<'a>,
    counters: u64,
}

/// Returns where the values and the encoded elements lie, if a run adds just these two and encodes with the same codec.
fn pair(run: &TileRun, dtype: Dtype) -> Option<(At, At)> {
    let code = run.code.as_ref()?;
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
            ([TileOperand::Values(_)], true) => self.launch(Kernel::Encode, At::Code, At::Operand(0), At::Unused)?,
            ([TileOperand::Values(_)], false) => return self.launch(Kernel::Copy, At::Unused, At::Operand(0), results),
            ([TileOperand::Code(_)], false) => {
                return self.launch(Kernel::Decode, At::Operand(0), results, At::Unused);
            }
            _ if let Some((values, other)) = pair(run, self.dtype) => {
                return self.launch_adding(Kernel::Combine, At::Code, values, results, other);
            }
            (_, true) => {
                self.sum(run)?;
                self.launch(Kernel::EncodeSums, At::Code, At::Sums, At::Unused)?;
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

    /// Enqueues a kernel like [`Launches::launch`], which adds encoded elements at `other`.
    fn launch_adding(&self, kernel: Kernel, code: At, values: At, sums: At, other: At) -> Result<()> {
        let Some(first) = self.batch.parts.first() else { return Ok(()) };
        let codec: Option<Summary> = first.code(code).map(|code| code.codec.summary());
        let (set, module) = self.kernels.find(codec)?;
        let span = |part: &RunPart<'_>| Span {
            values: part.address(values, self.dtype, self.target.sums),
            code: part.address(code, self.dtype, self.target.sums),
            sums: part.address(sums, self.dtype, self.target.sums),
            other: part.address(other, self.dtype, self.target.sums),
            elements: part.elems,
            first: part.run.first + part.tile * part.run.tile_elems,
            key: part.run.rng_key.into(),
            tile: part.run.tile_elems as u32,
            stride: part.code(code).map_or(0, |code| code.stride as u32),
        };
        let spans: Vec<Span> = self.batch.parts.iter().map(span).collect();
        let options = Options { counters: self.counters, divisor: first.run.divisor, ..Options::default() };
        let launch = set.launch(kernel, &spans, &options);
        let grid = Grid::line(launch.blocks, launch.threads);
        // SAFETY: the stream belongs to the call's device and lives as long as the process, as do the module, the memory for sums
        // and the counters. The other addresses belong to a task's tiles that are ready, and the task is not given back before
        // an event behind the kernel has come. Every kernel has one parameter of this type.
        unsafe {
            module.launch(set.entry(kernel), grid, &[Argument::of(&launch.args)], Stream::new(self.target.stream))
        }
    }
}
