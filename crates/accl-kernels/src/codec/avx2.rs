//! The loops of `loops.rs` for which the compiler makes worse vectors than these: floats to bytes.

use std::arch::x86_64::{
    __m256i, _mm_loadl_epi64, _mm256_add_epi32, _mm256_add_ps, _mm256_and_si256, _mm256_castps_si256,
    _mm256_cvtepu8_epi32, _mm256_loadu_ps, _mm256_min_ps, _mm256_mul_ps, _mm256_packus_epi16, _mm256_packus_epi32,
    _mm256_permutevar8x32_epi32, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setr_epi32, _mm256_srli_epi32,
    _mm256_storeu_si256, _mm256_sub_ps,
};

use super::loops::{self, Grid, ROUNDS};

/// Elements that make a vector of codes.
const GROUP: usize = 32;

/// As [`loops::levels`].
#[target_feature(enable = "avx2")]
pub(crate) fn levels(codes: &mut [u8], values: &[f32], grid: &Grid) {
    let low = _mm256_set1_epi32(0xff);
    let mut groups = codes.chunks_exact_mut(GROUP);
    let mut many = values.chunks_exact(GROUP);
    for (codes, values) in groups.by_ref().zip(many.by_ref()) {
        let mut parts = [_mm256_set1_epi32(0); 4];
        for (part, values) in parts.iter_mut().zip(values.chunks_exact(8)) {
            let rounded = _mm256_add_ps(scaled(values, grid), _mm256_set1_ps(ROUNDS));
            *part = _mm256_and_si256(_mm256_castps_si256(rounded), low);
        }
        store(codes, parts);
    }
    loops::levels(groups.into_remainder(), many.remainder(), grid);
}

/// As [`loops::levels_drawn`].
#[target_feature(enable = "avx2")]
pub(crate) fn levels_drawn(codes: &mut [u8], values: &[f32], grid: &Grid, draws: &[u8]) {
    let low = _mm256_set1_epi32(0xffff);
    let mut groups = codes.chunks_exact_mut(GROUP);
    let (mut many, mut draws) = (values.chunks_exact(GROUP), draws.chunks_exact(GROUP));
    for ((codes, values), draws) in groups.by_ref().zip(many.by_ref()).zip(draws.by_ref()) {
        let mut parts = [_mm256_set1_epi32(0); 4];
        for ((part, values), draws) in parts.iter_mut().zip(values.chunks_exact(8)).zip(draws.chunks_exact(8)) {
            let fine = _mm256_mul_ps(scaled(values, grid), _mm256_set1_ps(256.0));
            let fine = _mm256_castps_si256(_mm256_add_ps(fine, _mm256_set1_ps(ROUNDS)));
            // SAFETY: eight bytes are there.
            let draws = _mm256_cvtepu8_epi32(unsafe { _mm_loadl_epi64(draws.as_ptr().cast()) });
            *part = _mm256_srli_epi32::<8>(_mm256_add_epi32(_mm256_and_si256(fine, low), draws));
        }
        store(codes, parts);
    }
    loops::levels_drawn(groups.into_remainder(), many.remainder(), grid, draws.remainder());
}

/// Eight values on the grid, as in `loops.rs`: the second operand of a minimum is what remains where they are equal.
#[inline]
#[target_feature(enable = "avx2")]
fn scaled(values: &[f32], grid: &Grid) -> std::arch::x86_64::__m256 {
    // SAFETY: the callers hand over eight values.
    let values = unsafe { _mm256_loadu_ps(values.as_ptr()) };
    let scaled = _mm256_mul_ps(_mm256_sub_ps(values, _mm256_set1_ps(grid.min)), _mm256_set1_ps(grid.inverse));
    _mm256_min_ps(scaled, _mm256_set1_ps(grid.top))
}

/// Levels from 0 to 255 as bytes. Packing works within halves of a vector: what it leaves are fours, out of order.
#[inline]
#[target_feature(enable = "avx2")]
fn store(codes: &mut [u8], [a, b, c, d]: [__m256i; 4]) {
    let mixed = _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
    let ordered = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    // SAFETY: the callers hand over room for a group.
    unsafe { _mm256_storeu_si256(codes.as_mut_ptr().cast(), ordered) };
}
