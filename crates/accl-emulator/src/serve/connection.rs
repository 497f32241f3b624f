//! A connection of ZeroMQ: greetings, frames, and the messages that they make.
//!
//! Owns how much a connection may send and how long it has to greet. What its messages mean is for whoever has it. Read [`Connection::greet`]
//! first.

use std::time::Duration;

use accl_cclo::zmtp::{self, COMMAND, GREETING_BYTES, GREETING_PARTS, LONG, MORE, MOST_COMMAND_BYTES, READY};
use rustix::fd::AsFd;
use rustix::net::sockopt;
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::{Instant, timeout, timeout_at};

/// After which silence the system looks whether a host is still there, how often, and how many times before the connection ends.
const QUIET_TIME: Duration = Duration::from_secs(30);
const LOOK_INTERVAL: Duration = Duration::from_secs(10);
const LOOKS: u32 = 3;
/// How long a connection has to greet and to say what it is.
const GREETING_PATIENCE: Duration = Duration::from_secs(5);
/// Most bytes of a message: four characters for each of 64 MiB of memory.
const MOST_MESSAGE_BYTES: u64 = 256 << 20;
/// Most frames of a message: a request has three at most, and as many more as brokers that it came by.
const MOST_FRAMES: usize = 64;
/// How long the other end may take none of the bytes of its answer.
pub(super) const FETCH_PATIENCE: Duration = Duration::from_secs(5);
/// Bytes that are read at once where more are there.
const BUFFER_BYTES: usize = 64 << 10;

/// Why a connection ends.
pub(super) enum End {
    /// The other end has closed it.
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

/// Has the system look whether the other end is still there when it says nothing: a host that has crashed must not keep a rank, and who only listens
/// would never hear that a peer has gone.
fn keep_alive(socket: impl AsFd) -> std::io::Result<()> {
    let socket = socket.as_fd();
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, QUIET_TIME)?;
    sockopt::set_tcp_keepintvl(socket, LOOK_INTERVAL)?;
    Ok(sockopt::set_tcp_keepcnt(socket, LOOKS)?)
}

/// What both ends do before they understand each other.
async fn in_time<T>(deadline: Instant, greets: impl Future<Output = Result<T, End>>) -> Result<T, End> {
    let greeted = timeout_at(deadline, greets).await;
    greeted.map_err(|_| format!("it has not greeted in {} s", GREETING_PATIENCE.as_secs()))?
}

/// A connection.
pub(super) struct Connection {
    pub(super) from: Receiving,
    pub(super) to: Sending,
    /// Until when both ends have greeted.
    greets_by: Instant,
}

/// The end that frames come by.
pub(super) struct Receiving(BufReader<OwnedReadHalf>);

/// The end that they go by.
pub(super) struct Sending(OwnedWriteHalf);

/// What a socket is, and of whom it takes connections.
pub(super) struct Role {
    /// How the socket says that it is ready.
    pub(super) ready: Vec<u8>,
    /// The types of sockets at the other end.
    pub(super) takes: [&'static [u8]; 2],
    /// What is said of others.
    pub(super) refuses: &'static str,
}

impl Connection {
    pub(super) fn new(stream: TcpStream) -> Result<Self, End> {
        // Answers are waited for, so nothing is gained by putting packets together.
        stream.set_nodelay(true)?;
        keep_alive(&stream)?;
        let (from, to) = stream.into_split();
        Ok(Self {
            from: Receiving(BufReader::with_capacity(BUFFER_BYTES, from)),
            to: Sending(to),
            greets_by: Instant::now() + GREETING_PATIENCE,
        })
    }

    /// The connection ends, too, once bytes have been on their way for so long: else an end that crashes meanwhile is waited for a quarter of
    /// an hour. It is nothing for an end that may rest without reading.
    pub(super) fn ends_where_nothing_arrives_for(&self, time: Duration) -> Result<(), End> {
        let millis = u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        sockopt::set_tcp_user_timeout(self.to.0.as_ref(), millis)
            .map_err(|error| End::from(std::io::Error::from(error)))
    }

    /// Both ends say what they are. Of which rank of an emulator the other one is, if it says so.
    pub(super) async fn greet(&mut self, role: &Role) -> Result<Option<u32>, End> {
        in_time(self.greets_by, async {
            self.exchange_greetings().await?;
            self.exchange(role).await
        })
        .await
    }

    /// The first half of [`Connection::greet`]: whether the other end speaks ZeroMQ at all.
    pub(super) async fn greet_first(&mut self) -> Result<(), End> {
        in_time(self.greets_by, self.exchange_greetings()).await
    }

    /// The second half, in what is left of the time.
    pub(super) async fn greet_last(&mut self, role: &Role) -> Result<(), End> {
        in_time(self.greets_by, self.exchange(role)).await.map(drop)
    }

    /// Says, in place of the second half, why it is of no use.
    pub(super) async fn refuse(&mut self, why: &str) -> Result<(), End> {
        in_time(self.greets_by, self.to.write(&zmtp::error(why))).await
    }

