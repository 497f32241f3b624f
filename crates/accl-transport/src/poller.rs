//! Sleeping in one place: an epoll over everything that can wake this process, and the event descriptor that peers and
//! other threads write to.
//!
//! Everything is edge-triggered, so that waking costs no further system call: the counter of the event descriptor is
//! never read.
//! Events of a link are posted on the process's bitmap. Where memory is shared, peers post there themselves.
//! Owns no decision about when to sleep. Read [`Poller::wait`] first.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use accl_types::{Error, Result};
use accl_wire::{EventBitmap, Link, Slot};
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::io::Errno;

use crate::bitmap::{ProcessBitmap, SLOTS};
use crate::fork::Fd;

/// The event descriptor of this process. Any thread may wake; peers hold a copy of the descriptor.
#[derive(Debug)]
pub struct Waker {
    fd: Fd,
    /// Bitmap on which peers post the events that they wake for. A poller's waker has one; others have `None`.
    bitmap: Option<Arc<ProcessBitmap>>,
}

impl Waker {
    /// Creates a waker that has not been written to.
    ///
    /// # Errors
    /// `Exhausted` if no descriptor is left.
    pub fn new() -> Result<Waker> {
        let fd = Fd::adopt(|| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)).map_err(no_descriptor)?;
        Ok(Waker { fd, bitmap: None })
    }

    /// Returns the bitmap's descriptor, for peers.
    ///
    /// # Errors
    /// A clause with the reason why there is no descriptor.
    pub(crate) fn bitmap_descriptor(&self) -> std::result::Result<BorrowedFd<'_>, String> {
        self.bitmap.as_ref().ok_or("the poller of this process has no event bitmap")?.descriptor()
    }

    /// Resets the event descriptor's counter. For threads that sleep on the descriptor directly, and not in a
    /// [`Poller`].
    pub fn clear(&self) {
        let _ = rustix::io::retry_on_intr(|| rustix::io::read(&self.fd, &mut [0; 8]));
    }

    /// Ends the current [`Poller::wait`], or the next one if no thread is waiting.
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

/// Adds one to an event descriptor of this process or of a peer.
pub(crate) fn wake_fd(fd: BorrowedFd<'_>) {
    // The only expected failure is a counter at its maximum; then the waiter already has its event.
    let _ = rustix::io::retry_on_intr(|| rustix::io::write(fd, &1u64.to_ne_bytes()));
}

/// Token of descriptors that belong to no link.
const NO_LINK: u64 = u64::MAX;

/// Maximum time of one sleep. Kernels refuse to count more than a few weeks of milliseconds, and a refused call does
/// not sleep.
const LONGEST_SLEEP: Duration = Duration::from_secs(24 * 3600);

/// Something has happened to a link since it was last polled.
const HAPPENED: u8 = 1;
/// The link's peer has hung up, or the link is broken. This flag stays.
const HUNG_UP: u8 = 2;

/// Events that a [`Poller`] has seen of one link. A link that has read everything need not ask the system again before
/// the next event.
#[derive(Clone, Debug)]
pub struct LinkEvents {
    seen: Arc<AtomicU8>,
    slot: Option<Slot>,
    waker: Arc<Waker>,
}

impl LinkEvents {
    /// Slot on which the link's events are posted. `None`: there are too many links, and the link wakes the sleeping
    /// thread.
    pub(crate) fn slot(&self) -> Option<Slot> {
        self.slot
    }

    /// Posts an event of the link, from inside this process.
    pub(crate) fn post(&self) {
        let bitmap = self.waker.bitmap.as_ref();
        if bitmap.zip(self.slot).is_none_or(|(bitmap, slot)| bitmap.post(slot)) {
            self.waker.wake();
        }
    }

    /// Whether something has happened since the last call.
    pub(crate) fn take(&self) -> bool {
        // Acquire: what is read from the system after this is at least as new as the event.
        self.seen.load(Ordering::Relaxed) & HAPPENED != 0
            && self.seen.fetch_and(!HAPPENED, Ordering::Acquire) & HAPPENED != 0
    }

    /// Whether the end of the link has been seen.
    pub(crate) fn has_hung_up(&self) -> bool {
        self.seen.load(Ordering::Relaxed) & HUNG_UP != 0
    }
}

/// A link whose events a [`Poller`] sees.
pub trait Watched: Link {
    /// Descriptors that the poller must watch, edge-triggered. They stay the same for the life of the link.
    fn fds(&self) -> Vec<BorrowedFd<'_>>;

    /// Called once a poller watches the descriptors: it records events in `events`. A link that ignores `events` polls
    /// the system itself. Returns `true` if events of the armed link are posted even while no thread sleeps. The peer
    /// posts them, or the thread that asks the system. If it returns `false`, progress passes poll the link.
    fn set_events(&mut self, events: LinkEvents) -> bool {
        let _ = events;
        false
    }
}

impl<L: Watched + ?Sized> Watched for Box<L> {
    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        (**self).fds()
    }

    fn set_events(&mut self, events: LinkEvents) -> bool {
        (**self).set_events(events)
    }
}

/// For each token, where the events of its link are recorded.
#[derive(Debug, Default)]
struct Places {
    by_token: Vec<Weak<AtomicU8>>,
    free: Vec<usize>,
    /// Number of entries from which on the entries of dropped links are looked for.
    sweep_at: usize,
}

impl Places {
    fn add(&mut self, seen: &Arc<AtomicU8>) -> u64 {
        if self.free.is_empty() && self.by_token.len() >= self.sweep_at {
            self.free = (0..self.by_token.len()).filter(|&token| self.by_token[token].strong_count() == 0).collect();
            self.sweep_at = 2 * (self.by_token.len() - self.free.len()).max(8);
        }
        let seen = Arc::downgrade(seen);
        match self.free.pop() {
            Some(token) => {
                self.by_token[token] = seen;
                token as u64
            }
            None => {
                self.by_token.push(seen);
                self.by_token.len() as u64 - 1
            }
        }
    }

