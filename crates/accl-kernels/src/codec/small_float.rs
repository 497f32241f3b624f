//! Floating-point numbers of 8 and 4 bits: their values, and the nearest of them to a float32; in blocks that share a
//! scale.
//!
//! A code has the sign in its highest bit, then exponent and mantissa. The layout follows the OCP specifications of
//! 8-bit floating point (2023) and of microscaling formats (2023).
//!
//! | format | exponent, mantissa | bias | smallest | smallest normal | largest |
//! |---|---|---|---|---|---|
//! | e4m3 | 4, 3 | 7 | 2^-9 | 2^-6 | 448, code 0x7e |
//! | e5m2 | 5, 2 | 15 | 2^-16 | 2^-14 | 57,344, code 0x7b |
//! | e2m1 | 2, 1 | 1 | 0.5 | 1 | 6, code 0x7 |
//!
//! Numbers are rounded to nearest even, including numbers below the smallest normal one. Values beyond the largest
//! number become the largest. Codes above the code of the largest number (NaN, and the infinities of e5m2) are never
//! made, and all decode to NaN.

use std::mem::MaybeUninit;

/// The formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SmallFloat {
    E4m3,
    E5m2,
    E2m1,
}

/// Blocks of `elements` elements that share a scale: 16, 32 or 256.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Blocks {
    pub(crate) float: SmallFloat,
    pub(crate) elements: usize,
}

/// Parameters of a format.
trait Format {
    const EXPONENT_BITS: u32;
    const MANTISSA_BITS: u32;
    const BIAS: u32 = (1 << (Self::EXPONENT_BITS - 1)) - 1;
    /// The code of the largest number.
    const LARGEST: u32;

    const SIGN_AT: u32 = Self::EXPONENT_BITS + Self::MANTISSA_BITS;
    /// The exponent of the smallest normal number, as float32 stores it.
    const LEAST_EXPONENT: u32 = 128 - Self::BIAS;
    /// The distance between the numbers below the smallest normal number.
    const STEP: f32 = f32::from_bits((Self::LEAST_EXPONENT - Self::MANTISSA_BITS) << 23);
}

struct E4m3;

impl Format for E4m3 {
    const EXPONENT_BITS: u32 = 4;
    const MANTISSA_BITS: u32 = 3;
    const LARGEST: u32 = 0x7e;
}

struct E5m2;

impl Format for E5m2 {
    const EXPONENT_BITS: u32 = 5;
    const MANTISSA_BITS: u32 = 2;
    const LARGEST: u32 = 0x7b;
}

struct E2m1;

impl Format for E2m1 {
    const EXPONENT_BITS: u32 = 2;
    const MANTISSA_BITS: u32 = 1;
    const LARGEST: u32 = 7;
}

impl SmallFloat {
    /// Bits of a code.
    pub(crate) const fn bits(self) -> u8 {
        match self {
            SmallFloat::E4m3 | SmallFloat::E5m2 => 8,
            SmallFloat::E2m1 => 4,
        }
    }

    pub(crate) const fn largest(self) -> f32 {
        match self {
            SmallFloat::E4m3 => 448.0,
            SmallFloat::E5m2 => 57_344.0,
            SmallFloat::E2m1 => 6.0,
        }
    }
}

/// Returns the nearest code of e4m3 for a number below 2^64.
pub(super) fn to_e4m3(value: f32) -> u8 {
    code::<E4m3>(value) as u8
}

pub(super) fn from_e4m3(code: u8) -> f32 {
    value::<E4m3>(code)
}

/// Returns the code of a value. 2^(exponent of the value + 23 - mantissa bits) is added to the magnitude. The lowest
/// bits of the sum are then the magnitude in steps of the format, rounded to nearest even. Steps carry over into the
/// exponent by themselves.
#[inline(always)]
fn code<F: Format>(value: f32) -> u32 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let exponent = (magnitude >> 23).max(F::LEAST_EXPONENT);
    let rounds = (exponent + 23 - F::MANTISSA_BITS) << 23;
    let steps = (f32::from_bits(magnitude) + f32::from_bits(rounds)).to_bits().wrapping_sub(rounds);
    let code = ((exponent - F::LEAST_EXPONENT) << F::MANTISSA_BITS).wrapping_add(steps);
    code.min(F::LARGEST) | bits >> 31 << F::SIGN_AT
}

#[inline(always)]
fn value<F: Format>(code: u8) -> f32 {
    let code = u32::from(code);
    let magnitude = code & ((1 << F::SIGN_AT) - 1);
    let normal = f32::from_bits((magnitude << (23 - F::MANTISSA_BITS)) + ((127 - F::BIAS) << 23));
    let value = if magnitude < 1 << F::MANTISSA_BITS { magnitude as i32 as f32 * F::STEP } else { normal };
    let value = f32::from_bits(value.to_bits() | code >> F::SIGN_AT << 31);
    if magnitude > F::LARGEST { f32::NAN } else { value }
}

/// Lanes in which the greatest magnitude of a block is searched.
const LANES: usize = 16;

/// Finds the greatest magnitude of each block, as the bits of a float32. NaN and infinity are above all others.
#[inline(always)]
pub(crate) fn magnitudes(greatest: &mut [u32], values: &[f32], elements: usize) {
    match elements {
        16 => magnitudes_by::<16>(greatest, values),
        32 => magnitudes_by::<32>(greatest, values),
        _ => magnitudes_by::<256>(greatest, values),
    }
}

