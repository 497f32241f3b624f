//! Frames over a byte stream: a word with the payload's length before each, padded to 8 bytes.
//!
//! Owns the buffers of both directions and the half-close; how bytes get to the peer is the [`ByteStream`]'s. Whoever waits is woken
//! by an event of the stream, so there are no flags: arming only makes sure that no edge can have been missed, which is so once a
//! read and a write have been refused. A stream that was read empty is not read again before the poller has seen an event of it,
//! unless somebody expects one.

use std::cell::Cell;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use accl_types::{Error, Result};
use accl_wire::{Answers, Frame, HEAD_BYTES, Link, Place};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{News, Watched, refusal};

/// A connection to one process that carries bytes both ways, in order, and never blocks: a socket, a pipe each way, or what encrypts
/// on top of one.
///
/// Neither [`ByteStream::send`] nor [`ByteStream::flush`] takes in what the peer has sent: its event would be lost.
///
/// Errors are the system's; [`io::ErrorKind::WouldBlock`] means later, and an edge of one of [`ByteStream::fds`] follows as soon as it
/// would do. `Interrupted` means again.
pub trait ByteStream: Send {
    /// Takes some of `bytes`, at least one. What was taken reaches the peer without another call, or by [`ByteStream::flush`].
    ///
    /// # Errors
    /// `WouldBlock` when it takes nothing now; anything else is final.
    fn send(&mut self, bytes: &[u8]) -> io::Result<usize>;

    /// Reads into `room`; 0 is the end. Fewer bytes than there is room for mean that there are no more now.
    ///
    /// # Errors
    /// `WouldBlock` when there is nothing now; anything else is final.
    fn receive(&mut self, room: &mut [u8]) -> io::Result<usize>;

    /// Pushes what the stream itself holds back. `false`: it holds something yet.
    ///
    /// # Errors
    /// As [`ByteStream::send`].
    fn flush(&mut self) -> io::Result<bool> {
        Ok(true)
    }

    /// No more bytes will be sent: the peer reads an end behind those that were. What the peer sends can still be read.
    fn shut_down(&mut self);

    /// Bytes that were sent and that the peer's host is not known to have, or as many as may be.
    fn unacknowledged(&self) -> u64 {
        0
    }

    /// How often the system has repeated in vain what is under way, and since when the peer's host has not answered.
    fn repeats(&self) -> Option<(u8, Duration)> {
        None
    }

    /// What to watch, edge-triggered. The same for the life of the stream.
    fn fds(&self) -> Vec<BorrowedFd<'_>>;

    /// Whether this is the process that has made the stream, and no forked child.
    fn is_ours(&self) -> bool;

    /// Name of the transport's table row.
    fn transport(&self) -> &'static str;

    /// Place for a person: `10.0.0.1:5000 -> 10.0.0.2:40000 (host worker-3, pid 4711)`.
    fn describe(&self) -> &str;
}

/// What is collected before it must go out, besides one frame.
const BUFFER_BYTES: usize = 256 << 10;
/// From here on a commit sends at once instead of waiting for the flush at the end of the pass.
const EAGER_BYTES: usize = 64 << 10;
/// When a read brings so much, more has come meanwhile as a rule: to ask costs less than to wait for an event.
const FLOWING_BYTES: usize = 32 << 10;
const WORD: usize = 8;
/// Where the payload lies in a record, behind word and head.
const PAYLOAD_AT: usize = WORD + HEAD_BYTES;
/// How long a dropped link tries to get rid of its last frames: so many times so long.
const LINGER_STEPS: u32 = 10;
const LINGER_STEP: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// How often the system has repeated something in vain before that counts as silence: one packet may be lost.
const REPEATS: u8 = 3;
/// When nothing was sent for so long and all before is answered, the peer's host has not been asked for anything: its silence does not count.
const QUIET: Duration = Duration::from_millis(500);

/// Bytes of a frame on the wire.
const fn record_bytes(payload_bytes: usize) -> usize {
    PAYLOAD_AT + payload_bytes.next_multiple_of(WORD)
}

/// The length, and its complement so that a stream out of step is noticed at once.
fn word_of(payload_bytes: usize) -> u64 {
    let len = payload_bytes as u32;
    u64::from(len) | u64::from(!len) << 32
}

fn payload_bytes_of(word: u64) -> Option<usize> {
    let (len, check) = (word as u32, (word >> 32) as u32);
    (check == !len).then_some(len as usize)
}

