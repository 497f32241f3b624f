//! Traffic of a rank's sockets for packets and kernels, with one task for each connection; sockets of hosts are in `hosts`.
//!
//! Owns the format of messages, and the subscriptions. Each socket reads only as much as its consumer has room for. No data is dropped, and no queue
//! grows without limit. Read [`listen`] first.

use std::sync::Arc;
use std::time::Duration;

use accl_cclo::control::{data_from_json, data_to_json};
use accl_cclo::zmtp;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::{Instant, timeout};

use super::connection::{Connection, End, Role};
use super::event::Event;
use super::publisher::{Published, topic_of};
use crate::cluster::Outgoing;

/// Maximum number of a peer's packets that wait for a place. At that number its socket is not read.
const MOST_TAKEN: usize = 64;
/// Initial intervals between attempts to connect to engines of other processes and to kernels, which may never start.
const PEER_INTERVAL: Duration = Duration::from_millis(20);
const KERNEL_INTERVAL: Duration = Duration::from_millis(500);
/// The interval grows by the time waited so far, divided by `WAITED_PART`, up to `MOST_INTERVAL`.
const WAITED_PART: u32 = 20;
const MOST_INTERVAL: Duration = Duration::from_millis(500);
/// Time limit for a connection attempt to one address.
const CONNECT_PATIENCE: Duration = Duration::from_secs(2);

/// A packet in the original's format: receiver, sender and bytes, followed by the job, if there is one.
pub(super) struct Sent {
    pub(super) from: u32,
    pub(super) outgoing: Outgoing,
}

impl Published for Sent {
    fn topic(&self) -> String {
        topic_of(self.outgoing.to)
    }

    fn frames(&self) -> Vec<Vec<u8>> {
        let Self { from, outgoing: Outgoing { job, packet, .. } } = self;
        let job = Some(job).filter(|job| **job != 0).map(|job| job.to_string().into_bytes());
        [from.to_string().into_bytes(), data_to_json(packet).into_bytes()].into_iter().chain(job).collect()
    }
}

/// Bytes of an engine for a kernel stream, with the number of the stream.
pub(super) struct Fed(pub(super) u32, pub(super) Vec<u8>);

impl Published for Fed {
    fn topic(&self) -> String {
        self.0.to_string()
    }

    fn frames(&self) -> Vec<Vec<u8>> {
        vec![data_to_json(&self.1).into_bytes()]
    }
}

/// Address of a publisher, and the subscription.
struct Wanted {
    address: String,
    /// Rank named in messages.
    rank: u32,
    /// READY command of the subscribing socket.
    ready: Vec<u8>,
    topic: String,
    /// Initial interval between connection attempts.
    interval: Duration,
}

/// Connects to a publisher with this subscription, and retries until it succeeds.
async fn subscribed(wanted: &Wanted) -> Connection {
    let begin = Instant::now();
    let mut is_said = false;
    loop {
        match subscribe(wanted).await {
            Ok(connection) => return connection,
            Err(End::Refused(why)) if !is_said => {
                let Wanted { rank, address, .. } = wanted;
                eprintln!("accl-emulator: rank {rank}: cannot subscribe to the service at {address}: {why}");
                is_said = true;
            }
            Err(End::Refused(_) | End::Gone) => {}
        }
        tokio::time::sleep((wanted.interval + begin.elapsed() / WAITED_PART).min(MOST_INTERVAL)).await;
    }
}

/// Connects to one of the addresses of a name. Each attempt has its own time limit. Otherwise the system would retry an unresponsive address ever
/// more rarely, and notice late that a peer has started.
async fn connected(name: &str) -> Result<TcpStream, End> {
    for address in tokio::net::lookup_host(name).await? {
        if let Ok(Ok(stream)) = timeout(CONNECT_PATIENCE, TcpStream::connect(address)).await {
            return Ok(stream);
        }
    }
    Err(End::Gone)
}

async fn subscribe(wanted: &Wanted) -> Result<Connection, End> {
    let stream = connected(&wanted.address).await?;
    let role = Role { ready: wanted.ready.clone(), takes: [b"PUB", b"XPUB"], refuses: "its socket is not of type PUB" };
    let mut connection = Connection::new(stream)?;
    connection.greet(&role).await?;
    connection.to.write(&zmtp::frame(0, &[&[1], wanted.topic.as_bytes()].concat())).await?;
    Ok(connection)
}

/// Receives packets of a peer in another process for an engine of this process, and reconnects whenever the connection ends.
pub(super) async fn listen(rank: u32, peer: u32, address: String, events: mpsc::Sender<Event>) {
    let permits = Arc::new(Semaphore::new(MOST_TAKEN));
    let ready = zmtp::ready_of_rank(b"SUB", rank);
    let wanted = Wanted { address, rank, ready, topic: topic_of(rank), interval: PEER_INTERVAL };
    let mut pause = PEER_INTERVAL;
    loop {
        let mut connection = subscribed(&wanted).await;
        let begin = Instant::now();
        if events.send(Event::Found { rank, peer }).await.is_err() {
            return;
        }
        loop {
            let Ok(permit) = permits.clone().acquire_owned().await else { return };
            let frames = match connection.next_message().await {
                Ok(frames) => frames,
                Err(End::Gone) => break,
                Err(End::Refused(why)) => {
                    eprintln!("accl-emulator: rank {rank}: closed the connection to rank {peer}: {why}");
                    break;
                }
            };
            // An unreadable message may be a part of another message, so the connection is started again.
            let Some((job, packet)) = packet_of(&frames) else { break };
            if events.send(Event::Packet { to: rank, from: peer, job, packet, permit }).await.is_err() {
                return;
            }
        }
        if events.send(Event::Lost { rank, peer }).await.is_err() {
            return;
        }
        // Two emulators that were started as the same rank displace each other's connection, so the pause grows.
        pause = if begin.elapsed() < MOST_INTERVAL { (2 * pause).min(MOST_INTERVAL) } else { PEER_INTERVAL };
        tokio::time::sleep(pause).await;
    }
}

/// Returns the job and the packet in a message.
fn packet_of(frames: &[Vec<u8>]) -> Option<(u32, Vec<u8>)> {
    let job = match frames.get(3) {
        Some(digits) => std::str::from_utf8(digits).ok()?.parse().ok()?,
        None => 0,
    };
    Some((job, data_from_json(frames.get(2)?)?))
}

/// Receives bytes from kernels for an engine, once a kernel publishes at the address.
pub(super) async fn feed_in(rank: u32, address: String, events: mpsc::Sender<Event>) {
    let ready = zmtp::ready(b"SUB");
    let wanted = Wanted { address, rank, ready, topic: String::new(), interval: KERNEL_INTERVAL };
    loop {
        let mut connection = subscribed(&wanted).await;
        while let Ok(frames) = connection.next_message().await {
            let Some(bytes) = frames.last().and_then(|json| data_from_json(json)) else { continue };
            let (more, is_wanted) = oneshot::channel();
            if events.send(Event::Fed { rank, bytes, more }).await.is_err() || is_wanted.await.is_err() {
                return;
            }
        }
        tokio::time::sleep(PEER_INTERVAL).await;
    }
}
