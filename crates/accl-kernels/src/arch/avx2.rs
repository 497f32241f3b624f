//! AVX2: 32-byte vectors. float16 is converted by F16C, bfloat16 by shifts of whole vectors.

use std::arch::x86_64::{
    __m256, __m256d, _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _MM_HINT_T0, _mm_cvtph_ps, _mm_cvtps_ph,
    _mm_cvtsi32_si128, _mm_cvtsi128_si32, _mm_cvtss_f32, _mm_loadu_si128, _mm_prefetch, _mm_set_ss, _mm_storeu_si128,
    _mm256_add_epi16, _mm256_add_pd, _mm256_add_ps, _mm256_addsub_pd, _mm256_addsub_ps, _mm256_and_pd, _mm256_and_ps,
    _mm256_and_si256, _mm256_andnot_si256, _mm256_blend_epi16, _mm256_blendv_pd, _mm256_blendv_ps, _mm256_castps_si256,
    _mm256_castsi256_ps, _mm256_cmp_pd, _mm256_cmp_ps, _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_div_pd, _mm256_div_ps,
    _mm256_loadu_pd, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_max_pd, _mm256_max_ps, _mm256_min_pd, _mm256_min_ps,
    _mm256_movedup_pd, _mm256_movehdup_ps, _mm256_moveldup_ps, _mm256_movemask_ps, _mm256_mul_pd, _mm256_mul_ps,
    _mm256_or_pd, _mm256_or_ps, _mm256_permute_pd, _mm256_permute_ps, _mm256_set1_epi16, _mm256_set1_epi32,
    _mm256_set1_pd, _mm256_set1_ps, _mm256_slli_epi32, _mm256_srli_epi16, _mm256_srli_epi32, _mm256_storeu_pd,
    _mm256_storeu_ps, _mm256_storeu_si256, _mm256_subs_epu16,
};
use std::marker::PhantomData;

use super::row::{Row, arch};
use crate::codec::avx2::{narrow_bf16, sum_bf16, with_vectors};
use crate::codec::loops::{Loops, codec_loops};
use crate::isa::{Arch, Isa, ReduceKernels, ScaleKernel};
use crate::reduce::lanes::{
    ArithReg, Bf16, Complex, FloatLanes, FloatReg, Lanes, LastOn, OpOn, OrderReg, Regs, Unrolled,
};
use crate::reduce::{loops, select};

arch!(
    Avx2,
    Unrolled<By16<F16x1>, 2>,
    Unrolled<By16<Bf16>, 2>,
    Unrolled<F32x8, 2>,
    Unrolled<F64x4, 2>,
    Unrolled<ByParts<F32x8>, 2>,
    Unrolled<ByParts<F64x4>, 2>,
    Loops { narrow_bf16, sum_bf16, ..with_vectors(LOOPS) },
    "avx2+f16c",
    || !cfg!(miri) && is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") && is_x86_feature_detected!("fma"),
    #[target_feature(enable = "avx2,f16c,fma")]
);

/// Distance of prefetches in bytes. There is so much to calculate between two loads that the processor by itself looks
/// ahead too little.
const AHEAD_BYTES: usize = 1 << 10;

#[inline(always)]
fn prefetch(src: *const u8) {
    // SAFETY: a prefetch accepts any address, which is only a hint.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(src.wrapping_add(AHEAD_BYTES).cast()) };
}

/// Sixteen elements of 16 bits in memory, as float32 in two registers. `T` is the type of one element.
pub(super) struct By16<T>(PhantomData<T>);

/// An element of 16 bits, of which sixteen are converted at once.
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

type Both = Regs<F32x8, 2>;

// Instruction sets: each method below is inlined into a function of this file or of `avx512.rs`. These functions are
// called only after `Isa::check_available`, or a check in `Isa::best`, has found AVX2 and F16C.

impl<T: Wide> Lanes for By16<T> {
    const COUNT: usize = 16;
    const SIZE_BYTES: usize = 2;
    type Acc = f32;
    type Reg = Both;
    type Tail = T;

    #[inline(always)]
    fn prefetch(src: *const u8) {
        prefetch(src);
    }

    #[inline(always)]
    unsafe fn load(src: *const u8) -> Both {
        // SAFETY: 32 bytes can be read at `src`, by the contract of `Lanes::load`.
        unsafe { T::load_16(src) }
    }

