//! Replacements for those loops of `loops.rs` that the compiler vectorises less well: from floats to packed codes and
//! back without a detour through memory.

use std::arch::x86_64::{
    __m256, __m256i, _CMP_UNORD_Q, _mm_cvtsi32_si128, _mm_cvtsi128_si32, _mm_loadl_epi64, _mm_loadu_si128,
    _mm_max_epi32, _mm_shuffle_epi32, _mm_storeu_si128, _mm_unpackhi_epi64, _mm256_blendv_epi8,
    _mm256_broadcastq_epi64, _mm256_castsi256_ps, _mm256_castsi256_si128, _mm256_cmp_ps, _mm256_cvtepi32_ps,
    _mm256_cvtepu8_epi32, _mm256_cvtepu16_epi32, _mm256_div_ps, _mm256_extracti128_si256, _mm256_fmadd_ps,
    _mm256_movemask_epi8, _mm256_movemask_ps, _mm256_permute4x64_epi64, _mm256_permutevar8x32_epi32, _mm256_setr_epi32,
    _mm256_slli_epi16, _mm256_slli_epi32, _mm256_srlv_epi32, _mm256_storeu_si256, _mm256_testz_si256,
};
// Instructions that differ only in width get the same name.
use std::arch::x86_64::{
    _mm256_add_epi8 as add_epi8, _mm256_add_epi16 as add_epi16, _mm256_add_epi32 as add_epi32, _mm256_add_ps as add_ps,
    _mm256_and_si256 as and_si, _mm256_broadcastsi128_si256 as broadcast_128, _mm256_castps_si256 as castps_si,
    _mm256_cvtps_epi32 as cvtps_epi32, _mm256_loadu_ps as loadu_ps, _mm256_loadu_si256 as loadu_si,
    _mm256_madd_epi16 as madd_epi16, _mm256_maddubs_epi16 as maddubs_epi16, _mm256_max_epi32 as max_epi32,
    _mm256_max_epu32 as max_epu32, _mm256_min_epu8 as min_epu8, _mm256_min_epu32 as min_epu32, _mm256_mul_ps as mul_ps,
    _mm256_mulhi_epu16 as mulhi_epu16, _mm256_mullo_epi32 as mullo_epi32, _mm256_or_si256 as or_si,
    _mm256_packus_epi16 as packus_epi16, _mm256_packus_epi32 as packus_epi32, _mm256_set1_epi8 as set1_epi8,
    _mm256_set1_epi16 as set1_epi16, _mm256_set1_epi32 as set1_epi32, _mm256_set1_epi64x as set1_epi64,
    _mm256_set1_ps as set1_ps, _mm256_shuffle_epi8 as shuffle_epi8, _mm256_sllv_epi32 as sllv_epi32,
    _mm256_srl_epi16 as srl_epi16, _mm256_srl_epi64 as srl_epi64, _mm256_srli_epi16 as srli_epi16,
    _mm256_srli_epi32 as srli_epi32, _mm256_storeu_ps as storeu_ps, _mm256_sub_epi8 as sub_epi8,
    _mm256_sub_ps as sub_ps, _mm256_unpackhi_epi8 as unpackhi_epi8, _mm256_unpacklo_epi8 as unpacklo_epi8,
    _mm256_xor_si256 as xor_si,
};
use std::hint::black_box;
use std::mem::{self, MaybeUninit};
use std::slice;

use super::groups::{
    Greatest, Source, bits_of_codes, bytes_of_codes, bytes_of_words, fours_in_quarters, groups, prefetch,
};
use super::loops::{self, Buckets, Grid, Loops, Range, Scale, by_bits};
use super::rng::{FACTORS, Narrow, RandomBits, SHARE, Stream};
use super::traits::Sums;
use crate::reduce::float16;

/// Elements whose codes fill a vector.
const GROUP: usize = 32;
/// Floats in a vector.
const LANES: usize = 8;

groups!(
    loops,
    __m256,
    __m256i,
    #[target_feature(enable = "avx2,fma")]
);

/// Returns the greatest of eight numbers.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn reduce_max_epi32(numbers: __m256i) -> i32 {
    let four = _mm_max_epi32(_mm256_castsi256_si128(numbers), _mm256_extracti128_si256::<1>(numbers));
    let two = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
    _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32::<1>(two)))
}

/// Returns the greatest of eight unsigned numbers. With the highest bit flipped they have the order of signed numbers.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn reduce_max_epu32(numbers: __m256i) -> u32 {
    (reduce_max_epi32(xor_si(numbers, set1_epi32(i32::MIN))) ^ i32::MIN) as u32
}

