//! The loops as the compiler generates them for any processor of the target. Miri runs these.

use super::row::{Row, arch};
use crate::codec::loops::codec_loops;
use crate::isa::{Arch, Isa, ReduceKernels, ScaleKernel};
use crate::reduce::lanes::{Bf16x2, Complex, F16, FloatLanes, Lanes, LastOn, OpOn};
use crate::reduce::{loops, select};

arch!(Scalar, F16, Bf16x2, f32, f64, Complex<f32>, Complex<f64>, LOOPS, "scalar", || true,);
