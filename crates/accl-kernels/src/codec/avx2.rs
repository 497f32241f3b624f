//! The loops of `loops.rs` for which the compiler makes worse vectors than these: floats to bytes.

use std::arch::x86_64::{
    __m256, __m256i, _MM_HINT_T0, _mm_cvtsi32_si128, _mm_loadl_epi64, _mm_loadu_si128, _mm_prefetch, _mm256_add_epi8,
    _mm256_add_epi16, _mm256_add_epi32, _mm256_add_ps, _mm256_and_si256, _mm256_broadcastsi128_si256,
    _mm256_castps_si256, _mm256_cvtepi32_ps, _mm256_cvtepu8_epi32, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_min_epu8,
    _mm256_min_ps, _mm256_mul_ps, _mm256_mulhi_epu16, _mm256_mullo_epi32, _mm256_packus_epi16, _mm256_packus_epi32,
    _mm256_permutevar8x32_epi32, _mm256_set1_epi8, _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps,
    _mm256_setr_epi32, _mm256_shuffle_epi8, _mm256_srl_epi16, _mm256_srli_epi16, _mm256_srli_epi32, _mm256_storeu_ps,
    _mm256_storeu_si256, _mm256_sub_epi8, _mm256_sub_ps, _mm256_unpackhi_epi8, _mm256_unpacklo_epi8, _mm256_xor_si256,
};
use std::mem::MaybeUninit;

use super::loops::{self, Grid, Loops, ROUNDS};
use super::noise::{Draws, FACTORS, Narrow, SHARE, Stream};

/// Elements that make a vector of codes.
const GROUP: usize = 32;

/// The loops of an instruction set that has AVX2 and FMA, with these in place of its own.
pub(crate) const fn with_vectors(loops: Loops) -> Loops {
    Loops { levels, levels_drawn, add_values, values, ..loops }
}

/// Asks for memory that is needed soon, while there is something to calculate: so many bytes behind the group.
#[inline(always)]
fn ask_ahead<const BYTES: usize>(group: &[f32]) {
    for line in 0..2 {
        // SAFETY: an address is only a hint to a prefetch.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(group.as_ptr().wrapping_byte_add(BYTES + 64 * line).cast()) };
    }
}

/// Two buckets of the usual size: the range of a bucket is found without a pause, before its levels are.
const BUCKETS_AHEAD: usize = 4096;
/// What is decoded comes line by line.
const LINES_AHEAD: usize = 1024;

/// As [`loops::levels`].
#[target_feature(enable = "avx2")]
pub(crate) fn levels(codes: &mut [u8], values: &[f32], grid: &Grid) {
    let low = _mm256_set1_epi32(0xff);
    let mut groups = codes.chunks_exact_mut(GROUP);
    let mut many = values.chunks_exact(GROUP);
    for (codes, values) in groups.by_ref().zip(many.by_ref()) {
        ask_ahead::<BUCKETS_AHEAD>(values);
        let mut parts = [_mm256_set1_epi32(0); 4];
        for (part, values) in parts.iter_mut().zip(values.chunks_exact(8)) {
            let rounded = _mm256_add_ps(scaled(values, grid), _mm256_set1_ps(ROUNDS));
            *part = _mm256_and_si256(_mm256_castps_si256(rounded), low);
        }
        let [a, b, c, d] = parts;
        store(codes, _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d)));
    }
    loops::levels(groups.into_remainder(), many.remainder(), grid);
}

