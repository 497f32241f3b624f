//! Publishing end of ZeroMQ, a PUB socket, with a task for each connection.
//!
//! Owns the subscriptions, and the handling of a subscriber that does not read. An emulator of this project names the rank of its socket. If it does
//! not read, the packets of this rank wait without limit, and none is dropped. Other subscribers may delay packets for a few seconds in total, and
//! are then disconnected. Callers decide what to publish. Read [`Publisher::publish`] first.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use accl_cclo::zmtp::{self, COMMAND, MORE, push_frame};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore, mpsc, oneshot};
use tokio::time::Instant;

use super::connection::{Connection, End, Receiving, Role, Sending};
use super::event::{ACCEPT_PAUSE, Event};

/// Maximum number of queued messages for a connection.
const MOST_QUEUED: usize = 64;
/// Maximum bytes of a subscription.
const MOST_TOPIC_BYTES: u64 = 4 << 10;
/// Maximum number of connections, and of subscriptions for each.
const MOST_SUBSCRIBERS: usize = 4096;
const MOST_TOPICS: usize = 256;
/// How long onlookers (subscribers without a rank) may delay packets in total. Time without delays restores this allowance, divided by
/// `REGAINED_PART`.
const ONLOOKER_PATIENCE: Duration = Duration::from_secs(5);
const REGAINED_PART: u32 = 10;
const SUBSCRIBE: u8 = 1;
const UNSUBSCRIBE: u8 = 0;

/// A message that can be published.
pub(super) trait Published {
    /// First frame. A subscriber receives the message if the frame begins with one of its subscriptions.
    fn topic(&self) -> String;

    /// Remaining frames.
    fn frames(&self) -> Vec<Vec<u8>>;
}

/// A publishing socket.
pub(super) struct Publisher {
    pub(super) rank: u32,
    /// Whether the publisher waits for every subscriber without limit.
    pub(super) waits_for_all: bool,
    /// Whether a subscriber that names no rank is identified by its subscription to one rank's packets. Emulators of the original name no rank.
    pub(super) knows_by_topic: bool,
}

/// A subscribed connection.
struct Subscriber {
    number: u64,
    from: SocketAddr,
    /// Rank of the subscribing emulator, if known.
    rank: Option<u32>,
    topics: Vec<Vec<u8>>,
    queue: mpsc::Sender<Arc<[u8]>>,
    /// Ends the connection when dropped.
    _end: oneshot::Sender<Infallible>,
}

/// Notification from a connection.
enum News {
    Came(Subscriber),
    Subscribed(u64, Vec<u8>),
    Unsubscribed(u64, Vec<u8>),
    Gone(u64),
}

/// All subscribers of a publisher.
struct Subscribers {
    about: Publisher,
    all: Vec<Subscriber>,
    news: mpsc::Receiver<News>,
    events: mpsc::Sender<Event>,
    /// Remaining time that onlookers may delay packets in total, and when it was last updated.
    patience: Duration,
    patient_since: Instant,
}

impl Publisher {
    /// Publishes messages. Sends events when ranks of other emulators subscribe to their own packets, or no longer do.
    pub(super) async fn publish<T: Published>(
        self,
        listener: TcpListener,
        mut messages: mpsc::Receiver<T>,
        room: Arc<Notify>,
        events: mpsc::Sender<Event>,
    ) {
        let (to_publisher, news) = mpsc::channel(MOST_QUEUED);
        tokio::spawn(accept(self.rank, listener, to_publisher));
        let mut subscribers = Subscribers {
            about: self,
            all: Vec::new(),
            news,
            events,
            patience: ONLOOKER_PATIENCE,
            patient_since: Instant::now(),
        };
        loop {
            tokio::select! {
                message = messages.recv() => {
                    let Some(message) = message else { return };
                    room.notify_one();
                    subscribers.send(&message).await;
                }
                Some(news) = subscribers.news.recv() => subscribers.handle(news).await,
            }
        }
    }
}

/// Accepts connections, even while the publisher waits for a subscriber.
async fn accept(rank: u32, listener: TcpListener, to_publisher: mpsc::Sender<News>) {
    let places = Arc::new(Semaphore::new(MOST_SUBSCRIBERS));
    for number in 0.. {
        let Ok((stream, from)) = listener.accept().await else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let Ok(place) = places.clone().try_acquire_owned() else { continue };
        let to_publisher = to_publisher.clone();
        tokio::spawn(async move {
            if let Err(End::Refused(why)) = serve(number, from, stream, &to_publisher).await {
                disconnected(rank, from, &why);
            }
            // The send fails only if the process is ending.
            let _ = to_publisher.send(News::Gone(number)).await;
            drop(place);
        });
    }
}

