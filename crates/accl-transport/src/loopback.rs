//! Links inside one process, for tests, benches and messages from a process to itself.
//!
//! They keep the same contract as links between processes, and report events in the same way. Read [`pair`] first.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use accl_types::{Error, Result};
use accl_wire::{Frame, FrameSlot, HEAD_BYTES, Link};

use crate::{LinkEvents, Waker, Watched};

/// Number of frames that one direction holds before its sender finds no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capacity {
    /// Any number of frames.
    Unbounded,
    /// This many frames.
    Frames(usize),
}

/// Creates two connected links. `a` and `b` are the wakers of the pollers on which the two sides sleep.
pub fn pair(
    max_payload_bytes: usize,
    capacity: Capacity,
    a: Arc<Waker>,
    b: Arc<Waker>,
) -> (LoopbackLink, LoopbackLink) {
    let (ab, ba) = (Arc::new(Direction::default()), Arc::new(Direction::default()));
    let sides = [Arc::new(Side::new(a)), Arc::new(Side::new(b))];
    let link = |out: &Arc<Direction>, inbound: &Arc<Direction>, me: usize| LoopbackLink {
        max_payload_bytes,
        capacity,
        out: Arc::clone(out),
        inbound: Arc::clone(inbound),
        me: Arc::clone(&sides[me]),
        peer: Arc::clone(&sides[1 - me]),
        reserved: None,
        peeked: None,
        spare: Vec::new(),
        is_reported: false,
    };
    (link(&ab, &ba, 0), link(&ba, &ab, 1))
}

/// Creates a link from a process to itself: the same link receives what was sent, in order.
pub fn self_link(max_payload_bytes: usize, waker: Arc<Waker>) -> LoopbackLink {
    let direction = Arc::new(Direction::default());
    let side = Arc::new(Side::new(waker));
    LoopbackLink {
        max_payload_bytes,
        capacity: Capacity::Unbounded,
        out: Arc::clone(&direction),
        inbound: direction,
        me: Arc::clone(&side),
        peer: side,
        reserved: None,
        peeked: None,
        spare: Vec::new(),
        is_reported: false,
    }
}

/// A frame in flight. The payload is stored in words, so that it is 8-byte aligned.
#[derive(Debug)]
struct Parcel {
    head: [u8; HEAD_BYTES],
    words: Vec<u64>,
    len_bytes: usize,
}

impl Default for Parcel {
    fn default() -> Self {
        Self { head: [0; HEAD_BYTES], words: Vec::new(), len_bytes: 0 }
    }
}

impl Parcel {
    fn frame(&self) -> Frame<'_> {
        // SAFETY: the words are initialised, a `u64` has no padding, and `reshape` made room for `len_bytes`.
        let payload = unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), self.len_bytes) };
        Frame { head: &self.head, payload }
    }

    fn slot(&mut self) -> FrameSlot<'_> {
        // SAFETY: the words are initialised, `reshape` made room for `len_bytes`, every bit pattern is a `u64`, and the
        // borrow is exclusive.
        let payload = unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), self.len_bytes) };
        FrameSlot { head: &mut self.head, payload }
    }

    fn reshape(&mut self, len_bytes: usize) {
        self.words.resize(len_bytes.div_ceil(8), 0);
        self.len_bytes = len_bytes;
    }
}

#[derive(Debug, Default)]
struct Direction {
    frames: Mutex<VecDeque<Parcel>>,
    /// The sender will send no more, or has been dropped.
    closed: AtomicBool,
    /// The receiver has been dropped.
    receiver_gone: AtomicBool,
}

impl Direction {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Parcel>> {
        self.frames.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
struct Side {
    waker: Arc<Waker>,
    /// Where to post events, if a poller watches this side.
    events: OnceLock<LinkEvents>,
    is_armed: AtomicBool,
    wants_room: AtomicBool,
}

impl Side {
    fn new(waker: Arc<Waker>) -> Side {
        Side { waker, events: OnceLock::new(), is_armed: AtomicBool::new(false), wants_room: AtomicBool::new(false) }
    }

    /// Called after a change was published. Notifies the side if `flag` is set.
    fn notify(&self, flag: &AtomicBool) {
        fence(Ordering::SeqCst);
        if flag.load(Ordering::Relaxed) {
            // Clears every flag that was announced meanwhile; the notification below answers them all.
            self.is_armed.store(false, Ordering::Relaxed);
            self.wants_room.store(false, Ordering::Relaxed);
            match self.events.get() {
                Some(events) => events.post(),
                None => self.waker.wake(),
            }
        }
    }
}

/// One end of a link inside this process.
#[derive(Debug)]
pub struct LoopbackLink {
    max_payload_bytes: usize,
    capacity: Capacity,
    out: Arc<Direction>,
    inbound: Arc<Direction>,
    me: Arc<Side>,
    peer: Arc<Side>,
    reserved: Option<Parcel>,
    peeked: Option<Parcel>,
    /// Frames kept for reuse, so that a steady exchange allocates nothing.
    spare: Vec<Parcel>,
    /// Whether the end was returned to the caller; then it is no longer a reason to stay awake.
    is_reported: bool,
}

const SPARE_FRAMES: usize = 16;

impl LoopbackLink {
    fn has_room(&self) -> bool {
        match self.capacity {
            Capacity::Unbounded => true,
            Capacity::Frames(limit) => self.out.lock().len() < limit,
        }
    }

