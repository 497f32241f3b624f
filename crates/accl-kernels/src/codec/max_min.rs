//! Max-min uniform: the levels of a bucket lie evenly between its least and its greatest value.
//!
//! Encoded, a slice is
//! ```text
//! meta     for each bucket: unit, min                     2 * size of the metadata's type * ceil(count / bucket)
//! codes    `bits` each, the first in the lowest bits      ceil(count * bits / 8)
//! zeros    up to a multiple of 8
//! tail     with `skip_incomplete`: what is behind the last full bucket, as it is
//! zeros    up to a multiple of 8 of the whole
//! ```
//! in little-endian order; with `skip_incomplete`, `count` in it is that of the full buckets.
//!
//! # Arithmetic
//! All in float32, each operation rounded, with L = 2^bits - 1:
//! * 16-bit metadata rounds min down, then unit = (max - min) / L up; float32 metadata has min as it is and rounds unit to
//!   nearest. A range of zero has unit 0; otherwise unit is at least the smallest normal number of the metadata's type.
//!   Where max - min overflows, unit is max / L - min / L, and levels are found from halves;
//! * s = (x - min) * (1 / unit);
//! * nearest: level = nearest-even(s); stochastic: level = (nearest-even(256 s) + u) >> 8 with u from 0 to 255; at most L;
//! * a decoded value is min + unit * level, fused.
//!
//! The scheme is that of QSGD (Alistarh et al., 2017) with the grid of its implementations: two points per bucket in place of
//! a norm.

use std::mem::MaybeUninit;
use std::sync::Arc;

use accl_types::{Dtype, Error, Result};

use super::loops::{Grid, Loops, Range};
use super::pieces::{Beyond, PIECE, add, convert, place, read, write};
use super::{Codec, Noise, Rounding, Row, Settings, Slice, Spoilt, Summary, encodes};
use crate::arch::{self, Isa};
use crate::float_env::DefaultFloatEnv;
use crate::reduce::float16::{self, Toward};

pub(super) const ROW: Row = Row {
    name: "maxmin",
    description: "levels evenly between the least and the greatest value of a bucket, 1 to 8 bits",
    has_settings: true,
    build: |settings, isa| Ok(Arc::new(MaxMin::new(*settings, isa)?)),
};

const MOST_BUCKET: u32 = 8192;
const ALIGN_BYTES: usize = 8;

#[derive(Clone, Copy)]
pub(crate) struct MaxMin {
    settings: Settings,
    loops: &'static Loops,
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

/// Room for a piece.
struct Room {
    values: [f32; PIECE],
    codes: [u8; PIECE],
}

impl Room {
    fn new() -> Self {
        Self { values: [0.0; PIECE], codes: [0; PIECE] }
    }
}

/// A value of the metadata's type that is not above, or not below, the given one. float32 is as it is.
fn toward(meta: Dtype, value: f32, side: Toward) -> f32 {
    match meta {
        Dtype::F16 => float16::widen_f16(float16::narrow_f16_toward(value, side)),
        Dtype::BF16 => float16::widen_bf16(float16::narrow_bf16_toward(value, side)),
        _ => value,
    }
}

fn smallest_normal(meta: Dtype) -> f32 {
    match meta {
        Dtype::F16 => float16::F16_SMALLEST_NORMAL,
        // bfloat16 has the exponents of float32.
        _ => f32::MIN_POSITIVE,
    }
}

/// The metadata of a bucket, and what its levels are found with.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Placed {
    unit: f32,
    min: f32,
    grid: Grid,
    /// The grid is for halves of the values.
    halves: bool,
}

impl MaxMin {
    pub(crate) fn new(settings: Settings, isa: Isa) -> Result<Self> {
        isa.check_available()?;
        let Settings { bits, bucket, meta, .. } = settings;
        if !(1..=8).contains(&bits) {
            return Err(Error::configuration(format!("codec maxmin: bits is {bits}; expected 1 to 8")));
        }
        if !(8..=MOST_BUCKET).contains(&bucket) || bucket % 8 != 0 {
            return Err(Error::configuration(format!(
                "codec maxmin: bucket is {bucket}; expected a multiple of 8 from 8 to {MOST_BUCKET}"
            )));
        }
        if !encodes(meta) {
            return Err(Error::configuration(format!(
                "codec maxmin: meta is {meta}; expected float32, float16 or bfloat16"
            )));
        }
        Ok(Self { settings, loops: arch::loops(isa) })
    }

    fn bucket(&self) -> usize {
        self.settings.bucket as usize
    }

    fn top(&self) -> f32 {
        ((1u32 << self.settings.bits) - 1) as f32
    }

