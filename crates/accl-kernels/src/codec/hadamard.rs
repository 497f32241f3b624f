//! Max-min after a randomized Hadamard rotation of each bucket: its error hardly depends on how values are distributed.
//!
//! A full bucket x of n elements becomes y = H D x. D has the signs below, and H is the Hadamard matrix of n rows over
//! sqrt(n), rows in natural order. H D is a product of a rotation and reflections, so its transpose is its inverse.
//! y is encoded like [`super::max_min`] encodes it, decoded to float32 and rotated back: x = D H y. Elements after the
//! last full bucket are not rotated.
//! A slice is encoded in parts of as many buckets as have 4,096 elements, at least one bucket. The parts follow each
//! other.
//!
//! # Arithmetic
//! In float32, each operation rounded:
//! * Elements are multiplied by the sign over sqrt(n), rounded.
//! * Pairs whose indices differ only in bit 0 become sum and difference, then pairs that differ in bit 1, and so on.
//! * Rotating back, the pairs come first.
//!
//! The sign of an element is the highest bit of the hash of its index in its bucket, so the decoder knows it.
//! If the rotated values of a bucket are not all below 2^112 in magnitude, the bucket counts as one that the metadata
//! cannot hold. Rotating back therefore never overflows.
//!
//! The rotation is from Suresh et al., Distributed mean estimation with limited communication, 2017.

use std::sync::Arc;

use accl_types::Dtype;

use super::cast;
use super::loops::Loops;
use super::max_min;
use super::pieces::{Overflow, PIECE, convert, write_values};
use super::rng::RngKey;
use super::rng::mixed;
use super::settings::{Setting, Settings};
use super::traits::{Bound, Buckets, Codec, NonFinite, Row, Slice, Summary};
use super::uniform::{bucket_of, range_of};
use crate::dispatch;
use crate::float_env::DefaultFloatEnv;
use crate::isa::Isa;

pub(super) const ROW: Row = Row {
    id: 12,
    name: "hadamard",
    description: "`maxmin` of buckets after a random rotation, so that a few large values do not harm the others",
    settings: &Setting::ALL,
    bits: 1..=8,
    buckets: Buckets::PowersOfTwo,
    shared: bucket_of,
    is_cast: false,
    loss: max_min::loss,
    needs_feedback: false,
    hides_magnitudes: false,
    next_finer: |settings| {
        ROW.with_bits(settings, settings.bits + 1).or_else(|| Some(Summary::new(&cast::BF16, Settings::default())))
    },
    auto: &[],
    bound: |settings, values, _| bound(settings, values),
    build,
};

/// Elements of a part, unless a bucket has more.
const PART: usize = 4096;
/// Added to indices, because the hash of 0 is 0.
const AWAY_FROM_0: u32 = 0x9e37_79b9;
/// Limit of the magnitude of rotated values: 2^112. Sums of 2^13 such values are far from overflowing.
const LIMIT: f32 = f32::from_bits((127 + 112) << 23);

struct Hadamard {
    settings: Settings,
    /// Codec of the rotated values.
    max_min: Arc<dyn Codec>,
    /// The sign of each element of a bucket, over the square root of the number of elements.
    signs: Vec<f32>,
    loops: &'static Loops,
}

/// Returns the bound. Rotated values have at most the error of max-min. Rotating back multiplies it by at most the
/// square root of their number. The range of values with a given norm is at most the norm times the square root of 2.
fn bound(settings: &Settings, values: &[f32]) -> Bound {
    if values.len() < bucket_of(settings) {
        return max_min::bound_of_range(settings, range_of(values));
    }
    let norm = values.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt();
    // If float32 cannot hold a rotated value, the bucket becomes NaN.
    let reach = norm * std::f64::consts::FRAC_1_SQRT_2;
    let rotated = max_min::bound_of_range(settings, (-reach, reach));
    Bound { share: 0.0, floor: rotated.floor * (values.len() as f64).sqrt() + norm * 2f64.powi(-18) }
}

fn build(settings: &Settings, isa: Isa) -> Arc<dyn Codec> {
    let bucket = settings.bucket;
    let max_min = (max_min::ROW.build)(settings, isa);
    let factor = (1.0 / f64::from(bucket).sqrt()) as f32;
    let is_negative = |index: u32| mixed(index.wrapping_add(AWAY_FROM_0), 0) >> 31 == 1;
    let signs = (0..bucket).map(|index| if is_negative(index) { -factor } else { factor }).collect();
    Arc::new(Hadamard { settings: *settings, max_min, signs, loops: dispatch::loops(isa) })
}

impl Hadamard {
    fn bucket(&self) -> usize {
        self.settings.bucket as usize
    }

    fn part(&self) -> usize {
        PART.max(self.bucket())
    }

