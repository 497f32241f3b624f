//! As `avx2.rs`, in vectors of 64 bytes: 64 elements at a time, and levels of up to 5 bits are decoded by a table in a
//! register. Buckets that have no 64 elements, and what is left of others, are for `avx2.rs`.

use std::arch::x86_64::{
    __m128i, __m512, __m512i, _mm_cvtsi32_si128, _mm_loadu_si128, _mm_storeu_si128, _mm256_storeu_si256,
    _mm512_add_epi8, _mm512_add_epi16, _mm512_add_epi32, _mm512_add_ps, _mm512_and_si512, _mm512_broadcast_i32x4,
    _mm512_castps_si512, _mm512_castsi512_si256, _mm512_cvtepi16_epi8, _mm512_cvtepi32_epi8, _mm512_cvtepi32_ps,
    _mm512_cvtepu8_epi32, _mm512_cvtps_epi32, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_madd_epi16,
    _mm512_maddubs_epi16, _mm512_mask_storeu_epi8, _mm512_max_epi32, _mm512_max_epu32, _mm512_min_epu8,
    _mm512_min_epu32, _mm512_mul_ps, _mm512_mulhi_epu16, _mm512_mullo_epi32, _mm512_or_si512, _mm512_packus_epi16,
    _mm512_packus_epi32, _mm512_permutex2var_ps, _mm512_permutexvar_epi16, _mm512_permutexvar_epi32,
    _mm512_permutexvar_ps, _mm512_reduce_max_epi32, _mm512_reduce_max_epu32, _mm512_reduce_min_epu32, _mm512_set1_epi8,
    _mm512_set1_epi16, _mm512_set1_epi32, _mm512_set1_epi64, _mm512_set1_ps, _mm512_setr_epi32, _mm512_shuffle_epi8,
    _mm512_sllv_epi32, _mm512_srl_epi16, _mm512_srl_epi64, _mm512_srli_epi16, _mm512_srli_epi32, _mm512_srlv_epi32,
    _mm512_storeu_ps, _mm512_storeu_si512, _mm512_sub_epi8, _mm512_sub_ps, _mm512_test_epi8_mask, _mm512_unpackhi_epi8,
    _mm512_unpacklo_epi8, _mm512_xor_si512,
};
use std::hint::black_box;
use std::mem::{self, MaybeUninit};
use std::slice;

use super::avx2;
use super::groups::{Greatest, Source, ask_ahead, bits_of_codes, by_bits, bytes_of_words, groups};
use super::loops::{Buckets, Grid, Loops, Range, Scale};
use super::noise::{Draws, FACTORS, Narrow, SHARE, Stream};

/// Elements that make a vector of codes.
const GROUP: usize = 64;
/// Those of a vector of floats.
const LANES: usize = 16;

groups!(
    avx2,
    __m512i,
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
);

/// As [`avx2::range`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn range(values: &[f32]) -> Range {
    let mut groups = values.chunks_exact(GROUP);
    let rest = groups.remainder();
    if groups.len() == 0 {
        return avx2::range(values);
    }
    let (mut signed, mut unsigned) = ([_mm512_set1_epi32(i32::MIN); 4], [_mm512_set1_epi32(0); 4]);
    for group in groups.by_ref() {
        for (part, values) in group.chunks_exact(16).enumerate() {
            let bits = _mm512_castps_si512(load(values));
            signed[part] = _mm512_max_epi32(signed[part], bits);
            unsigned[part] = _mm512_max_epu32(unsigned[part], bits);
        }
    }
    let [a, b, c, d] = signed;
    let signed = _mm512_reduce_max_epi32(_mm512_max_epi32(_mm512_max_epi32(a, b), _mm512_max_epi32(c, d)));
    let [a, b, c, d] = unsigned;
    let unsigned = _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_max_epu32(a, b), _mm512_max_epu32(c, d)));
    let all = Greatest { signed, unsigned }.range(|| least_bits(&values[..values.len() - rest.len()]));
    if rest.is_empty() { all } else { all.joined(avx2::range(rest)) }
}

