//! Native threads take no signals: Python's handlers belong to its main thread.

/// Blocks every signal on the calling thread: a native thread that is not Python's begins with this.
pub fn block_all() {
    // SAFETY: `set` is filled by sigfillset before it is read; the old mask is not asked for.
    unsafe {
        let mut set = std::mem::zeroed::<libc::sigset_t>();
        libc::sigfillset(&mut set);
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
    }
}
