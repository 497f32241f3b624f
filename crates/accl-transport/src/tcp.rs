//! Frames over one TCP connection: a word with the payload's length before each, padded to 8 bytes.
//!
//! Owns the buffers of both directions, the half-close, and what the peer's host has acknowledged; connecting is done in
//! `endpoint`. The kernel wakes a parked side by itself, so there are no flags: parking only makes sure that no edge can have been
//! missed, which is so once a read and a write have been refused. A socket that was read empty is not read again before the
//! poller has seen an event of it, unless somebody expects one.

use std::cell::Cell;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use accl_types::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown};

use crate::fork::Fd;
use crate::{Answers, Frame, HEAD_BYTES, Link, News, Place, Watched};

/// What is collected before it must go out, besides one frame.
const BUFFER_BYTES: usize = 256 << 10;
/// From here on a commit sends at once instead of waiting for the flush at the end of the pass.
const EAGER_BYTES: usize = 64 << 10;
const WORD: usize = 8;
/// Where the payload lies in a record, behind word and head.
const PAYLOAD_AT: usize = WORD + HEAD_BYTES;
/// How long a dropped link tries to get rid of its last frames: so many times so long.
const LINGER_STEPS: u32 = 10;
const LINGER_STEP: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// How often the system has repeated something in vain before that counts as silence: one packet may be lost.
const REPEATS: u8 = 3;

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

/// One end of a TCP link.
#[derive(Debug)]
pub(crate) struct TcpLink {
    socket: Fd,
    out: Buffer,
    inn: Buffer,
    /// Length of the reserved frame's payload.
    reserved: Option<usize>,
    /// Length of the payload of the frame at `inn.start`.
    found: Option<usize>,
    /// The caller has seen that frame.
    shown: bool,
    max_payload_bytes: usize,
    /// `local -> remote` and who that is.
    place: String,
    /// No more can be sent, and why.
    deaf: Option<Error>,
    /// No more will come, and why.
    ended: Option<Error>,
    /// The end was returned to the caller: it is no longer a reason to stay awake.
    told: bool,
    /// Length of the shortest payload that found no room since the last park.
    refused_bytes: Option<usize>,
    closing: Closing,
    /// Bytes of all frames that were committed.
    committed: u64,
    /// Something was handed to the system since the peer's host was last seen to have everything.
    awaits_answer: bool,
    /// What a poller has seen, if one watches.
    news: Option<News>,
    /// The socket had no more when it was last read.
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

impl TcpLink {
    /// Takes over a connected, non-blocking socket. `place` is for messages.
    pub(crate) fn new(socket: Fd, max_payload_bytes: usize, place: String) -> TcpLink {
        let buffer = || Buffer::new(BUFFER_BYTES + record_bytes(max_payload_bytes));
        TcpLink {
            socket,
            out: buffer(),
            inn: buffer(),
            reserved: None,
            found: None,
            shown: false,
            max_payload_bytes,
            place,
            deaf: None,
            ended: None,
            told: false,
            refused_bytes: None,
            closing: Closing::Open,
            committed: 0,
            awaits_answer: false,
            news: None,
            is_empty: false,
            system_calls: Cell::new(0),
        }
    }

    /// Whether the socket holds nothing, as far as the poller has seen: an event follows whatever comes after it was read.
    fn is_known_empty(&mut self) -> bool {
        let Some(news) = &self.news else { return false };
        if news.take() {
            self.is_empty = false;
        }
        self.is_empty && !news.has_hung_up()
    }

    fn guard_fork(&self) -> Result<()> {
        if self.socket.is_ours() { Ok(()) } else { Err(Error::internal("the link belongs to the parent process")) }
    }

    fn lost(&self, why: &str) -> Error {
        Error::peer_lost(format!("{}: {why}", self.place))
    }

