//! Connections that we make: for one peer, all ways to reach it, until one of them leads to a link.
//!
//! Owns the connecting half of the handshake and the order of attempts: transports as configured; a Unix socket is
//! waited for as long as the peer is silent; the addresses of tcp are tried one after the other, and a slow one does
//! not hold up the next. Knows when a peer cannot be reached. Time comes as `now`.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::identity::Identity;
use super::stream::Stream;
use super::warnings::Trouble;
use super::way::{Destination, Failed, Way, is_connected, ways};
use super::wire::{Hello, REPLY_BYTES, Refusal, Reply, Verdict, confirm_bytes};
use crate::fork::Fd;
use crate::transport::{Agreed, HalfLink, PeerAddress};
use crate::{Settings, Watched};
use accl_wire::{EndpointInfo, PROTOCOL_VERSION};

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

/// What a look at the efforts to reach a peer has brought.
pub(super) enum Progress {
    Waits,
    /// A link, and what was not as wanted.
    Done(Box<dyn Watched>, Vec<Trouble>),
    /// There is no use in going on, for this reason; nobody listens there any more, or somebody may.
    Unreachable {
        why: String,
        has_ended: bool,
    },
}

/// The efforts to reach one peer.
pub(super) struct Dial {
    /// The lane of this process that wants the link.
    pub(super) lane: u32,
    peer: EndpointInfo,
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
    /// The first transport that was given up, and why, if one was.
    given_up: Option<(&'static str, String)>,
}

struct Attempt {
    way: Way,
    stream: Stream,
    stage: Stage,
    since: Instant,
    nonce: u64,
    /// From the greeting on.
    half: Option<Box<dyn HalfLink>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Connecting,
    Greeted,
}

enum Outcome {
    Wait(Attempt),
    Done(Box<dyn Watched>, Option<Trouble>),
}

impl Dial {
    /// Efforts that begin after `head_start`: the peer may connect itself before.
    pub(super) fn new(
        (lane, from): (u32, &EndpointInfo),
        peer: &EndpointInfo,
        now: Instant,
        head_start: Duration,
    ) -> Dial {
        let ways = ways(from, peer);
        Dial {
            lane,
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
            given_up: None,
        }
    }

    pub(super) fn peer(&self) -> &EndpointInfo {
        &self.peer
    }

