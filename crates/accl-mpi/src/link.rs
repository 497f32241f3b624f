//! One link as far as MPI is not asked: what was sent, what has arrived, and who says so.
//!
//! Owns the order of a link's frames and its counts. [`crate::world`] asks MPI for them.

use std::collections::VecDeque;
use std::ffi::{CString, c_int};
use std::time::{Duration, Instant};

use accl_wire::HEAD_BYTES;

use crate::bell::Bell;
use crate::calls::{Checked, Request};
use crate::frames::{Buffer, Spare};

/// Most frames of a link that are under way, and most bytes of them.
const MAX_FRAMES: usize = 64;
const MAX_BYTES: usize = 4 << 20;
/// How long an armed link may be left alone while something is under way: at first, and at most. In between an eighth of the time for which
/// nothing has moved.
const FIRST_INTERVAL: Duration = Duration::from_micros(20);
const LAST_INTERVAL: Duration = Duration::from_millis(1);

/// A process of the job, and its name for a link: the tag of the messages that it receives on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Peer {
    pub(crate) rank: c_int,
    pub(crate) tag: c_int,
}

/// A frame that goes out.
pub(crate) struct Outgoing {
    pub(crate) buffer: Buffer,
    pub(crate) bytes: usize,
    /// Of the call that sends it, once it was made.
    pub(crate) request: Option<Request>,
}

/// A frame that comes in.
pub(crate) struct Incoming {
    pub(crate) buffer: Buffer,
    pub(crate) bytes: usize,
    /// Until it is whole.
    pub(crate) request: Option<Request>,
}

/// What is left of a link whose owner has gone.
pub(crate) type Remains = (VecDeque<Outgoing>, VecDeque<Incoming>);

/// One end.
pub(crate) struct Link {
    /// The peer sends with it.
    pub(crate) tag: c_int,
    pub(crate) peer: Option<Peer>,
    pub(crate) max_payload_bytes: usize,
    pub(crate) bell: Option<Bell>,
    /// Why it is broken.
    pub(crate) broken: Option<CString>,
    reserved: Option<(Buffer, usize)>,
    pub(crate) outgoing: VecDeque<Outgoing>,
    bytes_under_way: usize,
    pub(crate) incoming: VecDeque<Incoming>,
    /// How many frames. They count around.
    sent: u32,
    received: u32,
    is_closed: bool,
    /// When something has moved last, as far as an armed link has looked.
    moved: Option<Instant>,
}

/// What a look at a link finds.
pub(crate) enum Look<'a> {
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
            bell: None,
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
            self.broken = Some(CString::new(why).unwrap_or_else(|_| c"it gives no reason".to_owned()));
        }
    }

    pub(crate) fn has_room(&self) -> bool {
        self.outgoing.len() < MAX_FRAMES && self.bytes_under_way < MAX_BYTES
    }

    /// A place for a frame, whose head is at its beginning and whose payload follows.
    pub(crate) fn reserve(&mut self, payload_bytes: usize, spare: &mut Spare) -> *mut u8 {
        if let Some((buffer, _)) = self.reserved.take() {
            spare.give_back(buffer);
        }
        let bytes = HEAD_BYTES + payload_bytes;
        let (buffer, _) = self.reserved.insert((spare.take(bytes), bytes));
        buffer.as_mut_ptr()
    }

    /// The reserved frame goes out: it is the last of `outgoing`.
    pub(crate) fn commit(&mut self) -> bool {
        let Some((buffer, bytes)) = self.reserved.take() else { return false };
        self.bytes_under_way += bytes;
        self.outgoing.push_back(Outgoing { buffer, bytes, request: None });
        self.sent = self.sent.wrapping_add(1);
        true
    }

    /// There will be no more frames. How many there were is said over the carrier, so that the peer reads the end behind the last of them.
    pub(crate) fn close(&mut self) {
        if !std::mem::replace(&mut self.is_closed, true)
            && let Some(bell) = &mut self.bell
        {
            bell.tell_end(self.sent);
        }
    }

    /// The first message has left.
    fn has_left(&mut self, spare: &mut Spare) {
        if let Some(message) = self.outgoing.pop_front() {
            self.bytes_under_way -= message.bytes;
            self.moved = None;
            spare.give_back(message.buffer);
        }
    }

    /// Rings for what was sent, if the peer has said that it sleeps. Whoever sends may make no other call for long.
    pub(crate) fn ring(&mut self) {
        let sent = self.sent;
        if let Some(bell) = &mut self.bell {
            bell.push();
            bell.listen_for_sleep();
            bell.ring(sent);
        }
    }

    /// Takes in what the peer has said, and rings as [`Link::ring`] does.
    fn heed(&mut self) {
        let sent = self.sent;
        if let Some(bell) = &mut self.bell {
            bell.hear();
            bell.ring(sent);
        }
    }

    /// A message has been matched.
    pub(crate) fn arrives(&mut self, message: Incoming) {
        self.received = self.received.wrapping_add(1);
        self.moved = None;
        self.incoming.push_back(message);
    }

    pub(crate) fn look(&self) -> Look<'_> {
        if self.broken.is_some() {
            return Look::Broken;
        }
        match self.incoming.front() {
            Some(message @ Incoming { request: None, .. }) => Look::Frame(message),
            None if self.bell.as_ref().is_some_and(|bell| bell.ends_with(self.received)) => Look::Ended,
            // What has begun to come from a process that is no more never ends.
            _ if self.bell.as_ref().is_some_and(Bell::is_silent) => Look::Ended,
            _ => Look::Nothing,
        }
    }

    /// Takes note of what has left and of what has become whole.
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

    /// MPI neither reads from nor writes to anything of it.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.outgoing.is_empty() && self.incoming.iter().all(|message| message.request.is_none())
    }

    /// Gives the frame's place back.
    pub(crate) fn release(&mut self, spare: &mut Spare) {
        if self.incoming.front().is_some_and(|message| message.request.is_none())
            && let Some(message) = self.incoming.pop_front()
        {
            spare.give_back(message.buffer);
        }
    }

    /// Nobody looks any more. How long it may be left alone; `None`: until the carrier has an edge.
    pub(crate) fn arm(&mut self) -> Option<Duration> {
        // Here and nowhere else: a look that follows this one would take in the bell that is to end the sleep.
        self.heed();
        let is_at_rest = self.is_at_rest();
        let Some(bell) = &mut self.bell else { return Some(LAST_INTERVAL) };
        let waits_for_death = bell.has_died() && !bell.is_silent();
        // A side that is closed cannot say that it sleeps.
        if !self.is_closed
            && is_at_rest
            && !bell.is_stuck()
            && !waits_for_death
            && !bell.announces_more_than(self.received)
        {
            self.moved = None;
            bell.tell_asleep(self.received);
            return None;
        }
        let moved = *self.moved.get_or_insert_with(Instant::now);
        Some((moved.elapsed() / 8).clamp(FIRST_INTERVAL, LAST_INTERVAL))
    }

    /// What MPI still reads from and writes to.
    pub(crate) fn into_remains(mut self, spare: &mut Spare) -> Remains {
        if let Some((buffer, _)) = self.reserved.take() {
            spare.give_back(buffer);
        }
        self.incoming.retain(|message| message.request.is_some());
        (self.outgoing, self.incoming)
    }
}
