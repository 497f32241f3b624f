//! The loops of `loops.rs` for which the compiler makes worse vectors than these: from floats to packed codes and back
//! without a detour by way of memory.

use std::arch::x86_64::{
    __m256, __m256i, _mm_cvtsi32_si128, _mm_cvtsi128_si32, _mm_loadl_epi64, _mm_loadu_si128, _mm_max_epi32,
    _mm_shuffle_epi32, _mm_storeu_si128, _mm_unpackhi_epi64, _mm256_add_epi8, _mm256_add_epi16, _mm256_add_epi32,
    _mm256_add_ps, _mm256_and_si256, _mm256_broadcastq_epi64, _mm256_broadcastsi128_si256, _mm256_castps_si256,
    _mm256_castsi256_si128, _mm256_cvtepi32_ps, _mm256_cvtepu8_epi32, _mm256_cvtps_epi32, _mm256_extracti128_si256,
    _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_max_epi32,
    _mm256_max_epu32, _mm256_min_epu8, _mm256_min_epu32, _mm256_movemask_epi8, _mm256_mul_ps, _mm256_mulhi_epu16,
    _mm256_mullo_epi32, _mm256_or_si256, _mm256_packus_epi16, _mm256_packus_epi32, _mm256_permute4x64_epi64,
    _mm256_permutevar8x32_epi32, _mm256_set1_epi8, _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps,
    _mm256_setr_epi32, _mm256_shuffle_epi8, _mm256_slli_epi16, _mm256_sllv_epi32, _mm256_srl_epi16, _mm256_srl_epi64,
    _mm256_srli_epi16, _mm256_srli_epi32, _mm256_srlv_epi32, _mm256_storeu_ps, _mm256_storeu_si256, _mm256_sub_epi8,
    _mm256_sub_ps, _mm256_testz_si256, _mm256_unpackhi_epi8, _mm256_unpacklo_epi8, _mm256_xor_si256,
};
use std::hint::black_box;
use std::mem::{self, MaybeUninit};
use std::slice;

use super::groups::{Greatest, Source, ask_ahead, bits_of_codes, by_bits, bytes_of_words, groups};
use super::loops::{self, Buckets, Grid, Loops, Range, Scale};
use super::noise::{Draws, FACTORS, Narrow, SHARE, Stream};

/// Elements that make a vector of codes.
const GROUP: usize = 32;
/// Those of a vector of floats.
const LANES: usize = 8;

groups!(
    loops,
    __m256i,
    #[target_feature(enable = "avx2,fma")]
);

/// As [`loops::range`], but for the sign of a zero, which nothing depends on.
#[target_feature(enable = "avx2,fma")]
pub(super) fn range(values: &[f32]) -> Range {
    let mut groups = values.chunks_exact(GROUP);
    let rest = groups.remainder();
    if groups.len() == 0 {
        return loops::range(values);
    }
    let (mut signed, mut unsigned) = ([_mm256_set1_epi32(i32::MIN); 4], [_mm256_set1_epi32(0); 4]);
    for group in groups.by_ref() {
        for (part, values) in group.chunks_exact(8).enumerate() {
            let bits = _mm256_castps_si256(load(values));
            signed[part] = _mm256_max_epi32(signed[part], bits);
            unsigned[part] = _mm256_max_epu32(unsigned[part], bits);
        }
    }
    let [a, b, c, d] = signed;
    let signed = greatest(_mm256_max_epi32(_mm256_max_epi32(a, b), _mm256_max_epi32(c, d)));
    let [a, b, c, d] = unsigned;
    let unsigned = _mm256_max_epu32(_mm256_max_epu32(a, b), _mm256_max_epu32(c, d));
    // In the order of signed numbers.
    let unsigned = greatest(_mm256_xor_si256(unsigned, _mm256_set1_epi32(i32::MIN))) ^ i32::MIN;
    let all = Greatest { signed, unsigned: unsigned as u32 }.range(|| least_bits(&values[..values.len() - rest.len()]));
    if rest.is_empty() { all } else { all.joined(loops::range(rest)) }
}

