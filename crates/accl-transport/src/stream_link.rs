//! Frames over a byte stream. Each frame is preceded by a word with the payload's length and padded to 8 bytes.
//!
//! Owns the buffers of both directions and the half-close. The [`ByteStream`] moves bytes to the peer.
//! An event of the stream wakes a waiting process, so no flags are needed. Arming only ensures that no edge was missed.
//! No edge can have been missed once a read and a write have been refused.
//! A stream that was read empty is not read again before the poller has seen an event of it, unless the caller expects
//! one.
//!
//! This file is long because both directions share the state of one stream, and its tests are here.

use std::cell::Cell;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use accl_types::{Error, Result};
use accl_wire::{Answers, Frame, FrameSlot, HEAD_BYTES, Link};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{LinkEvents, Watched, refusal};

/// Connection to one process that moves bytes both ways, in order, and never blocks. It may be a socket, a pipe each
/// way, or an encrypting layer over one of them.
///
/// Neither [`ByteStream::send`] nor [`ByteStream::flush`] may read what the peer has sent: the event of that data would
/// be lost.
///
/// Errors are the system's. [`io::ErrorKind::WouldBlock`] means later: an edge of one of [`ByteStream::fds`] follows as
/// soon as the operation can go on. `Interrupted` means again.
pub trait ByteStream: Send {
    /// Takes some of `bytes`, at least one, and returns their number. Taken bytes reach the peer without another call,
    /// or by [`ByteStream::flush`].
    ///
    /// # Errors
    /// `WouldBlock` if the stream takes nothing now; any other error is final.
    fn send(&mut self, bytes: &[u8]) -> io::Result<usize>;

    /// Reads into `room` and returns the number of bytes; 0 is the end of the stream. Fewer bytes than `room` holds
    /// mean that no more are available now.
    ///
    /// # Errors
    /// `WouldBlock` if nothing is available now; any other error is final.
    fn receive(&mut self, room: &mut [u8]) -> io::Result<usize>;

    /// Sends bytes that the stream itself holds back. Returns `false` if it still holds some.
    ///
    /// # Errors
    /// The same errors as [`ByteStream::send`].
    fn flush(&mut self) -> io::Result<bool> {
        Ok(true)
    }

    /// Declares that no more bytes will be sent: the peer reads an end after the bytes sent so far. This side can
    /// still read what the peer sends.
    fn shut_down(&mut self);

    /// Number of bytes sent that the peer's host is not known to have, or an upper bound of it.
    fn unacknowledged(&self) -> u64 {
        0
    }

    /// Number of times that the system has repeated the unacknowledged data in vain, and the time since the peer's host
    /// last answered. `None` if unknown.
    fn repeats(&self) -> Option<(u8, Duration)> {
        None
    }

    /// Descriptors to watch, edge-triggered. They stay the same for the life of the stream.
    fn fds(&self) -> Vec<BorrowedFd<'_>>;

    /// Whether this is the process that created the stream, and not a forked child.
    fn is_ours(&self) -> bool;

    /// Name of the transport's table row.
    fn transport(&self) -> &'static str;

    /// Location for a person: `10.0.0.1:5000 -> 10.0.0.2:40000 (host worker-3, pid 4711)`.
    fn describe(&self) -> &str;
}

/// Bytes that are collected before they must be sent, in addition to one frame.
const BUFFER_BYTES: usize = 256 << 10;
/// From this many bytes on, a commit sends at once instead of waiting for the flush at the end of the progress pass.
const EAGER_BYTES: usize = 64 << 10;
/// After a read of this many bytes, more have usually arrived meanwhile: asking again costs less than waiting for an
/// event.
const FLOWING_BYTES: usize = 32 << 10;
const WORD: usize = 8;
/// Offset of the payload in a record, after word and head.
const PAYLOAD_AT: usize = WORD + HEAD_BYTES;
/// A dropped link tries this many times to send its last frames, and waits `LINGER_STEP` each time.
const LINGER_STEPS: u32 = 10;
const LINGER_STEP: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// Number of vain repeats by the system that counts as silence: a single packet may be lost.
const REPEATS: u8 = 3;
/// If nothing was sent for this long and everything before is answered, the peer's host had nothing to answer. Its
/// silence in that time does not count.
const QUIET: Duration = Duration::from_millis(500);