/// The least of the values' bits.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn least_bits(values: &[f32]) -> u32 {
    let mut least = _mm512_set1_epi32(-1);
    for values in values.chunks_exact(16) {
        least = _mm512_min_epu32(least, _mm512_castps_si512(load(values)));
    }
    _mm512_reduce_min_epu32(least)
}

/// Writes 64 codes as `BITS` bits each, and perhaps anything behind them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn pack<const BITS: usize>(dst: &mut [u8], codes: __m512i) {
    // A greater one would spoil its neighbours.
    debug_assert_eq!(
        _mm512_test_epi8_mask(codes, _mm512_set1_epi8(!(0xffu8 >> (8 - BITS)) as i8)),
        0,
        "codes of {BITS} bits"
    );
    if BITS == 1 {
        let bits = _mm512_test_epi8_mask(codes, _mm512_set1_epi8(1));
        dst[..8].copy_from_slice(&bits.to_le_bytes());
        return;
    }
    if BITS == 8 {
        // SAFETY: the slice has room for 64 bytes.
        unsafe { _mm512_storeu_si512(dst[..GROUP].as_mut_ptr().cast(), codes) };
        return;
    }
    // As in `avx2.rs`: two, then four, then eight codes move together.
    let pairs = if BITS < 7 {
        _mm512_maddubs_epi16(codes, _mm512_set1_epi16(1 | 1 << (8 + BITS)))
    } else {
        let upper = _mm512_srli_epi16::<1>(_mm512_and_si512(codes, _mm512_set1_epi16(0x7f00)));
        _mm512_or_si512(_mm512_and_si512(codes, _mm512_set1_epi16(0xff)), upper)
    };
    if BITS == 4 {
        // SAFETY: the slice has room for 32 bytes.
        unsafe { _mm256_storeu_si256(dst[..GROUP / 2].as_mut_ptr().cast(), _mm512_cvtepi16_epi8(pairs)) };
        return;
    }
    let fours = _mm512_madd_epi16(pairs, _mm512_set1_epi32(1 | 1 << (16 + 2 * BITS)));
    if BITS == 2 {
        // SAFETY: the slice has room for 16 bytes.
        unsafe { _mm_storeu_si128(dst[..GROUP / 4].as_mut_ptr().cast(), _mm512_cvtepi32_epi8(fours)) };
        return;
    }
    let free = 32 - 4 * BITS as i32;
    let upper_parts = _mm512_sllv_epi32(fours, _mm512_set1_epi64(free.into()));
    let eights = _mm512_srl_epi64(upper_parts, _mm_cvtsi32_si128(free));
    // Their bytes follow each other in each quarter, then as words in all of the vector.
    const BYTES: [[i8; 16]; 9] = bytes_of_words();
    const WORDS: [[u16; 32]; 9] = words_of_quarters();
    // SAFETY: a row of the first table has 16 bytes, one of the second 64.
    let [from, words] = unsafe {
        [
            _mm512_broadcast_i32x4(_mm_loadu_si128(BYTES[BITS].as_ptr().cast())),
            _mm512_loadu_si512(WORDS[BITS].as_ptr().cast()),
        ]
    };
    let bytes = _mm512_permutexvar_epi16(words, _mm512_shuffle_epi8(eights, from));
    let most = if BITS == 3 { 32 } else { 64 };
    // SAFETY: there is room for 32 or 64 bytes, or for those that the mask has.
    unsafe {
        if dst.len() < most {
            _mm512_mask_storeu_epi8(dst[..8 * BITS].as_mut_ptr().cast(), !(u64::MAX << (8 * BITS)), bytes);
        } else if BITS == 3 {
            _mm256_storeu_si256(dst.as_mut_ptr().cast(), _mm512_castsi512_si256(bytes));
        } else {
            _mm512_storeu_si512(dst.as_mut_ptr().cast(), bytes);
        }
    }
}

/// For each number of bits, where as many words of each quarter of a vector are; and zeros.
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

/// Those of a stream as they are.
struct Alone(Counters);

impl Source for Alone {
    type Vector = __m512i;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    unsafe fn next(&mut self) -> [__m512i; 2] {
        let (draws, zero) = (self.0.next(), _mm512_set1_epi32(0));
        [_mm512_unpacklo_epi8(draws, zero), _mm512_unpackhi_epi8(draws, zero)]
    }
}