    fn enter(&self, token: u64, what: u8) {
        let seen = usize::try_from(token).ok().and_then(|token| self.by_token.get(token)?.upgrade());
        if let Some(seen) = seen {
            seen.fetch_or(what, Ordering::Release);
        }
    }
}

/// Where this process sleeps. One thread waits at a time; other threads may add and wake meanwhile.
#[derive(Debug)]
pub struct Poller {
    epoll: Fd,
    waker: Arc<Waker>,
    bitmap: Arc<ProcessBitmap>,
    places: Mutex<Places>,
}

impl Poller {
    /// Creates an epoll that watches a new event descriptor.
    ///
    /// # Errors
    /// `Exhausted` if no descriptor is left.
    pub fn new() -> Result<Poller> {
        let epoll = Fd::adopt(|| epoll::create(epoll::CreateFlags::CLOEXEC)).map_err(no_descriptor)?;
        let bitmap = Arc::new(ProcessBitmap::new());
        let waker = Arc::new(Waker { bitmap: Some(bitmap.clone()), ..Waker::new()? });
        let poller = Poller { epoll, waker, bitmap, places: Mutex::default() };
        poller.add(poller.waker.as_fd())?;
        Ok(poller)
    }

    /// Watches a link, passes it the events that are seen, and posts them on the bitmap in the returned slot. `None`:
    /// the caller must poll the link again and again. Either its events are not posted, or there are more links than
    /// slots.
    ///
    /// # Errors
    /// The errors of [`Poller::add`].
    pub fn watch(&self, link: &mut dyn Watched) -> Result<Option<Slot>> {
        let seen = Arc::default();
        let token = self.places().add(&seen);
        link.fds().into_iter().try_for_each(|fd| self.add_as(fd, token))?;
        let slot = u32::try_from(token).ok().filter(|&token| (token as usize) < SLOTS).map(Slot);
        let is_posted = link.set_events(LinkEvents { seen, slot, waker: self.waker() });
        Ok(slot.filter(|_| is_posted))
    }

    /// Returns the bitmap on which events of the watched links are posted.
    pub fn bitmap(&self) -> Arc<dyn EventBitmap> {
        self.bitmap.clone()
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Watches `fd`, edge-triggered, for bytes, room and hang-up. It is forgotten when the descriptor is closed.
    ///
    /// # Errors
    /// `Exhausted` if the kernel refuses. Adding a descriptor twice is no error.
    pub fn add(&self, fd: BorrowedFd<'_>) -> Result<()> {
        self.add_as(fd, NO_LINK)
    }

    fn add_as(&self, fd: BorrowedFd<'_>, token: u64) -> Result<()> {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        let data = epoll::EventData::new_u64(token);
        // A file that is also open elsewhere stays watched after this descriptor of it is closed. If the file gets the
        // same number again, the old entry is replaced.
        let added = match epoll::add(&self.epoll, fd, data, flags) {
            Err(Errno::EXIST) => epoll::modify(&self.epoll, fd, data, flags),
            added => added,
        };
        match added {
            Ok(()) => Ok(()),
            Err(why) => Err(Error::exhausted(format!("cannot watch a descriptor: {why}"))),
        }
    }

    /// Sleeps until something happens, at most for `timeout` (`None`: for ever). Returns early and often: on any event,
    /// on a signal, and for events that were there before.
    ///
    /// # Errors
    /// `Internal` if the kernel refuses to wait.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        let timeout = timeout
            .map(|t| t.min(LONGEST_SLEEP))
            .map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: i64::from(t.subsec_nanos()) });
        let mut events = [const { std::mem::MaybeUninit::uninit() }; 64];
        let mut waited = epoll::wait(&self.epoll, &mut events, timeout.as_ref());
        // A signal may end a wait although there are events. A caller that checks a deadline next must not miss these
        // events.
        if matches!(waited, Err(Errno::INTR)) {
            waited = epoll::wait(&self.epoll, &mut events, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        }
        let (events, _) = match waited {
            Ok(events) => events,
            Err(Errno::INTR) => return Ok(()),
            Err(why) => return Err(Error::internal(format!("waiting for events failed: {why}"))),
        };
        let is_of_link = |event: &&mut epoll::Event| event.data.u64() != NO_LINK;
        let mut events = events.iter_mut().filter(is_of_link).peekable();
        if events.peek().is_some() {
            let places = self.places();
            for event in events {
                let ends = epoll::EventFlags::RDHUP | epoll::EventFlags::HUP | epoll::EventFlags::ERR;
                let flags = event.flags;
                let end = if flags.intersects(ends) { HUNG_UP } else { 0 };
                let token = event.data.u64();
                places.enter(token, HAPPENED | end);
                // The thread to be woken is this one.
                let _ = u32::try_from(token).is_ok_and(|token| self.bitmap.post(Slot(token)));
            }
        }
        Ok(())
    }

    /// Does what [`Poller::wait`] does, without sleeping.
    ///
    /// # Errors
    /// The errors of [`Poller::wait`].
    pub fn poll(&self) -> Result<()> {
        self.wait(Some(Duration::ZERO))
    }

    /// Returns the handle that ends a wait.
    pub fn waker(&self) -> Arc<Waker> {
        Arc::clone(&self.waker)
    }
}

fn no_descriptor(why: Errno) -> Error {
    Error::exhausted(format!("cannot create an event descriptor: {why}; raise the limit with `ulimit -n`"))
}
