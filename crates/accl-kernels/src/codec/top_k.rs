//! The elements of greatest magnitude of each bucket, by index and value; all other elements become zero.
//!
//! A bucket of n elements keeps the ceil(n / 2^bits) elements of greatest magnitude; of equal ones, the first. Encoded,
//! a slice is
//! ```text
//! values   of the kept elements, by buckets and indices, in the metadata's type, rounded to nearest even
//! indices  of the same elements in their buckets, 16 bits each
//! zeros    up to a multiple of 8
//! ```
//! All numbers are in little-endian order. A bucket is encoded as NaN if it is not finite, or if the metadata cannot
//! hold a kept value. All its values are then NaN, and its indices are 0, 1 and so on. A bucket whose first value is
//! NaN decodes to NaN in all elements. The decoder skips indices that are not above the previous one, or that are
//! beyond the bucket.
//!
//! The codec loses most of the encoded signal. It is useful only if the loss is added to the next encoding: Stich et
//! al., Sparsified SGD with memory, 2018. (Elements are selected by bucket rather than in the whole tensor, so that
//! sizes and indices depend only on counts.)

use std::sync::Arc;

use accl_types::Dtype;

use super::cast;
use super::loops::Loops;
use super::pieces::{Overflow, convert, read, write, write_values};
use super::rng::RngKey;
use super::settings::{Setting, Settings};
use super::traits::{Bound, Buckets, Codec, Loss, NonFinite, Row, Slice, Summary};
use super::uniform::bucket_of;
use crate::dispatch;
use crate::float_env::DefaultFloatEnv;
use crate::isa::Isa;

pub(super) const ROW: Row = Row {
    id: 13,
    name: "topk",
    description: "the elements of largest magnitude, one in 2^bits of a bucket; the others are zero",
    settings: &[Setting::Bits, Setting::Bucket, Setting::Meta],
    bits: 1..=8,
    buckets: Buckets::MultiplesOf8,
    shared: bucket_of,
    is_cast: false,
    loss: |_| Loss::Coarse,
    needs_feedback: true,
    hides_magnitudes: false,
    // Fewer bits keep more elements, but at least one element of a bucket is kept anyway.
    next_finer: |settings| {
        let now = kept(bucket_of(settings), settings.bits);
        let bits = (1..settings.bits).rev().find(|&bits| kept(bucket_of(settings), bits) > now);
        let finer = bits.and_then(|bits| ROW.with_bits(settings, bits));
        finer.or_else(|| Some(Summary::new(&cast::BF16, Settings::default())))
    },
    auto: &[],
    // Elements that are not kept become zero.
    bound: |_, _, _| Bound { share: 1.0, floor: 0.0 },
    build,
};

const ALIGN_BYTES: usize = 8;
const INDEX_BYTES: usize = 2;
const INDEX_BITS: u32 = 16;

/// Indices and values of kept elements.
type Kept<'a> = &'a mut dyn Iterator<Item = (usize, f32)>;

struct TopK {
    settings: Settings,
    loops: &'static Loops,
}

/// Offsets in bytes where indices begin, where they end, and where the slice ends.
struct Layout {
    indices_at: usize,
    indices_end: usize,
    end: usize,
}

fn build(settings: &Settings, isa: Isa) -> Arc<dyn Codec> {
    Arc::new(TopK { settings: *settings, loops: dispatch::loops(isa) })
}

/// Returns how many of `elements` elements are kept.
fn kept(elements: usize, bits: u8) -> usize {
    elements.div_ceil(1 << bits)
}

impl TopK {
    fn bucket(&self) -> usize {
        self.settings.bucket as usize
    }

    /// Returns how many elements of a bucket of `elements` elements are kept.
    fn kept(&self, elements: usize) -> usize {
        kept(elements, self.settings.bits)
    }

    fn layout(&self, count: usize) -> Layout {
        let kept = count / self.bucket() * self.kept(self.bucket()) + self.kept(count % self.bucket());
        let indices_at = kept * self.settings.meta.size_bytes();
        let indices_end = indices_at + kept * INDEX_BYTES;
        Layout { indices_at, indices_end, end: indices_end.next_multiple_of(ALIGN_BYTES) }
    }

    /// Writes the kept elements of a bucket, or returns how it is counted if it must become NaN. `keys` is room for the
    /// bucket.
    fn encode_bucket(
        &self,
        values: &mut [u8],
        indices: &mut [u8],
        bucket: &[f32],
        keys: &mut Vec<u64>,
    ) -> std::result::Result<(), NonFinite> {
        // Keys sort by magnitude; of equal magnitudes, a later element has a lesser key. No two keys are equal.
        keys.clear();
        keys.extend(bucket.iter().enumerate().map(|(index, value)| {
            u64::from(value.to_bits() & 0x7fff_ffff) << INDEX_BITS | (u64::from(u16::MAX) - index as u64)
        }));
        let kept = self.kept(bucket.len());
        let (_, &mut least, _) = keys.select_nth_unstable(bucket.len() - kept);
        if keys.iter().any(|key| key >> INDEX_BITS >= 0x7f80_0000) {
            return Err(NonFinite { not_finite: 1, too_large: 0 });
        }
        let meta = self.settings.meta;
        let places = values.chunks_exact_mut(meta.size_bytes()).zip(indices.chunks_exact_mut(INDEX_BYTES));
        keys.retain(|&key| key >= least);
        let at = |key: u64| u16::MAX - key as u16;
        keys.sort_unstable_by_key(|&key| at(key));
        for ((value_at, index_at), &key) in places.zip(&*keys) {
            let index = at(key);
            write(meta, value_at, bucket[usize::from(index)]);
            index_at.copy_from_slice(&index.to_le_bytes());
            if !read(meta, value_at).is_finite() {
                return Err(NonFinite { not_finite: 0, too_large: 1 });
            }
        }
        Ok(())
    }

