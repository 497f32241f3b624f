//! Signals of the process are for its other threads.
//!
//! Owns the mask of the thread that starts MPI.

/// Blocks all signals in this thread and those that it starts: Python's handlers run in the main thread, which a signal has to wake.
pub(crate) fn block() {
    // SAFETY: a set that is filled before it is used, and the mask of this thread alone.
    unsafe {
        let mut all = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
    }
}
