//! Conversion of float16 and bfloat16 to float32 and back, without branches so that a loop over them vectorises.
//! Narrowing rounds to nearest even and makes NaN canonical; denormals are exact in both directions.

/// The canonical NaN of float16.
const F16_NAN: u32 = 0x7e00;
const F16_INFINITY: u32 = 0x7c00;
/// The canonical NaN of bfloat16.
pub(crate) const BF16_NAN: u32 = 0x7fc0;

/// Exponent of float32 all ones: infinity.
const F32_INFINITY: u32 = 0x7f80_0000;

/// The smallest normal number of float16, 2^-14.
pub(crate) const F16_SMALLEST_NORMAL: f32 = f32::from_bits((127 - 14) << 23);
/// The largest finite numbers of the two types.
pub(crate) const F16_MAX: f32 = 65504.0;
pub(crate) const BF16_MAX: f32 = f32::from_bits(0x7f7f_0000);

/// Side to which a value is rounded that the type cannot represent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Toward {
    Down,
    Up,
}

/// Returns the nearest float16 on that side. `value` is not NaN.
pub(crate) fn narrow_f16_toward(value: f32, side: Toward) -> u16 {
    let nearest = narrow_f16(value);
    stepped(nearest, widen_f16(nearest), value, side)
}

/// Returns the nearest bfloat16 on that side. `value` is not NaN.
pub(crate) fn narrow_bf16_toward(value: f32, side: Toward) -> u16 {
    let nearest = narrow_bf16(value);
    stepped(nearest, widen_bf16(nearest), value, side)
}

/// Returns `nearest`, whose value is `wide`, or its neighbour if `nearest` is on the wrong side of `value`.
fn stepped(nearest: u16, wide: f32, value: f32, side: Toward) -> u16 {
    const SIGN: u16 = 0x8000;
    match side {
        Toward::Down if wide > value => match nearest {
            0 | SIGN => SIGN | 1,
            negative if negative & SIGN != 0 => negative + 1,
            positive => positive - 1,
        },
        Toward::Up if wide < value => match nearest {
            0 | SIGN => 1,
            negative if negative & SIGN != 0 => negative - 1,
            positive => positive + 1,
        },
        Toward::Down | Toward::Up => nearest,
    }
}

#[inline(always)]
pub(crate) fn widen_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[inline(always)]
pub(crate) fn narrow_bf16(value: f32) -> u16 {
    (round_bf16(value) >> 16) as u16
}

/// Returns the bfloat16 in the upper half; the lower half has no meaning.
// The processors' own conversion (AVX512_BF16) flushes denormals, so it cannot be used.
#[inline(always)]
pub(crate) fn round_bf16(value: f32) -> u32 {
    let bits = value.to_bits();
    // Adds half of the lowest kept bit, less one unless that bit is odd: ties go to even.
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    if value.is_nan() { BF16_NAN << 16 } else { rounded }
}

#[inline(always)]
pub(crate) fn widen_f16(bits: u16) -> f32 {
    /// 2^112: the exponents' biases are 127 and 15.
    const REBIAS: f32 = f32::from_bits((112 + 127) << 23);
    let magnitude = u32::from(bits & 0x7fff);
    // Read as float32, the shifted bits are the value times 2^-112, denormals of either type included: the product is
    // exact.
    let finite = (f32::from_bits(magnitude << 13) * REBIAS).to_bits();
    let special = if magnitude >= F16_INFINITY { F32_INFINITY } else { 0 };
    f32::from_bits(finite | special | u32::from(bits & 0x8000) << 16)
}

#[inline(always)]
pub(crate) fn narrow_f16(value: f32) -> u16 {
    /// 2^-14, the smallest normal number of float16.
    const SMALLEST_NORMAL: u32 = (127 - 14) << 23;
    /// Halfway between the largest float16 and the next power of two: from here on the result is infinite.
    const OVERFLOW: u32 = 0x477f_f000;
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    // float16's denormals and float32 at 0.5 have the same unit in the last place, so the addition rounds as needed.
    let denormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + (magnitude >> 13 & 1)) >> 13;
    let mut result = if magnitude < SMALLEST_NORMAL { denormal } else { normal };
    result = if magnitude >= OVERFLOW { F16_INFINITY } else { result };
    result |= bits >> 16 & 0x8000;
    (if value.is_nan() { F16_NAN } else { result }) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widening_is_exact_for_every_bit_pattern() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (widen_f16(bits), half::f16::from_bits(bits).to_f32());
            assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(), "float16 {bits:#06x}");
            let (ours, theirs) = (widen_bf16(bits), half::bf16::from_bits(bits).to_f32());
            assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(), "bfloat16 {bits:#06x}");
        }
    }

    /// Every value of the narrow type, the midpoint to its successor, and both neighbours of each in float32.
    #[test]
    fn narrowing_rounds_to_nearest_even_at_every_boundary() {
        let step = if cfg!(miri) { 997 } else { 1 };
        for bits in (0..u16::MAX).step_by(step) {
            for (low, high) in [(widen_f16(bits), widen_f16(bits + 1)), (widen_bf16(bits), widen_bf16(bits + 1))] {
                let middle = ((f64::from(low) + f64::from(high)) / 2.0) as f32;
                for near in [low, middle] {
                    for offset in [-1i32, 0, 1] {
                        check_narrowing(f32::from_bits(near.to_bits().wrapping_add_signed(offset)));
                    }
                }
            }
        }
    }

    fn check_narrowing(value: f32) {
        let (f16, bf16) = if value.is_nan() {
            (F16_NAN as u16, BF16_NAN as u16)
        } else {
            (half::f16::from_f32(value).to_bits(), half::bf16::from_f32(value).to_bits())
        };
        assert_eq!(narrow_f16(value), f16, "float16 of {value:e} ({:#010x})", value.to_bits());
        assert_eq!(narrow_bf16(value), bf16, "bfloat16 of {value:e} ({:#010x})", value.to_bits());
    }

    #[test]
    fn narrowing_spans_the_whole_range() {
        let step = if cfg!(miri) { 100_000_007 } else { 104_729 };
        for bits in (0..=u32::MAX).step_by(step) {
            check_narrowing(f32::from_bits(bits));
        }
        for value in [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, f32::from_bits(1)] {
            check_narrowing(value);
        }
    }
}
