//! The loop of a long copy, to be compiled for each instruction set.

use std::ptr;

/// Bytes moved at a time.
const BLOCK: usize = 128;
/// Stores that do not cross cache lines.
const ALIGN: usize = 64;

/// The loop, to be compiled for an instruction set.
///
/// # Safety
/// As [`std::ptr::copy_nonoverlapping`], and `len_bytes` is at least [`ALIGN`].
#[inline(always)]
pub(crate) unsafe fn blocks(dst: *mut u8, src: *const u8, len_bytes: usize) {
    let head = dst.align_offset(ALIGN).min(len_bytes);
    let mut at = 0;
    if head > 0 {
        // SAFETY: the caller's promise; the bytes up to the next line are within the length.
        unsafe { ptr::copy_nonoverlapping(src, dst, head) };
        at = head;
    }
    while at + BLOCK <= len_bytes {
        // SAFETY: `at + BLOCK <= len_bytes`; no alignment is asked for.
        unsafe {
            let block = src.add(at).cast::<[u8; BLOCK]>().read_unaligned();
            dst.add(at).cast::<[u8; BLOCK]>().write_unaligned(block);
        }
        at += BLOCK;
        keep_the_loop();
    }
    // SAFETY: the rest.
    unsafe { ptr::copy_nonoverlapping(src.add(at), dst.add(at), len_bytes - at) };
}

/// The compiler would make a call of the C library's copy out of the loop.
#[inline(always)]
fn keep_the_loop() {
    #[cfg(not(miri))]
    // SAFETY: no instruction; it may be said to touch memory, and touches none.
    unsafe {
        std::arch::asm!("", options(nostack, preserves_flags));
    }
}
