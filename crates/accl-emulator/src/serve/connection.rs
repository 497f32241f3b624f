//! A ZeroMQ connection: greetings, frames and messages.
//!
//! Owns the limits on what a connection may send, and on the time of its greeting. The caller interprets the messages. Read [`Connection::greet`]
//! first.

use std::time::Duration;

use accl_cclo::zmtp::{self, COMMAND, GREETING_BYTES, GREETING_PARTS, LONG, MORE, MOST_COMMAND_BYTES, READY};
use rustix::fd::AsFd;
use rustix::net::sockopt;
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::{Instant, timeout, timeout_at};

/// Keepalive settings: idle time before the first probe, time between probes, and number of unanswered probes that end the connection.
const QUIET_TIME: Duration = Duration::from_secs(30);
const LOOK_INTERVAL: Duration = Duration::from_secs(10);
const LOOKS: u32 = 3;
/// Time limit for a connection to send its greeting and its socket type.
const GREETING_PATIENCE: Duration = Duration::from_secs(5);
/// Maximum bytes of a message: four characters for each byte of 64 MiB of memory.
const MOST_MESSAGE_BYTES: u64 = 256 << 20;
/// Maximum number of frames of a message. A request has at most three, plus one for each broker on its way.
const MOST_FRAMES: usize = 64;
/// How long the other end may accept no bytes of its answer.
pub(super) const FETCH_PATIENCE: Duration = Duration::from_secs(5);
/// Size of the read buffer in bytes.
const BUFFER_BYTES: usize = 64 << 10;

/// Reason why a connection ends.
pub(super) enum End {
    /// The other end has closed the connection.
    Gone,
    /// This end closes the connection, for this reason.
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

/// Enables TCP keepalive. A crashed host must not keep a rank. A subscriber, which only receives, would otherwise never notice that its peer has
/// crashed.
fn keep_alive(socket: impl AsFd) -> std::io::Result<()> {
    let socket = socket.as_fd();
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, QUIET_TIME)?;
    sockopt::set_tcp_keepintvl(socket, LOOK_INTERVAL)?;
    Ok(sockopt::set_tcp_keepcnt(socket, LOOKS)?)
}

/// Runs a part of the greeting, and fails at the deadline.
async fn in_time<T>(deadline: Instant, greets: impl Future<Output = Result<T, End>>) -> Result<T, End> {
    let greeted = timeout_at(deadline, greets).await;
    greeted.map_err(|_| format!("it did not complete the ZeroMQ greeting within {} s", GREETING_PATIENCE.as_secs()))?
}

/// A ZeroMQ connection.
pub(super) struct Connection {
    pub(super) from: Receiving,
    pub(super) to: Sending,
    /// Time by which both ends must have completed the greeting.
    greets_by: Instant,
}

/// Receiving half of a connection.
pub(super) struct Receiving(BufReader<OwnedReadHalf>);

/// Sending half of a connection.
pub(super) struct Sending(OwnedWriteHalf);

/// Role of a socket, and the peers that it accepts.
pub(super) struct Role {
    /// READY command of this socket.
    pub(super) ready: Vec<u8>,
    /// Accepted socket types of the other end.
    pub(super) takes: [&'static [u8]; 2],
    /// Reason that is reported for any other socket type.
    pub(super) refuses: &'static str,
}

impl Connection {
    pub(super) fn new(stream: TcpStream) -> Result<Self, End> {
        // Each request waits for its answer, so combining packets gains nothing.
        stream.set_nodelay(true)?;
        keep_alive(&stream)?;
        let (from, to) = stream.into_split();
        Ok(Self {
            from: Receiving(BufReader::with_capacity(BUFFER_BYTES, from)),
            to: Sending(to),
            greets_by: Instant::now() + GREETING_PATIENCE,
        })
    }

    /// Also ends the connection if sent bytes are not acknowledged for `time`. Otherwise the connection of a peer that crashes meanwhile lasts a
    /// quarter of an hour. This must not be used for a peer that may stop reading for a while.
    pub(super) fn ends_where_nothing_arrives_for(&self, time: Duration) -> Result<(), End> {
        let millis = u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        sockopt::set_tcp_user_timeout(self.to.0.as_ref(), millis)
            .map_err(|error| End::from(std::io::Error::from(error)))
    }

    /// Exchanges greetings and socket types. Returns the emulator rank of the other end, if it names one.
    pub(super) async fn greet(&mut self, role: &Role) -> Result<Option<u32>, End> {
        in_time(self.greets_by, async {
            self.exchange_greetings().await?;
            self.exchange(role).await
        })
        .await
    }

    /// Runs the first half of [`Connection::greet`], which shows whether the other end speaks ZeroMQ.
    pub(super) async fn greet_first(&mut self) -> Result<(), End> {
        in_time(self.greets_by, self.exchange_greetings()).await
    }

    /// Runs the second half, within the remaining time.
    pub(super) async fn greet_last(&mut self, role: &Role) -> Result<(), End> {
        in_time(self.greets_by, self.exchange(role)).await.map(drop)
    }

    /// Sends an error with the reason, in place of the second half.
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
                return Err("it sent a message before its READY command".into());
            }
            if let Some(metadata) = body.strip_prefix(READY) {
                let socket = zmtp::socket_type(metadata)?;
                return if role.takes.contains(&socket) { Ok(zmtp::rank(metadata)?) } else { Err(role.refuses.into()) };
            }
        }
    }

    /// Returns the frames of the next message, and answers pings.
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
                return Err(format!("it sent a message of more than {MOST_FRAMES} frames").into());
            }
            if flags & MORE == 0 {
                return Ok(frames);
            }
        }
    }
}

impl Receiving {
    /// Returns flags and body of the next frame. Memory grows with the bytes that arrive, not with the announced length.
    pub(super) async fn next_frame(&mut self, most_bytes: u64) -> Result<(u8, Vec<u8>), End> {
        let flags = self.0.read_u8().await?;
        zmtp::check_flags(flags)?;
        let len = if flags & LONG == 0 { u64::from(self.0.read_u8().await?) } else { self.0.read_u64().await? };
        let most_bytes = if flags & COMMAND == 0 { most_bytes } else { MOST_COMMAND_BYTES };
        if len > most_bytes {
            return Err(format!("it sent a frame of {len} bytes; a message has at most {MOST_MESSAGE_BYTES}").into());
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

    /// Same as [`Sending::write`], but fails if the other end accepts no bytes for `patience`.
    pub(super) async fn write_within(&mut self, mut bytes: &[u8], patience: Duration) -> Result<(), End> {
        while !bytes.is_empty() {
            let written = timeout(patience, self.0.write(bytes)).await;
            let written = written.map_err(|_| format!("it has read nothing for {} s", patience.as_secs()))??;
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

    /// Regression test: a host could use the whole time limit of a greeting for each of its two halves.
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
        assert!(why.contains("did not complete the ZeroMQ greeting"), "{why}");
        assert!(begin.elapsed() < GREETING_PATIENCE / 2);
    }
}
