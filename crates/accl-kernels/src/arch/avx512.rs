//! AVX-512: 64-byte vectors. The 16-bit floats are as with AVX2.

use std::mem::MaybeUninit;

use super::avx2::{By16, F16x1};
use super::{Arch, Isa, ReduceKernels, Row, ScaleKernels, arch};
use crate::reduce::lanes::{Bf16, FloatLanes, Lanes, LastOn, OpOn};
use crate::reduce::{loops, select};

arch!(
    Avx512,
    By16<F16x1>,
    By16<Bf16>,
    "avx512",
    || {
        !cfg!(miri)
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("f16c")
    },
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")]
);
