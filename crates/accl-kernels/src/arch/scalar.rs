//! The loops as the compiler makes them for any processor of the target. This is what Miri sees.

use std::mem::MaybeUninit;

use super::{Arch, Isa, ReduceKernels, Row, ScaleKernels, arch};
use crate::reduce::lanes::{Bf16x2, F16, FloatLanes, Lanes, LastOn, OpOn};
use crate::reduce::{loops, select};

arch!(Scalar, F16, Bf16x2, "scalar", || true,);
