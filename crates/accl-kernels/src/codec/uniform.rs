//! Common part of the codecs whose levels lie evenly in each bucket.
//!
//! Encoded, a slice is
//! ```text
//! meta     for each bucket: unit, and min if the scheme has one
//! codes    `bits` each, the first in the lowest bits      ceil(count * bits / 8)
//! zeros    up to a multiple of 8
//! tail     with `skip_incomplete`: the elements after the last full bucket, unencoded
//! zeros    up to a multiple of 8 of the whole
//! ```
//! All numbers are in little-endian order. With `skip_incomplete`, `count` above is the count of elements in full
//! buckets.
//!
//! # Arithmetic
//! All in float32, each operation rounded, with L the highest level:
//! * s = (x - min) * (1 / unit);
//! * nearest: level = nearest-even(s); stochastic: level = (nearest-even(256 s) + u) >> 8 with u from 0 to 255; at most
//!   L;
//! * correlated: like stochastic, with the random bits of [`super::rng`] among ranks instead of u;
//! * a decoded value is min + unit * level, fused.

use std::marker::PhantomData;
use std::mem::{self, MaybeUninit};
use std::ops;
use std::sync::Arc;

use accl_types::Dtype;

use super::loops::{Buckets, Grid, Loops, Range, Scale};
use super::pieces::{Overflow, PIECE, add, convert, place, read, write};
use super::rng::RandomBits;
use super::rng::RngKey;
use super::settings::{Rounding, Settings};
use super::traits::{Bound, Codec, NonFinite, Row, Slice, Summary};
use crate::dispatch;
use crate::float_env::DefaultFloatEnv;
use crate::isa::Isa;
use crate::reduce::float16::{self, Toward};

const LEAST_BUCKET: usize = 8;
const ALIGN_BYTES: usize = 8;

/// Maximum elements that are encoded together: whole buckets, or a part of a larger one. Few, since memory is idle
/// while levels are found.
const SPAN: usize = PIECE;
/// The same limit for decoding, during which memory is not idle.
const RUN: usize = 2048;

/// Position of the levels of a bucket: the part that a codec of this family defines.
pub(super) trait Scheme: Send + Sync + 'static {
    /// The row in the table of codecs.
    const ROW: &'static Row;
    /// Values of metadata for each bucket: unit, and min if there are two.
    const META: usize;

    /// Returns the highest level.
    fn top(bits: u8) -> f32;

    /// Returns unit and min of a bucket of finite values as their metadata stores them, or how the bucket is counted if
    /// it becomes NaN.
    fn place(settings: &Settings, range: Range) -> std::result::Result<Placed, NonFinite>;

    /// Returns `min` if it is not part of the metadata.
    fn min_of(unit: f32, bits: u8) -> f32;
}

/// Intermediate results for a span of buckets.
#[derive(Clone, Copy)]
struct Found {
    ranges: [Range; SPAN / LEAST_BUCKET],
    grids: [Grid; SPAN / LEAST_BUCKET],
    /// The values as float32, if they cannot be used in place.
    values: [f32; SPAN],
}

impl Found {
    const EMPTY: Found = Found {
        ranges: [Range::NEUTRAL; SPAN / LEAST_BUCKET],
        grids: [Grid { min: 0.0, inverse: 0.0, top: 0.0 }; SPAN / LEAST_BUCKET],
        values: [0.0; SPAN],
    };
}

/// A codec with evenly spaced levels in each bucket.
pub(super) struct Uniform<S> {
    settings: Settings,
    loops: &'static Loops,
    scheme: PhantomData<S>,
}

/// Returns the bound of values between the levels of a grid with this unit, of `magnitude` at most. It is half a unit,
/// or a whole unit if rounding is not to nearest, plus the rounding of arithmetic and metadata.
pub(super) fn bound(settings: &Settings, unit: f64, magnitude: f64) -> Bound {
    let levels = if settings.rounding == Rounding::Nearest { 0.5 } else { 1.0 };
    let unit = (unit * (1.0 + rounding_of(settings.meta))).max(f64::from(smallest_normal(settings.meta)));
    Bound { share: 0.0, floor: unit * levels + magnitude * 2f64.powi(-20) }
}

