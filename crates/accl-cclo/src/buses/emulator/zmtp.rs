//! Requesting end of ZeroMQ, as far as the emulator's protocol needs it: ZMTP 3.0 without security, with a REQ socket over one connection.
//!
//! Owns the connection, and limits what a peer may send; the encoding of greetings and frames is in [`crate::zmtp`]. A peer can cost at most
//! [`MOST_BYTES`] of memory and the time until a deadline. That matters because any program may listen at an address that a user configured.
//!
//! Connects once and never reconnects. Answers pings only during a request, since emulators send none. Read [`Requester`] first.

use std::fmt;
use std::io::{self, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::address::Address;
use crate::zmtp::{self, COMMAND, ERROR, GREETING_BYTES, LONG, MORE, MOST_COMMAND_BYTES, READY, greeting, push_frame};

/// Maximum total bytes of a message. The largest answer that is requested at once, a chunk of memory, has less than one MiB.
const MOST_BYTES: u64 = 16 << 20;
/// How long data that has already arrived may be read after a deadline, and how long each such read may wait.
const OVERTIME: Duration = Duration::from_millis(100);
const SHORTEST_WAIT: Duration = Duration::from_millis(1);
/// Size of the read buffer in bytes.
const BUFFER_BYTES: usize = 64 << 10;

/// Socket type of the requesting end, and the accepted types of the peer.
const ASKING: &[u8] = b"REQ";
const ANSWERING: [&[u8]; 2] = [b"REP", b"ROUTER"];

/// Reason why there is no answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// Nothing listens at the address.
    Unreached(io::Error),
    /// Name lookup or connection did not complete in time.
    UnreachedInTime,
    /// The peer did not send its greeting in time.
    Ungreeted,
    /// The deadline has passed.
    Late,
    /// The connection has been closed.
    Closed(io::Error),
    /// The peer sent the reason why it ends the connection.
    Refused(String),
    /// The peer does not speak the protocol, for this reason.
    Senseless(String),
}

/// Connection for one request after the other.
pub(super) struct Requester {
    stream: BufReader<Timed>,
}

/// Stream whose reads and writes end at a deadline.
struct Timed {
    stream: TcpStream,
    deadline: Instant,
    /// When reading after the deadline began. Only data that has already arrived is read then.
    overtime: Option<Instant>,
}

impl Drop for Requester {
    /// Closes the connection for the peer now, even if a process forked meanwhile has inherited the socket.
    fn drop(&mut self) {
        let _ = self.stream.get_ref().stream.shutdown(Shutdown::Both);
    }
}

impl Requester {
    /// Connects and exchanges greetings. Name lookup, connection and greetings may each take up to `patience`.
    pub(super) fn connect(address: &Address, patience: Duration) -> Result<Self, Failure> {
        let stream = reached(address, patience)?;
        // Each request waits for its answer, so combining packets gains nothing.
        stream.set_nodelay(true).map_err(Failure::Closed)?;
        let timed = Timed { stream, deadline: Instant::now() + patience, overtime: None };
        let mut requester = Self { stream: BufReader::with_capacity(BUFFER_BYTES, timed) };
        match requester.greet() {
            Err(Failure::Late) => Err(Failure::Ungreeted),
            Err(Failure::Closed(error)) => Err(Failure::Senseless(format!("the ZeroMQ greeting failed: {error}"))),
            greeted => greeted.map(|()| requester),
        }
    }

    fn greet(&mut self) -> Result<(), Failure> {
        self.write(&greeting())?;
        read_greeting(&mut self.stream)?;
        self.write(&zmtp::ready(ASKING))?;
        loop {
            match read_frame(&mut self.stream, MOST_COMMAND_BYTES)? {
                Frame { flags, body } if flags & COMMAND != 0 => {
                    if let Some(metadata) = body.strip_prefix(READY) {
                        return check_metadata(metadata);
                    }
                    self.obey(&body)?;
                }
                Frame { .. } => return Err(senseless("it sent a message before its READY command")),
            }
        }
    }