/// Those of a stream in the strata of a rank.
struct Among {
    own: Counters,
    picks: Counters,
    narrow: Narrow,
}

impl Source for Among {
    type Vector = __m512i;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    unsafe fn next(&mut self) -> [__m512i; 2] {
        let Narrow { of_rank, rotations, world, factor, shift } = self.narrow;
        let (picks, half) = (self.picks.next(), _mm512_set1_epi8(0xf));
        // SAFETY: each table has 16 bytes.
        let [strata, rotations] =
            [of_rank, rotations].map(|table| _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(table.as_ptr().cast()) }));
        let strata = _mm512_shuffle_epi8(strata, _mm512_and_si512(picks, half));
        let rotations = _mm512_shuffle_epi8(rotations, _mm512_and_si512(_mm512_srli_epi16::<4>(picks), half));
        let strata = _mm512_add_epi8(strata, rotations);
        // What is less than the world wraps around and is the lesser.
        let strata = _mm512_min_epu8(strata, _mm512_sub_epi8(strata, _mm512_set1_epi8(world as i8)));
        let draws = self.own.next();
        // The compiler would widen a factor that it knows to be the same each time, and multiply in 32 bits.
        let factor = black_box(_mm512_set1_epi16(factor as i16));
        [_mm512_unpacklo_epi8(draws, strata), _mm512_unpackhi_epi8(draws, strata)].map(|words| {
            let quotient = _mm512_mulhi_epu16(words, factor);
            _mm512_srl_epi16(quotient, _mm_cvtsi32_si128(shift.into()))
        })
    }
}

/// Random bytes of a stream, for a group of elements after the other.
struct Counters {
    counters: __m512i,
    mixed_in: u32,
}

impl Counters {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn new(stream: Stream, first: u64, elements: usize) -> Option<Self> {
        let (start, mixed_in) = stream.start(first / SHARE as u64, elements / SHARE)?;
        // In the order in which packing leaves the values: a four of each of four vectors.
        let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        Some(Self { counters: _mm512_add_epi32(_mm512_set1_epi32(start as i32), order), mixed_in })
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn next(&mut self) -> __m512i {
        let counters = self.counters;
        self.counters = _mm512_add_epi32(counters, _mm512_set1_epi32(16));
        hash(counters, self.mixed_in)
    }
}

/// As in `noise.rs`, of sixteen counters.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn hash(counters: __m512i, mixed_in: u32) -> __m512i {
    let [first, second] = FACTORS.map(|factor| factor as i32);
    let x = _mm512_xor_si512(counters, _mm512_srli_epi32::<16>(counters));
    let x = _mm512_mullo_epi32(x, _mm512_set1_epi32(first));
    let x = _mm512_xor_si512(x, _mm512_srli_epi32::<15>(x));
    let x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_set1_epi32(mixed_in as i32)), _mm512_set1_epi32(second));
    _mm512_xor_si512(x, _mm512_srli_epi32::<16>(x))
}

/// The values of the levels of a bucket.
#[derive(Clone, Copy)]
struct Values<const BITS: usize> {
    unit: __m512,
    min: __m512,
    /// Those of the lowest 32 levels, again and again if there are fewer.
    table: [__m512; 2],
}

impl<const BITS: usize> Values<BITS> {
    /// Most bits for which there are registers with all values.
    const MOST_IN_TABLE: usize = 5;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn new(Scale { unit, min }: Scale) -> Self {
        let (unit, min) = (_mm512_set1_ps(unit), _mm512_set1_ps(min));
        let index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        let table = [index, _mm512_add_epi32(index, _mm512_set1_epi32(16))].map(|index| {
            let levels = _mm512_and_si512(index, _mm512_set1_epi32((1 << BITS) - 1));
            _mm512_fmadd_ps(unit, _mm512_cvtepi32_ps(levels), min)
        });
        Self { unit, min, table }
    }