/// Returns the bytes of a frame on the wire.
const fn record_bytes(payload_bytes: usize) -> usize {
    PAYLOAD_AT + payload_bytes.next_multiple_of(WORD)
}

/// Returns the length, with its complement so that a stream out of step is detected at once.
fn word_of(payload_bytes: usize) -> u64 {
    let len = payload_bytes as u32;
    u64::from(len) | u64::from(!len) << 32
}

fn payload_bytes_of(word: u64) -> Option<usize> {
    let (len, check) = (word as u32, (word >> 32) as u32);
    (check == !len).then_some(len as usize)
}

/// Bytes between `start` and `end`, stored in words so that frames are aligned.
#[derive(Debug)]
struct Buffer {
    words: Box<[u64]>,
    start: usize,
    end: usize,
}

impl Buffer {
    fn new(bytes: usize) -> Buffer {
        Buffer { words: vec![0; bytes.div_ceil(WORD)].into_boxed_slice(), start: 0, end: 0 }
    }

    fn capacity(&self) -> usize {
        self.words.len() * WORD
    }

    fn len(&self) -> usize {
        self.end - self.start
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the words are initialised, `u64` has no padding, and the length is the length of `words` in bytes.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), self.words.len() * WORD) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the words are initialised, the length is their length in bytes, every bit pattern is a `u64`, and the
        // borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), self.words.len() * WORD) }
    }

    /// Whether `make_room` would succeed without moving more bytes than were consumed. This keeps the cost below one
    /// copy of every byte.
    fn has_room(&self, bytes: usize) -> bool {
        let may_move = self.len() <= self.start && self.len() + WORD + bytes <= self.capacity();
        may_move || self.end + bytes <= self.capacity()
    }

    /// Makes `bytes` free after `end`, and moves the content to the front if needed.
    fn make_room(&mut self, bytes: usize) {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.end + bytes > self.capacity() {
            // Only whole words move, so that aligned content stays aligned.
            let from = self.start - self.start % WORD;
            let end = self.end;
            self.bytes_mut().copy_within(from..end, 0);
            self.start -= from;
            self.end -= from;
        }
    }
}

/// One end of a link over a stream.
#[derive(Debug)]
pub struct StreamLink<S: ByteStream> {
    stream: S,
    outbound: Buffer,
    inbound: Buffer,
    /// Length of the reserved frame's payload in bytes.
    reserved: Option<usize>,
    /// Length in bytes of the payload of the frame at `inbound.start`.
    found: Option<usize>,
    /// Whether the caller has seen that frame.
    shown: bool,
    max_payload_bytes: usize,
    /// Whether the stream may hold back bytes that it took.
    holds_back: bool,
    /// Reason why no more can be sent, if so.
    send_error: Option<Error>,
    /// Reason why no more will arrive, if so.
    ended: Option<Error>,
    /// Whether the end was returned to the caller; then it is no longer a reason to stay awake.
    is_reported: bool,
    /// Length of the shortest payload that found no room since the link was last disarmed.
    refused_bytes: Option<usize>,
    closing: Closing,
    /// Bytes of all frames that were committed.
    committed: u64,
    /// Whether something was sent since the peer's host was last seen to have everything.
    awaits_answer: bool,
    /// `pushed_at`: when bytes were last sent. `asked_at`: when bytes were last sent after a quiet time in which the
    /// peer's host had everything, see [`QUIET`].
    pushed_at: Instant,
    asked_at: Instant,
    /// See [`Link::abandon`].
    is_abandoned: bool,
    /// Events that a poller has seen, if a poller watches the stream.
    events: Option<LinkEvents>,
    /// Whether the stream had no more bytes when it was last read.
    is_empty: bool,
    system_calls: Cell<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Closing {
    Open,
    /// Half-close as soon as the buffer is empty.
    Wanted,
    Done,
}

impl<S: ByteStream> StreamLink<S> {
    /// Creates a link over a stream of which nothing has been read or written.
    pub fn new(stream: S, max_payload_bytes: usize) -> Self {
        let buffer = || Buffer::new(BUFFER_BYTES + record_bytes(max_payload_bytes));
        Self {
            stream,
            outbound: buffer(),
            inbound: buffer(),
            reserved: None,
            found: None,
            shown: false,
            max_payload_bytes,
            holds_back: false,
            send_error: None,
            ended: None,
            is_reported: false,
            refused_bytes: None,
            closing: Closing::Open,
            committed: 0,
            awaits_answer: false,
            pushed_at: Instant::now(),
            asked_at: Instant::now(),
            is_abandoned: false,
            events: None,
            is_empty: false,
            system_calls: Cell::new(0),
        }
    }