/// Returns the maximum relative change of a normal number when it is rounded to metadata.
pub(super) fn rounding_of(meta: Dtype) -> f64 {
    2f64.powi(match meta {
        Dtype::F16 => -10,
        Dtype::BF16 => -7,
        _ => -16,
    })
}

/// Returns the least and the greatest of finite values.
pub(super) fn range_of(values: &[f32]) -> (f64, f64) {
    let least = values.iter().copied().fold(f32::INFINITY, f32::min);
    let greatest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    (f64::from(least), f64::from(greatest))
}

/// Returns the elements of a bucket.
pub(super) fn bucket_of(settings: &Settings) -> usize {
    settings.bucket as usize
}

/// Offsets of the parts of an encoded slice, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layout {
    /// Number of elements in buckets; elements after them are sent unencoded.
    coded: usize,
    codes_at: usize,
    codes_end: usize,
    tail_at: usize,
    tail_end: usize,
    end: usize,
}

/// Returns a value of the metadata's type that is not above, or not below, the given one. float32 is returned
/// unchanged.
#[inline]
pub(super) fn toward(meta: Dtype, value: f32, side: Toward) -> f32 {
    match meta {
        Dtype::F16 => float16::widen_f16(float16::narrow_f16_toward(value, side)),
        Dtype::BF16 => float16::widen_bf16(float16::narrow_bf16_toward(value, side)),
        _ => value,
    }
}

#[inline]
pub(super) fn smallest_normal(meta: Dtype) -> f32 {
    match meta {
        Dtype::F16 => float16::F16_SMALLEST_NORMAL,
        // bfloat16 has the exponents of float32.
        _ => f32::MIN_POSITIVE,
    }
}

/// The metadata of a bucket, and the grid with which its levels are found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Placed {
    pub(super) unit: f32,
    pub(super) min: f32,
    pub(super) grid: Grid,
    /// Whether the grid is for halves of the values.
    pub(super) halves: bool,
}

impl Placed {
    /// Creates the metadata of a bucket whose values are all `min`.
    #[inline]
    pub(super) fn constant(min: f32, top: f32) -> Self {
        Self { unit: 0.0, min, grid: Grid { min, inverse: 0.0, top }, halves: false }
    }

    /// Creates the metadata of levels from `min` on, `unit` apart, if all of them decode to finite values.
    #[inline]
    pub(super) fn new(unit: f32, min: f32, top: f32, halves: bool) -> std::result::Result<Self, NonFinite> {
        let highest = f64::from(unit) * f64::from(top) + f64::from(min);
        if !min.is_finite() || !(highest as f32).is_finite() {
            return Err(NonFinite { not_finite: 0, too_large: 1 });
        }
        let by = if halves { 0.5 } else { 1.0 };
        Ok(Self { unit, min, grid: Grid { min: min * by, inverse: 1.0 / (unit * by), top }, halves })
    }
}

impl<S: Scheme> Uniform<S> {
    pub(super) fn build(settings: &Settings, isa: Isa) -> Arc<dyn Codec> {
        Arc::new(Self { settings: *settings, loops: dispatch::loops(isa), scheme: PhantomData })
    }

    fn bucket(&self) -> usize {
        self.settings.bucket as usize
    }

    /// Bytes of a bucket's metadata.
    fn meta_bytes(&self) -> usize {
        S::META * self.settings.meta.size_bytes()
    }

    fn layout(&self, tensor: Dtype, count: usize) -> Layout {
        let coded = if self.settings.skip_incomplete { count - count % self.bucket() } else { count };
        let codes_at = self.meta_bytes() * coded.div_ceil(self.bucket());
        let codes_end = codes_at + self.code_bytes(coded);
        let tail_at = codes_at + (codes_end - codes_at).next_multiple_of(ALIGN_BYTES);
        let tail_end = tail_at + (count - coded) * tensor.size_bytes();
        Layout { coded, codes_at, codes_end, tail_at, tail_end, end: tail_end.next_multiple_of(ALIGN_BYTES) }
    }

