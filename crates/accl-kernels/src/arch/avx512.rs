//! AVX-512: 64-byte vectors of integers. Floats use the vectors of AVX2.

use super::avx2::Avx2;
use super::row::{Row, arch};
use crate::codec::avx512::with_vectors;
use crate::codec::loops::codec_loops;
use crate::isa::{Arch, Isa, ReduceKernels, ScaleKernel};
use crate::reduce::lanes::{FloatLanes, Lanes, LastOn, OpOn};
use crate::reduce::{loops, select};

arch!(
    Avx512,
    <Avx2 as Arch>::F16,
    <Avx2 as Arch>::Bf16,
    <Avx2 as Arch>::F32,
    <Avx2 as Arch>::F64,
    <Avx2 as Arch>::C64,
    <Avx2 as Arch>::C128,
    with_vectors(LOOPS),
    "avx512",
    || {
        !cfg!(miri)
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("fma")
    },
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,fma")]
);
