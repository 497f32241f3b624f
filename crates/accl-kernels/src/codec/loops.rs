//! The loops that codecs consist of, each written once and inlined into a function per instruction set. They convert
//! float32 to packed codes and back. The codes of one byte each, in between, stay in the L1 cache.
//! If an instruction set has loops of its own (`groups.rs`), they must give the same results as these. Elements that do
//! not fill a group are left to these.

use std::mem::MaybeUninit;
use std::ops;

use super::rng::RandomBits;
pub(crate) use super::rotation::{rotate, rotate_back};
pub(crate) use super::sign_loops::{LANES as SIGN_LANES, add_signed_values, magnitude_sums, signed_values, signs};
pub(crate) use super::small_float::{Blocks, add_small_values, magnitudes, small_codes, small_values};
use super::traits::Sums;
use crate::reduce::float16;

/// Elements that are handled at the same time. Only the order of comparisons depends on this number.
const LANES: usize = 32;

/// Number of codes that are made before they are packed, and of random numbers for them.
const CODES: usize = 512;

/// 2^23. The sum of 2^23 and a smaller number that is not negative has that number in its lowest bits, rounded to
/// nearest even.
const ROUNDS: f32 = 8_388_608.0;

/// Range of the values of a bucket.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Range {
    pub(crate) min: f32,
    pub(crate) max: f32,
    /// Whether all values are finite; if not, `min` and `max` mean nothing.
    pub(crate) finite: bool,
}

/// A grid of levels over a bucket: `level = (x - min) * inverse`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Grid {
    pub(crate) min: f32,
    pub(crate) inverse: f32,
    /// The highest level.
    pub(crate) top: f32,
}

/// Values of levels: the value of a level is `min + unit * level`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Scale {
    pub(crate) unit: f32,
    pub(crate) min: f32,
}

/// Parameters of buckets that follow each other, all of `bucket` elements but perhaps the last.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buckets<'a, T> {
    pub(crate) of: &'a [T],
    pub(crate) bucket: usize,
    /// Bits of a code.
    pub(crate) bits: u8,
}

/// One bucket: its parameter, the range of its elements, and the range of its codes' bytes.
pub(crate) type Bucket<'a, T> = (&'a T, ops::Range<usize>, ops::Range<usize>);

impl<'a, T> Buckets<'a, T> {
    /// Iterates over the buckets of `elements` elements. It avoids divisions, because a call may be for a single
    /// bucket.
    #[inline(always)]
    pub(crate) fn each(self, elements: usize) -> impl Iterator<Item = Bucket<'a, T>> {
        let bytes = move |elements: usize| (elements * usize::from(self.bits)).div_ceil(8);
        self.of.iter().enumerate().map(move |(index, of)| {
            let (start, end) = (index * self.bucket, elements.min((index + 1) * self.bucket));
            (of, start..end, bytes(start)..bytes(end))
        })
    }
}

impl Range {
    /// Neutral element of [`Range::joined`].
    pub(crate) const NEUTRAL: Range = Range { min: f32::INFINITY, max: f32::NEG_INFINITY, finite: true };

    /// Returns the range of two parts together.
    pub(crate) fn joined(self, other: Range) -> Range {
        Range {
            min: if other.min < self.min { other.min } else { self.min },
            max: if other.max > self.max { other.max } else { self.max },
            finite: self.finite && other.finite,
        }
    }
}

/// Returns the least and the greatest value of a bucket that is not empty.
#[inline(always)]
pub(crate) fn range(values: &[f32]) -> Range {
    let mut lanes = Lanes { min: [values[0]; LANES], max: [values[0]; LANES], bits: [0; LANES] };
    let mut groups = values.chunks_exact(LANES);
    for group in groups.by_ref() {
        if let Ok(group) = group.try_into() {
            lanes.take(group);
        }
    }
    let mut rest = [values[0]; LANES];
    rest[..groups.remainder().len()].copy_from_slice(groups.remainder());
    lanes.take(&rest);
    let mut half = LANES / 2;
    while half > 0 {
        lanes.fold(half);
        half /= 2;
    }
    Range { min: lanes.min[0], max: lanes.max[0], finite: lanes.bits[0] < 0x7f80_0000 }
}

