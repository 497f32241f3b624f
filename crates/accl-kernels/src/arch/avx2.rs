//! AVX2: 32-byte vectors. float16 goes through the conversions of F16C, bfloat16 through shifts of whole vectors.

use std::arch::x86_64::{
    __m256, _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _MM_HINT_T0, _mm_cvtph_ps, _mm_cvtps_ph, _mm_cvtsi32_si128,
    _mm_cvtsi128_si32, _mm_cvtss_f32, _mm_loadu_si128, _mm_prefetch, _mm_set_ss, _mm_storeu_si128, _mm256_add_epi16,
    _mm256_add_ps, _mm256_and_ps, _mm256_and_si256, _mm256_andnot_si256, _mm256_blend_epi16, _mm256_blendv_ps,
    _mm256_castps_si256, _mm256_castsi256_ps, _mm256_cmp_ps, _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_div_ps,
    _mm256_loadu_ps, _mm256_loadu_si256, _mm256_max_ps, _mm256_min_ps, _mm256_movemask_ps, _mm256_mul_ps, _mm256_or_ps,
    _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps, _mm256_slli_epi32, _mm256_srli_epi16, _mm256_srli_epi32,
    _mm256_storeu_ps, _mm256_storeu_si256, _mm256_subs_epu16,
};
use std::mem::MaybeUninit;

use super::{Arch, Isa, ReduceKernels, Row, ScaleKernels, arch};
use crate::reduce::lanes::{ArithReg, Bf16, FloatLanes, FloatReg, Lanes, LastOn, OpOn, OrderReg, Twice};
use crate::reduce::{loops, select};

arch!(
    Avx2,
    F16x16,
    Bf16x16,
    "avx2+f16c",
    || !cfg!(miri) && is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c"),
    #[target_feature(enable = "avx2,f16c")]
);

/// How far ahead memory is asked for: between two loads lies so much to calculate that the processor alone sees too few.
const AHEAD_BYTES: usize = 1 << 10;

/// Sixteen float16 in memory, sixteen float32 in two registers.
pub(super) struct F16x16;

/// Sixteen bfloat16, as pairs in 32-bit words: the lower ones of all words in one register, the upper ones in the other.
pub(super) struct Bf16x16;

#[derive(Clone, Copy)]
pub(super) struct F32x8(__m256);

type Both = Twice<F32x8>;

// Each method below is inlined into a function of this file or of `avx512.rs`, which is called only where AVX2 and F16C
// are available. `SAFETY: as above` refers to this.

impl Lanes for F16x16 {
    const COUNT: usize = 16;
    const SIZE_BYTES: usize = 2;
    type Acc = f32;
    type Reg = Both;
    type Tail = F16x1;

    #[inline(always)]
    unsafe fn load(src: *const u8) -> Both {
        // SAFETY: as above; the caller vouches for 32 bytes.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(src.wrapping_add(AHEAD_BYTES).cast());
            let low = _mm256_cvtph_ps(_mm_loadu_si128(src.cast()));
            Twice(F32x8(low), F32x8(_mm256_cvtph_ps(_mm_loadu_si128(src.add(16).cast()))))
        }
    }

    #[inline(always)]
    unsafe fn store(dst: *mut u8, value: Both) {
        let Twice(low, high) = canonical(value);
        // SAFETY: as above; the caller vouches for 32 bytes.
        unsafe {
            _mm_storeu_si128(dst.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(low.0));
            _mm_storeu_si128(dst.add(16).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(high.0));
        }
    }

    #[inline(always)]
    unsafe fn load_acc(slots: *const f32, slot: usize) -> Both {
        // SAFETY: the caller's promise.
        unsafe { load_slots(slots, slot) }
    }

    #[inline(always)]
    unsafe fn store_acc(slots: *mut f32, slot: usize, value: Both) {
        // SAFETY: the caller's promise.
        unsafe { store_slots(slots, slot, value) };
    }
}

impl Lanes for Bf16x16 {
    const COUNT: usize = 16;
    const SIZE_BYTES: usize = 2;
    type Acc = f32;
    type Reg = Both;
    type Tail = Bf16;

    #[inline(always)]
    unsafe fn load(src: *const u8) -> Both {
        // SAFETY: as above; the caller vouches for 32 bytes.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(src.wrapping_add(AHEAD_BYTES).cast());
            let words = _mm256_loadu_si256(src.cast());
            let upper = _mm256_and_si256(words, _mm256_set1_epi32(0xffff_0000_u32 as i32));
            let (low, high) = (_mm256_slli_epi32::<16>(words), upper);
            Twice(F32x8(_mm256_castsi256_ps(low)), F32x8(_mm256_castsi256_ps(high)))
        }
    }

    /// Rounds to nearest even, on the kept halves and the dropped halves of all sixteen at once.
    #[inline(always)]
    unsafe fn store(dst: *mut u8, value: Both) {
        let Twice(low, high) = canonical(value);
        // SAFETY: as above; the caller vouches for 32 bytes.
        unsafe {
            let (low, high) = (_mm256_castps_si256(low.0), _mm256_castps_si256(high.0));
            let kept = _mm256_blend_epi16::<0b1010_1010>(_mm256_srli_epi32::<16>(low), high);
            let dropped = _mm256_blend_epi16::<0b1010_1010>(low, _mm256_slli_epi32::<16>(high));
            // Up from more than half, and from half when what is kept is odd: one less for an even one makes both one
            // comparison, with the topmost bit.
            let even = _mm256_andnot_si256(kept, _mm256_set1_epi16(1));
            let carry = _mm256_srli_epi16::<15>(_mm256_subs_epu16(dropped, even));
            _mm256_storeu_si256(dst.cast(), _mm256_add_epi16(kept, carry));
        }
    }

    #[inline(always)]
    unsafe fn load_acc(slots: *const f32, slot: usize) -> Both {
        // SAFETY: the caller's promise.
        unsafe { load_slots(slots, slot) }
    }

    #[inline(always)]
    unsafe fn store_acc(slots: *mut f32, slot: usize, value: Both) {
        // SAFETY: the caller's promise.
        unsafe { store_slots(slots, slot, value) };
    }
}

/// Canonical NaN for NaN. A look at both registers at once finds that there is none, which is the rule.
#[inline(always)]
fn canonical(value: Both) -> Both {
    let Twice(low, high) = value;
    // SAFETY: as above.
    unsafe {
        if _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_UNORD_Q>(low.0, high.0)) == 0 {
            return value;
        }
        let only = |register: F32x8| {
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(register.0, register.0);
            F32x8(_mm256_blendv_ps(register.0, _mm256_set1_ps(f32::NAN), nan))
        };
        Twice(only(low), only(high))
    }
}

/// # Safety
/// As [`Lanes::load_acc`] of a group of sixteen.
#[inline(always)]
unsafe fn load_slots(slots: *const f32, slot: usize) -> Both {
    // SAFETY: as above; the caller vouches for sixteen slots.
    unsafe { Twice(F32x8(_mm256_loadu_ps(slots.add(slot))), F32x8(_mm256_loadu_ps(slots.add(slot + 8)))) }
}

/// # Safety
/// As [`Lanes::store_acc`] of a group of sixteen.
#[inline(always)]
unsafe fn store_slots(slots: *mut f32, slot: usize, value: Both) {
    // SAFETY: as above; the caller vouches for sixteen slots.
    unsafe {
        _mm256_storeu_ps(slots.add(slot), value.0.0);
        _mm256_storeu_ps(slots.add(slot + 8), value.1.0);
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
