//! Connections that we make: for one peer, all ways to reach it, until one of them leads to a link.
//!
//! Owns the connecting half of the handshake and the order of attempts: transports as configured; shared memory is
//! waited for as long as the peer is silent; the addresses of tcp are tried one after the other, and a slow one does
//! not hold up the next. Knows when a peer cannot be reached. Time comes as `now`.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use super::identity::{Identity, SHM, TCP};
use super::make::{keep_alive, shm_link, tcp_link};
use super::stream::{Stream, peer_uid};
use super::warnings::Trouble;
use super::wire::{Hello, REPLY_BYTES, Refusal, Reply, Verdict, confirm_bytes};
use crate::fork::Fd;
use crate::shm::budget::Budget;
use crate::shm::region::{Region, ring_bytes_for};
use crate::{Card, PROTOCOL_VERSION, Settings, Watched};

/// An address that has not answered on the level of TCP for so long gets company by the next one.
const SLOW_CONNECT: Duration = Duration::from_millis(300);
/// The same for a connection whose other side is silent: as a rule the peer is only late.
const SLOW_REPLY: Duration = Duration::from_secs(2);
/// An effort that has taken so long is worth a word.
const SLOW: Duration = Duration::from_millis(500);
/// Pause before all ways are tried again.
const RETRY: Duration = Duration::from_millis(200);
/// A peer whose host refuses all ways, this many times in a row, has ended.
const ROUNDS_REFUSED: u32 = 2;
/// A peer of which nobody knows anything for so long cannot be reached: as long as a link on which nothing is under way
/// lives after its host has vanished.
const GIVE_UP: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Shm,
    Tcp(SocketAddr),
}

/// What a look at the efforts to reach a peer has brought.
pub(super) enum Progress {
    Waits,
    /// A link, and what went wrong before.
    Done(Box<dyn Watched>, Option<Trouble>),
    /// There is no use in going on, for this reason; nobody listens there any more, or somebody may.
    Unreachable {
        why: String,
        has_ended: bool,
    },
}

/// The efforts to reach one peer.
pub(super) struct Dial {
    peer: Card,
    ways: Vec<Way>,
    left: VecDeque<Way>,
    attempts: Vec<Attempt>,
    /// Nothing is tried before.
    retry_at: Option<Instant>,
    begin: Instant,
    /// Since when it is clear that the peer could be reached.
    since: Instant,
    /// When somebody last asked for this peer; `None`: it is wanted until it is reached or known not to be.
    pub(super) asked: Option<Instant>,
    /// It is not given up because nothing comes from there.
    pub(super) is_patient: bool,
    /// In this round some way was refused.
    is_refused: bool,
    /// And some failed in a way that may pass.
    may_pass: bool,
    /// Rounds in a row of which that is so.
    rounds_refused: u32,
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

/// Why an attempt has failed.
pub(super) enum Failed {
    /// The peer has a link to us, or makes one.
    Crossing,
    /// The peer takes this process for gone.
    GivenUp(String),
    /// Nobody, or somebody else, listens there.
    Refused(String),
    /// This process has no descriptor or memory for it.
    Exhausted(String),
    /// What may pass.
    Other(String),
}

impl From<String> for Failed {
    fn from(why: String) -> Self {
        Self::Other(why)
    }
}

impl Failed {
    /// As a clause.
    pub(super) fn text(self) -> String {
        match self {
            Self::Crossing => "it connects itself".to_owned(),
            Self::GivenUp(why) | Self::Refused(why) | Self::Exhausted(why) | Self::Other(why) => why,
        }
    }

    /// Of a system call that connects.
    fn of_connecting(why: Errno) -> Self {
        let text = format!("no connection: {why}");
        if why == Errno::CONNREFUSED { Self::Refused(text) } else { Self::Other(text) }
    }
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
    /// Efforts that begin after `head_start`: the peer may connect itself before.
    pub(super) fn new(from: &Card, peer: &Card, now: Instant, head_start: Duration) -> Dial {
        let ways = ways(from, peer);
        Dial {
            peer: peer.clone(),
            left: ways.iter().copied().collect(),
            ways,
            attempts: Vec::new(),
            retry_at: Some(now + head_start),
            begin: now,
            since: now,
            asked: None,
            is_patient: false,
            is_refused: false,
            may_pass: false,
            rounds_refused: 0,
            why: String::new(),
            shm_trouble: None,
        }
    }

