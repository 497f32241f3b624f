//! Copying, at the same speed wherever source and destination lie.
//!
//! The C library copies more than a few KiB by `rep movsb`, which on Zen 3 and Zen 4 takes several times as long when both
//! addresses are nearly the same within a page (glibc bug 30994). Payloads and tensors begin on lines and pages, so that
//! is the rule here and not the exception.

pub(crate) mod blocks;

use std::ptr;

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::available_isas;

    #[test]
    fn every_instruction_set_copies_all_bytes_and_no_others() {
        let src: Vec<u8> = (0..9000).map(|i| (i * 31 % 251) as u8).collect();
        for isa in available_isas() {
            for (from, to, len) in [(0, 0, 64), (0, 1, 64), (1, 0, 1000), (63, 64, 1024), (5, 7, 4096), (0, 0, 8192)] {
                let mut dst = vec![0xee_u8; 9000];
                // SAFETY: both ranges lie within the vectors, which are apart.
                unsafe {
                    if cfg!(miri) {
                        copy(dst.as_mut_ptr().add(to), src.as_ptr().add(from), len);
                    } else {
                        dispatch::copy(isa)(dst.as_mut_ptr().add(to), src.as_ptr().add(from), len);
                    }
                }
                assert!(dst[to..to + len] == src[from..from + len], "{isa} {from} {to} {len}");
                assert!(dst[..to].iter().chain(&dst[to + len..]).all(|&byte| byte == 0xee), "{isa} {from} {to} {len}");
            }
        }
    }

    #[test]
    fn every_length_around_the_limit_is_copied() {
        let src: Vec<u8> = (0..3000).map(|i| (i % 253) as u8).collect();
        for len in (0..40).chain(LONG_BYTES - 2..LONG_BYTES + 300) {
            let mut dst = vec![0_u8; len];
            // SAFETY: both hold `len` bytes.
            unsafe { copy(dst.as_mut_ptr(), src.as_ptr().add(3), len) };
            assert!(dst[..] == src[3..3 + len], "{len}");
        }
    }
}
