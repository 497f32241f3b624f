//! Engines behind the sockets of the emulator's protocol.
//!
//! Owns the ports of ranks and what becomes of what happens: one request and one reply at a time for each host of a rank, packets to and from
//! engines of other processes, kernel streams. All engines of a process belong to one task, which nobody waits for under a lock, and nothing
//! runs while nobody asks. Read [`serve`] first.

mod connection;
mod event;
mod hosts;
mod publisher;
mod sockets;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use accl_cclo::call::ConfigFunction;
use accl_cclo::control::{BadRequest, Reply, Request, Status};
use accl_cclo::memory_map::Network;
use tokio::net::TcpListener;
use tokio::sync::{Notify, OwnedSemaphorePermit, mpsc, oneshot};
use tokio::time::Instant;

use crate::cluster::Cluster;
use crate::engine::{Ends, Engine, Peers};
use crate::program::Faithful;
use crate::time::Speed;
use crate::trace::Trace;
use event::{Event, HostId};
use hosts::serve_hosts;
use publisher::Publisher;
use sockets::{Fed, Sent, feed_in, listen};

/// What happens and has yet to be looked at, before sockets are not read any more.
const MOST_EVENTS: usize = 256;
/// Packets that have yet to be sent to other processes, before the engine waits.
const MOST_PACKETS: usize = 256;
/// Most characters of the name of a host.
const MOST_NAME_CHARS: usize = 200;
/// The hazard that packets say nothing of what they belong to. Worlds with emulators of the original keep it.
const COMMUNICATORS: u8 = 12;
/// Messages for kernels that have yet to be sent.
const MOST_FED: usize = 64;

/// What is served.
#[derive(Clone, Debug)]
pub struct Options {
    /// The ranks of this process.
    pub ranks: Range<u32>,
    /// All ranks, and where each process has its sockets: the host and the base port of each rank.
    pub hosts: Vec<(String, u16)>,
    /// Where this process listens.
    pub bind: IpAddr,
    /// How engines reach one another.
    pub network: Network,
    /// Which of firmware's defects are kept.
    pub faithful: Faithful,
    /// Where chance comes from that hazards depend on.
    pub seed: u64,
    /// How fast engines and links are by the counter register.
    pub speed: Speed,
    /// What an engine has for kernels comes back to it.
    pub loops_back: bool,
    /// How long a call waits for engines of other processes to be there.
    pub peer_timeout: Duration,
    /// Where everything is written down that goes in and out.
    pub trace: Option<PathBuf>,
}

/// What cannot be served, and why.
#[derive(Debug)]
pub struct ServeError(pub String);

impl std::fmt::Display for ServeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ServeError {}

/// A rank's sockets, by the reference: its base port, and a quarter for each kind.
enum Kind {
    Control,
    Wire,
    KernelOut,
    KernelIn,
}

impl Seat {
    /// Peers that do not listen to it, or that it does not listen to.
    fn missing(&self) -> impl Iterator<Item = u32> {
        self.unheard_by.union(&self.not_found).copied()
    }
}

impl Options {
    fn world(&self) -> u32 {
        self.hosts.len() as u32
    }

    /// The port of a rank's socket; `None`: there is no such port.
    fn port(&self, rank: u32, kind: Kind) -> Option<u16> {
        let (_, base) = self.hosts.get(rank as usize)?;
        let offset = match kind {
            Kind::Control => 0,
            Kind::Wire => 1,
            Kind::KernelOut => 2,
            Kind::KernelIn => 3,
        };
        u16::try_from(u32::from(*base) + offset * self.world() + rank).ok()
    }

    /// Where hosts reach the ranks of this process, for a person.
    pub fn places(&self) -> String {
        let ports = self.ranks.clone().filter_map(|rank| self.port(rank, Kind::Control)).collect::<Vec<_>>();
        let (first, last) = (self.ranks.start, self.ranks.end.saturating_sub(1));
        match ports[..] {
            [port, ..] if ports.windows(2).all(|pair| pair[0].checked_add(1) == Some(pair[1])) => {
                format!("ranks {first} to {last} listen from port {port} on")
            }
            _ => {
                let ports: Vec<String> = ports.iter().map(u16::to_string).collect();
                format!("ranks {first} to {last} listen at ports {}", ports.join(", "))
            }
        }
    }

