//! Copying, at the same speed for all addresses of source and destination.
//!
//! The C library copies more than a few KiB by `rep movsb`. On Zen 3 and Zen 4 that takes several times as long if both
//! addresses are nearly the same within a page (glibc bug 30994). Payloads and tensors begin on lines and pages, so
//! this is the normal case here.

pub(crate) mod blocks;

use std::ptr;

use accl_types::Result;

use crate::dispatch;
use crate::isa::Isa;

/// Up to this many bytes a call would cost more than the copy.
const TINY_BYTES: usize = 16;
/// From this many bytes on, this crate's own vector loops copy. Below, the C library uses vectors, too.
const LONG_BYTES: usize = 1 << 10;

/// Copies `len_bytes` bytes.
///
/// # Safety
/// The contract of [`std::ptr::copy_nonoverlapping`].
#[inline]
pub unsafe fn copy(dst: *mut u8, src: *const u8, len_bytes: usize) {
    if len_bytes <= TINY_BYTES {
        // SAFETY: the contract of this function is the contract of `copy`, and `len_bytes` is at most `TINY_BYTES`.
        unsafe { tiny(dst, src, len_bytes) };
    } else if len_bytes < LONG_BYTES || cfg!(miri) {
        // SAFETY: the contract of this function is the contract of `copy_nonoverlapping`.
        unsafe { ptr::copy_nonoverlapping(src, dst, len_bytes) };
    } else {
        // SAFETY: the contract of this function, with the length checked above, is the contract of `blocks`.
        // `Isa::best` is available.
        unsafe { dispatch::copy(Isa::best())(dst, src, len_bytes) };
    }
}

/// Does what [`copy`] does for many bytes, with a given instruction set: for tests.
///
/// # Errors
/// `Unsupported` if this machine lacks the instruction set.
///
/// # Safety
/// The contract of [`copy`]. `len_bytes` is at least 64.
pub unsafe fn copy_with_isa(isa: Isa, dst: *mut u8, src: *const u8, len_bytes: usize) -> Result<()> {
    isa.check_available()?;
    // SAFETY: the contract of this function is the contract of `blocks`; `check_available` found the instruction set.
    unsafe { dispatch::copy(isa)(dst, src, len_bytes) };
    Ok(())
}

/// Copies both ends, which overlap.
///
/// # Safety
/// The contract of [`copy`], and `len_bytes` is at most [`TINY_BYTES`].
#[inline(always)]
unsafe fn tiny(dst: *mut u8, src: *const u8, len_bytes: usize) {
    /// # Safety
    /// The contract of [`tiny`], and `len_bytes` is at least the size of `T` and at most twice that size.
    #[inline(always)]
    unsafe fn ends<T: Copy>(dst: *mut u8, src: *const u8, len_bytes: usize) {
        let last = len_bytes - size_of::<T>();
        // SAFETY: both ends lie within the `len_bytes` bytes; unaligned access needs no alignment.
        unsafe {
            let (a, b) = (src.cast::<T>().read_unaligned(), src.add(last).cast::<T>().read_unaligned());
            dst.cast::<T>().write_unaligned(a);
            dst.add(last).cast::<T>().write_unaligned(b);
        }
    }
    // SAFETY: both buffers have `len_bytes` bytes by this function's contract, and each arm fits its lengths.
    unsafe {
        match len_bytes {
            0 => {}
            1 => *dst = *src,
            2..4 => ends::<u16>(dst, src, len_bytes),
            4..8 => ends::<u32>(dst, src, len_bytes),
            _ => ends::<u64>(dst, src, len_bytes),
        }
    }
}
