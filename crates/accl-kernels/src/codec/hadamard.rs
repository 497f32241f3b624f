//! Max-min of what a randomized Hadamard rotation makes of each bucket: its error hardly depends on how values are
//! distributed.
//!
//! A full bucket x of n elements becomes y = H D x, with D the signs below and H the Hadamard matrix of n rows over
//! sqrt(n), rows in natural order: the product of a rotation and reflections, so that its transpose is its inverse. y
//! is encoded as [`super::max_min`] does it, decoded to float32 and rotated back: x = D H y. What is behind the last
//! full bucket is not rotated. A slice is encoded in parts of as many buckets as have 4,096 elements, at least one;
//! the parts follow each other.
//!
//! # Arithmetic
//! In float32, each operation rounded: elements are multiplied by the sign over sqrt(n), rounded; then pairs whose
//! indices differ in bit 0 alone become sum and difference, then those of bit 1, and so on. Back, the pairs come
//! first. The sign of an element is the highest bit of the hash of its index in its bucket below: whoever decodes
//! knows it. A bucket whose rotated values are not below 2^112 in magnitude is one that the metadata cannot hold, so
//! that rotating back never overflows.
//!
//! The rotation: Suresh et al., Distributed mean estimation with limited communication, 2017.

use std::sync::Arc;

use accl_types::{Dtype, Error, Result};

use super::loops::Loops;
use super::max_min;
use super::noise::Noise;
use super::noise::mixed;
use super::pieces::{Beyond, PIECE, convert, write_values};
use super::settings::{Setting, Settings};
use super::traits::{Codec, Row, Slice, Spoilt, Summary};
use crate::arch;
use crate::float_env::DefaultFloatEnv;
use crate::isa::Isa;

pub(super) const ROW: Row = Row {
    id: 12,
    name: "hadamard",
    description: "maxmin of randomly rotated buckets (of a power of two), 1 to 8 bits",
    settings: &Setting::ALL,
    needs_feedback: false,
    build,
};

const LEAST_BUCKET: u32 = 64;
const MOST_BUCKET: u32 = 8192;
/// Elements of a part, unless a bucket has more.
const PART: usize = 4096;
/// Added to indices, so that what is hashed is not 0, whose hash is 0.
const AWAY_FROM_0: u32 = 0x9e37_79b9;
/// Rotated values are below it: 2^112, which is far less than what 2^13 of them could overflow with.
const LIMIT: f32 = f32::from_bits((127 + 112) << 23);

struct Hadamard {
    settings: Settings,
    inner: Arc<dyn Codec>,
    /// The sign of each element of a bucket, over the square root of their number.
    signs: Vec<f32>,
    loops: &'static Loops,
}

fn build(settings: &Settings, isa: Isa) -> Result<Arc<dyn Codec>> {
    let bucket = settings.bucket;
    if !bucket.is_power_of_two() || !(LEAST_BUCKET..=MOST_BUCKET).contains(&bucket) {
        return Err(Error::configuration(format!(
            "codec {}: bucket is {bucket}; expected a power of two from {LEAST_BUCKET} to {MOST_BUCKET}",
            ROW.name
        )));
    }
    let inner = max_min::ROW.build_with_isa(settings, isa)?;
    let factor = (1.0 / f64::from(bucket).sqrt()) as f32;
    let is_negative = |index: u32| mixed(index.wrapping_add(AWAY_FROM_0), 0) >> 31 == 1;
    let signs = (0..bucket).map(|index| if is_negative(index) { -factor } else { factor }).collect();
    Ok(Arc::new(Hadamard { settings: *settings, inner, signs, loops: arch::loops(isa) }))
}

impl Hadamard {
    fn bucket(&self) -> usize {
        self.settings.bucket as usize
    }

    fn part(&self) -> usize {
        PART.max(self.bucket())
    }

    /// Writes elements to `values`, full buckets rotated; those that must become NaN for it are counted.
    ///
    /// # Safety
    /// As for [`Slice::piece`].
    unsafe fn rotated(&self, values: &mut [f32], slice: Slice) -> Spoilt {
        let Loops { rotate, range, .. } = *self.loops;
        let mut room = [0.0; PIECE];
        // SAFETY: the caller's promise; there is a value for each element.
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
                // SAFETY: as above; the caller's promise.
                let was_finite = pieces.all(|start| unsafe {
                    let piece = slice.piece(&mut room, start, self.loops);
                    range(&piece[..piece.len().min(self.bucket())]).finite
                });
                too_large += usize::from(was_finite);
            }
        }
        Spoilt { not_finite: 0, too_large }
    }

    /// Calls `each` with the first element and the values of every part, in their order.
    fn decode_parts(&self, mut src: &[u8], tensor: Dtype, count: usize, mut each: impl FnMut(usize, &[f32])) {
        assert_eq!(src.len(), self.encoded_bytes(tensor, count), "what {count} elements become");
        let mut values = vec![0.0; self.part().min(count)];
        for start in (0..count).step_by(self.part()) {
            let elements = self.part().min(count - start);
            let (part, rest) = src.split_at(self.inner.encoded_bytes(tensor, elements));
            src = rest;
            let values = &mut values[..elements];
            // SAFETY: there is room for the elements.
            unsafe { self.inner.decode(values.as_mut_ptr().cast(), Dtype::F32, part, tensor, elements) };
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
        let of = |count| self.inner.encoded_bytes(tensor, count);
        count / self.part() * of(self.part()) + of(count % self.part())
    }

    unsafe fn encode(&self, mut dst: &mut [u8], slice: Slice, noise: Noise) -> Spoilt {
        let _env = DefaultFloatEnv::enter();
        let count = slice.count;
        assert_eq!(dst.len(), self.encoded_bytes(slice.tensor, count), "room for what {count} elements become");
        let mut spoilt = Spoilt::default();
        let mut values = vec![0.0; self.part().min(count)];
        for start in (0..count).step_by(self.part()) {
            let part = slice.part(start, self.part().min(count - start));
            let (to, rest) = dst.split_at_mut(self.inner.encoded_bytes(slice.tensor, part.count));
            dst = rest;
            // SAFETY: the caller's promise: these are elements of the slice; then it is `values`.
            unsafe {
                let too_large = self.rotated(&mut values[..part.count], part);
                let rotated = Slice { src: values.as_ptr().cast(), dtype: Dtype::F32, ..part };
                spoilt += self.inner.encode(to, rotated, noise);
                // All that were made NaN count as not finite there.
                spoilt.not_finite -= too_large.too_large;
                spoilt += too_large;
            }
        }
        spoilt
    }

    unsafe fn decode(&self, dst: *mut u8, into: Dtype, src: &[u8], tensor: Dtype, count: usize) {
        let _env = DefaultFloatEnv::enter();
        self.decode_parts(src, tensor, count, |start, values| {
            // What travelled as it is stays so, infinities too.
            let raw = if self.settings.skip_incomplete { values.len() % self.bucket() } else { 0 };
            let (coded, raw) = values.split_at(values.len() - raw);
            for (start, values, beyond) in
                [(start, coded, Beyond::Largest), (start + coded.len(), raw, Beyond::Infinite)]
            {
                let dst = dst.wrapping_add(start * into.size_bytes());
                // SAFETY: the caller's promise: these are elements of the result.
                unsafe { write_values(dst, (into, beyond), values, self.loops) };
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
