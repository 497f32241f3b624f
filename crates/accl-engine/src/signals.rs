//! Signal masks: native threads block all signals, because Python's handlers must run on its main thread.

/// Blocks every signal on the calling thread. Each native thread that Python did not create calls this first.
pub fn block_all() {
    // SAFETY: `sigfillset` fills `set` before `pthread_sigmask` reads it; a null pointer for the old mask is allowed.
    unsafe {
        let mut set = std::mem::zeroed::<libc::sigset_t>();
        libc::sigfillset(&mut set);
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
    }
}
