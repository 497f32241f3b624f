//! A publishing end of ZeroMQ, a socket of type PUB, with a task for each connection.
//!
//! Owns who has subscribed to what, and what becomes of one that does not read. An emulator of ours says of which rank its socket is, and holds
//! up the packets of this rank for as long as it does not read: nothing is dropped. Anybody else that looks holds them up for some seconds, and
//! is disconnected then. What is published is for others. Read [`publish`] first.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use accl_cclo::zmtp::{self, COMMAND, MORE, push_frame};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, mpsc};
use tokio::time::timeout;

use super::connection::{Connection, End, Receiving, Role, Sending};
use super::event::{ACCEPT_PAUSE, Event};

/// Messages of a connection that have yet to be written.
const MOST_QUEUED: usize = 64;
/// Most bytes of a subscription.
const MOST_TOPIC_BYTES: u64 = 4 << 10;
/// How long somebody who only looks may take nothing.
const ONLOOKER_PATIENCE: Duration = Duration::from_secs(5);
const SUBSCRIBE: u8 = 1;
const UNSUBSCRIBE: u8 = 0;

/// What is published.
pub(super) trait Published {
    /// Its first frame: those who have subscribed to how it begins get it.
    fn topic(&self) -> String;

    /// The frames behind.
    fn frames(&self) -> Vec<Vec<u8>>;
}

/// A socket that publishes.
pub(super) struct Publisher {
    pub(super) rank: u32,
    pub(super) listener: TcpListener,
    /// Everybody is waited for.
    pub(super) waits_for_all: bool,
    /// Who has subscribed to no more than what is for a rank is taken for this rank: emulators of the original do not say which they are.
    pub(super) knows_by_topic: bool,
}

/// A connection.
struct Subscriber {
    number: u64,
    from: SocketAddr,
    /// Of which rank of an emulator it is.
    rank: Option<u32>,
    topics: Vec<Vec<u8>>,
    queue: mpsc::Sender<Arc<[u8]>>,
}

/// What a connection tells.
enum News {
    Came(Subscriber),
    Subscribed(u64, Vec<u8>),
    Unsubscribed(u64, Vec<u8>),
    Gone(u64),
}

impl Publisher {
    /// Publishes what comes, and tells which ranks of other emulators have subscribed to what is for them.
    pub(super) async fn publish<T: Published>(
        self,
        mut messages: mpsc::Receiver<T>,
        room: Arc<Notify>,
        events: mpsc::Sender<Event>,
    ) {
        let (tells, mut news) = mpsc::channel(MOST_QUEUED);
        let mut subscribers: Vec<Subscriber> = Vec::new();
        for number in 0.. {
            let came = loop {
                tokio::select! {
                    message = messages.recv() => {
                        let Some(message) = message else { return };
                        room.notify_one();
                        self.send(&message, &mut subscribers).await;
                    }
                    Some(news) = news.recv() => self.hear(news, &mut subscribers, &events).await,
                    accepted = self.listener.accept() => match accepted {
                        Ok(accepted) => break accepted,
                        Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
                    },
                }
            };
            let (stream, from) = came;
            let (tells, rank) = (tells.clone(), self.rank);
            tokio::spawn(async move {
                if let Err(End::Refused(why)) = serve(number, from, stream, &tells).await {
                    disconnected(rank, from, &why);
                }
                // Nobody hears of it once the process ends.
                let _ = tells.send(News::Gone(number)).await;
            });
        }
    }

    async fn send<T: Published>(&self, message: &T, subscribers: &mut Vec<Subscriber>) {
        let topic = message.topic();
        let is_wanted =
            |subscriber: &Subscriber| subscriber.topics.iter().any(|wanted| topic.as_bytes().starts_with(wanted));
        if !subscribers.iter().any(is_wanted) {
            return;
        }
        let mut bytes = Vec::new();
        let frames = message.frames();
        push_frame(&mut bytes, if frames.is_empty() { 0 } else { MORE }, topic.as_bytes());
        for (index, frame) in frames.iter().enumerate() {
            push_frame(&mut bytes, if index + 1 < frames.len() { MORE } else { 0 }, frame);
        }
        let bytes: Arc<[u8]> = bytes.into();
        let mut stuck = Vec::new();
        for subscriber in subscribers.iter().filter(|subscriber| is_wanted(subscriber)) {
            // One that has gone is told of soon.
            let send = subscriber.queue.send(bytes.clone());
            if subscriber.rank.is_some() || self.waits_for_all {
                let _ = send.await;
            } else if timeout(ONLOOKER_PATIENCE, send).await.is_err() {
                disconnected(
                    self.rank,
                    subscriber.from,
                    &format!("it has subscribed and reads nothing for {} s", ONLOOKER_PATIENCE.as_secs()),
                );
                stuck.push(subscriber.number);
            }
        }
        // With its queue a connection ends.
        subscribers.retain(|subscriber| !stuck.contains(&subscriber.number));
    }

