//! Link wrapper that reports each frame, for logs that follow the protocol step by step.
//!
//! Owns no text: the caller passes in what is done with a frame's head. Links are wrapped only if frames are logged.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::time::Duration;

use accl_types::Result;
use accl_wire::{Answers, Frame, FrameSlot, HEAD_BYTES, Link};

use crate::{LinkEvents, Watched};

/// Direction of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameDirection {
    /// To the peer: the frame was committed.
    Out,
    /// From the peer: the frame was looked at for the first time.
    In,
}

/// Callback for each frame. It gets the direction, the head, and the number of payload bytes.
pub type FrameObserver = Box<dyn FnMut(FrameDirection, &[u8; HEAD_BYTES], usize) + Send>;

/// Wraps any link and reports its frames.
pub struct Traced<L> {
    link: L,
    observe: FrameObserver,
    /// Address of the reserved frame's head, and the frame's payload bytes.
    reserved: Option<(NonNull<[u8; HEAD_BYTES]>, usize)>,
    /// Whether the frame at the front has been reported already.
    is_observed: bool,
}

// SAFETY: the pointer refers to memory of the link, which may be sent, and is used only through `&mut self`.
unsafe impl<L: Send> Send for Traced<L> {}

impl<L: Link> Traced<L> {
    /// Wraps `link` and passes its frames to `observe`.
    pub fn new(link: L, observe: FrameObserver) -> Self {
        Self { link, observe, reserved: None, is_observed: false }
    }
}

// SAFETY: every method forwards to the link inside, which keeps the contract of `Link`.
unsafe impl<L: Link> Link for Traced<L> {
    fn max_payload_bytes(&self) -> usize {
        self.link.max_payload_bytes()
    }

    fn try_reserve(&mut self, payload_bytes: usize) -> Result<Option<FrameSlot<'_>>> {
        self.reserved = None;
        let Some(slot) = self.link.try_reserve(payload_bytes)? else { return Ok(None) };
        self.reserved = Some((NonNull::from(&mut *slot.head), payload_bytes));
        Ok(Some(slot))
    }

    fn commit(&mut self) {
        if let Some((head, bytes)) = self.reserved.take() {
            // SAFETY: a reserved head stays valid until `commit`, which comes next, and no other code writes it
            // meanwhile.
            (self.observe)(FrameDirection::Out, unsafe { head.as_ref() }, bytes);
        }
        self.link.commit();
    }

    fn peek(&mut self) -> Result<Option<Frame<'_>>> {
        let frame = self.link.peek()?;
        if let Some(frame) = frame
            && !std::mem::replace(&mut self.is_observed, true)
        {
            (self.observe)(FrameDirection::In, frame.head, frame.payload.len());
        }
        Ok(frame)
    }

    fn release(&mut self) {
        self.is_observed = false;
        self.link.release();
    }

    fn flush(&mut self) -> Result<bool> {
        self.link.flush()
    }

    fn arm(&mut self, wants_room: bool) -> bool {
        self.link.arm(wants_room)
    }

    fn disarm(&mut self) {
        self.link.disarm();
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

    fn polls_without_syscall(&self) -> bool {
        self.link.polls_without_syscall()
    }

    fn force_poll(&mut self) {
        self.link.force_poll();
    }

    fn abandon(&mut self) {
        self.link.abandon();
    }

    fn is_polled(&self) -> bool {
        self.link.is_polled()
    }

    fn needs_listener(&self) -> bool {
        self.link.needs_listener()
    }

    fn poll_interval(&self) -> Option<Duration> {
        self.link.poll_interval()
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

    fn set_events(&mut self, events: LinkEvents) -> bool {
        self.link.set_events(events)
    }
}
