//! Engines behind the sockets of the emulator's protocol.
//!
//! Owns sockets and tasks: one request and one reply at a time for each rank's host, packets to and from engines of other processes, kernel
//! streams. All engines of a process belong to one task, which nobody waits for under a lock, and nothing runs while nobody asks. Read
//! [`serve`] first.

pub(crate) mod cluster;

use std::net::IpAddr;
use std::ops::Range;
use std::time::Duration;

use accl_cclo::control::{Reply, Request, Status, data_from_json, data_to_json};
use accl_cclo::memory_map::Network;
use tokio::sync::{mpsc, oneshot};
use zeromq::{PubSocket, RepSocket, Socket, SocketRecv, SocketSend, SubSocket, XPubSocket, ZmqError, ZmqMessage};

use crate::program::Faithful;
use crate::time::Speed;
use cluster::{Cluster, Outgoing, enables_packets};

/// What happens and has yet to be looked at, before sockets are not read any more. What engines send is not limited so: whoever waits for a
/// peer that reads must go on reading itself.
const MOST_EVENTS: usize = 256;
/// How often is looked whether engines of other processes are there, and whether kernels are: they may never be.
const PEER_INTERVAL: Duration = Duration::from_millis(20);
const KERNEL_INTERVAL: Duration = Duration::from_millis(500);

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
    /// How fast engines and links are by the counter register.
    pub speed: Speed,
    /// What an engine has for kernels comes back to it.
    pub loops_back: bool,
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

/// What happens to the engines.
enum Event {
    /// Their host asks.
    Request { rank: u32, text: Vec<u8>, reply: oneshot::Sender<String> },
    /// A packet has come.
    Packet { to: u32, from: u32, packet: Vec<u8> },
    /// A kernel has something.
    Fed { rank: u32, bytes: Vec<u8> },
    /// An engine of another process listens to one of this.
    Heard { rank: u32, by: u32 },
}

/// A rank's sockets, by the reference: its base port, and a quarter for each kind.
enum Kind {
    Control,
    Wire,
    KernelOut,
    KernelIn,
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

    fn own(&self, rank: u32, kind: Kind) -> Result<String, ServeError> {
        let port = self.port(rank, kind).ok_or_else(|| ServeError(format!("rank {rank} has no port below 65536")))?;
        let host = self.bind.to_string();
        Ok(if self.bind.is_ipv6() { format!("tcp://[{host}]:{port}") } else { format!("tcp://{host}:{port}") })
    }

    fn theirs(&self, rank: u32, kind: Kind) -> Result<String, ServeError> {
        let port = self.port(rank, kind).ok_or_else(|| ServeError(format!("rank {rank} has no port below 65536")))?;
        Ok(format!("tcp://{}:{port}", self.hosts[rank as usize].0))
    }

    fn outsiders(&self) -> impl Iterator<Item = u32> + use<> {
        let own = self.ranks.clone();
        (0..self.world()).filter(move |rank| !own.contains(rank))
    }
}

/// The subscription of a rank: four digits, as far as they go.
fn topic(rank: u32) -> String {
    format!("{rank:04}")
}

/// Serves engines until somebody ends the process. `ready` is called when hosts can ask.
///
/// # Errors
/// A socket that cannot be bound, by its rank and address.
pub async fn serve(options: Options, ready: impl FnOnce()) -> Result<(), ServeError> {
    let (events, mut happens) = mpsc::channel(MOST_EVENTS);
    let (hears, mut is_heard) = mpsc::unbounded_channel();
    let mut wires = Vec::new();
    let mut kernels = Vec::new();
    for rank in options.ranks.clone() {
        tokio::spawn(control(
            rank,
            bound(RepSocket::new(), &options.own(rank, Kind::Control)?, rank).await?,
            events.clone(),
        ));
        let wire = bound(XPubSocket::new(), &options.own(rank, Kind::Wire)?, rank).await?;
        let (packets, to_send) = mpsc::unbounded_channel();
        tokio::spawn(publish(rank, wire, to_send, hears.clone()));
        wires.push(packets);
        let out = bound(PubSocket::new(), &options.own(rank, Kind::KernelOut)?, rank).await?;
        let (fed, to_feed) = mpsc::unbounded_channel();
        tokio::spawn(feed_out(out, to_feed));
        kernels.push(fed);
        let from = if options.loops_back { Kind::KernelOut } else { Kind::KernelIn };
        tokio::spawn(feed_in(rank, options.own(rank, from)?, events.clone()));
        for peer in options.outsiders() {
            tokio::spawn(listen(rank, peer, options.theirs(peer, Kind::Wire)?, events.clone()));
        }
    }
    ready();
    let mut cluster = Cluster::new(options.ranks.clone(), options.network, options.faithful, options.speed);
    let mut heard: Vec<Vec<u32>> = options.ranks.clone().map(|_| options.outsiders().collect()).collect();
    let mut held: Vec<(u32, Request)> = Vec::new();
    loop {
        let event = tokio::select! {
            Some(event) = happens.recv() => event,
            Some(event) = is_heard.recv() => event,
            else => return Ok(()),
        };
        match event {
            Event::Request { rank, text, reply } => {
                let request = Request::from_json(&text);
                let text = match &request {
                    // Their end is what says that packets get through.
                    Ok(request)
                        if enables_packets(request) && !heard[(rank - options.ranks.start) as usize].is_empty() =>
                    {
                        held.push((rank, request.clone()));
                        Reply::Status(Status::Good)
                    }
                    Ok(request) => cluster.answer(rank, request).unwrap_or(Reply::Status(Status::Not)),
                    Err(_) => Reply::Status(Status::Not),
                };
                // Who has asked may have gone.
                let _ = reply.send(text.to_json());
            }
            Event::Packet { to, from, packet } => {
                cluster.take(to, from, &packet);
                cluster.settle();
            }
            Event::Fed { rank, bytes } => cluster.feed(rank, &bytes),
            Event::Heard { rank, by } => {
                let missing = &mut heard[(rank - options.ranks.start) as usize];
                missing.retain(|&peer| peer != by);
                if missing.is_empty() {
                    for (_, request) in held.extract_if(.., |(of, _)| *of == rank) {
                        cluster.answer(rank, &request);
                    }
                }
            }
        }
        for Outgoing { from, to, packet } in cluster.take_outgoing() {
            let _ = wires[(from - options.ranks.start) as usize].send((to, packet));
        }
        for rank in options.ranks.clone() {
            while let Some(fed) = cluster.take_fed(rank) {
                let _ = kernels[(rank - options.ranks.start) as usize].send(fed);
            }
        }
    }
}

