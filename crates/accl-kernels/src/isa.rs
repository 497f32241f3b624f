//! The names of instruction sets, and what an instruction set offers to the functions that compose kernels.
//!
//! Owns no table: `arch` lists the instruction sets, and `dispatch` chooses the one that a process uses. Read [`Arch`]
//! first.

use std::fmt;

use crate::reduce::lanes::{ArithLanes, FloatLanes, Lanes, LastOn, OpOn};

/// An instruction set that has kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// The instructions that every processor of the target has (SSE2 on x86-64).
    Scalar,
    /// AVX2 with the float16 conversions of F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
}

impl Isa {
    /// Returns the name in bench ids and test messages.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The functions of one operation on one type. Lengths are in bytes, multiples of the element's size.
///
/// Call them only on a machine that has their instruction set, and keep the contracts of `loops.rs`.
#[derive(Clone, Copy)]
pub(crate) struct ReduceKernels {
    /// Arguments: dst, a and b, bytes of each, world size.
    pub(crate) pair: unsafe fn(*mut u8, [*const u8; 2], usize, f64),
    /// Arguments: dst, srcs, bytes of each, world size.
    pub(crate) many: unsafe fn(*mut u8, &[*const u8], usize, f64),
}

/// The multiplication of one type by a factor. Arguments: dst, src, bytes, factor.
pub(crate) type ScaleKernel = unsafe fn(*mut u8, *const u8, usize, f64);

/// An instruction set as the functions that compose kernels see it. Its types cover elements that the compiler cannot
/// vectorise by itself.
pub(crate) trait Arch {
    type F16: FloatLanes;
    type Bf16: FloatLanes;
    type F32: FloatLanes;
    type F64: FloatLanes;
    type C64: ArithLanes;
    type C128: ArithLanes;

    fn reduce_kernels<V: Lanes, O: OpOn<V>, F: LastOn<V>>() -> ReduceKernels;
    fn scale_kernel<V: FloatLanes>() -> ScaleKernel;
}
