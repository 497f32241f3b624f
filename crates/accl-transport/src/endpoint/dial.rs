//! Connections that this process makes: for one peer, all routes to reach it, until one of them leads to a link.
//!
//! Owns the connecting half of the handshake and the order of attempts. Transports are tried as configured. A Unix
//! socket is waited for as long as the peer is silent. The addresses of tcp are tried one after the other, and a slow
//! address does not delay the next.
//! Decides when a peer cannot be reached. Time comes as `now`.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::identity::Identity;
use super::route::{Destination, Failed, Route, is_connected, routes};
use super::stream::Stream;
use super::warnings::Trouble;
use super::wire::{Hello, REPLY_BYTES, Refusal, Reply, Verdict, confirm_bytes};
use crate::fork::Fd;
use crate::transport::{Agreed, HalfLink, PeerAddress};
use crate::{Settings, Watched};
use accl_wire::{EndpointInfo, PROTOCOL_VERSION};

/// If an address has not answered on the TCP level for this long, the next one is tried at the same time.
const SLOW_CONNECT: Duration = Duration::from_millis(300);
/// The same limit for a connection whose other side is silent: usually the peer is only late.
const SLOW_REPLY: Duration = Duration::from_secs(2);
/// An effort that has taken this long is reported.
const SLOW: Duration = Duration::from_millis(500);
/// Pause before all routes are tried again.
const RETRY: Duration = Duration::from_millis(200);
/// A peer whose host refuses all routes this many times in a row has ended.
const ROUNDS_REFUSED: u32 = 2;
/// A silent peer is given up as unreachable after this long. An idle link lives equally long after its host has
/// vanished.
const GIVE_UP: Duration = Duration::from_secs(30);

