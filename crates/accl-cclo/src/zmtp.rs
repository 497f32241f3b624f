//! ZMTP 3.0 without security, as far as the emulator's protocol needs it: the bytes of greetings, commands and frames.
//!
//! Owns the encoding, for both the requesting and the replying end. Each end owns its sockets, its deadlines and its limit on the memory of a frame.
//! Read [`greeting`] and [`push_frame`] first.

/// Size of a greeting in bytes.
pub const GREETING_BYTES: usize = 64;
/// Prefix lengths at which a partial greeting can be checked. A peer with another protocol version sends only part of a greeting.
pub const GREETING_PARTS: [usize; 4] = [1, SIGNATURE_LAST.0 + 1, VERSION.0 + 1, GREETING_BYTES];
/// Start of every greeting: a signature, a version and the security mechanism.
const SIGNATURE_FIRST: u8 = 0xFF;
const SIGNATURE_LAST: (usize, u8) = (9, 0x7F);
/// The only significant bit in the last byte of the signature.
const SIGNATURE_BIT: u8 = 1;
const VERSION: (usize, u8) = (10, 3);
const MECHANISM: (usize, &[u8; 20]) = (12, b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");

/// Flag of a frame that is followed by more frames of its message.
pub const MORE: u8 = 1;
/// Flag of a frame whose length takes eight bytes.
pub const LONG: u8 = 2;
/// Flag of a frame that is a command, not part of a message.
pub const COMMAND: u8 = 4;
/// Maximum bytes of a frame before its body.
pub const MOST_HEAD_BYTES: usize = 1 + size_of::<u64>();
/// Maximum bytes of a command; typical metadata takes a few tens of bytes.
pub const MOST_COMMAND_BYTES: u64 = 4 << 10;

/// Name of the command that announces a socket's properties, preceded by its length.
pub const READY: &[u8] = b"\x05READY";
/// Name of the command that reports an error, preceded by its length.
pub const ERROR: &[u8] = b"\x05ERROR";
const PING: &[u8] = b"\x04PING";
const PONG: &[u8] = b"\x04PONG";
/// Bytes of the time-to-live between a ping's name and its context.
const PING_TIME_BYTES: usize = 2;
/// Property that holds the socket type.
const SOCKET_TYPE: &[u8] = b"Socket-Type";
/// Property in which this project's emulator sends the socket's rank. Applications may define names that begin with `X-`.
const RANK: &[u8] = b"X-Accl-Rank";

/// Returns the greeting that each end sends first.
pub fn greeting() -> [u8; GREETING_BYTES] {
    let mut bytes = [0; GREETING_BYTES];
    bytes[0] = SIGNATURE_FIRST;
    for (at, byte) in [SIGNATURE_LAST, VERSION] {
        bytes[at] = byte;
    }
    let (at, mechanism) = MECHANISM;
    bytes[at..at + mechanism.len()].copy_from_slice(mechanism);
    bytes
}

/// Checks a complete or partial greeting.
///
/// # Errors
/// A description of what is wrong with the greeting.
pub fn check_greeting(bytes: &[u8]) -> Result<(), String> {
    // The bytes in between are what versions before 2.0 take for a length.
    let (last, _) = SIGNATURE_LAST;
    let is_signed = bytes.first().is_none_or(|byte| *byte == SIGNATURE_FIRST)
        && bytes.get(last).is_none_or(|byte| byte & SIGNATURE_BIT != 0);
    if !is_signed {
        return Err("its greeting is not a ZeroMQ greeting".to_owned());
    }
    let (at, version) = VERSION;
    if let Some(other) = bytes.get(at).filter(|other| **other < version) {
        return Err(format!("its ZeroMQ uses version {other} of the protocol; expected at least {version}"));
    }
    let (at, mechanism) = MECHANISM;
    if bytes.get(at..at + mechanism.len()).is_some_and(|other| other != mechanism) {
        return Err("it requests a ZeroMQ security mechanism, and emulators have none".to_owned());
    }
    Ok(())
}

/// Returns the frame in which a socket announces its type.
pub fn ready(socket: &[u8]) -> Vec<u8> {
    ready_with(&[(SOCKET_TYPE, socket), (b"Identity", b"")])
}

/// Returns the frame in which a socket announces its type and its rank in an emulator.
pub fn ready_of_rank(socket: &[u8], rank: u32) -> Vec<u8> {
    ready_with(&[(SOCKET_TYPE, socket), (b"Identity", b""), (RANK, rank.to_string().as_bytes())])
}

/// Returns the frame in which a socket reports why it ends the connection.
pub fn error(why: &str) -> Vec<u8> {
    let why = &why.as_bytes()[..why.len().min(usize::from(u8::MAX))];
    frame(COMMAND, &[ERROR, &[why.len() as u8], why].concat())
}

fn ready_with(properties: &[(&[u8], &[u8])]) -> Vec<u8> {
    let mut body = READY.to_vec();
    for (name, value) in properties {
        body.push(name.len() as u8);
        body.extend(*name);
        body.extend((value.len() as u32).to_be_bytes());
        body.extend(*value);
    }
    frame(COMMAND, &body)
}

/// Returns the socket type from the metadata that follows [`READY`].
///
/// # Errors
/// A description of what is wrong with the metadata.
pub fn socket_type(metadata: &[u8]) -> Result<&[u8], &'static str> {
    property_of(metadata, SOCKET_TYPE)?.ok_or("it does not name the type of its socket")
}

