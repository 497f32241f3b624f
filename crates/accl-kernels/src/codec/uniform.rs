//! Codecs whose levels lie evenly in each bucket: what they have in common.
//!
//! Encoded, a slice is
//! ```text
//! meta     for each bucket: unit, and min where the scheme has one
//! codes    `bits` each, the first in the lowest bits      ceil(count * bits / 8)
//! zeros    up to a multiple of 8
//! tail     with `skip_incomplete`: what is behind the last full bucket, as it is
//! zeros    up to a multiple of 8 of the whole
//! ```
//! in little-endian order; with `skip_incomplete`, `count` in it is that of the full buckets.
//!
//! # Arithmetic
//! All in float32, each operation rounded, with L the highest level:
//! * s = (x - min) * (1 / unit);
//! * nearest: level = nearest-even(s); stochastic: level = (nearest-even(256 s) + u) >> 8 with u from 0 to 255; at most L;
//! * correlated: as stochastic, with the draws of [`super::noise`] among ranks in place of u;
//! * a decoded value is min + unit * level, fused.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops;
use std::sync::Arc;

use accl_types::{Dtype, Error, Result};

use super::loops::{Grid, Loops, Range};
use super::noise::Draws;
use super::pieces::{Beyond, PIECE, add, convert, place, read, write};
use super::{Codec, Noise, Rounding, Settings, Slice, Spoilt, Summary, encodes};
use crate::arch::{self, Isa};
use crate::float_env::DefaultFloatEnv;
use crate::reduce::float16::{self, Toward};

const MOST_BUCKET: u32 = 8192;
const ALIGN_BYTES: usize = 8;

/// Where the levels of a bucket lie: what a codec of this family decides.
pub(super) trait Scheme: Send + Sync + 'static {
    /// The name in the table of codecs.
    const NAME: &'static str;
    /// Fewest bits of a code.
    const LEAST_BITS: u8;
    /// Values of metadata for each bucket: unit, and min if there are two.
    const META: usize;

    /// The highest level.
    fn top(bits: u8) -> f32;

    /// Unit and min of a bucket whose values are finite, as their metadata has them; or what else the bucket counts as.
    fn place(settings: &Settings, range: Range) -> std::result::Result<Placed, Spoilt>;

    /// What is left out of the metadata.
    fn min_of(unit: f32, bits: u8) -> f32;
}

/// A codec with evenly spaced levels in each bucket.
pub(super) struct Uniform<S> {
    settings: Settings,
    loops: &'static Loops,
    scheme: PhantomData<S>,
}

/// # Errors
/// `Configuration` if buckets cannot be so large.
pub(super) fn check_bucket(codec: &str, bucket: u32) -> Result<()> {
    if (8..=MOST_BUCKET).contains(&bucket) && bucket.is_multiple_of(8) {
        return Ok(());
    }
    let expected = format!("expected a multiple of 8 from 8 to {MOST_BUCKET}");
    Err(Error::configuration(format!("codec {codec}: bucket is {bucket}; {expected}")))
}

/// # Errors
/// `Configuration` if metadata cannot be of this type.
pub(super) fn check_meta(codec: &str, meta: Dtype) -> Result<()> {
    if encodes(meta) {
        return Ok(());
    }
    Err(Error::configuration(format!("codec {codec}: meta is {meta}; expected float32, float16 or bfloat16")))
}

/// Where the parts of an encoded slice lie, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layout {
    /// Elements in buckets; those behind them travel as they are.
    coded: usize,
    codes_at: usize,
    codes_end: usize,
    tail_at: usize,
    tail_end: usize,
    end: usize,
}

/// A value of the metadata's type that is not above, or not below, the given one. float32 is as it is.
pub(super) fn toward(meta: Dtype, value: f32, side: Toward) -> f32 {
    match meta {
        Dtype::F16 => float16::widen_f16(float16::narrow_f16_toward(value, side)),
        Dtype::BF16 => float16::widen_bf16(float16::narrow_bf16_toward(value, side)),
        _ => value,
    }
}

pub(super) fn smallest_normal(meta: Dtype) -> f32 {
    match meta {
        Dtype::F16 => float16::F16_SMALLEST_NORMAL,
        // bfloat16 has the exponents of float32.
        _ => f32::MIN_POSITIVE,
    }
}

/// The metadata of a bucket, and what its levels are found with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Placed {
    pub(super) unit: f32,
    pub(super) min: f32,
    pub(super) grid: Grid,
    /// The grid is for halves of the values.
    pub(super) halves: bool,
}

impl Placed {
    /// All values are `min`.
    pub(super) fn constant(min: f32, top: f32) -> Self {
        Self { unit: 0.0, min, grid: Grid { min, inverse: 0.0, top }, halves: false }
    }