#[inline(always)]
fn magnitudes_by<const ELEMENTS: usize>(greatest: &mut [u32], values: &[f32]) {
    let mut blocks = values.chunks_exact(ELEMENTS);
    let (whole, rest) = greatest.split_at_mut(values.len() / ELEMENTS);
    for (greatest, block) in whole.iter_mut().zip(blocks.by_ref()) {
        *greatest = magnitude(block);
    }
    if let [greatest, ..] = rest {
        let mut last = [0.0; ELEMENTS];
        last[..blocks.remainder().len()].copy_from_slice(blocks.remainder());
        *greatest = magnitude(&last);
    }
}

/// Returns the greatest magnitude of a block, whose length is a multiple of [`LANES`].
#[inline(always)]
fn magnitude(block: &[f32]) -> u32 {
    let mut lanes = [0i32; LANES];
    for group in block.chunks_exact(LANES) {
        for (lane, value) in lanes.iter_mut().zip(group) {
            *lane = (*lane).max((value.to_bits() & 0x7fff_ffff) as i32);
        }
    }
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] = lanes[lane].max(lanes[lane + half]);
        }
        half /= 2;
    }
    lanes[0] as u32
}

/// Calls a loop that is generic over format and number of elements with the parameters of `$blocks`.
macro_rules! by_blocks {
    ($loop:ident($($arg:ident),*), $blocks:ident) => {
        match ($blocks.float, $blocks.elements) {
            (SmallFloat::E4m3, 16) => $loop::<E4m3, 16>($($arg),*),
            (SmallFloat::E4m3, 32) => $loop::<E4m3, 32>($($arg),*),
            (SmallFloat::E4m3, _) => $loop::<E4m3, 256>($($arg),*),
            (SmallFloat::E5m2, 16) => $loop::<E5m2, 16>($($arg),*),
            (SmallFloat::E5m2, 32) => $loop::<E5m2, 32>($($arg),*),
            (SmallFloat::E5m2, _) => $loop::<E5m2, 256>($($arg),*),
            (SmallFloat::E2m1, 16) => $loop::<E2m1, 16>($($arg),*),
            (SmallFloat::E2m1, 32) => $loop::<E2m1, 32>($($arg),*),
            (SmallFloat::E2m1, _) => $loop::<E2m1, 256>($($arg),*),
        }
    };
}

/// Writes the code of each value times the factor of its block.
#[inline(always)]
pub(crate) fn small_codes(codes: &mut [u8], values: &[f32], factors: &[f32], blocks: Blocks) {
    by_blocks!(codes_by(codes, values, factors), blocks);
}

#[inline(always)]
fn codes_by<F: Format, const ELEMENTS: usize>(codes: &mut [u8], values: &[f32], factors: &[f32]) {
    for ((codes, values), &factor) in codes.chunks_mut(ELEMENTS).zip(values.chunks(ELEMENTS)).zip(factors) {
        match (<&mut [u8; ELEMENTS]>::try_from(&mut *codes), <&[f32; ELEMENTS]>::try_from(values)) {
            (Ok(codes), Ok(values)) => {
                for (to, &x) in codes.iter_mut().zip(values) {
                    *to = code::<F>(x * factor) as u8;
                }
            }
            _ => codes.iter_mut().zip(values).for_each(|(to, &x)| *to = code::<F>(x * factor) as u8),
        }
    }
}

/// Writes the value of each code times the scale of its block.
#[inline(always)]
pub(crate) fn small_values(dst: &mut [MaybeUninit<f32>], codes: &[u8], scales: &[f32], blocks: Blocks) {
    by_blocks!(values_by(dst, codes, scales), blocks);
}

#[inline(always)]
fn values_by<F: Format, const ELEMENTS: usize>(dst: &mut [MaybeUninit<f32>], codes: &[u8], scales: &[f32]) {
    for ((dst, codes), &scale) in dst.chunks_mut(ELEMENTS).zip(codes.chunks(ELEMENTS)).zip(scales) {
        match (<&mut [MaybeUninit<f32>; ELEMENTS]>::try_from(&mut *dst), <&[u8; ELEMENTS]>::try_from(codes)) {
            (Ok(dst), Ok(codes)) => {
                for (to, &code) in dst.iter_mut().zip(codes) {
                    to.write(value::<F>(code) * scale);
                }
            }
            _ => dst.iter_mut().zip(codes).for_each(|(to, &code)| _ = to.write(value::<F>(code) * scale)),
        }
    }
}

/// Adds the values that [`small_values`] would write.
#[inline(always)]
pub(crate) fn add_small_values(sums: &mut [f32], codes: &[u8], scales: &[f32], blocks: Blocks) {
    by_blocks!(add_values_by(sums, codes, scales), blocks);
}

#[inline(always)]
fn add_values_by<F: Format, const ELEMENTS: usize>(sums: &mut [f32], codes: &[u8], scales: &[f32]) {
    for ((sums, codes), &scale) in sums.chunks_mut(ELEMENTS).zip(codes.chunks(ELEMENTS)).zip(scales) {
        match (<&mut [f32; ELEMENTS]>::try_from(&mut *sums), <&[u8; ELEMENTS]>::try_from(codes)) {
            (Ok(sums), Ok(codes)) => {
                for (sum, &code) in sums.iter_mut().zip(codes) {
                    *sum += value::<F>(code) * scale;
                }
            }
            _ => sums.iter_mut().zip(codes).for_each(|(sum, &code)| *sum += value::<F>(code) * scale),
        }
    }
}
