//! Signs, and the mean magnitude of each bucket: one bit per element.
//!
//! Encoded, a slice is
//! ```text
//! meta     for each bucket: the mean magnitude, rounded to nearest even
//! codes    1 for values below zero, else 0; the first in the lowest bit
//! zeros    up to a multiple of 8
//! ```
//! All numbers are in little-endian order. Zeros of both signs count as positive.
//!
//! # Arithmetic
//! The mean is found in float64, each operation rounded, with 16 partial sums. The n-th sum adds |x| of the elements n,
//! n + 16, ... in their order. Then the sums from 8 on are added to the sums below 8, the sums from 4 on to those below
//! 4, and so forth. The total is divided by the number of elements, rounded to float32, and then to 16-bit metadata.
//! A decoded value is the mean or its opposite.
//!
//! The codec loses a third of the encoded signal (of Gaussian values, 1 - 2 / pi), always in the same way. It is useful
//! only if the loss is added to the next encoding, as in Seide et al., 1-Bit Stochastic Gradient Descent, 2014.

use std::mem::MaybeUninit;
use std::sync::Arc;

use accl_types::Dtype;

use super::loops::Loops;
use super::max_min;
use super::pieces::{Overflow, PIECE, place, read, write};
use super::rng::RngKey;
use super::settings::{Rounding, Setting, Settings};
use super::sign_loops::{LANES, SHARE};
use super::traits::{Bound, Buckets, Codec, Loss, NonFinite, Row, Slice, Summary};
use super::uniform::{bucket_of, rounding_of, smallest_normal};
use crate::dispatch;
use crate::float_env::DefaultFloatEnv;
use crate::isa::Isa;

pub(super) const ROW: Row = Row {
    id: 5,
    name: "sign",
    description: "the sign, times the mean magnitude of a bucket",
    settings: &[Setting::Bucket, Setting::Meta],
    bits: 1..=1,
    buckets: Buckets::MultiplesOf8,
    shared: bucket_of,
    is_cast: false,
    loss: |_| Loss::Coarse,
    needs_feedback: true,
    hides_magnitudes: true,
    // For Gaussian values in large buckets, 2 bits of max-min lose more than the sign codec. 3 bits lose a quarter of
    // its loss in the largest buckets.
    next_finer: |settings| max_min::ROW.with_bits(&Settings { rounding: Rounding::Nearest, ..*settings }, 3),
    auto: &[],
    // Every value becomes plus or minus the mean.
    bound: |settings, values, _| {
        let mean = values.iter().map(|value| f64::from(value.abs())).sum::<f64>() / values.len() as f64;
        Bound {
            share: 1.0,
            floor: mean * (1.0 + rounding_of(settings.meta)) + f64::from(smallest_normal(settings.meta)),
        }
    },
    build,
};

const ALIGN_BYTES: usize = 8;
struct Sign {
    settings: Settings,
    loops: &'static Loops,
}

fn build(settings: &Settings, isa: Isa) -> Arc<dyn Codec> {
    Arc::new(Sign { settings: *settings, loops: dispatch::loops(isa) })
}

impl Sign {
    fn bucket(&self) -> usize {
        self.settings.bucket as usize
    }

    /// Returns the offsets in bytes where codes begin, where they end, and where the slice ends.
    fn layout(&self, count: usize) -> [usize; 3] {
        let codes_at = self.settings.meta.size_bytes() * count.div_ceil(self.bucket());
        let codes_end = codes_at + count.div_ceil(SHARE);
        [codes_at, codes_end, codes_end.next_multiple_of(ALIGN_BYTES)]
    }

    /// Returns the mean magnitude of a bucket as the metadata stores it, or how the bucket is counted if it becomes
    /// NaN.
    ///
    /// # Safety
    /// The contract of [`Slice::piece`].
    unsafe fn mean(&self, bucket: Slice, room: &mut [f32; PIECE]) -> std::result::Result<f32, NonFinite> {
        let mut sums = [0.0; LANES];
        for start in (0..bucket.count).step_by(PIECE) {
            // SAFETY: the bucket may be read by this function's contract; the instruction set was checked when `self`
            // was made.
            unsafe { (self.loops.magnitude_sums)(&mut sums, bucket.piece(room, start, self.loops)) };
        }
        let mut half = LANES / 2;
        while half > 0 {
            (0..half).for_each(|lane| sums[lane] += sums[lane + half]);
            half /= 2;
        }
        if !sums[0].is_finite() {
            return Err(NonFinite { not_finite: 1, too_large: 0 });
        }
        let mean = (sums[0] / bucket.count as f64) as f32;
        let mut bytes = [0; 4];
        let bytes = &mut bytes[..self.settings.meta.size_bytes()];
        write(self.settings.meta, bytes, mean);
        let mean = read(self.settings.meta, bytes);
        if mean.is_finite() { Ok(mean) } else { Err(NonFinite { not_finite: 0, too_large: 1 }) }
    }

