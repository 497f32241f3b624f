//! Common part of the codecs whose elements are small floating-point numbers, in blocks that share a scale.
//!
//! Encoded, a slice is
//! ```text
//! groups   for each group of blocks: its own scale, if the format has one
//! scales   one for each block
//! codes    as in `small_float.rs`, the first in the lowest bits
//! zeros    up to a multiple of 8
//! ```
//! All numbers are in little-endian order.
//!
//! # Arithmetic
//! All in float32, each operation rounded. An element decodes to its block's scale times a small number: the
//! one nearest to x * (1 / scale). Scales have so few significant bits that the product is exact, unless it is below
//! the normal numbers. No scale is so large that a decoded value could overflow: a bucket of finite values is never
//! lost.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::sync::Arc;

use accl_types::Dtype;

use super::cast;
use super::loops::Loops;
use super::pieces::{Overflow, PIECE, place};
use super::rng::RngKey;
use super::settings::Settings;
use super::small_float::{Blocks, SmallFloat};
use super::traits::{Bound, Buckets, Build, Codec, Loss, NonFinite, Row, Slice, Summary};
use crate::dispatch;
use crate::float_env::DefaultFloatEnv;
use crate::isa::Isa;

const ALIGN_BYTES: usize = 8;

/// Maximum elements and blocks that are processed together.
const MOST_SPAN: usize = 2048;
const MOST_BLOCKS: usize = MOST_SPAN / 16;

/// Choice of the blocks' scales: the part that a codec of this family defines.
pub(super) trait Scaling: Send + Sync + 'static {
    /// The row in the table of codecs.
    const ROW: &'static Row;
    /// Type that elements are converted to.
    const FLOAT: SmallFloat;
    /// Elements of a block: 16, 32 or 256.
    const BLOCK: usize;
    /// Bytes of a block's scale.
    const SCALE_BYTES: usize;
    /// Elements that share a group scale, and the bytes of that scale; (a block, 0) without group scales.
    const GROUP: (usize, usize) = (Self::BLOCK, 0);
    /// Maximum change of a value by rounding, or by saturating if that changes more, as a share of the value.
    const SHARE: f64;
    /// Maximum change of a value that is too small for `SHARE`, as a share of the greatest value of its block, and of
    /// its group.
    const LEAST: (f64, f64);

    /// Writes the scales of blocks, and the scale of their group. Computes the `factors` to multiply values with, from
    /// the bits of the greatest magnitudes. A block that is not finite gets scales that decode to NaN.
    fn place(greatest: &[u32], group: &mut [u8], scales: &mut [u8], factors: &mut [f32]);

    /// The reverse: computes the factors of decoded elements from scales. Any bytes are allowed.
    fn scales(group: &[u8], scales: &[u8], of_blocks: &mut [f32]);
}

/// Creates a row of this family.
pub(super) const fn row(id: u8, name: &'static str, description: &'static str, of: Family) -> Row {
    Row {
        id,
        name,
        description,
        settings: &[],
        bits: 1..=1,
        buckets: Buckets::MultiplesOf8,
        shared: of.shared,
        is_cast: false,
        loss: |_| Loss::Fine,
        needs_feedback: false,
        hides_magnitudes: false,
        next_finer: |_| Some(Summary::new(&cast::BF16, Settings::default())),
        auto: &[],
        bound: of.bound,
        build: of.build,
    }
}

/// Fields in which rows of this family differ, in addition to their names.
pub(super) struct Family {
    shared: fn(&Settings) -> usize,
    bound: fn(&Settings, &[f32], &[f32]) -> Bound,
    build: Build,
}

/// Whether the bits of the greatest magnitude are the bits of a finite number.
pub(super) fn is_finite(greatest: u32) -> bool {
    greatest < 0x7f80_0000
}

/// A codec of this family.
pub(super) struct Scaled<S> {
    loops: &'static Loops,
    scaling: PhantomData<S>,
}

/// Offsets of the parts of an encoded slice, in bytes.
struct Layout {
    scales_at: usize,
    codes_at: usize,
    codes_end: usize,
    end: usize,
}

