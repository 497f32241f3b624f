//! Connections that peers make to this process, from accept to confirmation.
//!
//! Owns the accepting half of the handshake. A stranger (port scanner, browser) is dropped at its first wrong byte or
//! after a while, and disturbs no peer.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::SocketFlags;

use super::identity::Identity;
use super::route::keep_alive;
use super::stream::Stream;
use super::wire::{CONFIRM_BYTES, GREETING_BYTES, Hello, Note, Refusal, Reply, Verdict, confirm_bytes};
use crate::Watched;
use crate::credentials::peer_uid;
use crate::fork::Fd;
use crate::transport::{Agreed, Bootstrap, HalfLink, PeerAddress};
use accl_wire::{PROTOCOL_VERSION, Stance};

/// A connection that sends nothing is dropped after this long.
const HELLO_TIME: Duration = Duration::from_secs(10);
/// A connection whose confirmation is missing is dropped after this long. A peer that has the reply confirms at once,
/// unless it is stopped.
const CONFIRM_TIME: Duration = Duration::from_secs(60);

/// Answers peers that connect.
pub trait Host {
    /// Returns this process's stance towards a peer that greets one of its lanes. Counts only links that were taken
    /// from the endpoint.
    fn stance_to(&mut self, lane: u32, peer: &[u8; 16]) -> Stance;

    /// Returns the answer to a note for a lane, in at most [`super::MAX_ANSWER_BYTES`]; see
    /// [`super::Endpoint::send_note`].
    fn on_note(&mut self, lane: u32, from: &[u8; 16], note: &[u8]) -> String;
}

/// A link that a peer made, and the peer's identity.
pub(super) struct Accepted {
    /// The lane that the peer has greeted.
    pub(super) lane: u32,
    pub(super) from: [u8; 16],
    pub(super) link: Box<dyn Watched>,
}

/// A connection whose handshake is in progress.
pub(super) struct Incoming {
    stream: Stream,
    bootstrap: Bootstrap,
    since: Instant,
    /// Whether the socket may be read. Reading from a Unix socket can bring descriptors, so the peer's user is checked
    /// first.
    is_known: bool,
    promised: Option<Promised>,
}

/// A half link that is ready and waits for the confirmation.
struct Promised {
    lane: u32,
    from: [u8; 16],
    own_nonce: u64,
    max_payload_bytes: usize,
    peer: String,
    half: Box<dyn HalfLink>,
}

/// Result of polling a connection.
pub(super) enum Handshake {
    Wait(Box<Incoming>),
    Drop,
    Done(Accepted),
}

/// Accepts one connection from a listener's queue. `None`: the queue is empty, or the queued connection has failed.
pub(super) fn accept(listener: &Fd, bootstrap: Bootstrap, now: Instant) -> Result<Option<Incoming>, Errno> {
    let make = || -> Result<OwnedFd, Errno> {
        rustix::net::accept_with(listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC)
    };
    match Fd::adopt(make) {
        Ok(socket) => {
            if bootstrap == Bootstrap::Tcp {
                keep_alive(&socket);
            }
            let stream = Stream::new(socket);
            Ok(Some(Incoming { stream, bootstrap, since: now, is_known: false, promised: None }))
        }
        Err(Errno::AGAIN) => Ok(None),
        // Errors of the queued connection, not of the listener.
        Err(Errno::CONNABORTED | Errno::INTR | Errno::PROTO | Errno::PERM | Errno::NETDOWN | Errno::HOSTUNREACH) => {
            Ok(None)
        }
        Err(why) => Err(why),
    }
}

impl Incoming {
    pub(super) fn socket(&self) -> &Fd {
        &self.stream.socket
    }

    /// Processes what has arrived.
    pub(super) fn poll(self, me: &Identity, now: Instant, host: &mut dyn Host) -> Handshake {
        let step = if self.promised.is_some() { self.conclude() } else { self.greet(me, host) };
        match step {
            Ok(Handshake::Wait(this)) if now.saturating_duration_since(this.since) > this.limit() => Handshake::Drop,
            Ok(step) => step,
            // The other side has gone or is no peer, so there is no process to report to.
            Err(_) => Handshake::Drop,
        }
    }

    /// Returns the peer that was promised a link. Its greeting has proved its identity.
    pub(super) fn promised_to(&self) -> Option<[u8; 16]> {
        self.promised.as_ref().map(|promised| promised.from)
    }

    pub(super) fn is_promised(&self) -> bool {
        self.promised.is_some()
    }

    fn limit(&self) -> Duration {
        if self.promised.is_some() { CONFIRM_TIME } else { HELLO_TIME }
    }

