//! Elements that are not encoded, where they meet others that are: into float32 and back.

use accl_types::Dtype;

use super::Slice;
use super::loops::Loops;
use super::pieces::{add_slice, convert};
use crate::arch::{self, Isa};
use crate::float_env::DefaultFloatEnv;

/// The least numbers that round to an infinity.
const F16_OVERFLOWS: f32 = 65_520.0;
const BF16_OVERFLOWS: f32 = f32::from_bits(0x7f7f_8000);

/// Reads and writes float32, float16 and bfloat16 by way of float32. No address need be aligned.
#[derive(Clone, Copy)]
pub struct Floats {
    loops: &'static Loops,
}

impl Default for Floats {
    fn default() -> Self {
        Self { loops: arch::loops(Isa::best()) }
    }
}

impl Floats {
    /// Makes the sums what the elements are.
    ///
    /// # Safety
    /// There are as many elements as sums; they may be read, and are written by nobody meanwhile.
    pub unsafe fn read(self, sums: &mut [f32], src: *const u8, dtype: Dtype) {
        let _env = DefaultFloatEnv::enter();
        let slice = Slice { src, dtype, tensor: dtype, count: sums.len(), first: 0 };
        // SAFETY: the caller's promise; the instruction set is there.
        unsafe { convert(sums.as_mut_ptr().cast(), Dtype::F32, slice, self.loops) };
    }

    /// Adds the elements to the sums.
    ///
    /// # Safety
    /// As for [`Floats::read`].
    pub unsafe fn add(self, sums: &mut [f32], src: *const u8, dtype: Dtype) {
        let _env = DefaultFloatEnv::enter();
        let slice = Slice { src, dtype, tensor: dtype, count: sums.len(), first: 0 };
        // SAFETY: the caller's promise; the instruction set is there.
        unsafe { add_slice(sums, slice, self.loops) };
    }

    /// Finishes sums of a tensor: divides them, and makes those infinite that the tensor's type cannot hold, as they would
    /// have become if they had travelled as they were.
    pub fn finish(self, sums: &mut [f32], divisor: Option<f32>, tensor: Dtype) {
        let _env = DefaultFloatEnv::enter();
        if let Some(divisor) = divisor {
            sums.iter_mut().for_each(|sum| *sum /= divisor);
        }
        let limit = match tensor {
            Dtype::F16 => F16_OVERFLOWS,
            Dtype::BF16 => BF16_OVERFLOWS,
            _ => return,
        };
        sums.iter_mut().for_each(|sum| *sum = if sum.abs() >= limit { f32::INFINITY.copysign(*sum) } else { *sum });
    }

    /// What an encoding has lost: the difference between what was encoded and what that decodes to; nothing where that is not
    /// finite.
    ///
    /// # Safety
    /// There is room for as many float32 as there are sums, and nobody else uses it meanwhile.
    ///
    /// # Panics
    /// Panics unless both have the same length.
    pub unsafe fn write_loss(self, dst: *mut u8, sums: &[f32], decoded: &[f32]) {
        let _env = DefaultFloatEnv::enter();
        assert_eq!(sums.len(), decoded.len(), "a value for each sum");
        for (index, (sum, decoded)) in sums.iter().zip(decoded).enumerate() {
            let loss = sum - decoded;
            let loss = if loss.is_finite() { loss } else { 0.0 };
            // SAFETY: the caller's promise.
            unsafe { dst.cast::<f32>().add(index).write_unaligned(loss) };
        }
    }

    /// Makes the elements what the sums are, rounded to nearest even; beyond the range of a 16-bit type they are infinite.
    ///
    /// # Safety
    /// There is room for as many elements as there are sums, and nobody else uses it meanwhile.
    pub unsafe fn write(self, dst: *mut u8, dtype: Dtype, sums: &[f32]) {
        let _env = DefaultFloatEnv::enter();
        let src = sums.as_ptr().cast();
        let slice = Slice { src, dtype: Dtype::F32, tensor: dtype, count: sums.len(), first: 0 };
        // SAFETY: the caller's promise; the slice is `sums`.
        unsafe { convert(dst, dtype, slice, self.loops) };
    }
}