    /// Why there is no link yet, for the list of the missing.
    pub(super) fn state(&self) -> String {
        let waiting = self.attempts.iter().map(|attempt| match (attempt.way.to, attempt.stage) {
            (Destination::Tcp(address), Stage::Connecting) => format!("no answer from {address} yet"),
            (Destination::Tcp(address), Stage::Greeted) => {
                format!("connected to {address}, but it does not answer yet")
            }
            (Destination::Unix, _) => "connected, but it does not answer yet".to_owned(),
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
            match attempt.poll((self.lane, &self.peer), me, settings) {
                Ok(Outcome::Wait(attempt)) => self.attempts.push(attempt),
                Ok(Outcome::Done(link, compromise)) => {
                    // What was given up for a moment and works after all is not worth a word.
                    let fallback = self.given_up.take().filter(|(name, _)| *name != way.row.name);
                    let fallback = fallback.map(|(name, why)| Trouble::Fallback(name, why, way.row.name));
                    return Progress::Done(link, compromise.into_iter().chain(fallback).collect());
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
        self.start_what_is_due(me, now);
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
        self.why = match way.to {
            Destination::Unix => format!("{}: {text}", way.row.name),
            Destination::Tcp(address) => format!("{}: {text} ({address})", way.row.name),
        };
        // The next transport is tried, if there is one.
        if !self.left.is_empty() && self.left.iter().all(|left| left.row.name != way.row.name) {
            self.given_up.get_or_insert((way.row.name, text));
        }
    }

    fn start_what_is_due(&mut self, me: &Identity, now: Instant) {
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
            match self.start(way, me, now) {
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

    /// Begins to connect, and greets at once where that does not take time.
    fn start(&self, way: Way, me: &Identity, now: Instant) -> Result<Attempt, Failed> {
        let stream = Stream::new(way.to.connect(&self.peer)?);
        let mut attempt = Attempt { way, stream, stage: Stage::Connecting, since: now, nonce: me.nonce(), half: None };
        if way.to == Destination::Unix {
            attempt.greet((self.lane, &self.peer), me)?;
        }
        Ok(attempt)
    }
}

impl Attempt {
    fn is_slow(&self, now: Instant) -> bool {
        let limit = match (self.way.to, self.stage) {
            // The name of the Unix socket is unique and cannot lead to anybody else.
            (Destination::Unix, _) => return false,
            (Destination::Tcp(_), Stage::Connecting) => SLOW_CONNECT,
            (Destination::Tcp(_), Stage::Greeted) => SLOW_REPLY,
        };
        now.saturating_duration_since(self.since) >= limit
    }

    /// Says hello, with this side's half of the link.
    fn greet(&mut self, (lane, peer): (u32, &EndpointInfo), me: &Identity) -> Result<(), Failed> {
        self.way.to.check_peer(&self.stream.socket, me.uid)?;
        let name = self.way.row.name;
        let opened = me.provider(lane, name).ok_or_else(|| format!("this process does not use {name}"))?;
        let mut half = opened.provider.offer()?;
        let address = half.address();
        let hello = me.hello(name, (me.uuid_of(lane), peer.uuid), self.nonce, address.bytes);
        self.stream.write(&hello.to_bytes(), &address.descriptors)?;
        half.forget_address();
        self.half = Some(half);
        self.stage = Stage::Greeted;
        Ok(())
    }

    fn poll(
        mut self,
        (lane, info): (u32, &EndpointInfo),
        me: &Identity,
        settings: &Settings,
    ) -> Result<Outcome, Failed> {
        if self.stage == Stage::Connecting {
            if !is_connected(&self.stream.socket)? {
                return Ok(Outcome::Wait(self));
            }
            self.greet((lane, info), me)?;
        }
        let read = self.stream.read::<REPLY_BYTES>();
        // A refusal of another version may be shorter.
        Reply::check_prefix(self.stream.prefix()).map_err(|refusal| explain(&refusal))?;
        let Some(bytes) = read? else { return Ok(Outcome::Wait(self)) };
        let reply = Reply::parse(&bytes).map_err(|refusal| explain(&refusal))?;
        match reply.verdict {
            Verdict::Accepted => {}
            Verdict::Refused => return Err(Failed::Other(reply.text())),
            Verdict::Crossing => return Err(Failed::Crossing),
            Verdict::NotHere => return Err(Failed::Refused(reply.text())),
            Verdict::GivenUp => return Err(Failed::GivenUp(reply.text())),
        }
        let max_payload_bytes = reply.max_payload_bytes as usize;
        let Some(mut half) =
            self.half.take_if(|_| reply.nonce == self.nonce && max_payload_bytes <= settings.max_payload_bytes())
        else {
            return Err(Failed::Other("its reply makes no sense".to_owned()));
        };
        let descriptors = std::mem::take(&mut self.stream.fds);
        half.take_answer(PeerAddress { bytes: reply.body, descriptors }, max_payload_bytes)?;
        self.stream.write(&confirm_bytes(reply.own_nonce), &[])?;
        let compromise = half.compromise().map(|(what, why)| Trouble::Compromise(self.way.row.name, what, why));
        let agreed = Agreed { socket: self.stream.socket, max_payload_bytes, peer: info.host_and_pid() };
        Ok(Outcome::Done(half.finish(agreed)?, compromise))
    }
}

/// Why what came is no reply.
fn explain(refusal: &Refusal) -> String {
    match refusal {
        Refusal::Stranger => "something else answers there".to_owned(),
        Refusal::Version(version) => format!("it has protocol version {version}, this process {PROTOCOL_VERSION}"),
    }
}

impl Identity {
    /// The hello of this process.
    fn hello(&self, transport: &str, (from, to): ([u8; 16], [u8; 16]), nonce: u64, address: Vec<u8>) -> Hello {
        Hello {
            transport: transport.to_owned(),
            from,
            to,
            nonce,
            pid: std::process::id(),
            max_payload_bytes: self.max_payload_bytes as u32,
            hostname: self.hostname.clone(),
            address,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use super::*;
    use crate::rows;

    fn way() -> Way {
        let to = Destination::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 1)));
        Way { row: rows::find("tcp").unwrap(), to }
    }

    fn dial(now: Instant) -> Dial {
        let info = |uuid| EndpointInfo {
            version: PROTOCOL_VERSION,
            uuid: [uuid; 16],
            pid: 1,
            uid: 2,
            hostname: "host".to_owned(),
            host_id: "host".to_owned(),
            addresses: Vec::new(),
            unix_name: String::new(),
            transports: vec!["tcp".to_owned()],
            lanes: 1,
        };
        Dial::new((0, &info(1)), &info(2), now, Duration::ZERO)
    }

    fn round(dial: &mut Dial, failures: impl IntoIterator<Item = Failed>, now: Instant) -> u32 {
        failures.into_iter().for_each(|why| dial.note(way(), why, now));
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
        dial.note(way(), Failed::Exhausted("no socket".to_owned()), begin + 2 * GIVE_UP);
        assert_eq!((round(&mut dial, [], begin), dial.since), (0, begin + 2 * GIVE_UP));
        assert_eq!(dial.trouble(begin), None);
        assert_eq!(dial.trouble(begin + SLOW).unwrap(), "tcp: no socket (127.0.0.1:1)");
    }

    #[test]
    fn an_effort_that_stood_back_for_its_peer_has_its_time_again() {
        let begin = Instant::now();
        let mut dial = dial(begin);
        dial.stand_back(begin + 2 * GIVE_UP);
        assert_eq!(dial.since, begin + 2 * GIVE_UP);
    }
}
