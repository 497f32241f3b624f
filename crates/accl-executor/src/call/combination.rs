//! Combinations of an encoded call that a worker computes where the tensors lie.
//!
//! A combination adds values and decoded tiles, and makes tiles or values of the sums. This module owns its description
//! for a worker: addresses, codecs and random numbers, and what the worker measures. `memory::coder` does the same work on host
//! memory. `memory::tile_runs` makes the descriptions. Read [`ExternalCombination`] first.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use accl_kernels::codec::{Codec, NonFinite, RngKey};
use accl_types::{Dtype, Result};
use smallvec::SmallVec;

/// A combination to compute, tile by tile.
///
/// For each tile the worker adds the operands in float32, in their order, and divides the sums where there is a divisor. Sums
/// that the tensor's dtype cannot hold become infinite. The worker adds the residual, encodes, and stores the new residual.
/// Where values are wanted as well, they are the decoded tile. Each step has the arithmetic of [`accl_kernels::codec`], so the
/// results have the bits that the host's codecs give.
///
/// If the call has [`ExternalCombination::sample`], the worker makes these copies before it computes the first tile of the call.
#[derive(Debug)]
pub struct ExternalCombination {
    /// Element type of the tensors.
    pub dtype: Dtype,
    /// The tiles, in order.
    pub runs: Vec<TileRun>,
    /// Copies of contributions, the same in each combination of a call.
    pub sample: Option<Arc<SampleCopies>>,
    /// Results to copy after their tile is made and before it is reported, in the order of tiles.
    pub sampled: Vec<SampledResult>,
    /// For each run, the figures of its encoding; empty if the call is not measured.
    figures: Box<[RunFigures]>,
}

/// Values of a tensor that are copied for a comparison on the host.
#[derive(Clone, Copy, Debug)]
pub struct SampleCopy {
    /// Address of the first value, in the tensor's own memory.
    pub from: *const u8,
    /// Address of its copy, in memory that the staging of the call has lent.
    pub to: *mut u8,
    /// Number of elements.
    pub elems: u64,
}

// SAFETY: the addresses belong to memory of the call, which the owner of a task alone accesses until the task ends.
unsafe impl Send for SampleCopy {}

// SAFETY: as for `Send`; a shared reference only reads the addresses.
unsafe impl Sync for SampleCopy {}

/// Copies that precede all tiles of a call.
#[derive(Debug)]
pub struct SampleCopies {
    copies: Vec<SampleCopy>,
    made: OnceLock<Result<()>>,
}

impl SampleCopies {
    pub(crate) fn new(copies: Vec<SampleCopy>) -> Self {
        Self { copies, made: OnceLock::new() }
    }

    /// Makes the copies with `make`, unless that was done. Waits for another thread that does it now.
    ///
    /// # Errors
    /// The error of the first `make`, every time.
    pub fn make_once(&self, make: impl FnOnce(&[SampleCopy]) -> Result<()>) -> Result<()> {
        self.made.get_or_init(|| make(&self.copies)).clone()
    }
}

/// Results to copy when a tile is made.
#[derive(Clone, Copy, Debug)]
pub struct SampledResult {
    /// Index of the tile in the combination.
    pub tile: u32,
    /// Values of this tile.
    pub copy: SampleCopy,
}

/// Figures of a run: buckets that became NaN, by cause (see [`NonFinite`]), and squares.
#[derive(Debug, Default)]
struct RunFigures {
    not_finite: AtomicUsize,
    too_large: AtomicUsize,
    /// Bits of [`Squares::gradient`] and [`Squares::lost`].
    squares: [AtomicU64; 2],
}

impl RunFigures {
    fn squares(&self) -> Squares {
        let [gradient, lost] = [0, 1].map(|index| f64::from_bits(self.squares[index].load(Ordering::Relaxed)));
        Squares { gradient, lost }
    }
}

/// Sums of squares of contributions that are encoded with a residual.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Squares {
    /// Sum for the values, before the residual is added.
    pub gradient: f64,
    /// Sum for the new residual.
    pub lost: f64,
}

impl Squares {
    /// Adds the squares of a tile. Squares that are not finite are not counted.
    pub(crate) fn add(&mut self, tile: Squares) {
        if (tile.lost + tile.gradient).is_finite() {
            self.gradient += tile.gradient;
            self.lost += tile.lost;
        }
    }
}

/// Figures that a worker has measured for a run.
pub(crate) struct Measurement {
    /// Position of the tensor in its block.
    pub(crate) piece: u32,
    pub(crate) non_finite: NonFinite,
    pub(crate) squares: Squares,
}