    /// Whether the stream holds nothing, as far as the poller has seen. An event follows everything that arrives after
    /// the read.
    fn is_known_empty(&mut self) -> bool {
        let Some(events) = &self.events else { return false };
        if events.take() {
            self.is_empty = false;
        }
        self.is_empty && !events.has_hung_up()
    }

    fn guard_fork(&self) -> Result<()> {
        refusal::guard_fork(self.stream.is_ours())
    }

    fn lost(&self, why: &str) -> Error {
        Error::peer_lost(format!("{}: {why}", self.stream.describe()))
    }

    /// Sends what the stream takes.
    fn push(&mut self) {
        while self.outbound.len() > 0 && self.send_error.is_none() {
            let bytes = &self.outbound.bytes()[self.outbound.start..self.outbound.end];
            self.system_calls.set(self.system_calls.get() + 1);
            let now = Instant::now();
            if now.duration_since(self.pushed_at) > QUIET && self.stream.unacknowledged() == 0 {
                self.asked_at = now;
            }
            self.pushed_at = now;
            match self.stream.send(bytes) {
                Ok(sent) => {
                    self.outbound.start += sent;
                    (self.awaits_answer, self.holds_back) = (true, true);
                }
                Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
                Err(why) if why.kind() == io::ErrorKind::WouldBlock => break,
                Err(why) => self.fail_sending(&why),
            }
        }
        while self.holds_back && self.send_error.is_none() {
            match self.stream.flush() {
                Ok(true) => self.holds_back = false,
                Ok(false) => break,
                Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
                Err(why) if why.kind() == io::ErrorKind::WouldBlock => break,
                Err(why) => self.fail_sending(&why),
            }
        }
        if self.closing == Closing::Wanted && (self.has_sent_all() || self.send_error.is_some()) {
            self.closing = Closing::Done;
            self.stream.shut_down();
        }
    }

    fn fail_sending(&mut self, why: &io::Error) {
        self.send_error = Some(self.lost(&format!("sending failed: {why}")));
        // Data that the peer sent before may be there unread; it is read first.
        self.is_empty = false;
    }

    /// Whether no unsent bytes are left in this process.
    fn has_sent_all(&self) -> bool {
        self.outbound.len() == 0 && !self.holds_back
    }

    /// Whether there is a whole frame; reads at most once.
    fn poll_frame(&mut self) -> Result<bool> {
        if self.found.is_some() || self.parse()? {
            return Ok(true);
        }
        if self.ended.is_some() {
            return Ok(false);
        }
        if self.is_known_empty() {
            return Ok(false);
        }
        self.fill();
        self.parse()
    }