    /// Returns the bytes of the codes of `elements` elements.
    fn code_bytes(&self, elements: usize) -> usize {
        (elements * usize::from(self.settings.bits)).div_ceil(8)
    }

    /// Returns the elements of the whole buckets that fit into `most` elements, but at least of one bucket.
    fn whole(&self, most: usize) -> usize {
        self.bucket() * (most / self.bucket()).max(1)
    }

    /// Returns unit, min and grid of a bucket, or how the bucket is counted if it becomes NaN.
    #[inline]
    fn place(&self, range: Range) -> std::result::Result<Placed, NonFinite> {
        if range.finite { S::place(&self.settings, range) } else { Err(NonFinite { not_finite: 1, too_large: 0 }) }
    }

    #[inline]
    fn write_meta(&self, meta: &mut [u8], unit: f32, min: f32) {
        let (unit_at, min_at) = meta.split_at_mut(self.settings.meta.size_bytes());
        write(self.settings.meta, unit_at, unit);
        if !min_at.is_empty() {
            write(self.settings.meta, min_at, min);
        }
    }

    /// Writes the codes of values. The first value is at `first`, to which the random bits were turned.
    #[inline]
    fn write_codes(
        &self,
        codes: &mut [u8],
        values: &[f32],
        grids: Buckets<Grid>,
        random_bits: &RandomBits,
        first: u64,
    ) {
        // SAFETY: the instruction set was checked when `self` was made.
        unsafe {
            match self.settings.rounding {
                Rounding::Nearest => (self.loops.encode)(codes, values, grids),
                Rounding::Stochastic | Rounding::Correlated => {
                    (self.loops.encode_drawn)(codes, values, grids, random_bits, first)
                }
            }
        }
    }

    /// Reads a span and finds the ranges of its buckets.
    ///
    /// # Safety
    /// The contract of [`Slice::piece`].
    #[inline]
    unsafe fn read(&self, span: Slice, found: &mut Found) {
        let Found { ranges, values, .. } = found;
        // SAFETY: the span may be read by this function's contract; the instruction set was checked when `self` was
        // made.
        unsafe {
            if span.count <= SPAN {
                let ranges = &mut ranges[..span.count.div_ceil(self.bucket())];
                return (self.loops.ranges)(ranges, span.piece(values, 0, self.loops), self.bucket());
            }
            ranges[0] = (0..span.count).step_by(SPAN).fold(Range::NEUTRAL, |all, start| {
                all.joined((self.loops.range)(span.piece(values, start, self.loops)))
            });
        }
    }

    /// Writes the metadata of a span, and finds its grids. Returns `false` if its buckets must be encoded one by one.
    #[inline]
    fn place_all(&self, metas: &mut [u8], found: &mut Found) -> bool {
        let mut are_plain = true;
        for (index, at) in (0..metas.len()).step_by(self.meta_bytes()).enumerate() {
            match self.place(found.ranges[index]) {
                Ok(placed) => {
                    found.grids[index] = placed.grid;
                    are_plain &= !placed.halves;
                    self.write_meta(&mut metas[at..at + self.meta_bytes()], placed.unit, placed.min);
                }
                Err(_) => are_plain = false,
            }
        }
        are_plain
    }

    /// Writes metadata and codes of buckets one by one, including buckets that become NaN or are encoded from halves.
    ///
    /// # Safety
    /// The contract of [`Slice::piece`].
    #[inline(never)]
    unsafe fn encode_each(
        &self,
        metas: &mut [u8],
        codes: &mut [u8],
        span: Slice,
        found: &mut Found,
        random_bits: &mut RandomBits,
    ) -> NonFinite {
        let mut non_finite = NonFinite::default();
        let buckets = metas.chunks_exact_mut(self.meta_bytes()).zip(codes.chunks_mut(self.code_bytes(self.bucket())));
        for (((meta, codes), &range), begin) in buckets.zip(&found.ranges).zip((0..).step_by(self.bucket())) {
            let bucket = span.part(begin, self.bucket().min(span.count - begin));
            match self.place(range) {
                Ok(placed) => {
                    self.write_meta(meta, placed.unit, placed.min);
                    // SAFETY: `bucket` lies in the span, which may be read by this function's contract.
                    unsafe { self.encode_bucket(codes, bucket, &placed, &mut found.values, random_bits) };
                }
                Err(this_one) => {
                    self.write_meta(meta, f32::NAN, f32::NAN);
                    codes.fill(0);
                    non_finite += this_one;
                }
            }
        }
        non_finite
    }