    fn own(&self, rank: u32, kind: Kind) -> Result<SocketAddr, ServeError> {
        let port = self.port(rank, kind).ok_or_else(|| ServeError(format!("rank {rank} has no port below 65536")))?;
        Ok(SocketAddr::new(self.bind, port))
    }

    fn theirs(&self, rank: u32, kind: Kind) -> Result<String, ServeError> {
        let port = self.port(rank, kind).ok_or_else(|| ServeError(format!("rank {rank} has no port below 65536")))?;
        Ok(format!("{}:{port}", self.hosts[rank as usize].0))
    }

    fn outsiders(&self) -> impl Iterator<Item = u32> + use<> {
        let own = self.ranks.clone();
        (0..self.world()).filter(move |rank| !own.contains(rank))
    }
}

/// Who has an engine to itself, until its connection ends or somebody else resets the engine.
struct Owner {
    host: HostId,
    name: String,
    since: Instant,
}

/// The process as one of the ranks sees it.
struct Seat {
    rank: u32,
    /// The host that has said that it uses the engine. Those that do not say so, as the original's, are let in all the same.
    owner: Option<Owner>,
    /// Hosts that have said so before another one took the engine from them.
    dispossessed: BTreeSet<HostId>,
    /// What is sent to engines of other processes, and to kernels.
    wire: mpsc::Sender<Sent>,
    kernel: mpsc::Sender<Fed>,
    /// Peers that do not listen to it, and those that it does not listen to.
    unheard_by: BTreeSet<u32>,
    not_found: BTreeSet<u32>,
    /// Until when a call waits for them.
    deadline: Option<Instant>,
    /// Permits of packets that have yet to find a place, by peer.
    permits: BTreeMap<u32, VecDeque<OwnedSemaphorePermit>>,
    /// Kernels that are told once more is wanted.
    fed: Vec<oneshot::Sender<()>>,
    /// Why the call that waited for peers has failed.
    trouble: String,
}

/// Serves engines until the process is asked to end. `ready` is called when hosts can ask.
///
/// # Errors
/// A socket that cannot be bound, by its rank and address; a trace that cannot be written.
pub async fn serve(options: Options, ready: impl FnOnce()) -> Result<(), ServeError> {
    let trace = options.trace.as_deref().map(|path| {
        Trace::create(path)
            .map_err(|error| ServeError(format!("--trace: {} cannot be written: {error}", path.display())))
    });
    let trace = trace.transpose()?;
    let (events, mut happens) = mpsc::channel(MOST_EVENTS);
    let room = Arc::new(Notify::new());
    let mut seats = Vec::new();
    for rank in options.ranks.clone() {
        let listener = listening(&options, rank, Kind::Control).await?;
        tokio::spawn(serve_hosts(rank, listener, events.clone()));
        let listener = listening(&options, rank, Kind::Wire).await?;
        let (wire, to_send) = mpsc::channel(MOST_PACKETS);
        let knows_by_topic = options.faithful.to(COMMUNICATORS);
        let publisher = Publisher { rank, waits_for_all: false, knows_by_topic };
        tokio::spawn(publisher.publish(listener, to_send, room.clone(), events.clone()));
        let listener = listening(&options, rank, Kind::KernelOut).await?;
        let (kernel, to_feed) = mpsc::channel(MOST_FED);
        let publisher = Publisher { rank, waits_for_all: true, knows_by_topic: false };
        tokio::spawn(publisher.publish(listener, to_feed, room.clone(), events.clone()));
        let from = if options.loops_back { Kind::KernelOut } else { Kind::KernelIn };
        tokio::spawn(feed_in(rank, options.own(rank, from)?.to_string(), events.clone()));
        for peer in options.outsiders() {
            tokio::spawn(listen(rank, peer, options.theirs(peer, Kind::Wire)?, events.clone()));
        }
        seats.push(Seat {
            rank,
            owner: None,
            dispossessed: BTreeSet::new(),
            wire,
            kernel,
            unheard_by: options.outsiders().collect(),
            not_found: options.outsiders().collect(),
            deadline: None,
            permits: BTreeMap::new(),
            fed: Vec::new(),
            trouble: String::new(),
        });
    }
    let ended = asked_to_end().map_err(|error| ServeError(format!("signals cannot be waited for: {error}")))?;
    ready();
    let engine = |rank: u32| {
        let seed = options.seed.rotate_left(u32::BITS).wrapping_add(u64::from(rank));
        Engine::new(options.network, options.faithful).with_speed(options.speed).with_seed(seed).with_session(rank)
    };
    let cluster = Cluster::new(options.ranks.start, options.ranks.clone().map(engine).collect(), trace);
    let process = RandomState::new().build_hasher().finish().max(1);
    let mut server = Server { options, cluster, seats, process, never: Vec::new() };
    server.begin();
    tokio::pin!(ended);
    loop {
        let deadline = server.seats.iter().filter_map(|seat| seat.deadline).min();
        let overdue = async {
            match deadline {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            Some(event) = happens.recv() => server.take(event),
            () = room.notified() => server.cluster.wake_stalled(),
            () = overdue => server.give_up(Instant::now()),
            () = &mut ended => return Ok(()),
        }
        server.settle();
    }
}

/// Ends when somebody asks the process to.
fn asked_to_end() -> std::io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}

