//! The control socket of a rank, where its hosts ask: the answering end of ZeroMQ, a socket of type REP, with a task for each connection.
//!
//! Owns the connections and what each may take: how many there are, and how long one has to fetch an answer. A host that does not fetch what it
//! has asked for holds up no other, and is disconnected. Read [`serve_hosts`] first.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use accl_cclo::zmtp::{self, MORE, push_frame, push_head};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::Instant;

use super::connection::{Connection, End, FETCH_PATIENCE, Role};
use super::event::{ACCEPT_PAUSE, Event, HostId};

/// Hosts of one rank at a time. There is one, and now and then somebody who looks.
const MOST_HOSTS: usize = 64;
/// Connections of which it is not known yet whether they are hosts.
const MOST_GREETING: usize = 256;
/// How long bytes may be on their way to a host, which has crashed then.
const ARRIVAL_PATIENCE: Duration = Duration::from_secs(60);
/// How often it is said at most that a host was disconnected: one that does not give up comes many times a second.
const SAYING_INTERVAL: Duration = Duration::from_secs(1);
/// An answer of no more bytes is written in one piece with what stands before it.
const MOST_COPIED_BYTES: usize = 1 << 20;

/// Answers the hosts of a rank for as long as the process lives.
pub(super) async fn serve_hosts(rank: u32, listener: TcpListener, events: mpsc::Sender<Event>) {
    let (places, greeting) = (Arc::new(Semaphore::new(MOST_HOSTS)), Arc::new(Semaphore::new(MOST_GREETING)));
    let said = Arc::new(Mutex::new(Said::default()));
    for number in 0.. {
        let Ok((stream, from)) = listener.accept().await else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let Ok(greets) = greeting.clone().try_acquire_owned() else {
            said.lock().await.say(rank, from, "too many connections have yet to greet");
            continue;
        };
        let (places, said, events) = (places.clone(), said.clone(), events.clone());
        tokio::spawn(async move {
            let host = HostId(number);
            match greeted(stream, &places, greets).await {
                Ok((connection, place)) => {
                    if let Err(End::Refused(why)) = serve(rank, host, connection, &events).await {
                        disconnected(rank, from, &why);
                    }
                    // Nobody hears of it once the process ends.
                    let _ = events.send(Event::Gone { rank, host }).await;
                    drop(place);
                }
                Err(End::Refused(why)) => said.lock().await.say(rank, from, &why),
                Err(End::Gone) => {}
            }
        });
    }
}

/// A host, and its place among the hosts of the rank. Who does not greet takes none.
async fn greeted(
    stream: TcpStream,
    places: &Arc<Semaphore>,
    greets: OwnedSemaphorePermit,
) -> Result<(Connection, OwnedSemaphorePermit), End> {
    let mut connection = Connection::new(stream)?;
    connection.ends_where_nothing_arrives_for(ARRIVAL_PATIENCE)?;
    connection.greet_first().await?;
    let Ok(place) = places.clone().try_acquire_owned() else {
        let why = format!("{MOST_HOSTS} hosts are connected already");
        connection.refuse(&why).await?;
        return Err(why.into());
    };
    let role =
        Role { ready: zmtp::ready(b"REP"), takes: [b"REQ", b"DEALER"], refuses: "its socket is not of type REQ" };
    connection.greet_last(&role).await?;
    drop(greets);
    Ok((connection, place))
}

fn disconnected(rank: u32, from: SocketAddr, why: &str) {
    eprintln!("accl-emulator: rank {rank}: the host at {from} is disconnected: {why}");
}

/// When it was last said that somebody is no host here, and how often it was not since.
#[derive(Default)]
struct Said {
    last: Option<Instant>,
    unsaid: u64,
}

impl Said {
    fn say(&mut self, rank: u32, from: SocketAddr, why: &str) {
        if self.last.is_some_and(|last| last.elapsed() < SAYING_INTERVAL) {
            self.unsaid += 1;
            return;
        }
        let others = match std::mem::take(&mut self.unsaid) {
            0 => String::new(),
            unsaid => format!(", as {unsaid} before it were"),
        };
        self.last = Some(Instant::now());
        disconnected(rank, from, &format!("{why}{others}"));
    }
}

/// One request and one reply at a time.
async fn serve(rank: u32, id: HostId, mut connection: Connection, events: &mpsc::Sender<Event>) -> Result<(), End> {
    loop {
        let Asked { envelope, text } = Asked::of(connection.next_message().await?)?;
        let (reply, answer) = oneshot::channel();
        // Nobody hears of it once the process ends.
        events.send(Event::Request { rank, host: id, text, reply }).await.map_err(|_| End::Gone)?;
        let answer = answer.await.map_err(|_| End::Gone)?;
        answered(&mut connection, envelope, answer.as_bytes()).await?;
    }
}

/// A request, and the frames that stand before it and before its reply.
struct Asked {
    envelope: Vec<u8>,
    text: Vec<u8>,
}

impl Asked {
    fn of(frames: Vec<Vec<u8>>) -> Result<Self, End> {
        let delimiter = frames.iter().position(Vec::is_empty).filter(|delimiter| delimiter + 1 < frames.len());
        let delimiter = delimiter.ok_or("its requests do not begin with an empty frame")?;
        let mut envelope = Vec::new();
        for frame in &frames[..=delimiter] {
            push_frame(&mut envelope, MORE, frame);
        }
        Ok(Self { envelope, text: frames[delimiter + 1..].concat() })
    }
}

async fn answered(connection: &mut Connection, envelope: Vec<u8>, answer: &[u8]) -> Result<(), End> {
    let mut bytes = envelope;
    let to = &mut connection.to;
    if answer.len() <= MOST_COPIED_BYTES {
        push_frame(&mut bytes, 0, answer);
        return to.write_within(&bytes, FETCH_PATIENCE).await;
    }
    push_head(&mut bytes, 0, answer.len());
    to.write_within(&bytes, FETCH_PATIENCE).await?;
    to.write_within(answer, FETCH_PATIENCE).await
}
