//! A link that counts what passes. For tests and for the figures of a run.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use accl_types::Result;

use crate::{Answers, Frame, HEAD_BYTES, Link, News, Place, Watched};

/// Counters, readable from any thread while the link is used. Any number of links may share one.
#[derive(Debug, Default)]
pub struct Trace {
    frames_sent: AtomicU64,
    bytes_sent: AtomicU64,
    frames_received: AtomicU64,
    bytes_received: AtomicU64,
}

impl Trace {
    /// Frames that were committed.
    pub fn frames_sent(&self) -> u64 {
        self.frames_sent.load(Ordering::Relaxed)
    }

    /// Their bytes.
    pub fn bytes_sent(&self) -> u64 {
        self.bytes_sent.load(Ordering::Relaxed)
    }

    /// Frames that were released.
    pub fn frames_received(&self) -> u64 {
        self.frames_received.load(Ordering::Relaxed)
    }

    /// Their bytes.
    pub fn bytes_received(&self) -> u64 {
        self.bytes_received.load(Ordering::Relaxed)
    }
}

/// Wraps any link with a [`Trace`].
#[derive(Debug)]
pub struct Traced<L> {
    link: L,
    trace: Arc<Trace>,
    reserved: Option<u64>,
    peeked: Option<u64>,
}

impl<L: Link> Traced<L> {
    /// `link`, counted in `trace`.
    pub fn new(link: L, trace: Arc<Trace>) -> Self {
        Self { link, trace, reserved: None, peeked: None }
    }
}

// SAFETY: the link inside keeps the promise.
unsafe impl<L: Link> Link for Traced<L> {
    fn max_payload_bytes(&self) -> usize {
        self.link.max_payload_bytes()
    }

    fn try_reserve(&mut self, payload_bytes: usize) -> Result<Option<Place<'_>>> {
        let place = self.link.try_reserve(payload_bytes)?;
        self.reserved = place.as_ref().map(|place| (HEAD_BYTES + place.payload.len()) as u64);
        Ok(place)
    }

    fn commit(&mut self) {
        if let Some(bytes) = self.reserved.take() {
            // Relaxed: mere figures.
            self.trace.frames_sent.fetch_add(1, Ordering::Relaxed);
            self.trace.bytes_sent.fetch_add(bytes, Ordering::Relaxed);
        }
        self.link.commit();
    }

    fn peek(&mut self) -> Result<Option<Frame<'_>>> {
        let frame = self.link.peek()?;
        self.peeked = frame.map(|frame| (HEAD_BYTES + frame.payload.len()) as u64);
        Ok(frame)
    }

    fn release(&mut self) {
        if let Some(bytes) = self.peeked.take() {
            self.trace.frames_received.fetch_add(1, Ordering::Relaxed);
            self.trace.bytes_received.fetch_add(bytes, Ordering::Relaxed);
        }
        self.link.release();
    }

    fn flush(&mut self) -> Result<bool> {
        self.link.flush()
    }

    fn prepare_park(&mut self, wants_room: bool) -> bool {
        self.link.prepare_park(wants_room)
    }

    fn unpark(&mut self) {
        self.link.unpark();
    }

    fn suspend_park(&mut self) {
        self.link.suspend_park();
    }

    fn resume_park(&mut self, wants_room: bool) -> bool {
        self.link.resume_park(wants_room)
    }

    fn check_peer(&mut self) -> Result<()> {
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

    fn look_again(&mut self) {
        self.link.look_again();
    }

    fn system_calls(&self) -> u64 {
        self.link.system_calls()
    }

    fn transport(&self) -> &'static str {
        self.link.transport()
    }

    fn describe(&self) -> String {
        self.link.describe()
    }
}

impl<L: Watched> Watched for Traced<L> {
    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.link.fds()
    }

    fn set_news(&mut self, news: News) {
        self.link.set_news(news);
    }
}