    /// Sends a request and returns the whole answer. After an error the connection is in an undefined state and unusable.
    pub(super) fn ask(&mut self, request: &[u8], patience: Duration) -> Result<Vec<u8>, Failure> {
        let timed = self.stream.get_mut();
        (timed.deadline, timed.overtime) = (Instant::now() + patience, None);
        self.write(&enveloped(request))?;
        let mut message = Message::default();
        loop {
            let frame = read_frame(&mut self.stream, message.room())?;
            if frame.flags & COMMAND != 0 {
                self.obey(&frame.body)?;
            } else if message.take(frame)? {
                return Ok(message.body);
            }
        }
    }

    /// Handles a command. Unknown commands, of other versions and socket types, are ignored.
    fn obey(&mut self, command: &[u8]) -> Result<(), Failure> {
        if let Some(reason) = command.strip_prefix(ERROR) {
            let reason = String::from_utf8_lossy(reason.get(1..).unwrap_or_default());
            return Err(Failure::Refused(reason.escape_debug().to_string()));
        }
        match zmtp::pong(command).map_err(senseless)? {
            Some(pong) => self.write(&pong),
            None => Ok(()),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.stream.get_mut().write_all(bytes).map_err(failure)
    }
}

/// Connects to an address.
fn reached(address: &Address, patience: Duration) -> Result<TcpStream, Failure> {
    let addresses = match address.to_string().parse() {
        Ok(address) => vec![address],
        Err(_) => looked_up(address.to_string(), patience)?,
    };
    let no_address = io::Error::new(io::ErrorKind::NotFound, "the host name has no address");
    let mut last = Failure::Unreached(no_address);
    let deadline = Instant::now() + patience;
    for address in addresses {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Failure::UnreachedInTime);
        }
        match TcpStream::connect_timeout(&address, left) {
            // Avoids the numbers of the standard streams, so that output which the process prints cannot reach the peer.
            Ok(stream) => {
                let stream = rustix::io::fcntl_dupfd_cloexec(&stream, 3).map_err(io::Error::from);
                return stream.map(TcpStream::from).map_err(Failure::Unreached);
            }
            Err(error) if is_late(&error) => last = Failure::UnreachedInTime,
            Err(error) => last = Failure::Unreached(error),
        }
    }
    Err(last)
}

/// Looks up the addresses of a name. If that takes longer than `patience`, the lookup thread is left behind.
fn looked_up(name: String, patience: Duration) -> Result<Vec<SocketAddr>, Failure> {
    let (found, finds) = mpsc::channel();
    let look = move || drop(found.send(name.to_socket_addrs().map(Iterator::collect)));
    std::thread::Builder::new().name("accl-name".to_owned()).spawn(look).map_err(Failure::Unreached)?;
    match finds.recv_timeout(patience) {
        Ok(addresses) => addresses.map_err(Failure::Unreached),
        Err(_) => Err(Failure::UnreachedInTime),
    }
}

impl Timed {
    fn left(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

impl Read for Timed {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let left = match self.left() {
            Ok(left) => left,
            // If this process itself was stopped past the deadline, the answer may have arrived meanwhile.
            Err(late) => {
                let began = *self.overtime.get_or_insert_with(Instant::now);
                if began.elapsed() > OVERTIME {
                    return Err(late);
                }
                SHORTEST_WAIT
            }
        };
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(into)
    }
}

impl Write for Timed {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        self.stream.write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// A received frame.
struct Frame {
    flags: u8,
    body: Vec<u8>,
}

/// An answer, as far as it has arrived: an empty frame, and the frames after it.
#[derive(Default)]
struct Message {
    has_delimiter: bool,
    body: Vec<u8>,
}

impl Message {
    /// Returns the maximum bytes of the next frame.
    fn room(&self) -> u64 {
        MOST_BYTES.saturating_sub(self.body.len() as u64)
    }

