//! Absmax: the levels of a bucket lie evenly on both sides of zero, up to its greatest magnitude. Zero stays zero.
//!
//! The format is defined in [`super::uniform`], with only the unit for each bucket: half the metadata of max-min. With
//! q = 2^(bits - 1) - 1, a code is its level plus q. Hence L = 2 q, and min = -q * unit.
//!
//! # Arithmetic
//! unit = max |x| / q, rounded up to 17 significant bits, so that its product with any level is exact. 16-bit metadata
//! has fewer significant bits and rounds up to these. unit is at least the smallest normal number of the metadata's
//! type, or 0 if all values are zero.
//!
//! This is the symmetric quantization of integer inference, as in Jacob et al., 2018, applied to buckets.

use super::cast;
use super::loops::Range;
use super::settings::{Setting, Settings};
use super::traits::{Buckets, Loss, NonFinite, Row, Summary};
use super::uniform::{self, Placed, Scheme, Uniform, bucket_of, range_of, smallest_normal, toward};
use crate::reduce::float16::Toward;

pub(super) const ROW: Row = Row {
    id: 4,
    name: "absmax",
    description: "levels spaced evenly on both sides of zero, up to the largest magnitude of a bucket; zero stays zero",
    settings: &Setting::ALL,
    bits: 2..=8,
    buckets: Buckets::MultiplesOf8,
    shared: bucket_of,
    is_cast: false,
    loss: |settings| if settings.bits <= 2 { Loss::Coarse } else { Loss::Fine },
    needs_feedback: false,
    hides_magnitudes: false,
    next_finer: |settings| {
        ROW.with_bits(settings, settings.bits + 1).or_else(|| Some(Summary::new(&cast::BF16, Settings::default())))
    },
    auto: &[],
    bound: |settings, values, _| {
        let (least, greatest) = range_of(values);
        let magnitude = greatest.max(-least).max(0.0);
        uniform::bound(settings, magnitude / f64::from(AbsMax::reach(settings.bits)), magnitude)
    },
    build: Uniform::<AbsMax>::build,
};

struct AbsMax;

/// Number of lowest bits of a float32 that are zero in a unit.
const UNUSED_BITS: u32 = 7;

impl AbsMax {
    /// Returns the greatest level above zero.
    fn reach(bits: u8) -> f32 {
        ((1u32 << (bits - 1)) - 1) as f32
    }
}

/// Rounds a number that is not negative up, so that its products with levels of 7 bits are exact.
fn with_short_mantissa(value: f32) -> f32 {
    let unused = (1u32 << UNUSED_BITS) - 1;
    f32::from_bits((value.to_bits() + unused) & !unused)
}

impl Scheme for AbsMax {
    const ROW: &'static Row = &ROW;
    const META: usize = 1;

    fn top(bits: u8) -> f32 {
        2.0 * Self::reach(bits)
    }

    #[inline]
    fn place(settings: &Settings, range: Range) -> Result<Placed, NonFinite> {
        let (top, meta) = (Self::top(settings.bits), settings.meta);
        let most = range.max.max(-range.min);
        if most == 0.0 {
            return Ok(Placed::constant(0.0, top));
        }
        let unit = with_short_mantissa(most / Self::reach(settings.bits));
        let unit = toward(meta, unit, Toward::Up).max(smallest_normal(meta));
        // The range is twice the magnitude. If the range overflows, levels are found from halved values, which do not.
        let halves = (2.0 * most).is_infinite();
        Placed::new(unit, Self::min_of(unit, settings.bits), top, halves)
    }

    fn min_of(unit: f32, bits: u8) -> f32 {
        // Subtracts from 0.0 to avoid -0, which would decode to another zero.
        0.0 - unit * Self::reach(bits)
    }
}
