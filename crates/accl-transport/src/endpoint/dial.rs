//! Connections that we make: for one peer, all ways to reach it, until one of them leads to a link.
//!
//! Owns the connecting half of the handshake and the order of attempts: transports as configured; shared memory is
//! waited for as long as the peer is silent; the addresses of tcp are tried one after the other, and a slow one does
//! not hold up the next. Time comes as `now`.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use super::identity::{Identity, SHM, TCP};
use super::make::{shm_link, tcp_link};
use super::stream::{Stream, peer_uid};
use super::warnings::Trouble;
use super::wire::{Hello, REPLY_BYTES, Refusal, Reply, confirm_bytes};
use crate::fork::Fd;
use crate::shm::budget::Budget;
use crate::shm::region::{Region, region_bytes, ring_bytes_for};
use crate::{Card, PROTOCOL_VERSION, Settings, Watched};

/// An address that has not answered on the level of TCP for so long gets company by the next one.
const SLOW_CONNECT: Duration = Duration::from_millis(300);
/// The same for a connection whose other side is silent: as a rule the peer is only late.
const SLOW_REPLY: Duration = Duration::from_secs(2);
/// Pause before all ways are tried again.
const RETRY: Duration = Duration::from_millis(200);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Shm,
    Tcp(SocketAddr),
}

/// The efforts to reach one peer.
pub(super) struct Dial {
    ways: Vec<Way>,
    left: VecDeque<Way>,
    attempts: Vec<Attempt>,
    retry_at: Option<Instant>,
    /// When a call last asked for this peer.
    pub(super) asked: Instant,
    /// The last refusal, for the list of the missing.
    why: String,
    /// Why shared memory was given up or made smaller, if it was.
    shm_trouble: Option<Trouble>,
}

struct Attempt {
    way: Way,
    stream: Stream,
    stage: Stage,
    since: Instant,
    nonce: u64,
    region: Option<Region>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Connecting,
    Greeted,
}

enum Outcome {
    Wait(Attempt),
    Done(Box<dyn Watched>),
}

/// The ways from one process to another, in the order in which the first is to try them.
pub(super) fn ways(from: &Card, to: &Card) -> Vec<Way> {
    let same_host = to.host_id == from.host_id;
    let mut ways = Vec::new();
    for name in from.transports.iter().filter(|name| to.transports.contains(name)) {
        if name == "shm" && same_host && to.uid == from.uid && !to.unix_name.is_empty() {
            ways.push(Way::Shm);
        } else if name == "tcp" {
            // On one host loopback is always up; for another host it would be somebody else.
            let loopback = to.addresses.iter().filter(|a| same_host && a.ip().is_loopback());
            let outside = to.addresses.iter().filter(|a| !a.ip().is_loopback());
            ways.extend(loopback.chain(outside).map(|&address| Way::Tcp(address)));
        }
    }
    ways
}

impl Dial {
    pub(super) fn new(from: &Card, to: &Card) -> Dial {
        let ways = ways(from, to);
        Dial {
            left: ways.iter().copied().collect(),
            ways,
            attempts: Vec::new(),
            retry_at: None,
            asked: Instant::now(),
            why: String::new(),
            shm_trouble: None,
        }
    }

    /// Why there is no link yet, for the list of the missing.
    pub(super) fn state(&self) -> String {
        let waiting = self.attempts.iter().map(|attempt| match (attempt.way, attempt.stage) {
            (Way::Tcp(address), Stage::Connecting) => format!("no answer from {address} yet"),
            (Way::Tcp(address), Stage::Greeted) => format!("connected to {address}, but it does not answer yet"),
            (Way::Shm, _) => "connected, but it does not answer yet".to_owned(),
        });
        let refused = (!self.why.is_empty()).then(|| self.why.clone());
        let all: Vec<String> = waiting.chain(refused).collect();
        if all.is_empty() { "not tried yet".to_owned() } else { all.join(", ") }
    }

    /// The sockets to watch, and whether for becoming writable.
    pub(super) fn sockets(&self) -> impl Iterator<Item = (&Fd, bool)> {
        self.attempts.iter().map(|a| (&a.stream.socket, a.stage == Stage::Connecting))
    }

