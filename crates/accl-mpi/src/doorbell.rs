//! The doorbell of a link: words between its two ends over the socket of the bootstrap connection, with which
//! a process can sleep without polling MPI.
//!
//! Owns the socket's bytes and the frame counts in them. A process that goes to sleep reports how many frames it has
//! received. A process that sends to a sleeping peer rings, with the number of frames that it has sent. Either word may
//! arrive late or twice; the counts show whether frames are in flight. Knows nothing of MPI.

use std::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

/// Bytes of a word: its kind and a number of frames.
const WORD_BYTES: usize = 8;
/// Room for more words than can be waiting.
const PEEKED_BYTES: usize = 64 * WORD_BYTES;
/// The sender of this word sleeps and has received this number of frames.
const ASLEEP: u8 = 1;
/// This number of frames was sent to the peer, which had reported that it sleeps.
const RING: u8 = 2;
/// This number of frames was sent, and no more will follow.
const END: u8 = 3;
/// Time for which frames of a dead peer may still arrive.
const LAST_FRAMES: Duration = Duration::from_millis(20);

/// One end of the doorbell.
#[derive(Debug)]
pub(crate) struct Doorbell {
    socket: c_int,
    /// The first bytes of an incomplete word.
    begun: Vec<u8>,
    /// Bytes that the socket has not accepted yet.
    unsent: Vec<u8>,
    /// Number of frames that the peer had received when it went to sleep; `None` if it is awake.
    peer_asleep: Option<u32>,
    /// The frame count of the sleep for which the peer was last rung.
    rung_for: Option<u32>,
    /// Whether the peer knows that this side sleeps.
    has_reported: bool,
    /// Number of sent frames that the peer has announced.
    announced: u32,
    /// Whether the peer has announced that no more frames will follow.
    has_said_end: bool,
    /// Time at which the end of the socket was found; `None` while it is open.
    gone: Option<Instant>,
}

impl Doorbell {
    pub(crate) fn new(socket: c_int) -> Doorbell {
        Doorbell {
            socket,
            begun: Vec::new(),
            unsent: Vec::new(),
            peer_asleep: None,
            rung_for: None,
            has_reported: false,
            announced: 0,
            has_said_end: false,
            gone: None,
        }
    }

    /// Rings if the peer sleeps and has received fewer frames than `sent`.
    pub(crate) fn ring(&mut self, sent: u32) {
        if let Some(had) = self.peer_asleep.filter(|&had| had != sent) {
            self.peer_asleep = None;
            // The peer cannot go to sleep again with this count, because it will receive more frames.
            self.rung_for = Some(had);
            self.say(RING, sent);
        }
    }

    /// Reports that this side sleeps, unless the peer knows it.
    pub(crate) fn report_sleep(&mut self, received: u32) {
        if !std::mem::replace(&mut self.has_reported, true) {
            self.say(ASLEEP, received);
        }
    }

    pub(crate) fn report_end(&mut self, sent: u32) {
        self.say(END, sent);
    }

    /// Whether frames that the peer has announced are still in flight.
    pub(crate) fn announces_more_than(&self, received: u32) -> bool {
        // Both counters wrap around.
        (self.announced.wrapping_sub(received) as i32) > 0
    }

    /// Whether the peer has announced `received` frames as its last.
    pub(crate) fn ends_with(&self, received: u32) -> bool {
        self.has_said_end && self.announced == received
    }

    /// Whether the peer's process has ended without disconnecting.
    pub(crate) fn has_died(&self) -> bool {
        self.gone.is_some() && !self.has_said_end
    }

    /// Whether the peer died more than `LAST_FRAMES` ago, so that none of its frames are in flight.
    pub(crate) fn is_silent(&self) -> bool {
        self.has_died() && self.gone.is_some_and(|since| since.elapsed() >= LAST_FRAMES)
    }

    /// Checks whether the peer sleeps, but leaves its words in the socket for the thread that waits on it. That wait is
    /// edge-triggered: words that another thread has already read would not wake it.
    pub(crate) fn listen_for_sleep(&mut self) {
        let mut bytes = [0; PEEKED_BYTES];
        // SAFETY: the socket stays open until the link is destroyed, and the link owns this `Doorbell`.
        let socket = unsafe { BorrowedFd::borrow_raw(self.socket) };
        // The thread that reads the words finds an end or an error.
        let Ok((count, _)) = recv(socket, &mut bytes[..], RecvFlags::DONTWAIT | RecvFlags::PEEK) else { return };
        let said: Vec<u8> = self.begun.iter().chain(&bytes[..count.min(bytes.len())]).copied().collect();
        let asleep = said.chunks_exact(WORD_BYTES).filter(|word| word[0] == ASLEEP).map(count_of).next_back();
        if let Some(had) = asleep.filter(|&had| self.rung_for != Some(had)) {
            self.peer_asleep = Some(had);
        }
    }

