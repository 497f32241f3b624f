//! Parking in one place: an epoll over everything that can wake this process, and the event descriptor that peers
//! and other threads write to.
//!
//! Everything is edge-triggered, so that waking costs no further system call: the counter of the event descriptor is
//! never read. Owns no decision about when to park. Read [`Poller::wait`] first.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use accl_types::{Error, Result};
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::io::Errno;

use crate::fork::Fd;
use crate::link::Link;

/// The event descriptor of this process. Any thread may wake; peers hold a copy of the descriptor.
#[derive(Debug)]
pub struct Waker {
    fd: Fd,
}

impl Waker {
    /// Ends the current [`Poller::wait`], or the next one if nobody waits.
    pub fn wake(&self) {
        // In a forked child the number may belong to another file.
        if self.fd.is_ours() {
            wake_fd(self.fd.as_fd());
        }
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Adds one to an event descriptor, ours or a peer's.
pub(crate) fn wake_fd(fd: BorrowedFd<'_>) {
    // The only expected failure is a counter at its maximum, and then the waiter has its event already.
    let _ = rustix::io::retry_on_intr(|| rustix::io::write(fd, &1u64.to_ne_bytes()));
}

/// Kernels refuse to count more than a few weeks of milliseconds, and a refusal does not sleep.
const LONGEST_SLEEP: Duration = Duration::from_secs(24 * 3600);

/// A link whose events a [`Poller`] sees.
pub trait Watched: Link {
    /// What the poller must watch, edge-triggered. The same for the life of the link.
    fn fds(&self) -> Vec<BorrowedFd<'_>>;
}

impl<L: Watched + ?Sized> Watched for Box<L> {
    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        (**self).fds()
    }
}

/// Where this process sleeps. One thread waits at a time; adding and waking may be done by others meanwhile.
#[derive(Debug)]
pub struct Poller {
    epoll: Fd,
    waker: Arc<Waker>,
}

impl Poller {
    /// An epoll that watches a new event descriptor.
    ///
    /// # Errors
    /// `Exhausted` when there is no descriptor left.
    pub fn new() -> Result<Poller> {
        let epoll = Fd::adopt(|| epoll::create(epoll::CreateFlags::CLOEXEC)).map_err(no_descriptor)?;
        let event = Fd::adopt(|| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)).map_err(no_descriptor)?;
        let poller = Poller { epoll, waker: Arc::new(Waker { fd: event }) };
        poller.add(poller.waker.as_fd())?;
        Ok(poller)
    }

    /// Watches a link.
    ///
    /// # Errors
    /// As [`Poller::add`].
    pub fn watch(&self, link: &dyn Watched) -> Result<()> {
        link.fds().into_iter().try_for_each(|fd| self.add(fd))
    }

    /// Watches `fd`, edge-triggered, for bytes, room and hang-up. It is forgotten when the descriptor is closed.
    ///
    /// # Errors
    /// `Exhausted` when the kernel refuses; adding twice is fine.
    pub fn add(&self, fd: BorrowedFd<'_>) -> Result<()> {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        match epoll::add(&self.epoll, fd, epoll::EventData::new_u64(0), flags) {
            Ok(()) | Err(Errno::EXIST) => Ok(()),
            Err(why) => Err(Error::exhausted(format!("a descriptor cannot be watched: {why}"))),
        }
    }

    /// Sleeps until something happens, at most for `timeout` (for ever without one). Returns early and often: on any
    /// event, on a signal, and for events that were there before.
    ///
    /// # Errors
    /// `Internal` when the kernel refuses to wait.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        let timeout = timeout
            .map(|t| t.min(LONGEST_SLEEP))
            .map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: i64::from(t.subsec_nanos()) });
        let mut events = [const { std::mem::MaybeUninit::uninit() }; 64];
        match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(why) => Err(Error::internal(format!("waiting for events failed: {why}"))),
        }
    }

    /// The handle that ends a wait.
    pub fn waker(&self) -> Arc<Waker> {
        Arc::clone(&self.waker)
    }
}

fn no_descriptor(why: Errno) -> Error {
    Error::exhausted(format!("no event descriptor: {why}; raise the limit with `ulimit -n`"))
}
