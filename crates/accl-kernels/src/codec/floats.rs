//! Conversion of unencoded elements into float32 and back, where they are combined with encoded elements.

use accl_types::Dtype;

use super::loops::Loops;
use super::pieces::{add_slice, convert};
use super::traits::Slice;
use crate::dispatch;
use crate::float_env::DefaultFloatEnv;
use crate::isa::Isa;

/// The least numbers that round to an infinity.
pub(super) const F16_OVERFLOWS: f32 = 65_520.0;
pub(super) const BF16_OVERFLOWS: f32 = f32::from_bits(0x7f7f_8000);

/// Partial sums that are added up at the same time.
const LANES: usize = 16;

/// Reads and writes float32, float16 and bfloat16 by way of float32. No address needs alignment.
#[derive(Clone, Copy)]
pub struct Floats {
    loops: &'static Loops,
}

impl Default for Floats {
    fn default() -> Self {
        Self { loops: dispatch::loops(Isa::best()) }
    }
}

impl Floats {
    /// Sets the sums to the elements.
    ///
    /// # Safety
    /// There are as many elements as sums. They may be read, and nothing writes them meanwhile.
    pub unsafe fn read(self, sums: &mut [f32], src: *const u8, dtype: Dtype) {
        let _env = DefaultFloatEnv::enter();
        let slice = Slice { src, dtype, tensor: dtype, count: sums.len(), first: 0 };
        // SAFETY: the elements may be read by this function's contract; `sums` has room for them; `Isa::best` is
        // available.
        unsafe { convert(sums.as_mut_ptr().cast(), Dtype::F32, slice, self.loops) };
    }

    /// Adds the elements to the sums.
    ///
    /// # Safety
    /// The contract of [`Floats::read`].
    pub unsafe fn add(self, sums: &mut [f32], src: *const u8, dtype: Dtype) {
        let _env = DefaultFloatEnv::enter();
        let slice = Slice { src, dtype, tensor: dtype, count: sums.len(), first: 0 };
        // SAFETY: the elements may be read by this function's contract, one for each sum; `Isa::best` is available.
        unsafe { add_slice(sums, slice, self.loops) };
    }

    /// Finishes sums of a tensor: divides them by `divisor`, if given. Sums that the tensor's type cannot hold become
    /// infinite, as they would if elements were sent unencoded.
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

    /// Returns the sum of the squares.
    pub fn squares(self, values: &[f32]) -> f64 {
        let _env = DefaultFloatEnv::enter();
        let (groups, rest) = values.as_chunks::<LANES>();
        let mut lanes = [0.0; LANES];
        for group in groups {
            lanes.iter_mut().zip(group).for_each(|(lane, &value)| *lane += f64::from(value) * f64::from(value));
        }
        lanes.iter().sum::<f64>() + rest.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>()
    }

    /// Computes the loss of an encoding: the sums that were encoded minus the values that they decode to, and 0 where
    /// that is not finite. Writes the loss to `dst` and over `decoded`, and returns the sum of its squares.
    ///
    /// # Safety
    /// `dst` has room for as many float32 as there are sums, and nothing else accesses it meanwhile.
    ///
    /// # Panics
    /// Panics unless both have the same length.
    pub unsafe fn write_loss(self, dst: *mut u8, sums: &[f32], decoded: &mut [f32]) -> f64 {
        let _env = DefaultFloatEnv::enter();
        assert_eq!(sums.len(), decoded.len(), "a value for each sum");
        for (decoded, sum) in decoded.iter_mut().zip(sums) {
            let loss = sum - *decoded;
            *decoded = if loss.is_finite() { loss } else { 0.0 };
        }
        // SAFETY: by this function's contract, `dst` has room for as many float32 as `decoded` has, and does not
        // overlap it.
        unsafe { decoded.as_ptr().cast::<u8>().copy_to_nonoverlapping(dst, size_of_val(decoded)) };
        self.squares(decoded)
    }

    /// Writes the sums as elements, rounded to nearest even; beyond the range of a 16-bit type they become infinite.
    ///
    /// # Safety
    /// `dst` has room for as many elements as there are sums, and nothing else accesses it meanwhile.
    pub unsafe fn write(self, dst: *mut u8, dtype: Dtype, sums: &[f32]) {
        let _env = DefaultFloatEnv::enter();
        let src = sums.as_ptr().cast();
        let slice = Slice { src, dtype: Dtype::F32, tensor: dtype, count: sums.len(), first: 0 };
        // SAFETY: `dst` has room for the elements by this function's contract, and `slice` refers to `sums`.
        unsafe { convert(dst, dtype, slice, self.loops) };
    }
}
