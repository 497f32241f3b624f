//! Combinations of an encoded call that a worker computes where the tensors lie.
//!
//! A combination adds values and decoded tiles, and makes tiles or values of the sums. This module owns its description
//! for a worker: addresses, codecs and random numbers. `memory::coder` does the same work on host memory. `memory::tile_runs`
//! makes the descriptions. Read [`ExternalCombination`] first.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use accl_kernels::codec::{Codec, NonFinite, RngKey};
use accl_types::Dtype;
use smallvec::SmallVec;

/// A combination to compute, tile by tile.
///
/// For each tile the worker adds the operands in float32, in their order, and divides the sums where there is a divisor. Sums
/// that the tensor's dtype cannot hold become infinite. The worker adds the residual, encodes, and stores the new residual.
/// Where values are wanted as well, they are the decoded tile. Each step has the arithmetic of [`accl_kernels::codec`], so the
/// results have the bits that the host's codecs give.
#[derive(Debug)]
pub struct ExternalCombination {
    /// Element type of the tensors.
    pub dtype: Dtype,
    /// The tiles, in order.
    pub runs: Vec<TileRun>,
    /// For each run, the buckets that were encoded as NaN; empty if nothing counts them.
    counts: Box<[RunCounts]>,
}

/// Buckets that became NaN, by cause: see [`NonFinite`].
#[derive(Debug, Default)]
struct RunCounts {
    not_finite: AtomicUsize,
    too_large: AtomicUsize,
}

impl ExternalCombination {
    /// Creates a combination. `is_counted` says whether [`ExternalCombination::count`] is wanted.
    pub fn new(dtype: Dtype, runs: Vec<TileRun>, is_counted: bool) -> Self {
        let counts = runs.iter().take(if is_counted { usize::MAX } else { 0 }).map(|_| RunCounts::default()).collect();
        Self { dtype, runs, counts }
    }

    /// Returns whether buckets that become NaN are counted.
    pub fn is_counted(&self) -> bool {
        !self.counts.is_empty()
    }

    /// Counts buckets of a run that were encoded as NaN, before their tiles are reported. Nothing happens if they are not
    /// counted.
    pub fn count(&self, run: usize, non_finite: NonFinite) {
        // Relaxed: the report of the tiles orders this before the executor reads it.
        if let Some(counts) = self.counts.get(run) {
            counts.not_finite.fetch_add(non_finite.not_finite, Ordering::Relaxed);
            counts.too_large.fetch_add(non_finite.too_large, Ordering::Relaxed);
        }
    }

    /// Returns the tensor of each run, by its position in its block, with its counts.
    pub(crate) fn counts(&self) -> impl Iterator<Item = (u32, NonFinite)> + '_ {
        self.runs.iter().zip(&self.counts).map(|(run, counts)| {
            let of = |count: &AtomicUsize| count.load(Ordering::Relaxed);
            (run.piece, NonFinite { not_finite: of(&counts.not_finite), too_large: of(&counts.too_large) })
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
    /// Address of a float32 for each element, in the tensor's own memory.
    pub address: *mut u8,
    /// Whether a tile whose sums are all zeros leaves its residual alone, and is encoded without it.
    pub skips_zeros: bool,
}
