//! Link over a [`Region`]: rings for the frames, event descriptors for waking, a socket and a process descriptor that
//! report the peer's death.
//!
//! While both sides are busy, sending and receiving neither call the system nor lock nor allocate.

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use accl_types::{Error, Result};
use accl_wire::{Frame, FrameSlot, Link, Slot};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::Shutdown;

use super::region::{Direction, Region};
use crate::bitmap::PeerBitmap;
use crate::fork::Fd;
use crate::poller::wake_fd;
use crate::ring::arming::{DATA, ROOM};
use crate::ring::{Broken, Reader, Writer};
use crate::{LinkEvents, Watched, refusal};

/// The results of the handshake.
pub(crate) struct Parts {
    pub(crate) region: Region,
    /// 0 on the side that created the region, 1 on the other.
    pub(crate) side: usize,
    /// Carries no data; its hang-up means that the peer has closed the link or died.
    pub(crate) socket: Fd,
    /// Event descriptor of the peer; a write wakes the peer.
    pub(crate) peer_event: Fd,
    /// Bitmap on which to post the peer's events.
    pub(crate) peer_bitmap: PeerBitmap,
    /// Readable once the peer has died. `None` if the kernel or the container refuses the descriptor.
    pub(crate) peer_process: Option<Fd>,
    pub(crate) max_payload_bytes: usize,
    /// Host and process of the peer, for messages.
    pub(crate) peer: String,
}

/// One end of a shared-memory link.
#[derive(Debug)]
pub(crate) struct ShmLink {
    region: Arc<Region>,
    side: usize,
    writer: Writer<Direction>,
    reader: Reader<Direction>,
    socket: Fd,
    peer_event: Fd,
    peer_bitmap: PeerBitmap,
    peer_process: Option<Fd>,
    max_payload_bytes: usize,
    /// Length of the shortest payload that found no room since the link was last disarmed.
    refused_bytes: Option<usize>,
    /// Whether the caller has seen the frame at which the reader stands.
    shown: bool,
    closed: bool,
    loss: PeerLoss,
    /// Events that a poller has seen, if a poller watches the link.
    events: Option<LinkEvents>,
    /// Whether the kernel was asked for the peer's end.
    has_asked: bool,
    system_calls: Cell<u64>,
}

/// The peer, for messages, and why the link to it is lost, if it is.
#[derive(Debug)]
struct PeerLoss {
    peer: String,
    /// The link's first error.
    error: Option<Error>,
    /// Whether the error was returned to the caller; then it is no longer a reason to stay awake.
    is_reported: bool,
}

impl PeerLoss {
    /// Records an error and returns the link's first error.
    fn fail(&mut self, error: Error) -> Error {
        self.error.get_or_insert(error).clone()
    }

    fn report(&mut self) -> Result<()> {
        let Some(lost) = &self.error else { return Ok(()) };
        self.is_reported = true;
        Err(lost.clone())
    }

    fn broken(&mut self, why: Broken) -> Error {
        self.is_reported = true;
        self.fail(match why {
            Broken::Corrupt => Error::protocol(format!("the ring of {} contains an invalid frame", self.peer)),
            Broken::Exhausted => Error::exhausted(format!(
                "no memory for the ring to {}, although it has the minimum size for ACCL_SEGMENT_BYTES; free memory, lower \
                 ACCL_SEGMENT_BYTES, or set ACCL_TRANSPORTS=tcp",
                self.peer
            )),
        })
    }
}

impl ShmLink {
    pub(crate) fn new(parts: Parts) -> ShmLink {
        let Parts { region, side, socket, peer_event, peer_bitmap, peer_process, max_payload_bytes, peer } = parts;
        let region = Arc::new(region);
        ShmLink {
            writer: Writer::new(Direction::new(&region, side), max_payload_bytes),
            reader: Reader::new(Direction::new(&region, 1 - side), max_payload_bytes),
            region,
            side,
            socket,
            peer_event,
            peer_bitmap,
            peer_process,
            max_payload_bytes,
            refused_bytes: None,
            shown: false,
            closed: false,
            loss: PeerLoss { peer, error: None, is_reported: false },
            events: None,
            has_asked: false,
            system_calls: Cell::new(0),
        }
    }

    #[inline]
    fn notify_peer_of(&self, what: u32) {
        if let Some(call) = self.region.side(1 - self.side).take_call(what) {
            self.notify_peer(call.slot);
        }
    }

    #[cold]
    fn notify_peer(&self, slot: Option<Slot>) {
        if slot.is_none_or(|slot| self.peer_bitmap.post(slot)) {
            self.system_calls.set(self.system_calls.get() + 1);
            wake_fd(self.peer_event.as_fd());
        }
    }

    #[inline]
    fn guard_fork(&mut self) -> Result<()> {
        if self.socket.is_ours() { Ok(()) } else { Err(self.belongs_to_parent()) }
    }

    #[cold]
    fn belongs_to_parent(&mut self) -> Error {
        self.loss.fail(Error::internal("the link belongs to the parent process"))
    }

