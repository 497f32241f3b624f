//! Multiplication by a factor: PREMUL_SUM applies it to a contribution before adding.

use accl_types::{Dtype, Error, Result};

use crate::dispatch;
use crate::float_env::DefaultFloatEnv;
use crate::isa::Isa;

/// Computes dst\[i\] = src\[i\] * factor for `count` elements, on the best instruction set of this machine.
///
/// For float16, bfloat16, float32 and complex64 the factor is rounded to float32. For float64 and complex128 it is used
/// as it is. The product is rounded once.
///
/// # Errors
/// `Unsupported` for a dtype that is neither floating-point nor complex. torch's other backend with PREMUL_SUM refuses
/// them as well.
///
/// # Safety
/// `src` holds `count` readable elements, and `dst` has room for as many. No other thread writes `src` or accesses
/// `dst` meanwhile. No alignment is required. `dst` is equal to `src` or does not overlap it.
pub unsafe fn scale(dtype: Dtype, dst: *mut u8, src: *const u8, count: usize, factor: f64) -> Result<()> {
    // SAFETY: the contract of `scale_with_isa` is the contract of this function.
    unsafe { scale_with_isa(Isa::best(), dtype, dst, src, count, factor) }
}

/// Does what [`scale`] does, with a given instruction set: for tests and measurements.
///
/// # Errors
/// `Unsupported` as for [`scale`], or if this machine lacks the instruction set.
///
/// # Safety
/// The contract of [`scale`].
pub unsafe fn scale_with_isa(
    isa: Isa,
    dtype: Dtype,
    dst: *mut u8,
    src: *const u8,
    count: usize,
    factor: f64,
) -> Result<()> {
    isa.check_available()?;
    let kernel = dispatch::select_scale(isa, dtype).ok_or_else(|| {
        Error::unsupported(format!(
            "PREMUL_SUM is not supported for {dtype}; it takes floating-point and complex dtypes"
        ))
    })?;
    if count == 0 {
        return Ok(());
    }
    let _env = DefaultFloatEnv::enter();
    let len_bytes = count * dtype.size_bytes();
    // SAFETY: both buffers have `len_bytes` bytes and are equal or apart, by this function's contract.
    // `check_available` found the instruction set.
    unsafe { kernel(dst, src, len_bytes, factor) };
    Ok(())
}
