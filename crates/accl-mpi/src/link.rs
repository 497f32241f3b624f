//! One link, except for its MPI calls: its sent and received frames, and its end.
//!
//! Owns the order of a link's frames and their counts. [`crate::world`] calls MPI for them.

use std::collections::VecDeque;
use std::ffi::{CString, c_int};
use std::time::{Duration, Instant};

use accl_wire::HEAD_BYTES;

use crate::calls::{Checked, Request};
use crate::doorbell::Doorbell;
use crate::frames::{Buffer, Spare};

/// Limits of a link's frames in flight: their number, and their bytes.
const MAX_FRAMES: usize = 64;
const MAX_BYTES: usize = 4 << 20;
/// Shortest and longest time for which an armed link may stay unpolled while something is in flight. In between it is
/// an eighth of the time since the last progress.
const FIRST_INTERVAL: Duration = Duration::from_micros(20);
const LAST_INTERVAL: Duration = Duration::from_millis(1);

/// A process of the job, and the tag of the messages that it receives on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Peer {
    pub(crate) rank: c_int,
    pub(crate) tag: c_int,
}

/// A frame to send.
pub(crate) struct Outgoing {
    pub(crate) buffer: Buffer,
    pub(crate) bytes: usize,
    /// The request of the send, once it has started.
    pub(crate) request: Option<Request>,
}

/// A frame to receive.
pub(crate) struct Incoming {
    pub(crate) buffer: Buffer,
    pub(crate) bytes: usize,
    /// The request of the receive, until the frame is complete.
    pub(crate) request: Option<Request>,
}

/// The frames of a destroyed link that MPI still uses.
pub(crate) type Remains = (VecDeque<Outgoing>, VecDeque<Incoming>);

/// One end of a link.
pub(crate) struct Link {
    /// The tag with which the peer sends.
    pub(crate) tag: c_int,
    pub(crate) peer: Option<Peer>,
    pub(crate) max_payload_bytes: usize,
    pub(crate) doorbell: Option<Doorbell>,
    /// The reason why the link is broken.
    pub(crate) broken: Option<CString>,
    reserved: Option<(Buffer, usize)>,
    pub(crate) outgoing: VecDeque<Outgoing>,
    bytes_under_way: usize,
    pub(crate) incoming: VecDeque<Incoming>,
    /// Numbers of frames sent and received. They wrap around.
    sent: u32,
    received: u32,
    is_closed: bool,
    /// Start of the current period without progress, as far as [`Link::arm`] has seen it.
    moved: Option<Instant>,
}

/// The result of polling a link.
pub(crate) enum Polled<'a> {
    Frame(&'a Incoming),
    Nothing,
    Ended,
    Broken,
}

impl Link {
    pub(crate) fn new(tag: c_int, max_payload_bytes: usize) -> Link {
        Link {
            tag,
            peer: None,
            max_payload_bytes,
            doorbell: None,
            broken: None,
            reserved: None,
            outgoing: VecDeque::new(),
            bytes_under_way: 0,
            incoming: VecDeque::new(),
            sent: 0,
            received: 0,
            is_closed: false,
            moved: None,
        }
    }

    pub(crate) fn fail(&mut self, why: impl Into<Vec<u8>>) {
        if self.broken.is_none() {
            self.broken = Some(CString::new(why).unwrap_or_else(|_| c"no reason is known".to_owned()));
        }
    }

    pub(crate) fn has_room(&self) -> bool {
        self.outgoing.len() < MAX_FRAMES && self.bytes_under_way < MAX_BYTES
    }

    /// Returns memory for a frame: its head first, then its payload.
    pub(crate) fn reserve(&mut self, payload_bytes: usize, spare: &mut Spare) -> *mut u8 {
        if let Some((buffer, _)) = self.reserved.take() {
            spare.give_back(buffer);
        }
        let bytes = HEAD_BYTES + payload_bytes;
        let (buffer, _) = self.reserved.insert((spare.take(bytes), bytes));
        buffer.as_mut_ptr()
    }

    /// Queues the reserved frame as the last of `outgoing`. Returns false if no frame is reserved.
    pub(crate) fn commit(&mut self) -> bool {
        let Some((buffer, bytes)) = self.reserved.take() else { return false };
        self.bytes_under_way += bytes;
        self.outgoing.push_back(Outgoing { buffer, bytes, request: None });
        self.sent = self.sent.wrapping_add(1);
        true
    }