impl<S: Scaling> Scaled<S> {
    const BITS: usize = S::FLOAT.bits() as usize;
    const BLOCKS: Blocks = Blocks { float: S::FLOAT, elements: S::BLOCK };
    /// Elements that are processed together: a group, or as many blocks as make a piece.
    const SPAN: usize = if S::GROUP.1 == 0 { PIECE } else { S::GROUP.0 };

    /// The fields for the row.
    pub(super) const FAMILY: Family = Family { shared: |_| S::BLOCK, bound: Self::bound, build: Self::build };

    fn build(_: &Settings, isa: Isa) -> Arc<dyn Codec> {
        const { assert!(Self::SPAN <= MOST_SPAN && Self::SPAN.is_multiple_of(PIECE) && PIECE.is_multiple_of(S::BLOCK)) };
        Arc::new(Self { loops: dispatch::loops(isa), scaling: PhantomData })
    }

    fn bound(_: &Settings, block: &[f32], group: &[f32]) -> Bound {
        let greatest = |values: &[f32]| values.iter().fold(0f64, |most, &value| most.max(f64::from(value).abs()));
        let (of_block, of_group) = S::LEAST;
        // Below the normal numbers of float32 there are no scales.
        let floor = of_block * greatest(block) + of_group * greatest(group) + f64::from(f32::MIN_POSITIVE);
        Bound { share: S::SHARE, floor }
    }

    fn layout(count: usize) -> Layout {
        let scales_at = S::GROUP.1 * count.div_ceil(S::GROUP.0);
        let codes_at = scales_at + S::SCALE_BYTES * count.div_ceil(S::BLOCK);
        let codes_end = codes_at + (count * Self::BITS).div_ceil(8);
        Layout { scales_at, codes_at, codes_end, end: codes_end.next_multiple_of(ALIGN_BYTES) }
    }

    /// Returns the byte range of the group's scale of the span that begins with this element.
    fn group_bytes(start: usize) -> std::ops::Range<usize> {
        let at = start / S::GROUP.0 * S::GROUP.1;
        at..at + S::GROUP.1
    }

    /// Calls `each` with the first element's index, the codes and the blocks' scales of every piece, in their order.
    fn decode_pieces(&self, src: &[u8], count: usize, mut each: impl FnMut(usize, &[u8], &[f32])) {
        let layout = Self::layout(count);
        assert_eq!(src.len(), layout.end, "encoded bytes of {count} elements");
        let (mut room, mut of_blocks) = ([0; PIECE], [0.0; MOST_BLOCKS]);
        let scales = src[layout.scales_at..layout.codes_at].chunks(Self::SPAN / S::BLOCK * S::SCALE_BYTES);
        let codes = src[layout.codes_at..layout.codes_end].chunks(Self::SPAN * Self::BITS / 8);
        for (start, (scales, codes)) in (0..count).step_by(Self::SPAN).zip(scales.zip(codes)) {
            let of_blocks = &mut of_blocks[..scales.len() / S::SCALE_BYTES];
            S::scales(&src[Self::group_bytes(start)], scales, of_blocks);
            let end = count.min(start + Self::SPAN);
            let pieces = codes.chunks(PIECE * Self::BITS / 8).zip(of_blocks.chunks(PIECE / S::BLOCK));
            for (start, (packed, of_blocks)) in (start..end).step_by(PIECE).zip(pieces) {
                let elements = PIECE.min(end - start);
                if Self::BITS == 8 {
                    each(start, packed, of_blocks);
                    continue;
                }
                let codes = &mut room[..elements.next_multiple_of(8)];
                // SAFETY: the instruction set was checked when `self` was made.
                unsafe { (self.loops.unpack)(codes, packed, Self::BITS as u8) };
                each(start, &codes[..elements], of_blocks);
            }
        }
    }

    /// Writes the codes of a span.
    ///
    /// # Safety
    /// The contract of [`Slice::piece`].
    unsafe fn encode_span(&self, packed: &mut [u8], span: Slice, values: &mut [f32; PIECE], factors: &[f32]) {
        let Loops { small_codes, pack, .. } = *self.loops;
        let pieces = packed.chunks_mut(PIECE * Self::BITS / 8).zip(factors.chunks(PIECE / S::BLOCK));
        for (start, (packed, factors)) in (0..span.count).step_by(PIECE).zip(pieces) {
            // SAFETY: the span may be read by this function's contract; the instruction set was checked when `self` was
            // made.
            unsafe {
                let values = span.piece(values, start, self.loops);
                if Self::BITS == 8 {
                    small_codes(packed, values, factors, Self::BLOCKS);
                } else {
                    let mut codes = [0; PIECE];
                    small_codes(&mut codes[..values.len()], values, factors, Self::BLOCKS);
                    pack(packed, &codes[..values.len().next_multiple_of(8)], Self::BITS as u8);
                }
            }
        }
    }
}