    /// Adds those of the first sixteen codes.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn add_to(&self, sums: &mut [f32], src: &[u8]) {
        let sums = &mut sums[..LANES];
        // SAFETY: there are sixteen sums.
        unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), _mm512_add_ps(load(sums), self.of(src))) };
    }

    /// Writes those of the first sixteen codes.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn write_to(&self, dst: &mut [MaybeUninit<f32>], src: &[u8]) {
        // SAFETY: there is room for sixteen values.
        unsafe { _mm512_storeu_ps(dst[..LANES].as_mut_ptr().cast(), self.of(src)) };
    }

    /// Those of the first sixteen codes.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn of(&self, src: &[u8]) -> __m512 {
        const { assert!(BITS <= 8) };
        // SAFETY: the slice has sixteen bytes.
        let bytes: __m128i = unsafe { _mm_loadu_si128(src[..16].as_ptr().cast()) };
        let levels = if BITS == 8 {
            _mm512_cvtepu8_epi32(bytes)
        } else {
            // The two bytes that a code lies in, moved down by as many bits as it begins at.
            const FROM: [[i8; 64]; 8] = bytes_of_codes();
            const BY: [[u32; 16]; 8] = bits_of_codes();
            // SAFETY: a row of each table has 64 bytes.
            let [from, by] = unsafe {
                [_mm512_loadu_si512(FROM[BITS].as_ptr().cast()), _mm512_loadu_si512(BY[BITS].as_ptr().cast())]
            };
            _mm512_srlv_epi32(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), from), by)
        };
        // The tables are looked up by the lowest bits of a word.
        if BITS < Self::MOST_IN_TABLE {
            return _mm512_permutexvar_ps(levels, self.table[0]);
        }
        if BITS == Self::MOST_IN_TABLE {
            return _mm512_permutex2var_ps(self.table[0], levels, self.table[1]);
        }
        let levels = if BITS == 8 { levels } else { _mm512_and_si512(levels, _mm512_set1_epi32((1 << BITS) - 1)) };
        _mm512_fmadd_ps(self.unit, _mm512_cvtepi32_ps(levels), self.min)
    }
}

/// For each number of bits, the bytes that each of sixteen codes lies in, as words of 32 bits.
const fn bytes_of_codes() -> [[i8; 64]; 8] {
    let mut all = [[-1; 64]; 8];
    let mut bits = 1;
    while bits < 8 {
        let mut code = 0;
        while code < 16 {
            let byte = code * bits / 8;
            all[bits][4 * code] = byte as i8;
            all[bits][4 * code + 1] = byte as i8 + 1;
            code += 1;
        }
        bits += 1;
    }
    all
}

/// As in `avx2.rs`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn levels(values: &[f32], grid: &Grid) -> [__m512i; 4] {
    let mut parts = [_mm512_set1_epi32(0); 4];
    for (part, values) in parts.iter_mut().zip(values.chunks_exact(16)) {
        let above = _mm512_sub_ps(load(values), _mm512_set1_ps(grid.min));
        *part = _mm512_cvtps_epi32(_mm512_mul_ps(above, _mm512_set1_ps(grid.inverse)));
    }
    parts
}

/// The codes of levels.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn codes([a, b, c, d]: [__m512i; 4]) -> __m512i {
    ordered(_mm512_packus_epi16(_mm512_packus_epi32(a, b), _mm512_packus_epi32(c, d)))
}

/// The codes of 256 times levels and draws together.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn with_draws([a, b, c, d]: [__m512i; 4], [lower, upper]: [__m512i; 2]) -> __m512i {
    let lower = _mm512_add_epi16(_mm512_packus_epi32(a, b), lower);
    let upper = _mm512_add_epi16(_mm512_packus_epi32(c, d), upper);
    ordered(_mm512_packus_epi16(_mm512_srli_epi16::<8>(lower), _mm512_srli_epi16::<8>(upper)))
}

/// The first sixteen values.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn load(values: &[f32]) -> __m512 {
    // SAFETY: the slice has sixteen values.
    unsafe { _mm512_loadu_ps(values[..16].as_ptr()) }
}

/// Packing works within quarters of a vector: what it leaves are fours, out of order.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn ordered(packed: __m512i) -> __m512i {
    _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), packed)
}
