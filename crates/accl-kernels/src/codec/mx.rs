//! Microscaling formats (OCP, version 1.0, 2023): blocks of 32 with a power of two as their scale.
//!
//! The format is defined in [`super::scaled`], without groups. A scale is one byte, e8m0: 2^(byte - 127); 255
//! is NaN.
//!
//! # Arithmetic
//! The exponent of a scale is the exponent of the greatest magnitude, rounded down, less the exponent of the largest
//! number. Let e be the exponent of max |x| as float32 stores it. Then byte = e - 8 (e4m3), e - 15 (e5m2) or e - 2
//! (e2m1), at least 0.
//! The greatest elements may therefore exceed the largest number, and become it. In blocks with nothing above 2^-127,
//! smaller values lose more: their scale would have to be smaller.

use super::scaled::{Scaled, Scaling, is_finite, row};
use super::small_float::SmallFloat;
use super::traits::Row;

pub(super) const MXFP8: Row =
    row(8, "mxfp8", "e4m3 floats, in blocks of 32 with a power of two (OCP MX)", Scaled::<Mxfp8>::FAMILY);

pub(super) const MXFP8_E5M2: Row =
    row(9, "mxfp8_e5m2", "e5m2 floats, in blocks of 32 with a power of two (OCP MX)", Scaled::<Mxfp8E5m2>::FAMILY);

pub(super) const MXFP4: Row =
    row(10, "mxfp4", "e2m1 floats, in blocks of 32 with a power of two (OCP MX)", Scaled::<Mxfp4>::FAMILY);

/// The scale that decodes to NaN.
const NAN: u8 = 0xff;

/// Declares a format: its row, the numbers, the exponent of the largest number, and its bound.
macro_rules! format {
    ($type:ident, $row:ident, $float:ident, $exponent:literal, $share:literal, $least:expr) => {
        struct $type;

        impl Scaling for $type {
            const ROW: &'static Row = &$row;
            const FLOAT: SmallFloat = SmallFloat::$float;
            const BLOCK: usize = 32;
            const SCALE_BYTES: usize = 1;
            const SHARE: f64 = $share;
            const LEAST: (f64, f64) = ($least, 0.0);

            fn place(greatest: &[u32], _: &mut [u8], scales: &mut [u8], factors: &mut [f32]) {
                place(greatest, scales, factors, $exponent);
            }

            fn scales(_: &[u8], scales: &[u8], of_blocks: &mut [f32]) {
                for (scale, &byte) in of_blocks.iter_mut().zip(scales) {
                    *scale = power(byte);
                }
            }
        }
    };
}

format!(Mxfp8, MXFP8, E4m3, 8, 0.125, 1.0 / (1u64 << 18) as f64);
format!(Mxfp8E5m2, MXFP8_E5M2, E5m2, 15, 0.125, 1.0 / (1u64 << 32) as f64);
format!(Mxfp4, MXFP4, E2m1, 2, 0.25, 1.0 / 16.0);

fn place(greatest: &[u32], scales: &mut [u8], factors: &mut [f32], exponent: u32) {
    for ((&greatest, scale), factor) in greatest.iter().zip(scales).zip(factors) {
        let byte = (greatest >> 23).saturating_sub(exponent);
        *scale = if is_finite(greatest) { byte as u8 } else { NAN };
        // 2^(127 - byte); a byte is never so large that this would not be normal.
        *factor = f32::from_bits((254 - byte) << 23);
    }
}

/// Returns the number that a scale stands for.
fn power(byte: u8) -> f32 {
    let power = f32::from_bits(u32::from(byte) << 23);
    // 2^-127 is below the normal numbers.
    let power = if byte == 0 { f32::MIN_POSITIVE / 2.0 } else { power };
    if byte == NAN { f32::NAN } else { power }
}