    /// Calls `each` for every bucket, with the first element's index, the number of elements, and the kept elements
    /// (indices and values). `None` instead of kept elements: the bucket is NaN.
    fn decode_buckets(&self, src: &[u8], count: usize, mut each: impl FnMut(usize, usize, Option<Kept<'_>>)) {
        let layout = self.layout(count);
        assert_eq!(src.len(), layout.end, "encoded bytes of {count} elements");
        let meta = self.settings.meta;
        let kept = self.kept(self.bucket());
        let values = src[..layout.indices_at].chunks(kept * meta.size_bytes());
        let indices = src[layout.indices_at..layout.indices_end].chunks(kept * INDEX_BYTES);
        for (start, (values, indices)) in (0..count).step_by(self.bucket()).zip(values.zip(indices)) {
            let elements = self.bucket().min(count - start);
            let mut values = values.chunks_exact(meta.size_bytes()).map(|bytes| read(meta, bytes)).peekable();
            if values.peek().is_some_and(|value| value.is_nan()) {
                each(start, elements, None);
                continue;
            }
            let indices =
                indices.chunks_exact(INDEX_BYTES).map(|bytes| usize::from(u16::from_le_bytes([bytes[0], bytes[1]])));
            let canonical = |value: f32| if value.is_nan() { f32::NAN } else { value };
            let mut least = 0;
            let mut kept = indices.zip(values.map(canonical)).filter(|&(index, _)| {
                let is_sound = (least..elements).contains(&index);
                least = if is_sound { index + 1 } else { least };
                is_sound
            });
            each(start, elements, Some(&mut kept));
        }
    }
}

impl Codec for TopK {
    fn summary(&self) -> Summary {
        Summary::new(&ROW, self.settings)
    }

    fn grain(&self) -> usize {
        self.bucket()
    }

    fn encoded_bytes(&self, _: Dtype, count: usize) -> usize {
        self.layout(count).end
    }

    unsafe fn encode(&self, dst: &mut [u8], slice: Slice, _: RngKey) -> NonFinite {
        let _env = DefaultFloatEnv::enter();
        let count = slice.count;
        let layout = self.layout(count);
        assert_eq!(dst.len(), layout.end, "room for {count} encoded elements");
        let (values, rest) = dst.split_at_mut(layout.indices_at);
        let (indices, zeros) = rest.split_at_mut(layout.indices_end - layout.indices_at);
        zeros.fill(0);
        let (meta, kept) = (self.settings.meta, self.kept(self.bucket()));
        let mut non_finite = NonFinite::default();
        let (mut bucket, mut keys) =
            (vec![0.0; self.bucket().min(count)], Vec::with_capacity(self.bucket().min(count)));
        let places = values.chunks_mut(kept * meta.size_bytes()).zip(indices.chunks_mut(kept * INDEX_BYTES));
        for (start, (values, indices)) in (0..count).step_by(self.bucket()).zip(places) {
            let part = slice.part(start, self.bucket().min(count - start));
            let bucket = &mut bucket[..part.count];
            // SAFETY: `part` lies in the slice, which may be read by this function's contract; the instruction set was
            // checked when `self` was made.
            unsafe { convert(bucket.as_mut_ptr().cast(), Dtype::F32, part, self.loops) };
            if let Err(this_one) = self.encode_bucket(values, indices, bucket, &mut keys) {
                non_finite += this_one;
                values.chunks_exact_mut(meta.size_bytes()).for_each(|value| write(meta, value, f32::NAN));
                let places = indices.chunks_exact_mut(INDEX_BYTES);
                places.zip(0u16..).for_each(|(to, index)| to.copy_from_slice(&index.to_le_bytes()));
            }
        }
        non_finite
    }

    unsafe fn decode(&self, dst: *mut u8, into: Dtype, src: &[u8], _: Dtype, count: usize) {
        let _env = DefaultFloatEnv::enter();
        let mut bucket = vec![0.0; self.bucket().min(count)];
        self.decode_buckets(src, count, |start, elements, kept| {
            let bucket = &mut bucket[..elements];
            bucket.fill(if kept.is_some() { 0.0 } else { f32::NAN });
            for (index, value) in kept.into_iter().flatten() {
                bucket[index] = value;
            }
            let dst = dst.wrapping_add(start * into.size_bytes());
            // SAFETY: the elements from `start` on lie in the result, for which `dst` has room by this function's
            // contract.
            unsafe { write_values(dst, (into, Overflow::Largest), bucket, self.loops) };
        });
    }

    fn decode_add(&self, sums: &mut [f32], src: &[u8], _: Dtype) {
        let _env = DefaultFloatEnv::enter();
        self.decode_buckets(src, sums.len(), |start, elements, kept| {
            let sums = &mut sums[start..start + elements];
            match kept {
                Some(kept) => kept.for_each(|(index, value)| sums[index] += value),
                None => sums.fill(f32::NAN),
            }
        });
    }
}