    /// Levels from `min` on, `unit` apart, if what they decode to is finite.
    pub(super) fn new(unit: f32, min: f32, top: f32, halves: bool) -> std::result::Result<Self, Spoilt> {
        let highest = f64::from(unit) * f64::from(top) + f64::from(min);
        if !min.is_finite() || !(highest as f32).is_finite() {
            return Err(Spoilt { not_finite: 0, too_large: 1 });
        }
        let by = if halves { 0.5 } else { 1.0 };
        Ok(Self { unit, min, grid: Grid { min: min * by, inverse: 1.0 / (unit * by), top }, halves })
    }
}

impl<S: Scheme> Uniform<S> {
    pub(super) fn build(settings: &Settings, isa: Isa) -> Result<Arc<dyn Codec>> {
        isa.check_available()?;
        let Settings { bits, bucket, meta, .. } = *settings;
        if !(S::LEAST_BITS..=8).contains(&bits) {
            let (name, least) = (S::NAME, S::LEAST_BITS);
            return Err(Error::configuration(format!("codec {name}: bits is {bits}; expected {least} to 8")));
        }
        check_bucket(S::NAME, bucket)?;
        check_meta(S::NAME, meta)?;
        Ok(Arc::new(Self { settings: *settings, loops: arch::loops(isa), scheme: PhantomData }))
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

    /// Bytes of the codes of so many elements.
    fn code_bytes(&self, elements: usize) -> usize {
        (elements * usize::from(self.settings.bits)).div_ceil(8)
    }

    /// # Safety
    /// As for [`Slice::piece`].
    unsafe fn range(&self, bucket: Slice, room: &mut [f32; PIECE]) -> Range {
        (0..bucket.count).step_by(PIECE).fold(Range::NEUTRAL, |all, start| {
            // SAFETY: the caller's promise.
            all.joined(unsafe { (self.loops.range)(bucket.piece(room, start, self.loops)) })
        })
    }

    /// Or what the bucket is counted as.
    fn place(&self, range: Range) -> std::result::Result<Placed, Spoilt> {
        if range.finite { S::place(&self.settings, range) } else { Err(Spoilt { not_finite: 1, too_large: 0 }) }
    }

    /// Writes the codes of a bucket.
    ///
    /// # Safety
    /// As for [`Slice::piece`].
    unsafe fn encode_bucket(
        &self,
        packed: &mut [u8],
        bucket: Slice,
        room: &mut [f32; PIECE],
        (grid, halves): (&Grid, bool),
        draws: &mut Draws,
    ) {
        let bits = self.settings.bits;
        for (start, packed) in (0..bucket.count).step_by(PIECE).zip(packed.chunks_mut(self.code_bytes(PIECE))) {
            let count = PIECE.min(bucket.count - start);
            let mut halved;
            // SAFETY: the caller's promise; the instruction set was checked when `self` was made.
            unsafe {
                let mut values = bucket.piece(room, start, self.loops);
                if halves {
                    halved = [0.0; PIECE];
                    values.iter().zip(&mut halved).for_each(|(value, half)| *half = value / 2.0);
                    values = &halved[..count];
                }
                match self.settings.rounding {
                    Rounding::Nearest => (self.loops.encode)(packed, values, grid, bits),
                    Rounding::Stochastic | Rounding::Correlated => {
                        let mut done = 0;
                        while done < count {
                            let first = bucket.first + (start + done) as u64;
                            let end = count.min(done.saturating_add(draws.turn_to(first)));
                            let packed = &mut packed[self.code_bytes(done)..self.code_bytes(end)];
                            (self.loops.encode_drawn)(packed, &values[done..end], grid, bits, draws, first);
                            done = end;
                        }
                    }
                }
            }
        }
    }

    /// Calls `each` with the elements, the packed codes, unit and min of every piece, in their order.
    fn decode_pieces(&self, src: &[u8], layout: &Layout, mut each: impl FnMut(ops::Range<usize>, &[u8], f32, f32)) {
        let meta = self.settings.meta;
        let buckets = src[layout.codes_at..layout.codes_end].chunks(self.code_bytes(self.bucket()));
        let metas = src[..layout.codes_at].chunks_exact(self.meta_bytes());
        for ((bucket, pair), begin) in buckets.zip(metas).zip((0..layout.coded).step_by(self.bucket())) {
            let (unit, min) = pair.split_at(meta.size_bytes());
            let mut unit = read(meta, unit);
            let mut min = if min.is_empty() { S::min_of(unit, self.settings.bits) } else { read(meta, min) };
            if unit.is_nan() || min.is_nan() {
                // Whatever NaN came: one is like another.
                (unit, min) = (f32::NAN, f32::NAN);
            }
            let end = layout.coded.min(begin + self.bucket());
            for (start, packed) in (begin..end).step_by(PIECE).zip(bucket.chunks(self.code_bytes(PIECE))) {
                each(start..end.min(start + PIECE), packed, unit, min);
            }
        }
    }
}

impl<S: Scheme> Codec for Uniform<S> {
    fn summary(&self) -> Summary {
        Summary::new(S::NAME, Some(&self.settings))
    }