    fn greet(mut self, me: &Identity, host: &mut dyn Host) -> Result<Handshake, String> {
        if !self.is_known {
            if let Some(why) = self.is_refused(me)? {
                return self.refuse(Verdict::Refused, 0, me, why);
            }
            self.is_known = true;
        }
        let is_note = |bytes: &[u8]| Note::check_prefix(bytes).is_ok();
        let hello = match self.stream.read::<GREETING_BYTES>() {
            Ok(Some(bytes)) if is_note(&bytes) => return self.answer_note(&bytes, me, host),
            Ok(Some(bytes)) => Hello::parse(&bytes).map(Some),
            Ok(None) if is_note(self.stream.prefix()) => Ok(None),
            Ok(None) => Hello::check_prefix(self.stream.prefix()).map(|()| None),
            Err(why) => return Err(why),
        };
        match hello {
            Ok(None) => Ok(Handshake::Wait(Box::new(self))),
            Ok(Some(hello)) => self.answer(&hello, me, host),
            Err(Refusal::Stranger) => Err("a stranger".to_owned()),
            Err(Refusal::Version(version)) => self.refuse(
                Verdict::Refused,
                0,
                me,
                format!("it has protocol version {PROTOCOL_VERSION}, this process {version}"),
            ),
        }
    }

    /// Answers a note, and drops the connection.
    fn answer_note(
        self,
        bytes: &[u8; GREETING_BYTES],
        me: &Identity,
        host: &mut dyn Host,
    ) -> Result<Handshake, String> {
        let note = Note::parse(bytes).map_err(|_| "a stranger".to_owned())?;
        let Some(lane) = me.lane_of(&note.to) else {
            return self.refuse(Verdict::NotHere, 0, me, "another process listens at this address".to_owned());
        };
        let answer = host.on_note(lane, &note.from, &note.text);
        self.refuse(Verdict::Accepted, 0, me, answer)
    }

    /// Returns the reason why nothing of this connection may be read, if so. The check comes first because the kernel
    /// passes descriptors with the first bytes.
    fn is_refused(&self, me: &Identity) -> Result<Option<String>, String> {
        if self.bootstrap != Bootstrap::Unix {
            return Ok(None);
        }
        let uid = peer_uid(&self.stream.socket)?;
        Ok((uid != me.uid).then(|| format!("it belongs to user {}, this process to user {uid}", me.uid)))
    }

    fn answer(mut self, hello: &Hello, me: &Identity, host: &mut dyn Host) -> Result<Handshake, String> {
        let Some(lane) = me.lane_of(&hello.to) else {
            return self.refuse(
                Verdict::NotHere,
                hello.nonce,
                me,
                "another process listens at this address".to_owned(),
            );
        };
        let opened = me.provider(lane, &hello.transport).filter(|opened| opened.row.bootstrap == self.bootstrap);
        let Some(opened) = opened.filter(|_| me.lane_of(&hello.from).is_none()) else {
            return self.refuse(
                Verdict::Refused,
                hello.nonce,
                me,
                "it does not accept this transport from this process".to_owned(),
            );
        };
        match host.stance_to(lane, &hello.from) {
            Stance::Unlinked => {}
            Stance::Linked | Stance::Crossing => {
                return self.refuse(
                    Verdict::Crossing,
                    hello.nonce,
                    me,
                    "it already has a link to this process, or is making one".to_owned(),
                );
            }
            Stance::GivenUp => {
                return self.refuse(Verdict::GivenUp, hello.nonce, me, "it considers this process lost".to_owned());
            }
        }
        let max_payload_bytes = me.max_payload_bytes.min(hello.max_payload_bytes as usize);
        let descriptors = std::mem::take(&mut self.stream.fds);
        let address = PeerAddress { bytes: hello.address.clone(), descriptors };
        let mut half = match opened.provider.accept(address, max_payload_bytes) {
            Ok(half) => half,
            Err(why) => return self.refuse(Verdict::Refused, hello.nonce, me, why),
        };
        let own_nonce = me.nonce();
        let address = half.address();
        let reply = Reply {
            verdict: Verdict::Accepted,
            nonce: hello.nonce,
            own_nonce,
            max_payload_bytes: max_payload_bytes as u32,
            body: address.bytes,
        };
        self.stream.write(&reply.to_bytes(), &address.descriptors)?;
        half.forget_address();
        let peer = format!("{} pid {}", hello.hostname, hello.pid);
        self.promised = Some(Promised { lane, from: hello.from, own_nonce, max_payload_bytes, peer, half });
        self.conclude()
    }

    /// Sends the only reply to this connection.
    fn refuse(self, verdict: Verdict, nonce: u64, me: &Identity, why: String) -> Result<Handshake, String> {
        let max_payload_bytes = me.max_payload_bytes as u32;
        let reply = Reply { verdict, nonce, own_nonce: 0, max_payload_bytes, body: why.clone().into_bytes() };
        self.stream.write(&reply.to_bytes(), &[])?;
        Err(why)
    }

    fn conclude(mut self) -> Result<Handshake, String> {
        let Some(bytes) = self.stream.read::<CONFIRM_BYTES>()? else { return Ok(Handshake::Wait(Box::new(self))) };
        let Some(promised) = self.promised.filter(|p| bytes == confirm_bytes(p.own_nonce)) else {
            return Err("the confirmation is wrong".to_owned());
        };
        let Promised { lane, from, max_payload_bytes, peer, half, .. } = promised;
        let link = half.finish(Agreed { socket: self.stream.socket, max_payload_bytes, peer })?;
        Ok(Handshake::Done(Accepted { lane, from, link }))
    }
}