/// Finds the range of each bucket.
#[inline(always)]
pub(crate) fn ranges(ranges: &mut [Range], values: &[f32], bucket: usize) {
    for (index, to) in ranges.iter_mut().enumerate() {
        *to = range(&values[index * bucket..values.len().min((index + 1) * bucket)]);
    }
}

struct Lanes {
    min: [f32; LANES],
    max: [f32; LANES],
    /// The greatest magnitude, as bits: NaN and infinity are above all other values.
    bits: [i32; LANES],
}

impl Lanes {
    #[inline(always)]
    fn take(&mut self, group: &[f32; LANES]) {
        for (lane, &value) in group.iter().enumerate() {
            self.join(lane, value, value, (value.to_bits() & 0x7fff_ffff) as i32);
        }
    }

    /// Joins the upper `half` lanes into the lower ones.
    #[inline(always)]
    fn fold(&mut self, half: usize) {
        for lane in 0..half {
            self.join(lane, self.min[lane + half], self.max[lane + half], self.bits[lane + half]);
        }
    }

    #[inline(always)]
    fn join(&mut self, lane: usize, min: f32, max: f32, bits: i32) {
        self.min[lane] = if min < self.min[lane] { min } else { self.min[lane] };
        self.max[lane] = if max > self.max[lane] { max } else { self.max[lane] };
        self.bits[lane] = if bits > self.bits[lane] { bits } else { self.bits[lane] };
    }
}

/// Encodes values: the codes are their levels, rounded to nearest even.
#[inline(always)]
pub(crate) fn encode(dst: &mut [u8], values: &[f32], grids: Buckets<Grid>) {
    for (grid, elements, bytes) in grids.each(values.len()) {
        in_pieces(&mut dst[bytes], &values[elements], grids.bits, |codes, values, _| levels(codes, values, grid));
    }
}

/// Encodes values like [`encode`], but rounds to one of the two neighbouring levels by a draw from 0 to 255. `first` is
/// the index of the first element, a multiple of 8, to which the random bits were turned.
#[inline(always)]
pub(crate) fn encode_drawn(dst: &mut [u8], values: &[f32], grids: Buckets<Grid>, random_bits: &RandomBits, first: u64) {
    for (grid, elements, bytes) in grids.each(values.len()) {
        let first = first + elements.start as u64;
        in_pieces(&mut dst[bytes], &values[elements], grids.bits, |codes, values, start| {
            levels_drawn(codes, values, grid, random_bits, first + start as u64)
        });
    }
}

/// Packs the codes that `make` creates from values. `make` also gets the index of the first value.
#[inline(always)]
fn in_pieces(dst: &mut [u8], values: &[f32], bits: u8, mut make: impl FnMut(&mut [u8], &[f32], usize)) {
    let pieces = dst.chunks_mut(CODES / 8 * usize::from(bits)).zip(values.chunks(CODES));
    for (start, (dst, values)) in (0..).step_by(CODES).zip(pieces) {
        let mut codes = [0; CODES];
        make(&mut codes[..values.len()], values, start);
        pack(dst, &codes[..values.len().next_multiple_of(8)], bits);
    }
}

/// Writes the values of codes.
#[inline(always)]
pub(crate) fn decode(dst: &mut [MaybeUninit<f32>], src: &[u8], scales: Buckets<Scale>) {
    for (scale, elements, bytes) in scales.each(dst.len()) {
        let (dst, src) = (&mut dst[elements], &src[bytes]);
        for (dst, src) in dst.chunks_mut(CODES).zip(src.chunks(CODES / 8 * usize::from(scales.bits))) {
            let mut codes = [0; CODES];
            unpack(&mut codes[..dst.len().next_multiple_of(8)], src, scales.bits);
            for (value, &code) in dst.iter_mut().zip(&codes) {
                value.write(scale.unit.mul_add(f32::from(code), scale.min));
            }
        }
    }
}

/// Adds the values of codes to `sums`.
#[inline(always)]
pub(crate) fn decode_add(sums: &mut [f32], src: &[u8], scales: Buckets<Scale>) {
    for (scale, elements, bytes) in scales.each(sums.len()) {
        let (sums, src) = (&mut sums[elements], &src[bytes]);
        for (sums, src) in sums.chunks_mut(CODES).zip(src.chunks(CODES / 8 * usize::from(scales.bits))) {
            let mut codes = [0; CODES];
            unpack(&mut codes[..sums.len().next_multiple_of(8)], src, scales.bits);
            for (sum, &code) in sums.iter_mut().zip(&codes) {
                *sum += scale.unit.mul_add(f32::from(code), scale.min);
            }
        }
    }
}