    pub(super) fn peer(&self) -> &Card {
        &self.peer
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
        if all.is_empty() { "no connection from it yet".to_owned() } else { all.join(", ") }
    }

    /// Why there is no link although there has been time for one; see [`Dial::state`].
    pub(super) fn trouble(&self, now: Instant) -> Option<String> {
        (now.saturating_duration_since(self.begin) >= SLOW).then(|| self.state())
    }

    /// The sockets to watch, and whether for becoming writable.
    pub(super) fn sockets(&self) -> impl Iterator<Item = (&Fd, bool)> {
        self.attempts.iter().map(|a| (&a.stream.socket, a.stage == Stage::Connecting))
    }

    /// Whether the peer has a greeting of ours, or will have one, whatever happens.
    pub(super) fn has_greeted(&self) -> bool {
        self.attempts.iter().any(|attempt| attempt.stage == Stage::Greeted)
    }

    /// The peer connects itself: nothing is tried for a while.
    pub(super) fn stand_back(&mut self, now: Instant) {
        self.attempts.clear();
        self.left = self.ways.iter().copied().collect();
        self.retry_at = Some(now + RETRY);
        // It lives.
        self.since = now;
        (self.is_refused, self.may_pass, self.rounds_refused) = (false, false, 0);
    }

    /// One look at everything that is under way; starts what is due.
    pub(super) fn poll(&mut self, me: &Identity, settings: &Settings, now: Instant) -> Progress {
        for attempt in std::mem::take(&mut self.attempts) {
            let way = attempt.way;
            match attempt.poll(&self.peer, me, settings) {
                Ok(Outcome::Wait(attempt)) => self.attempts.push(attempt),
                Ok(Outcome::Done(link)) => {
                    let trouble = match self.shm_trouble.take() {
                        // Not worth a word when shared memory works after all.
                        Some(Trouble::NoSharedMemory(_)) if way == Way::Shm => None,
                        trouble => trouble,
                    };
                    return Progress::Done(link, trouble);
                }
                Err(Failed::Crossing) => {
                    self.stand_back(now);
                    return Progress::Waits;
                }
                // In a group that is being made it takes this process for new before long.
                Err(Failed::GivenUp(why)) if !self.is_patient => {
                    return Progress::Unreachable { why, has_ended: false };
                }
                Err(Failed::GivenUp(why)) => self.note(way, Failed::Other(why), now),
                Err(why) => self.note(way, why, now),
            }
        }
        self.start_what_is_due(me, settings, now);
        if self.rounds_refused >= ROUNDS_REFUSED {
            return Progress::Unreachable { why: format!("its process has ended: {}", self.why), has_ended: true };
        }
        if !self.is_patient && !self.has_greeted() && now.saturating_duration_since(self.since) >= GIVE_UP {
            let why = format!("no link to it within {} s: {}", GIVE_UP.as_secs(), self.state());
            return Progress::Unreachable { why, has_ended: false };
        }
        Progress::Waits
    }

    fn note(&mut self, way: Way, why: Failed, now: Instant) {
        let text = match why {
            Failed::Refused(why) => {
                self.is_refused = true;
                why
            }
            Failed::Other(why) => {
                self.may_pass = true;
                why
            }
            Failed::Exhausted(why) => {
                // That says nothing of the peer, which has its time when there is room.
                (self.may_pass, self.since) = (true, now);
                why
            }
            Failed::Crossing | Failed::GivenUp(_) => return,
        };
        match way {
            Way::Shm => {
                self.why = format!("shared memory: {text}");
                self.shm_trouble = Some(Trouble::NoSharedMemory(text));
            }
            Way::Tcp(address) => self.why = format!("{text} ({address})"),
        }
    }

