//! Results of the table's functions in addition to their return codes: error texts and addresses.
//!
//! Owns the text of a thread's last error.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int, c_void};

thread_local! {
    /// The reason for the last return code of this thread's calls that name no link.
    static WHY: RefCell<CString> = RefCell::default();
}

/// Stores the reason and returns `returned`.
pub(crate) fn explain(returned: c_int, why: String) -> c_int {
    WHY.with_borrow_mut(|kept| *kept = CString::new(why).unwrap_or_default());
    returned
}

/// Returns the last stored reason, valid until this thread stores another.
pub(crate) fn last() -> *const c_char {
    WHY.with_borrow(|why| why.as_ptr())
}

/// Copies an address as far as there is room, and stores its length.
///
/// # Safety
/// `bytes` is valid, and `address` has room for the number of bytes that it points to.
pub(crate) unsafe fn write_address(ours: &[u8], address: *mut c_void, bytes: *mut usize) {
    // SAFETY: `address` has room for `*bytes` bytes by this function's contract.
    unsafe {
        ours.as_ptr().copy_to_nonoverlapping(address.cast(), ours.len().min(*bytes));
        *bytes = ours.len();
    }
}