    /// Writes elements to `values`, full buckets rotated. Counts the finite buckets that must become NaN because of the
    /// rotation.
    ///
    /// # Safety
    /// The contract of [`Slice::piece`].
    unsafe fn rotated(&self, values: &mut [f32], slice: Slice) -> NonFinite {
        let Loops { rotate, range, .. } = *self.loops;
        let mut room = [0.0; PIECE];
        // SAFETY: the slice's elements may be read by this function's contract, and `values` has room for each.
        unsafe { convert(values.as_mut_ptr().cast(), Dtype::F32, slice, self.loops) };
        let mut too_large = 0;
        for (start, bucket) in (0..).step_by(self.bucket()).zip(values.chunks_exact_mut(self.bucket())) {
            // SAFETY: the instruction set was checked when `self` was made.
            let found = unsafe {
                rotate(bucket, &self.signs);
                range(bucket)
            };
            if !found.finite || found.max >= LIMIT || found.min <= -LIMIT {
                bucket.fill(f32::NAN);
                let mut pieces = (start..start + self.bucket()).step_by(PIECE.min(self.bucket()));
                // SAFETY: the elements may be read by this function's contract; the instruction set was checked when
                // `self` was made.
                let was_finite = pieces.all(|start| unsafe {
                    let piece = slice.piece(&mut room, start, self.loops);
                    range(&piece[..piece.len().min(self.bucket())]).finite
                });
                too_large += usize::from(was_finite);
            }
        }
        NonFinite { not_finite: 0, too_large }
    }

    /// Calls `each` with the first element's index and the values of every part, in their order.
    fn decode_parts(&self, mut src: &[u8], tensor: Dtype, count: usize, mut each: impl FnMut(usize, &[f32])) {
        assert_eq!(src.len(), self.encoded_bytes(tensor, count), "encoded bytes of {count} elements");
        let mut values = vec![0.0; self.part().min(count)];
        for start in (0..count).step_by(self.part()) {
            let elements = self.part().min(count - start);
            let (part, rest) = src.split_at(self.max_min.encoded_bytes(tensor, elements));
            src = rest;
            let values = &mut values[..elements];
            // SAFETY: `values` has room for the elements.
            unsafe { self.max_min.decode(values.as_mut_ptr().cast(), Dtype::F32, part, tensor, elements) };
            for bucket in values.chunks_exact_mut(self.bucket()) {
                // SAFETY: the instruction set was checked when `self` was made.
                unsafe { (self.loops.rotate_back)(bucket, &self.signs) };
            }
            each(start, values);
        }
    }
}

impl Codec for Hadamard {
    fn summary(&self) -> Summary {
        Summary::new(&ROW, self.settings)
    }

    fn grain(&self) -> usize {
        self.bucket()
    }

    fn encoded_bytes(&self, tensor: Dtype, count: usize) -> usize {
        let of = |count| self.max_min.encoded_bytes(tensor, count);
        count / self.part() * of(self.part()) + of(count % self.part())
    }

    unsafe fn encode(&self, mut dst: &mut [u8], slice: Slice, rng_key: RngKey) -> NonFinite {
        let _env = DefaultFloatEnv::enter();
        let count = slice.count;
        assert_eq!(dst.len(), self.encoded_bytes(slice.tensor, count), "room for {count} encoded elements");
        let mut non_finite = NonFinite::default();
        let mut values = vec![0.0; self.part().min(count)];
        for start in (0..count).step_by(self.part()) {
            let part = slice.part(start, self.part().min(count - start));
            let (to, rest) = dst.split_at_mut(self.max_min.encoded_bytes(slice.tensor, part.count));
            dst = rest;
            // SAFETY: `part` lies in the slice, which may be read by this function's contract; `rotated` refers to
            // `values`.
            unsafe {
                let too_large = self.rotated(&mut values[..part.count], part);
                let rotated = Slice { src: values.as_ptr().cast(), dtype: Dtype::F32, ..part };
                non_finite += self.max_min.encode(to, rotated, rng_key);
                // Max-min counts every bucket that was made NaN as not finite.
                non_finite.not_finite -= too_large.too_large;
                non_finite += too_large;
            }
        }
        non_finite
    }

    unsafe fn decode(&self, dst: *mut u8, into: Dtype, src: &[u8], tensor: Dtype, count: usize) {
        let _env = DefaultFloatEnv::enter();
        self.decode_parts(src, tensor, count, |start, values| {
            // Elements that were sent unencoded stay unchanged, including infinities.
            let raw = if self.settings.skip_incomplete { values.len() % self.bucket() } else { 0 };
            let (coded, raw) = values.split_at(values.len() - raw);
            for (start, values, overflow) in
                [(start, coded, Overflow::Largest), (start + coded.len(), raw, Overflow::Infinite)]
            {
                let dst = dst.wrapping_add(start * into.size_bytes());
                // SAFETY: the elements from `start` on lie in the result, for which `dst` has room by this function's
                // contract.
                unsafe { write_values(dst, (into, overflow), values, self.loops) };
            }
        });
    }

    fn decode_add(&self, sums: &mut [f32], src: &[u8], tensor: Dtype) {
        let _env = DefaultFloatEnv::enter();
        self.decode_parts(src, tensor, sums.len(), |start, values| {
            sums[start..].iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        });
    }
}