/// Bytes between `start` and `end`, in words so that frames are aligned.
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
        // SAFETY: the words are initialised, `u64` has no padding, and the length is theirs.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), self.words.len() * WORD) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; every bit pattern is a `u64`, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), self.words.len() * WORD) }
    }

    /// Whether `make_room` would succeed without moving more than what was consumed, which keeps the cost below one
    /// copy of every byte.
    fn has_room(&self, bytes: usize) -> bool {
        let may_move = self.len() <= self.start && self.len() + WORD + bytes <= self.capacity();
        may_move || self.end + bytes <= self.capacity()
    }

    /// Makes `bytes` free behind `end`, moving what there is to the front if need be.
    fn make_room(&mut self, bytes: usize) {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.end + bytes > self.capacity() {
            // Only whole words move, so that what is aligned stays aligned.
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
    /// Length of the reserved frame's payload.
    reserved: Option<usize>,
    /// Length of the payload of the frame at `inbound.start`.
    found: Option<usize>,
    /// The caller has seen that frame.
    shown: bool,
    max_payload_bytes: usize,
    /// The stream may hold back bytes that it took.
    holds_back: bool,
    /// No more can be sent, and why.
    send_error: Option<Error>,
    /// No more will come, and why.
    ended: Option<Error>,
    /// The end was returned to the caller: it is no longer a reason to stay awake.
    told: bool,
    /// Length of the shortest payload that found no room since the link was last disarmed.
    refused_bytes: Option<usize>,
    closing: Closing,
    /// Bytes of all frames that were committed.
    committed: u64,
    /// Something was sent since the peer's host was last seen to have everything.
    awaits_answer: bool,
    /// When bytes were sent last, and when the peer's host had everything that was sent before: see [`QUIET`].
    pushed_at: Instant,
    asked_at: Instant,
    /// See [`Link::abandon`].
    is_abandoned: bool,
    /// What a poller has seen, if one watches.
    news: Option<News>,
    /// The stream had no more when it was last read.
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
    /// A link over a stream of which nothing has been read or written.
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
            told: false,
            refused_bytes: None,
            closing: Closing::Open,
            committed: 0,
            awaits_answer: false,
            pushed_at: Instant::now(),
            asked_at: Instant::now(),
            is_abandoned: false,
            news: None,
            is_empty: false,
            system_calls: Cell::new(0),
        }
    }

    /// Whether the stream holds nothing, as far as the poller has seen: an event follows whatever comes after it was read.
    fn is_known_empty(&mut self) -> bool {
        let Some(news) = &self.news else { return false };
        if news.take() {
            self.is_empty = false;
        }
        self.is_empty && !news.has_hung_up()
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
        // What the peer had sent before may be there and unseen, and is read first.
        self.is_empty = false;
    }

    /// Nothing is left in this process.
    fn has_sent_all(&self) -> bool {
        self.outbound.len() == 0 && !self.holds_back
    }

    /// Whether there is a whole frame, reading at most once.
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

    /// Looks for a whole frame in what has arrived.
    fn parse(&mut self) -> Result<bool> {
        if self.inbound.len() < WORD {
            return Ok(false);
        }
        let word = self.inbound.words[self.inbound.start / WORD];
        let Some(len) = payload_bytes_of(u64::from_le(word)).filter(|&len| len <= self.max_payload_bytes) else {
            let error = Error::protocol(format!("{}: the stream holds what cannot be a frame", self.stream.describe()));
            self.told = true;
            return Err(self.ended.insert(error).clone());
        };
        if self.inbound.len() < record_bytes(len) {
            return Ok(false);
        }
        self.found = Some(len);
        Ok(true)
    }

    /// One read into the free part of the buffer, which always has room for the rest of the frame that has begun.
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
                // A hang-up that came with the last bytes has been seen by the poller, too, or will be.
                self.is_empty = count < asked && count < FLOWING_BYTES;
            }
            Err(why) if why.kind() == io::ErrorKind::WouldBlock => self.is_empty = true,
            Err(why) => self.ended = Some(self.lost(&format!("receiving failed: {why}"))),
        }
    }

    /// The limit is what is buffered and not what a frame adds: the buffer has room for one longest frame beyond it.
    fn has_room(&self, payload_bytes: usize) -> bool {
        self.outbound.len() <= BUFFER_BYTES && self.outbound.has_room(record_bytes(payload_bytes))
    }

    fn report_end(&mut self) -> Result<()> {
        // A stream on which nothing can be sent is over when nothing more is there to be read.
        let over = self.ended.as_ref().or(self.send_error.as_ref().filter(|_| self.is_empty));
        let Some(over) = over.cloned() else { return Ok(()) };
        self.told = true;
        Err(over)
    }
}

// SAFETY: while a frame is shown, `poll_frame` does not fill the buffer that it lies in; sending uses another one.
unsafe impl<S: ByteStream> Link for StreamLink<S> {
    fn max_payload_bytes(&self) -> usize {
        self.max_payload_bytes
    }

    fn try_reserve(&mut self, payload_bytes: usize) -> Result<Option<Place<'_>>> {
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
        // Records begin at multiples of a word even when the kernel has taken part of one: only `start` is odd then.
        let at = self.outbound.end;
        self.outbound.bytes_mut()[at..at + WORD].copy_from_slice(&word_of(payload_bytes).to_le_bytes());
        self.reserved = Some(payload_bytes);
        let record = &mut self.outbound.bytes_mut()[at + WORD..at + PAYLOAD_AT + payload_bytes];
        Ok(record.split_first_chunk_mut().map(|(head, payload)| Place { head, payload }))
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
        // A read that found less than the buffer has room for has emptied the stream: whatever comes next is an edge, which ends
        // the sleep that follows if nobody has seen it yet. One that filled the buffer has brought a whole frame.
        let is_over = |link: &Self| link.ended.is_some() || link.send_error.is_some();
        let news = self.poll_frame() != Ok(false) || (is_over(self) && !self.told);
        news || (wants_room
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
            // A window that is closed is asked for again and again; a host that is there answers that.
            // A host from which nothing came while there was nothing to answer has not been silent.
            Some((repeats, since)) if repeats >= REPEATS => Answers::Overdue(since.min(self.asked_at.elapsed())),
            Some(_) | None => Answers::Awaited,
        }
    }

    fn look_again(&mut self) {
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

    fn set_news(&mut self, news: News) -> bool {
        self.news = Some(news);
        true
    }
}

impl<S: ByteStream> Drop for StreamLink<S> {
    fn drop(&mut self) {
        self.close();
        if self.is_abandoned {
            return;
        }
        // Descriptors that nothing is awaited of: the end of what is received says nothing of what is sent.
        let mut over = Vec::new();
        for _ in 0..LINGER_STEPS {
            // Whoever has gone reads nothing more.
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
            // Closing a connection with unread bytes would reset it and take our last frames with it.
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

    /// A stream to a host that has not answered for a minute.
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
        // As one that has been idle for long.
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
            // Its end is given to the system once more in any case.
            assert_eq!(more > 1, !is_abandoned, "{more}");
        }
    }
}