/// Returns the emulator rank of a socket from its metadata, or `None` if the metadata has no rank.
///
/// # Errors
/// Same as [`socket_type`].
pub fn rank(metadata: &[u8]) -> Result<Option<u32>, &'static str> {
    let digits = property_of(metadata, RANK)?;
    Ok(digits.and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok()))
}

/// Returns the last property with this name. Parses all properties, because a malformed one is an error.
fn property_of<'a>(mut metadata: &'a [u8], wanted: &[u8]) -> Result<Option<&'a [u8]>, &'static str> {
    let mut found = None;
    while !metadata.is_empty() {
        let (name, value, rest) = property(metadata).ok_or("its properties have invalid lengths")?;
        if name.eq_ignore_ascii_case(wanted) {
            found = Some(value);
        }
        metadata = rest;
    }
    Ok(found)
}

/// Returns name and value of the first property, and the remaining properties.
fn property(metadata: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let (len, rest) = metadata.split_first()?;
    let (name, rest) = rest.split_at_checked(usize::from(*len))?;
    let (len, rest) = rest.split_first_chunk()?;
    let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*len) as usize)?;
    Some((name, value, rest))
}

/// Returns the frame that answers a command, or `None` if the command needs no answer.
///
/// # Errors
/// A description of what is wrong with the command.
pub fn pong(command: &[u8]) -> Result<Option<Vec<u8>>, &'static str> {
    let Some(ping) = command.strip_prefix(PING) else { return Ok(None) };
    let context = ping.get(PING_TIME_BYTES..).ok_or("it sent a ping that is too short")?;
    Ok(Some(frame(COMMAND, &[PONG, context].concat())))
}

/// Checks whether a frame may have these flags.
///
/// # Errors
/// A description of why it may not.
pub fn check_flags(flags: u8) -> Result<(), &'static str> {
    let is_none = flags & !(MORE | LONG | COMMAND) != 0 || flags & (MORE | COMMAND) == MORE | COMMAND;
    if is_none { Err("it sent a frame with invalid flags") } else { Ok(()) }
}

/// Returns a frame with this body.
pub fn frame(flags: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    push_frame(&mut bytes, flags, body);
    bytes
}

/// Appends a frame.
pub fn push_frame(bytes: &mut Vec<u8>, flags: u8, body: &[u8]) {
    push_head(bytes, flags, body.len());
    bytes.extend(body);
}

/// Appends the flags and the length that precede a body of `body_bytes` bytes.
pub fn push_head(bytes: &mut Vec<u8>, flags: u8, body_bytes: usize) {
    match u8::try_from(body_bytes) {
        Ok(len) => bytes.extend([flags, len]),
        Err(_) => {
            bytes.push(flags | LONG);
            bytes.extend((body_bytes as u64).to_be_bytes());
        }
    }
}
