//! A link that fails when a test wants it: it panics in one of its functions, or loses its peer without an event that
//! would wake a thread.
//!
//! Owns no bytes; the loopback link inside holds them. Read [`Rig`] first.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use accl_transport::loopback::LoopbackLink;
use accl_transport::{LinkEvents, Watched};
use accl_types::{Error, Result};
use accl_wire::{Answers, Frame, FrameSlot, Link};

/// Message of a rigged link's panic.
pub const EXPLODES: &str = "the test's link explodes";

/// A function of [`Link`] at which a panic can be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum LinkFunction {
    /// [`Link::try_reserve`]
    Reserve = 1,
    /// [`Link::peek`]
    Peek,
    /// [`Link::arm`]
    Arm,
    /// [`Link::disarm`]
    Disarm,
    /// [`Link::check_peer`]
    CheckPeer,
    /// [`Link::commit`]
    Commit,
}

/// Control of a test over its rigged link.
#[derive(Debug, Default)]
pub struct Rig {
    trap: AtomicU8,
    /// Number of uses before the panic.
    harmless: AtomicU8,
    /// Whether every later use panics, too.
    for_ever: AtomicBool,
    lost: AtomicBool,
    parked: AtomicBool,
}

impl Rig {
    /// Makes the next use of this function panic.
    pub fn explode_at(&self, function: LinkFunction) {
        self.trap.store(function as u8, Ordering::SeqCst);
    }

    /// Lets `harmless` uses of this function pass; the next one panics.
    pub fn explode_after(&self, harmless: u8, function: LinkFunction) {
        self.harmless.store(harmless, Ordering::SeqCst);
        self.explode_at(function);
    }

    /// Makes every use of this function panic from now on.
    pub fn explode_always_at(&self, function: LinkFunction) {
        self.for_ever.store(true, Ordering::SeqCst);
        self.explode_at(function);
    }

    /// Makes the peer look lost from now on. No thread is woken.
    pub fn lose(&self) {
        self.lost.store(true, Ordering::SeqCst);
    }

    /// Whether the engine sleeps or is about to: it has armed the link and not disarmed it.
    pub fn is_parked(&self) -> bool {
        self.parked.load(Ordering::SeqCst)
    }

    fn enter(&self, function: LinkFunction) {
        let is_meant = self.trap.load(Ordering::SeqCst) == function as u8;
        let one_less = |harmless: u8| harmless.checked_sub(1);
        if is_meant && self.harmless.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less).is_ok() {
            return;
        }
        let springs = match self.for_ever.load(Ordering::SeqCst) {
            true => self.trap.load(Ordering::SeqCst) == function as u8,
            false => self.trap.compare_exchange(function as u8, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok(),
        };
        assert!(!springs, "{EXPLODES}");
    }

    fn look(&self) -> Result<()> {
        if self.lost.load(Ordering::SeqCst) { Err(Error::peer_lost("lost on purpose")) } else { Ok(()) }
    }
}

/// A loopback link with a [`Rig`].
#[derive(Debug)]
pub struct Rigged {
    link: LoopbackLink,
    rig: Arc<Rig>,
}

impl Rigged {
    /// Puts `link` under the control of `rig`.
    pub fn new(link: LoopbackLink, rig: Arc<Rig>) -> Self {
        Self { link, rig }
    }
}

// SAFETY: every frame and place comes from `link`, whose type keeps the contract of `Link`.
unsafe impl Link for Rigged {
    fn max_payload_bytes(&self) -> usize {
        self.link.max_payload_bytes()
    }

    fn try_reserve(&mut self, payload_bytes: usize) -> Result<Option<FrameSlot<'_>>> {
        self.rig.enter(LinkFunction::Reserve);
        self.link.try_reserve(payload_bytes)
    }

    fn commit(&mut self) {
        self.rig.enter(LinkFunction::Commit);
        self.link.commit();
    }

    fn peek(&mut self) -> Result<Option<Frame<'_>>> {
        self.rig.enter(LinkFunction::Peek);
        self.rig.look()?;
        self.link.peek()
    }

    fn release(&mut self) {
        self.link.release();
    }

    fn flush(&mut self) -> Result<bool> {
        self.link.flush()
    }

    fn arm(&mut self, wants_room: bool) -> bool {
        self.rig.enter(LinkFunction::Arm);
        let has_news = self.link.arm(wants_room);
        self.rig.parked.store(!has_news, Ordering::SeqCst);
        has_news
    }

    fn disarm(&mut self) {
        self.rig.enter(LinkFunction::Disarm);
        self.rig.parked.store(false, Ordering::SeqCst);
        self.link.disarm();
    }

    fn check_peer(&mut self) -> Result<()> {
        self.rig.enter(LinkFunction::CheckPeer);
        self.rig.look()?;
        self.link.check_peer()
    }

    fn close(&mut self) {
        self.link.close();
    }

    fn position(&self) -> u64 {
        self.link.position()
    }

    fn is_delivered(&mut self, position: u64) -> bool {
        self.link.is_delivered(position)
    }

    fn awaits_answer(&self) -> bool {
        self.link.awaits_answer()
    }

    fn answers(&mut self) -> Answers {
        self.link.answers()
    }

    fn force_poll(&mut self) {
        self.link.force_poll();
    }

    fn abandon(&mut self) {
        self.link.abandon();
    }

    fn transport(&self) -> &'static str {
        self.link.transport()
    }

    fn describe(&self) -> String {
        self.link.describe()
    }
}

impl Watched for Rigged {
    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.link.fds()
    }

    /// Returns `false`: the loss of the peer is not posted on a board.
    fn set_events(&mut self, events: LinkEvents) -> bool {
        self.link.set_events(events);
        false
    }
}