    /// Announces what this side wants to be notified of. Returns `true` if it is there already.
    fn announce(&mut self, wants_room: bool) -> bool {
        self.me.is_armed.store(true, Ordering::Relaxed);
        self.me.wants_room.store(wants_room, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.peeked.is_some()
            || !self.inbound.lock().is_empty()
            || (self.inbound.closed.load(Ordering::Acquire) && !self.is_reported)
            || (wants_room && (self.has_room() || self.out.receiver_gone.load(Ordering::Acquire)))
    }

    fn retract(&self) {
        self.me.is_armed.store(false, Ordering::Relaxed);
        self.me.wants_room.store(false, Ordering::Relaxed);
    }

    fn is_ended(&self) -> bool {
        self.inbound.closed.load(Ordering::Acquire) && self.peeked.is_none() && self.inbound.lock().is_empty()
    }
}

// SAFETY: the link owns a peeked and a reserved frame, each in a buffer of its own.
unsafe impl Link for LoopbackLink {
    fn max_payload_bytes(&self) -> usize {
        self.max_payload_bytes
    }

    fn try_reserve(&mut self, payload_bytes: usize) -> Result<Option<FrameSlot<'_>>> {
        if payload_bytes > self.max_payload_bytes {
            return Err(Error::internal(format!(
                "a payload of {payload_bytes} bytes exceeds the maximum of {}",
                self.max_payload_bytes
            )));
        }
        if self.out.receiver_gone.load(Ordering::Acquire) || self.out.closed.load(Ordering::Acquire) {
            return Err(Error::peer_lost("the loopback link is closed"));
        }
        if !self.has_room() {
            return Ok(None);
        }
        let mut frame = self.reserved.take().or_else(|| self.spare.pop()).unwrap_or_default();
        frame.reshape(payload_bytes);
        Ok(Some(self.reserved.insert(frame).slot()))
    }

    fn commit(&mut self) {
        let Some(frame) = self.reserved.take() else { return };
        self.out.lock().push_back(frame);
        self.peer.notify(&self.peer.is_armed);
    }

    fn peek(&mut self) -> Result<Option<Frame<'_>>> {
        if self.peeked.is_none() {
            // `closed` is loaded before the queue, so that a frame sent just before closing is not missed.
            let closed = self.inbound.closed.load(Ordering::Acquire);
            self.peeked = self.inbound.lock().pop_front();
            if self.peeked.is_none() && closed {
                self.is_reported = true;
                return Err(Error::peer_lost("the loopback link was closed by its peer"));
            }
        }
        Ok(self.peeked.as_ref().map(Parcel::frame))
    }

    fn release(&mut self) {
        let Some(frame) = self.peeked.take() else { return };
        if self.spare.len() < SPARE_FRAMES {
            self.spare.push(frame);
        }
        self.peer.notify(&self.peer.wants_room);
    }

    fn flush(&mut self) -> Result<bool> {
        Ok(true)
    }

    fn arm(&mut self, wants_room: bool) -> bool {
        self.announce(wants_room)
    }

    fn disarm(&mut self) {
        self.retract();
    }

    fn check_peer(&mut self) -> Result<()> {
        if !self.is_ended() {
            return Ok(());
        }
        self.is_reported = true;
        Err(Error::peer_lost("the loopback link was closed by its peer"))
    }

    fn close(&mut self) {
        self.out.closed.store(true, Ordering::Release);
        self.peer.notify(&self.peer.is_armed);
    }

    fn polls_without_syscall(&self) -> bool {
        true
    }

    fn transport(&self) -> &'static str {
        "loopback"
    }

    fn describe(&self) -> String {
        "loopback".to_owned()
    }
}

impl Watched for LoopbackLink {
    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn set_events(&mut self, events: LinkEvents) -> bool {
        // A side is watched only once.
        self.me.events.set(events).is_ok()
    }
}

impl Drop for LoopbackLink {
    fn drop(&mut self) {
        self.inbound.receiver_gone.store(true, Ordering::Release);
        self.close();
        self.peer.notify(&self.peer.wants_room);
    }
}