    /// Takes a frame. Returns whether it was the last of the answer.
    fn take(&mut self, frame: Frame) -> Result<bool, Failure> {
        let Frame { flags, body } = frame;
        let has_more = flags & MORE != 0;
        if self.has_delimiter {
            if self.body.is_empty() {
                self.body = body;
            } else {
                self.body.extend(body);
            }
            return Ok(!has_more);
        }
        if !body.is_empty() || !has_more {
            return Err(senseless("its replies do not begin with an empty frame"));
        }
        self.has_delimiter = true;
        Ok(false)
    }
}

/// Reads and checks a greeting in parts, because a peer of another version sends a shorter one.
fn read_greeting(from: &mut impl Read) -> Result<(), Failure> {
    let mut bytes = [0; GREETING_BYTES];
    let mut begin = 0;
    for end in zmtp::GREETING_PARTS {
        from.read_exact(&mut bytes[begin..end]).map_err(failure)?;
        zmtp::check_greeting(&bytes[..end]).map_err(Failure::Senseless)?;
        begin = end;
    }
    Ok(())
}

/// Checks that a peer's socket type answers requests.
fn check_metadata(metadata: &[u8]) -> Result<(), Failure> {
    let socket = zmtp::socket_type(metadata).map_err(senseless)?;
    if ANSWERING.contains(&socket) {
        return Ok(());
    }
    let other = String::from_utf8_lossy(socket);
    Err(Failure::Senseless(format!("its socket is of type `{}`, not REP", other.escape_debug())))
}

/// Returns a request as it is sent, after an empty frame. The request is copied once, since it may be large.
fn enveloped(request: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(request.len() + 2 * zmtp::MOST_HEAD_BYTES);
    push_frame(&mut bytes, MORE, &[]);
    push_frame(&mut bytes, 0, request);
    bytes
}

fn read_frame(from: &mut impl Read, most_bytes: u64) -> Result<Frame, Failure> {
    let mut flags = [0];
    from.read_exact(&mut flags).map_err(failure)?;
    let [flags] = flags;
    zmtp::check_flags(flags).map_err(senseless)?;
    let len = if flags & LONG == 0 {
        let mut len = [0];
        from.read_exact(&mut len).map_err(failure)?;
        u64::from(len[0])
    } else {
        let mut len = [0; size_of::<u64>()];
        from.read_exact(&mut len).map_err(failure)?;
        u64::from_be_bytes(len)
    };
    let most_bytes = if flags & COMMAND == 0 { most_bytes } else { MOST_COMMAND_BYTES };
    if len > most_bytes {
        return Err(senseless("it sent a frame of an invalid length"));
    }
    let mut body = vec![0; len as usize];
    from.read_exact(&mut body).map_err(failure)?;
    Ok(Frame { flags, body })
}

fn senseless(why: &str) -> Failure {
    Failure::Senseless(why.to_owned())
}

/// Returns whether a socket error means that the time limit passed. Systems report that by either kind.
fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

fn failure(error: io::Error) -> Failure {
    if is_late(&error) { Failure::Late } else { Failure::Closed(error) }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreached(error) | Self::Closed(error) => error.fmt(f),
            Self::UnreachedInTime | Self::Ungreeted | Self::Late => f.write_str("the time limit has passed"),
            Self::Refused(why) => write!(f, "it refused the connection: `{why}`"),
            Self::Senseless(why) => f.write_str(why),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use proptest::prelude::*;

    use super::*;
    use crate::zmtp::frame;

    /// Reads everything that a peer sends, like a requester, and returns the answer.
    fn read(mut bytes: &[u8]) -> Result<Vec<u8>, Failure> {
        read_greeting(&mut bytes)?;
        let Frame { flags, body } = read_frame(&mut bytes, MOST_COMMAND_BYTES)?;
        match body.strip_prefix(READY) {
            Some(metadata) if flags & COMMAND != 0 => check_metadata(metadata)?,
            _ => return Err(senseless("not ready")),
        }
        let mut message = Message::default();
        loop {
            let frame = read_frame(&mut bytes, message.room())?;
            if frame.flags & COMMAND == 0 && message.take(frame)? {
                return Ok(message.body);
            }
        }
    }

    fn ready_of(socket: &[u8]) -> Vec<u8> {
        let len = (socket.len() as u32).to_be_bytes();
        // Property names may be in any case, and other properties may be present.
        let body = [READY, b"\x01X\0\0\0\x02ab", b"\x0bsocket-TYPE", &len, socket].concat();
        frame(COMMAND, &body)
    }

    /// Returns the greeting of libzmq 4.3, which names version 3.1 and puts a length into its signature.
    fn greeting_of_libzmq() -> [u8; GREETING_BYTES] {
        let mut bytes = greeting();
        (bytes[8], bytes[11]) = (1, 1);
        bytes
    }

    fn said(bytes: &[u8]) -> String {
        read(bytes).unwrap_err().to_string()
    }

    proptest! {
        #[test]
        fn answers_are_read_as_they_were_sent(
            parts in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..600), 1..5), pings in 0_usize..3,
        ) {
            let mut bytes = [greeting_of_libzmq().to_vec(), ready_of(b"REP")].concat();
            bytes.extend(frame(MORE, &[]));
            for (index, part) in parts.iter().enumerate() {
                (0..pings).for_each(|_| bytes.extend(frame(COMMAND, b"\x04PING\0\x01abc")));
                bytes.extend(frame(if index + 1 < parts.len() { MORE } else { 0 }, part));
            }
            prop_assert_eq!(read(&bytes).unwrap(), parts.concat());
            for end in 0..bytes.len() {
                prop_assert!(matches!(read(&bytes[..end]), Err(Failure::Closed(_))), "{} of {}", end, bytes.len());
            }
        }

