//! Calls by reference: ranks publish chunks in memory that all ranks of the call read, and send references to them.
//!
//! This module owns the description of the work for a worker, which copies and reduces where the tensors lie, and the size of a
//! reference. Only the worker knows the meaning of a reference. `memory::references` makes the descriptions, and
//! `accl_schedule::Program::by_reference` has the rule. Read [`ExternalReduction`] first.

use std::sync::Arc;

use accl_schedule::{Coding, Role};
use accl_types::{Dtype, ReduceOp};
use smallvec::SmallVec;

use super::combination::SampleCopies;
use super::encoding::TILE_HEADER_BYTES;

/// Bytes of a reference, without the tile's header in front of it.
pub const REFERENCE_BYTES: usize = 88;

/// Alignment in bytes of published chunks.
pub const PUBLISHED_ALIGN: u64 = 256;

/// The layout of a call by reference, which has the chunks of the plain call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Referencing {
    pub(crate) elem_bytes: u64,
    /// Maximum bytes of a tile: the unit in which other ranks may follow.
    pub(crate) tile_bytes: u64,
}

impl Coding for Referencing {
    fn grain(&self, _: u32) -> u64 {
        1
    }

    fn has_grains(&self) -> bool {
        false
    }

    fn tile(&self, _: u32) -> u64 {
        (self.tile_bytes / self.elem_bytes).max(1)
    }

    fn tile_bytes(&self, _: Role, _: u32, elems: u64) -> u64 {
        if elems == 0 { 0 } else { (TILE_HEADER_BYTES + REFERENCE_BYTES) as u64 }
    }
}

/// Needs of a call by reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublishingNeeds {
    /// Element type; bytes if the call only moves data.
    pub dtype: Dtype,
    /// Reduce operator; `None` if the call only moves data.
    pub op: Option<ReduceOp>,
    /// Bytes of the chunks that this rank publishes, each rounded up to [`PUBLISHED_ALIGN`].
    pub published_bytes: u64,
    /// Bytes of temporary memory where the tensors lie.
    pub scratch_bytes: u64,
    /// Number of tasks that write tensors of the call.
    pub writing_tasks: u32,
}

/// One chunk to copy or to reduce, tile by tile.
///
/// The worker makes the copies of [`ExternalReduction::first`] before the first tile of the call. A tile with one operand is a
/// copy of it. The operands of other tiles are reduced in their order, with the bits of
/// [`accl_kernels::Reducer::many`]. A published operand lies where its reference says. A published result lies where the
/// worker likes; it stays there, unchanged, until the worker is dropped. The worker writes its reference before it reports the
/// tile.
#[derive(Debug)]
pub struct ExternalReduction {
    /// Element type.
    pub dtype: Dtype,
    /// Reduce operator; `None` if the call only moves data.
    pub op: Option<ReduceOp>,
    /// Number of ranks.
    pub world: u32,
    /// Whether this is the last reduction of these elements.
    pub finishes: bool,
    /// Copies of contributions, in bytes, that precede all tasks of the call. They are the same in each task.
    pub first: Option<Arc<SampleCopies>>,
    /// The tiles, in order. The results of a chunk follow each other, as do its operands.
    pub tiles: Vec<ReducedTile>,
}

/// One tile of a chunk.
#[derive(Clone, Debug)]
pub struct ReducedTile {
    /// Number of elements, never 0.
    pub elems: u64,
    /// The operands, at least one.
    pub operands: SmallVec<[PublishedOperand; 2]>,
    /// The result.
    pub result: PublishedResult,
}

// SAFETY: the addresses belong to memory of the call, which the owner of its task alone accesses until the task reports the
// tiles or ends.
unsafe impl Send for ReducedTile {}

// SAFETY: as for `Send`; a shared reference only reads the addresses.
unsafe impl Sync for ReducedTile {}

/// An operand of a tile.
#[derive(Clone, Copy, Debug)]
pub enum PublishedOperand {
    /// Elements at this address, where the tensors lie.
    Values(*const u8),
    /// Elements that a rank has published. The reference of [`REFERENCE_BYTES`] bytes is at this address in host memory.
    Reference(*const u8),
}

/// The result of a tile.
#[derive(Clone, Copy, Debug)]
pub enum PublishedResult {
    /// Elements at this address, where the tensors lie. The address may be the address of an operand.
    Values(*mut u8),
    /// Elements to publish. The reference is written to this address in host memory.
    Reference(*mut u8),
}