    /// Calls `each` with the first element's index, the number of elements, the codes and the mean of every piece, in
    /// their order.
    fn decode_pieces(&self, src: &[u8], count: usize, mut each: impl FnMut(usize, usize, &[u8], f32)) {
        let meta = self.settings.meta;
        let [codes_at, codes_end, end] = self.layout(count);
        assert_eq!(src.len(), end, "encoded bytes of {count} elements");
        let buckets = src[codes_at..codes_end].chunks(self.bucket() / SHARE);
        let means = src[..codes_at].chunks_exact(meta.size_bytes());
        for (begin, (codes, mean)) in (0..count).step_by(self.bucket()).zip(buckets.zip(means)) {
            let mean = read(meta, mean);
            let mean = if mean.is_nan() { f32::NAN } else { mean };
            let end = count.min(begin + self.bucket());
            for (start, codes) in (begin..end).step_by(PIECE).zip(codes.chunks(PIECE / SHARE)) {
                each(start, PIECE.min(end - start), codes, mean);
            }
        }
    }
}

impl Codec for Sign {
    fn summary(&self) -> Summary {
        Summary::new(&ROW, self.settings)
    }

    fn grain(&self) -> usize {
        self.bucket()
    }

    fn encoded_bytes(&self, _: Dtype, count: usize) -> usize {
        let [_, _, end] = self.layout(count);
        end
    }

    unsafe fn encode(&self, dst: &mut [u8], slice: Slice, _: RngKey) -> NonFinite {
        let _env = DefaultFloatEnv::enter();
        let count = slice.count;
        let [codes_at, codes_end, end] = self.layout(count);
        assert_eq!(dst.len(), end, "room for {count} encoded elements");
        let (means, rest) = dst.split_at_mut(codes_at);
        let (codes, zeros) = rest.split_at_mut(codes_end - codes_at);
        zeros.fill(0);
        let mut non_finite = NonFinite::default();
        let (mut room, mut unpacked) = ([0.0; PIECE], [0; PIECE]);
        let means = means.chunks_exact_mut(self.settings.meta.size_bytes());
        let buckets = codes.chunks_mut(self.bucket() / SHARE);
        for (begin, (codes, mean_at)) in (0..count).step_by(self.bucket()).zip(buckets.zip(means)) {
            let bucket = slice.part(begin, self.bucket().min(count - begin));
            // SAFETY: `bucket` lies in the slice, which may be read by this function's contract.
            let mean = unsafe { self.mean(bucket, &mut room) };
            write(self.settings.meta, mean_at, mean.unwrap_or(f32::NAN));
            if let Err(this_one) = mean {
                non_finite += this_one;
                codes.fill(0);
                continue;
            }
            for (start, codes) in (0..bucket.count).step_by(PIECE).zip(codes.chunks_mut(PIECE / SHARE)) {
                // SAFETY: `bucket` lies in the slice, which may be read by this function's contract; the instruction
                // set was checked when `self` was made.
                unsafe {
                    let values = bucket.piece(&mut room, start, self.loops);
                    let whole = values.len().next_multiple_of(SHARE);
                    unpacked[values.len()..whole].fill(0);
                    (self.loops.signs)(&mut unpacked[..values.len()], values);
                    (self.loops.pack)(codes, &unpacked[..whole], 1);
                }
            }
        }
        non_finite
    }

    unsafe fn decode(&self, dst: *mut u8, into: Dtype, src: &[u8], _: Dtype, count: usize) {
        let _env = DefaultFloatEnv::enter();
        let mut room = [MaybeUninit::uninit(); PIECE];
        self.decode_pieces(src, count, |start, elements, codes, mean| {
            let dst = dst.wrapping_add(start * into.size_bytes());
            // SAFETY: the elements from `start` on lie in the result, for which `dst` has room by this function's
            // contract.
            unsafe {
                place(dst, (into, Overflow::Largest), elements, &mut room, self.loops, |values| {
                    (self.loops.signed_values)(values, codes, mean)
                })
            };
        });
    }

    fn decode_add(&self, sums: &mut [f32], src: &[u8], _: Dtype) {
        let _env = DefaultFloatEnv::enter();
        self.decode_pieces(src, sums.len(), |start, elements, codes, mean| {
            // SAFETY: the instruction set was checked when `self` was made.
            unsafe { (self.loops.add_signed_values)(&mut sums[start..start + elements], codes, mean) };
        });
    }
}