        #[test]
        fn anything_may_come(bytes: Vec<u8>) {
            let _ = read(&bytes);
            let _ = read_frame(&mut &bytes[..], MOST_BYTES);
            let _ = check_metadata(&bytes);
            let _ = read(&[&greeting()[..], &bytes].concat());
            let _ = read(&[&greeting()[..], &ready_of(b"ROUTER"), &bytes].concat());
        }

        #[test]
        fn what_is_damaged_is_read_or_refused(at in any::<prop::sample::Index>(), with: u8) {
            let mut bytes =
                [&greeting()[..], &ready_of(b"REP"), &frame(MORE, &[]), &frame(MORE, b"ab"), &frame(0, &[7; 300])].concat();
            let at = at.index(bytes.len());
            bytes[at] = with;
            let _ = read(&bytes);
        }

        #[test]
        fn a_length_that_no_answer_has_takes_no_memory(len in MOST_BYTES + 1.., flags in 0_u8..8) {
            let frame = [&[flags | LONG][..], &len.to_be_bytes()].concat();
            let refused = matches!(read_frame(&mut &frame[..], MOST_BYTES), Err(Failure::Senseless(_)));
            prop_assert!(refused);
        }
    }

    #[test]
    fn a_peer_that_does_not_speak_the_protocol_is_refused_with_the_reason() {
        let ready = ready_of(b"REP");
        let begun = [&greeting()[..], &ready].concat();
        let with = |at: usize, byte: u8| {
            let mut bytes = begun.clone();
            bytes[at] = byte;
            bytes
        };
        for (bytes, why) in [
            (b"HTTP/1.1 400 Bad Request".to_vec(), "its greeting is not a ZeroMQ greeting"),
            (with(9, 0x7E), "its greeting is not a ZeroMQ greeting"),
            (with(10, 1), "its ZeroMQ uses version 1 of the protocol; expected at least 3"),
            (with(12, b'C'), "it requests a ZeroMQ security mechanism, and emulators have none"),
            ([&greeting()[..], &ready_of(b"PUB")].concat(), "its socket is of type `PUB`, not REP"),
            ([&greeting()[..], &frame(COMMAND, READY)].concat(), "it does not name the type of its socket"),
            (
                [&greeting()[..], &frame(COMMAND, b"\x05READY\x0bSocket-Type\xFF\xFF\xFF\xFFREP")].concat(),
                "its properties have invalid lengths",
            ),
            ([&begun[..], &frame(0, b"alone")].concat(), "its replies do not begin with an empty frame"),
            ([&begun[..], &frame(MORE, b"a")].concat(), "its replies do not begin with an empty frame"),
            ([&begun[..], &[8, 0]].concat(), "it sent a frame with invalid flags"),
            ([&begun[..], &[COMMAND | MORE, 0]].concat(), "it sent a frame with invalid flags"),
            ([&begun[..], &[LONG, 0, 0, 0x10, 0, 0, 0, 0, 0]].concat(), "it sent a frame of an invalid length"),
            ([&begun[..], &[COMMAND | LONG, 0, 0, 0, 0, 0, 1, 0, 0]].concat(), "it sent a frame of an invalid length"),
        ] {
            assert_eq!(said(&bytes), why);
        }
    }