impl Subscribers {
    async fn send<T: Published>(&mut self, message: &T) {
        let topic = message.topic();
        let is_wanted =
            |subscriber: &&Subscriber| subscriber.topics.iter().any(|wanted| topic.as_bytes().starts_with(wanted));
        let wanted: Vec<u64> = self.all.iter().filter(is_wanted).map(|subscriber| subscriber.number).collect();
        if wanted.is_empty() {
            return;
        }
        let mut bytes = Vec::new();
        let frames = message.frames();
        push_frame(&mut bytes, if frames.is_empty() { 0 } else { MORE }, topic.as_bytes());
        for (index, frame) in frames.iter().enumerate() {
            push_frame(&mut bytes, if index + 1 < frames.len() { MORE } else { 0 }, frame);
        }
        let bytes: Arc<[u8]> = bytes.into();
        for number in wanted {
            let Some(subscriber) = self.all.iter().find(|subscriber| subscriber.number == number) else { continue };
            // The end of a subscriber's connection is reported separately.
            if let Err(mpsc::error::TrySendError::Full(bytes)) = subscriber.queue.try_send(bytes.clone()) {
                self.wait(number, bytes).await;
            }
        }
    }

    /// Sends to a subscriber once its queue has room, and handles notifications from other connections meanwhile.
    async fn wait(&mut self, number: u64, bytes: Arc<[u8]>) {
        let Some(subscriber) = self.all.iter().find(|subscriber| subscriber.number == number) else { return };
        let (queue, from) = (subscriber.queue.clone(), subscriber.from);
        let is_onlooker = subscriber.rank.is_none() && !self.about.waits_for_all;
        let begin = Instant::now();
        let regained = (begin - self.patient_since) / REGAINED_PART;
        self.patience = (self.patience + regained).min(ONLOOKER_PATIENCE);
        let until = begin + self.patience;
        let send = queue.send(bytes);
        tokio::pin!(send);
        loop {
            tokio::select! {
                biased;
                _ = &mut send => break,
                () = tokio::time::sleep_until(until), if is_onlooker => {
                    let why = "it reads too slowly; a subscriber without a rank may delay packets for 5 s and a tenth of the time";
                    disconnected(self.about.rank, from, why);
                    self.all.retain(|subscriber| subscriber.number != number);
                    break;
                }
                Some(news) = self.news.recv() => self.handle(news).await,
            }
        }
        self.patient_since = Instant::now();
        if is_onlooker {
            self.patience = self.patience.saturating_sub(self.patient_since - begin);
        }
    }

    async fn handle(&mut self, news: News) {
        let before = self.subscribed_ranks();
        match news {
            News::Came(subscriber) => {
                if self.makes_way_for(&subscriber) {
                    self.all.push(subscriber);
                }
            }
            News::Subscribed(number, topic) => {
                let knows_by_topic = self.about.knows_by_topic;
                let Some(subscriber) = self.of(number) else { return };
                if knows_by_topic && subscriber.rank.is_none() {
                    subscriber.rank = rank_of(&topic);
                }
                subscriber.topics.push(topic);
                if subscriber.topics.len() > MOST_TOPICS {
                    let from = subscriber.from;
                    disconnected(self.about.rank, from, &format!("it has more than {MOST_TOPICS} subscriptions"));
                    self.all.retain(|subscriber| subscriber.number != number);
                }
            }
            News::Unsubscribed(number, topic) => {
                if let Some(subscriber) = self.of(number) {
                    let topics = &mut subscriber.topics;
                    topics.iter().position(|known| *known == topic).map(|at| topics.swap_remove(at));
                }
            }
            News::Gone(number) => self.all.retain(|subscriber| subscriber.number != number),
        }
        let after = self.subscribed_ranks();
        let rank = self.about.rank;
        let subscribed = after.difference(&before).map(|&by| Event::Subscribed { rank, by });
        let unsubscribed = before.difference(&after).map(|&by| Event::Unsubscribed { rank, by });
        for event in subscribed.chain(unsubscribed) {
            // The send fails only if the process is ending.
            let _ = self.events.send(event).await;
        }
    }