/// Computes the level of each value, rounded to nearest even.
#[inline(always)]
fn levels(codes: &mut [u8], values: &[f32], grid: &Grid) {
    for (code, &value) in codes.iter_mut().zip(values) {
        *code = (scaled(value, grid) + ROUNDS).to_bits() as u8;
    }
}

/// Computes the level of each value by a draw, see [`encode_drawn`].
#[inline(always)]
fn levels_drawn(codes: &mut [u8], values: &[f32], grid: &Grid, random_bits: &RandomBits, first: u64) {
    for (part, (codes, values)) in codes.chunks_mut(CODES).zip(values.chunks(CODES)).enumerate() {
        let mut drawn_here = [0; CODES];
        random_bits.fill(&mut drawn_here[..values.len().next_multiple_of(8)], first + (part * CODES) as u64);
        for ((code, &value), &draw) in codes.iter_mut().zip(values).zip(&drawn_here) {
            *code = drawn(value, grid, draw);
        }
    }
}

/// Rounds one value by a draw. 256 times the level is at most 255 * 256, so the draw carries over with the probability
/// of the fraction.
#[inline(always)]
fn drawn(value: f32, grid: &Grid, draw: u8) -> u8 {
    let fine = (scaled(value, grid) * 256.0 + ROUNDS).to_bits() & 0xffff;
    ((fine + u32::from(draw)) >> 8) as u8
}

/// Returns the level as a number. It is not below 0, since no value is below the grid's `min`.
#[inline(always)]
fn scaled(value: f32, grid: &Grid) -> f32 {
    let scaled = (value - grid.min) * grid.inverse;
    if scaled < grid.top { scaled } else { grid.top }
}

/// Returns a mask of the lowest `bits` of each `lane` bits of a word.
const fn low_of(bits: usize, lane: usize) -> u64 {
    let (mut mask, mut at) = (0, 0);
    while at < 64 {
        mask |= ((1 << bits) - 1) << at;
        at += lane;
    }
    mask
}

/// Packs codes of `BITS` bits, the first in the lowest bits, eight codes in `BITS` bytes. `codes` has as many codes as
/// whole groups need. The last bytes may belong to a group that is only partly needed.
#[inline(always)]
fn pack_by<const BITS: usize>(dst: &mut [u8], codes: &[u8]) {
    if BITS == 8 {
        dst.copy_from_slice(&codes[..dst.len()]);
        return;
    }
    let mut packed = dst.chunks_exact_mut(BITS);
    let mut words = codes.chunks_exact(8);
    for (packed, codes) in packed.by_ref().zip(words.by_ref()) {
        let word = pack_word::<BITS>(word_of(codes));
        packed.copy_from_slice(&word.to_le_bytes()[..BITS]);
    }
    let last = packed.into_remainder();
    if let (Some(codes), false) = (words.next(), last.is_empty()) {
        let word = pack_word::<BITS>(word_of(codes));
        last.copy_from_slice(&word.to_le_bytes()[..last.len()]);
    }
}

#[inline(always)]
fn word_of(bytes: &[u8]) -> u64 {
    bytes.try_into().map_or(0, u64::from_le_bytes)
}

/// Packs the codes of a word. Neighbours of 8, then 16, then 32 bits move together.
#[inline(always)]
fn pack_word<const BITS: usize>(word: u64) -> u64 {
    let word = word & low_of(BITS, 16) | (word & low_of(BITS, 16) << 8) >> (8 - BITS);
    let word = word & low_of(2 * BITS, 32) | (word & low_of(2 * BITS, 32) << 16) >> (16 - 2 * BITS);
    word & low_of(4 * BITS, 64) | (word & low_of(4 * BITS, 64) << 32) >> (32 - 4 * BITS)
}

