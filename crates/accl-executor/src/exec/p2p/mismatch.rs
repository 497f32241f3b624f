//! The error for a message and a receive that differ.
//!
//! This module owns its text. Read [`disagreement`] first.

use accl_types::{Dtype, Error, Rank};
use accl_wire::frame::{Header, Signature};

use crate::memory::BY_REFERENCE;

/// Returns the error if a message and the receive of `total` bytes that it matches on `rank` differ.
pub(super) fn disagreement(
    from: Rank,
    header: &Header,
    (sent, wanted): (Signature, Signature),
    (total, rank): (u64, Rank),
) -> Option<Error> {
    let is_by_reference = |signature: &Signature| signature.shape_hash == BY_REFERENCE;
    let (by_reference, receives_by_reference) = (is_by_reference(&sent), is_by_reference(&wanted));
    // References say nothing of the bytes of the tensor.
    let is_other_size = if by_reference { sent.count != wanted.count } else { header.value != total };
    let tag = header.tag;
    let show = |signature: Signature| {
        let dtype = Dtype::from_code(signature.dtype).map_or("unknown", Dtype::name);
        let bytes = Dtype::from_code(signature.dtype).map_or(0, Dtype::size_bytes) as u64 * signature.count;
        format!("{} elements of {dtype}, {bytes} bytes", signature.count)
    };
    if sent.dtype != wanted.dtype
        || sent.count != wanted.count
        || by_reference == receives_by_reference && is_other_size
    {
        let (sent, wanted) = (show(sent), show(wanted));
        return Some(Error::mismatch(format!(
            "rank {from} sent {sent} with tag {tag}, but rank {rank} receives {wanted}; make size and dtype agree"
        )));
    }
    (by_reference != receives_by_reference).then(|| {
        if from == rank {
            return Error::mismatch(format!(
                "rank {rank} sends itself a message with tag {tag}, and only one of its two tensors is on a GPU; put both there, or set \
                 ACCL_GPU_ROUTE=staged on all ranks"
            ));
        }
        let (on_gpu, other) = if by_reference { (from, rank) } else { (rank, from) };
        Error::mismatch(format!(
            "rank {from} sent a message with tag {tag} to rank {rank}, and only rank {on_gpu} has its tensor on a GPU; move the \
             tensor of rank {other} to its GPU, or set ACCL_GPU_ROUTE=staged on all ranks"
        ))
    })
}