    /// Sends what the socket takes.
    fn push(&mut self) {
        while self.out.len() > 0 && self.deaf.is_none() {
            let bytes = &self.out.bytes()[self.out.start..self.out.end];
            self.system_calls.set(self.system_calls.get() + 1);
            match rustix::net::send(&self.socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => {
                    self.out.start += sent;
                    self.awaits_answer = true;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(why) => {
                    self.deaf = Some(self.lost(&format!("sending failed: {why}")));
                }
            }
        }
        if self.closing == Closing::Wanted {
            self.closing = Closing::Done;
            let _ = rustix::net::shutdown(&self.socket, Shutdown::Write);
        }
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
        if self.inn.len() < WORD {
            return Ok(false);
        }
        let word = self.inn.words[self.inn.start / WORD];
        let Some(len) = payload_bytes_of(u64::from_le(word)).filter(|&len| len <= self.max_payload_bytes) else {
            let error = Error::protocol(format!("{}: the stream holds what cannot be a frame", self.place));
            self.told = true;
            return Err(self.ended.insert(error).clone());
        };
        if self.inn.len() < record_bytes(len) {
            return Ok(false);
        }
        self.found = Some(len);
        Ok(true)
    }

    /// One read into the free part of the buffer, which always has room for the rest of the frame that has begun.
    fn fill(&mut self) {
        // Less than one frame is buffered when more is read, so there is room for the rest of it.
        self.inn.make_room(record_bytes(self.max_payload_bytes));
        let end = self.inn.end;
        let asked = self.inn.capacity() - end;
        let read = loop {
            let room = &mut self.inn.bytes_mut()[end..];
            self.system_calls.set(self.system_calls.get() + 1);
            match rustix::net::recv(&self.socket, room, RecvFlags::DONTWAIT) {
                Err(Errno::INTR) => {}
                other => break other,
            }
        };
        match read {
            Ok((0, _)) => {
                let inside = if self.inn.len() > 0 { " in the middle of a frame" } else { "" };
                self.ended = Some(self.lost(&format!("the peer has closed the connection{inside}")));
            }
            Ok((count, _)) => {
                self.inn.end += count;
                // A hang-up that came with the last bytes has been seen by the poller, too, or will be.
                self.is_empty = count < asked;
            }
            Err(Errno::AGAIN) => self.is_empty = true,
            Err(why) => self.ended = Some(self.lost(&format!("receiving failed: {why}"))),
        }
    }

    /// The limit is what is buffered and not what a frame adds: the buffer has room for one longest frame beyond it.
    fn has_room(&self, payload_bytes: usize) -> bool {
        self.out.len() <= BUFFER_BYTES && self.out.has_room(record_bytes(payload_bytes))
    }

    /// Bytes that the system holds and the peer's host has not acknowledged.
    fn unacknowledged(&self) -> u64 {
        let mut bytes: libc::c_int = 0;
        // SAFETY: the request stores one `int` where the pointer says, and the descriptor is ours.
        let result = unsafe { libc::ioctl(self.socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
        let bytes = if result == 0 { u64::try_from(bytes).unwrap_or(0) } else { 0 };
        // The end of the stream counts as a byte.
        bytes.saturating_sub(u64::from(self.closing == Closing::Done))
    }

    /// How often the system has repeated what is under way, or asked for room, since the host last answered; and when it
    /// last did.
    fn repeats(&self) -> Option<(u8, Duration)> {
        // SAFETY: the struct is plain integers, of which zero is a value.
        let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
        let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
        let fd = self.socket.as_fd().as_raw_fd();
        // SAFETY: the kernel stores at most `len` bytes into `info`, and any bytes are valid there.
        let result =
            unsafe { libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut info).cast(), &mut len) };
        let repeats = info.tcpi_retransmits.max(info.tcpi_probes);
        (result == 0).then(|| (repeats, Duration::from_millis(u64::from(info.tcpi_last_ack_recv))))
    }

    fn report_end(&mut self) -> Result<()> {
        let Some(ended) = &self.ended else { return Ok(()) };
        self.told = true;
        Err(ended.clone())
    }
}

// SAFETY: while a frame is shown, `poll_frame` does not fill the buffer that it lies in; sending uses another one.
unsafe impl Link for TcpLink {
    fn max_payload_bytes(&self) -> usize {
        self.max_payload_bytes
    }

    fn try_reserve(&mut self, payload_bytes: usize) -> Result<Option<Place<'_>>> {
        self.guard_fork()?;
        if payload_bytes > self.max_payload_bytes || self.closing != Closing::Open {
            return Err(Error::internal(format!(
                "a payload of {payload_bytes} bytes on a link that takes {} and is {}",
                self.max_payload_bytes,
                if self.closing == Closing::Open { "open" } else { "closed" }
            )));
        }
        if !self.has_room(payload_bytes) {
            self.push();
        }
        if let Some(deaf) = &self.deaf {
            return Err(deaf.clone());
        }
        if !self.has_room(payload_bytes) {
            self.refused_bytes = Some(self.refused_bytes.map_or(payload_bytes, |shorter| shorter.min(payload_bytes)));
            return Ok(None);
        }
        self.out.make_room(record_bytes(payload_bytes));
        // Records begin at multiples of a word even when the kernel has taken part of one: only `start` is odd then.
        let at = self.out.end;
        self.out.bytes_mut()[at..at + WORD].copy_from_slice(&word_of(payload_bytes).to_le_bytes());
        self.reserved = Some(payload_bytes);
        let record = &mut self.out.bytes_mut()[at + WORD..at + PAYLOAD_AT + payload_bytes];
        Ok(record.split_first_chunk_mut().map(|(head, payload)| Place { head, payload }))
    }