    async fn exchange_greetings(&mut self) -> Result<(), End> {
        self.to.write(&zmtp::greeting()).await?;
        let mut bytes = [0; GREETING_BYTES];
        let mut begin = 0;
        for end in GREETING_PARTS {
            self.from.0.read_exact(&mut bytes[begin..end]).await?;
            zmtp::check_greeting(&bytes[..end])?;
            begin = end;
        }
        Ok(())
    }

    async fn exchange(&mut self, role: &Role) -> Result<Option<u32>, End> {
        self.to.write(&role.ready).await?;
        loop {
            let (flags, body) = self.from.next_frame(MOST_COMMAND_BYTES).await?;
            if flags & COMMAND == 0 {
                return Err("it sends messages before it is ready".into());
            }
            if let Some(metadata) = body.strip_prefix(READY) {
                let socket = zmtp::socket_type(metadata)?;
                return if role.takes.contains(&socket) { Ok(zmtp::rank(metadata)?) } else { Err(role.refuses.into()) };
            }
        }
    }

    /// The frames of the next message. Pings are answered.
    pub(super) async fn next_message(&mut self) -> Result<Vec<Vec<u8>>, End> {
        let mut frames = Vec::new();
        let mut room = MOST_MESSAGE_BYTES;
        loop {
            let (flags, body) = self.from.next_frame(room).await?;
            if flags & COMMAND != 0 {
                if let Some(pong) = zmtp::pong(&body)? {
                    self.to.write_within(&pong, FETCH_PATIENCE).await?;
                }
                continue;
            }
            room = room.saturating_sub(body.len() as u64);
            frames.push(body);
            if frames.len() > MOST_FRAMES {
                return Err(format!("it sends a message of more than {MOST_FRAMES} frames").into());
            }
            if flags & MORE == 0 {
                return Ok(frames);
            }
        }
    }
}

impl Receiving {
    /// Flags and body of the next frame. Memory grows with what has come, and not with what is announced.
    pub(super) async fn next_frame(&mut self, most_bytes: u64) -> Result<(u8, Vec<u8>), End> {
        let flags = self.0.read_u8().await?;
        zmtp::check_flags(flags)?;
        let len = if flags & LONG == 0 { u64::from(self.0.read_u8().await?) } else { self.0.read_u64().await? };
        let most_bytes = if flags & COMMAND == 0 { most_bytes } else { MOST_COMMAND_BYTES };
        if len > most_bytes {
            return Err(
                format!("it sends a frame of {len} bytes, and a message has {MOST_MESSAGE_BYTES} at most").into()
            );
        }
        let mut body = Vec::new();
        (&mut self.0).take(len).read_to_end(&mut body).await?;
        if (body.len() as u64) < len { Err(End::Gone) } else { Ok((flags, body)) }
    }
}

impl Sending {
    pub(super) async fn write(&mut self, bytes: &[u8]) -> Result<(), End> {
        Ok(self.0.write_all(bytes).await?)
    }

    /// The same, to an end that may take none of the bytes for so long.
    pub(super) async fn write_within(&mut self, mut bytes: &[u8], patience: Duration) -> Result<(), End> {
        while !bytes.is_empty() {
            let written = timeout(patience, self.0.write(bytes)).await;
            let written = written
                .map_err(|_| format!("it has fetched none of what it is sent for {} s", patience.as_secs()))??;
            if written == 0 {
                return Err(End::Gone);
            }
            bytes = &bytes[written..];
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn both_ends_of_a_connection_look_whether_the_other_is_still_there() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        for stream in [stream, listener.accept().await.unwrap().0] {
            let connection = Connection::new(stream).unwrap_or_else(|_| panic!("a connection"));
            let socket: &TcpStream = connection.to.0.as_ref();
            assert!(sockopt::socket_keepalive(socket).unwrap());
            assert_eq!(sockopt::tcp_keepidle(socket).unwrap(), QUIET_TIME);
            assert_eq!(sockopt::tcp_user_timeout(socket).unwrap(), 0);
            assert!(connection.ends_where_nothing_arrives_for(Duration::from_secs(60)).is_ok());
            assert_eq!(sockopt::tcp_user_timeout(socket).unwrap(), 60_000);
        }
    }

    /// A host could take the time of a greeting for each of the two halves.
    #[tokio::test]
    async fn the_second_half_of_a_greeting_has_what_the_first_has_left_of_its_time() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut host = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let mut connection =
            Connection::new(listener.accept().await.unwrap().0).unwrap_or_else(|_| panic!("a connection"));
        host.write_all(&zmtp::greeting()).await.unwrap();
        assert!(connection.greet_first().await.is_ok());
        connection.greets_by = Instant::now();
        let role = Role { ready: zmtp::ready(b"REP"), takes: [b"REQ", b"DEALER"], refuses: "it asks nothing" };
        let begin = Instant::now();
        let Err(End::Refused(why)) = connection.greet_last(&role).await else { panic!("nothing was sent") };
        assert!(why.contains("has not greeted"), "{why}");
        assert!(begin.elapsed() < GREETING_PATIENCE / 2);
    }
}