    /// Removes earlier connections of an emulator that has connected again. The connection of a host that has lost power ends much later, and
    /// messages for it would block all ranks until then. Returns `false` if the emulator has a newer connection than this one.
    fn makes_way_for(&mut self, subscriber: &Subscriber) -> bool {
        let Some(rank) = subscriber.rank else { return true };
        let is_of_rank = |other: &Subscriber| other.rank == Some(rank);
        if self.all.iter().any(|other| is_of_rank(other) && other.number > subscriber.number) {
            return false;
        }
        let own = self.about.rank;
        self.all.retain(|before| {
            if is_of_rank(before) {
                let why = format!("rank {rank} has connected again, from {}", subscriber.from);
                disconnected(own, before.from, &why);
            }
            !is_of_rank(before)
        });
        true
    }

    fn of(&mut self, number: u64) -> Option<&mut Subscriber> {
        self.all.iter_mut().find(|subscriber| subscriber.number == number)
    }

    /// Returns the ranks of other emulators that are subscribed to their own packets.
    fn subscribed_ranks(&self) -> BTreeSet<u32> {
        let subscribed_rank = |subscriber: &Subscriber| {
            let rank = subscriber.rank?;
            subscriber.topics.iter().any(|wanted| topic_of(rank).as_bytes() == wanted).then_some(rank)
        };
        self.all.iter().filter_map(subscribed_rank).collect()
    }
}

/// Returns the subscription of a rank: its number, with at least four digits.
pub(super) fn topic_of(rank: u32) -> String {
    format!("{rank:04}")
}

/// Returns the rank whose subscription this is, if any.
fn rank_of(topic: &[u8]) -> Option<u32> {
    let rank = std::str::from_utf8(topic).ok()?.parse().ok()?;
    (topic_of(rank).as_bytes() == topic).then_some(rank)
}

fn disconnected(rank: u32, from: SocketAddr, why: &str) {
    eprintln!("accl-emulator: rank {rank}: the subscriber at {from} is disconnected: {why}");
}

async fn serve(number: u64, from: SocketAddr, stream: TcpStream, to_publisher: &mpsc::Sender<News>) -> Result<(), End> {
    let mut connection = Connection::new(stream)?;
    let role = Role { ready: zmtp::ready(b"PUB"), takes: [b"SUB", b"XSUB"], refuses: "its socket is not of type SUB" };
    let rank = connection.greet(&role).await?;
    let (queue, queued) = mpsc::channel(MOST_QUEUED);
    let (pongs, to_pong) = mpsc::channel(1);
    let (end, ended) = oneshot::channel();
    let subscriber = Subscriber { number, from, rank, topics: Vec::new(), queue, _end: end };
    to_publisher.send(News::Came(subscriber)).await.map_err(|_| End::Gone)?;
    let Connection { from, to, .. } = connection;
    tokio::select! {
        end = read(number, from, pongs, to_publisher) => end,
        end = write(to, queued, to_pong) => end,
        _ = ended => Ok(()),
    }
}

/// Reads subscriptions until the connection ends.
async fn read(
    number: u64,
    mut from: Receiving,
    pongs: mpsc::Sender<Arc<[u8]>>,
    to_publisher: &mpsc::Sender<News>,
) -> Result<(), End> {
    loop {
        let (flags, body) = from.next_frame(MOST_TOPIC_BYTES).await?;
        if flags & COMMAND != 0 {
            if let Some(pong) = zmtp::pong(&body)? {
                pongs.send(pong.into()).await.map_err(|_| End::Gone)?;
            }
            continue;
        }
        let news = match body.split_first() {
            Some((&SUBSCRIBE, topic)) => News::Subscribed(number, topic.to_vec()),
            Some((&UNSUBSCRIBE, topic)) => News::Unsubscribed(number, topic.to_vec()),
            // Other messages of a subscriber are ignored.
            Some(_) | None => continue,
        };
        to_publisher.send(news).await.map_err(|_| End::Gone)?;
    }
}

/// Writes messages until the queue is closed.
async fn write(
    mut to: Sending,
    mut queued: mpsc::Receiver<Arc<[u8]>>,
    mut pongs: mpsc::Receiver<Arc<[u8]>>,
) -> Result<(), End> {
    loop {
        let bytes = tokio::select! {
            bytes = queued.recv() => bytes,
            Some(pong) = pongs.recv() => Some(pong),
        };
        let Some(bytes) = bytes else { return Ok(()) };
        to.write(&bytes).await?;
    }
}