async fn bound<S: Socket>(mut socket: S, address: &str, rank: u32) -> Result<S, ServeError> {
    match socket.bind(address).await {
        Ok(_) => Ok(socket),
        Err(error) => Err(ServeError(format!("rank {rank} cannot listen at {address}: {error}"))),
    }
}

/// One request and one reply at a time.
async fn control(rank: u32, mut socket: RepSocket, events: mpsc::Sender<Event>) {
    loop {
        let text = match socket.recv().await {
            Ok(message) => message.into_vec().into_iter().flatten().collect(),
            Err(ZmqError::NoMessage) => return,
            // A host that has gone is no reason not to serve the next.
            Err(_) => continue,
        };
        let (reply, answer) = oneshot::channel();
        if events.send(Event::Request { rank, text, reply }).await.is_err() {
            return;
        }
        let Ok(answer) = answer.await else { return };
        let _ = socket.send(answer.into()).await;
    }
}

/// Packets for engines of other processes; who subscribes is told to the engines.
async fn publish(
    rank: u32,
    mut socket: XPubSocket,
    mut packets: mpsc::UnboundedReceiver<(u32, Vec<u8>)>,
    events: mpsc::UnboundedSender<Event>,
) {
    loop {
        tokio::select! {
            packet = packets.recv() => {
                let Some((to, packet)) = packet else { return };
                let mut message = ZmqMessage::from(topic(to));
                message.push_back(rank.to_string().into());
                message.push_back(data_to_json(&packet).into());
                let _ = socket.send(message).await;
            }
            subscription = socket.recv() => {
                let Ok(subscription) = subscription else { continue };
                let bytes: Vec<u8> = subscription.into_vec().into_iter().flatten().collect();
                if let Some((1, digits)) = bytes.split_first().map(|(first, rest)| (*first, rest))
                    && let Some(by) = std::str::from_utf8(digits).ok().and_then(|digits| digits.parse().ok())
                    && events.send(Event::Heard { rank, by }).is_err()
                {
                    return;
                }
            }
        }
    }
}

/// A socket with this subscription, once somebody publishes at an address, which is looked at that often: the library's own attempts are far
/// apart after the first. `None`: there will be none.
async fn subscribed(address: &str, topic: &str, interval: Duration) -> Option<SubSocket> {
    let place = address.strip_prefix("tcp://").unwrap_or(address);
    while tokio::net::TcpStream::connect(place).await.is_err() {
        tokio::time::sleep(interval).await;
    }
    let mut socket = SubSocket::new();
    socket.connect(address).await.ok()?;
    socket.subscribe(topic).await.ok()?;
    Some(socket)
}

/// Packets of an engine of another process for one of this.
async fn listen(rank: u32, peer: u32, address: String, events: mpsc::Sender<Event>) {
    let Some(mut socket) = subscribed(&address, &topic(rank), PEER_INTERVAL).await else { return };
    loop {
        let frames = match socket.recv().await {
            Ok(message) => message.into_vec(),
            Err(ZmqError::NoMessage) => return,
            Err(_) => continue,
        };
        let Some(packet) = frames.last().and_then(|json| data_from_json(json)) else { continue };
        if events.send(Event::Packet { to: rank, from: peer, packet }).await.is_err() {
            return;
        }
    }
}

/// What engines have for kernels.
async fn feed_out(mut socket: PubSocket, mut fed: mpsc::UnboundedReceiver<(u32, Vec<u8>)>) {
    while let Some((stream, bytes)) = fed.recv().await {
        let mut message = ZmqMessage::from(stream.to_string());
        message.push_back(data_to_json(&bytes).into());
        let _ = socket.send(message).await;
    }
}

/// What kernels have for an engine, as soon as somebody publishes there.
async fn feed_in(rank: u32, address: String, events: mpsc::Sender<Event>) {
    let Some(mut socket) = subscribed(&address, "", KERNEL_INTERVAL).await else { return };
    loop {
        let frames = match socket.recv().await {
            Ok(message) => message.into_vec(),
            Err(ZmqError::NoMessage) => return,
            Err(_) => continue,
        };
        let Some(bytes) = frames.last().and_then(|json| data_from_json(json)) else { continue };
        if events.send(Event::Fed { rank, bytes }).await.is_err() {
            return;
        }
    }
}
