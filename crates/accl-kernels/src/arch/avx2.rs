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
use std::marker::PhantomData;
use std::mem::MaybeUninit;

use super::{Arch, Isa, ReduceKernels, Row, ScaleKernels, arch};
use crate::reduce::lanes::{ArithReg, Bf16, FloatLanes, FloatReg, Lanes, LastOn, OpOn, OrderReg, Twice};
use crate::reduce::{loops, select};

arch!(
    Avx2,
    By16<F16x1>,
    By16<Bf16>,
    "avx2+f16c",
    || !cfg!(miri) && is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c"),
    #[target_feature(enable = "avx2,f16c")]
);

/// How far ahead memory is asked for: between two loads lies so much to calculate that the processor alone sees too few.
const AHEAD_BYTES: usize = 1 << 10;

/// Sixteen elements of 16 bits in memory, as float32 in two registers. `T` is the type of one.
pub(super) struct By16<T>(PhantomData<T>);

/// An element of 16 bits of which sixteen are converted at once.
pub(super) trait Wide: Lanes<Acc = f32> {
    /// # Safety
    /// 32 bytes can be read at `src`.
    unsafe fn load_16(src: *const u8) -> Both;
    /// Rounds to nearest even; a NaN is canonical already.
    ///
    /// # Safety
    /// 32 bytes can be written at `dst`.
    unsafe fn store_16(dst: *mut u8, value: Both);
}

#[derive(Clone, Copy)]
pub(super) struct F32x8(__m256);

type Both = Twice<F32x8>;

// Each method below is inlined into a function of this file or of `avx512.rs`, which is called only where AVX2 and F16C
// are available. `SAFETY: as above` refers to this.

impl<T: Wide> Lanes for By16<T> {
    const COUNT: usize = 16;
    const SIZE_BYTES: usize = 2;
    type Acc = f32;
    type Reg = Both;
    type Tail = T;

    #[inline(always)]
    unsafe fn load(src: *const u8) -> Both {
        // SAFETY: the caller vouches for 32 bytes; an address is only a hint to a prefetch.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(src.wrapping_add(AHEAD_BYTES).cast());
            T::load_16(src)
        }
    }

    #[inline(always)]
    unsafe fn store(dst: *mut u8, value: Both) {
        // SAFETY: the caller vouches for 32 bytes.
        unsafe { T::store_16(dst, canonical(value)) };
    }

    #[inline(always)]
    unsafe fn load_acc(slots: *const f32, slot: usize) -> Both {
        // SAFETY: as above; the caller vouches for sixteen slots.
        unsafe { Twice(F32x8(_mm256_loadu_ps(slots.add(slot))), F32x8(_mm256_loadu_ps(slots.add(slot + 8)))) }
    }

    #[inline(always)]
    unsafe fn store_acc(slots: *mut f32, slot: usize, value: Both) {
        // SAFETY: as above; the caller vouches for sixteen slots.
        unsafe {
            _mm256_storeu_ps(slots.add(slot), value.0.0);
            _mm256_storeu_ps(slots.add(slot + 8), value.1.0);
        }
    }
}

impl Wide for F16x1 {
    #[inline(always)]
    unsafe fn load_16(src: *const u8) -> Both {
        // SAFETY: as above; the caller vouches for 32 bytes.
        unsafe {
            let low = _mm256_cvtph_ps(_mm_loadu_si128(src.cast()));
            Twice(F32x8(low), F32x8(_mm256_cvtph_ps(_mm_loadu_si128(src.add(16).cast()))))
        }
    }

    #[inline(always)]
    unsafe fn store_16(dst: *mut u8, Twice(low, high): Both) {
        // SAFETY: as above; the caller vouches for 32 bytes.
        unsafe {
            _mm_storeu_si128(dst.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(low.0));
            _mm_storeu_si128(dst.add(16).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(high.0));
        }
    }
}

/// As pairs in 32-bit words: the lower ones of all words in one register, the upper ones in the other.
impl Wide for Bf16 {
    #[inline(always)]
    unsafe fn load_16(src: *const u8) -> Both {
        // SAFETY: as above; the caller vouches for 32 bytes.
        unsafe {
            let words = _mm256_loadu_si256(src.cast());
            let upper = _mm256_and_si256(words, _mm256_set1_epi32(0xffff_0000_u32 as i32));
            let (low, high) = (_mm256_slli_epi32::<16>(words), upper);
            Twice(F32x8(_mm256_castsi256_ps(low)), F32x8(_mm256_castsi256_ps(high)))
        }
    }

    /// On the kept halves and the dropped halves of all sixteen at once.
    #[inline(always)]
    unsafe fn store_16(dst: *mut u8, Twice(low, high): Both) {
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
