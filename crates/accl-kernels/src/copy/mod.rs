//! Copying, at the same speed wherever source and destination lie.
//!
//! The C library copies more than a few KiB by `rep movsb`, which on Zen 3 and Zen 4 takes several times as long when both
//! addresses are nearly the same within a page (glibc bug 30994). Payloads and tensors begin on lines and pages, so that
//! is the rule here and not the exception.

pub(crate) mod blocks;

use std::ptr;

use accl_types::Result;

use crate::dispatch;
use crate::isa::Isa;

/// Up to here a call would cost more than the copy.
const TINY_BYTES: usize = 16;
/// From here on a copy is made by vector loops of our own; below, the C library makes it by vectors, too.
const LONG_BYTES: usize = 1 << 10;

/// Copies `len_bytes` bytes.
///
/// # Safety
/// As [`std::ptr::copy_nonoverlapping`].
#[inline]
pub unsafe fn copy(dst: *mut u8, src: *const u8, len_bytes: usize) {
    if len_bytes <= TINY_BYTES {
        // SAFETY: the caller's promise; at most `TINY_BYTES`.
        unsafe { tiny(dst, src, len_bytes) };
    } else if len_bytes < LONG_BYTES || cfg!(miri) {
        // SAFETY: the caller's promise.
        unsafe { ptr::copy_nonoverlapping(src, dst, len_bytes) };
    } else {
        // SAFETY: the caller's promise; the instruction set is available.
        unsafe { dispatch::copy(Isa::best())(dst, src, len_bytes) };
    }
}

/// As [`copy`] of many bytes, with a chosen instruction set: for tests.
///
/// # Errors
/// `Unsupported` if this machine has not got the instruction set.
///
/// # Safety
/// As [`copy`].
pub unsafe fn copy_with_isa(isa: Isa, dst: *mut u8, src: *const u8, len_bytes: usize) -> Result<()> {
    isa.check_available()?;
    // SAFETY: the caller's promise; the instruction set is available.
    unsafe { dispatch::copy(isa)(dst, src, len_bytes) };
    Ok(())
}

/// Both ends, which overlap.
///
/// # Safety
/// As [`copy`], and `len_bytes` is at most [`TINY_BYTES`].
#[inline(always)]
unsafe fn tiny(dst: *mut u8, src: *const u8, len_bytes: usize) {
    /// # Safety
    /// As above, and `len_bytes` is at least the size of `T` and at most twice that.
    #[inline(always)]
    unsafe fn ends<T: Copy>(dst: *mut u8, src: *const u8, len_bytes: usize) {
        let last = len_bytes - size_of::<T>();
        // SAFETY: both ends lie within the length; no alignment is asked for.
        unsafe {
            let (a, b) = (src.cast::<T>().read_unaligned(), src.add(last).cast::<T>().read_unaligned());
            dst.cast::<T>().write_unaligned(a);
            dst.add(last).cast::<T>().write_unaligned(b);
        }
    }
    // SAFETY: the caller's promise, by length.
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