    #[inline(always)]
    unsafe fn store(dst: *mut u8, value: Both) {
        // SAFETY: 32 bytes can be written at `dst`, by the contract of `Lanes::store`.
        unsafe { T::store_16(dst, canonical(value)) };
    }

    #[inline(always)]
    unsafe fn load_acc(slots: *const f32, slot: usize) -> Both {
        // SAFETY: the contract of `Lanes::load_acc` is the same for the group.
        unsafe { Unrolled::<F32x8, 2>::load_acc(slots, slot) }
    }

    #[inline(always)]
    unsafe fn store_acc(slots: *mut f32, slot: usize, value: Both) {
        // SAFETY: the contract of `Lanes::store_acc` is the same for the group.
        unsafe { Unrolled::<F32x8, 2>::store_acc(slots, slot, value) };
    }
}

impl Wide for F16x1 {
    #[inline(always)]
    unsafe fn load_16(src: *const u8) -> Both {
        // SAFETY: 32 bytes can be read at `src`, by the contract of `Wide::load_16`; AVX2 and F16C are available.
        unsafe {
            let low = _mm256_cvtph_ps(_mm_loadu_si128(src.cast()));
            Regs([F32x8(low), F32x8(_mm256_cvtph_ps(_mm_loadu_si128(src.add(16).cast())))])
        }
    }

    #[inline(always)]
    unsafe fn store_16(dst: *mut u8, Regs([low, high]): Both) {
        // SAFETY: 32 bytes can be written at `dst`, by the contract of `Wide::store_16`; AVX2 and F16C are available.
        unsafe {
            _mm_storeu_si128(dst.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(low.0));
            _mm_storeu_si128(dst.add(16).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(high.0));
        }
    }
}

/// Loads pairs of elements as 32-bit words: the lower elements of all words in one register, the upper elements in the
/// other.
impl Wide for Bf16 {
    #[inline(always)]
    unsafe fn load_16(src: *const u8) -> Both {
        // SAFETY: 32 bytes can be read at `src`, by the contract of `Wide::load_16`; AVX2 is available.
        unsafe {
            let words = _mm256_loadu_si256(src.cast());
            let upper = _mm256_and_si256(words, _mm256_set1_epi32(0xffff_0000_u32 as i32));
            let (low, high) = (_mm256_slli_epi32::<16>(words), upper);
            Regs([F32x8(_mm256_castsi256_ps(low)), F32x8(_mm256_castsi256_ps(high))])
        }
    }

    /// Rounds the kept halves with the dropped halves of all sixteen elements at once.
    #[inline(always)]
    unsafe fn store_16(dst: *mut u8, Regs([low, high]): Both) {
        // SAFETY: 32 bytes can be written at `dst`, by the contract of `Wide::store_16`; AVX2 is available.
        unsafe {
            let (low, high) = (_mm256_castps_si256(low.0), _mm256_castps_si256(high.0));
            let kept = _mm256_blend_epi16::<0b1010_1010>(_mm256_srli_epi32::<16>(low), high);
            let dropped = _mm256_blend_epi16::<0b1010_1010>(low, _mm256_slli_epi32::<16>(high));
            // Round up if more than half is dropped, or exactly half while the kept half is odd. Subtracting one for an
            // even kept half turns both cases into one comparison, with the topmost bit.
            let even = _mm256_andnot_si256(kept, _mm256_set1_epi16(1));
            let carry = _mm256_srli_epi16::<15>(_mm256_subs_epu16(dropped, even));
            _mm256_storeu_si256(dst.cast(), _mm256_add_epi16(kept, carry));
        }
    }
}

/// Makes every NaN canonical. Usually there is none, and one comparison of both registers shows that.
#[inline(always)]
fn canonical(value: Both) -> Both {
    let Regs([low, high]) = value;
    // SAFETY: AVX2 is available; no memory is accessed.
    unsafe {
        if _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_UNORD_Q>(low.0, high.0)) == 0 {
            return value;
        }
    }
    Regs([low.canonical(), high.canonical()])
}

/// One float16, converted by the same instructions as sixteen.
pub(super) struct F16x1;

impl Lanes for F16x1 {
    const COUNT: usize = 1;
    const SIZE_BYTES: usize = 2;
    type Acc = f32;
    type Reg = f32;
    type Tail = F16x1;

