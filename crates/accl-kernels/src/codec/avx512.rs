//! The loops of `avx2.rs` in vectors of 64 bytes: 64 elements at a time. A table in a register decodes levels of up to
//! 5 bits. Buckets of less than 64 elements, and the rest of other buckets, are left to `avx2.rs`.

use std::arch::x86_64::{
    __m512, __m512i, _mm_cvtsi32_si128, _mm_loadu_si128, _mm_storeu_si128, _mm256_storeu_si256, _mm512_castsi512_si256,
    _mm512_cvtepi16_epi8, _mm512_cvtepi32_epi8, _mm512_cvtepi32_ps, _mm512_cvtepu8_epi32, _mm512_fmadd_ps,
    _mm512_mask_storeu_epi8, _mm512_permutex2var_ps, _mm512_permutexvar_epi16, _mm512_permutexvar_epi32,
    _mm512_permutexvar_ps, _mm512_setr_epi32, _mm512_srlv_epi32, _mm512_storeu_si512, _mm512_test_epi8_mask,
};
// Instructions that differ only in width get the same name.
use std::arch::x86_64::{
    _mm512_add_epi8 as add_epi8, _mm512_add_epi16 as add_epi16, _mm512_add_epi32 as add_epi32, _mm512_add_ps as add_ps,
    _mm512_and_si512 as and_si, _mm512_broadcast_i32x4 as broadcast_128, _mm512_castps_si512 as castps_si,
    _mm512_cvtps_epi32 as cvtps_epi32, _mm512_loadu_ps as loadu_ps, _mm512_loadu_si512 as loadu_si,
    _mm512_madd_epi16 as madd_epi16, _mm512_maddubs_epi16 as maddubs_epi16, _mm512_max_epi32 as max_epi32,
    _mm512_max_epu32 as max_epu32, _mm512_min_epu8 as min_epu8, _mm512_min_epu32 as min_epu32, _mm512_mul_ps as mul_ps,
    _mm512_mulhi_epu16 as mulhi_epu16, _mm512_mullo_epi32 as mullo_epi32, _mm512_or_si512 as or_si,
    _mm512_packus_epi16 as packus_epi16, _mm512_packus_epi32 as packus_epi32,
    _mm512_reduce_max_epi32 as reduce_max_epi32, _mm512_reduce_max_epu32 as reduce_max_epu32,
    _mm512_reduce_min_epu32 as reduce_min_epu32, _mm512_set1_epi8 as set1_epi8, _mm512_set1_epi16 as set1_epi16,
    _mm512_set1_epi32 as set1_epi32, _mm512_set1_epi64 as set1_epi64, _mm512_set1_ps as set1_ps,
    _mm512_shuffle_epi8 as shuffle_epi8, _mm512_sllv_epi32 as sllv_epi32, _mm512_srl_epi16 as srl_epi16,
    _mm512_srl_epi64 as srl_epi64, _mm512_srli_epi16 as srli_epi16, _mm512_srli_epi32 as srli_epi32,
    _mm512_storeu_ps as storeu_ps, _mm512_sub_epi8 as sub_epi8, _mm512_sub_ps as sub_ps,
    _mm512_unpackhi_epi8 as unpackhi_epi8, _mm512_unpacklo_epi8 as unpacklo_epi8, _mm512_xor_si512 as xor_si,
};
use std::hint::black_box;
use std::mem::{self, MaybeUninit};
use std::slice;

use super::avx2;
use super::groups::{
    Greatest, Source, bits_of_codes, bytes_of_codes, bytes_of_words, fours_in_quarters, groups, prefetch,
};
use super::loops::{Buckets, Grid, Loops, Range, Scale, by_bits};
use super::rng::{FACTORS, Narrow, RandomBits, SHARE, Stream};

/// Elements whose codes fill a vector.
const GROUP: usize = 64;
/// Floats in a vector.
const LANES: usize = 16;

groups!(
    avx2,
    __m512,
    __m512i,
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
);