    /// Reads the peer's words.
    pub(crate) fn receive(&mut self) {
        self.push();
        let mut bytes = [0; 16 * WORD_BYTES];
        while self.gone.is_none() {
            // SAFETY: the socket stays open until the link is destroyed, and the link owns this `Doorbell`.
            let socket = unsafe { BorrowedFd::borrow_raw(self.socket) };
            match recv(socket, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => self.gone = Some(Instant::now()),
                Ok((count, _)) => {
                    self.begun.extend_from_slice(&bytes[..count.min(bytes.len())]);
                    self.read_words();
                    if count < bytes.len() {
                        break;
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_) => self.gone = Some(Instant::now()),
            }
        }
    }

    fn read_words(&mut self) {
        let whole = self.begun.len() / WORD_BYTES * WORD_BYTES;
        let words: Vec<u8> = self.begun.drain(..whole).collect();
        for word in words.chunks_exact(WORD_BYTES) {
            let count = count_of(word);
            match word[0] {
                // This side has already rung for this sleep, before it read the word.
                ASLEEP if self.rung_for == Some(count) => {}
                ASLEEP => self.peer_asleep = Some(count),
                RING => (self.announced, self.has_reported) = (count, false),
                END => (self.announced, self.has_said_end) = (count, true),
                // A word of a newer version, which this version may ignore.
                _ => {}
            }
        }
    }

    fn say(&mut self, what: u8, count: u32) {
        let mut word = [what, 0, 0, 0, 0, 0, 0, 0];
        word[4..].copy_from_slice(&count.to_le_bytes());
        self.unsent.extend_from_slice(&word);
        self.push();
    }

    /// Sends pending words. The rest is sent at the next call if the socket does not accept them all.
    pub(crate) fn push(&mut self) {
        while !self.unsent.is_empty() {
            // SAFETY: the socket stays open until the link is destroyed, and the link owns this `Doorbell`.
            let socket = unsafe { BorrowedFd::borrow_raw(self.socket) };
            match send(socket, &self.unsent, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(count) => {
                    self.unsent.drain(..count);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                // A peer that is gone receives nothing. Reading, not sending, finds out that it is gone.
                Err(_) => self.unsent.clear(),
            }
        }
    }

    /// Whether words are still pending.
    pub(crate) fn is_stuck(&self) -> bool {
        !self.unsent.is_empty()
    }
}

/// The number of frames in a word.
fn count_of(word: &[u8]) -> u32 {
    u32::from_le_bytes([word[4], word[5], word[6], word[7]])
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn pair() -> (UnixStream, UnixStream, Doorbell, Doorbell) {
        let (one, other) = UnixStream::pair().unwrap();
        for side in [&one, &other] {
            side.set_nonblocking(true).unwrap();
        }
        let bells = (Doorbell::new(one.as_raw_fd()), Doorbell::new(other.as_raw_fd()));
        (one, other, bells.0, bells.1)
    }

    #[test]
    fn who_sleeps_is_rung_once_for_what_it_lacks() {
        let (_one, _other, mut sleeper, mut sender) = pair();
        sleeper.report_sleep(3);
        sleeper.report_sleep(3);
        sender.receive();
        sender.ring(3);
        sleeper.receive();
        assert!(!sleeper.announces_more_than(3), "it has all that was sent");
        sender.ring(4);
        sender.ring(5);
        sleeper.receive();
        assert!(sleeper.announces_more_than(3) && !sleeper.announces_more_than(4), "the second one finds it awake");
        sleeper.report_sleep(4);
        sender.receive();
        sender.ring(5);
        sleeper.receive();
        assert!(sleeper.announces_more_than(4), "what was sent before it slept is reported, too");
    }

    #[test]
    fn who_sends_wakes_a_sleeper_once_and_leaves_what_was_said_to_who_listens() {
        let (_one, _other, mut sleeper, mut sender) = pair();
        sleeper.report_sleep(3);
        // This word must wake the sender's own waiting thread.
        sleeper.peer_asleep = Some(0);
        sleeper.ring(9);
        for sent in 4..7 {
            sender.listen_for_sleep();
            sender.ring(sent);
        }
        assert!(!sender.announces_more_than(0), "it has taken in nothing");
        sleeper.receive();
        assert!(sleeper.announces_more_than(3) && !sleeper.announces_more_than(4), "it is rung once");
        sender.receive();
        assert!(sender.announces_more_than(8) && sender.peer_asleep.is_none());
        sleeper.report_sleep(6);
        sender.listen_for_sleep();
        sender.ring(7);
        sleeper.receive();
        assert!(sleeper.announces_more_than(6), "its next sleep is another one");
    }

    #[test]
    fn counts_go_around() {
        let (_one, _other, mut sleeper, mut sender) = pair();
        sleeper.report_sleep(u32::MAX);
        sender.receive();
        sender.ring(0);
        sleeper.receive();
        assert!(sleeper.announces_more_than(u32::MAX));
    }

    #[test]
    fn an_end_without_a_word_is_a_death() {
        let (_one, other, mut doorbell, mut peer) = pair();
        peer.report_end(7);
        drop(other);
        doorbell.receive();
        assert!(!doorbell.has_died() && doorbell.announces_more_than(6));
        let (_one, other, mut doorbell, _) = pair();
        drop(other);
        doorbell.receive();
        assert!(doorbell.has_died() && !doorbell.is_silent());
        std::thread::sleep(LAST_FRAMES);
        assert!(doorbell.is_silent());
    }
}