    #[inline(always)]
    unsafe fn load(src: *const u8) -> f32 {
        // SAFETY: two bytes can be read at `src`, by the contract of `Lanes::load`; F16C is available.
        unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(src.cast::<u16>().read_unaligned().into()))) }
    }

    #[inline(always)]
    unsafe fn store(dst: *mut u8, value: f32) {
        let canonical = if value.is_nan() { f32::NAN } else { value };
        // SAFETY: two bytes can be written at `dst`, by the contract of `Lanes::store`; F16C is available.
        unsafe {
            let half = _mm_cvtsi128_si32(_mm_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm_set_ss(canonical)));
            dst.cast::<u16>().write_unaligned(half as u16);
        }
    }

    #[inline(always)]
    unsafe fn load_acc(slots: *const f32, slot: usize) -> f32 {
        // SAFETY: the accumulator at `slot` was written, by the contract of `Lanes::load_acc`.
        unsafe { slots.add(slot).read() }
    }

    #[inline(always)]
    unsafe fn store_acc(slots: *mut f32, slot: usize, value: f32) {
        // SAFETY: `slots` has room for an accumulator at `slot`, by the contract of `Lanes::store_acc`.
        unsafe { slots.add(slot).write(value) };
    }
}

/// A vector of `$count` floats with the operations that `reduce/lanes.rs` defines for one `$float`.
macro_rules! floats {
    ($name:ident: $vector:ty, $count:literal of $float:ident, $load:ident $store:ident $all:ident $add:ident $mul:ident
        $div:ident $min:ident $max:ident $and:ident $or:ident $unordered:ident $blend:ident) => {
        #[derive(Clone, Copy)]
        pub(super) struct $name($vector);

        impl Lanes for $name {
            const COUNT: usize = $count;
            const SIZE_BYTES: usize = size_of::<$float>();
            type Acc = $float;
            type Reg = $name;
            type Tail = $float;

            #[inline(always)]
            fn prefetch(src: *const u8) {
                prefetch(src);
            }

            #[inline(always)]
            unsafe fn load(src: *const u8) -> Self {
                // SAFETY: 32 bytes can be read at `src`, by the contract of `Lanes::load`; AVX2 is available.
                $name(unsafe { $load(src.cast()) })
            }

            #[inline(always)]
            unsafe fn store(dst: *mut u8, value: Self) {
                // SAFETY: 32 bytes can be written at `dst`, by the contract of `Lanes::store`; AVX2 is available.
                unsafe { $store(dst.cast(), value.canonical().0) };
            }

            #[inline(always)]
            unsafe fn load_acc(slots: *const $float, slot: usize) -> Self {
                // SAFETY: a vector of accumulators was written at `slot`, by the contract of `Lanes::load_acc`; AVX2 is
                // available.
                $name(unsafe { $load(slots.add(slot)) })
            }

            #[inline(always)]
            unsafe fn store_acc(slots: *mut $float, slot: usize, value: Self) {
                // SAFETY: there is room for a vector of accumulators at `slot`, by the contract of `Lanes::store_acc`;
                // AVX2 is available.
                unsafe { $store(slots.add(slot), value.0) };
            }
        }

        impl $name {
            /// Makes every NaN canonical.
            #[inline(always)]
            fn canonical(self) -> Self {
                // SAFETY: AVX2 is available; no memory is accessed.
                unsafe {
                    let nan = $unordered::<_CMP_UNORD_Q>(self.0, self.0);
                    $name($blend(self.0, $all($float::NAN), nan))
                }
            }
        }

        impl ArithReg for $name {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                // SAFETY: AVX2 is available; no memory is accessed.
                $name(unsafe { $add(self.0, other.0) })
            }

            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                // SAFETY: AVX2 is available; no memory is accessed.
                $name(unsafe { $mul(self.0, other.0) })
            }
        }

        // The instructions min and max return their second operand if the operands are equal or unordered, like the
        // selects in `lanes.rs`.
        impl OrderReg for $name {
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                // SAFETY: AVX2 is available; no memory is accessed.
                $name(unsafe { $or($min(self.0, other.0), $min(other.0, self.0)) })
            }

            #[inline(always)]
            fn max(self, other: Self) -> Self {
                // SAFETY: AVX2 is available; no memory is accessed.
                unsafe {
                    let ordered = $and($max(self.0, other.0), $max(other.0, self.0));
                    // All ones for unordered operands, which is a NaN.
                    $name($or(ordered, $unordered::<_CMP_UNORD_Q>(self.0, other.0)))
                }
            }
        }

        impl FloatReg for $name {
            #[inline(always)]
            fn div_scalar(self, divisor: f64) -> Self {
                // SAFETY: AVX2 is available; no memory is accessed.
                $name(unsafe { $div(self.0, $all(divisor as $float)) })
            }

            #[inline(always)]
            fn mul_scalar(self, factor: f64) -> Self {
                // SAFETY: AVX2 is available; no memory is accessed.
                $name(unsafe { $mul(self.0, $all(factor as $float)) })
            }
        }
    };
}

