//! Notes: short out-of-band messages to a process whose threads poll no link, over a connection of their own.
//!
//! Owns the sending half; the sender and the answering process define the content of a note. The thread that makes
//! links also answers notes, so notes arrive while a process does nothing else. Read [`OutgoingNote`] first.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::identity::Identity;
use super::route::{Destination, Failed, is_connected, routes};
use super::stream::Stream;
use super::wire::{Note, REPLY_BYTES, Reply, Verdict};
use crate::fork::Fd;
use accl_wire::EndpointInfo;

/// A note that has not been answered within this time is given up.
const PATIENCE: Duration = Duration::from_secs(5);

/// A note in flight.
pub(super) struct OutgoingNote {
    pub(super) token: u64,
    note: Note,
    to: EndpointInfo,
    left: VecDeque<Destination>,
    attempt: Option<Attempt>,
    until: Instant,
    why: String,
}

struct Attempt {
    stream: Stream,
    /// Whether the note has been written.
    is_sent: bool,
}

impl OutgoingNote {
    pub(super) fn new(from: &EndpointInfo, to: &EndpointInfo, text: &[u8], token: u64, now: Instant) -> Self {
        // Several transports may use the same destination, which is tried once.
        let mut left = VecDeque::new();
        for route in routes(from, to) {
            if !left.contains(&route.to) {
                left.push_back(route.to);
            }
        }
        Self {
            token,
            note: Note { from: from.uuid, to: to.uuid, text: text.to_vec() },
            to: to.clone(),
            left,
            attempt: None,
            until: now + PATIENCE,
            why: "no common transport reaches it".to_owned(),
        }
    }

    /// Makes progress. Returns the answer, or the reason why there will be none; `None` while neither is known.
    pub(super) fn poll(&mut self, me: &Identity, now: Instant) -> Option<Result<String, String>> {
        loop {
            let Some(attempt) = &mut self.attempt else {
                let Some(destination) = self.left.pop_front() else { return Some(Err(std::mem::take(&mut self.why))) };
                match self.connect(destination, me) {
                    Ok(stream) => self.attempt = Some(Attempt { stream, is_sent: false }),
                    Err(why) => self.why = why.text(),
                }
                continue;
            };
            match attempt.poll(&self.note) {
                Ok(None) if now >= self.until => return Some(Err("it does not answer".to_owned())),
                Ok(None) => return None,
                Ok(Some(answer)) => return Some(Ok(answer)),
                Err(why) => {
                    self.why = why.text();
                    self.attempt = None;
                }
            }
        }
    }

    /// Returns the socket to watch, and whether to watch it for becoming writable.
    pub(super) fn socket(&self) -> Option<(&Fd, bool)> {
        self.attempt.as_ref().map(|attempt| (&attempt.stream.socket, !attempt.is_sent))
    }

    fn connect(&self, destination: Destination, me: &Identity) -> Result<Stream, Failed> {
        let socket = destination.connect(&self.to)?;
        destination.check_peer(&socket, me.uid)?;
        Ok(Stream::new(socket))
    }
}

impl Attempt {
    fn poll(&mut self, note: &Note) -> Result<Option<String>, Failed> {
        if !self.is_sent {
            if !is_connected(&self.stream.socket)? {
                return Ok(None);
            }
            self.stream.write(&note.to_bytes(), &[])?;
            self.is_sent = true;
        }
        let Some(bytes) = self.stream.read::<REPLY_BYTES>()? else { return Ok(None) };
        match Reply::parse(&bytes) {
            Ok(reply) if reply.verdict == Verdict::Accepted => Ok(Some(reply.text())),
            Ok(reply) => Err(Failed::Refused(reply.text())),
            Err(_) => Err(Failed::Other("another program answers at this address".to_owned())),
        }
    }
}
