//! Descriptors that a forked child must not keep. A child that inherited a socket would hide this process's death from
//! its peers.
//!
//! Owns a process-wide registry of descriptors; a `pthread_atfork` handler closes them in the child.
//! The registry is the one piece of global state here, because `fork` concerns the whole process. Read [`Fd`] first.

use std::cell::UnsafeCell;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::io::Errno;

use crate::descriptors::{above_standard_streams, raise_limit};

/// Number of forks between this process and the original process that used this crate; 0 in the original.
#[inline]
pub fn fork_generation() -> u64 {
    GENERATION.load(Ordering::Relaxed)
}

/// Whether this process is a forked child of a process that used this crate. Endpoint and links cannot be used in the
/// child.
pub fn forked() -> bool {
    fork_generation() > 0
}

/// Owned descriptor that is closed in forked children. In a child the value remains but dropping it does nothing, since
/// another file may have the number by then.
#[derive(Debug)]
pub struct Fd {
    raw: ManuallyDrop<OwnedFd>,
    generation: u64,
}

impl Fd {
    /// Makes a descriptor and registers it; no fork can happen in between. The descriptor never gets the number of a
    /// standard stream. If the limit of open descriptors is reached, the limit is raised as far as possible.
    ///
    /// # Errors
    /// The errors of `make`.
    pub fn adopt(make: impl Fn() -> Result<OwnedFd, Errno>) -> Result<Fd, Errno> {
        with_higher_limit(|| without_forks(|registry| registry.adopt(make()?)))
    }

    /// Does what [`Fd::adopt`] does, for two descriptors that are made together.
    ///
    /// # Errors
    /// The errors of `make`.
    pub fn adopt_pair(make: impl Fn() -> Result<(OwnedFd, OwnedFd), Errno>) -> Result<(Fd, Fd), Errno> {
        with_higher_limit(|| {
            without_forks(|registry| {
                let (one, other) = make()?;
                // Both are moved before one is registered: dropping a registered descriptor takes the lock that is held
                // here.
                let (one, other) = (above_standard_streams(one)?, above_standard_streams(other)?);
                Ok((registry.register(one), registry.register(other)))
            })
        })
    }

    /// Whether this process made the descriptor, so that it is still open here.
    #[inline]
    pub fn is_ours(&self) -> bool {
        self.generation == fork_generation()
    }
}

/// Makes descriptors, after raising the limit of open descriptors if that is reached.
fn with_higher_limit<T>(make: impl Fn() -> Result<T, Errno>) -> Result<T, Errno> {
    match make() {
        Err(Errno::MFILE) if raise_limit() => make(),
        result => result,
    }
}

impl AsFd for Fd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.raw.as_fd()
    }
}

impl Drop for Fd {
    fn drop(&mut self) {
        without_forks(|registry| {
            if self.is_ours() {
                registry.forget(self.raw.as_raw_fd());
                // SAFETY: `raw` is not used again, because this is its owner's `drop`.
                unsafe { ManuallyDrop::drop(&mut self.raw) };
            }
        });
    }
}

/// Runs `body` while no thread of this process can fork. `body` must be short and must neither block nor fork.
pub(crate) fn without_forks<R>(body: impl FnOnce(&mut Registry) -> R) -> R {
    static HANDLERS: Once = Once::new();
    // Without handlers children keep the descriptors, so peers notice this process's death late. There is no other
    // harm. The call fails only if memory is exhausted.
    HANDLERS.call_once(|| {
        // SAFETY: the handlers are `extern "C"` functions that live as long as the library, which Python never unloads.
        let _ = unsafe { libc::pthread_atfork(Some(before), Some(after_in_parent), Some(after_in_child)) };
    });
    lock();
    let unlock = Unlock;
    // SAFETY: the lock is held, so this is the only reference.
    let result = body(unsafe { &mut *REGISTRY.0.get() });
    drop(unlock);
    result
}

/// The descriptors of this process that children must not keep.
pub(crate) struct Registry {
    fds: Vec<RawFd>,
}

impl Registry {
    /// Registers a descriptor made while forks were held off. A descriptor with the number of a standard
    /// stream gets another number first.
    ///
    /// # Errors
    /// The descriptor has the number of a standard stream and no other number is available.
    pub(crate) fn adopt(&mut self, fd: OwnedFd) -> Result<Fd, Errno> {
        Ok(self.register(above_standard_streams(fd)?))
    }

    fn register(&mut self, fd: OwnedFd) -> Fd {
        self.fds.push(fd.as_raw_fd());
        Fd { raw: ManuallyDrop::new(fd), generation: fork_generation() }
    }

    fn forget(&mut self, raw: RawFd) {
        if let Some(at) = self.fds.iter().rposition(|&fd| fd == raw) {
            self.fds.swap_remove(at);
        }
    }
}

struct SharedRegistry(UnsafeCell<Registry>);

// SAFETY: only the holder of `LOCKED` reaches the cell.
unsafe impl Sync for SharedRegistry {}

static REGISTRY: SharedRegistry = SharedRegistry(UnsafeCell::new(Registry { fds: Vec::new() }));
static GENERATION: AtomicU64 = AtomicU64::new(0);
/// A plain flag instead of a `Mutex`: it is taken before a fork and released in both processes after it.
static LOCKED: AtomicBool = AtomicBool::new(false);

fn lock() {
    // Acquire and Release pair up as in any lock. It is held for single system calls, so yielding suffices.
    while LOCKED.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
        std::thread::yield_now();
    }
}

/// Releases the lock, even if the body panics.
struct Unlock;

impl Drop for Unlock {
    fn drop(&mut self) {
        LOCKED.store(false, Ordering::Release);
    }
}

extern "C" fn before() {
    lock();
}

extern "C" fn after_in_parent() {
    drop(Unlock);
}

/// Only async-signal-safe calls are allowed here: closes and plain stores.
extern "C" fn after_in_child() {
    // SAFETY: `before` took the lock in the thread that lives on in the child.
    let registry = unsafe { &mut *REGISTRY.0.get() };
    for &fd in &registry.fds {
        // SAFETY: the number was registered by its owner, whose `drop` does not close it in this process from now on.
        unsafe { libc::close(fd) };
    }
    registry.fds.clear();
    GENERATION.fetch_add(1, Ordering::Relaxed);
    drop(Unlock);
}
