//! AVX-512: 64-byte vectors of integers. Floats are as with AVX2.

use super::avx2::{By16, ByParts, F16x1, F32x8, F64x4};
use super::{Arch, Isa, ReduceKernels, Row, ScaleKernel, arch};
use crate::codec::avx2::{add_values, levels, levels_drawn, values};
use crate::codec::loops::{Loops, codec_loops};
use crate::reduce::lanes::{Bf16, FloatLanes, Group, Lanes, LastOn, OpOn};
use crate::reduce::{loops, select};

arch!(
    Avx512,
    Group<By16<F16x1>, 2>,
    Group<By16<Bf16>, 2>,
    Group<F32x8, 2>,
    Group<F64x4, 2>,
    Group<ByParts<F32x8>, 2>,
    Group<ByParts<F64x4>, 2>,
    Loops { levels, levels_drawn, add_values, values, ..LOOPS },
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
