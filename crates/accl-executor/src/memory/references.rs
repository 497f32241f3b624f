//! Messages of calls by reference: tiles whose bodies are references.
//!
//! This module writes and checks their headers, and translates combinations of a plan to addresses. The worker of the call
//! copies and reduces: see [`ExternalReduction`]. Read [`References::reduction`] first.

use std::ops::Range;

use accl_schedule::{Buf, Finish};
use accl_types::{Dtype, ReduceOp};

use super::buffers::Buffers;
use super::coder::TileMemory;
use super::tile::{BadTile, TileHead};
use crate::call::{
    CallDesc, ExternalReduction, PublishedOperand, PublishedResult, PublishingNeeds, ReducedTile, TILE_HEADER_BYTES,
};
use crate::plan::{Coded, Combination, Operand, Plan, PlanOpKind};

/// Number in the headers of these tiles, in place of the settings of a codec.
const SETTINGS: u32 = 0x5245_4653;

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
            first: buffers.input_copies().cloned(),
            tiles: tiles.collect(),
        }
    }
}
