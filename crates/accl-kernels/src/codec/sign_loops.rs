//! The loops of signs and mean magnitudes, compiled for each instruction set; `sign` describes what they compute.

use std::mem::MaybeUninit;

/// Elements that share a byte.
pub(super) const SHARE: usize = 8;
/// Partial sums that are added up at the same time.
pub(crate) const LANES: usize = 16;

/// Adds magnitudes to the sums, the first magnitude to the first sum.
#[inline(always)]
pub(crate) fn magnitude_sums(sums: &mut [f64; LANES], values: &[f32]) {
    let mut lanes = *sums;
    let mut groups = values.chunks_exact(LANES);
    for group in groups.by_ref() {
        for (lane, value) in lanes.iter_mut().zip(group) {
            *lane += f64::from(value.abs());
        }
    }
    for (lane, value) in lanes.iter_mut().zip(groups.remainder()) {
        *lane += f64::from(value.abs());
    }
    *sums = lanes;
}

#[inline(always)]
pub(crate) fn signs(codes: &mut [u8], values: &[f32]) {
    for (code, &value) in codes.iter_mut().zip(values) {
        *code = u8::from(value < 0.0);
    }
}

/// Returns the value of the element whose code is at `bit` of `byte`.
#[inline(always)]
fn signed(mean: u32, byte: u8, bit: usize) -> f32 {
    f32::from_bits(mean ^ (u32::from(byte) << (31 - bit) & 0x8000_0000))
}

/// Writes the values of packed codes.
#[inline(always)]
pub(crate) fn signed_values(dst: &mut [MaybeUninit<f32>], packed: &[u8], mean: f32) {
    let mean = mean.to_bits();
    for (values, &byte) in dst.chunks_mut(SHARE).zip(packed) {
        match <&mut [MaybeUninit<f32>; SHARE]>::try_from(&mut *values) {
            Ok(values) => (0..SHARE).for_each(|bit| _ = values[bit].write(signed(mean, byte, bit))),
            Err(_) => values.iter_mut().enumerate().for_each(|(bit, value)| _ = value.write(signed(mean, byte, bit))),
        }
    }
}

/// Adds the values that [`signed_values`] would write.
#[inline(always)]
pub(crate) fn add_signed_values(sums: &mut [f32], packed: &[u8], mean: f32) {
    let mean = mean.to_bits();
    for (sums, &byte) in sums.chunks_mut(SHARE).zip(packed) {
        match <&mut [f32; SHARE]>::try_from(&mut *sums) {
            Ok(sums) => (0..SHARE).for_each(|bit| sums[bit] += signed(mean, byte, bit)),
            Err(_) => sums.iter_mut().enumerate().for_each(|(bit, sum)| *sum += signed(mean, byte, bit)),
        }
    }
}