    fn layout(&self, tensor: Dtype, count: usize) -> Layout {
        let coded = if self.settings.skip_incomplete { count - count % self.bucket() } else { count };
        let codes_at = 2 * self.settings.meta.size_bytes() * coded.div_ceil(self.bucket());
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
        if !range.finite {
            return Err(Spoilt { not_finite: 1, too_large: 0 });
        }
        let (top, meta) = (self.top(), self.settings.meta);
        // No -0, which would decode to another zero than the +0 of a neighbour.
        let min = toward(meta, range.min, Toward::Down) + 0.0;
        let width = range.max - min;
        if width == 0.0 {
            return Ok(Placed { unit: 0.0, min, grid: Grid { min, inverse: 0.0, top }, halves: false });
        }
        let halves = width.is_infinite();
        let unit = if halves { range.max / top - min / top } else { width / top };
        let unit = toward(meta, unit, Toward::Up).max(smallest_normal(meta));
        let highest = f64::from(unit) * f64::from(top) + f64::from(min);
        if !min.is_finite() || !(highest as f32).is_finite() {
            return Err(Spoilt { not_finite: 0, too_large: 1 });
        }
        let by = if halves { 0.5 } else { 1.0 };
        Ok(Placed { unit, min, grid: Grid { min: min * by, inverse: 1.0 / (unit * by), top }, halves })
    }

    /// Writes the codes of a bucket.
    ///
    /// # Safety
    /// As for [`Slice::piece`].
    unsafe fn encode_bucket(
        &self,
        packed: &mut [u8],
        bucket: Slice,
        room: &mut Room,
        (grid, halves): (&Grid, bool),
        noise: Noise,
    ) {
        let Loops { levels, levels_drawn, pack, .. } = *self.loops;
        for (start, packed) in (0..bucket.count).step_by(PIECE).zip(packed.chunks_mut(self.code_bytes(PIECE))) {
            let count = PIECE.min(bucket.count - start);
            let whole = count.next_multiple_of(8);
            room.codes[count..whole].fill(0);
            let mut halved;
            // SAFETY: the caller's promise; the instruction set was checked when `self` was made.
            unsafe {
                let mut values = bucket.piece(&mut room.values, start, self.loops);
                if halves {
                    halved = [0.0; PIECE];
                    values.iter().zip(&mut halved).for_each(|(value, half)| *half = value / 2.0);
                    values = &halved[..count];
                }
                match self.settings.rounding {
                    Rounding::Nearest => levels(&mut room.codes[..count], values, grid),
                    Rounding::Stochastic => {
                        levels_drawn(&mut room.codes[..count], values, grid, noise, bucket.first + start as u64);
                    }
                }
                pack(packed, &room.codes[..whole], self.settings.bits);
            }
        }
    }

    /// Calls `each` with the first element, the codes, unit and min of every piece, in their order.
    fn decode_pieces(&self, src: &[u8], layout: &Layout, mut each: impl FnMut(usize, &[u8], f32, f32)) {
        let meta = self.settings.meta;
        let mut codes = [0; PIECE];
        let buckets = src[layout.codes_at..layout.codes_end].chunks(self.code_bytes(self.bucket()));
        let metas = src[..layout.codes_at].chunks_exact(2 * meta.size_bytes());
        for ((bucket, pair), begin) in buckets.zip(metas).zip((0..layout.coded).step_by(self.bucket())) {
            let (unit, min) = pair.split_at(meta.size_bytes());
            let (mut unit, mut min) = (read(meta, unit), read(meta, min));
            if unit.is_nan() || min.is_nan() {
                // Whatever NaN came: one is like another.
                (unit, min) = (f32::NAN, f32::NAN);
            }
            let end = layout.coded.min(begin + self.bucket());
            for (start, packed) in (begin..end).step_by(PIECE).zip(bucket.chunks(self.code_bytes(PIECE))) {
                let count = PIECE.min(end - start);
                let codes = &mut codes[..count.next_multiple_of(8)];
                // SAFETY: the instruction set was checked when `self` was made.
                unsafe { (self.loops.unpack)(codes, packed, self.settings.bits) };
                each(start, &codes[..count], unit, min);
            }
        }
    }
}

impl Codec for MaxMin {
    fn summary(&self) -> Summary {
        Summary::new(ROW.name, Some(&self.settings))
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
        let metas = metas.chunks_exact_mut(2 * self.settings.meta.size_bytes());
        let mut spoilt = Spoilt::default();
        let mut room = Room::new();
        for ((packed, pair), begin) in
            codes.chunks_mut(self.code_bytes(self.bucket())).zip(metas).zip((0..layout.coded).step_by(self.bucket()))
        {
            let bucket = slice.part(begin, self.bucket().min(layout.coded - begin));
            // SAFETY: the caller's promise: these are elements of the slice.
            let placed = self.place(unsafe { self.range(bucket, &mut room.values) });
            let (unit, min) = match placed {
                Ok(Placed { unit, min, grid, halves }) => {
                    // SAFETY: as above.
                    unsafe { self.encode_bucket(packed, bucket, &mut room, (&grid, halves), noise) };
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
            write(self.settings.meta, min_at, min);
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
        self.decode_pieces(src, &layout, |start, codes, unit, min| {
            let dst = dst.wrapping_add(start * into.size_bytes());
            // SAFETY: the caller's promise: these are elements of the result.
            unsafe {
                place(dst, (into, Beyond::Largest), codes.len(), &mut room, self.loops, |values| {
                    (self.loops.values)(values, codes, unit, min)
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
        self.decode_pieces(src, &layout, |start, codes, unit, min| {
            // SAFETY: the instruction set was checked when `self` was made.
            unsafe { (self.loops.add_values)(&mut sums[start..start + codes.len()], codes, unit, min) };
        });
        add(&mut sums[layout.coded..], &src[layout.tail_at..layout.tail_end], tensor, self.loops);
    }
}