/// The least of the values' bits.
#[inline(never)]
#[target_feature(enable = "avx2,fma")]
fn least_bits(values: &[f32]) -> u32 {
    let mut least = _mm256_set1_epi32(-1);
    for values in values.chunks_exact(8) {
        least = _mm256_min_epu32(least, _mm256_castps_si256(load(values)));
    }
    // The least is the complement of the greatest complement: all bits over, but in the order of signed numbers.
    !(greatest(_mm256_xor_si256(least, _mm256_set1_epi32(i32::MAX))) ^ i32::MIN) as u32
}

/// The greatest of eight numbers.
#[inline]
#[target_feature(enable = "avx2")]
fn greatest(numbers: __m256i) -> i32 {
    let four = _mm_max_epi32(_mm256_castsi256_si128(numbers), _mm256_extracti128_si256::<1>(numbers));
    let two = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
    _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32::<1>(two)))
}

/// Writes 32 codes as `BITS` bits each, and perhaps anything behind them.
#[inline]
#[target_feature(enable = "avx2")]
fn pack<const BITS: usize>(dst: &mut [u8], codes: __m256i) {
    // A greater one would spoil its neighbours.
    debug_assert_eq!(
        _mm256_testz_si256(codes, _mm256_set1_epi8(!(0xffu8 >> (8 - BITS)) as i8)),
        1,
        "codes of {BITS} bits"
    );
    if BITS == 1 {
        let bits = _mm256_movemask_epi8(_mm256_slli_epi16::<7>(codes));
        dst[..4].copy_from_slice(&bits.to_le_bytes());
        return;
    }
    if BITS == 8 {
        // SAFETY: the slice has room for 32 bytes.
        unsafe { _mm256_storeu_si256(dst[..GROUP].as_mut_ptr().cast(), codes) };
        return;
    }
    // Two, then four, then eight codes move together in words of 16, 32 and 64 bits. A factor of 2^7 would be negative.
    let pairs = if BITS < 7 {
        _mm256_maddubs_epi16(codes, _mm256_set1_epi16(1 | 1 << (8 + BITS)))
    } else {
        let upper = _mm256_srli_epi16::<1>(_mm256_and_si256(codes, _mm256_set1_epi16(0x7f00)));
        _mm256_or_si256(_mm256_and_si256(codes, _mm256_set1_epi16(0xff)), upper)
    };
    if BITS == 4 {
        let bytes = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi16(pairs, pairs));
        // SAFETY: the slice has room for 16 bytes.
        unsafe { _mm_storeu_si128(dst[..GROUP / 2].as_mut_ptr().cast(), _mm256_castsi256_si128(bytes)) };
        return;
    }
    let fours = _mm256_madd_epi16(pairs, _mm256_set1_epi32(1 | 1 << (16 + 2 * BITS)));
    let free = 32 - 4 * BITS as i32;
    let upper_parts = _mm256_sllv_epi32(fours, _mm256_setr_epi32(free, 0, free, 0, free, 0, free, 0));
    let eights = _mm256_srl_epi64(upper_parts, _mm_cvtsi32_si128(free));
    // Their bytes follow each other, in each half.
    const FROM: [[i8; 16]; 9] = bytes_of_words();
    // SAFETY: a row of the table has 16 bytes.
    let from = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(FROM[BITS].as_ptr().cast()) });
    let bytes = _mm256_shuffle_epi8(eights, from);
    let halves = [_mm256_castsi256_si128(bytes), _mm256_extracti128_si256::<1>(bytes)];
    if dst.len() >= 2 * BITS + 16 {
        // SAFETY: there are 16 bytes behind the one address and behind the other.
        unsafe {
            _mm_storeu_si128(dst.as_mut_ptr().cast(), halves[0]);
            _mm_storeu_si128(dst.as_mut_ptr().add(2 * BITS).cast(), halves[1]);
        }
    } else {
        for (dst, half) in dst.chunks_exact_mut(2 * BITS).zip(halves) {
            let mut bytes = [0u8; 16];
            // SAFETY: there are 16 bytes.
            unsafe { _mm_storeu_si128(bytes.as_mut_ptr().cast(), half) };
            dst.copy_from_slice(&bytes[..2 * BITS]);
        }
    }
}

