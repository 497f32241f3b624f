//! The control socket of a rank, where its hosts ask: the answering end of ZeroMQ, a socket of type REP, with a task for each connection.
//!
//! Owns the connections and what each may take: how many there are, how long one has to greet and to fetch an answer, how long a request is.
//! A host that does not fetch what it has asked for holds up no other, and is disconnected. Read [`serve_hosts`] first.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use accl_cclo::zmtp::{
    self, COMMAND, GREETING_BYTES, GREETING_PARTS, LONG, MORE, MOST_COMMAND_BYTES, READY, push_frame, push_head,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::timeout;

use super::sockets::{Event, HostId};

/// Hosts of one rank at a time. There is one, and now and then somebody who looks.
const MOST_HOSTS: usize = 64;
/// How long a connection has to say that it is a host.
const GREETING_PATIENCE: Duration = Duration::from_secs(5);
/// How long a host may take none of the bytes of its answer.
const FETCH_PATIENCE: Duration = Duration::from_secs(5);
/// Before another connection is taken, where the process has no room for more.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Most bytes of a request: four characters for each of 64 MiB of memory.
const MOST_REQUEST_BYTES: u64 = 256 << 20;
/// Bytes that are read at once where more are there.
const BUFFER_BYTES: usize = 64 << 10;
/// An answer of no more bytes is written in one piece with what stands before it.
const MOST_COPIED_BYTES: usize = 1 << 20;
/// What this socket is, and those that ask it.
const ANSWERING: &[u8] = b"REP";
const ASKING: [&[u8]; 2] = [b"REQ", b"DEALER"];

/// Why a connection ends.
enum End {
    /// The host has closed it.
    Gone,
    /// It is closed here, for this reason.
    Refused(String),
}

impl From<std::io::Error> for End {
    fn from(_: std::io::Error) -> Self {
        Self::Gone
    }
}

impl From<String> for End {
    fn from(why: String) -> Self {
        Self::Refused(why)
    }
}

impl From<&str> for End {
    fn from(why: &str) -> Self {
        Self::Refused(why.to_owned())
    }
}

/// Answers the hosts of a rank for as long as the process lives.
pub(super) async fn serve_hosts(rank: u32, listener: TcpListener, events: mpsc::Sender<Event>) {
    let places = Arc::new(Semaphore::new(MOST_HOSTS));
    for number in 0.. {
        let Ok((stream, from)) = listener.accept().await else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let Ok(place) = places.clone().try_acquire_owned() else {
            disconnected(rank, from, &format!("{MOST_HOSTS} hosts are connected already"));
            continue;
        };
        let events = events.clone();
        tokio::spawn(async move {
            let host = HostId(number);
            if let Err(End::Refused(why)) = serve(rank, host, stream, &events).await {
                disconnected(rank, from, &why);
            }
            // Nobody hears of it once the process ends.
            let _ = events.send(Event::Gone { rank, host }).await;
            drop(place);
        });
    }
}

fn disconnected(rank: u32, from: SocketAddr, why: &str) {
    eprintln!("accl-emulator: rank {rank}: the host at {from} is disconnected: {why}");
}

/// One request and one reply at a time.
async fn serve(rank: u32, id: HostId, stream: TcpStream, events: &mpsc::Sender<Event>) -> Result<(), End> {
    // Answers are waited for, so nothing is gained by putting packets together.
    stream.set_nodelay(true)?;
    let (from, to) = stream.into_split();
    let mut host = Host { from: BufReader::with_capacity(BUFFER_BYTES, from), to };
    let greeted = timeout(GREETING_PATIENCE, host.greet()).await;
    greeted.map_err(|_| format!("it has not greeted in {} s", GREETING_PATIENCE.as_secs()))??;
    loop {
        let Asked { envelope, text } = host.next_request().await?;
        let (reply, answer) = oneshot::channel();
        // Nobody hears of it once the process ends.
        events.send(Event::Request { rank, host: id, text, reply }).await.map_err(|_| End::Gone)?;
        let answer = answer.await.map_err(|_| End::Gone)?;
        host.reply(envelope, answer.as_bytes()).await?;
    }
}

