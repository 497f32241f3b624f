//! Engines behind the sockets of the emulator's protocol.
//!
//! Owns the ports of ranks and the handling of events: requests of hosts, one at a time for each host, packets to and from engines of other
//! processes, and kernel streams. One task owns all engines of a process, so no lock is needed, and nothing runs without an event. Read [`serve`]
//! first.

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

/// Maximum number of queued events. If the queue is full, sockets are not read.
const MOST_EVENTS: usize = 256;
/// Maximum number of queued packets for other processes. If the queue is full, the engine waits.
const MOST_PACKETS: usize = 256;
/// Maximum characters of a host's name.
const MOST_NAME_CHARS: usize = 200;
/// Number of the hazard that packets name neither communicator nor job. Worlds that include emulators of the original reproduce it.
const COMMUNICATORS: u8 = 12;
/// Maximum number of queued messages for kernels.
const MOST_FED: usize = 64;

/// Options of the server.
#[derive(Clone, Debug)]
pub struct Options {
    /// Ranks of this process.
    pub ranks: Range<u32>,
    /// Host name and base port of each rank's sockets, for all ranks.
    pub hosts: Vec<(String, u16)>,
    /// Address at which this process listens.
    pub bind: IpAddr,
    /// Network between the engines.
    pub network: Network,
    /// Firmware hazards that are reproduced.
    pub faithful: Faithful,
    /// Seed of the random number generator for hazards that depend on chance.
    pub seed: u64,
    /// Speed of engines and links, for the counter register.
    pub speed: Speed,
    /// Whether an engine's output for kernels is fed back to the engine.
    pub loops_back: bool,
    /// How long a call waits for engines of other processes to connect.
    pub peer_timeout: Duration,
    /// Path of a file for a trace of all traffic.
    pub trace: Option<PathBuf>,
}

/// Reason why the engines cannot be served.
#[derive(Debug)]
pub struct ServeError(pub String);

impl std::fmt::Display for ServeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ServeError {}

/// Kind of a rank's socket. By the reference, each kind takes a quarter of the port range from the base port.
enum Kind {
    Control,
    Wire,
    KernelOut,
    KernelIn,
}

impl LocalRank {
    /// Returns the peers that are not subscribed to this rank, or to which this rank is not subscribed.
    fn missing(&self) -> impl Iterator<Item = u32> {
        self.not_subscribed.union(&self.not_found).copied()
    }
}

impl Options {
    fn world(&self) -> u32 {
        self.hosts.len() as u32
    }

    /// Returns the port of a rank's socket, or `None` if the number exceeds the range of ports.
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