/// Those of a stream as they are.
struct Alone(Counters);

impl Source for Alone {
    type Vector = __m256i;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn next(&mut self) -> [__m256i; 2] {
        let (draws, zero) = (self.0.next(), _mm256_set1_epi32(0));
        [_mm256_unpacklo_epi8(draws, zero), _mm256_unpackhi_epi8(draws, zero)]
    }
}

/// Those of a stream in the strata of a rank.
struct Among {
    own: Counters,
    picks: Counters,
    narrow: Narrow,
}

impl Source for Among {
    type Vector = __m256i;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn next(&mut self) -> [__m256i; 2] {
        let Narrow { of_rank, rotations, world, factor, shift } = self.narrow;
        let (picks, half) = (self.picks.next(), _mm256_set1_epi8(0xf));
        // SAFETY: each table has 16 bytes.
        let [strata, rotations] = [of_rank, rotations]
            .map(|table| _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(table.as_ptr().cast()) }));
        let strata = _mm256_shuffle_epi8(strata, _mm256_and_si256(picks, half));
        let rotations = _mm256_shuffle_epi8(rotations, _mm256_and_si256(_mm256_srli_epi16::<4>(picks), half));
        let strata = _mm256_add_epi8(strata, rotations);
        // What is less than the world wraps around and is the lesser.
        let strata = _mm256_min_epu8(strata, _mm256_sub_epi8(strata, _mm256_set1_epi8(world as i8)));
        let draws = self.own.next();
        // The compiler would widen a factor that it knows to be the same each time, and multiply in 32 bits.
        let factor = black_box(_mm256_set1_epi16(factor as i16));
        [_mm256_unpacklo_epi8(draws, strata), _mm256_unpackhi_epi8(draws, strata)].map(|words| {
            let quotient = _mm256_mulhi_epu16(words, factor);
            _mm256_srl_epi16(quotient, _mm_cvtsi32_si128(shift.into()))
        })
    }
}

/// Random bytes of a stream, for a group of elements after the other.
struct Counters {
    counters: __m256i,
    mixed_in: u32,
}

impl Counters {
    #[inline]
    #[target_feature(enable = "avx2")]
    fn new(stream: Stream, first: u64, elements: usize) -> Option<Self> {
        let (start, mixed_in) = stream.start(first / SHARE as u64, elements / SHARE)?;
        // In the order in which packing leaves the values: fours of even places, then fours of odd ones.
        let counters = _mm256_add_epi32(_mm256_set1_epi32(start as i32), _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
        Some(Self { counters, mixed_in })
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn next(&mut self) -> __m256i {
        let counters = self.counters;
        self.counters = _mm256_add_epi32(counters, _mm256_set1_epi32(8));
        hash(counters, self.mixed_in)
    }
}

/// As in `noise.rs`, of eight counters.
#[inline]
#[target_feature(enable = "avx2")]
fn hash(counters: __m256i, mixed_in: u32) -> __m256i {
    let [first, second] = FACTORS.map(|factor| factor as i32);
    let x = _mm256_xor_si256(counters, _mm256_srli_epi32::<16>(counters));
    let x = _mm256_mullo_epi32(x, _mm256_set1_epi32(first));
    let x = _mm256_xor_si256(x, _mm256_srli_epi32::<15>(x));
    let x = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_set1_epi32(mixed_in as i32)), _mm256_set1_epi32(second));
    _mm256_xor_si256(x, _mm256_srli_epi32::<16>(x))
}

/// The values of the levels of a bucket.
#[derive(Clone, Copy)]
struct Values<const BITS: usize>(Scale);

impl<const BITS: usize> Values<BITS> {
    #[inline(always)]
    fn new(scale: Scale) -> Self {
        Self(scale)
    }

