//! Casts: elements as they are, or as float16 or bfloat16, rounded to nearest even.
//!
//! Encoded, a slice is its elements in little-endian order and zeros up to a multiple of 8. A value beyond the range of
//! float16 becomes an infinity, and a NaN stays one (of the canonical payload where it is cast).

use std::sync::Arc;

use accl_types::{Dtype, Result};

use super::loops::Loops;
use super::noise::Noise;
use super::pieces::{add, convert};
use super::settings::Settings;
use super::traits::{Codec, Row, Slice, Spoilt, Summary};
use crate::arch;
use crate::float_env::DefaultFloatEnv;
use crate::isa::Isa;

pub(super) const RAW: Row = Row::plain(0, "raw", "elements as they are", |_, isa| cast(&RAW, None, isa));

pub(super) const BF16: Row = Row::plain(1, "bf16", "bfloat16", |_, isa| cast(&BF16, Some(Dtype::BF16), isa));

pub(super) const FP16: Row = Row::plain(2, "fp16", "float16", |_, isa| cast(&FP16, Some(Dtype::F16), isa));

/// Elements lie at multiples of so many bytes in any of the types.
const ALIGN_BYTES: usize = 8;
/// Elements that are never parted: a cache line of float32.
const GRAIN: usize = 16;

struct Cast {
    row: &'static Row,
    /// What elements travel as, unless as they are.
    wire: Option<Dtype>,
    loops: &'static Loops,
}

fn cast(row: &'static Row, wire: Option<Dtype>, isa: Isa) -> Result<Arc<dyn Codec>> {
    isa.check_available()?;
    Ok(Arc::new(Cast { row, wire, loops: arch::loops(isa) }))
}

impl Cast {
    fn wire(&self, tensor: Dtype) -> Dtype {
        self.wire.unwrap_or(tensor)
    }

    /// The elements among what was encoded.
    fn elements<'a>(&self, src: &'a [u8], tensor: Dtype, count: usize) -> &'a [u8] {
        assert_eq!(src.len(), self.encoded_bytes(tensor, count), "what {count} elements become");
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

    unsafe fn encode(&self, dst: &mut [u8], slice: Slice, _: Noise) -> Spoilt {
        let _env = DefaultFloatEnv::enter();
        let wire = self.wire(slice.tensor);
        assert_eq!(dst.len(), self.encoded_bytes(slice.tensor, slice.count), "room for {} elements", slice.count);
        let (elements, zeros) = dst.split_at_mut(slice.count * wire.size_bytes());
        zeros.fill(0);
        // SAFETY: the caller's promise; there is room for each element.
        unsafe { convert(elements.as_mut_ptr(), wire, slice, self.loops) };
        Spoilt::default()
    }

    unsafe fn decode(&self, dst: *mut u8, into: Dtype, src: &[u8], tensor: Dtype, count: usize) {
        let _env = DefaultFloatEnv::enter();
        let src = self.elements(src, tensor, count);
        let slice = Slice { src: src.as_ptr(), dtype: self.wire(tensor), tensor, count, first: 0 };
        // SAFETY: the caller's promise; the slice is what was encoded.
        unsafe { convert(dst, into, slice, self.loops) };
    }

    fn decode_add(&self, sums: &mut [f32], src: &[u8], tensor: Dtype) {
        let _env = DefaultFloatEnv::enter();
        add(sums, self.elements(src, tensor, sums.len()), self.wire(tensor), self.loops);
    }
}