    /// Looks for a whole frame in the bytes that have arrived.
    fn parse(&mut self) -> Result<bool> {
        if self.inbound.len() < WORD {
            return Ok(false);
        }
        let word = self.inbound.words[self.inbound.start / WORD];
        let Some(len) = payload_bytes_of(u64::from_le(word)).filter(|&len| len <= self.max_payload_bytes) else {
            let error = Error::protocol(format!("{}: the stream contains an invalid frame", self.stream.describe()));
            self.is_reported = true;
            return Err(self.ended.insert(error).clone());
        };
        if self.inbound.len() < record_bytes(len) {
            return Ok(false);
        }
        self.found = Some(len);
        Ok(true)
    }

    /// Reads once into the free part of the buffer, which always has room for the rest of a frame that has begun.
    fn fill(&mut self) {
        // Less than one frame is buffered when more is read, so there is room for the rest of it.
        self.inbound.make_room(record_bytes(self.max_payload_bytes));
        let end = self.inbound.end;
        let asked = self.inbound.capacity() - end;
        let read = loop {
            let room = &mut self.inbound.bytes_mut()[end..];
            self.system_calls.set(self.system_calls.get() + 1);
            match self.stream.receive(room) {
                Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
                other => break other,
            }
        };
        match read {
            Ok(0) => {
                let inside = if self.inbound.len() > 0 { " in the middle of a frame" } else { "" };
                self.ended = Some(self.lost(&format!("the peer has closed the connection{inside}")));
            }
            Ok(count) => {
                self.inbound.end += count;
                // If a hang-up came with the last bytes, the poller has seen it too, or will see it.
                self.is_empty = count < asked && count < FLOWING_BYTES;
            }
            Err(why) if why.kind() == io::ErrorKind::WouldBlock => self.is_empty = true,
            Err(why) => self.ended = Some(self.lost(&format!("receiving failed: {why}"))),
        }
    }

    /// Limits the buffered bytes, not the bytes that a frame adds: beyond the limit the buffer has room for one longest
    /// frame.
    fn has_room(&self, payload_bytes: usize) -> bool {
        self.outbound.len() <= BUFFER_BYTES && self.outbound.has_room(record_bytes(payload_bytes))
    }

    fn report_end(&mut self) -> Result<()> {
        // A stream that can send nothing has ended once nothing more is left to read.
        let over = self.ended.as_ref().or(self.send_error.as_ref().filter(|_| self.is_empty));
        let Some(over) = over.cloned() else { return Ok(()) };
        self.is_reported = true;
        Err(over)
    }
}

// SAFETY: while a frame is shown, `poll_frame` does not fill the buffer in which it lies; sending uses another buffer.
unsafe impl<S: ByteStream> Link for StreamLink<S> {
    fn max_payload_bytes(&self) -> usize {
        self.max_payload_bytes
    }

    fn try_reserve(&mut self, payload_bytes: usize) -> Result<Option<FrameSlot<'_>>> {
        self.guard_fork()?;
        if payload_bytes > self.max_payload_bytes || self.closing != Closing::Open {
            let is_open = self.closing == Closing::Open;
            return Err(refusal::unfit_payload(payload_bytes, self.max_payload_bytes, is_open));
        }
        if !self.has_room(payload_bytes) {
            self.push();
        }
        if let Some(error) = &self.send_error {
            return Err(error.clone());
        }
        if !self.has_room(payload_bytes) {
            self.refused_bytes = Some(self.refused_bytes.map_or(payload_bytes, |shorter| shorter.min(payload_bytes)));
            return Ok(None);
        }
        self.outbound.make_room(record_bytes(payload_bytes));
        // Records begin at multiples of a word even if the kernel has taken part of one: only `start` is odd then.
        let at = self.outbound.end;
        self.outbound.bytes_mut()[at..at + WORD].copy_from_slice(&word_of(payload_bytes).to_le_bytes());
        self.reserved = Some(payload_bytes);
        let record = &mut self.outbound.bytes_mut()[at + WORD..at + PAYLOAD_AT + payload_bytes];
        Ok(record.split_first_chunk_mut().map(|(head, payload)| FrameSlot { head, payload }))
    }