/// Returns the least of eight unsigned numbers: the complement of the greatest complement.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn reduce_min_epu32(numbers: __m256i) -> u32 {
    !reduce_max_epu32(xor_si(numbers, set1_epi32(-1)))
}

/// Writes 32 codes as `BITS` bits each. It may write arbitrary bytes after them.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn pack<const BITS: usize>(dst: &mut [u8], codes: __m256i) {
    // A code of more than `BITS` bits would damage its neighbours.
    debug_assert_eq!(_mm256_testz_si256(codes, set1_epi8(!(0xffu8 >> (8 - BITS)) as i8)), 1, "codes of {BITS} bits");
    if BITS == 1 {
        let bits = _mm256_movemask_epi8(_mm256_slli_epi16::<7>(codes));
        dst[..4].copy_from_slice(&bits.to_le_bytes());
        return;
    }
    if BITS == 8 {
        // SAFETY: the slice has room for 32 bytes, checked by the slicing.
        unsafe { _mm256_storeu_si256(dst[..GROUP].as_mut_ptr().cast(), codes) };
        return;
    }
    let pairs = pairs::<BITS>(codes);
    if BITS == 4 {
        let bytes = _mm256_permute4x64_epi64::<0b1000>(packus_epi16(pairs, pairs));
        // SAFETY: the slice has room for 16 bytes, checked by the slicing.
        unsafe { _mm_storeu_si128(dst[..GROUP / 2].as_mut_ptr().cast(), _mm256_castsi256_si128(bytes)) };
        return;
    }
    let eights = eights::<BITS>(fours::<BITS>(pairs));
    // Moves the bytes of the packed words next to each other, in each half.
    const FROM: [[i8; 16]; 9] = bytes_of_words();
    // SAFETY: a row of the table has 16 bytes.
    let from = broadcast_128(unsafe { _mm_loadu_si128(FROM[BITS].as_ptr().cast()) });
    let bytes = shuffle_epi8(eights, from);
    let halves = [_mm256_castsi256_si128(bytes), _mm256_extracti128_si256::<1>(bytes)];
    if dst.len() >= 2 * BITS + 16 {
        // SAFETY: `dst` has at least `2 * BITS + 16` bytes, so there are 16 bytes after either address.
        unsafe {
            _mm_storeu_si128(dst.as_mut_ptr().cast(), halves[0]);
            _mm_storeu_si128(dst.as_mut_ptr().add(2 * BITS).cast(), halves[1]);
        }
    } else {
        for (dst, half) in dst.chunks_exact_mut(2 * BITS).zip(halves) {
            let mut bytes = [0u8; 16];
            // SAFETY: `bytes` has 16 bytes.
            unsafe { _mm_storeu_si128(bytes.as_mut_ptr().cast(), half) };
            dst.copy_from_slice(&bytes[..2 * BITS]);
        }
    }
}

/// Does what [`loops::narrow_bf16`] does, sixteen values at a time: the compiler packs eight.
#[target_feature(enable = "avx2,fma")]
pub(crate) fn narrow_bf16(dst: &mut [MaybeUninit<[u8; 2]>], values: &[f32], most: f32) {
    if most.is_finite() {
        return loops::narrow_bf16(dst, values, most);
    }
    const ELEMENTS: usize = 2 * LANES;
    let whole = values.len() - values.len() % ELEMENTS;
    for (dst, values) in dst.chunks_exact_mut(ELEMENTS).zip(values.chunks_exact(ELEMENTS)) {
        // SAFETY: `values` has `ELEMENTS` values, which are two vectors.
        let values = unsafe { [loadu_ps(values.as_ptr()), loadu_ps(values[LANES..].as_ptr())] };
        // SAFETY: `dst` has room for sixteen elements of two bytes.
        unsafe { _mm256_storeu_si256(dst.as_mut_ptr().cast(), upper_halves(rounded(values))) };
    }
    loops::narrow_bf16(&mut dst[whole..], &values[whole..], most);
}