    #[test]
    fn many_frames_are_no_longer_than_one_may_be() {
        let large = frame(MORE, &vec![0; MOST_BYTES as usize / 2]);
        let bytes =
            [&greeting()[..], &ready_of(b"REP"), &frame(MORE, &[]), &large, &large, &frame(MORE, b"x")].concat();
        assert_eq!(said(&bytes), "it sent a frame of an invalid length");
    }

    /// Starts a peer that sends `says` after its greeting. Its thread returns the bytes that it received.
    fn peer(says: Vec<u8>) -> (Address, std::thread::JoinHandle<Vec<u8>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let serve = move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut received = vec![0; GREETING_BYTES + zmtp::ready(ASKING).len() + enveloped(b"?").len()];
            stream.write_all(&[&greeting_of_libzmq()[..], &ready_of(b"REP"), &says].concat()).unwrap();
            stream.read_exact(&mut received).unwrap();
            stream.read_to_end(&mut received).unwrap();
            received
        };
        (Address { host: "localhost".to_owned(), port }, std::thread::spawn(serve))
    }

    #[test]
    fn requests_leave_as_the_protocol_has_them_and_pings_are_answered() {
        let ping = frame(COMMAND, b"\x04PING\0\x0Aabc");
        let (address, peer) = peer([&ping[..], &frame(MORE, &[]), &ping, &frame(0, b"!")].concat());
        let mut requester = Requester::connect(&address, Duration::from_secs(5)).unwrap();
        assert_eq!(requester.ask(b"?", Duration::from_secs(5)).unwrap(), b"!");
        drop(requester);
        let expected = [
            &b"\xFF\0\0\0\0\0\0\0\0\x7F\x03\0NULL"[..],
            &[0; 48],
            b"\x04\x26\x05READY\x0bSocket-Type\0\0\0\x03REQ\x08Identity\0\0\0\0",
            b"\x01\0\0\x01?",
            b"\x04\x08\x04PONGabc\x04\x08\x04PONGabc",
        ];
        assert_eq!(peer.join().unwrap(), expected.concat());
    }

    #[test]
    fn a_peer_that_says_a_little_at_a_time_has_no_longer_than_one_that_says_nothing() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address { host: "127.0.0.1".to_owned(), port: listener.local_addr().unwrap().port() };
        let peer = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(&[&greeting()[..], &ready_of(b"REP")].concat()).unwrap();
            let little = frame(COMMAND, b"\x01X");
            while little.iter().all(|byte| stream.write_all(&[*byte]).is_ok()) {
                std::thread::yield_now();
            }
        });
        let mut requester = Requester::connect(&address, Duration::from_secs(5)).unwrap();
        let begin = Instant::now();
        assert!(matches!(requester.ask(b"?", Duration::from_millis(100)), Err(Failure::Late)));
        assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
        drop(requester);
        peer.join().unwrap();
    }

    #[test]
    fn what_has_come_while_this_process_was_stopped_is_read_although_it_is_late() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (peer, _) = listener.accept().unwrap();
        let mut timed = Timed { stream: peer, deadline: Instant::now(), overtime: None };
        assert!(is_late(&timed.read(&mut [0; 4]).unwrap_err()), "nothing has come");
        stream.write_all(b"late").unwrap();
        // Simulates a process that was stopped from before the answer until after the deadline.
        timed.overtime = None;
        let mut seen = [0; 4];
        timed.read_exact(&mut seen).unwrap();
        assert_eq!(&seen, b"late");
    }
}