/// Writes 64 codes as `BITS` bits each. It may write arbitrary bytes after them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn pack<const BITS: usize>(dst: &mut [u8], codes: __m512i) {
    // A code of more than `BITS` bits would damage its neighbours.
    debug_assert_eq!(_mm512_test_epi8_mask(codes, set1_epi8(!(0xffu8 >> (8 - BITS)) as i8)), 0, "codes of {BITS} bits");
    if BITS == 1 {
        let bits = _mm512_test_epi8_mask(codes, set1_epi8(1));
        dst[..8].copy_from_slice(&bits.to_le_bytes());
        return;
    }
    if BITS == 8 {
        // SAFETY: the slice has room for 64 bytes, checked by the slicing.
        unsafe { _mm512_storeu_si512(dst[..GROUP].as_mut_ptr().cast(), codes) };
        return;
    }
    let pairs = pairs::<BITS>(codes);
    if BITS == 4 {
        // SAFETY: the slice has room for 32 bytes, checked by the slicing.
        unsafe { _mm256_storeu_si256(dst[..GROUP / 2].as_mut_ptr().cast(), _mm512_cvtepi16_epi8(pairs)) };
        return;
    }
    let fours = fours::<BITS>(pairs);
    if BITS == 2 {
        // SAFETY: the slice has room for 16 bytes, checked by the slicing.
        unsafe { _mm_storeu_si128(dst[..GROUP / 4].as_mut_ptr().cast(), _mm512_cvtepi32_epi8(fours)) };
        return;
    }
    let eights = eights::<BITS>(fours);
    // Moves the bytes of the packed words next to each other in each quarter, then as 16-bit words in the whole vector.
    const BYTES: [[i8; 16]; 9] = bytes_of_words();
    const WORDS: [[u16; 32]; 9] = words_of_quarters();
    // SAFETY: a row of the first table has 16 bytes, a row of the second 64.
    let [from, words] =
        unsafe { [broadcast_128(_mm_loadu_si128(BYTES[BITS].as_ptr().cast())), loadu_si(WORDS[BITS].as_ptr().cast())] };
    let bytes = _mm512_permutexvar_epi16(words, shuffle_epi8(eights, from));
    let most = if BITS == 3 { 32 } else { 64 };
    if dst.len() < most {
        let dst = dst[..8 * BITS].as_mut_ptr();
        // SAFETY: the slice has room for `8 * BITS` bytes, as many as the mask has bits.
        unsafe { _mm512_mask_storeu_epi8(dst.cast(), !(u64::MAX << (8 * BITS)), bytes) };
    } else if BITS == 3 {
        // SAFETY: `dst` has at least 32 bytes.
        unsafe { _mm256_storeu_si256(dst.as_mut_ptr().cast(), _mm512_castsi512_si256(bytes)) };
    } else {
        // SAFETY: `dst` has at least 64 bytes.
        unsafe { _mm512_storeu_si512(dst.as_mut_ptr().cast(), bytes) };
    }
}

/// Returns, for each number of bits, the positions of that many words of each quarter of a vector, one quarter after
/// the other. The words after them are not stored; their positions are arbitrary and refer to the first word.
const fn words_of_quarters() -> [[u16; 32]; 9] {
    let mut all = [[0; 32]; 9];
    let mut bits = 1;
    while bits < 8 {
        let mut word = 0;
        while word < 4 * bits {
            all[bits][word] = (word / bits * 8 + word % bits) as u16;
            word += 1;
        }
        bits += 1;
    }
    all
}

/// The values of the levels of a bucket.
#[derive(Clone, Copy)]
struct Values<const BITS: usize> {
    unit: __m512,
    min: __m512,
    /// The values of the lowest 32 levels, repeated if there are fewer levels.
    table: [__m512; 2],
}

impl<const BITS: usize> Values<BITS> {
    /// Maximum bits for which registers hold all values.
    const MOST_IN_TABLE: usize = 5;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn new(Scale { unit, min }: Scale) -> Self {
        let (unit, min) = (set1_ps(unit), set1_ps(min));
        let index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        let table = [index, add_epi32(index, set1_epi32(16))].map(|index| {
            let levels = and_si(index, set1_epi32((1 << BITS) - 1));
            _mm512_fmadd_ps(unit, _mm512_cvtepi32_ps(levels), min)
        });
        Self { unit, min, table }
    }

    /// Returns the values of the first sixteen codes.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn of(self, src: &[u8]) -> __m512 {
        const { assert!(BITS <= 8) };
        // SAFETY: the slice has sixteen bytes, checked by the slicing.
        let bytes = unsafe { _mm_loadu_si128(src[..16].as_ptr().cast()) };
        let levels = if BITS == 8 {
            _mm512_cvtepu8_epi32(bytes)
        } else {
            // Takes the two bytes that hold a code, and shifts them down by the offset of its first bit.
            const FROM: [[i8; 64]; 8] = bytes_of_codes();
            const BY: [[u32; 16]; 8] = bits_of_codes();
            // SAFETY: a row of each table has 64 bytes.
            let [from, by] = unsafe { [loadu_si(FROM[BITS].as_ptr().cast()), loadu_si(BY[BITS].as_ptr().cast())] };
            _mm512_srlv_epi32(shuffle_epi8(broadcast_128(bytes), from), by)
        };
        // A table is indexed by the lowest bits of a word, so higher bits need not be cleared.
        if BITS < Self::MOST_IN_TABLE {
            return _mm512_permutexvar_ps(levels, self.table[0]);
        }
        if BITS == Self::MOST_IN_TABLE {
            return _mm512_permutex2var_ps(self.table[0], levels, self.table[1]);
        }
        let levels = if BITS == 8 { levels } else { and_si(levels, set1_epi32((1 << BITS) - 1)) };
        _mm512_fmadd_ps(self.unit, _mm512_cvtepi32_ps(levels), self.min)
    }
}

/// Puts the result of packing in order. Packing works within quarters of a vector, so groups of four are out of order.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn ordered(packed: __m512i) -> __m512i {
    _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), packed)
}
