//! Casts: elements unchanged, or as float16 or bfloat16, rounded to nearest even.
//!
//! Encoded, a slice is its elements in little-endian order and zeros up to a multiple of 8 bytes. A value beyond the
//! range of float16 becomes an infinity. A NaN stays a NaN, of the canonical payload if it is cast.

use std::sync::Arc;

use accl_types::Dtype;

use super::floats::{BF16_OVERFLOWS, F16_OVERFLOWS};
use super::loops::Loops;
use super::pieces::{add, convert};
use super::rng::RngKey;
use super::settings::Settings;
use super::traits::{Bound, Buckets, Build, Codec, EncodeSums, Loss, NonFinite, Row, Slice, Summary, Sums};
use crate::dispatch;
use crate::float_env::DefaultFloatEnv;
use crate::isa::Isa;

pub(super) const RAW: Row = Row {
    loss: |_| Loss::None,
    next_finer: |_| None,
    bound: |_, _, _| Bound { share: 0.0, floor: 0.0 },
    ..row(0, "raw", "elements unchanged", |_, isa| cast(&RAW, None, isa))
};

pub(super) const BF16: Row = Row {
    auto: &["bf16"],
    // Half a step of 8 significant bits, and half of the smallest step.
    bound: |_, values, _| bound(values, -8, -134, f64::from(BF16_OVERFLOWS)),
    ..row(1, "bf16", "bfloat16, rounded to nearest even", |_, isa| cast(&BF16, Some(Dtype::BF16), isa))
};

pub(super) const FP16: Row = Row {
    bound: |_, values, _| bound(values, -11, -25, f64::from(F16_OVERFLOWS)),
    ..row(2, "fp16", "float16, rounded to nearest even; a value beyond its range becomes an infinity", |_, isa| {
        cast(&FP16, Some(Dtype::F16), isa)
    })
};

/// The common part of the rows of casts. A cast with another bound, or without loss, replaces these fields.
const fn row(id: u8, name: &'static str, description: &'static str, build: Build) -> Row {
    Row {
        id,
        name,
        description,
        settings: &[],
        bits: 1..=1,
        buckets: Buckets::MultiplesOf8,
        shared: |_| 1,
        is_cast: true,
        loss: |_| Loss::Fine,
        needs_feedback: false,
        hides_magnitudes: false,
        next_finer: |_| Some(Summary::new(&RAW, Settings::default())),
        auto: &[],
        bound: |_, _, _| Bound { share: f64::INFINITY, floor: f64::INFINITY },
        build,
    }
}

/// Returns the bound of rounding: at most a share of 2^`share`, and at most 2^`floor` for the smallest numbers.
fn bound(values: &[f32], share: i32, floor: i32, overflows: f64) -> Bound {
    let is_held = values.iter().all(|value| f64::from(*value).abs() < overflows);
    Bound { share: 2f64.powi(share), floor: if is_held { 2f64.powi(floor) } else { f64::INFINITY } }
}

/// Alignment of encoded slices in bytes, enough for each of the types.
const ALIGN_BYTES: usize = 8;
/// Elements that are never split between slices: a cache line of float32.
const GRAIN: usize = 16;

struct Cast {
    row: &'static Row,
    /// Type in which elements are sent; `None` keeps the tensor's type.
    wire: Option<Dtype>,
    loops: &'static Loops,
}

fn cast(row: &'static Row, wire: Option<Dtype>, isa: Isa) -> Arc<dyn Codec> {
    Arc::new(Cast { row, wire, loops: dispatch::loops(isa) })
}

impl Cast {
    fn wire(&self, tensor: Dtype) -> Dtype {
        self.wire.unwrap_or(tensor)
    }

    /// Returns the bytes of the elements in an encoded slice.
    fn elements<'a>(&self, src: &'a [u8], tensor: Dtype, count: usize) -> &'a [u8] {
        assert_eq!(src.len(), self.encoded_bytes(tensor, count), "encoded bytes of {count} elements");
        &src[..count * self.wire(tensor).size_bytes()]
    }
}

impl Codec for Cast {
    fn summary(&self) -> Summary {
        Summary::new(self.row, Settings::default())
    }

    fn grain(&self) -> usize {
        GRAIN
    }

    fn encoded_bytes(&self, tensor: Dtype, count: usize) -> usize {
        (count * self.wire(tensor).size_bytes()).next_multiple_of(ALIGN_BYTES)
    }

    unsafe fn encode(&self, dst: &mut [u8], slice: Slice, _: RngKey) -> NonFinite {
        let _env = DefaultFloatEnv::enter();
        let wire = self.wire(slice.tensor);
        assert_eq!(dst.len(), self.encoded_bytes(slice.tensor, slice.count), "room for {} elements", slice.count);
        let (elements, zeros) = dst.split_at_mut(slice.count * wire.size_bytes());
        zeros.fill(0);
        // SAFETY: the slice's elements may be read by this function's contract, and `elements` has room for each of
        // them.
        unsafe { convert(elements.as_mut_ptr(), wire, slice, self.loops) };
        NonFinite::default()
    }

    unsafe fn decode(&self, dst: *mut u8, into: Dtype, src: &[u8], tensor: Dtype, count: usize) {
        let _env = DefaultFloatEnv::enter();
        let src = self.elements(src, tensor, count);
        let slice = Slice { src: src.as_ptr(), dtype: self.wire(tensor), tensor, count, first: 0 };
        // SAFETY: `dst` has room for the elements by this function's contract, and `slice` refers to `src`.
        unsafe { convert(dst, into, slice, self.loops) };
    }

    fn decode_add(&self, sums: &mut [f32], src: &[u8], tensor: Dtype) {
        let _env = DefaultFloatEnv::enter();
        add(sums, self.elements(src, tensor, sums.len()), self.wire(tensor), self.loops);
    }

    fn encode_sums(&self) -> Option<&dyn EncodeSums> {
        (self.wire == Some(Dtype::BF16)).then_some(self as &dyn EncodeSums)
    }
}

/// Only for bfloat16.
impl EncodeSums for Cast {
    unsafe fn encode_sums(&self, dst: &mut [u8], src: &[u8], sums: Sums) {
        let _env = DefaultFloatEnv::enter();
        let src = self.elements(src, Dtype::F32, sums.count);
        assert_eq!(dst.len(), self.encoded_bytes(Dtype::F32, sums.count), "room for {} elements", sums.count);
        let (elements, zeros) = dst.split_at_mut(src.len());
        zeros.fill(0);
        let (elements, _) = elements.as_chunks_mut();
        let (src, _) = src.as_chunks();
        // SAFETY: `sums` has valid pointers by this function's contract; the instruction set was checked when the loops
        // were chosen.
        unsafe { (self.loops.sum_bf16)(elements, src, sums) };
    }
}