/// As [`loops::levels_drawn`], in words of 16 bits, which hold 256 times a level and a draw together.
#[target_feature(enable = "avx2")]
pub(crate) fn levels_drawn(codes: &mut [u8], values: &[f32], grid: &Grid, draws: &Draws, first: u64) {
    let own = Counters::new(draws.own, first, codes.len());
    match (own, &draws.strata) {
        (Some(own), None) => levels_drawn_from(Alone(own), codes, values, grid, draws, first),
        (Some(own), Some(strata)) => match (strata.narrow, Counters::new(strata.picks, first, codes.len())) {
            (Some(narrow), Some(picks)) => {
                levels_drawn_from(Among { own, picks, narrow }, codes, values, grid, draws, first);
            }
            _ => loops::levels_drawn(codes, values, grid, draws, first),
        },
        (None, _) => loops::levels_drawn(codes, values, grid, draws, first),
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn levels_drawn_from(
    mut source: impl Source,
    codes: &mut [u8],
    values: &[f32],
    grid: &Grid,
    draws: &Draws,
    first: u64,
) {
    let low = _mm256_set1_epi32(0xffff);
    let whole = codes.len() / GROUP * GROUP;
    let (codes, codes_left) = codes.split_at_mut(whole);
    let (values, values_left) = values.split_at(whole);
    for (codes, values) in codes.chunks_exact_mut(GROUP).zip(values.chunks_exact(GROUP)) {
        ask_ahead::<BUCKETS_AHEAD>(values);
        let mut parts = [_mm256_set1_epi32(0); 4];
        for (part, values) in parts.iter_mut().zip(values.chunks_exact(8)) {
            let fine = _mm256_mul_ps(scaled(values, grid), _mm256_set1_ps(256.0));
            *part = _mm256_and_si256(_mm256_castps_si256(_mm256_add_ps(fine, _mm256_set1_ps(ROUNDS))), low);
        }
        let [a, b, c, d] = parts;
        // SAFETY: this function has the instruction set.
        let [lower, upper] = unsafe { source.next() };
        let lower = _mm256_add_epi16(_mm256_packus_epi32(a, b), lower);
        let upper = _mm256_add_epi16(_mm256_packus_epi32(c, d), upper);
        store(codes, _mm256_packus_epi16(_mm256_srli_epi16::<8>(lower), _mm256_srli_epi16::<8>(upper)));
    }
    loops::levels_drawn(codes_left, values_left, grid, draws, first + whole as u64);
}

/// Draws for a group after the other.
trait Source {
    /// In words of 16 bits, in the order in which packing leaves the values.
    ///
    /// # Safety
    /// AVX2 is there.
    unsafe fn next(&mut self) -> [__m256i; 2];
}

/// Those of a stream as they are.
struct Alone(Counters);

impl Source for Alone {
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
        [_mm256_unpacklo_epi8(draws, strata), _mm256_unpackhi_epi8(draws, strata)].map(|words| {
            let quotient = _mm256_mulhi_epu16(words, _mm256_set1_epi16(factor as i16));
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
        let counters = _mm256_add_epi32(_mm256_set1_epi32(start as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        Some(Self { counters, mixed_in })
    }

    /// In the order in which packing leaves the values: fours of even places, then fours of odd ones.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn next(&mut self) -> __m256i {
        let bytes = hash(self.counters, self.mixed_in);
        self.counters = _mm256_add_epi32(self.counters, _mm256_set1_epi32(8));
        _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7))
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

/// As [`loops::add_values`].
#[target_feature(enable = "avx2,fma")]
pub(crate) fn add_values(sums: &mut [f32], codes: &[u8], unit: f32, min: f32) {
    let mut groups = sums.chunks_exact_mut(GROUP);
    let mut codes = codes.chunks_exact(GROUP);
    for (sums, codes) in groups.by_ref().zip(codes.by_ref()) {
        ask_ahead::<LINES_AHEAD>(sums);
        for (sums, codes) in sums.chunks_exact_mut(8).zip(codes.chunks_exact(8)) {
            // SAFETY: eight of each are there.
            unsafe {
                let value = decoded(codes, unit, min);
                _mm256_storeu_ps(sums.as_mut_ptr(), _mm256_add_ps(_mm256_loadu_ps(sums.as_ptr()), value));
            }
        }
    }
    loops::add_values(groups.into_remainder(), codes.remainder(), unit, min);
}

/// As [`loops::values`].
#[target_feature(enable = "avx2,fma")]
pub(crate) fn values(dst: &mut [MaybeUninit<f32>], codes: &[u8], unit: f32, min: f32) {
    let mut groups = dst.chunks_exact_mut(8);
    let mut codes = codes.chunks_exact(8);
    for (dst, codes) in groups.by_ref().zip(codes.by_ref()) {
        // SAFETY: there are eight codes, and room for eight values.
        unsafe { _mm256_storeu_ps(dst.as_mut_ptr().cast(), decoded(codes, unit, min)) };
    }
    loops::values(groups.into_remainder(), codes.remainder(), unit, min);
}

/// The values of eight codes.
///
/// # Safety
/// Eight codes are there.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn decoded(codes: &[u8], unit: f32, min: f32) -> __m256 {
    // SAFETY: the caller's promise.
    let levels = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(unsafe { _mm_loadl_epi64(codes.as_ptr().cast()) }));
    _mm256_fmadd_ps(_mm256_set1_ps(unit), levels, _mm256_set1_ps(min))
}

/// Eight values on the grid, as in `loops.rs`: the second operand of a minimum is what remains where they are equal.
#[inline]
#[target_feature(enable = "avx2")]
fn scaled(values: &[f32], grid: &Grid) -> __m256 {
    // SAFETY: the callers hand over eight values.
    let values = unsafe { _mm256_loadu_ps(values.as_ptr()) };
    let scaled = _mm256_mul_ps(_mm256_sub_ps(values, _mm256_set1_ps(grid.min)), _mm256_set1_ps(grid.inverse));
    _mm256_min_ps(scaled, _mm256_set1_ps(grid.top))
}

/// Packing works within halves of a vector: what it leaves are fours, out of order.
#[inline]
#[target_feature(enable = "avx2")]
fn store(codes: &mut [u8], packed: __m256i) {
    let ordered = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    // SAFETY: the callers hand over room for a group.
    unsafe { _mm256_storeu_si256(codes.as_mut_ptr().cast(), ordered) };
}