/// Does what [`loops::sum_bf16`] does, and leaves the rest of the elements to it.
///
/// # Safety
/// The contract of [`loops::sum_bf16`].
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn sum_bf16(dst: &mut [[u8; 2]], src: &[[u8; 2]], sums: Sums) {
    const ELEMENTS: usize = loops::SUM_GROUP;
    const { assert!(ELEMENTS == 2 * LANES) };
    let whole = dst.len() - dst.len() % ELEMENTS;
    let groups = dst.chunks_exact_mut(ELEMENTS).zip(src.chunks_exact(ELEMENTS));
    for (at, (dst, src)) in (0..).step_by(ELEMENTS).zip(groups) {
        // SAFETY: `src` has sixteen elements, and there are as many addends by this function's contract.
        let mut values = unsafe {
            [0, LANES].map(|lane| {
                let halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(src[lane..].as_ptr().cast()));
                let addend = loadu_ps(sums.addends.add(at + lane));
                add_ps(addend, _mm256_castsi256_ps(_mm256_slli_epi32::<16>(halves)))
            })
        };
        if let Some(divisor) = sums.divisor {
            values = values.map(|value| _mm256_div_ps(value, set1_ps(divisor)));
        }
        let rounded = rounded(values);
        if let Some(results) = sums.results {
            for (lane, rounded) in [0, LANES].into_iter().zip(rounded) {
                let kept = and_si(rounded, set1_epi32(!0xffff));
                // SAFETY: there is room for as many results, by this function's contract.
                unsafe { _mm256_storeu_si256(results.add(at + lane).cast(), kept) };
            }
        }
        // SAFETY: `dst` has room for sixteen elements of two bytes.
        unsafe { _mm256_storeu_si256(dst.as_mut_ptr().cast(), upper_halves(rounded)) };
    }
    let rest = Sums {
        addends: sums.addends.wrapping_add(whole),
        results: sums.results.map(|results| results.wrapping_add(whole)),
        ..sums
    };
    // SAFETY: `rest` begins after the `whole` elements, so this function's contract covers the remaining ones.
    unsafe { loops::sum_bf16(&mut dst[whole..], &src[whole..], rest) };
}

/// Returns the nearest bfloat16, ties to even, in the upper halves, like
/// [`round_bf16`](crate::reduce::float16::round_bf16).
#[inline]
#[target_feature(enable = "avx2,fma")]
fn rounded(values: [__m256; 2]) -> [__m256i; 2] {
    let rounded = values.map(|value| {
        let bits = castps_si(value);
        let odd = and_si(srli_epi32::<16>(bits), set1_epi32(1));
        add_epi32(bits, add_epi32(odd, set1_epi32(0x7fff)))
    });
    // Rounding would turn a NaN into a number.
    if _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_UNORD_Q>(values[0], values[1])) == 0 {
        return rounded;
    }
    let canonical = set1_epi32((float16::BF16_NAN << 16) as i32);
    let [a, b] = [0, 1].map(|half| {
        let not_a_number = castps_si(_mm256_cmp_ps::<_CMP_UNORD_Q>(values[half], values[half]));
        _mm256_blendv_epi8(rounded[half], canonical, not_a_number)
    });
    [a, b]
}

/// Returns the upper halves of all words, in order.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn upper_halves([a, b]: [__m256i; 2]) -> __m256i {
    // Packing works within halves of a vector, so the parts are put in order.
    _mm256_permute4x64_epi64::<0b11_01_10_00>(packus_epi32(srli_epi32::<16>(a), srli_epi32::<16>(b)))
}

/// The values of the levels of a bucket.
#[derive(Clone, Copy)]
struct Values<const BITS: usize>(Scale);

impl<const BITS: usize> Values<BITS> {
    #[inline(always)]
    fn new(scale: Scale) -> Self {
        Self(scale)
    }

    /// Returns the values of the first eight codes.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn of(self, src: &[u8]) -> __m256 {
        const { assert!(BITS <= 8) };
        // SAFETY: the slice has eight bytes, checked by the slicing.
        let word = unsafe { _mm_loadl_epi64(src[..8].as_ptr().cast()) };
        let levels = if BITS == 8 {
            _mm256_cvtepu8_epi32(word)
        } else {
            // Takes the two bytes that hold a code, and shifts them down by the offset of its first bit.
            const FROM: [[i8; 32]; 8] = bytes_of_codes();
            const BY: [[u32; 8]; 8] = bits_of_codes();
            // SAFETY: a row of each table has 32 bytes.
            let [from, by] = unsafe { [loadu_si(FROM[BITS].as_ptr().cast()), loadu_si(BY[BITS].as_ptr().cast())] };
            let pairs = shuffle_epi8(_mm256_broadcastq_epi64(word), from);
            and_si(_mm256_srlv_epi32(pairs, by), set1_epi32((1 << BITS) - 1))
        };
        let Scale { unit, min } = self.0;
        _mm256_fmadd_ps(set1_ps(unit), _mm256_cvtepi32_ps(levels), set1_ps(min))
    }
}

/// Puts the result of packing in order. Packing works within halves of a vector, so groups of four are out of order.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn ordered(packed: __m256i) -> __m256i {
    _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
}
