//! Messages by reference: their tiles, and the host memory of the references.
//!
//! This module owns sizes and the description of the copy for a worker. `message` moves the references. Read [`message_tiles`]
//! first.

use accl_types::Dtype;
use smallvec::smallvec;

use crate::call::{
    ExternalReduction, PUBLISHED_ALIGN, PublishedOperand, PublishedResult, PublishingNeeds, REFERENCE_BYTES,
    ReducedTile, TensorDesc,
};

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
    ExternalReduction { dtype: Dtype::U8, op: None, world: 2, finishes: false, first: None, tiles: tiles.collect() }
}
