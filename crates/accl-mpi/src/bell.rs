//! The doorbell of a link: what its two ends say over the carrier's socket, so that a process may sleep without asking MPI.
//!
//! Owns the socket's bytes and the counts of frames that they carry. Who sleeps leaves word how many frames it has; who sends to it rings,
//! with the number that it has sent. Both may say it late or twice: the numbers tell whether something is under way. Knows nothing of MPI.

use std::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

/// What is said: a word and a number of frames, 8 bytes.
const WORD_BYTES: usize = 8;
/// More words than wait to be heard.
const PEEKED_BYTES: usize = 64 * WORD_BYTES;
/// The peer sleeps and has taken in so many frames.
const ASLEEP: u8 = 1;
/// So many frames were sent to the peer, which had said that it sleeps.
const RING: u8 = 2;
/// So many frames were sent, and there will be no more.
const END: u8 = 3;
/// What a peer that has died had sent may arrive for so long.
const LAST_FRAMES: Duration = Duration::from_millis(20);

/// One end.
#[derive(Debug)]
pub(crate) struct Bell {
    socket: c_int,
    /// The first bytes of a word.
    begun: Vec<u8>,
    /// Bytes that the socket has not taken.
    unsaid: Vec<u8>,
    /// The peer sleeps, and had so many frames then.
    peer_asleep: Option<u32>,
    /// Of which sleep it was woken last.
    rung_for: Option<u32>,
    /// The peer knows that this side sleeps.
    has_told: bool,
    /// How many frames the peer has sent, as far as it has said.
    announced: u32,
    /// The peer has said that there will be no more.
    has_said_end: bool,
    /// Since when the socket has been at its end.
    gone: Option<Instant>,
}

impl Bell {
    pub(crate) fn new(socket: c_int) -> Bell {
        Bell {
            socket,
            begun: Vec::new(),
            unsaid: Vec::new(),
            peer_asleep: None,
            rung_for: None,
            has_told: false,
            announced: 0,
            has_said_end: false,
            gone: None,
        }
    }

    /// Rings if the peer sleeps and has fewer frames than were sent.
    pub(crate) fn ring(&mut self, sent: u32) {
        if let Some(had) = self.peer_asleep.filter(|&had| had != sent) {
            self.peer_asleep = None;
            // It sleeps with so many frames no second time: it gets more.
            self.rung_for = Some(had);
            self.say(RING, sent);
        }
    }

    /// Leaves word that this side sleeps, unless the peer knows.
    pub(crate) fn tell_asleep(&mut self, received: u32) {
        if !std::mem::replace(&mut self.has_told, true) {
            self.say(ASLEEP, received);
        }
    }

    pub(crate) fn tell_end(&mut self, sent: u32) {
        self.say(END, sent);
    }

    /// Whether frames are under way that the peer has spoken of.
    pub(crate) fn announces_more_than(&self, received: u32) -> bool {
        // Both count around.
        (self.announced.wrapping_sub(received) as i32) > 0
    }

    /// Whether the peer has sent so many frames and will send no more.
    pub(crate) fn ends_with(&self, received: u32) -> bool {
        self.has_said_end && self.announced == received
    }

    /// Whether the peer's process has ended without a word.
    pub(crate) fn has_died(&self) -> bool {
        self.gone.is_some() && !self.has_said_end
    }

    /// Whether it has, so long ago that nothing of it is under way.
    pub(crate) fn is_silent(&self) -> bool {
        self.has_died() && self.gone.is_some_and(|since| since.elapsed() >= LAST_FRAMES)
    }

    /// Looks whether the peer sleeps, and leaves what it has said to who listens: a thread that sleeps until the socket has an edge would not be
    /// woken by words that somebody else has taken in.
    pub(crate) fn listen_for_sleep(&mut self) {
        let mut bytes = [0; PEEKED_BYTES];
        // SAFETY: the socket stays open until the link is destroyed, and this with it.
        let socket = unsafe { BorrowedFd::borrow_raw(self.socket) };
        // An end, or an error, is found out by who takes in what was said.
        let Ok((count, _)) = recv(socket, &mut bytes[..], RecvFlags::DONTWAIT | RecvFlags::PEEK) else { return };
        let said: Vec<u8> = self.begun.iter().chain(&bytes[..count.min(bytes.len())]).copied().collect();
        let asleep = said.chunks_exact(WORD_BYTES).filter(|word| word[0] == ASLEEP).map(count_of).next_back();
        if let Some(had) = asleep.filter(|&had| self.rung_for != Some(had)) {
            self.peer_asleep = Some(had);
        }
    }