    /// Describes, for a person, the ports at which hosts reach the ranks of this process.
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

/// Host that has claimed an engine. The claim lasts until its connection ends or another host resets the engine.
struct Owner {
    host: HostId,
    name: String,
    since: Instant,
}

/// A rank of this process, with its owner, its sockets and its peers.
struct LocalRank {
    rank: u32,
    /// Host that has claimed the engine. Hosts that never claim it, like the original's, are served as well.
    owner: Option<Owner>,
    /// Hosts that had claimed the engine before another host took it from them.
    former_owners: BTreeSet<HostId>,
    /// Queues of packets for engines of other processes, and of messages for kernels.
    wire: mpsc::Sender<Sent>,
    kernel: mpsc::Sender<Fed>,
    /// Peers that are not subscribed to this rank, and peers to which this rank is not subscribed.
    not_subscribed: BTreeSet<u32>,
    not_found: BTreeSet<u32>,
    /// Time until which a call waits for missing peers.
    deadline: Option<Instant>,
    /// Permits of packets that wait for a place, by peer.
    permits: BTreeMap<u32, VecDeque<OwnedSemaphorePermit>>,
    /// Kernel connections to notify once the engine takes more bytes.
    fed: Vec<oneshot::Sender<()>>,
    /// Why the call that waited for peers has failed.
    trouble: String,
}

/// Serves engines until the process receives SIGINT or SIGTERM. Calls `ready` once hosts can connect.
///
/// # Errors
/// A socket cannot be bound (with its rank and address), or the trace cannot be written.
pub async fn serve(options: Options, ready: impl FnOnce()) -> Result<(), ServeError> {
    let trace = options.trace.as_deref().map(|path| {
        Trace::create(path)
            .map_err(|error| ServeError(format!("--trace: {} cannot be written: {error}", path.display())))
    });
    let trace = trace.transpose()?;
    let (events, mut happens) = mpsc::channel(MOST_EVENTS);
    let room = Arc::new(Notify::new());
    let mut local_ranks = Vec::new();
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
        local_ranks.push(LocalRank {
            rank,
            owner: None,
            former_owners: BTreeSet::new(),
            wire,
            kernel,
            not_subscribed: options.outsiders().collect(),
            not_found: options.outsiders().collect(),
            deadline: None,
            permits: BTreeMap::new(),
            fed: Vec::new(),
            trouble: String::new(),
        });
    }
    let ended = asked_to_end().map_err(|error| ServeError(format!("cannot wait for signals: {error}")))?;
    ready();
    let engine = |rank: u32| {
        let seed = options.seed.rotate_left(u32::BITS).wrapping_add(u64::from(rank));
        Engine::new(options.network, options.faithful).with_speed(options.speed).with_seed(seed).with_session(rank)
    };
    let cluster = Cluster::new(options.ranks.start, options.ranks.clone().map(engine).collect(), trace);
    let process = RandomState::new().build_hasher().finish().max(1);
    let mut server = Server { options, cluster, local_ranks, process, never: Vec::new() };
    server.begin();
    tokio::pin!(ended);
    loop {
        let deadline = server.local_ranks.iter().filter_map(|local_rank| local_rank.deadline).min();
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

/// Returns a future that completes on SIGINT or SIGTERM.
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

/// Handles the events of all engines of the process.
struct Server {
    options: Options,
    cluster: Cluster,
    local_ranks: Vec<LocalRank>,
    /// Random number that distinguishes this process from others.
    process: u64,
    /// Reply channels of hosts that the original would never answer again.
    never: Vec<oneshot::Sender<String>>,
}

impl Server {
    fn begin(&mut self) {
        for local_rank in self.local_ranks.iter().filter(|local_rank| local_rank.missing().next().is_some()) {
            self.cluster.set_peers(local_rank.rank, Peers::Awaited);
        }
    }

    fn local_rank(&mut self, rank: u32) -> &mut LocalRank {
        // All events come from tasks that were started for a rank of this process.
        &mut self.local_ranks[(rank - self.options.ranks.start) as usize]
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Request { rank, host, text, reply } => self.answer(rank, host, &text, reply),
            Event::Gone { rank, host } => {
                let local_rank = self.local_rank(rank);
                local_rank.former_owners.remove(&host);
                let owner = local_rank.owner.take_if(|owner| owner.host == host);
                let is_others = local_rank.owner.is_some();
                if let Some(engine) = self.cluster.engine(rank) {
                    match is_others {
                        // The ends of this host were not reported to the owner, and must not be.
                        true => engine.discard_ends(host.caller()),
                        false => engine.forget(host.caller()),
                    }
                    if owner.is_some() {
                        engine.end_job();
                    }
                }
            }
            Event::Packet { to, from, job, packet, permit } => {
                self.local_rank(to).permits.entry(from).or_default().push_back(permit);
                self.cluster.take(to, from, job, &packet);
            }
            Event::Fed { rank, bytes, more } => {
                self.cluster.feed(rank, &bytes);
                self.local_rank(rank).fed.push(more);
            }
            Event::Subscribed { rank, by } => {
                self.local_rank(rank).not_subscribed.remove(&by);
                self.look_for_peers(rank);
            }
            Event::Unsubscribed { rank, by } => {
                if self.options.outsiders().any(|peer| peer == by) {
                    self.local_rank(rank).not_subscribed.insert(by);
                    self.look_for_peers(rank);
                }
            }
            Event::Found { rank, peer } => {
                self.local_rank(rank).not_found.remove(&peer);
                self.cluster.update(rank, |engine| engine.find(peer));
                self.look_for_peers(rank);
            }
            Event::Lost { rank, peer } => {
                self.local_rank(rank).not_found.insert(peer);
                eprintln!("accl-emulator: rank {rank}: rank {peer} disconnected");
                self.look_for_peers(rank);
                self.cluster.update(rank, |engine| engine.lose(peer));
            }
        }
    }

    /// Checks whether all peers of a rank are subscribed to it, and the rank to them.
    fn look_for_peers(&mut self, rank: u32) {
        let local_rank = self.local_rank(rank);
        if local_rank.missing().next().is_some() {
            return self.cluster.set_peers(rank, Peers::Awaited);
        }
        (local_rank.deadline, local_rank.trouble) = (None, String::new());
        self.cluster.set_peers(rank, Peers::There);
    }

    fn answer(&mut self, rank: u32, host: HostId, text: &[u8], reply: oneshot::Sender<String>) {
        let local_rank = self.local_rank(rank);
        let is_former_owner = local_rank.former_owners.contains(&host);
        let is_others = local_rank.owner.as_ref().is_some_and(|owner| owner.host != host);
        let ends = match &local_rank.owner {
            None => Ends::OfAll,
            Some(owner) if owner.host == host => Ends::OfGone,
            Some(_) => Ends::Own,
        };
        let answer = match Request::from_json(text) {
            Ok(Request::About) => self.about(rank),
            // Further requests of this host would affect the engine of another host, and the state that it asks about no longer exists.
            Ok(_) if is_former_owner => Some(Reply::Status(Status::Taken)),
            Ok(Request::Claim { owner, job }) => self.claim(rank, host, &owner, job),
            Ok(request) => {
                let resets = matches!(&request, Request::Call { call, .. } if call.sets(ConfigFunction::Reset));
                let is_started = matches!(&request, Request::Call { control, .. }
                    if self.cluster.engine(rank).is_some_and(|engine| engine.has_control(*control)));
                if resets && is_started {
                    self.take_from_others(rank, host);
                } else if is_others && changes(&request) {
                    // Otherwise the owner would take the end of another host's call for the end of its own.
                    return self.reply(rank, text, Reply::Status(Status::Not), reply);
                }
                self.cluster.answer(rank, host.caller(), ends, &request)
            }
            Err(BadRequest::Call { .. }) if is_former_owner => Some(Reply::Status(Status::Taken)),
            Err(BadRequest::Call { .. }) if is_others => None,
            Err(BadRequest::Call { control, .. }) => self.cluster.start_unknown(rank, host.caller(), control),
            Err(BadRequest::Json(_) | BadRequest::Type(_) | BadRequest::Missing(_)) => None,
        };
        self.reply(rank, text, answer.unwrap_or(Reply::Status(Status::Not)), reply);
    }

    fn reply(&mut self, rank: u32, text: &[u8], answer: Reply, reply: oneshot::Sender<String>) {
        let answer = answer.to_json();
        if self.cluster.engine(rank).is_some_and(|engine| engine.is_hung()) {
            self.never.push(reply);
            return;
        }
        self.cluster.trace_exchange(rank, text, &answer);
        // The host may have disconnected.
        let _ = reply.send(answer);
    }

    /// Claims the rank for this host unless another host has it. A host that resets the rank takes it from the owner.
    fn claim(&mut self, rank: u32, host: HostId, name: &str, job: u32) -> Option<Reply> {
        let local_rank = self.local_rank(rank);
        if local_rank.owner.as_ref().is_some_and(|owner| owner.host != host) {
            return self.about(rank);
        }
        let name = name.chars().take(MOST_NAME_CHARS).collect();
        local_rank.owner.get_or_insert(Owner { host, name, since: Instant::now() });
        // If originals, whose packets name no job, may be among the peers, the packets of this emulator name none either.
        let job = if self.options.faithful.to(COMMUNICATORS) { 0 } else { job };
        self.cluster.engine(rank)?.set_next_job(job);
        Some(Reply::Status(Status::Good))
    }

    /// Ends the claim of the owner if another host resets the engine.
    fn take_from_others(&mut self, rank: u32, host: HostId) {
        let local_rank = self.local_rank(rank);
        if local_rank.owner.as_ref().is_none_or(|owner| owner.host != host) {
            let before = local_rank.owner.take().map(|owner| owner.host);
            local_rank.former_owners.extend(before);
            if let Some(engine) = self.cluster.engine(rank) {
                before.into_iter().for_each(|host| engine.discard_ends(host.caller()));
                engine.set_next_job(0);
            }
        }
    }

    fn about(&mut self, rank: u32) -> Option<Reply> {
        let mut about = self.cluster.about(rank, self.options.world())?;
        (about.process, about.served) = (self.process, [self.options.ranks.start, self.options.ranks.len() as u32]);
        let local_rank = self.local_rank(rank);
        about.missing = local_rank.missing().collect();
        if let Some(Owner { name, since, .. }) = &local_rank.owner {
            (about.owner, about.owner_s) = (name.clone(), since.elapsed().as_secs());
        }
        let trouble = local_rank.trouble.clone();
        let own = self.cluster.engine(rank).map(|engine| engine.trouble()).unwrap_or_default();
        about.trouble = [trouble, own].into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join("; ");
        Some(Reply::About(about))
    }

    /// Fails the calls that have waited too long for peers.
    fn give_up(&mut self, now: Instant) {
        let seconds = self.options.peer_timeout.as_secs_f64();
        for local_rank in
            self.local_ranks.iter_mut().filter(|local_rank| local_rank.deadline.is_some_and(|deadline| deadline <= now))
        {
            let ranks: Vec<String> = local_rank.missing().map(|rank| rank.to_string()).collect();
            local_rank.trouble = format!(
                "rank {}: cannot enable packets: after {seconds} s, the emulators of these ranks are missing: {}; start them, or correct --hosts",
                local_rank.rank,
                ranks.join(", ")
            );
            eprintln!("accl-emulator: {}", local_rank.trouble);
            local_rank.deadline = None;
            self.cluster.set_peers(local_rank.rank, Peers::Missing);
        }
    }

    /// Advances until nothing can advance without a new event.
    fn settle(&mut self) {
        let mut has_moved = true;
        while std::mem::take(&mut has_moved) {
            for local_rank in &self.local_ranks {
                self.cluster.set_room(local_rank.rank, local_rank.wire.capacity());
            }
            self.cluster.settle();
            for local_rank in &mut self.local_ranks {
                has_moved |= flush_outgoing(local_rank, &mut self.cluster);
            }
        }
        let patience = self.options.peer_timeout;
        for local_rank in &mut self.local_ranks {
            let Some(engine) = self.cluster.engine(local_rank.rank) else { continue };
            for (peer, permits) in &mut local_rank.permits {
                permits.truncate(engine.held(*peer));
            }
            if engine.is_hungry() {
                // A kernel connection that has ended needs no notification.
                local_rank.fed.drain(..).for_each(|more| more.send(()).unwrap_or_default());
            }
            if engine.awaits_peers() {
                local_rank.deadline.get_or_insert_with(|| Instant::now() + patience);
            } else {
                local_rank.deadline = None;
                if engine.peers() == Peers::Missing {
                    // The next call that lets packets in waits again.
                    engine.set_peers(Peers::Awaited);
                }
            }
        }
    }
}

/// Returns whether a request changes anything. A poll does not count, since a host that is not the owner sees its own ends only.
fn changes(request: &Request) -> bool {
    use Request::{About, Poll, ReadMemory, ReadRegister};
    !matches!(request, ReadRegister { .. } | ReadMemory { .. } | Poll { .. } | About)
}

/// Passes a rank's packets and kernel messages to its sockets, as far as they accept them. Returns `true` if the engine now has more room.
fn flush_outgoing(local_rank: &mut LocalRank, cluster: &mut Cluster) -> bool {
    if let Some(outgoing) = cluster.outgoing(local_rank.rank) {
        while let Some(packet) = outgoing.pop_front() {
            match local_rank.wire.try_send(Sent { from: local_rank.rank, outgoing: packet }) {
                Ok(()) => {}
                Err(mpsc::error::TrySendError::Full(Sent { outgoing: packet, .. })) => {
                    outgoing.push_front(packet);
                    break;
                }
                // The task of the socket ends only with the process.
                Err(mpsc::error::TrySendError::Closed(_)) if local_rank.trouble.is_empty() => {
                    local_rank.trouble =
                        format!("rank {}: its packets can no longer be sent; restart its emulator", local_rank.rank);
                    eprintln!("accl-emulator: {}", local_rank.trouble);
                }
                Err(mpsc::error::TrySendError::Closed(_)) => {}
            }
        }
    }
    let Some(engine) = cluster.engine(local_rank.rank) else { return false };
    let mut has_fed = false;
    while let Ok(place) = local_rank.kernel.try_reserve() {
        let Some((stream, bytes)) = engine.take_fed() else { break };
        place.send(Fed(stream, bytes));
        has_fed = true;
    }
    if has_fed {
        cluster.update(local_rank.rank, |_| ());
    }
    has_fed
}

/// Binds a socket of a rank.
async fn listening(options: &Options, rank: u32, kind: Kind) -> Result<TcpListener, ServeError> {
    let address = options.own(rank, kind)?;
    let listener = TcpListener::bind(address).await;
    listener.map_err(|error| ServeError(format!("rank {rank} cannot listen at tcp://{address}: {error}")))
}
