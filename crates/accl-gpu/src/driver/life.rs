//! Whether the driver may still be called in this process.
//!
//! Owns one flag. A driver tears itself down when the process exits, and does not work in a forked child. Both events set
//! the flag, and from then on no function of the table is called: calls fail, and values that are dropped leave their
//! objects to the driver's own end.
//!
//! The driver registers its own end before a [`super::Driver`] is opened, because torch has used it before. Functions
//! registered later run earlier, so this flag is set first. A thread that is inside the driver at that time is not stopped:
//! callers must end their threads before the process exits.

use std::sync::Once;
use std::sync::atomic::{AtomicU8, Ordering};

use accl_types::{Error, Result};

const LIVES: u8 = 0;
const EXITS: u8 = 1;
const FORKED: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(LIVES);

extern "C" fn exits() {
    STATE.store(EXITS, Ordering::Relaxed);
}

extern "C" fn is_child() {
    STATE.store(FORKED, Ordering::Relaxed);
}

/// Registers for both events, once. A registration that fails is one that the driver could not have made either.
pub(super) fn watch() {
    static WATCHES: Once = Once::new();
    WATCHES.call_once(|| {
        // SAFETY: the function only stores to a static, so it may run at any time of the exit.
        unsafe { libc::atexit(exits) };
        // SAFETY: the function only stores to a static, so it may run in a forked child.
        unsafe { libc::pthread_atfork(None, None, Some(is_child)) };
    });
}

/// Returns whether the driver may be called.
pub(super) fn lives() -> bool {
    STATE.load(Ordering::Relaxed) == LIVES
}

/// Checks that the driver may be called.
///
/// # Errors
/// `Device` with the reason.
pub(crate) fn check() -> Result<()> {
    match STATE.load(Ordering::Relaxed) {
        LIVES => Ok(()),
        EXITS => Err(Error::device("the GPU's driver is not called any more, because the process exits")),
        _ => Err(Error::device(
            "the GPU's driver does not work in a forked process; start processes by the method spawn or forkserver",
        )),
    }
}
