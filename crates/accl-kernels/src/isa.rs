//! The names of instruction sets, and what one offers to the functions that compose kernels.
//!
//! Owns no table: which there are is in `arch`, and which one a process uses in `dispatch`. Read [`Arch`] first.

use std::fmt;

use crate::reduce::lanes::{ArithLanes, FloatLanes, Lanes, LastOn, OpOn};

/// An instruction set that has kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// What every processor of the target has (SSE2 on x86-64).
    Scalar,
    /// AVX2 with the float16 conversions of F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
}

impl Isa {
    /// The name in bench ids and test messages.
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
/// To be called on a machine that has their instruction set, within the rules of `loops.rs`.
#[derive(Clone, Copy)]
pub(crate) struct ReduceKernels {
    /// (dst, a and b, bytes of each, world)
    pub(crate) pair: unsafe fn(*mut u8, [*const u8; 2], usize, f64),
    /// (dst, srcs, bytes of each, world)
    pub(crate) many: unsafe fn(*mut u8, &[*const u8], usize, f64),
}

/// The multiplication of one type by a factor: (dst, src, bytes, factor).
pub(crate) type ScaleKernel = unsafe fn(*mut u8, *const u8, usize, f64);

/// An instruction set, to the functions that compose kernels: how it handles the types of which the compiler does not
/// make vectors by itself.
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
