//! The kernel of an operator and a dtype: the one table of what can be reduced and scaled.

use accl_types::{Dtype, ReduceOp};

use super::lanes::{
    And, ArithLanes, Bool, Divide, DivideWhole, FloatLanes, IntegerLanes, Keep, Max, Min, Or, Product, Sum, Unrolled,
    Xor,
};
use crate::isa::{Arch, ReduceKernels, ScaleKernel};

/// The kernels of one operator and dtype.
#[derive(Clone, Copy)]
pub(crate) struct Selected {
    /// For all operations on an element but the last.
    pub(crate) keep: ReduceKernels,
    /// For the last operation on an element.
    pub(crate) last: ReduceKernels,
}

/// A cache line of elements of 1, 2, 4 or 8 bytes.
type Line1<T> = Unrolled<T, 64>;
type Line2<T> = Unrolled<T, 32>;
type Line4<T> = Unrolled<T, 16>;
type Line8<T> = Unrolled<T, 8>;

/// Returns the kernels of `A` for `op` on `dtype`; `None` if the pair is not supported.
pub(crate) fn select<A: Arch>(op: ReduceOp, dtype: Dtype) -> Option<Selected> {
    match dtype {
        Dtype::Bool => boolean::<A>(op),
        Dtype::U8 => integer::<A, Line1<u8>, Line1<u8>>(op),
        Dtype::I8 => integer::<A, Line1<i8>, Line1<u8>>(op),
        Dtype::U16 => integer::<A, Line2<u16>, Line2<u16>>(op),
        Dtype::I16 => integer::<A, Line2<i16>, Line2<u16>>(op),
        Dtype::U32 => integer::<A, Line4<u32>, Line4<u32>>(op),
        Dtype::I32 => integer::<A, Line4<i32>, Line4<u32>>(op),
        Dtype::U64 => integer::<A, Line8<u64>, Line8<u64>>(op),
        Dtype::I64 => integer::<A, Line8<i64>, Line8<u64>>(op),
        Dtype::F16 => float::<A, A::F16>(op),
        Dtype::BF16 => float::<A, A::Bf16>(op),
        Dtype::F32 => float::<A, A::F32>(op),
        Dtype::F64 => float::<A, A::F64>(op),
        Dtype::C64 => complex::<A, A::F32, A::C64>(op),
        Dtype::C128 => complex::<A, A::F64, A::C128>(op),
        Dtype::C32
        | Dtype::BC32
        | Dtype::Bits8
        | Dtype::Bits16
        | Dtype::F8E4M3Fn
        | Dtype::F8E5M2
        | Dtype::F8E4M3FnUz
        | Dtype::F8E5M2FnUz
        | Dtype::F8E8M0Fnu
        | Dtype::F4E2M1FnX2 => None,
    }
}

/// Returns the kernels of `A` that multiply `dtype` by a factor. `None` if the dtype has no fractions, or is only
/// copied and never computed with.
pub(crate) fn select_scale<A: Arch>(dtype: Dtype) -> Option<ScaleKernel> {
    match dtype {
        Dtype::F16 => Some(A::scale_kernel::<A::F16>()),
        Dtype::BF16 => Some(A::scale_kernel::<A::Bf16>()),
        Dtype::F32 | Dtype::C64 => Some(A::scale_kernel::<A::F32>()),
        Dtype::F64 | Dtype::C128 => Some(A::scale_kernel::<A::F64>()),
        Dtype::Bool
        | Dtype::U8
        | Dtype::I8
        | Dtype::U16
        | Dtype::I16
        | Dtype::U32
        | Dtype::I32
        | Dtype::U64
        | Dtype::I64
        | Dtype::C32
        | Dtype::BC32
        | Dtype::Bits8
        | Dtype::Bits16
        | Dtype::F8E4M3Fn
        | Dtype::F8E5M2
        | Dtype::F8E4M3FnUz
        | Dtype::F8E5M2FnUz
        | Dtype::F8E8M0Fnu
        | Dtype::F4E2M1FnX2 => None,
    }
}

fn boolean<A: Arch>(op: ReduceOp) -> Option<Selected> {
    match op {
        ReduceOp::Sum | ReduceOp::Max | ReduceOp::Bor => Some(same(A::reduce_kernels::<Line1<Bool>, Or, Keep>())),
        ReduceOp::Product | ReduceOp::Min | ReduceOp::Band => Some(same(A::reduce_kernels::<Line1<Bool>, And, Keep>())),
        ReduceOp::Bxor => Some(same(A::reduce_kernels::<Line1<Bool>, Xor, Keep>())),
        ReduceOp::Avg | ReduceOp::PremulSum => None,
    }
}

/// Selects the kernels of an integer type. `U` is the unsigned type of the same width, for operations that ignore the
/// sign.
fn integer<A: Arch, T: IntegerLanes, U: ArithLanes>(op: ReduceOp) -> Option<Selected> {
    match op {
        ReduceOp::Sum => Some(same(A::reduce_kernels::<U, Sum, Keep>())),
        ReduceOp::Avg => Some(Selected {
            keep: A::reduce_kernels::<U, Sum, Keep>(),
            last: A::reduce_kernels::<T, Sum, DivideWhole>(),
        }),
        ReduceOp::Product => Some(same(A::reduce_kernels::<U, Product, Keep>())),
        ReduceOp::Min => Some(same(A::reduce_kernels::<T, Min, Keep>())),
        ReduceOp::Max => Some(same(A::reduce_kernels::<T, Max, Keep>())),
        // Kernels get lengths in bytes, so the kernels for bytes serve every width.
        ReduceOp::Band => Some(same(A::reduce_kernels::<Line1<u8>, And, Keep>())),
        ReduceOp::Bor => Some(same(A::reduce_kernels::<Line1<u8>, Or, Keep>())),
        ReduceOp::Bxor => Some(same(A::reduce_kernels::<Line1<u8>, Xor, Keep>())),
        ReduceOp::PremulSum => None,
    }
}

fn float<A: Arch, V: FloatLanes>(op: ReduceOp) -> Option<Selected> {
    match op {
        ReduceOp::Sum | ReduceOp::PremulSum => Some(same(A::reduce_kernels::<V, Sum, Keep>())),
        ReduceOp::Avg => Some(average::<A, V>()),
        ReduceOp::Product => Some(same(A::reduce_kernels::<V, Product, Keep>())),
        ReduceOp::Min => Some(same(A::reduce_kernels::<V, Min, Keep>())),
        ReduceOp::Max => Some(same(A::reduce_kernels::<V, Max, Keep>())),
        ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => None,
    }
}

/// Selects the kernels of a complex type. `T` is the type of the parts; operations on single parts use its kernels.
fn complex<A: Arch, T: FloatLanes, C: ArithLanes>(op: ReduceOp) -> Option<Selected> {
    match op {
        ReduceOp::Sum | ReduceOp::PremulSum => Some(same(A::reduce_kernels::<T, Sum, Keep>())),
        ReduceOp::Avg => Some(average::<A, T>()),
        ReduceOp::Product => Some(same(A::reduce_kernels::<C, Product, Keep>())),
        ReduceOp::Min | ReduceOp::Max | ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => None,
    }
}

fn average<A: Arch, V: FloatLanes>() -> Selected {
    Selected { keep: A::reduce_kernels::<V, Sum, Keep>(), last: A::reduce_kernels::<V, Sum, Divide>() }
}

fn same(kernels: ReduceKernels) -> Selected {
    Selected { keep: kernels, last: kernels }
}