#[inline(always)]
fn unpack_word<const BITS: usize>(word: u64) -> u64 {
    let word = word & low_of(4 * BITS, 64) | (word & low_of(4 * BITS, 64) << (4 * BITS)) << (32 - 4 * BITS);
    let word = word & low_of(2 * BITS, 32) | (word & low_of(2 * BITS, 32) << (2 * BITS)) << (16 - 2 * BITS);
    word & low_of(BITS, 16) | (word & low_of(BITS, 16) << BITS) << (8 - BITS)
}

/// The reverse of [`pack_by`], for as many codes as `codes` has, a multiple of 8. Bytes that `src` lacks count as zero.
#[inline(always)]
fn unpack_by<const BITS: usize>(codes: &mut [u8], src: &[u8]) {
    if BITS == 8 {
        codes[..src.len()].copy_from_slice(src);
        codes[src.len()..].fill(0);
        return;
    }
    let mut words = codes.chunks_exact_mut(8);
    let mut packed = src.chunks_exact(BITS);
    for (packed, codes) in packed.by_ref().zip(words.by_ref()) {
        let mut word = [0; 8];
        word[..BITS].copy_from_slice(packed);
        codes.copy_from_slice(&unpack_word::<BITS>(u64::from_le_bytes(word)).to_le_bytes());
    }
    if let Some(codes) = words.next() {
        let (mut word, last) = ([0; 8], packed.remainder());
        word[..last.len()].copy_from_slice(last);
        codes.copy_from_slice(&unpack_word::<BITS>(u64::from_le_bytes(word)).to_le_bytes());
    }
}

/// Calls `$function::<BITS>` with a number of bits that is known only at run time.
macro_rules! by_bits {
    ($function:ident($($argument:expr),*), $bits:expr) => {
        match $bits {
            1 => $function::<1>($($argument),*),
            2 => $function::<2>($($argument),*),
            3 => $function::<3>($($argument),*),
            4 => $function::<4>($($argument),*),
            5 => $function::<5>($($argument),*),
            6 => $function::<6>($($argument),*),
            7 => $function::<7>($($argument),*),
            _ => $function::<8>($($argument),*),
        }
    };
}
#[cfg(target_arch = "x86_64")]
pub(crate) use by_bits;

#[inline(always)]
pub(crate) fn pack(dst: &mut [u8], codes: &[u8], bits: u8) {
    by_bits!(pack_by(dst, codes), bits);
}

#[inline(always)]
pub(crate) fn unpack(codes: &mut [u8], src: &[u8], bits: u8) {
    by_bits!(unpack_by(codes, src), bits);
}

#[inline(always)]
pub(crate) fn add_values(sums: &mut [f32], values: &[f32]) {
    for (sum, value) in sums.iter_mut().zip(values) {
        *sum += value;
    }
}

#[inline(always)]
pub(crate) fn widen_f16(dst: &mut [MaybeUninit<f32>], src: &[[u8; 2]]) {
    for (value, &bytes) in dst.iter_mut().zip(src) {
        value.write(float16::widen_f16(u16::from_ne_bytes(bytes)));
    }
}

#[inline(always)]
pub(crate) fn widen_bf16(dst: &mut [MaybeUninit<f32>], src: &[[u8; 2]]) {
    for (value, &bytes) in dst.iter_mut().zip(src) {
        value.write(float16::widen_bf16(u16::from_ne_bytes(bytes)));
    }
}

/// Clamps like `clamp`, without its panic, which prevents the compiler from vectorising loops.
#[inline(always)]
fn at_most(value: f32, most: f32) -> f32 {
    let value = if value > most { most } else { value };
    if value < -most { -most } else { value }
}

/// Rounds to float16. Values greater than `most` become `most`: the largest finite value, or an infinity that changes
/// nothing.
#[inline(always)]
pub(crate) fn narrow_f16(dst: &mut [MaybeUninit<[u8; 2]>], values: &[f32], most: f32) {
    for (bytes, &value) in dst.iter_mut().zip(values) {
        bytes.write(float16::narrow_f16(at_most(value, most)).to_ne_bytes());
    }
}

/// Rounds to bfloat16; `most` as for [`narrow_f16`].
#[inline(always)]
pub(crate) fn narrow_bf16(dst: &mut [MaybeUninit<[u8; 2]>], values: &[f32], most: f32) {
    for (bytes, &value) in dst.iter_mut().zip(values) {
        bytes.write(float16::narrow_bf16(at_most(value, most)).to_ne_bytes());
    }
}