/// What becomes of what happens.
struct Server {
    options: Options,
    cluster: Cluster,
    seats: Vec<Seat>,
    /// What tells this process from others.
    process: u64,
    /// Hosts that the original would answer no more.
    never: Vec<oneshot::Sender<String>>,
}

impl Server {
    fn begin(&mut self) {
        for seat in self.seats.iter().filter(|seat| seat.missing().next().is_some()) {
            self.cluster.set_peers(seat.rank, Peers::Awaited);
        }
    }

    fn seat(&mut self, rank: u32) -> &mut Seat {
        // Events are of tasks that were started for a rank of this process.
        &mut self.seats[(rank - self.options.ranks.start) as usize]
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Request { rank, host, text, reply } => self.answer(rank, host, &text, reply),
            Event::Gone { rank, host } => {
                let seat = self.seat(rank);
                seat.dispossessed.remove(&host);
                let owner = seat.owner.take_if(|owner| owner.host == host);
                let is_others = seat.owner.is_some();
                if let Some(engine) = self.cluster.engine(rank) {
                    match is_others {
                        // The owner was not told of them, and is not to be.
                        true => engine.discard_ends(host.caller()),
                        false => engine.forget(host.caller()),
                    }
                    if owner.is_some() {
                        engine.end_job();
                    }
                }
            }
            Event::Packet { to, from, job, packet, permit } => {
                self.seat(to).permits.entry(from).or_default().push_back(permit);
                self.cluster.take(to, from, job, &packet);
            }
            Event::Fed { rank, bytes, more } => {
                self.cluster.feed(rank, &bytes);
                self.seat(rank).fed.push(more);
            }
            Event::Heard { rank, by } => {
                self.seat(rank).unheard_by.remove(&by);
                self.look_for_peers(rank);
            }
            Event::Unheard { rank, by } => {
                if self.options.outsiders().any(|peer| peer == by) {
                    self.seat(rank).unheard_by.insert(by);
                    self.look_for_peers(rank);
                }
            }
            Event::Found { rank, peer } => {
                self.seat(rank).not_found.remove(&peer);
                self.cluster.tell(rank, |engine| engine.find(peer));
                self.look_for_peers(rank);
            }
            Event::Lost { rank, peer } => {
                self.seat(rank).not_found.insert(peer);
                eprintln!("accl-emulator: rank {rank}: rank {peer} has gone");
                self.look_for_peers(rank);
                self.cluster.tell(rank, |engine| engine.lose(peer));
            }
        }
    }

    /// Whether all peers of a rank listen to it, and it to them.
    fn look_for_peers(&mut self, rank: u32) {
        let seat = self.seat(rank);
        if seat.missing().next().is_some() {
            return self.cluster.set_peers(rank, Peers::Awaited);
        }
        (seat.deadline, seat.trouble) = (None, String::new());
        self.cluster.set_peers(rank, Peers::There);
    }

    fn answer(&mut self, rank: u32, host: HostId, text: &[u8], reply: oneshot::Sender<String>) {
        let seat = self.seat(rank);
        let is_dispossessed = seat.dispossessed.contains(&host);
        let is_others = seat.owner.as_ref().is_some_and(|owner| owner.host != host);
        let ends = match &seat.owner {
            None => Ends::OfAll,
            Some(owner) if owner.host == host => Ends::OfGone,
            Some(_) => Ends::Own,
        };
        let answer = match Request::from_json(text) {
            Ok(Request::About) => self.about(rank),
            // What it goes on to do would be done to somebody else's engine, and what it asks about is not there any more.
            Ok(_) if is_dispossessed => Some(Reply::Status(Status::Taken)),
            Ok(Request::Claim { owner, job }) => self.claim(rank, host, &owner, job),
            Ok(request) => {
                let resets = matches!(&request, Request::Call { call, .. } if call.sets(ConfigFunction::Reset));
                let is_started = matches!(&request, Request::Call { control, .. }
                    if self.cluster.engine(rank).is_some_and(|engine| engine.has_control(*control)));
                if resets && is_started {
                    self.take_from_others(rank, host);
                } else if is_others && changes(&request) {
                    // The end of a call of another host would be taken for that of the owner's.
                    return self.reply(rank, text, Reply::Status(Status::Not), reply);
                }
                self.cluster.answer(rank, host.caller(), ends, &request)
            }
            Err(BadRequest::Call { .. }) if is_dispossessed => Some(Reply::Status(Status::Taken)),
            Err(BadRequest::Call { .. }) if is_others => None,
            Err(BadRequest::Call { control, .. }) => self.cluster.start_unknown(rank, host.caller(), control),
            Err(BadRequest::Json(_) | BadRequest::Type(_) | BadRequest::Missing(_)) => None,
        };
        self.reply(rank, text, answer.unwrap_or(Reply::Status(Status::Not)), reply);
    }

    fn reply(&mut self, rank: u32, text: &[u8], answer: Reply, reply: oneshot::Sender<String>) {
        let answer = answer.to_json();
        if self.cluster.engine(rank).is_some_and(|engine| engine.is_deaf()) {
            self.never.push(reply);
            return;
        }
        self.cluster.trace_exchange(rank, text, &answer);
        // Who has asked may have gone.
        let _ = reply.send(answer);
    }

    /// The rank is this host's unless another has it. Whoever resets it takes it from that one.
    fn claim(&mut self, rank: u32, host: HostId, name: &str, job: u32) -> Option<Reply> {
        let seat = self.seat(rank);
        if seat.owner.as_ref().is_some_and(|owner| owner.host != host) {
            return self.about(rank);
        }
        let name = name.chars().take(MOST_NAME_CHARS).collect();
        seat.owner.get_or_insert(Owner { host, name, since: Instant::now() });
        // Where the original may be among the peers, whose packets say nothing of jobs, ours say nothing either.
        let job = if self.options.faithful.to(COMMUNICATORS) { 0 } else { job };
        self.cluster.engine(rank)?.set_next_job(job);
        Some(Reply::Status(Status::Good))
    }

    /// A reset of a host that has not said that it uses the engine ends what others have said.
    fn take_from_others(&mut self, rank: u32, host: HostId) {
        let seat = self.seat(rank);
        if seat.owner.as_ref().is_none_or(|owner| owner.host != host) {
            let before = seat.owner.take().map(|owner| owner.host);
            seat.dispossessed.extend(before);
            if let Some(engine) = self.cluster.engine(rank) {
                before.into_iter().for_each(|host| engine.discard_ends(host.caller()));
                engine.set_next_job(0);
            }
        }
    }

    fn about(&mut self, rank: u32) -> Option<Reply> {
        let mut about = self.cluster.about(rank, self.options.world())?;
        (about.process, about.served) = (self.process, [self.options.ranks.start, self.options.ranks.len() as u32]);
        let seat = self.seat(rank);
        about.missing = seat.missing().collect();
        if let Some(Owner { name, since, .. }) = &seat.owner {
            (about.owner, about.owner_s) = (name.clone(), since.elapsed().as_secs());
        }
        let trouble = seat.trouble.clone();
        let own = self.cluster.engine(rank).map(|engine| engine.trouble()).unwrap_or_default();
        about.trouble = [trouble, own].into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join("; ");
        Some(Reply::About(about))
    }

    /// Calls that have waited for peers for long enough end.
    fn give_up(&mut self, now: Instant) {
        let seconds = self.options.peer_timeout.as_secs_f64();
        for seat in self.seats.iter_mut().filter(|seat| seat.deadline.is_some_and(|deadline| deadline <= now)) {
            let ranks: Vec<String> = seat.missing().map(|rank| rank.to_string()).collect();
            seat.trouble = format!(
                "rank {}: packets cannot be let in after {seconds} s, because the emulators of these ranks are not there: {}; start them, or correct \
                 --hosts",
                seat.rank,
                ranks.join(", ")
            );
            eprintln!("accl-emulator: {}", seat.trouble);
            seat.deadline = None;
            self.cluster.set_peers(seat.rank, Peers::Missing);
        }
    }

    /// Until nothing goes on any more by itself.
    fn settle(&mut self) {
        let mut has_moved = true;
        while std::mem::take(&mut has_moved) {
            for seat in &self.seats {
                self.cluster.set_room(seat.rank, seat.wire.capacity());
            }
            self.cluster.settle();
            for seat in &mut self.seats {
                has_moved |= carry(seat, &mut self.cluster);
            }
        }
        let patience = self.options.peer_timeout;
        for seat in &mut self.seats {
            let Some(engine) = self.cluster.engine(seat.rank) else { continue };
            for (peer, permits) in &mut seat.permits {
                permits.truncate(engine.held(*peer));
            }
            if engine.is_hungry() {
                // A kernel that has gone needs no word.
                seat.fed.drain(..).for_each(|more| more.send(()).unwrap_or_default());
            }
            if engine.awaits_peers() {
                seat.deadline.get_or_insert_with(|| Instant::now() + patience);
            } else {
                seat.deadline = None;
                if engine.peers() == Peers::Missing {
                    // The next call that lets packets in waits anew.
                    engine.set_peers(Peers::Awaited);
                }
            }
        }
    }
}

