//! NVFP4: e2m1 floats in blocks of 16 with an e4m3 scale, and a float32 scale for each group of blocks.
//!
//! The format is defined in [`super::scaled`]. A group is 2,048 elements. In other implementations the float32 scale
//! belongs to a tensor. Here it must be found from elements that are encoded together, wherever a tensor is cut into
//! tiles and ranks' parts. All of the group must be in one tile.
//! 2,048 divides a tile. A bucket size that is a power of two divides 2,048 or is a multiple of it. Therefore the other
//! direction of the same tensor can use another codec. The scale takes a sixty-fourth of a bit of each element.
//! Groups smaller than a tensor lose nothing: they leave the blocks' scales more of their range.
//!
//! # Arithmetic
//! * group = max |x| of its finite blocks / (6 * 448), with the lowest 6 of its 24 significant bits cleared, and at
//!   least 2^-117, so that no product below is smaller than float32 can represent;
//! * block = max |x| * (1 / (6 * group)), to the nearest e4m3, at least the smallest e4m3, 2^-9, so that every block
//!   has numbers; scale = block * group, which is exact;
//! * a block that is not finite has the scale NaN, 0x7f.

use super::scaled::{Scaled, Scaling, is_finite, row};
use super::small_float::{SmallFloat, from_e4m3, to_e4m3};
use super::traits::Row;

pub(super) const ROW: Row = row(
    11,
    "nvfp4",
    "e2m1 floats, in blocks of 16 with an e4m3 scale, and a float32 scale for each 2,048",
    Scaled::<Nvfp4>::FAMILY,
);

struct Nvfp4;

/// Mask of the lowest bits of a float32, which are cleared in a group's scale.
const UNUSED_BITS: u32 = (1 << 6) - 1;
/// 2^-117.
const LEAST_GROUP: f32 = f32::from_bits((127 - 117) << 23);
const NAN: u8 = 0x7f;

impl Scaling for Nvfp4 {
    const ROW: &'static Row = &ROW;
    const FLOAT: SmallFloat = SmallFloat::E2m1;
    const BLOCK: usize = 16;
    const SCALE_BYTES: usize = 1;
    const GROUP: (usize, usize) = (2048, 4);
    const SHARE: f64 = 0.25;
    const LEAST: (f64, f64) = (1.0 / 11.0, 1.0 / (1u64 << 18) as f64);

    fn place(greatest: &[u32], group: &mut [u8], scales: &mut [u8], factors: &mut [f32]) {
        let most = greatest.iter().map(|&bits| if is_finite(bits) { bits } else { 0 }).fold(0, u32::max);
        let largest = Self::FLOAT.largest() * SmallFloat::E4m3.largest();
        let quotient = f32::from_bits(most) / largest;
        let scale = f32::from_bits(quotient.to_bits() & !UNUSED_BITS).max(LEAST_GROUP);
        group.copy_from_slice(&scale.to_le_bytes());
        let inverse = 1.0 / (Self::FLOAT.largest() * scale);
        for ((&greatest, byte), factor) in greatest.iter().zip(scales).zip(factors) {
            let of_block = if is_finite(greatest) { f32::from_bits(greatest) } else { 0.0 };
            let code = to_e4m3(of_block * inverse).max(1);
            *byte = if is_finite(greatest) { code } else { NAN };
            *factor = 1.0 / (from_e4m3(code) * scale);
        }
    }

    fn scales(group: &[u8], scales: &[u8], of_blocks: &mut [f32]) {
        let group = group.try_into().map_or(f32::NAN, f32::from_le_bytes);
        let group = if group.is_nan() { f32::NAN } else { group };
        for (scale, &byte) in of_blocks.iter_mut().zip(scales) {
            *scale = from_e4m3(byte) * group;
        }
    }
}