/// Elements of [`sum_bf16`] that are read before any of them is written.
pub(crate) const SUM_GROUP: usize = 16;

/// Adds bfloat16 to float32, divides the sums by `divisor` if given, and rounds them to bfloat16. If `results` is
/// given, writes the rounded sums there as float32, too.
///
/// # Safety
/// There are as many addends as elements, and as much room for results. The results may replace the addends.
#[inline(always)]
pub(crate) unsafe fn sum_bf16(dst: &mut [[u8; 2]], src: &[[u8; 2]], sums: Sums) {
    for (group, (dst, src)) in dst.chunks_mut(SUM_GROUP).zip(src.chunks(SUM_GROUP)).enumerate() {
        let at = group * SUM_GROUP;
        let mut values = [0.0; SUM_GROUP];
        for (index, (value, &bytes)) in values.iter_mut().zip(src).enumerate() {
            // SAFETY: there are as many addends as elements, by this function's contract; the read is unaligned.
            let addend = unsafe { sums.addends.add(at + index).read_unaligned() };
            *value = addend + float16::widen_bf16(u16::from_ne_bytes(bytes));
        }
        if let Some(divisor) = sums.divisor {
            values.iter_mut().for_each(|value| *value /= divisor);
        }
        let rounded = values.map(float16::round_bf16);
        for (index, (bytes, rounded)) in dst.iter_mut().zip(rounded).enumerate() {
            *bytes = ((rounded >> 16) as u16).to_ne_bytes();
            if let Some(results) = sums.results {
                // SAFETY: there is room for as many results as elements, by this function's contract; the write is
                // unaligned.
                unsafe { results.add(at + index).write_unaligned(f32::from_bits(rounded & 0xffff_0000)) };
            }
        }
    }
}

/// See [`sum_bf16`].
type SumNarrow = unsafe fn(&mut [[u8; 2]], &[[u8; 2]], Sums);

/// Converts a 16-bit type to float32.
type Widen = unsafe fn(&mut [MaybeUninit<f32>], &[[u8; 2]]);

/// Rounds to a 16-bit type. Values greater than the last argument become the last argument.
type Narrow = unsafe fn(&mut [MaybeUninit<[u8; 2]>], &[f32], f32);

/// Writes the values of the codes of blocks. Arguments: destination, codes, scales of the blocks, format.
type SmallValues = unsafe fn(&mut [MaybeUninit<f32>], &[u8], &[f32], Blocks);

/// The loops compiled for one instruction set.
#[derive(Clone, Copy)]
pub(crate) struct Loops {
    pub(crate) range: unsafe fn(&[f32]) -> Range,
    pub(crate) ranges: unsafe fn(&mut [Range], &[f32], usize),
    pub(crate) encode: unsafe fn(&mut [u8], &[f32], Buckets<Grid>),
    pub(crate) encode_drawn: unsafe fn(&mut [u8], &[f32], Buckets<Grid>, &RandomBits, u64),
    pub(crate) decode: unsafe fn(&mut [MaybeUninit<f32>], &[u8], Buckets<Scale>),
    pub(crate) decode_add: unsafe fn(&mut [f32], &[u8], Buckets<Scale>),
    pub(crate) pack: unsafe fn(&mut [u8], &[u8], u8),
    pub(crate) unpack: unsafe fn(&mut [u8], &[u8], u8),
    pub(crate) magnitude_sums: unsafe fn(&mut [f64; SIGN_LANES], &[f32]),
    pub(crate) signs: unsafe fn(&mut [u8], &[f32]),
    pub(crate) signed_values: unsafe fn(&mut [MaybeUninit<f32>], &[u8], f32),
    pub(crate) add_signed_values: unsafe fn(&mut [f32], &[u8], f32),
    pub(crate) magnitudes: unsafe fn(&mut [u32], &[f32], usize),
    pub(crate) small_codes: unsafe fn(&mut [u8], &[f32], &[f32], Blocks),
    pub(crate) small_values: SmallValues,
    pub(crate) add_small_values: unsafe fn(&mut [f32], &[u8], &[f32], Blocks),
    pub(crate) rotate: unsafe fn(&mut [f32], &[f32]),
    pub(crate) rotate_back: unsafe fn(&mut [f32], &[f32]),
    pub(crate) add_values: unsafe fn(&mut [f32], &[f32]),
    pub(crate) widen_f16: Widen,
    pub(crate) widen_bf16: Widen,
    pub(crate) narrow_f16: Narrow,
    pub(crate) narrow_bf16: Narrow,
    pub(crate) sum_bf16: SumNarrow,
}