    /// Writes the codes of a bucket.
    ///
    /// # Safety
    /// The contract of [`Slice::piece`].
    unsafe fn encode_bucket(
        &self,
        codes: &mut [u8],
        bucket: Slice,
        placed: &Placed,
        room: &mut [f32; SPAN],
        random_bits: &mut RandomBits,
    ) {
        let grids = Buckets { of: &[placed.grid], bucket: bucket.count.next_multiple_of(8), bits: self.settings.bits };
        let mut start = 0;
        while start < bucket.count {
            let first = bucket.first + start as u64;
            let piece = bucket.part(start, random_bits.seek(first).min(bucket.count - start));
            let mut halved;
            // SAFETY: the bucket may be read by this function's contract; the instruction set was checked when `self`
            // was made.
            unsafe {
                let mut values = piece.piece(room, 0, self.loops);
                let codes = &mut codes[self.code_bytes(start)..self.code_bytes(start + values.len())];
                start += values.len();
                if placed.halves {
                    halved = [0.0; SPAN];
                    values.iter().zip(&mut halved).for_each(|(value, half)| *half = value / 2.0);
                    values = &halved[..values.len()];
                }
                self.write_codes(codes, values, grids, random_bits, first);
            }
        }
    }

    /// Calls `each` with the elements, the packed codes and the scales of every run of buckets, in their order.
    fn decode_runs(&self, src: &[u8], layout: &Layout, mut each: impl FnMut(ops::Range<usize>, &[u8], Buckets<Scale>)) {
        let Settings { bits, meta, .. } = self.settings;
        let (run, bucket) = (self.whole(RUN), self.bucket());
        let mut room = [Scale { unit: 0.0, min: 0.0 }; RUN / LEAST_BUCKET];
        let codes = src[layout.codes_at..layout.codes_end].chunks(self.code_bytes(run));
        let metas = src[..layout.codes_at].chunks(self.meta_bytes() * (run / bucket));
        for ((codes, metas), begin) in codes.zip(metas).zip((0..layout.coded).step_by(run)) {
            let mut buckets = 0;
            while let Some(pair) = metas.get(buckets * self.meta_bytes()..(buckets + 1) * self.meta_bytes()) {
                let (unit, min) = pair.split_at(meta.size_bytes());
                let unit = read(meta, unit);
                let min = if min.is_empty() { S::min_of(unit, bits) } else { read(meta, min) };
                // Any NaN becomes the canonical NaN.
                let is_nan = unit.is_nan() || min.is_nan();
                room[buckets] = if is_nan { Scale { unit: f32::NAN, min: f32::NAN } } else { Scale { unit, min } };
                buckets += 1;
            }
            let end = layout.coded.min(begin + run);
            // If there is more than one piece, all pieces belong to one bucket.
            for start in (begin..end).step_by(RUN) {
                let (start, end) = (start, end.min(start + RUN));
                let codes = &codes[self.code_bytes(start - begin)..self.code_bytes(end - begin)];
                each(start..end, codes, Buckets { of: &room[..buckets], bucket, bits });
            }
        }
    }
}

impl<S: Scheme> Codec for Uniform<S> {
    fn summary(&self) -> Summary {
        Summary::new(S::ROW, self.settings)
    }

    fn grain(&self) -> usize {
        self.bucket()
    }

    fn encoded_bytes(&self, tensor: Dtype, count: usize) -> usize {
        self.layout(tensor, count).end
    }