/// Whether a request does more than to look. Who asks for ends is told of its own.
fn changes(request: &Request) -> bool {
    use Request::{About, Poll, ReadMemory, ReadRegister};
    !matches!(request, ReadRegister { .. } | ReadMemory { .. } | Poll { .. } | About)
}

/// Hands what a rank has for others to its sockets, as far as they take it. `true`: its engine has room for more.
fn carry(seat: &mut Seat, cluster: &mut Cluster) -> bool {
    if let Some(outgoing) = cluster.outgoing(seat.rank) {
        while let Some(packet) = outgoing.pop_front() {
            match seat.wire.try_send(Sent { from: seat.rank, outgoing: packet }) {
                Ok(()) => {}
                Err(mpsc::error::TrySendError::Full(Sent { outgoing: packet, .. })) => {
                    outgoing.push_front(packet);
                    break;
                }
                // Its task ends with the process alone.
                Err(mpsc::error::TrySendError::Closed(_)) if seat.trouble.is_empty() => {
                    seat.trouble =
                        format!("rank {}: its packets cannot be sent any more; restart its emulator", seat.rank);
                    eprintln!("accl-emulator: {}", seat.trouble);
                }
                Err(mpsc::error::TrySendError::Closed(_)) => {}
            }
        }
    }
    let Some(engine) = cluster.engine(seat.rank) else { return false };
    let mut has_fed = false;
    while let Ok(place) = seat.kernel.try_reserve() {
        let Some((stream, bytes)) = engine.take_fed() else { break };
        place.send(Fed(stream, bytes));
        has_fed = true;
    }
    if has_fed {
        cluster.tell(seat.rank, |_| ());
    }
    has_fed
}

/// Where a socket of a rank takes connections.
async fn listening(options: &Options, rank: u32, kind: Kind) -> Result<TcpListener, ServeError> {
    let address = options.own(rank, kind)?;
    let listener = TcpListener::bind(address).await;
    listener.map_err(|error| ServeError(format!("rank {rank} cannot listen at tcp://{address}: {error}")))
}