/// Defines `LOOPS`: functions with the given attributes around the loops.
macro_rules! codec_loops {
    ($(#[$feature:meta])*) => {
        const LOOPS: $crate::codec::loops::Loops = {
            use $crate::codec::loops::{self, Blocks, Buckets, Grid, Loops, Range, SIGN_LANES, Scale};
            use $crate::codec::Sums;
            use $crate::codec::rng::RandomBits;
            use std::mem::MaybeUninit;

            codec_loops! { @ [$(#[$feature])*]
                range(values: &[f32]) -> Range;
                ranges(ranges: &mut [Range], values: &[f32], bucket: usize) -> ();
                encode(dst: &mut [u8], values: &[f32], grids: Buckets<Grid>) -> ();
                encode_drawn(dst: &mut [u8], values: &[f32], grids: Buckets<Grid>, random_bits: &RandomBits, first: u64) -> ();
                decode(dst: &mut [MaybeUninit<f32>], src: &[u8], scales: Buckets<Scale>) -> ();
                decode_add(sums: &mut [f32], src: &[u8], scales: Buckets<Scale>) -> ();
                pack(dst: &mut [u8], codes: &[u8], bits: u8) -> ();
                unpack(codes: &mut [u8], src: &[u8], bits: u8) -> ();
                magnitude_sums(sums: &mut [f64; SIGN_LANES], values: &[f32]) -> ();
                signs(codes: &mut [u8], values: &[f32]) -> ();
                signed_values(dst: &mut [MaybeUninit<f32>], packed: &[u8], mean: f32) -> ();
                add_signed_values(sums: &mut [f32], packed: &[u8], mean: f32) -> ();
                magnitudes(greatest: &mut [u32], values: &[f32], elements: usize) -> ();
                small_codes(codes: &mut [u8], values: &[f32], factors: &[f32], blocks: Blocks) -> ();
                small_values(dst: &mut [MaybeUninit<f32>], codes: &[u8], scales: &[f32], blocks: Blocks) -> ();
                add_small_values(sums: &mut [f32], codes: &[u8], scales: &[f32], blocks: Blocks) -> ();
                rotate(values: &mut [f32], signs: &[f32]) -> ();
                rotate_back(values: &mut [f32], signs: &[f32]) -> ();
                add_values(sums: &mut [f32], values: &[f32]) -> ();
                widen_f16(dst: &mut [MaybeUninit<f32>], src: &[[u8; 2]]) -> ();
                widen_bf16(dst: &mut [MaybeUninit<f32>], src: &[[u8; 2]]) -> ();
                narrow_f16(dst: &mut [MaybeUninit<[u8; 2]>], values: &[f32], most: f32) -> ();
                narrow_bf16(dst: &mut [MaybeUninit<[u8; 2]>], values: &[f32], most: f32) -> ();
                [unsafe] sum_bf16(dst: &mut [[u8; 2]], src: &[[u8; 2]], sums: Sums) -> ();
            }
        };
    };
    (@ $features:tt $($([$unsafe:ident])? $name:ident($($arg:ident: $type:ty),*) -> $result:ty;)*) => {
        {
            $(codec_loops! { @@ $features $([$unsafe])? $name($($arg: $type),*) -> $result })*
            Loops { $($name),* }
        }
    };
    (@@ [$(#[$feature:meta])*] $name:ident($($arg:ident: $type:ty),*) -> $result:ty) => {
        $(#[$feature])*
        fn $name($($arg: $type),*) -> $result {
            loops::$name($($arg),*)
        }
    };
    (@@ [$(#[$feature:meta])*] [unsafe] $name:ident($($arg:ident: $type:ty),*) -> $result:ty) => {
        $(#[$feature])*
        unsafe fn $name($($arg: $type),*) -> $result {
            // SAFETY: the contract of this function is the contract of the loop.
            unsafe { loops::$name($($arg),*) }
        }
    };
}
pub(crate) use codec_loops;
