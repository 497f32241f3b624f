//! What both halves of the table tell the engine beside a number: why, and an address.
//!
//! Owns the text of a thread's last refusal.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int, c_void};

thread_local! {
    /// Why a function has returned what it has, of those that this thread has called and that name no link.
    static WHY: RefCell<CString> = RefCell::default();
}

/// Keeps why a function returns this.
pub(crate) fn explain(returned: c_int, why: String) -> c_int {
    WHY.with_borrow_mut(|kept| *kept = CString::new(why).unwrap_or_default());
    returned
}

/// What was kept last, until this thread keeps something else.
pub(crate) fn last() -> *const c_char {
    WHY.with_borrow(|why| why.as_ptr())
}

/// Writes an address where there is room, and its length.
///
/// # Safety
/// There is as much room as `bytes` points to.
pub(crate) unsafe fn write_address(ours: &[u8], address: *mut c_void, bytes: *mut usize) {
    // SAFETY: the caller has this much room.
    unsafe {
        ours.as_ptr().copy_to_nonoverlapping(address.cast(), ours.len().min(*bytes));
        *bytes = ours.len();
    }
}