    fn commit(&mut self) {
        let Some(len) = self.reserved.take() else { return };
        let (from, to) = (self.outbound.end + PAYLOAD_AT + len, self.outbound.end + record_bytes(len));
        self.outbound.bytes_mut()[from..to].fill(0);
        self.outbound.end = to;
        self.committed += record_bytes(len) as u64;
        if self.outbound.len() >= EAGER_BYTES && self.guard_fork().is_ok() {
            self.push();
        }
    }

    fn peek(&mut self) -> Result<Option<Frame<'_>>> {
        self.guard_fork()?;
        if !self.poll_frame()? {
            return self.report_end().map(|()| None);
        }
        self.shown = true;
        let Some(len) = self.found else { return Ok(None) };
        let record = &self.inbound.bytes()[self.inbound.start + WORD..self.inbound.start + PAYLOAD_AT + len];
        Ok(record.split_first_chunk().map(|(head, payload)| Frame { head, payload }))
    }

    fn release(&mut self) {
        if std::mem::take(&mut self.shown)
            && let Some(len) = self.found.take()
        {
            self.inbound.start += record_bytes(len);
        }
    }

    fn flush(&mut self) -> Result<bool> {
        self.guard_fork()?;
        self.push();
        self.send_error.clone().map_or(Ok(self.has_sent_all()), Err)
    }

    fn arm(&mut self, wants_room: bool) -> bool {
        if self.guard_fork().is_err() {
            return true;
        }
        self.push();
        // A read that found less than the buffer has room for has emptied the stream. Whatever comes next is an edge,
        // which ends the following sleep if it has not been taken yet. A read that filled the buffer has brought a
        // whole frame.
        let is_over = |link: &Self| link.ended.is_some() || link.send_error.is_some();
        let has_events = self.poll_frame() != Ok(false) || (is_over(self) && !self.is_reported);
        has_events
            || (wants_room
                && self.send_error.is_none()
                && self.has_room(self.refused_bytes.unwrap_or(self.max_payload_bytes)))
    }

    fn disarm(&mut self) {
        self.refused_bytes = None;
    }

    fn check_peer(&mut self) -> Result<()> {
        self.guard_fork()?;
        if self.poll_frame()? { Ok(()) } else { self.report_end() }
    }

    fn close(&mut self) {
        if self.closing == Closing::Open && self.guard_fork().is_ok() {
            self.reserved = None;
            self.closing = Closing::Wanted;
            self.push();
        }
    }

    fn position(&self) -> u64 {
        self.committed
    }

    fn is_delivered(&mut self, position: u64) -> bool {
        if self.send_error.is_some() || self.guard_fork().is_err() {
            return true;
        }
        self.push();
        self.committed - self.outbound.len() as u64 >= position + self.stream.unacknowledged()
    }

    fn awaits_answer(&self) -> bool {
        self.awaits_answer
    }

    fn answers(&mut self) -> Answers {
        if !self.awaits_answer || self.guard_fork().is_err() {
            return Answers::Complete;
        }
        if self.has_sent_all() && self.stream.unacknowledged() == 0 {
            self.awaits_answer = false;
            return Answers::Complete;
        }
        match self.stream.repeats() {
            // A closed window is probed again and again, and a living host answers the probes. Silence while the host
            // had nothing to answer does not count.
            Some((repeats, since)) if repeats >= REPEATS => Answers::Overdue(since.min(self.asked_at.elapsed())),
            Some(_) | None => Answers::Awaited,
        }
    }

    fn force_poll(&mut self) {
        self.is_empty = false;
    }

    fn abandon(&mut self) {
        self.is_abandoned = true;
    }

    fn system_calls(&self) -> u64 {
        self.system_calls.get()
    }

    fn transport(&self) -> &'static str {
        self.stream.transport()
    }

    fn describe(&self) -> String {
        format!("{} {}", self.stream.transport(), self.stream.describe())
    }
}

impl<S: ByteStream> Watched for StreamLink<S> {
    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.stream.fds()
    }

    fn set_events(&mut self, events: LinkEvents) -> bool {
        self.events = Some(events);
        true
    }
}

