//! A link that misbehaves on purpose, the same way for the same seed. For tests of the layers above links.

use std::os::fd::BorrowedFd;

use accl_types::{Error, Result};
use accl_wire::{Answers, Frame, FrameSlot, Link};

use crate::{LinkEvents, Watched};

/// The faults to inject.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Start of the random sequence; put it into the failure message.
    pub seed: u64,
    /// Before each frame, up to this many polls find nothing.
    pub most_empty_peeks: u32,
    /// This percentage of reservations finds no room.
    pub refused_percent: u8,
    /// The link breaks after this many frames were received; `None`: never.
    pub lost_after: Option<u64>,
    /// One bit is flipped in the second half of the first received payload with at least this many bytes. `None`: no
    /// bit is flipped.
    pub flipped_from_bytes: Option<usize>,
}

/// Wraps any link and injects [`Faults`].
#[derive(Debug)]
pub struct Faulty<L> {
    /// `None` once the link has broken; the peer sees that as the death of this process.
    link: Option<L>,
    faults: Faults,
    random: u64,
    received: u64,
    /// Polls that will still find nothing, drawn when a frame arrived; `None` before.
    held: Option<u32>,
    shown: bool,
    is_reported: bool,
    /// The payload with a bit flipped while it is shown; empty otherwise.
    flipped: Vec<u64>,
    has_flipped: bool,
    name: &'static str,
    max_payload_bytes: usize,
}

impl<L: Link> Faulty<L> {
    /// Wraps `link` with `faults`.
    pub fn new(link: L, faults: Faults) -> Self {
        let (name, max_payload_bytes) = (link.transport(), link.max_payload_bytes());
        // The sequence never reaches 0, so it must not start there.
        let random = faults.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        Self {
            link: Some(link),
            faults,
            random,
            received: 0,
            held: None,
            shown: false,
            is_reported: false,
            flipped: Vec::new(),
            has_flipped: false,
            name,
            max_payload_bytes,
        }
    }

    fn next_random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random >> 11
    }

    fn broken(&self) -> Error {
        Error::peer_lost(format!("broken on purpose after {} frames (seed {})", self.received, self.faults.seed))
    }
}

/// Copies a payload into words, since payloads are aligned.
fn copy_of(payload: &[u8]) -> Vec<u64> {
    let mut word = [0; 8];
    let words = payload.chunks(8).map(|part| {
        word[..part.len()].copy_from_slice(part);
        u64::from_ne_bytes(word)
    });
    words.collect()
}

fn bytes_of(words: &[u64]) -> &[u8] {
    // SAFETY: pointer and length in bytes come from `words`, which stays borrowed, and a `u64` has no padding.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), size_of_val(words)) }
}

// SAFETY: the link inside keeps the contract of `Link`; `flipped` is unchanged while its frame is shown.
unsafe impl<L: Link> Link for Faulty<L> {
    fn max_payload_bytes(&self) -> usize {
        self.max_payload_bytes
    }

    fn try_reserve(&mut self, payload_bytes: usize) -> Result<Option<FrameSlot<'_>>> {
        let refused = self.next_random() % 100 < u64::from(self.faults.refused_percent);
        let broken = self.broken();
        match &mut self.link {
            None => Err(broken),
            Some(_) if refused => Ok(None),
            Some(link) => link.try_reserve(payload_bytes),
        }
    }

    fn commit(&mut self) {
        if let Some(link) = &mut self.link {
            link.commit();
        }
    }

    fn peek(&mut self) -> Result<Option<Frame<'_>>> {
        if self.faults.lost_after.is_some_and(|limit| self.received >= limit) {
            self.link = None;
        }
        let draw = self.next_random();
        let broken = self.broken();
        let Some(link) = &mut self.link else {
            self.is_reported = true;
            return Err(broken);
        };
        let frame = link.peek()?;
        if frame.is_none() {
            return Ok(None);
        }
        let most = u64::from(self.faults.most_empty_peeks);
        let held = self.held.get_or_insert((draw % (most + 1)) as u32);
        if *held > 0 {
            *held -= 1;
            return Ok(None);
        }
        self.shown = true;
        let Some(found) = frame else { return Ok(None) };
        let is_it = self.faults.flipped_from_bytes.is_some_and(|least| found.payload.len() >= least);
        if self.flipped.is_empty() && is_it && !self.has_flipped {
            self.has_flipped = true;
            self.flipped = copy_of(found.payload);
            let half = 4 * found.payload.len();
            let bit = half + draw as usize % half;
            self.flipped[bit / 64] ^= 1 << (bit % 64);
        }
        match self.flipped.is_empty() {
            true => Ok(Some(found)),
            false => Ok(Some(Frame { head: found.head, payload: &bytes_of(&self.flipped)[..found.payload.len()] })),
        }
    }

    fn release(&mut self) {
        if std::mem::take(&mut self.shown) {
            self.flipped.clear();
            self.held = None;
            self.received += 1;
            if let Some(link) = &mut self.link {
                link.release();
            }
        }
    }

    fn flush(&mut self) -> Result<bool> {
        let broken = self.broken();
        self.link.as_mut().map_or(Err(broken), Link::flush)
    }

    fn arm(&mut self, wants_room: bool) -> bool {
        let refuses = wants_room && self.faults.refused_percent > 0;
        match &mut self.link {
            None => !self.is_reported,
            // A refusal that was drawn is not followed by a wake-up, so the caller must poll again.
            Some(link) => link.arm(wants_room) || refuses,
        }
    }

    fn disarm(&mut self) {
        if let Some(link) = &mut self.link {
            link.disarm();
        }
    }

    fn check_peer(&mut self) -> Result<()> {
        let broken = self.broken();
        self.link.as_mut().map_or(Err(broken), Link::check_peer)
    }

    fn close(&mut self) {
        if let Some(link) = &mut self.link {
            link.close();
        }
    }

    fn position(&self) -> u64 {
        self.link.as_ref().map_or(0, Link::position)
    }

    fn is_delivered(&mut self, position: u64) -> bool {
        self.link.as_mut().is_none_or(|link| link.is_delivered(position))
    }

    fn awaits_answer(&self) -> bool {
        self.link.as_ref().is_some_and(Link::awaits_answer)
    }

    fn answers(&mut self) -> Answers {
        self.link.as_mut().map_or(Answers::Complete, Link::answers)
    }

    fn force_poll(&mut self) {
        if let Some(link) = &mut self.link {
            link.force_poll();
        }
    }

    fn abandon(&mut self) {
        if let Some(link) = &mut self.link {
            link.abandon();
        }
    }

    fn transport(&self) -> &'static str {
        self.name
    }

    fn describe(&self) -> String {
        self.link.as_ref().map_or_else(|| "broken on purpose".to_owned(), Link::describe)
    }
}

impl<L: Watched> Watched for Faulty<L> {
    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.link.as_ref().map(Watched::fds).unwrap_or_default()
    }

    fn set_events(&mut self, events: LinkEvents) -> bool {
        self.link.as_mut().is_some_and(|link| link.set_events(events))
    }
}