impl<S: Scaling> Codec for Scaled<S> {
    fn summary(&self) -> Summary {
        Summary::new(S::ROW, Settings::default())
    }

    fn grain(&self) -> usize {
        S::GROUP.0
    }

    fn encoded_bytes(&self, _: Dtype, count: usize) -> usize {
        Self::layout(count).end
    }

    unsafe fn encode(&self, dst: &mut [u8], slice: Slice, _: RngKey) -> NonFinite {
        let _env = DefaultFloatEnv::enter();
        let layout = Self::layout(slice.count);
        assert_eq!(dst.len(), layout.end, "room for {} encoded elements", slice.count);
        let (groups, rest) = dst.split_at_mut(layout.scales_at);
        let (scales, rest) = rest.split_at_mut(layout.codes_at - layout.scales_at);
        let (codes, zeros) = rest.split_at_mut(layout.codes_end - layout.codes_at);
        zeros.fill(0);
        let mut non_finite = NonFinite::default();
        let mut room = [0.0; PIECE];
        let (mut greatest, mut factors) = ([0; MOST_BLOCKS], [0.0; MOST_BLOCKS]);
        let scales = scales.chunks_mut(Self::SPAN / S::BLOCK * S::SCALE_BYTES);
        let codes = codes.chunks_mut(Self::SPAN * Self::BITS / 8);
        for (start, (scales, codes)) in (0..slice.count).step_by(Self::SPAN).zip(scales.zip(codes)) {
            let span = slice.part(start, Self::SPAN.min(slice.count - start));
            let greatest = &mut greatest[..span.count.div_ceil(S::BLOCK)];
            let factors = &mut factors[..greatest.len()];
            for (start, greatest) in (0..span.count).step_by(PIECE).zip(greatest.chunks_mut(PIECE / S::BLOCK)) {
                // SAFETY: `span` lies in the slice, which may be read by this function's contract; the instruction set
                // was checked when `self` was made.
                unsafe { (self.loops.magnitudes)(greatest, span.piece(&mut room, start, self.loops), S::BLOCK) };
            }
            S::place(greatest, &mut groups[Self::group_bytes(start)], scales, factors);
            // SAFETY: `span` lies in the slice, which may be read by this function's contract.
            unsafe { self.encode_span(codes, span, &mut room, factors) };
            if greatest.iter().all(|&greatest| is_finite(greatest)) {
                continue;
            }
            for (_, codes) in
                greatest.iter().zip(codes.chunks_mut(S::BLOCK * Self::BITS / 8)).filter(|(most, _)| !is_finite(**most))
            {
                codes.fill(0);
                non_finite.not_finite += 1;
            }
        }
        non_finite
    }

    unsafe fn decode(&self, dst: *mut u8, into: Dtype, src: &[u8], _: Dtype, count: usize) {
        let _env = DefaultFloatEnv::enter();
        let mut room = [MaybeUninit::uninit(); PIECE];
        self.decode_pieces(src, count, |start, codes, scales| {
            let dst = dst.wrapping_add(start * into.size_bytes());
            // SAFETY: the elements from `start` on lie in the result, for which `dst` has room by this function's
            // contract.
            unsafe {
                place(dst, (into, Overflow::Largest), codes.len(), &mut room, self.loops, |values| {
                    (self.loops.small_values)(values, codes, scales, Self::BLOCKS)
                })
            };
        });
    }

    fn decode_add(&self, sums: &mut [f32], src: &[u8], _: Dtype) {
        let _env = DefaultFloatEnv::enter();
        self.decode_pieces(src, sums.len(), |start, codes, scales| {
            // SAFETY: the instruction set was checked when `self` was made.
            unsafe {
                (self.loops.add_small_values)(&mut sums[start..start + codes.len()], codes, scales, Self::BLOCKS)
            };
        });
    }
}
