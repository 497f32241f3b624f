//! What goes through the sockets of a rank for packets and kernels, one task each; those of its hosts are in `hosts`.
//!
//! Owns what messages look like, and who is listened to. Each socket takes as much as whoever is behind it has room for, and waits then: nothing is
//! dropped, and nothing piles up. Read [`listen`] first.

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

/// Packets of a peer that its engine has not found a place for, before its socket is not read any more.
const MOST_TAKEN: usize = 64;
/// How often is looked at first whether engines of other processes are there, and whether kernels are: they may never be.
const PEER_INTERVAL: Duration = Duration::from_millis(20);
const KERNEL_INTERVAL: Duration = Duration::from_millis(500);
/// Who has been waited for is looked for less often: what that adds is this part of the time before, up to the most.
const WAITED_PART: u32 = 20;
const MOST_INTERVAL: Duration = Duration::from_millis(500);
/// How long is waited for an address to take a connection.
const CONNECT_PATIENCE: Duration = Duration::from_secs(2);

/// A packet: to whom, of whom and its bytes, as the original has it; behind them the job, if there is one.
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

/// What an engine has for a kernel stream.
pub(super) struct Fed(pub(super) u32, pub(super) Vec<u8>);

impl Published for Fed {
    fn topic(&self) -> String {
        self.0.to_string()
    }

    fn frames(&self) -> Vec<Vec<u8>> {
        vec![data_to_json(&self.1).into_bytes()]
    }
}

/// Where somebody publishes, and what of it is wanted.
struct Wanted {
    address: String,
    /// For messages.
    rank: u32,
    /// How the socket that subscribes says that it is ready.
    ready: Vec<u8>,
    topic: String,
    /// How often is looked whether somebody is there, at first.
    interval: Duration,
}

/// A connection with this subscription, as soon as somebody publishes there.
async fn subscribed(wanted: &Wanted) -> Connection {
    let begin = Instant::now();
    let mut is_said = false;
    loop {
        match subscribe(wanted).await {
            Ok(connection) => return connection,
            Err(End::Refused(why)) if !is_said => {
                let Wanted { rank, address, .. } = wanted;
                eprintln!(
                    "accl-emulator: rank {rank}: what listens at {address} does not publish what it should: {why}"
                );
                is_said = true;
            }
            Err(End::Refused(_) | End::Gone) => {}
        }
        tokio::time::sleep((wanted.interval + begin.elapsed() / WAITED_PART).min(MOST_INTERVAL)).await;
    }
}

/// A connection to one of the addresses of a name. Each has its time: where nothing answers at all the system would look again seldom, and find late who
/// has come meanwhile.
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

/// Packets of an engine of another process for one of this, as often as it comes back.
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
                    eprintln!("accl-emulator: rank {rank}: rank {peer} is listened to no more: {why}");
                    break;
                }
            };
            // What cannot be read may have been part of a message: it begins anew.
            let Some((job, packet)) = packet_of(&frames) else { break };
            if events.send(Event::Packet { to: rank, from: peer, job, packet, permit }).await.is_err() {
                return;
            }
        }
        if events.send(Event::Lost { rank, peer }).await.is_err() {
            return;
        }
        // Two emulators that are started as one rank take its place from each other.
        pause = if begin.elapsed() < MOST_INTERVAL { (2 * pause).min(MOST_INTERVAL) } else { PEER_INTERVAL };
        tokio::time::sleep(pause).await;
    }
}

/// The packet in a message, and of which job it is.
fn packet_of(frames: &[Vec<u8>]) -> Option<(u32, Vec<u8>)> {
    let job = match frames.get(3) {
        Some(digits) => std::str::from_utf8(digits).ok()?.parse().ok()?,
        None => 0,
    };
    Some((job, data_from_json(frames.get(2)?)?))
}

/// What kernels have for an engine, as soon as somebody publishes there.
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
