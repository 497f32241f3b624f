//! Chunks to bytes: where the chunks of a program lie in the tensors of one call.
//!
//! Owns remainders, uneven blocks, coalesced pieces and the placement of scratch. Knows pieces by index, not by
//! address. Read [`Layout`] first.

use accl_types::Elems;

use crate::ir::{Buf, Span};
use crate::program::Program;

/// The sizes of one call on one rank. A buffer is a list of blocks, a block a list of pieces (the tensors of a coalesced
/// call).
#[derive(Clone, Copy, Debug)]
pub struct CallShape<'a> {
    /// Bytes per element; 1 where the dtype does not matter.
    pub elem_bytes: u64,
    /// The pieces of each block of `In`.
    pub in_blocks: &'a [Vec<Elems>],
    /// The pieces of each block of `Out`.
    pub out_blocks: &'a [Vec<Elems>],
}

/// Consecutive bytes of one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The buffer.
    pub buf: Buf,
    /// Index of the piece, counted through all blocks of the buffer; 0 for scratch.
    pub piece: u32,
    /// First byte within the piece.
    pub offset: u64,
    /// Length in bytes, never 0.
    pub len: u64,
}

/// Alignment of scratch chunks in bytes: a cache line.
pub const SCRATCH_ALIGN: u64 = 64;

/// Where the chunks of one program lie in one call.
#[derive(Clone, Debug)]
pub struct Layout {}

impl Layout {
    /// Places the chunks of `program` for a call of this shape.
    pub fn new(program: &Program, shape: &CallShape) -> Layout {
        let _ = (program, shape);
        todo!()
    }

    /// The bytes of a payload in order; extents are not empty, neighbours in one piece are joined.
    pub fn extents(&self, span: &Span) -> Vec<Extent> {
        let _ = span;
        todo!()
    }

    /// Length of a payload in bytes.
    pub fn bytes(&self, span: &Span) -> u64 {
        let _ = span;
        todo!()
    }

    /// Size of the scratch buffer in bytes (one piece, chunks aligned to [`SCRATCH_ALIGN`]).
    pub fn scratch_bytes(&self) -> u64 {
        todo!()
    }
}