    fn grain(&self) -> usize {
        self.bucket()
    }

    fn encoded_bytes(&self, tensor: Dtype, count: usize) -> usize {
        self.layout(tensor, count).end
    }

    unsafe fn encode(&self, dst: &mut [u8], slice: Slice, noise: Noise) -> Spoilt {
        let _env = DefaultFloatEnv::enter();
        let count = slice.count;
        let layout = self.layout(slice.tensor, count);
        assert_eq!(dst.len(), layout.end, "room for what {count} elements become");
        let (metas, rest) = dst.split_at_mut(layout.codes_at);
        let (codes, tail) = rest.split_at_mut(layout.tail_at - layout.codes_at);
        let (codes, zeros) = codes.split_at_mut(layout.codes_end - layout.codes_at);
        zeros.fill(0);
        let metas = metas.chunks_exact_mut(self.meta_bytes());
        let mut spoilt = Spoilt::default();
        let mut room = [0.0; PIECE];
        let mut draws = Draws::new(noise, self.settings.rounding);
        for ((packed, pair), begin) in
            codes.chunks_mut(self.code_bytes(self.bucket())).zip(metas).zip((0..layout.coded).step_by(self.bucket()))
        {
            let bucket = slice.part(begin, self.bucket().min(layout.coded - begin));
            // SAFETY: the caller's promise: these are elements of the slice.
            let placed = self.place(unsafe { self.range(bucket, &mut room) });
            let (unit, min) = match placed {
                Ok(Placed { unit, min, grid, halves }) => {
                    // SAFETY: as above.
                    unsafe { self.encode_bucket(packed, bucket, &mut room, (&grid, halves), &mut draws) };
                    (unit, min)
                }
                Err(this_one) => {
                    spoilt += this_one;
                    packed.fill(0);
                    (f32::NAN, f32::NAN)
                }
            };
            let (unit_at, min_at) = pair.split_at_mut(self.settings.meta.size_bytes());
            write(self.settings.meta, unit_at, unit);
            if !min_at.is_empty() {
                write(self.settings.meta, min_at, min);
            }
        }
        let (tail, zeros) = tail.split_at_mut(layout.tail_end - layout.tail_at);
        zeros.fill(0);
        // SAFETY: the caller's promise: what is behind the coded elements belongs to the slice, too; `tail` has room for it.
        unsafe { convert(tail.as_mut_ptr(), slice.tensor, slice.part(layout.coded, count - layout.coded), self.loops) };
        spoilt
    }

    unsafe fn decode(&self, dst: *mut u8, into: Dtype, src: &[u8], tensor: Dtype, count: usize) {
        let _env = DefaultFloatEnv::enter();
        let layout = self.layout(tensor, count);
        assert_eq!(src.len(), layout.end, "what {count} elements become");
        let mut room = [MaybeUninit::uninit(); PIECE];
        self.decode_pieces(src, &layout, |elements, packed, unit, min| {
            let dst = dst.wrapping_add(elements.start * into.size_bytes());
            // SAFETY: the caller's promise: these are elements of the result.
            unsafe {
                place(dst, (into, Beyond::Largest), elements.len(), &mut room, self.loops, |values| {
                    (self.loops.decode)(values, packed, self.settings.bits, unit, min)
                })
            };
        });
        let tail = &src[layout.tail_at..layout.tail_end];
        let tail = Slice { src: tail.as_ptr(), dtype: tensor, tensor, count: count - layout.coded, first: 0 };
        // SAFETY: as above; the slice has this many elements of the tensor's type.
        unsafe { convert(dst.wrapping_add(layout.coded * into.size_bytes()), into, tail, self.loops) };
    }

    fn decode_add(&self, sums: &mut [f32], src: &[u8], tensor: Dtype) {
        let _env = DefaultFloatEnv::enter();
        let layout = self.layout(tensor, sums.len());
        assert_eq!(src.len(), layout.end, "what {} elements become", sums.len());
        self.decode_pieces(src, &layout, |elements, packed, unit, min| {
            // SAFETY: the instruction set was checked when `self` was made.
            unsafe { (self.loops.decode_add)(&mut sums[elements], packed, self.settings.bits, unit, min) };
        });
        add(&mut sums[layout.coded..], &src[layout.tail_at..layout.tail_end], tensor, self.loops);
    }
}
