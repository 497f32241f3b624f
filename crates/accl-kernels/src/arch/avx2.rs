//! AVX2: 32-byte vectors. float16 goes through the eight-element conversions of F16C.

use std::arch::x86_64::{
    __m256, _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _mm_cvtph_ps, _mm_cvtps_ph, _mm_cvtsi32_si128, _mm_cvtsi128_si32,
    _mm_cvtss_f32, _mm_loadu_si128, _mm_set_ss, _mm_storeu_si128, _mm256_add_ps, _mm256_and_ps, _mm256_blendv_ps,
    _mm256_cmp_ps, _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_div_ps, _mm256_loadu_ps, _mm256_max_ps, _mm256_min_ps,
    _mm256_mul_ps, _mm256_or_ps, _mm256_set1_ps, _mm256_storeu_ps,
};
use std::mem::MaybeUninit;

use super::{Arch, Isa, ReduceKernels, Row, ScaleKernels, arch};
use crate::reduce::lanes::{ArithReg, FloatLanes, FloatReg, Lanes, LastOn, OpOn, OrderReg};
use crate::reduce::{loops, select};

arch!(
    Avx2,
    F16x8,
    "avx2+f16c",
    || !cfg!(miri) && is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c"),
    #[target_feature(enable = "avx2,f16c")]
);

/// Eight float16 in memory, eight float32 in a register.
pub(super) struct F16x8;

#[derive(Clone, Copy)]
pub(super) struct F32x8(__m256);

// Each method below is inlined into a function of this file or of `avx512.rs`, which is called only where AVX2 and F16C
// are available. `SAFETY: as above` refers to this.

impl Lanes for F16x8 {
    const COUNT: usize = 8;
    const SIZE_BYTES: usize = 2;
    type Acc = f32;
    type Reg = F32x8;
    type Tail = F16x1;

    #[inline(always)]
    unsafe fn load(src: *const u8) -> F32x8 {
        // SAFETY: as above; the caller vouches for 16 bytes.
        F32x8(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(src.cast())) })
    }

    #[inline(always)]
    unsafe fn store(dst: *mut u8, value: F32x8) {
        // SAFETY: as above; the caller vouches for 16 bytes.
        unsafe {
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(value.0, value.0);
            let canonical = _mm256_blendv_ps(value.0, _mm256_set1_ps(f32::NAN), nan);
            _mm_storeu_si128(dst.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(canonical));
        }
    }

    #[inline(always)]
    unsafe fn load_acc(slots: *const f32, slot: usize) -> F32x8 {
        // SAFETY: as above; the caller vouches for eight slots.
        F32x8(unsafe { _mm256_loadu_ps(slots.add(slot)) })
    }

    #[inline(always)]
    unsafe fn store_acc(slots: *mut f32, slot: usize, value: F32x8) {
        // SAFETY: as above; the caller vouches for eight slots.
        unsafe { _mm256_storeu_ps(slots.add(slot), value.0) };
    }
}

/// One float16, by the same instructions.
pub(super) struct F16x1;

impl Lanes for F16x1 {
    const COUNT: usize = 1;
    const SIZE_BYTES: usize = 2;
    type Acc = f32;
    type Reg = f32;
    type Tail = F16x1;

    #[inline(always)]
    unsafe fn load(src: *const u8) -> f32 {
        // SAFETY: as above; the caller vouches for two bytes.
        unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(src.cast::<u16>().read_unaligned().into()))) }
    }

    #[inline(always)]
    unsafe fn store(dst: *mut u8, value: f32) {
        let canonical = if value.is_nan() { f32::NAN } else { value };
        // SAFETY: as above; the caller vouches for two bytes.
        unsafe {
            let half = _mm_cvtsi128_si32(_mm_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm_set_ss(canonical)));
            dst.cast::<u16>().write_unaligned(half as u16);
        }
    }

    #[inline(always)]
    unsafe fn load_acc(slots: *const f32, slot: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { slots.add(slot).read() }
    }

    #[inline(always)]
    unsafe fn store_acc(slots: *mut f32, slot: usize, value: f32) {
        // SAFETY: the caller's promise.
        unsafe { slots.add(slot).write(value) };
    }
}

impl ArithReg for F32x8 {
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: as above.
        F32x8(unsafe { _mm256_add_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: as above.
        F32x8(unsafe { _mm256_mul_ps(self.0, other.0) })
    }
}

// minps and maxps return their second operand if the operands are equal or unordered: as the selects in `lanes.rs`.
impl OrderReg for F32x8 {
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        // SAFETY: as above.
        F32x8(unsafe { _mm256_or_ps(_mm256_min_ps(self.0, other.0), _mm256_min_ps(other.0, self.0)) })
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // SAFETY: as above.
        unsafe {
            let ordered = _mm256_and_ps(_mm256_max_ps(self.0, other.0), _mm256_max_ps(other.0, self.0));
            // All ones where unordered, which is a NaN.
            F32x8(_mm256_or_ps(ordered, _mm256_cmp_ps::<_CMP_UNORD_Q>(self.0, other.0)))
        }
    }
}

impl FloatReg for F32x8 {
    #[inline(always)]
    fn div_scalar(self, divisor: f64) -> Self {
        // SAFETY: as above.
        F32x8(unsafe { _mm256_div_ps(self.0, _mm256_set1_ps(divisor as f32)) })
    }

    #[inline(always)]
    fn mul_scalar(self, factor: f64) -> Self {
        // SAFETY: as above.
        F32x8(unsafe { _mm256_mul_ps(self.0, _mm256_set1_ps(factor as f32)) })
    }
}
