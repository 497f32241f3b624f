//! The loop of a long copy, compiled for each instruction set.

use std::ptr;

/// Bytes moved at a time.
const BLOCK: usize = 128;
/// Alignment of stores in bytes, so that they do not cross cache lines.
const ALIGN: usize = 64;

/// Copies `len_bytes` bytes in blocks. It is inlined into a function for each instruction set.
///
/// # Safety
/// The contract of [`std::ptr::copy_nonoverlapping`], and `len_bytes` is at least [`ALIGN`].
#[inline(always)]
pub(crate) unsafe fn blocks(dst: *mut u8, src: *const u8, len_bytes: usize) {
    let head = dst.align_offset(ALIGN).min(len_bytes);
    let mut at = 0;
    if head > 0 {
        // SAFETY: `head` is at most `len_bytes`, and both buffers have that many bytes, by this function's contract.
        unsafe { ptr::copy_nonoverlapping(src, dst, head) };
        at = head;
    }
    while at + BLOCK <= len_bytes {
        // SAFETY: `at + BLOCK <= len_bytes`; unaligned access needs no alignment.
        unsafe {
            let block = src.add(at).cast::<[u8; BLOCK]>().read_unaligned();
            dst.add(at).cast::<[u8; BLOCK]>().write_unaligned(block);
        }
        at += BLOCK;
        keep_the_loop();
    }
    // SAFETY: `at <= len_bytes`, so this is the rest of both buffers.
    unsafe { ptr::copy_nonoverlapping(src.add(at), dst.add(at), len_bytes - at) };
}

/// Keeps the compiler from turning the loop into a call of the C library's copy.
#[inline(always)]
fn keep_the_loop() {
    #[cfg(not(miri))]
    // SAFETY: the block contains no instruction. It may access memory as far as the compiler knows, but accesses none.
    unsafe {
        std::arch::asm!("", options(nostack, preserves_flags));
    }
}
