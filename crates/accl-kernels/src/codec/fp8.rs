//! 8-bit floating point in blocks of 256 with a float32 scale, as used in fp8 training.
//!
//! The format is defined in [`super::scaled`], without groups.
//!
//! # Arithmetic
//! scale = max |x| / largest, with the lowest 4 of its 24 significant bits cleared, and at least the smallest normal
//! number of float32. Its product with an element is then exact. Except for the rounding of the quotient, the product
//! is not above max |x|.
//! The greatest element may therefore exceed the largest number by one part in 2^19, and becomes the largest number.

use super::scaled::{Scaled, Scaling, is_finite, row};
use super::small_float::SmallFloat;
use super::traits::Row;

pub(super) const E4M3: Row =
    row(6, "e4m3", "e4m3 floats, in blocks of 256 with a float32 scale", Scaled::<Fp8<false>>::FAMILY);

pub(super) const E5M2: Row =
    row(7, "e5m2", "e5m2 floats, in blocks of 256 with a float32 scale", Scaled::<Fp8<true>>::FAMILY);

/// Mask of the lowest bits of a float32, which are cleared in a scale.
const UNUSED_BITS: u32 = (1 << 4) - 1;

/// The scaling with five exponent bits if `FIVE`, else with four.
struct Fp8<const FIVE: bool>;

impl<const FIVE: bool> Scaling for Fp8<FIVE> {
    const ROW: &'static Row = if FIVE { &E5M2 } else { &E4M3 };
    const FLOAT: SmallFloat = if FIVE { SmallFloat::E5m2 } else { SmallFloat::E4m3 };
    const BLOCK: usize = 256;
    const SCALE_BYTES: usize = 4;
    const SHARE: f64 = if FIVE { 1.0 / 8.0 } else { 1.0 / 16.0 };
    const LEAST: (f64, f64) = (1.0 / (1u64 << if FIVE { 32 } else { 18 }) as f64, 0.0);

    fn place(greatest: &[u32], _: &mut [u8], scales: &mut [u8], factors: &mut [f32]) {
        for ((&greatest, bytes), factor) in greatest.iter().zip(scales.chunks_exact_mut(4)).zip(factors) {
            let quotient = f32::from_bits(greatest) / Self::FLOAT.largest();
            let scale = f32::from_bits(quotient.to_bits() & !UNUSED_BITS).max(f32::MIN_POSITIVE);
            let scale = if is_finite(greatest) { scale } else { f32::NAN };
            bytes.copy_from_slice(&scale.to_le_bytes());
            *factor = 1.0 / scale;
        }
    }

    fn scales(_: &[u8], scales: &[u8], of_blocks: &mut [f32]) {
        for (scale, bytes) in of_blocks.iter_mut().zip(scales.chunks_exact(4)) {
            let read = bytes.try_into().map_or(f32::NAN, f32::from_le_bytes);
            *scale = if read.is_nan() { f32::NAN } else { read };
        }
    }
}