    /// Asks the kernel, without blocking, whether the peer has closed or died.
    fn check_death(&mut self) {
        if self.loss.error.is_some() {
            return;
        }
        // If the kernel was asked before and the peer was alive, the poller sees an event before the answer changes.
        if let Some(events) = &self.events
            && self.has_asked
            && !events.take()
            && !events.has_hung_up()
        {
            return;
        }
        self.has_asked = true;
        let events = PollFlags::IN | PollFlags::RDHUP;
        let mut fds = [PollFd::new(&self.socket, events), PollFd::new(&self.socket, PollFlags::empty())];
        if let Some(process) = &self.peer_process {
            fds[1] = PollFd::new(process, PollFlags::IN);
        }
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        self.system_calls.set(self.system_calls.get() + 1);
        if !matches!(poll(&mut fds, Some(&now)), Ok(1..)) {
            return;
        }
        let died = self.peer_process.is_some() && !fds[1].revents().is_empty();
        let hung_up = !fds[0].revents().is_empty() && refusal::is_at_end(&self.socket);
        if died {
            self.loss.fail(Error::peer_lost(format!("{} has died", self.loss.peer)));
        } else if hung_up {
            self.loss.fail(refusal::ended(&self.loss.peer));
        }
    }

    /// Announces what this side wants to be notified of. Returns `true` if something is there already.
    fn announce(&mut self, what: u32) -> bool {
        self.region.side(self.side).announce(what, self.events.as_ref().and_then(LinkEvents::slot));
        let wanted = self.refused_bytes.unwrap_or(self.max_payload_bytes);
        self.reader.poll() != Ok(false) || (what & ROOM != 0 && self.writer.would_fit(wanted) != Ok(false))
    }
}

// SAFETY: the ring releases a record's bytes only in `release`, and the region lives as long as the link.
unsafe impl Link for ShmLink {
    fn max_payload_bytes(&self) -> usize {
        self.max_payload_bytes
    }

    #[inline]
    fn try_reserve(&mut self, payload_bytes: usize) -> Result<Option<FrameSlot<'_>>> {
        self.guard_fork()?;
        if let Some(lost) = &self.loss.error {
            return Err(lost.clone());
        }
        if self.closed || payload_bytes > self.max_payload_bytes {
            return Err(refusal::unfit_payload(payload_bytes, self.max_payload_bytes, !self.closed));
        }
        match self.writer.reserve(payload_bytes) {
            Ok(Some(slot)) => Ok(Some(slot)),
            Ok(None) => {
                self.refused_bytes =
                    Some(self.refused_bytes.map_or(payload_bytes, |shorter| shorter.min(payload_bytes)));
                Ok(None)
            }
            Err(why) => Err(self.loss.broken(why)),
        }
    }

    #[inline]
    fn commit(&mut self) {
        if self.writer.commit() {
            self.notify_peer_of(DATA);
        }
    }

    #[inline]
    fn peek(&mut self) -> Result<Option<Frame<'_>>> {
        self.guard_fork()?;
        // The loss was recorded before this poll of the ring, so frames that the peer left behind are found first.
        match self.reader.peek() {
            Ok(Some(frame)) => {
                self.shown = true;
                Ok(Some(frame))
            }
            Ok(None) => self.loss.report().map(|()| None),
            Err(why) => Err(self.loss.broken(why)),
        }
    }

    #[inline]
    fn await_frame(&mut self, polls: u32) -> Result<Option<Frame<'_>>> {
        self.reader.await_word(polls);
        self.peek()
    }

    #[inline]
    fn release(&mut self) {
        if std::mem::take(&mut self.shown) && self.reader.release() {
            self.notify_peer_of(ROOM);
        }
    }

    fn flush(&mut self) -> Result<bool> {
        Ok(true)
    }

    fn arm(&mut self, wants_room: bool) -> bool {
        if self.guard_fork().is_err() {
            return true;
        }
        if self.announce(if wants_room { DATA | ROOM } else { DATA }) {
            return true;
        }
        // The edge of a hang-up may have been reported already, and then it would not end the sleep.
        self.check_death();
        self.loss.error.is_some() && !self.loss.is_reported
    }

    fn disarm(&mut self) {
        self.refused_bytes = None;
        if self.socket.is_ours() {
            self.region.side(self.side).retract();
        }
    }

    fn check_peer(&mut self) -> Result<()> {
        self.guard_fork()?;
        self.check_death();
        match (&self.loss.error, self.reader.poll()) {
            (None, _) | (Some(_), Ok(true)) => Ok(()),
            (Some(_), Ok(false)) => self.loss.report(),
            (Some(_), Err(why)) => Err(self.loss.broken(why)),
        }
    }

    fn close(&mut self) {
        if !self.closed && self.socket.is_ours() {
            self.closed = true;
            // The peer's poller sees the hang-up, and earlier frames are in the ring. The call fails only if the peer
            // has hung up itself.
            let _ = rustix::net::shutdown(&self.socket, Shutdown::Write);
        }
    }

    #[inline]
    fn commit_quietly(&mut self) {
        self.writer.commit();
    }

    #[inline]
    fn release_quietly(&mut self) {
        if std::mem::take(&mut self.shown) {
            self.reader.release();
        }
    }

    #[inline]
    fn wake_peer(&mut self) {
        self.notify_peer_of(DATA | ROOM);
    }

    fn polls_without_syscall(&self) -> bool {
        true
    }

    fn force_poll(&mut self) {
        self.has_asked = false;
    }

    fn system_calls(&self) -> u64 {
        self.system_calls.get()
    }

    fn transport(&self) -> &'static str {
        "shm"
    }

    fn describe(&self) -> String {
        let (used, all) = self.writer.window_bytes();
        format!("shm, ring of {} KiB that grows to {} KiB, {}", used / 1024, all / 1024, self.loss.peer)
    }
}

impl Watched for ShmLink {
    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        std::iter::once(self.socket.as_fd()).chain(self.peer_process.as_ref().map(AsFd::as_fd)).collect()
    }

    fn set_events(&mut self, events: LinkEvents) -> bool {
        self.events = Some(events);
        true
    }
}
