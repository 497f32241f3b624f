//! Max-min uniform: the levels of a bucket lie evenly between its least and its greatest value.
//!
//! The format is defined in [`super::uniform`], with unit and min for each bucket, and L = 2^bits - 1.
//!
//! # Arithmetic
//! 16-bit metadata rounds min down, and then unit = (max - min) / L up. float32 metadata keeps min and rounds unit to
//! nearest. A range of zero has unit 0; otherwise unit is at least the smallest normal number of the metadata's type.
//! If max - min overflows, unit is max / L - min / L, and levels are found from halves.
//!
//! The scheme is QSGD (Alistarh et al., 2017) with the grid of its implementations: two points per bucket
//! instead of a norm.

use accl_types::Dtype;

use super::cast;
use super::loops::Range;
use super::settings::{Setting, Settings};
use super::traits::{Bound, Buckets, Loss, NonFinite, Row, Summary};
use super::uniform::{self, Placed, Scheme, Uniform, bucket_of, range_of, rounding_of, smallest_normal, toward};
use crate::reduce::float16::Toward;

pub(super) const ROW: Row = Row {
    id: 3,
    name: "maxmin",
    description: "levels spaced evenly between the smallest and the largest value of a bucket",
    settings: &Setting::ALL,
    bits: 1..=8,
    buckets: Buckets::MultiplesOf8,
    shared: bucket_of,
    is_cast: false,
    loss,
    needs_feedback: false,
    hides_magnitudes: false,
    next_finer: |settings| {
        ROW.with_bits(settings, settings.bits + 1).or_else(|| Some(Summary::new(&cast::BF16, Settings::default())))
    },
    auto: &["maxmin:8,bucket=512", "maxmin:4,bucket=128", "maxmin:2,bucket=64"],
    bound: |settings, values, _| bound_of_range(settings, range_of(values)),
    build: Uniform::<MaxMin>::build,
};

struct MaxMin;

/// Returns the loss. With one bit a value becomes one of the two ends of the range. For values around the middle, that
/// is an error greater than the values.
pub(super) fn loss(settings: &Settings) -> Loss {
    match settings.bits {
        1 => Loss::Divergent,
        2 => Loss::Coarse,
        _ => Loss::Fine,
    }
}

/// Returns the bound of values between `least` and `greatest`.
pub(super) fn bound_of_range(settings: &Settings, (least, greatest): (f64, f64)) -> Bound {
    let magnitude = greatest.max(-least).max(0.0);
    if greatest <= least && settings.meta == Dtype::F32 {
        return Bound { share: 0.0, floor: magnitude * 2f64.powi(-20) };
    }
    // 16-bit metadata rounds the minimum down.
    let below = if settings.meta == Dtype::F32 { 0.0 } else { magnitude * rounding_of(settings.meta) + 2f64.powi(-24) };
    let top = f64::from(MaxMin::top(settings.bits));
    uniform::bound(settings, (greatest - least + below) / top, magnitude)
}

impl Scheme for MaxMin {
    const ROW: &'static Row = &ROW;
    const META: usize = 2;

    fn top(bits: u8) -> f32 {
        ((1u32 << bits) - 1) as f32
    }

    #[inline]
    fn place(settings: &Settings, range: Range) -> Result<Placed, NonFinite> {
        let (top, meta) = (Self::top(settings.bits), settings.meta);
        // Adds 0.0 to avoid -0, which would decode to another zero than the +0 of a neighbour.
        let min = toward(meta, range.min, Toward::Down) + 0.0;
        let width = range.max - min;
        if width == 0.0 {
            return Ok(Placed::constant(min, top));
        }
        let halves = width.is_infinite();
        let unit = if halves { range.max / top - min / top } else { width / top };
        let unit = toward(meta, unit, Toward::Up).max(smallest_normal(meta));
        Placed::new(unit, min, top, halves)
    }

    fn min_of(_: f32, _: u8) -> f32 {
        unreachable!("the minimum is in the metadata")
    }
}