impl ExternalCombination {
    /// Creates a combination without a sample. `is_measured` says whether [`ExternalCombination::count`] is wanted, and
    /// [`ExternalCombination::add_squares`] for runs whose residual says so.
    pub fn new(dtype: Dtype, runs: Vec<TileRun>, is_measured: bool) -> Self {
        let figures =
            runs.iter().take(if is_measured { usize::MAX } else { 0 }).map(|_| RunFigures::default()).collect();
        Self { dtype, runs, sample: None, sampled: Vec::new(), figures }
    }

    /// Returns whether the call is measured.
    pub fn is_measured(&self) -> bool {
        !self.figures.is_empty()
    }

    /// Counts buckets of a run that were encoded as NaN, before their tiles are reported. Nothing happens if they are not
    /// counted.
    pub fn count(&self, run: usize, non_finite: NonFinite) {
        // Relaxed: the report of the tiles orders this before the executor reads it.
        if let Some(figures) = self.figures.get(run) {
            figures.not_finite.fetch_add(non_finite.not_finite, Ordering::Relaxed);
            figures.too_large.fetch_add(non_finite.too_large, Ordering::Relaxed);
        }
    }

    /// Adds the squares of tiles of a run, one entry for each tile, before the tiles are reported. Nothing happens if the call
    /// is not measured. The owner of the task alone calls this.
    pub fn add_squares(&self, run: usize, tiles: impl IntoIterator<Item = Squares>) {
        let Some(figures) = self.figures.get(run) else { return };
        let mut squares = figures.squares();
        tiles.into_iter().for_each(|tile| squares.add(tile));
        // Relaxed: there is one writer, and the report of the tiles orders this before the executor reads it.
        for (bits, value) in figures.squares.iter().zip([squares.gradient, squares.lost]) {
            bits.store(value.to_bits(), Ordering::Relaxed);
        }
    }

    /// Returns the figures of all runs.
    pub(crate) fn measurements(&self) -> impl Iterator<Item = Measurement> + '_ {
        self.runs.iter().zip(&self.figures).map(|(run, figures)| {
            let of = |count: &AtomicUsize| count.load(Ordering::Relaxed);
            let non_finite = NonFinite { not_finite: of(&figures.not_finite), too_large: of(&figures.too_large) };
            Measurement { piece: run.piece, non_finite, squares: figures.squares() }
        })
    }

    /// Number of tiles.
    pub fn tiles(&self) -> u32 {
        self.runs.last().map_or(0, |run| run.tiles.end)
    }
}

/// Tiles that differ in their position alone: each begins where the one before it ends.
#[derive(Clone, Debug)]
pub struct TileRun {
    /// Indices of the tiles in the combination.
    pub tiles: Range<u32>,
    /// Position of the tensor in its block.
    pub piece: u32,
    /// Number of elements.
    pub elems: u64,
    /// Elements of each tile but the last, which may have fewer.
    pub tile_elems: u64,
    /// Index of the first element in its tensor.
    pub first: u64,
    /// Operands of the sums. A single one is not added to anything, and keeps its bits.
    pub operands: SmallVec<[TileOperand; 2]>,
    /// Tiles to make of the sums.
    pub code: Option<TileCode>,
    /// Address of the values to make, in the tensor's own memory: the decoded tiles, or the sums if there are none.
    pub values: Option<*mut u8>,
    /// Residual to add to the sums before they are encoded.
    pub residual: Option<TileResidual>,
    /// Divisor of the sums, if they are finished and divided.
    pub divisor: Option<f32>,
    /// Key of the random numbers of the encoding.
    pub rng_key: RngKey,
}

// SAFETY: the addresses belong to memory of the call, which the owner of its task alone accesses until the task reports the
// tiles or ends.
unsafe impl Send for TileRun {}

// SAFETY: as for `Send`; a shared reference only reads the addresses.
unsafe impl Sync for TileRun {}

/// An operand of a run.
#[derive(Clone, Debug)]
pub enum TileOperand {
    /// Values of the tensor's dtype at this address, in the tensor's own memory.
    Values(*const u8),
    /// Tiles to decode.
    Code(TileCode),
}

/// Encoded tiles in host memory that the staging of the call has lent.
#[derive(Clone, Debug)]
pub struct TileCode {
    /// Address of the first tile. Each begins with a header, which the executor writes and reads.
    pub address: *mut u8,
    /// Bytes from one tile to the next.
    pub stride: u64,
    /// Codec of the tiles.
    pub codec: Arc<dyn Codec>,
}

/// Loss of earlier encodings of these elements.
#[derive(Clone, Copy, Debug)]
pub struct TileResidual {
    /// Address of a float32 for each element, in memory of the tensor's device.
    pub address: *mut u8,
    /// Whether a tile whose sums are all zeros leaves its residual alone, and is encoded without it.
    pub skips_zeros: bool,
    /// Address of a byte on the device: if it is 0, the residual is left alone, and the tile is encoded without it.
    pub used: Option<*const u8>,
    /// Whether [`ExternalCombination::add_squares`] is wanted for these tiles.
    pub is_measured: bool,
}
