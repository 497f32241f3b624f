//! Into how many parts a call is cut.
//!
//! Owns that rule, which must give the same number on all ranks: it goes by what they agree on. Read [`parts_of`] first.

use accl_types::{Collective, ReduceOp};

use accl_executor::call::CallDesc;

/// Least bytes of a part: below, what a part costs by itself is more than it saves.
pub(crate) const LEAST_PART_BYTES: u64 = 256 << 10;

/// How many of a group's lanes have a part of a call that one rank makes in a world of so many.
pub(crate) fn parts_of(desc: &CallDesc, world: u32, lanes: u32, least_part_bytes: u64) -> u32 {
    if lanes <= 1 || !may_be_cut(desc, world) {
        return 1;
    }
    let most = desc.size_bytes(world) / least_part_bytes;
    u32::try_from(most).unwrap_or(u32::MAX).clamp(1, lanes)
}

/// Whether a call is one of those whose parts others can do. Where its tensors lie does not matter, and is not known on other ranks: the first part
/// packs them for all.
fn may_be_cut(desc: &CallDesc, world: u32) -> bool {
    let is_measured = desc.encoding(world).is_some_and(|encoding| encoding.probe.is_some());
    !desc.collective.is_point_to_point()
        && desc.collective != Collective::Barrier
        && desc.offload.is_none()
        // What is scaled in place must not be refused after that, and parts may be.
        && desc.op != ReduceOp::PremulSum
        && !is_measured
}