    /// One look at everything that is under way; starts what is due. Returns a link and what went wrong before.
    pub(super) fn poll(
        &mut self,
        card: &Card,
        me: &Identity,
        settings: &Settings,
        budget: &Budget,
        now: Instant,
    ) -> Option<(Box<dyn Watched>, Option<Trouble>)> {
        for attempt in std::mem::take(&mut self.attempts) {
            let way = attempt.way;
            match attempt.poll(card, me, settings) {
                Ok(Outcome::Wait(attempt)) => self.attempts.push(attempt),
                Ok(Outcome::Done(link)) => {
                    let trouble = match self.shm_trouble.take() {
                        // Not worth a word when shared memory works after all.
                        Some(Trouble::NoSharedMemory(_)) if way == Way::Shm => None,
                        trouble => trouble,
                    };
                    return Some((link, trouble));
                }
                Err(why) => self.note(way, why),
            }
        }
        self.start_what_is_due(card, me, settings, budget, now);
        None
    }

    fn note(&mut self, way: Way, why: String) {
        match way {
            Way::Shm => {
                self.why = format!("shared memory: {why}");
                self.shm_trouble = Some(Trouble::NoSharedMemory(why));
            }
            Way::Tcp(address) => self.why = format!("{why} ({address})"),
        }
    }

    fn start_what_is_due(&mut self, card: &Card, me: &Identity, settings: &Settings, budget: &Budget, now: Instant) {
        while self.attempts.last().is_none_or(|newest| newest.is_slow(now)) {
            let Some(way) = self.left.pop_front() else {
                if self.attempts.is_empty() {
                    self.wait_and_start_over(now);
                }
                return;
            };
            let started = match way {
                Way::Shm => self.start_shm(card, me, settings, budget, now),
                Way::Tcp(address) => start_tcp(address, me, now),
            };
            match started {
                Ok(attempt) => self.attempts.push(attempt),
                Err(why) => self.note(way, why),
            }
        }
    }

    fn wait_and_start_over(&mut self, now: Instant) {
        match self.retry_at {
            None => self.retry_at = Some(now + RETRY),
            Some(at) if at <= now => {
                self.retry_at = None;
                self.left.extend(&self.ways);
            }
            Some(_) => {}
        }
    }

    fn start_shm(
        &mut self,
        card: &Card,
        me: &Identity,
        settings: &Settings,
        budget: &Budget,
        now: Instant,
    ) -> Result<Attempt, String> {
        let socket = connect_unix(&card.unix_name)?;
        let uid = peer_uid(&socket)?;
        if uid != me.uid {
            return Err(format!("it belongs to user {uid}, this process to user {}", me.uid));
        }
        let wanted = ring_bytes_for(settings.ring_bytes, settings.max_payload_bytes());
        let (region, memory, refused) = create_region(wanted, settings, budget)?;
        if let Some(why) = refused {
            self.shm_trouble = Some(Trouble::SmallerRings(region.ring_bytes(), why));
        }
        let stream = Stream::new(socket);
        let nonce = me.nonce();
        let hello = me.hello(SHM, card.uuid, nonce, region.ring_bytes() as u64);
        stream.write(&hello.to_bytes(), &[memory.as_fd(), me.waker.as_fd()])?;
        Ok(Attempt { way: Way::Shm, stream, stage: Stage::Greeted, since: now, nonce, region: Some(region) })
    }
}

/// The largest region that is granted, halving from `wanted` to what the longest frame needs, and why it is not larger.
fn create_region(wanted: usize, settings: &Settings, budget: &Budget) -> Result<(Region, Fd, Option<String>), String> {
    let least = ring_bytes_for(0, settings.max_payload_bytes());
    let mut refused = None;
    let mut ring_bytes = wanted;
    loop {
        let created = budget.reserve(region_bytes(ring_bytes) as u64).and_then(|r| Region::create(ring_bytes, r));
        match created {
            Ok((region, memory)) => return Ok((region, memory, refused)),
            Err(why) if ring_bytes <= least => return Err(refused.unwrap_or(why)),
            Err(why) => {
                refused.get_or_insert(why);
                ring_bytes = ring_bytes_for(ring_bytes as u64 / 2, settings.max_payload_bytes());
            }
        }
    }
}

