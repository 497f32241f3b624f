//! Descriptors that a forked child must not keep. Stub.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// An owned descriptor that is closed in forked children.
#[derive(Debug)]
pub struct Fd(OwnedFd);

impl Fd {
    /// Makes a descriptor and registers it.
    ///
    /// # Errors
    /// Whatever `make` returns.
    pub fn adopt<E>(make: impl FnOnce() -> Result<OwnedFd, E>) -> Result<Fd, E> {
        make().map(Fd)
    }
}

impl AsFd for Fd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Whether this process is a forked child of the one that first used this crate.
pub fn forked() -> bool {
    false
}