    async fn hear(&self, news: News, subscribers: &mut Vec<Subscriber>, events: &mpsc::Sender<Event>) {
        let before = hearing(subscribers);
        let of = |subscribers: &mut Vec<Subscriber>, number| {
            subscribers.iter().position(|subscriber: &Subscriber| subscriber.number == number)
        };
        match news {
            News::Came(subscriber) => subscribers.push(subscriber),
            News::Subscribed(number, topic) => {
                if let Some(at) = of(subscribers, number) {
                    let subscriber = &mut subscribers[at];
                    if self.knows_by_topic && subscriber.rank.is_none() {
                        subscriber.rank = rank_of(&topic);
                    }
                    subscriber.topics.push(topic);
                }
            }
            News::Unsubscribed(number, topic) => {
                if let Some(at) = of(subscribers, number) {
                    let topics = &mut subscribers[at].topics;
                    topics.iter().position(|known| *known == topic).map(|at| topics.swap_remove(at));
                }
            }
            News::Gone(number) => subscribers.retain(|subscriber| subscriber.number != number),
        }
        let after = hearing(subscribers);
        let rank = self.rank;
        let heard = after.iter().filter(|by| !before.contains(by)).map(|&by| Event::Heard { rank, by });
        let unheard = before.iter().filter(|by| !after.contains(by)).map(|&by| Event::Unheard { rank, by });
        for event in heard.chain(unheard) {
            // Nobody hears of it once the process ends.
            let _ = events.send(event).await;
        }
    }
}

/// The ranks of other emulators that listen to what is for them.
fn hearing(subscribers: &[Subscriber]) -> Vec<u32> {
    let hears = |subscriber: &Subscriber| {
        let rank = subscriber.rank?;
        subscriber.topics.iter().any(|wanted| topic_of(rank).as_bytes() == wanted).then_some(rank)
    };
    subscribers.iter().filter_map(hears).collect()
}

/// The subscription of a rank: four digits, as far as they go.
pub(super) fn topic_of(rank: u32) -> String {
    format!("{rank:04}")
}

/// Whose subscription it is.
fn rank_of(topic: &[u8]) -> Option<u32> {
    let rank = std::str::from_utf8(topic).ok()?.parse().ok()?;
    (topic_of(rank).as_bytes() == topic).then_some(rank)
}

fn disconnected(rank: u32, from: SocketAddr, why: &str) {
    eprintln!("accl-emulator: rank {rank}: the subscriber at {from} is disconnected: {why}");
}

async fn serve(number: u64, from: SocketAddr, stream: TcpStream, tells: &mpsc::Sender<News>) -> Result<(), End> {
    let mut connection = Connection::new(stream)?;
    let role = Role { ready: zmtp::ready(b"PUB"), takes: [b"SUB", b"XSUB"], refuses: "its socket is not of type SUB" };
    let rank = connection.greet(&role).await?;
    let (queue, queued) = mpsc::channel(MOST_QUEUED);
    let (pongs, to_pong) = mpsc::channel(1);
    let subscriber = Subscriber { number, from, rank, topics: Vec::new(), queue };
    tells.send(News::Came(subscriber)).await.map_err(|_| End::Gone)?;
    let Connection { from, to } = connection;
    tokio::select! {
        end = read(number, from, pongs, tells) => end,
        end = write(to, queued, to_pong) => end,
    }
}

/// Subscriptions, for as long as they come.
async fn read(
    number: u64,
    mut from: Receiving,
    pongs: mpsc::Sender<Arc<[u8]>>,
    tells: &mpsc::Sender<News>,
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
            // What else a subscriber says goes nowhere.
            Some(_) | None => continue,
        };
        tells.send(news).await.map_err(|_| End::Gone)?;
    }
}

/// What is published, until there is nothing more.
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