    fn start_what_is_due(&mut self, me: &Identity, settings: &Settings, now: Instant) {
        if self.retry_at.is_some_and(|at| now < at) {
            return;
        }
        self.retry_at = None;
        while self.attempts.last().is_none_or(|newest| newest.is_slow(now)) {
            let Some(way) = self.left.pop_front() else {
                if self.attempts.is_empty() {
                    self.end_round(now);
                }
                return;
            };
            let started = match way {
                Way::Shm => self.start_shm(me, settings, now),
                Way::Tcp(address) => start_tcp(address, me, now),
            };
            match started {
                Ok(attempt) => self.attempts.push(attempt),
                Err(why) => self.note(way, why, now),
            }
        }
    }

    /// All ways have failed: they are tried again after a pause.
    fn end_round(&mut self, now: Instant) {
        let (is_refused, may_pass) = (std::mem::take(&mut self.is_refused), std::mem::take(&mut self.may_pass));
        self.rounds_refused = if is_refused && !may_pass { self.rounds_refused + 1 } else { 0 };
        self.retry_at = Some(now + RETRY);
        self.left.extend(&self.ways);
    }

    fn start_shm(&mut self, me: &Identity, settings: &Settings, now: Instant) -> Result<Attempt, Failed> {
        let socket = connect_unix(&self.peer.unix_name)?;
        let uid = peer_uid(&socket)?;
        if uid != me.uid {
            return Err(Failed::Other(format!("it belongs to user {uid}, this process to user {}", me.uid)));
        }
        let wanted = ring_bytes_for(settings.ring_bytes, settings.max_payload_bytes());
        let (region, memory, refused) = create_region(wanted, settings, &me.budget)?;
        if let Some(why) = refused {
            self.shm_trouble = Some(Trouble::SmallerRings(region.ring_bytes(), why));
        }
        let stream = Stream::new(socket);
        let nonce = me.nonce();
        let hello = me.hello(SHM, self.peer.uuid, nonce, region.ring_bytes() as u64);
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
        match Region::create(ring_bytes, budget) {
            Ok((region, memory)) => return Ok((region, memory, refused)),
            Err(why) if ring_bytes <= least => return Err(refused.unwrap_or(why)),
            Err(why) => {
                refused.get_or_insert(why);
                ring_bytes = ring_bytes_for(ring_bytes as u64 / 2, settings.max_payload_bytes());
            }
        }
    }
}

pub(super) fn connect_unix(name: &str) -> Result<Fd, Failed> {
    let address =
        SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(|why| format!("its socket's name: {why}"))?;
    let socket = new_socket(AddressFamily::UNIX)?;
    rustix::net::connect(&socket, &address).map_err(|why| match why {
        Errno::AGAIN => Failed::Other("its queue of connections is full".to_owned()),
        why => Failed::of_connecting(why),
    })?;
    Ok(socket)
}

fn start_tcp(address: SocketAddr, me: &Identity, now: Instant) -> Result<Attempt, Failed> {
    let stream = Stream::new(connect_tcp(address)?);
    let way = Way::Tcp(address);
    Ok(Attempt { way, stream, stage: Stage::Connecting, since: now, nonce: me.nonce(), region: None })
}

/// Begins to connect; see [`is_connected`].
pub(super) fn connect_tcp(address: SocketAddr) -> Result<Fd, Failed> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = new_socket(family)?;
    keep_alive(&socket);
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => {}
        Err(why) => return Err(Failed::of_connecting(why)),
    }
    Ok(socket)
}

/// Whether a socket that connects has done so.
pub(super) fn is_connected(socket: &Fd) -> Result<bool, Failed> {
    match sockopt::socket_error(socket) {
        Ok(Ok(())) => Ok(rustix::net::getpeername(socket).is_ok()),
        Ok(Err(why)) | Err(why) => Err(Failed::of_connecting(why)),
    }
}

