//! Multiplication by a factor: what PREMUL_SUM does to a contribution before it is added.

use accl_types::{Dtype, Error, Result};

use crate::dispatch;
use crate::float_env::DefaultFloatEnv;
use crate::isa::Isa;

/// dst\[i\] = src\[i\] * factor for `count` elements, on the best instruction set of this machine.
///
/// float16, bfloat16, float32 and complex64 take the factor rounded to float32, float64 and complex128 as it is.
/// The product is rounded once.
///
/// # Errors
/// `Unsupported` for a dtype that is neither floating-point nor complex, as in torch's other backend with PREMUL_SUM.
///
/// # Safety
/// `src` holds `count` elements that may be read, `dst` has room for as many, and nobody else writes or uses them
/// meanwhile. No alignment is asked for. `dst` is equal to `src` or does not overlap it.
pub unsafe fn scale(dtype: Dtype, dst: *mut u8, src: *const u8, count: usize, factor: f64) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { scale_with_isa(Isa::best(), dtype, dst, src, count, factor) }
}

/// As [`scale`], with a chosen instruction set: for tests and measurements.
///
/// # Errors
/// `Unsupported` as for [`scale`], or if this machine has not got the instruction set.
///
/// # Safety
/// As [`scale`].
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
    // SAFETY: the caller's promise: valid for this length, and either equal or apart. The instruction set is available.
    unsafe { kernel(dst, src, len_bytes, factor) };
    Ok(())
}
