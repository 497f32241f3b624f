//! One instruction set of the table, and the functions that each instruction set compiles.

use accl_types::{Dtype, ReduceOp};

use crate::codec::loops::Loops;
use crate::isa::{Isa, ScaleKernel};
use crate::reduce::select::Selected;

/// One instruction set of the table.
pub(crate) struct Row {
    pub(crate) isa: Isa,
    pub(crate) description: &'static str,
    pub(crate) available: fn() -> bool,
    pub(crate) select: fn(ReduceOp, Dtype) -> Option<Selected>,
    pub(crate) select_scale: fn(Dtype) -> Option<ScaleKernel>,
    pub(crate) copy: CopyFn,
    pub(crate) loops: Loops,
}

pub(crate) type CopyFn = unsafe fn(*mut u8, *const u8, usize);

/// Implements `Arch` for `$arch` by functions with the given attributes around the loops, and defines the instruction
/// set's `ROW`.
macro_rules! arch {
    (
        $arch:ident,
        $f16:ty,
        $bf16:ty,
        $f32:ty,
        $f64:ty,
        $c64:ty,
        $c128:ty,
        $loops:expr,
        $description:literal, $available:expr, $(#[$feature:meta])*) => {
        pub(super) const ROW: Row = Row {
            isa: Isa::$arch,
            description: $description,
            available: $available,
            select: select::select::<$arch>,
            select_scale: select::select_scale::<$arch>,
            copy,
            loops: $loops,
        };

        codec_loops!($(#[$feature])*);

        pub(super) struct $arch;

        impl Arch for $arch {
            type F16 = $f16;
            type Bf16 = $bf16;
            type F32 = $f32;
            type F64 = $f64;
            type C64 = $c64;
            type C128 = $c128;

            fn reduce_kernels<V: Lanes, O: OpOn<V>, F: LastOn<V>>() -> ReduceKernels {
                ReduceKernels { pair: pair::<V, O, F>, many: many::<V, O, F> }
            }

            fn scale_kernel<V: FloatLanes>() -> ScaleKernel {
                scale::<V>
            }
        }

        $(#[$feature])*
        unsafe fn pair<V: Lanes, O: OpOn<V>, F: LastOn<V>>(
            dst: *mut u8,
            operands: [*const u8; 2],
            len_bytes: usize,
            world: f64,
        ) {
            // SAFETY: the caller keeps the contract of `loops::pair` for `len_bytes / V::SIZE_BYTES` elements, see
            // `ReduceKernels`.
            unsafe { loops::pair::<V, O, F>(dst, operands, len_bytes / V::SIZE_BYTES, world) };
        }

        $(#[$feature])*
        unsafe fn many<V: Lanes, O: OpOn<V>, F: LastOn<V>>(
            dst: *mut u8,
            srcs: &[*const u8],
            len_bytes: usize,
            world: f64,
        ) {
            // SAFETY: the caller keeps the contract of `loops::many` for `len_bytes / V::SIZE_BYTES` elements, see
            // `ReduceKernels`.
            unsafe { loops::many::<V, O, F>(dst, srcs, len_bytes / V::SIZE_BYTES, world) };
        }

        $(#[$feature])*
        unsafe fn copy(dst: *mut u8, src: *const u8, len_bytes: usize) {
            // SAFETY: callers of a `CopyFn` keep the contract of `blocks`.
            unsafe { crate::copy::blocks::blocks(dst, src, len_bytes) };
        }

        $(#[$feature])*
        unsafe fn scale<V: FloatLanes>(dst: *mut u8, src: *const u8, len_bytes: usize, factor: f64) {
            // SAFETY: the caller keeps the contract of `loops::scale` for `len_bytes / V::SIZE_BYTES` elements.
            unsafe { loops::scale::<V>(dst, src, len_bytes / V::SIZE_BYTES, factor) };
        }
    };
}
pub(super) use arch;