/// Result of polling the efforts to reach a peer.
pub(super) enum Progress {
    Waits,
    /// A link, and what differs from the configuration.
    Done(Box<dyn Watched>, Vec<Trouble>),
    /// Going on is useless, for the reason `why`. `has_ended`: the peer's process no longer listens; otherwise it may
    /// still listen.
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
    routes: Vec<Route>,
    left: VecDeque<Route>,
    attempts: Vec<Attempt>,
    /// Time before which nothing is tried.
    retry_at: Option<Instant>,
    begin: Instant,
    /// Start of the [`GIVE_UP`] time: the last moment when the peer was known to be alive, or when this process lacked
    /// the resources to connect.
    since: Instant,
    /// When a caller last asked for this peer. `None`: the link is wanted until the peer is reached or known to be
    /// unreachable.
    pub(super) asked: Option<Instant>,
    /// Whether the peer is waited for although it does not answer.
    pub(super) is_patient: bool,
    /// Whether some route was refused in this round.
    is_refused: bool,
    /// Whether some route failed in this round for a reason that may pass.
    may_pass: bool,
    /// Consecutive rounds in which some route was refused and no failure may pass.
    rounds_refused: u32,
    /// The last failure, for the list of missing peers.
    why: String,
    /// The first transport that was given up, and the reason.
    given_up: Option<(&'static str, String)>,
}

struct Attempt {
    route: Route,
    stream: Stream,
    stage: Stage,
    since: Instant,
    nonce: u64,
    /// This side's half of the link; `None` until the hello is sent.
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
    /// Creates efforts that begin after `head_start`, because the peer may connect itself before.
    pub(super) fn new(
        (lane, from): (u32, &EndpointInfo),
        peer: &EndpointInfo,
        now: Instant,
        head_start: Duration,
    ) -> Dial {
        let routes = routes(from, peer);
        Dial {
            lane,
            peer: peer.clone(),
            left: routes.iter().copied().collect(),
            routes,
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

    /// Returns the reason why there is no link yet, for the list of missing peers.
    pub(super) fn state(&self) -> String {
        let waiting = self.attempts.iter().map(|attempt| match (attempt.route.to, attempt.stage) {
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

    /// Returns the reason why there is no link although there has been time for one; see [`Dial::state`].
    pub(super) fn trouble(&self, now: Instant) -> Option<String> {
        (now.saturating_duration_since(self.begin) >= SLOW).then(|| self.state())
    }

    /// Returns the sockets to watch, and for each whether to watch it for becoming writable.
    pub(super) fn sockets(&self) -> impl Iterator<Item = (&Fd, bool)> {
        self.attempts.iter().map(|a| (&a.stream.socket, a.stage == Stage::Connecting))
    }

    /// Whether a hello was sent to the peer and not yet answered. The peer receives that hello in any case.
    pub(super) fn has_greeted(&self) -> bool {
        self.attempts.iter().any(|attempt| attempt.stage == Stage::Greeted)
    }

    /// Pauses this side's efforts, because the peer connects itself.
    pub(super) fn yield_to_peer(&mut self, now: Instant) {
        self.attempts.clear();
        self.left = self.routes.iter().copied().collect();
        self.retry_at = Some(now + RETRY);
        // The peer is alive.
        self.since = now;
        (self.is_refused, self.may_pass, self.rounds_refused) = (false, false, 0);
    }

    /// Processes everything in progress, and starts what is due.
    pub(super) fn poll(&mut self, me: &Identity, settings: &Settings, now: Instant) -> Progress {
        for attempt in std::mem::take(&mut self.attempts) {
            let route = attempt.route;
            match attempt.poll((self.lane, &self.peer), me, settings) {
                Ok(Outcome::Wait(attempt)) => self.attempts.push(attempt),
                Ok(Outcome::Done(link, compromise)) => {
                    // A transport that failed for a moment and works after all is not reported.
                    let fallback = self.given_up.take().filter(|(name, _)| *name != route.row.name);
                    let fallback = fallback.map(|(name, why)| Trouble::Fallback(name, why, route.row.name));
                    return Progress::Done(link, compromise.into_iter().chain(fallback).collect());
                }
                Err(Failed::Crossing) => {
                    self.yield_to_peer(now);
                    return Progress::Waits;
                }
                // In a group that is being created, the peer will soon accept this process again.
                Err(Failed::GivenUp(why)) if !self.is_patient => {
                    return Progress::Unreachable { why, has_ended: false };
                }
                Err(Failed::GivenUp(why)) => self.note(route, Failed::Other(why), now),
                Err(why) => self.note(route, why, now),
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

    fn note(&mut self, route: Route, why: Failed, now: Instant) {
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
                // A shortage here says nothing about the peer. The peer's time starts again when there is room.
                (self.may_pass, self.since) = (true, now);
                why
            }
            Failed::Crossing | Failed::GivenUp(_) => return,
        };
        self.why = match route.to {
            Destination::Unix => format!("{}: {text}", route.row.name),
            Destination::Tcp(address) => format!("{}: {text} ({address})", route.row.name),
        };
        // Remember the first transport for which no route is left, if another transport is still to be tried.
        if !self.left.is_empty() && self.left.iter().all(|left| left.row.name != route.row.name) {
            self.given_up.get_or_insert((route.row.name, text));
        }
    }

    fn start_what_is_due(&mut self, me: &Identity, now: Instant) {
        if self.retry_at.is_some_and(|at| now < at) {
            return;
        }
        self.retry_at = None;
        while self.attempts.last().is_none_or(|newest| newest.is_slow(now)) {
            let Some(route) = self.left.pop_front() else {
                if self.attempts.is_empty() {
                    self.end_round(now);
                }
                return;
            };
            match self.start(route, me, now) {
                Ok(attempt) => self.attempts.push(attempt),
                Err(why) => self.note(route, why, now),
            }
        }
    }

    /// Ends a round in which all routes have failed. They are tried again after a pause.
    fn end_round(&mut self, now: Instant) {
        let (is_refused, may_pass) = (std::mem::take(&mut self.is_refused), std::mem::take(&mut self.may_pass));
        self.rounds_refused = if is_refused && !may_pass { self.rounds_refused + 1 } else { 0 };
        self.retry_at = Some(now + RETRY);
        self.left.extend(&self.routes);
    }

    /// Begins to connect, and says hello at once if connecting takes no time.
    fn start(&self, route: Route, me: &Identity, now: Instant) -> Result<Attempt, Failed> {
        let stream = Stream::new(route.to.connect(&self.peer)?);
        let mut attempt =
            Attempt { route, stream, stage: Stage::Connecting, since: now, nonce: me.nonce(), half: None };
        if route.to == Destination::Unix {
            attempt.greet((self.lane, &self.peer), me)?;
        }
        Ok(attempt)
    }
}

impl Attempt {
    fn is_slow(&self, now: Instant) -> bool {
        let limit = match (self.route.to, self.stage) {
            // The name of the Unix socket is unique and cannot lead to another process.
            (Destination::Unix, _) => return false,
            (Destination::Tcp(_), Stage::Connecting) => SLOW_CONNECT,
            (Destination::Tcp(_), Stage::Greeted) => SLOW_REPLY,
        };
        now.saturating_duration_since(self.since) >= limit
    }

    /// Sends the hello, with this side's half of the link.
    fn greet(&mut self, (lane, peer): (u32, &EndpointInfo), me: &Identity) -> Result<(), Failed> {
        self.route.to.check_peer(&self.stream.socket, me.uid)?;
        let name = self.route.row.name;
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
        // A refusal of another version may be shorter than a reply of this version.
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
            return Err(Failed::Other("its reply does not match the hello of this process".to_owned()));
        };
        let descriptors = std::mem::take(&mut self.stream.fds);
        half.take_answer(PeerAddress { bytes: reply.body, descriptors }, max_payload_bytes)?;
        self.stream.write(&confirm_bytes(reply.own_nonce), &[])?;
        let compromise = half.compromise().map(|(what, why)| Trouble::Compromise(self.route.row.name, what, why));
        let agreed = Agreed { socket: self.stream.socket, max_payload_bytes, peer: info.host_and_pid() };
        Ok(Outcome::Done(half.finish(agreed)?, compromise))
    }
}

/// Explains why the received bytes are no reply.
fn explain(refusal: &Refusal) -> String {
    match refusal {
        Refusal::Stranger => "another program answers at this address".to_owned(),
        Refusal::Version(version) => format!("it has protocol version {version}, this process {PROTOCOL_VERSION}"),
    }
}

impl Identity {
    /// Returns the hello of this process.
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

    fn route() -> Route {
        let to = Destination::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 1)));
        Route { row: rows::find("tcp").unwrap(), to }
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
        failures.into_iter().for_each(|why| dial.note(route(), why, now));
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
        dial.note(route(), Failed::Exhausted("no socket".to_owned()), begin + 2 * GIVE_UP);
        assert_eq!((round(&mut dial, [], begin), dial.since), (0, begin + 2 * GIVE_UP));
        assert_eq!(dial.trouble(begin), None);
        assert_eq!(dial.trouble(begin + SLOW).unwrap(), "tcp: no socket (127.0.0.1:1)");
    }

    #[test]
    fn an_effort_that_stood_back_for_its_peer_has_its_time_again() {
        let begin = Instant::now();
        let mut dial = dial(begin);
        dial.yield_to_peer(begin + 2 * GIVE_UP);
        assert_eq!(dial.since, begin + 2 * GIVE_UP);
    }
}