    unsafe fn encode(&self, dst: &mut [u8], slice: Slice, rng_key: RngKey) -> NonFinite {
        let _env = DefaultFloatEnv::enter();
        let count = slice.count;
        let layout = self.layout(slice.tensor, count);
        assert_eq!(dst.len(), layout.end, "room for {count} encoded elements");
        let (metas, rest) = dst.split_at_mut(layout.codes_at);
        let (codes, tail) = rest.split_at_mut(layout.tail_at - layout.codes_at);
        let (codes, zeros) = codes.split_at_mut(layout.codes_end - layout.codes_at);
        zeros.fill(0);
        let mut non_finite = NonFinite::default();
        let mut random_bits = RandomBits::new(rng_key, self.settings.rounding);
        let (span, bucket, bits) = (self.whole(SPAN), self.bucket(), self.settings.bits);
        let span_at = |begin: usize| slice.part(begin, span.min(layout.coded - begin));
        let mut found = [Found::EMPTY; 2];
        let [now, next] = &mut found;
        let (mut now, mut next) = (now, next);
        let metas = metas.chunks_mut(self.meta_bytes() * (span / bucket));
        for ((metas, codes), begin) in metas.zip(codes.chunks_mut(self.code_bytes(span))).zip((0..).step_by(span)) {
            let (here, end) = (span_at(begin), begin + span);
            if begin == 0 || span > SPAN {
                // SAFETY: `here` lies in the slice, which may be read by this function's contract.
                unsafe { self.read(here, now) };
            }
            let are_plain = self.place_all(metas, now) && random_bits.seek(here.first) >= here.count;
            // SAFETY: the spans lie in the slice, which may be read by this function's contract; the instruction set
            // was checked when `self` was made.
            unsafe {
                // Reads the next span now, because a processor can load while it divides.
                if span <= SPAN && end < layout.coded {
                    self.read(span_at(end), next);
                }
                if are_plain && here.count <= SPAN {
                    let values = here.in_place().unwrap_or(&now.values[..here.count]);
                    let grids = Buckets { of: &now.grids[..here.count.div_ceil(bucket)], bucket, bits };
                    self.write_codes(codes, values, grids, &random_bits, here.first);
                } else {
                    non_finite += self.encode_each(metas, codes, here, now, &mut random_bits);
                }
            }
            mem::swap(&mut now, &mut next);
        }
        let (tail, zeros) = tail.split_at_mut(layout.tail_end - layout.tail_at);
        zeros.fill(0);
        // SAFETY: the elements after the coded ones belong to the slice, too, and `tail` has room for them.
        unsafe { convert(tail.as_mut_ptr(), slice.tensor, slice.part(layout.coded, count - layout.coded), self.loops) };
        non_finite
    }

    unsafe fn decode(&self, dst: *mut u8, into: Dtype, src: &[u8], tensor: Dtype, count: usize) {
        let _env = DefaultFloatEnv::enter();
        let layout = self.layout(tensor, count);
        assert_eq!(src.len(), layout.end, "encoded bytes of {count} elements");
        let mut room = [MaybeUninit::uninit(); RUN];
        self.decode_runs(src, &layout, |elements, codes, scales| {
            let dst = dst.wrapping_add(elements.start * into.size_bytes());
            // SAFETY: the elements of the run lie in the result, for which `dst` has room by this function's contract.
            unsafe {
                place(dst, (into, Overflow::Largest), elements.len(), &mut room, self.loops, |values| {
                    (self.loops.decode)(values, codes, scales)
                })
            };
        });
        let tail = &src[layout.tail_at..layout.tail_end];
        let tail = Slice { src: tail.as_ptr(), dtype: tensor, tensor, count: count - layout.coded, first: 0 };
        // SAFETY: the elements after the coded ones lie in the result, too; `tail` has this many elements of the
        // tensor's type.
        unsafe { convert(dst.wrapping_add(layout.coded * into.size_bytes()), into, tail, self.loops) };
    }

    fn decode_add(&self, sums: &mut [f32], src: &[u8], tensor: Dtype) {
        let _env = DefaultFloatEnv::enter();
        let layout = self.layout(tensor, sums.len());
        assert_eq!(src.len(), layout.end, "encoded bytes of {} elements", sums.len());
        self.decode_runs(src, &layout, |elements, codes, scales| {
            // SAFETY: the instruction set was checked when `self` was made.
            unsafe { (self.loops.decode_add)(&mut sums[elements], codes, scales) };
        });
        add(&mut sums[layout.coded..], &src[layout.tail_at..layout.tail_end], tensor, self.loops);
    }
}