    /// Ends this direction of the link. The number of sent frames goes over the bootstrap connection, so that the peer
    /// reads the end after the last frame.
    pub(crate) fn close(&mut self) {
        if !std::mem::replace(&mut self.is_closed, true)
            && let Some(doorbell) = &mut self.doorbell
        {
            doorbell.report_end(self.sent);
        }
    }

    /// Handles the completion of the oldest send.
    fn has_left(&mut self, spare: &mut Spare) {
        if let Some(message) = self.outgoing.pop_front() {
            self.bytes_under_way -= message.bytes;
            self.moved = None;
            spare.give_back(message.buffer);
        }
    }

    /// Rings for sent frames if the peer has reported that it sleeps. This is done at once, because the caller's next
    /// call may be a long time away.
    pub(crate) fn ring(&mut self) {
        let sent = self.sent;
        if let Some(doorbell) = &mut self.doorbell {
            doorbell.push();
            doorbell.listen_for_sleep();
            doorbell.ring(sent);
        }
    }

    /// Reads the peer's words, and rings like [`Link::ring`].
    fn heed(&mut self) {
        let sent = self.sent;
        if let Some(doorbell) = &mut self.doorbell {
            doorbell.receive();
            doorbell.ring(sent);
        }
    }

    /// Adds a matched message.
    pub(crate) fn arrives(&mut self, message: Incoming) {
        self.received = self.received.wrapping_add(1);
        self.moved = None;
        self.incoming.push_back(message);
    }

    pub(crate) fn poll(&self) -> Polled<'_> {
        if self.broken.is_some() {
            return Polled::Broken;
        }
        match self.incoming.front() {
            Some(message @ Incoming { request: None, .. }) => Polled::Frame(message),
            None if self.doorbell.as_ref().is_some_and(|doorbell| doorbell.ends_with(self.received)) => Polled::Ended,
            // A frame that has only partly arrived from a dead process never completes.
            _ if self.doorbell.as_ref().is_some_and(Doorbell::is_silent) => Polled::Ended,
            _ => Polled::Nothing,
        }
    }

    /// Handles completed sends and receives.
    pub(crate) fn settle(&mut self, spare: &mut Spare) -> Checked<()> {
        while let Some(Outgoing { request: Some(request), .. }) = self.outgoing.front_mut() {
            if !request.is_complete()? {
                break;
            }
            self.has_left(spare);
        }
        for message in &mut self.incoming {
            if let Some(request) = &mut message.request {
                if !request.is_complete()? {
                    break;
                }
                message.request = None;
            }
        }
        Ok(())
    }

    /// Whether MPI uses none of the link's memory.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.outgoing.is_empty() && self.incoming.iter().all(|message| message.request.is_none())
    }

    /// Gives back the memory of the oldest received frame.
    pub(crate) fn release(&mut self, spare: &mut Spare) {
        if self.incoming.front().is_some_and(|message| message.request.is_none())
            && let Some(message) = self.incoming.pop_front()
        {
            spare.give_back(message.buffer);
        }
    }

    /// Called when no thread polls the link any more. Returns how long it may stay unpolled; `None` means until the
    /// bootstrap connection has an event.
    pub(crate) fn arm(&mut self) -> Option<Duration> {
        // Words are read only here: a poll after this one would take the word that must end the sleep.
        self.heed();
        let is_at_rest = self.is_at_rest();
        let Some(doorbell) = &mut self.doorbell else { return Some(LAST_INTERVAL) };
        let waits_for_death = doorbell.has_died() && !doorbell.is_silent();
        // A closed side cannot report that it sleeps.
        if !self.is_closed
            && is_at_rest
            && !doorbell.is_stuck()
            && !waits_for_death
            && !doorbell.announces_more_than(self.received)
        {
            self.moved = None;
            doorbell.report_sleep(self.received);
            return None;
        }
        let moved = *self.moved.get_or_insert_with(Instant::now);
        Some((moved.elapsed() / 8).clamp(FIRST_INTERVAL, LAST_INTERVAL))
    }

    /// Returns the frames that MPI still uses.
    pub(crate) fn into_remains(mut self, spare: &mut Spare) -> Remains {
        if let Some((buffer, _)) = self.reserved.take() {
            spare.give_back(buffer);
        }
        self.incoming.retain(|message| message.request.is_some());
        (self.outgoing, self.incoming)
    }
}
