//! Control socket of a rank, which hosts send requests to: the replying end of ZeroMQ, a REP socket, with a task for each connection.
//!
//! Owns the connections and their limits: their number, and the time in which a host has to fetch an answer. A host that does not fetch its answer
//! delays no other host, and is disconnected. Read [`serve_hosts`] first.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use accl_cclo::zmtp::{self, MORE, push_frame, push_head};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::Instant;

use super::connection::{Connection, End, FETCH_PATIENCE, Role};
use super::event::{ACCEPT_PAUSE, Event, HostId};

/// Maximum number of hosts of one rank at a time. Normally there is one, and occasionally an observer.
const MOST_HOSTS: usize = 64;
/// Maximum number of connections that have not completed their greeting.
const MOST_GREETING: usize = 256;
/// How long sent bytes may stay unacknowledged before the host counts as crashed.
const ARRIVAL_PATIENCE: Duration = Duration::from_secs(60);
/// Minimum time between log lines about refused connections, since a persistent client may reconnect many times a second.
const SAYING_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum bytes of an answer that is written in one piece with its envelope.
const MOST_COPIED_BYTES: usize = 1 << 20;

/// Answers the hosts of a rank for the life of the process.
pub(super) async fn serve_hosts(rank: u32, listener: TcpListener, events: mpsc::Sender<Event>) {
    let (places, greeting) = (Arc::new(Semaphore::new(MOST_HOSTS)), Arc::new(Semaphore::new(MOST_GREETING)));
    let said = Arc::new(Mutex::new(Said::default()));
    for number in 0.. {
        let Ok((stream, from)) = listener.accept().await else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let Ok(greets) = greeting.clone().try_acquire_owned() else {
            said.lock().await.say(rank, from, "too many connections have not completed the ZeroMQ greeting");
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
                    // The send fails only if the process is ending.
                    let _ = events.send(Event::Gone { rank, host }).await;
                    drop(place);
                }
                Err(End::Refused(why)) => said.lock().await.say(rank, from, &why),
                Err(End::Gone) => {}
            }
        });
    }
}

/// Completes the greeting of a host and assigns it a place among the hosts of the rank. A connection that sends no greeting takes no place.
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

/// Time of the last log line about a refused connection, and the number of refusals since then.
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
            unsaid => format!(" ({unsaid} more before it)"),
        };
        self.last = Some(Instant::now());
        disconnected(rank, from, &format!("{why}{others}"));
    }
}

/// Handles one request and one reply at a time.
async fn serve(rank: u32, id: HostId, mut connection: Connection, events: &mpsc::Sender<Event>) -> Result<(), End> {
    loop {
        let Asked { envelope, text } = Asked::of(connection.next_message().await?)?;
        let (reply, answer) = oneshot::channel();
        // The send fails only if the process is ending.
        events.send(Event::Request { rank, host: id, text, reply }).await.map_err(|_| End::Gone)?;
        let answer = answer.await.map_err(|_| End::Gone)?;
        answered(&mut connection, envelope, answer.as_bytes()).await?;
    }
}

/// A request, and the frames that precede both the request and its reply.
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