/// A connection.
struct Host {
    from: BufReader<OwnedReadHalf>,
    to: OwnedWriteHalf,
}

/// A request, and the frames that stand before it and before its reply.
struct Asked {
    envelope: Vec<u8>,
    text: Vec<u8>,
}

impl Host {
    async fn greet(&mut self) -> Result<(), End> {
        self.write(&zmtp::greeting()).await?;
        let mut bytes = [0; GREETING_BYTES];
        let mut begin = 0;
        for end in GREETING_PARTS {
            self.from.read_exact(&mut bytes[begin..end]).await?;
            zmtp::check_greeting(&bytes[..end])?;
            begin = end;
        }
        self.write(&zmtp::ready(ANSWERING)).await?;
        loop {
            let (flags, body) = self.next_frame(MOST_COMMAND_BYTES).await?;
            if flags & COMMAND == 0 {
                return Err("it sends messages before it is ready".into());
            }
            if let Some(metadata) = body.strip_prefix(READY) {
                let socket = zmtp::socket_type(metadata)?;
                return if ASKING.contains(&socket) { Ok(()) } else { Err("its socket is not of type REQ".into()) };
            }
        }
    }

    async fn next_request(&mut self) -> Result<Asked, End> {
        let mut envelope = Vec::new();
        let mut text: Option<Vec<u8>> = None;
        let mut room = MOST_REQUEST_BYTES;
        loop {
            let (flags, body) = self.next_frame(room).await?;
            if flags & COMMAND != 0 {
                if let Some(pong) = zmtp::pong(&body)? {
                    self.write(&pong).await?;
                }
                continue;
            }
            // Each frame takes a byte at least, so that empty ones do not go on for ever.
            room = room.saturating_sub(body.len() as u64 + 1);
            let has_more = flags & MORE != 0;
            match &mut text {
                Some(text) => text.extend(body),
                None => {
                    push_frame(&mut envelope, MORE, &body);
                    if body.is_empty() {
                        text = Some(Vec::new());
                    }
                }
            }
            if !has_more {
                let text = text.ok_or("its requests do not begin with an empty frame")?;
                return Ok(Asked { envelope, text });
            }
        }
    }

    async fn reply(&mut self, envelope: Vec<u8>, answer: &[u8]) -> Result<(), End> {
        let mut bytes = envelope;
        if answer.len() <= MOST_COPIED_BYTES {
            push_frame(&mut bytes, 0, answer);
            return self.write(&bytes).await;
        }
        push_head(&mut bytes, 0, answer.len());
        self.write(&bytes).await?;
        self.write(answer).await
    }

    /// Flags and body of the next frame. Memory grows with what has come, and not with what is announced.
    async fn next_frame(&mut self, most_bytes: u64) -> Result<(u8, Vec<u8>), End> {
        let flags = self.from.read_u8().await?;
        zmtp::check_flags(flags)?;
        let len = if flags & LONG == 0 { u64::from(self.from.read_u8().await?) } else { self.from.read_u64().await? };
        let most_bytes = if flags & COMMAND == 0 { most_bytes } else { MOST_COMMAND_BYTES };
        if len > most_bytes {
            return Err(
                format!("it sends a frame of {len} bytes, and a request has {MOST_REQUEST_BYTES} at most").into()
            );
        }
        let mut body = Vec::new();
        (&mut self.from).take(len).read_to_end(&mut body).await?;
        if (body.len() as u64) < len { Err(End::Gone) } else { Ok((flags, body)) }
    }

    async fn write(&mut self, mut bytes: &[u8]) -> Result<(), End> {
        while !bytes.is_empty() {
            let written = timeout(FETCH_PATIENCE, self.to.write(bytes)).await;
            let written = written
                .map_err(|_| format!("it has fetched none of its answer for {} s", FETCH_PATIENCE.as_secs()))??;
            if written == 0 {
                return Err(End::Gone);
            }
            bytes = &bytes[written..];
        }
        Ok(())
    }
}