    fn commit(&mut self) {
        let Some(len) = self.reserved.take() else { return };
        let (from, to) = (self.out.end + PAYLOAD_AT + len, self.out.end + record_bytes(len));
        self.out.bytes_mut()[from..to].fill(0);
        self.out.end = to;
        self.committed += record_bytes(len) as u64;
        if self.out.len() >= EAGER_BYTES && self.guard_fork().is_ok() {
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
        let record = &self.inn.bytes()[self.inn.start + WORD..self.inn.start + PAYLOAD_AT + len];
        Ok(record.split_first_chunk().map(|(head, payload)| Frame { head, payload }))
    }

    fn release(&mut self) {
        if std::mem::take(&mut self.shown)
            && let Some(len) = self.found.take()
        {
            self.inn.start += record_bytes(len);
        }
    }

    fn flush(&mut self) -> Result<bool> {
        self.guard_fork()?;
        self.push();
        self.deaf.clone().map_or(Ok(self.out.len() == 0), Err)
    }

    fn prepare_park(&mut self, wants_room: bool) -> bool {
        if self.guard_fork().is_err() {
            return true;
        }
        let was_deaf = self.deaf.is_some();
        self.push();
        // A read that found less than the buffer has room for has emptied the socket: whatever comes next is an edge, which ends
        // the sleep that follows if nobody has seen it yet. One that filled the buffer has brought a whole frame.
        let news = self.poll_frame() != Ok(false)
            || (self.ended.is_some() && !self.told)
            || (self.deaf.is_some() && !was_deaf);
        news || (wants_room
            && self.deaf.is_none()
            && self.has_room(self.refused_bytes.unwrap_or(self.max_payload_bytes)))
    }

    fn unpark(&mut self) {
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
        if self.deaf.is_some() || self.guard_fork().is_err() {
            return true;
        }
        self.push();
        self.committed - self.out.len() as u64 >= position + self.unacknowledged()
    }

    fn awaits_answer(&self) -> bool {
        self.awaits_answer
    }

    fn answers(&mut self) -> Answers {
        if !self.awaits_answer || self.guard_fork().is_err() {
            return Answers::Complete;
        }
        if self.unacknowledged() == 0 && self.out.len() == 0 {
            self.awaits_answer = false;
            return Answers::Complete;
        }
        match self.repeats() {
            // A window that is closed is asked for again and again; a host that is there answers that.
            Some((repeats, since)) if repeats >= REPEATS => Answers::Overdue(since),
            Some(_) | None => Answers::Awaited,
        }
    }

    fn look_again(&mut self) {
        self.is_empty = false;
    }

    fn system_calls(&self) -> u64 {
        self.system_calls.get()
    }

    fn transport(&self) -> &'static str {
        "tcp"
    }

    fn describe(&self) -> String {
        format!("tcp {}", self.place)
    }
}

impl Watched for TcpLink {
    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.socket.as_fd()]
    }

    fn set_news(&mut self, news: News) {
        self.news = Some(news);
    }
}

impl Drop for TcpLink {
    fn drop(&mut self) {
        self.close();
        for _ in 0..LINGER_STEPS {
            // Whoever has gone reads nothing more.
            if self.closing != Closing::Wanted || self.deaf.is_some() || self.ended.is_some() {
                break;
            }
            let _ = poll(&mut [PollFd::new(&self.socket, PollFlags::OUT)], Some(&LINGER_STEP));
            self.push();
        }
        if self.guard_fork().is_ok() {
            // Closing a socket with unread bytes would reset the connection and take our last frames with it.
            self.inn.start = self.inn.end;
            while self.ended.is_none() && self.inn.len() == 0 {
                self.fill();
                if self.inn.len() == 0 {
                    break;
                }
                self.inn.start = self.inn.end;
            }
        }
    }
}
