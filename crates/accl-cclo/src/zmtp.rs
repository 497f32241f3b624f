//! ZMTP 3.0 with no security, as far as the emulator's protocol needs it: the bytes of greetings, commands and frames.
//!
//! Owns what they look like, for the end that asks and the one that answers. Sockets, deadlines and how much memory a frame may take are those of
//! either end. Read [`greeting`] and [`push_frame`] first.

/// Bytes of a greeting.
pub const GREETING_BYTES: usize = 64;
/// Where a greeting can be looked at while it comes: a peer of another version sends no more than some of it.
pub const GREETING_PARTS: [usize; 4] = [1, SIGNATURE_LAST.0 + 1, VERSION.0 + 1, GREETING_BYTES];
/// How both ends begin: a signature, a version and the mechanism of security.
const SIGNATURE_FIRST: u8 = 0xFF;
const SIGNATURE_LAST: (usize, u8) = (9, 0x7F);
/// Of the last byte of the signature this bit alone counts.
const SIGNATURE_BIT: u8 = 1;
const VERSION: (usize, u8) = (10, 3);
const MECHANISM: (usize, &[u8; 20]) = (12, b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");

/// A frame that others of its message follow.
pub const MORE: u8 = 1;
/// A frame whose length has eight bytes.
pub const LONG: u8 = 2;
/// A frame that is a command, and no part of a message.
pub const COMMAND: u8 = 4;
/// Most bytes of a frame before its body.
pub const MOST_HEAD_BYTES: usize = 1 + size_of::<u64>();
/// Most bytes of a command; metadata have some tens.
pub const MOST_COMMAND_BYTES: u64 = 4 << 10;

/// The command with which a socket says what it is, behind the length of its name.
pub const READY: &[u8] = b"\x05READY";
/// That with which it says what is wrong.
pub const ERROR: &[u8] = b"\x05ERROR";
const PING: &[u8] = b"\x04PING";
const PONG: &[u8] = b"\x04PONG";
/// Bytes of a ping between its name and its context: how long it counts.
const PING_TIME_BYTES: usize = 2;
/// The property of what a socket is.
const SOCKET_TYPE: &[u8] = b"Socket-Type";
/// That by which an emulator of ours says of which of its ranks a socket is; names with this head are free to use.
const RANK: &[u8] = b"X-Accl-Rank";

/// How an end begins.
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

/// Whether a greeting is one that is understood, as far as it has come.
///
/// # Errors
/// What is wrong with it, in words.
pub fn check_greeting(bytes: &[u8]) -> Result<(), String> {
    // In between is what versions before the second take for a length.
    let (last, _) = SIGNATURE_LAST;
    let is_signed = bytes.first().is_none_or(|byte| *byte == SIGNATURE_FIRST)
        && bytes.get(last).is_none_or(|byte| byte & SIGNATURE_BIT != 0);
    if !is_signed {
        return Err("it does not greet as ZeroMQ does".to_owned());
    }
    let (at, version) = VERSION;
    if let Some(other) = bytes.get(at).filter(|other| **other < version) {
        return Err(format!("its ZeroMQ speaks version {other} of the protocol, before {version}"));
    }
    let (at, mechanism) = MECHANISM;
    if bytes.get(at..at + mechanism.len()).is_some_and(|other| other != mechanism) {
        return Err("it wants security that emulators have not".to_owned());
    }
    Ok(())
}

/// The frame in which a socket says that it is of this type.
pub fn ready(socket: &[u8]) -> Vec<u8> {
    ready_with(&[(SOCKET_TYPE, socket), (b"Identity", b"")])
}

/// The same, for a socket of this rank of an emulator.
pub fn ready_of_rank(socket: &[u8], rank: u32) -> Vec<u8> {
    ready_with(&[(SOCKET_TYPE, socket), (b"Identity", b""), (RANK, rank.to_string().as_bytes())])
}

/// The frame in which a socket says why it ends the connection.
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

/// Of which type a socket is that is ready, by what stands behind [`READY`].
///
/// # Errors
/// What is wrong with it, in words.
pub fn socket_type(metadata: &[u8]) -> Result<&[u8], &'static str> {
    property_of(metadata, SOCKET_TYPE)?.ok_or("it does not say of which type its socket is")
}

/// Of which rank of an emulator a socket is that is ready; `None`: it does not say so.
///
/// # Errors
/// As [`socket_type`].
pub fn rank(metadata: &[u8]) -> Result<Option<u32>, &'static str> {
    let digits = property_of(metadata, RANK)?;
    Ok(digits.and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok()))
}

/// The last property with this name. All are looked at: whatever is no property is an error.
fn property_of<'a>(mut metadata: &'a [u8], wanted: &[u8]) -> Result<Option<&'a [u8]>, &'static str> {
    let mut found = None;
    while !metadata.is_empty() {
        let (name, value, rest) = property(metadata).ok_or("its properties have impossible lengths")?;
        if name.eq_ignore_ascii_case(wanted) {
            found = Some(value);
        }
        metadata = rest;
    }
    Ok(found)
}

/// Name and value of the first property, and those behind it.
fn property(metadata: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let (len, rest) = metadata.split_first()?;
    let (name, rest) = rest.split_at_checked(usize::from(*len))?;
    let (len, rest) = rest.split_first_chunk()?;
    let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*len) as usize)?;
    Some((name, value, rest))
}

/// The frame that answers a command; `None`: it needs no answer.
///
/// # Errors
/// What is wrong with the command, in words.
pub fn pong(command: &[u8]) -> Result<Option<Vec<u8>>, &'static str> {
    let Some(ping) = command.strip_prefix(PING) else { return Ok(None) };
    let context = ping.get(PING_TIME_BYTES..).ok_or("it sends pings of too few bytes")?;
    Ok(Some(frame(COMMAND, &[PONG, context].concat())))
}

/// Whether a frame may have these flags.
///
/// # Errors
/// It may not, in words.
pub fn check_flags(flags: u8) -> Result<(), &'static str> {
    let is_none = flags & !(MORE | LONG | COMMAND) != 0 || flags & (MORE | COMMAND) == MORE | COMMAND;
    if is_none { Err("it sends frames with flags that there are not") } else { Ok(()) }
}

/// A frame.
pub fn frame(flags: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    push_frame(&mut bytes, flags, body);
    bytes
}

/// Writes a frame behind others.
pub fn push_frame(bytes: &mut Vec<u8>, flags: u8, body: &[u8]) {
    push_head(bytes, flags, body.len());
    bytes.extend(body);
}

/// Writes what stands before a body of so many bytes.
pub fn push_head(bytes: &mut Vec<u8>, flags: u8, body_bytes: usize) {
    match u8::try_from(body_bytes) {
        Ok(len) => bytes.extend([flags, len]),
        Err(_) => {
            bytes.push(flags | LONG);
            bytes.extend((body_bytes as u64).to_be_bytes());
        }
    }
}
