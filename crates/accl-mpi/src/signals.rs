//! Keeps the process's signals away from this crate's threads.
//!
//! Owns the signal mask of the threads that it is called on.

/// Blocks all signals in this thread and in the threads that it starts. Python's handlers run in the main thread, so
/// signals must wake that thread.
pub(crate) fn block() {
    // SAFETY: the set is filled before it is used, and only this thread's mask is changed.
    unsafe {
        let mut all = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
    }
}
