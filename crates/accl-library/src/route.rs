//! Rule for which calls a transport's library does, and which stay with the host.
//!
//! Owns that rule. All ranks must decide alike, so it depends only on values that they agree on. Read [`kept_by_host`]
//! first.

use accl_engine::CallDesc;
use accl_types::{Collective, Dtype, DtypeClass, ReduceOp};

/// Maximum bytes of a call, all blocks together, that goes to a library. Libraries count in 31 bits, and some of them
/// count bytes from the first block on.
const MOST_BYTES: u64 = i32::MAX as u64;

/// Returns why the host does a call that the settings give to the library; `None` if the library does it.
pub(super) fn kept_by_host(desc: &CallDesc, world: u32) -> Option<&'static str> {
    if !desc.has_equal_blocks() {
        return Some("its blocks differ in size");
    }
    if whole_bytes(desc, world) > MOST_BYTES {
        return Some("it has more than 2 GiB");
    }
    if desc.collective.reduces() { kept_reduction(desc.dtype, desc.op) } else { None }
}

/// Like [`kept_by_host`], for the dtype and operator of a reduction.
fn kept_reduction(dtype: Dtype, op: ReduceOp) -> Option<&'static str> {
    if dtype.size_bytes() == 2 {
        return Some(
            "libraries add float16 and bfloat16 differently or not at all, and other 16-bit types are treated alike",
        );
    }
    match (dtype.class(), op) {
        (_, ReduceOp::Avg | ReduceOp::PremulSum) => Some("libraries have no such operator"),
        (DtypeClass::Bool | DtypeClass::Opaque | DtypeClass::Float16, _) => Some("libraries do not add such types"),
        (DtypeClass::Float | DtypeClass::Complex, ReduceOp::Sum | ReduceOp::Product) => None,
        (DtypeClass::Float | DtypeClass::Complex, ReduceOp::Min | ReduceOp::Max) => {
            Some("libraries do not specify the result for NaN")
        }
        (DtypeClass::Float | DtypeClass::Complex, ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor) => {
            Some("these types have no bitwise operators")
        }
        (DtypeClass::Integer, _) => None,
    }
}

/// Returns the bytes of all blocks of one rank, which all ranks know.
fn whole_bytes(desc: &CallDesc, world: u32) -> u64 {
    match desc.collective {
        Collective::AllToAll => desc.bytes(),
        _ => desc.size_bytes(world),
    }
}

#[cfg(test)]
mod tests {
    use accl_engine::TensorDesc;
    use accl_types::Elems;

    use super::*;

    fn call(collective: Collective, dtype: Dtype, op: ReduceOp) -> CallDesc {
        let tensor = || TensorDesc::dense(std::ptr::NonNull::dangling().as_ptr(), dtype, Elems(64));
        let outputs = [vec![tensor()]].into_iter().collect();
        CallDesc { op, outputs, ..CallDesc::new(collective, dtype) }
    }

    fn of(dtype: Dtype, op: ReduceOp) -> Option<&'static str> {
        kept_by_host(&call(Collective::AllReduce, dtype, op), 2)
    }

    #[test]
    fn what_a_library_adds_otherwise_than_the_host_is_left_to_the_host() {
        for dtype in [Dtype::F32, Dtype::F64, Dtype::C64, Dtype::C128, Dtype::I32, Dtype::U8] {
            assert_eq!(of(dtype, ReduceOp::Sum), None, "{dtype}");
            assert!(of(dtype, ReduceOp::Avg).is_some() && of(dtype, ReduceOp::PremulSum).is_some(), "{dtype}");
        }
        for dtype in [Dtype::F16, Dtype::BF16, Dtype::I16, Dtype::U16, Dtype::Bool] {
            assert!(of(dtype, ReduceOp::Sum).is_some(), "{dtype}");
        }
        assert_eq!(of(Dtype::I64, ReduceOp::Min), None);
        assert!(of(Dtype::F32, ReduceOp::Min).is_some(), "NaN wins here, and no message says so there");
        assert_eq!(kept_by_host(&call(Collective::Broadcast, Dtype::BF16, ReduceOp::Sum), 2), None, "it is not added");
    }

    #[test]
    fn blocks_that_differ_or_that_a_library_cannot_count_are_left_to_the_host() {
        let mut desc = call(Collective::AllToAll, Dtype::F32, ReduceOp::Sum);
        assert_eq!(kept_by_host(&desc, 2), None);
        desc.equal_blocks = false;
        assert!(kept_by_host(&desc, 2).is_some());
        let tensor = TensorDesc::dense(std::ptr::NonNull::dangling().as_ptr(), Dtype::U8, Elems(1 << 31));
        let outputs = [vec![tensor]].into_iter().collect();
        let large = CallDesc { outputs, ..CallDesc::new(Collective::Broadcast, Dtype::U8) };
        assert!(kept_by_host(&large, 2).is_some());
        let tensor = TensorDesc::dense(std::ptr::NonNull::dangling().as_ptr(), Dtype::U8, Elems(1 << 30));
        let outputs = [vec![tensor]].into_iter().collect();
        let scattered = CallDesc { outputs, ..CallDesc::new(Collective::Scatter, Dtype::U8) };
        assert!(kept_by_host(&scattered, 2).is_some(), "both together have 2 GiB");
    }
}