impl<S: ByteStream> Drop for StreamLink<S> {
    fn drop(&mut self) {
        self.close();
        if self.is_abandoned {
            return;
        }
        // Indexes of descriptors that are not waited for any more. The end of the receiving direction says nothing
        // about the sending direction.
        let mut over = Vec::new();
        for _ in 0..LINGER_STEPS {
            // A peer that has gone reads nothing more.
            if self.closing != Closing::Wanted || self.send_error.is_some() || self.ended.is_some() {
                break;
            }
            let fds = self.stream.fds();
            let awaited: Vec<usize> = (0..fds.len()).filter(|index| !over.contains(index)).collect();
            let mut polled: Vec<_> = awaited.iter().map(|&index| PollFd::new(&fds[index], PollFlags::OUT)).collect();
            let _ = poll(&mut polled, Some(&LINGER_STEP));
            let has_room = polled.iter().any(|fd| fd.revents().contains(PollFlags::OUT));
            if !has_room {
                let ended = awaited.iter().zip(&polled).filter(|(_, fd)| !fd.revents().is_empty());
                over.extend(ended.map(|(&index, _)| index));
            }
            self.push();
        }
        if self.guard_fork().is_ok() {
            // Closing a connection with unread bytes would reset it and discard this side's last frames.
            self.inbound.start = self.inbound.end;
            while self.ended.is_none() && self.inbound.len() == 0 {
                self.fill();
                if self.inbound.len() == 0 {
                    break;
                }
                self.inbound.start = self.inbound.end;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// Stream to a host that has not answered for a minute.
    struct Silent {
        sends: Arc<AtomicU64>,
        takes: bool,
        unacknowledged: u64,
    }

    impl ByteStream for Silent {
        fn send(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.sends.fetch_add(1, Ordering::Relaxed);
            if !self.takes {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            self.unacknowledged += bytes.len() as u64;
            Ok(bytes.len())
        }

        fn receive(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::ErrorKind::WouldBlock.into())
        }

        fn shut_down(&mut self) {}

        fn unacknowledged(&self) -> u64 {
            self.unacknowledged
        }

        fn repeats(&self) -> Option<(u8, Duration)> {
            Some((REPEATS, Duration::from_secs(60)))
        }

        fn fds(&self) -> Vec<BorrowedFd<'_>> {
            Vec::new()
        }

        fn is_ours(&self) -> bool {
            true
        }

        fn transport(&self) -> &'static str {
            "silent"
        }

        fn describe(&self) -> &str {
            "silent"
        }
    }

    fn link(takes: bool) -> (StreamLink<Silent>, Arc<AtomicU64>) {
        let sends = Arc::new(AtomicU64::new(0));
        let mut link = StreamLink::new(Silent { sends: sends.clone(), takes, unacknowledged: 0 }, 64);
        // Make the link look idle for a minute.
        let (now, ago) = (Instant::now(), Duration::from_secs(60));
        let before = now.checked_sub(ago).unwrap_or(now);
        (link.pushed_at, link.asked_at) = (before, before);
        link.try_reserve(4).unwrap().unwrap().payload.fill(1);
        link.commit();
        let _ = link.flush();
        (link, sends)
    }

    #[test]
    fn a_host_that_had_nothing_to_answer_has_not_been_silent_meanwhile() {
        let (mut link, _) = link(true);
        assert!(link.awaits_answer());
        match link.answers() {
            Answers::Overdue(since) => assert!(since < Duration::from_secs(50), "{since:?}"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_link_to_a_host_that_has_vanished_is_dropped_without_another_attempt() {
        for is_abandoned in [false, true] {
            let (mut link, sends) = link(false);
            if is_abandoned {
                link.abandon();
            }
            let before = sends.load(Ordering::Relaxed);
            drop(link);
            let more = sends.load(Ordering::Relaxed) - before;
            // The rest is offered to the system once more in any case.
            assert_eq!(more > 1, !is_abandoned, "{more}");
        }
    }
}