    /// Takes in what the peer has said.
    pub(crate) fn hear(&mut self) {
        self.push();
        let mut bytes = [0; 16 * WORD_BYTES];
        while self.gone.is_none() {
            // SAFETY: the socket stays open until the link is destroyed, and this with it.
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
                // It was rung for that already, unheard.
                ASLEEP if self.rung_for == Some(count) => {}
                ASLEEP => self.peer_asleep = Some(count),
                RING => (self.announced, self.has_told) = (count, false),
                END => (self.announced, self.has_said_end) = (count, true),
                // A newer version's, which this one can do without.
                _ => {}
            }
        }
    }

    fn say(&mut self, what: u8, count: u32) {
        let mut word = [what, 0, 0, 0, 0, 0, 0, 0];
        word[4..].copy_from_slice(&count.to_le_bytes());
        self.unsaid.extend_from_slice(&word);
        self.push();
    }

    /// Says what was not said; what finds no room is said the next time.
    pub(crate) fn push(&mut self) {
        while !self.unsaid.is_empty() {
            // SAFETY: the socket stays open until the link is destroyed, and this with it.
            let socket = unsafe { BorrowedFd::borrow_raw(self.socket) };
            match send(socket, &self.unsaid, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(count) => {
                    self.unsaid.drain(..count);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                // Whoever is gone hears nothing; that it is gone is heard, not said.
                Err(_) => self.unsaid.clear(),
            }
        }
    }

    /// Whether something is left to be said.
    pub(crate) fn is_stuck(&self) -> bool {
        !self.unsaid.is_empty()
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

    fn pair() -> (UnixStream, UnixStream, Bell, Bell) {
        let (one, other) = UnixStream::pair().unwrap();
        for side in [&one, &other] {
            side.set_nonblocking(true).unwrap();
        }
        let bells = (Bell::new(one.as_raw_fd()), Bell::new(other.as_raw_fd()));
        (one, other, bells.0, bells.1)
    }

    #[test]
    fn who_sleeps_is_rung_once_for_what_it_lacks() {
        let (_one, _other, mut sleeper, mut sender) = pair();
        sleeper.tell_asleep(3);
        sleeper.tell_asleep(3);
        sender.hear();
        sender.ring(3);
        sleeper.hear();
        assert!(!sleeper.announces_more_than(3), "it has all that was sent");
        sender.ring(4);
        sender.ring(5);
        sleeper.hear();
        assert!(sleeper.announces_more_than(3) && !sleeper.announces_more_than(4), "the second one finds it awake");
        sleeper.tell_asleep(4);
        sender.hear();
        sender.ring(5);
        sleeper.hear();
        assert!(sleeper.announces_more_than(4), "what was sent before it slept is told, too");
    }

    #[test]
    fn who_sends_wakes_a_sleeper_once_and_leaves_what_was_said_to_who_listens() {
        let (_one, _other, mut sleeper, mut sender) = pair();
        sleeper.tell_asleep(3);
        // What the sender's own listener is to be woken by.
        sleeper.peer_asleep = Some(0);
        sleeper.ring(9);
        for sent in 4..7 {
            sender.listen_for_sleep();
            sender.ring(sent);
        }
        assert!(!sender.announces_more_than(0), "it has taken in nothing");
        sleeper.hear();
        assert!(sleeper.announces_more_than(3) && !sleeper.announces_more_than(4), "it is rung once");
        sender.hear();
        assert!(sender.announces_more_than(8) && sender.peer_asleep.is_none());
        sleeper.tell_asleep(6);
        sender.listen_for_sleep();
        sender.ring(7);
        sleeper.hear();
        assert!(sleeper.announces_more_than(6), "its next sleep is another one");
    }

    #[test]
    fn counts_go_around() {
        let (_one, _other, mut sleeper, mut sender) = pair();
        sleeper.tell_asleep(u32::MAX);
        sender.hear();
        sender.ring(0);
        sleeper.hear();
        assert!(sleeper.announces_more_than(u32::MAX));
    }

    #[test]
    fn an_end_without_a_word_is_a_death() {
        let (_one, other, mut bell, mut peer) = pair();
        peer.tell_end(7);
        drop(other);
        bell.hear();
        assert!(!bell.has_died() && bell.announces_more_than(6));
        let (_one, other, mut bell, _) = pair();
        drop(other);
        bell.hear();
        assert!(bell.has_died() && !bell.is_silent());
        std::thread::sleep(LAST_FRAMES);
        assert!(bell.is_silent());
    }
}
