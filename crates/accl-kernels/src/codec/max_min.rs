//! Max-min uniform: the levels of a bucket lie evenly between its least and its greatest value.
//!
//! The format is that of [`super::uniform`], with unit and min for each bucket, and L = 2^bits - 1.
//!
//! # Arithmetic
//! 16-bit metadata rounds min down, then unit = (max - min) / L up; float32 metadata has min as it is and rounds unit to
//! nearest. A range of zero has unit 0; otherwise unit is at least the smallest normal number of the metadata's type. Where
//! max - min overflows, unit is max / L - min / L, and levels are found from halves.
//!
//! The scheme is that of QSGD (Alistarh et al., 2017) with the grid of its implementations: two points per bucket in place of
//! a norm.

use super::loops::Range;
use super::settings::{Setting, Settings};
use super::traits::{Row, Spoilt};
use super::uniform::{Placed, Scheme, Uniform, smallest_normal, toward};
use crate::reduce::float16::Toward;

pub(super) const ROW: Row = Row {
    id: 3,
    name: "maxmin",
    description: "levels evenly between the least and the greatest value of a bucket, 1 to 8 bits",
    settings: &Setting::ALL,
    needs_feedback: false,
    build: Uniform::<MaxMin>::build,
};

struct MaxMin;

impl Scheme for MaxMin {
    const ROW: &'static Row = &ROW;
    const LEAST_BITS: u8 = 1;
    const META: usize = 2;

    fn top(bits: u8) -> f32 {
        ((1u32 << bits) - 1) as f32
    }

    #[inline]
    fn place(settings: &Settings, range: Range) -> Result<Placed, Spoilt> {
        let (top, meta) = (Self::top(settings.bits), settings.meta);
        // No -0, which would decode to another zero than the +0 of a neighbour.
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
        unreachable!("it is among the metadata")
    }
}