fn connect_unix(name: &str) -> Result<Fd, String> {
    let address =
        SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(|why| format!("its socket's name: {why}"))?;
    let socket = new_socket(AddressFamily::UNIX)?;
    rustix::net::connect(&socket, &address).map_err(|why| match why {
        Errno::AGAIN => "its queue of connections is full".to_owned(),
        why => format!("no connection to its socket: {why}"),
    })?;
    Ok(socket)
}

fn start_tcp(address: SocketAddr, me: &Identity, now: Instant) -> Result<Attempt, String> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = new_socket(family)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => {}
        Err(why) => return Err(format!("no connection: {why}")),
    }
    let stream = Stream::new(socket);
    let way = Way::Tcp(address);
    Ok(Attempt { way, stream, stage: Stage::Connecting, since: now, nonce: me.nonce(), region: None })
}

fn new_socket(family: AddressFamily) -> Result<Fd, String> {
    let make = || -> Result<OwnedFd, Errno> {
        rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC, None)
    };
    Fd::adopt(make).map_err(|why| format!("no socket: {why}"))
}

impl Attempt {
    fn is_slow(&self, now: Instant) -> bool {
        let limit = match (self.way, self.stage) {
            // The name of the Unix socket is unique and cannot lead to anybody else.
            (Way::Shm, _) => return false,
            (Way::Tcp(_), Stage::Connecting) => SLOW_CONNECT,
            (Way::Tcp(_), Stage::Greeted) => SLOW_REPLY,
        };
        now.saturating_duration_since(self.since) >= limit
    }

    fn poll(mut self, card: &Card, me: &Identity, settings: &Settings) -> Result<Outcome, String> {
        if self.stage == Stage::Connecting {
            if !self.is_connected()? {
                return Ok(Outcome::Wait(self));
            }
            self.stream.write(&me.hello(TCP, card.uuid, self.nonce, 0).to_bytes(), &[])?;
            self.stage = Stage::Greeted;
        }
        let Some(bytes) = self.stream.read::<REPLY_BYTES>()? else { return Ok(Outcome::Wait(self)) };
        let reply = Reply::parse(&bytes).map_err(|refusal| match refusal {
            Refusal::Stranger => "something else answers there".to_owned(),
            Refusal::Version(version) => format!("it has protocol version {version}, this process {PROTOCOL_VERSION}"),
        })?;
        if !reply.refused.is_empty() {
            return Err(reply.refused);
        }
        let max_payload_bytes = reply.max_payload_bytes as usize;
        if reply.nonce != self.nonce || max_payload_bytes > settings.max_payload_bytes() {
            return Err("its reply makes no sense".to_owned());
        }
        let event = match (&self.region, std::mem::take(&mut self.stream.fds).pop()) {
            (Some(_), None) => return Err("its event descriptor did not arrive".to_owned()),
            (_, event) => event,
        };
        self.stream.write(&confirm_bytes(reply.own_nonce), &[])?;
        let (peer, socket) = (card.place(), self.stream.socket);
        Ok(Outcome::Done(match (self.region, event) {
            (Some(region), Some(event)) => shm_link(region, 0, socket, event, max_payload_bytes, peer),
            (Some(_), None) | (None, _) => tcp_link(socket, max_payload_bytes, &peer),
        }))
    }

    fn is_connected(&self) -> Result<bool, String> {
        match sockopt::socket_error(&self.stream.socket) {
            Ok(Ok(())) => Ok(rustix::net::getpeername(&self.stream.socket).is_ok()),
            Ok(Err(why)) | Err(why) => Err(format!("no connection: {why}")),
        }
    }
}

impl Identity {
    /// The hello of this process.
    fn hello(&self, transport: u8, to: [u8; 16], nonce: u64, ring_bytes: u64) -> Hello {
        Hello {
            transport,
            from: self.uuid,
            to,
            nonce,
            pid: std::process::id(),
            max_payload_bytes: self.max_payload_bytes as u32,
            ring_bytes,
            hostname: self.hostname.clone(),
        }
    }
}
