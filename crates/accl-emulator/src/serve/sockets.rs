//! The sockets of a rank for packets and kernels, one task each; that of its hosts is in `hosts`.
//!
//! Owns what goes through them. Each takes as much as whoever is behind it has room for, and waits then: nothing is dropped, and nothing piles
//! up. Read [`Event`] first.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use accl_cclo::control::{data_from_json, data_to_json};
use futures_core::Stream;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::Instant;
use zeromq::{PubSocket, Socket, SocketEvent, SocketRecv, SocketSend, SubSocket, XPubSocket};
use zeromq::{ZmqError, ZmqMessage};

use crate::cluster::Outgoing;

/// Packets of a peer that its engine has not found a place for, before its socket is not read any more.
const MOST_TAKEN: usize = 64;
/// How often is looked at first whether engines of other processes are there, and whether kernels are: they may never be.
const PEER_INTERVAL: Duration = Duration::from_millis(20);
const KERNEL_INTERVAL: Duration = Duration::from_millis(500);
/// Who has been waited for is looked for less often: what that adds is this part of the time before, up to the most.
const WAITED_PART: u32 = 20;
const MOST_INTERVAL: Duration = Duration::from_millis(500);

/// A connection of a host, among all that a rank has ever had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HostId(pub(super) u64);

/// What happens to the engines.
pub(super) enum Event {
    /// A host asks.
    Request { rank: u32, host: HostId, text: Vec<u8>, reply: oneshot::Sender<String> },
    /// It asks no more: its connection has ended.
    Gone { rank: u32, host: HostId },
    /// A packet has come; more come of the same peer once the permit is gone.
    Packet { to: u32, from: u32, packet: Vec<u8>, permit: OwnedSemaphorePermit },
    /// A kernel has something, and has more once it is told so.
    Fed { rank: u32, bytes: Vec<u8>, more: oneshot::Sender<()> },
    /// An engine of another process listens to one of this.
    Heard { rank: u32, by: u32 },
    /// An engine of this process listens to one of another.
    Found { rank: u32, peer: u32 },
    /// It has gone. All that it has sent has come before.
    Lost { rank: u32, peer: u32 },
}

/// The subscription of a rank: four digits, as far as they go.
fn topic(rank: u32) -> String {
    format!("{rank:04}")
}

/// Packets for engines of other processes; who subscribes is told to the engines. A peer that does not read holds up all of them.
pub(super) async fn publish(
    rank: u32,
    mut socket: XPubSocket,
    mut packets: mpsc::Receiver<Outgoing>,
    room: Arc<Notify>,
    events: mpsc::UnboundedSender<Event>,
) {
    loop {
        tokio::select! {
            packet = packets.recv() => {
                let Some(Outgoing { to, packet }) = packet else { return };
                room.notify_one();
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

/// A subscription, and what is told of its connection.
struct Subscription<E> {
    socket: SubSocket,
    connection: E,
}

/// A socket with this subscription, once somebody publishes at an address, which is looked at that often at first: the library's own attempts are
/// far apart after the first. `None`: it was there and is not any more.
async fn subscribed(
    address: &str,
    topic: &str,
    interval: Duration,
) -> Option<Subscription<impl Stream<Item = SocketEvent> + Unpin + use<>>> {
    let place = address.strip_prefix("tcp://").unwrap_or(address);
    let begin = Instant::now();
    while tokio::net::TcpStream::connect(place).await.is_err() {
        tokio::time::sleep((interval + begin.elapsed() / WAITED_PART).min(MOST_INTERVAL)).await;
    }
    let mut socket = SubSocket::new();
    let connection = socket.monitor();
    socket.connect(address).await.ok()?;
    socket.subscribe(topic).await.ok()?;
    Some(Subscription { socket, connection })
}

impl<E: Stream<Item = SocketEvent> + Unpin> Subscription<E> {
    /// The last frame of the next message. `None`: who published is not there any more.
    async fn next(&mut self) -> Option<Vec<u8>> {
        let Self { socket, connection } = self;
        let gone = async {
            loop {
                let event = std::future::poll_fn(|context| Pin::new(&mut *connection).poll_next(context)).await;
                if matches!(event, None | Some(SocketEvent::Disconnected(_))) {
                    return;
                }
            }
        };
        tokio::pin!(gone);
        loop {
            tokio::select! {
                // All that has come before goes before.
                biased;
                message = socket.recv() => match message {
                    Ok(message) => {
                        if let Some(frame) = message.into_vec().pop() {
                            return Some(frame.to_vec());
                        }
                    }
                    Err(ZmqError::NoMessage) => return None,
                    Err(_) => continue,
                },
                () = &mut gone => return None,
            }
        }
    }
}

/// Packets of an engine of another process for one of this, as often as it comes back.
pub(super) async fn listen(rank: u32, peer: u32, address: String, events: mpsc::Sender<Event>) {
    let permits = Arc::new(Semaphore::new(MOST_TAKEN));
    loop {
        let Some(mut subscription) = subscribed(&address, &topic(rank), PEER_INTERVAL).await else {
            tokio::time::sleep(PEER_INTERVAL).await;
            continue;
        };
        if events.send(Event::Found { rank, peer }).await.is_err() {
            return;
        }
        loop {
            let Ok(permit) = permits.clone().acquire_owned().await else { return };
            let Some(json) = subscription.next().await else { break };
            let Some(packet) = data_from_json(&json) else { continue };
            if events.send(Event::Packet { to: rank, from: peer, packet, permit }).await.is_err() {
                return;
            }
        }
        if events.send(Event::Lost { rank, peer }).await.is_err() {
            return;
        }
    }
}

/// What engines have for kernels.
pub(super) async fn feed_out(mut socket: PubSocket, mut fed: mpsc::Receiver<(u32, Vec<u8>)>, room: Arc<Notify>) {
    while let Some((stream, bytes)) = fed.recv().await {
        room.notify_one();
        let mut message = ZmqMessage::from(stream.to_string());
        message.push_back(data_to_json(&bytes).into());
        let _ = socket.send(message).await;
    }
}

/// What kernels have for an engine, as soon as somebody publishes there.
pub(super) async fn feed_in(rank: u32, address: String, events: mpsc::Sender<Event>) {
    loop {
        let Some(mut subscription) = subscribed(&address, "", KERNEL_INTERVAL).await else {
            tokio::time::sleep(KERNEL_INTERVAL).await;
            continue;
        };
        while let Some(json) = subscription.next().await {
            let Some(bytes) = data_from_json(&json) else { continue };
            let (more, is_wanted) = oneshot::channel();
            if events.send(Event::Fed { rank, bytes, more }).await.is_err() || is_wanted.await.is_err() {
                return;
            }
        }
    }
}