fn new_socket(family: AddressFamily) -> Result<Fd, Failed> {
    let make = || -> Result<OwnedFd, Errno> {
        rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC, None)
    };
    Fd::adopt(make).map_err(|why| match why {
        Errno::MFILE | Errno::NFILE => {
            Failed::Exhausted(format!("no socket: {why}; raise the limit of this process with `ulimit -n`"))
        }
        Errno::NOMEM | Errno::NOBUFS => Failed::Exhausted(format!("no socket: {why}")),
        why => Failed::Other(format!("no socket: {why}")),
    })
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

    fn poll(mut self, card: &Card, me: &Identity, settings: &Settings) -> Result<Outcome, Failed> {
        if self.stage == Stage::Connecting {
            if !is_connected(&self.stream.socket)? {
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
        match reply.verdict {
            Verdict::Accepted => {}
            Verdict::Refused => return Err(Failed::Other(reply.why)),
            Verdict::Crossing => return Err(Failed::Crossing),
            Verdict::NotHere => return Err(Failed::Refused(reply.why)),
            Verdict::GivenUp => return Err(Failed::GivenUp(reply.why)),
        }
        let max_payload_bytes = reply.max_payload_bytes as usize;
        if reply.nonce != self.nonce || max_payload_bytes > settings.max_payload_bytes() {
            return Err(Failed::Other("its reply makes no sense".to_owned()));
        }
        let event = match (&self.region, std::mem::take(&mut self.stream.fds).pop()) {
            (Some(_), None) => return Err(Failed::Other("its event descriptor did not arrive".to_owned())),
            (_, event) => event,
        };
        self.stream.write(&confirm_bytes(reply.own_nonce), &[])?;
        let (peer, socket) = (card.place(), self.stream.socket);
        Ok(Outcome::Done(match (self.region, event) {
            (Some(region), Some(event)) => shm_link(region, 0, socket, event, max_payload_bytes, peer),
            (Some(_), None) | (None, _) => tcp_link(socket, max_payload_bytes, &peer),
        }))
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

#[cfg(test)]
mod tests {
    use super::*;

    const WAY: Way = Way::Tcp(SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 1));

    fn dial(now: Instant) -> Dial {
        let card = |uuid| Card {
            version: PROTOCOL_VERSION,
            uuid: [uuid; 16],
            pid: 1,
            uid: 2,
            hostname: "host".to_owned(),
            host_id: "host".to_owned(),
            addresses: Vec::new(),
            unix_name: String::new(),
            transports: vec!["tcp".to_owned()],
        };
        Dial::new(&card(1), &card(2), now, Duration::ZERO)
    }

    fn round(dial: &mut Dial, failures: impl IntoIterator<Item = Failed>, now: Instant) -> u32 {
        failures.into_iter().for_each(|why| dial.note(WAY, why, now));
        dial.end_round(now);
        dial.rounds_refused
    }

    #[test]
    fn a_peer_of_which_one_way_is_refused_and_another_may_do_has_not_ended() {
        let now = Instant::now();
        let refused = || Failed::Refused("refused".to_owned());
        let passing = || Failed::Other("no route".to_owned());
        let mut dial = dial(now);
        assert_eq!(round(&mut dial, [refused(), passing()], now), 0);
        assert_eq!(round(&mut dial, [passing(), refused()], now), 0);
        assert_eq!(round(&mut dial, [refused(), refused()], now), 1);
        assert_eq!(round(&mut dial, [refused(), passing()], now), 0);
        assert_eq!(round(&mut dial, [refused()], now), 1);
        assert_eq!(round(&mut dial, [refused()], now), ROUNDS_REFUSED);
    }

    #[test]
    fn a_shortage_of_this_process_is_no_fault_of_the_peer() {
        let begin = Instant::now();
        let mut dial = dial(begin);
        dial.note(WAY, Failed::Exhausted("no socket".to_owned()), begin + 2 * GIVE_UP);
        assert_eq!((round(&mut dial, [], begin), dial.since), (0, begin + 2 * GIVE_UP));
        assert_eq!(dial.trouble(begin), None);
        assert_eq!(dial.trouble(begin + SLOW).unwrap(), "no socket (127.0.0.1:1)");
    }

    #[test]
    fn an_effort_that_stood_back_for_its_peer_has_its_time_again() {
        let begin = Instant::now();
        let mut dial = dial(begin);
        dial.stand_back(begin + 2 * GIVE_UP);
        assert_eq!(dial.since, begin + 2 * GIVE_UP);
    }
}
