//! Which kernel serves an operator and a dtype: the one table of what can be reduced and scaled.

use accl_types::{Dtype, ReduceOp};

use super::lanes::{
    And, ArithReg, Bool, Complex, Divide, FloatLanes, Keep, Lanes, Max, Min, Op, Or, OrderReg, Product, Sum, Xor,
};
use crate::arch::{Arch, ReduceKernels, ScaleKernels};

/// The kernels of one operator and dtype.
#[derive(Clone, Copy)]
pub(crate) struct Selected {
    /// For all but the last operation on an element.
    pub(crate) keep: ReduceKernels,
    /// For the last one.
    pub(crate) last: ReduceKernels,
}

/// The kernels of `A` for `op` on `dtype`; `None` if the pair is not offered.
pub(crate) fn select<A: Arch>(op: ReduceOp, dtype: Dtype) -> Option<Selected> {
    match dtype {
        Dtype::Bool => boolean::<A>(op),
        Dtype::U8 => integer::<A, u8, u8>(op),
        Dtype::I8 => integer::<A, i8, u8>(op),
        Dtype::U16 => integer::<A, u16, u16>(op),
        Dtype::I16 => integer::<A, i16, u16>(op),
        Dtype::U32 => integer::<A, u32, u32>(op),
        Dtype::I32 => integer::<A, i32, u32>(op),
        Dtype::U64 => integer::<A, u64, u64>(op),
        Dtype::I64 => integer::<A, i64, u64>(op),
        Dtype::F16 => float::<A, A::F16>(op),
        Dtype::BF16 => float::<A, A::Bf16>(op),
        Dtype::F32 => float::<A, f32>(op),
        Dtype::F64 => float::<A, f64>(op),
        Dtype::C64 => complex::<A, f32>(op),
        Dtype::C128 => complex::<A, f64>(op),
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

/// The kernels of `A` that multiply `dtype` by a factor; `None` if the dtype has no fractions or only travels.
pub(crate) fn select_scale<A: Arch>(dtype: Dtype) -> Option<ScaleKernels> {
    match dtype {
        Dtype::F16 => Some(A::scale_kernels::<A::F16>()),
        Dtype::BF16 => Some(A::scale_kernels::<A::Bf16>()),
        Dtype::F32 | Dtype::C64 => Some(A::scale_kernels::<f32>()),
        Dtype::F64 | Dtype::C128 => Some(A::scale_kernels::<f64>()),
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
        ReduceOp::Sum | ReduceOp::Max | ReduceOp::Bor => Some(same(A::reduce_kernels::<Bool, Or, Keep>())),
        ReduceOp::Product | ReduceOp::Min | ReduceOp::Band => Some(same(A::reduce_kernels::<Bool, And, Keep>())),
        ReduceOp::Bxor => Some(same(A::reduce_kernels::<Bool, Xor, Keep>())),
        ReduceOp::Avg | ReduceOp::PremulSum => None,
    }
}

/// `U` is the unsigned type of the same width, for what does not depend on the sign.
fn integer<A: Arch, T, U>(op: ReduceOp) -> Option<Selected>
where
    T: Lanes<Reg = T, Tail = T> + OrderReg,
    U: Lanes<Reg = U, Tail = U> + ArithReg,
{
    match op {
        ReduceOp::Sum => Some(same(A::reduce_kernels::<U, Sum, Keep>())),
        ReduceOp::Product => Some(same(A::reduce_kernels::<U, Product, Keep>())),
        ReduceOp::Min => Some(same(A::reduce_kernels::<T, Min, Keep>())),
        ReduceOp::Max => Some(same(A::reduce_kernels::<T, Max, Keep>())),
        // Kernels get lengths in bytes: those of one byte serve every width.
        ReduceOp::Band => Some(same(A::reduce_kernels::<u8, And, Keep>())),
        ReduceOp::Bor => Some(same(A::reduce_kernels::<u8, Or, Keep>())),
        ReduceOp::Bxor => Some(same(A::reduce_kernels::<u8, Xor, Keep>())),
        ReduceOp::Avg | ReduceOp::PremulSum => None,
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

/// `T` is the type of each part. What acts on the parts one by one has the kernels of `T`.
fn complex<A: Arch, T: FloatLanes>(op: ReduceOp) -> Option<Selected>
where
    Complex<T>: Lanes<Reg = Complex<T>, Tail = Complex<T>>,
    Product: Op<Complex<T>>,
{
    match op {
        ReduceOp::Sum | ReduceOp::PremulSum => Some(same(A::reduce_kernels::<T, Sum, Keep>())),
        ReduceOp::Avg => Some(average::<A, T>()),
        ReduceOp::Product => Some(same(A::reduce_kernels::<Complex<T>, Product, Keep>())),
        ReduceOp::Min | ReduceOp::Max | ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => None,
    }
}

fn average<A: Arch, V: FloatLanes>() -> Selected {
    Selected { keep: A::reduce_kernels::<V, Sum, Keep>(), last: A::reduce_kernels::<V, Sum, Divide>() }
}

fn same(kernels: ReduceKernels) -> Selected {
    Selected { keep: kernels, last: kernels }
}
