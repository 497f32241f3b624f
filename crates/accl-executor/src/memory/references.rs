//! Messages of calls by reference: tiles whose bodies are references.
//!
//! This module writes and checks their headers, and translates combinations of a plan to addresses. The worker of the call
//! copies and reduces: see [`ExternalReduction`]. Read [`References::reduction`] first.

use std::ops::Range;

use accl_schedule::{Buf, Finish};
use accl_types::{Dtype, ReduceOp};
use smallvec::smallvec;

use super::buffers::Buffers;
use super::coder::TileMemory;
use super::tile::{BadTile, TileHead};
use crate::call::{
    CallDesc, ExternalReduction, PUBLISHED_ALIGN, PublishedOperand, PublishedResult, PublishingNeeds, REFERENCE_BYTES,
    ReducedTile, TILE_HEADER_BYTES, TensorDesc,
};
use crate::plan::{Coded, Combination, Operand, Plan, PlanOpKind};

/// Number in the headers of these tiles, in place of the settings of a codec.
const SETTINGS: u32 = 0x5245_4653;

/// Bytes of a reference of a message.
pub(super) const REFERENCE_SLOT: u64 = REFERENCE_BYTES as u64;

/// Bytes of a tile of a message.
const MESSAGE_TILE: u64 = 1 << 20;

/// Returns the bytes of memory for the references of a message, and for a byte that confirms them.
pub(super) fn message_bytes(tensor: &TensorDesc) -> u64 {
    tensor.len_bytes().div_ceil(MESSAGE_TILE) * REFERENCE_SLOT + REFERENCE_SLOT
}

/// Returns the needs of a message by reference.
pub(super) fn message_needs(tensor: &TensorDesc, is_send: bool) -> PublishingNeeds {
    let published = tensor.len_bytes().next_multiple_of(PUBLISHED_ALIGN);
    PublishingNeeds {
        dtype: Dtype::U8,
        op: None,
        published_bytes: if is_send { published } else { 0 },
        scratch_bytes: 0,
        writing_tasks: u32::from(!is_send),
    }
}

/// Describes the copy of a message, whose references lie one after the other from `references` on.
pub(super) fn message_tiles(tensor: &TensorDesc, references: *mut u8, is_send: bool) -> ExternalReduction {
    let tiles = (0..tensor.len_bytes().div_ceil(MESSAGE_TILE)).map(|index| {
        let values = tensor.address().wrapping_add((index * MESSAGE_TILE) as usize);
        let reference = references.wrapping_add((index * REFERENCE_SLOT) as usize);
        let (operand, result) = match is_send {
            true => (PublishedOperand::Values(values), PublishedResult::Reference(reference)),
            false => (PublishedOperand::Reference(reference), PublishedResult::Values(values)),
        };
        let elems = MESSAGE_TILE.min(tensor.len_bytes() - index * MESSAGE_TILE);
        ReducedTile { elems, operands: smallvec![operand], result }
    });
    ExternalReduction { dtype: Dtype::U8, op: None, world: 2, finishes: false, tiles: tiles.collect() }
}

/// Settings of one call by reference.
pub(crate) struct References {
    dtype: Dtype,
    op: Option<ReduceOp>,
    world: u32,
    has_checksums: bool,
}

/// Returns the needs of a call by reference.
pub(crate) fn publishing_needs(desc: &CallDesc, plan: &Plan) -> PublishingNeeds {
    let (dtype, op) = arithmetic(desc);
    let writes = |kind: &PlanOpKind| match kind {
        PlanOpKind::Combine(combination) => {
            let out = combination.out.as_ref().filter(|_| !combination.tiles.is_empty());
            out.is_some_and(|out| out.is_in(Buf::Out))
        }
        _ => false,
    };
    PublishingNeeds {
        dtype,
        op,
        published_bytes: plan.published_bytes,
        scratch_bytes: plan.scratch_bytes,
        writing_tasks: plan.ops.iter().filter(|op| writes(&op.kind)).count() as u32,
    }
}

/// Returns the type of the elements and the operator. A call that only moves data may mix types, so it moves bytes.
fn arithmetic(desc: &CallDesc) -> (Dtype, Option<ReduceOp>) {
    match desc.collective.reduces() {
        true => (desc.dtype, Some(desc.op)),
        false => (Dtype::U8, None),
    }
}

impl References {
    pub(crate) fn new(desc: &CallDesc, world: u32, has_checksums: bool) -> Self {
        let (dtype, op) = arithmetic(desc);
        Self { dtype, op, world, has_checksums }
    }

    fn head(&self, elems: u64) -> TileHead {
        TileHead { elems: elems as u32, settings: SETTINGS, has_checksum: self.has_checksums }
    }

    /// Checks references that have arrived.
    ///
    /// # Errors
    /// The first bad one.
    pub(super) fn check(&self, memory: &TileMemory<'_>, coded: &Coded, tiles: Range<u64>) -> Result<(), BadTile> {
        for index in tiles {
            let (elems, bytes) = (coded.tiles[index as usize].elems, memory.bytes(coded, index as usize));
            // A reference says how many elements were published, so the sizes of two ranks can differ in it alone.
            let published = TileHead::elems_of(bytes);
            let checked = self.head(published).check(bytes);
            checked.map_err(|why| BadTile::Damaged(format!("reference {index}: {why}")))?;
            if published != elems {
                let bytes = |elems: u64| elems * self.dtype.size_bytes() as u64;
                return Err(BadTile::OtherSize { published: bytes(published), expected: bytes(elems) });
            }
        }
        Ok(())
    }

    /// Writes the headers of references that the worker has written.
    pub(super) fn seal(&self, memory: &mut TileMemory<'_>, code: &Coded, tiles: Range<u64>) {
        for index in tiles {
            let head = self.head(code.tiles[index as usize].elems);
            head.seal(memory.bytes_mut(code, index as usize));
        }
    }

    /// Describes a combination with the addresses of one call.
    pub(super) fn reduction(&self, buffers: &Buffers, op: &Combination) -> ExternalReduction {
        let body = |code: &Coded, index: usize| {
            let (start, _) = code.range(index);
            buffers.address(&code.region.at(start)).wrapping_add(TILE_HEADER_BYTES)
        };
        let tiles = op.tiles.iter().enumerate().map(|(index, tile)| {
            let at = op.starts[index] * self.dtype.size_bytes() as u64;
            let operand = |operand: &Operand| match operand {
                Operand::Values(src) => PublishedOperand::Values(buffers.address(&src.at(at))),
                Operand::Code(code) => PublishedOperand::Reference(body(code, index)),
            };
            let values = || op.out.as_ref().map(|out| PublishedResult::Values(buffers.address(&out.at(at))));
            let result = op.code.as_ref().map(|code| PublishedResult::Reference(body(code, index)));
            let Some(result) = result.or_else(values) else { unreachable!("a combination has a result") };
            ReducedTile { elems: tile.elems, operands: op.srcs.iter().map(operand).collect(), result }
        });
        ExternalReduction {
            dtype: self.dtype,
            op: self.op,
            world: self.world,
            finishes: op.finish == Finish::Yes,
            tiles: tiles.collect(),
        }
    }
}