    /// Adds those of the first eight codes.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn add_to(self, sums: &mut [f32], src: &[u8]) {
        let sums = &mut sums[..LANES];
        // SAFETY: there are eight sums.
        unsafe { _mm256_storeu_ps(sums.as_mut_ptr(), _mm256_add_ps(load(sums), self.of(src))) };
    }

    /// Writes those of the first eight codes.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn write_to(self, dst: &mut [MaybeUninit<f32>], src: &[u8]) {
        // SAFETY: there is room for eight values.
        unsafe { _mm256_storeu_ps(dst[..LANES].as_mut_ptr().cast(), self.of(src)) };
    }

    /// Those of the first eight codes.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn of(self, src: &[u8]) -> __m256 {
        const { assert!(BITS <= 8) };
        // SAFETY: the slice has eight bytes.
        let word = unsafe { _mm_loadl_epi64(src[..8].as_ptr().cast()) };
        let levels = if BITS == 8 {
            _mm256_cvtepu8_epi32(word)
        } else {
            // The two bytes that a code lies in, moved down by as many bits as it begins at.
            const FROM: [[i8; 32]; 8] = bytes_of_codes();
            const BY: [[u32; 8]; 8] = bits_of_codes();
            // SAFETY: a row of each table has 32 bytes.
            let [from, by] = unsafe {
                [_mm256_loadu_si256(FROM[BITS].as_ptr().cast()), _mm256_loadu_si256(BY[BITS].as_ptr().cast())]
            };
            let pairs = _mm256_shuffle_epi8(_mm256_broadcastq_epi64(word), from);
            _mm256_and_si256(_mm256_srlv_epi32(pairs, by), _mm256_set1_epi32((1 << BITS) - 1))
        };
        let Scale { unit, min } = self.0;
        _mm256_fmadd_ps(_mm256_set1_ps(unit), _mm256_cvtepi32_ps(levels), _mm256_set1_ps(min))
    }
}

/// For each number of bits, the bytes that each of eight codes lies in, as words of 32 bits.
const fn bytes_of_codes() -> [[i8; 32]; 8] {
    let mut all = [[-1; 32]; 8];
    let mut bits = 1;
    while bits < 8 {
        let mut code = 0;
        while code < 8 {
            let byte = code * bits / 8;
            all[bits][4 * code] = byte as i8;
            all[bits][4 * code + 1] = byte as i8 + 1;
            code += 1;
        }
        bits += 1;
    }
    all
}

/// The levels of a group, to nearest even: the mode that the callers have set. None is above the top: what the three
/// roundings before this one add is far less than half a level.
#[inline]
#[target_feature(enable = "avx2")]
fn levels(values: &[f32], grid: &Grid) -> [__m256i; 4] {
    let mut parts = [_mm256_set1_epi32(0); 4];
    for (part, values) in parts.iter_mut().zip(values.chunks_exact(8)) {
        let above = _mm256_sub_ps(load(values), _mm256_set1_ps(grid.min));
        *part = _mm256_cvtps_epi32(_mm256_mul_ps(above, _mm256_set1_ps(grid.inverse)));
    }
    parts
}

/// The codes of levels.
#[inline]
#[target_feature(enable = "avx2")]
fn codes([a, b, c, d]: [__m256i; 4]) -> __m256i {
    ordered(_mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d)))
}

/// The codes of 256 times levels and draws together.
#[inline]
#[target_feature(enable = "avx2")]
fn with_draws([a, b, c, d]: [__m256i; 4], [lower, upper]: [__m256i; 2]) -> __m256i {
    let lower = _mm256_add_epi16(_mm256_packus_epi32(a, b), lower);
    let upper = _mm256_add_epi16(_mm256_packus_epi32(c, d), upper);
    ordered(_mm256_packus_epi16(_mm256_srli_epi16::<8>(lower), _mm256_srli_epi16::<8>(upper)))
}

/// The first eight values.
#[inline]
#[target_feature(enable = "avx2")]
fn load(values: &[f32]) -> __m256 {
    // SAFETY: the slice has eight values.
    unsafe { _mm256_loadu_ps(values[..8].as_ptr()) }
}

/// Packing works within halves of a vector: what it leaves are fours, out of order.
#[inline]
#[target_feature(enable = "avx2")]
fn ordered(packed: __m256i) -> __m256i {
    _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
}