floats!(F32x8: __m256, 8 of f32, _mm256_loadu_ps _mm256_storeu_ps _mm256_set1_ps _mm256_add_ps _mm256_mul_ps
    _mm256_div_ps _mm256_min_ps _mm256_max_ps _mm256_and_ps _mm256_or_ps _mm256_cmp_ps _mm256_blendv_ps);
floats!(F64x4: __m256d, 4 of f64, _mm256_loadu_pd _mm256_storeu_pd _mm256_set1_pd _mm256_add_pd _mm256_mul_pd
    _mm256_div_pd _mm256_min_pd _mm256_max_pd _mm256_and_pd _mm256_or_pd _mm256_cmp_pd _mm256_blendv_pd);

/// A vector of complex numbers: real and imaginary part of each number lie next to each other.
#[derive(Clone, Copy)]
pub(super) struct ByParts<V>(V);

/// Floats that can be used as the parts of complex numbers.
pub(super) trait ComplexPart: Lanes<Reg = Self> + ArithReg {
    type Complex: Lanes<Acc = Self::Complex> + Copy;

    fn complex_mul(self, other: Self) -> Self;
}

impl<V: ComplexPart> Lanes for ByParts<V> {
    const COUNT: usize = V::COUNT / 2;
    const SIZE_BYTES: usize = 2 * V::SIZE_BYTES;
    type Acc = V::Complex;
    type Reg = Self;
    type Tail = V::Complex;

    #[inline(always)]
    fn prefetch(src: *const u8) {
        V::prefetch(src);
    }

    #[inline(always)]
    unsafe fn load(src: *const u8) -> Self {
        // SAFETY: the contract of `Lanes::load` is the same for the parts, which are as many bytes.
        ByParts(unsafe { V::load(src) })
    }

    #[inline(always)]
    unsafe fn store(dst: *mut u8, value: Self) {
        // SAFETY: the contract of `Lanes::store` is the same for the parts, which are as many bytes.
        unsafe { V::store(dst, value.0) };
    }

    // A complex number in memory consists of its two parts.
    #[inline(always)]
    unsafe fn load_acc(slots: *const V::Complex, slot: usize) -> Self {
        // SAFETY: a vector of parts was written from `slot` on, by the contract of `Lanes::load_acc`.
        ByParts(unsafe { V::load_acc(slots.add(slot).cast(), 0) })
    }

    #[inline(always)]
    unsafe fn store_acc(slots: *mut V::Complex, slot: usize, value: Self) {
        // SAFETY: from `slot` on there is room for a vector of parts, by the contract of `Lanes::store_acc`.
        unsafe { V::store_acc(slots.add(slot).cast(), 0, value.0) };
    }
}

impl<V: ComplexPart> ArithReg for ByParts<V> {
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        ByParts(self.0.add(other.0))
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        ByParts(self.0.complex_mul(other.0))
    }
}

impl ComplexPart for F32x8 {
    type Complex = Complex<f32>;

    #[inline(always)]
    fn complex_mul(self, other: Self) -> Self {
        // SAFETY: AVX2 is available; no memory is accessed.
        unsafe {
            let by_real = _mm256_mul_ps(self.0, _mm256_moveldup_ps(other.0));
            let by_imaginary = _mm256_mul_ps(_mm256_permute_ps::<0b10_11_00_01>(self.0), _mm256_movehdup_ps(other.0));
            F32x8(_mm256_addsub_ps(by_real, by_imaginary))
        }
    }
}

impl ComplexPart for F64x4 {
    type Complex = Complex<f64>;

    #[inline(always)]
    fn complex_mul(self, other: Self) -> Self {
        // SAFETY: AVX2 is available; no memory is accessed.
        unsafe {
            let by_real = _mm256_mul_pd(self.0, _mm256_movedup_pd(other.0));
            let by_imaginary = _mm256_mul_pd(_mm256_permute_pd::<0b0101>(self.0), _mm256_permute_pd::<0b1111>(other.0));
            F64x4(_mm256_addsub_pd(by_real, by_imaginary))
        }
    }
}
