//! The messages of the handshake: hello or note, reply, confirm, each of fixed length.
//!
//! A pure codec. The connecting side sends a hello, and the accepting side replies. For the accepting side the link
//! exists only with the confirmation, so a side that gave up in between has left nothing behind.
//! The first twelve bytes (mark and version) stay the same in all versions. A stranger's message is refused at its
//! first wrong byte.

use crate::transport::{MAX_ADDRESS_BYTES, MAX_NAME_BYTES};
use accl_wire::PROTOCOL_VERSION;

/// Bytes of a hello and of a note: the accepting side does not know which of the two will arrive. They fit into one
/// packet of most networks.
pub(super) const GREETING_BYTES: usize = 1280;
pub(super) const REPLY_BYTES: usize = 1280;
pub(super) const CONFIRM_BYTES: usize = 24;
/// Maximum bytes of a note's text.
pub const MAX_NOTE_BYTES: usize = GREETING_BYTES - NOTE_TEXT_AT;
/// Maximum bytes of a reply's body.
pub const MAX_ANSWER_BYTES: usize = REPLY_BYTES - REPLY_BODY_AT;

const HELLO_MARK: &[u8; 8] = b"\x7faccl>\r\n";
const REPLY_MARK: &[u8; 8] = b"\x7faccl<\r\n";
const CONFIRM_MARK: &[u8; 8] = b"\x7faccl!\r\n";
const NOTE_MARK: &[u8; 8] = b"\x7faccl?\r\n";
const VERSIONED_BYTES: usize = 12;
/// Offset of the length of the body at the end of a message.
const LEN_AT: usize = 12;
const HELLO_TRANSPORT_AT: usize = 64;
const HELLO_NAME_AT: usize = HELLO_TRANSPORT_AT + 1 + MAX_NAME_BYTES;
const HELLO_ADDRESS_AT: usize = 256;
const REPLY_BODY_AT: usize = 40;
const NOTE_TEXT_AT: usize = 48;

const _: () = assert!(HELLO_ADDRESS_AT + MAX_ADDRESS_BYTES <= GREETING_BYTES);
const _: () = assert!(MAX_ADDRESS_BYTES <= MAX_ANSWER_BYTES);

/// Reasons to refuse received bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The message is not of this protocol; it gets no answer.
    Stranger,
    /// The message has another protocol version.
    Version(u32),
}

/// The first message of the connecting side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    /// Name of the transport's table row.
    pub(super) transport: String,
    pub(super) from: [u8; 16],
    /// The peer's identity as read in the store; no other process knows it.
    pub(super) to: [u8; 16],
    pub(super) nonce: u64,
    pub(super) pid: u32,
    pub(super) max_payload_bytes: u32,
    pub(super) hostname: String,
    /// At most [`MAX_ADDRESS_BYTES`] bytes; the rest is cut.
    pub(super) address: Vec<u8>,
}

impl Hello {
    pub(super) fn to_bytes(&self) -> [u8; GREETING_BYTES] {
        let mut out = [0; GREETING_BYTES];
        start(&mut out, HELLO_MARK);
        out[16..32].copy_from_slice(&self.from);
        out[32..48].copy_from_slice(&self.to);
        out[48..56].copy_from_slice(&self.nonce.to_le_bytes());
        out[56..60].copy_from_slice(&self.pid.to_le_bytes());
        out[60..64].copy_from_slice(&self.max_payload_bytes.to_le_bytes());
        put_text(&mut out[HELLO_TRANSPORT_AT..HELLO_NAME_AT], &self.transport);
        put_text(&mut out[HELLO_NAME_AT..HELLO_ADDRESS_AT], &self.hostname);
        put_body(&mut out, HELLO_ADDRESS_AT, &self.address);
        out
    }

    pub(super) fn parse(bytes: &[u8; GREETING_BYTES]) -> Result<Hello, Refusal> {
        check_start(bytes, HELLO_MARK)?;
        Ok(Hello {
            transport: text(&bytes[HELLO_TRANSPORT_AT..HELLO_NAME_AT]),
            from: array(bytes, 16),
            to: array(bytes, 32),
            nonce: u64::from_le_bytes(array(bytes, 48)),
            pid: u32::from_le_bytes(array(bytes, 56)),
            max_payload_bytes: u32::from_le_bytes(array(bytes, 60)),
            hostname: text(&bytes[HELLO_NAME_AT..HELLO_ADDRESS_AT]),
            address: body(bytes, HELLO_ADDRESS_AT),
        })
    }

    /// Checks the first bytes of a hello that has not arrived whole.
    pub(super) fn check_prefix(bytes: &[u8]) -> Result<(), Refusal> {
        check_start(bytes, HELLO_MARK)
    }
}

/// An out-of-band message to a process that may poll no link. The text of a [`Reply`] answers it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Note {
    pub(super) from: [u8; 16],
    /// The peer's identity as read in the store.
    pub(super) to: [u8; 16],
    /// Text of the note, at most [`MAX_NOTE_BYTES`]; the rest is cut.
    pub(super) text: Vec<u8>,
}

impl Note {
    pub(super) fn to_bytes(&self) -> [u8; GREETING_BYTES] {
        let mut out = [0; GREETING_BYTES];
        start(&mut out, NOTE_MARK);
        out[16..32].copy_from_slice(&self.from);
        out[32..48].copy_from_slice(&self.to);
        put_body(&mut out, NOTE_TEXT_AT, &self.text);
        out
    }

    pub(super) fn parse(bytes: &[u8; GREETING_BYTES]) -> Result<Note, Refusal> {
        check_start(bytes, NOTE_MARK)?;
        Ok(Note { from: array(bytes, 16), to: array(bytes, 32), text: body(bytes, NOTE_TEXT_AT) })
    }

    /// Checks the first bytes of a note that has not arrived whole.
    pub(super) fn check_prefix(bytes: &[u8]) -> Result<(), Refusal> {
        check_start(bytes, NOTE_MARK)
    }
}

/// The accepting side's decision about a hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Accepted,
    /// Refused for the reason in the text.
    Refused,
    /// There is a link already, or one is being made in the other direction.
    Crossing,
    /// Another process listens there.
    NotHere,
    /// The accepting side considers the greeting process gone, and continues without it.
    GivenUp,
}

impl Verdict {
    /// Every verdict, in code order.
    const ALL: [Verdict; 5] =
        [Verdict::Accepted, Verdict::Refused, Verdict::Crossing, Verdict::NotHere, Verdict::GivenUp];

    /// Returns the verdict of a code. Codes that a later version adds count as refusals.
    fn from_code(code: u8) -> Verdict {
        Self::ALL.get(usize::from(code)).copied().unwrap_or(Verdict::Refused)
    }
}

/// The reply of the accepting side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reply {
    pub(super) verdict: Verdict,
    /// Nonce of the hello.
    pub(super) nonce: u64,
    /// Nonce that the connecting side must confirm.
    pub(super) own_nonce: u64,
    pub(super) max_payload_bytes: u32,
    /// Address of the accepting half, answer to a note, or reason for a refusal. At most [`MAX_ANSWER_BYTES`]; the rest
    /// is cut.
    pub(super) body: Vec<u8>,
}

impl Reply {
    pub(super) fn to_bytes(&self) -> [u8; REPLY_BYTES] {
        let mut out = [0; REPLY_BYTES];
        start(&mut out, REPLY_MARK);
        out[14] = self.verdict as u8;
        out[16..24].copy_from_slice(&self.nonce.to_le_bytes());
        out[24..32].copy_from_slice(&self.own_nonce.to_le_bytes());
        out[32..36].copy_from_slice(&self.max_payload_bytes.to_le_bytes());
        put_body(&mut out, REPLY_BODY_AT, &self.body);
        out
    }

    pub(super) fn parse(bytes: &[u8; REPLY_BYTES]) -> Result<Reply, Refusal> {
        check_start(bytes, REPLY_MARK)?;
        Ok(Reply {
            verdict: Verdict::from_code(bytes[14]),
            nonce: u64::from_le_bytes(array(bytes, 16)),
            own_nonce: u64::from_le_bytes(array(bytes, 24)),
            max_payload_bytes: u32::from_le_bytes(array(bytes, 32)),
            body: body(bytes, REPLY_BODY_AT),
        })
    }

    /// Checks the first bytes of a reply that has not arrived whole.
    pub(super) fn check_prefix(bytes: &[u8]) -> Result<(), Refusal> {
        check_start(bytes, REPLY_MARK)
    }

    /// Returns the answer, or the reason for the refusal.
    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// Returns the last message of the handshake; frames follow.
pub(super) fn confirm_bytes(own_nonce: u64) -> [u8; CONFIRM_BYTES] {
    let mut out = [0; CONFIRM_BYTES];
    start(&mut out, CONFIRM_MARK);
    out[16..24].copy_from_slice(&own_nonce.to_le_bytes());
    out
}

fn start(out: &mut [u8], mark: &[u8; 8]) {
    out[..8].copy_from_slice(mark);
    out[8..12].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
}

fn check_start(bytes: &[u8], mark: &[u8; 8]) -> Result<(), Refusal> {
    let seen = bytes.len().min(mark.len());
    if bytes[..seen] != mark[..seen] {
        return Err(Refusal::Stranger);
    }
    match bytes.get(8..VERSIONED_BYTES).map(|v| u32::from_le_bytes([v[0], v[1], v[2], v[3]])) {
        Some(version) if version != PROTOCOL_VERSION => Err(Refusal::Version(version)),
        Some(_) | None => Ok(()),
    }
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|i| bytes[at + i])
}

/// Writes a body of any length, cut to the space in `out`, and its length.
fn put_body(out: &mut [u8], at: usize, body: &[u8]) {
    let len = body.len().min(out.len() - at);
    out[LEN_AT..LEN_AT + 2].copy_from_slice(&(len as u16).to_le_bytes());
    out[at..at + len].copy_from_slice(&body[..len]);
}

fn body(bytes: &[u8], at: usize) -> Vec<u8> {
    let len = usize::from(u16::from_le_bytes(array(bytes, LEN_AT))).min(bytes.len() - at);
    bytes[at..at + len].to_vec()
}

/// Writes a text with its length in the first byte, cut at a character boundary to the space in `out`.
fn put_text(out: &mut [u8], text: &str) {
    let room = (out.len() - 1).min(usize::from(u8::MAX)).min(text.len());
    let len = (0..=room).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0);
    out[0] = len as u8;
    out[1..=len].copy_from_slice(&text.as_bytes()[..len]);
}

fn text(bytes: &[u8]) -> String {
    let len = usize::from(bytes[0]).min(bytes.len() - 1);
    String::from_utf8_lossy(&bytes[1..=len]).into_owned()
}

#[cfg(all(test, not(accl_loom)))]
mod tests {
    use std::net::SocketAddr;

    use accl_types::{ErrorKind, Rank};
    use accl_wire::frame::{Cause, Header, Kind, Signature};
    use proptest::prelude::*;

    use super::*;
    use accl_wire::EndpointInfo;
    use accl_wire::hex;

    proptest! {
        #[test]
        fn messages_come_back_as_they_went(
            transport in "[a-z0-9_]{1,31}", from: [u8; 16], to: [u8; 16], nonce: u64, pid: u32, max_payload_bytes: u32,
            hostname in "[a-z]{0,150}", address in proptest::collection::vec(any::<u8>(), 0..=MAX_ADDRESS_BYTES),
            own_nonce: u64, code in 0..5u8,
        ) {
            let body = address.clone();
            let note = Note { from, to, text: body.clone() };
            prop_assert_eq!(Note::parse(&note.to_bytes()).unwrap(), note);
            let hello = Hello { transport, from, to, nonce, pid, max_payload_bytes, hostname, address };
            prop_assert_eq!(Hello::parse(&hello.to_bytes()).unwrap(), hello);
            let reply = Reply { verdict: Verdict::from_code(code), nonce, own_nonce, max_payload_bytes, body };
            prop_assert_eq!(Reply::parse(&reply.to_bytes()).unwrap(), reply);
        }

        #[test]
        fn strangers_are_known_by_their_first_wrong_byte(bytes in proptest::collection::vec(any::<u8>(), 1..200)) {
            let ours = bytes.iter().zip(HELLO_MARK).all(|(a, b)| a == b);
            prop_assert_eq!(Hello::check_prefix(&bytes).is_err(), !ours);
        }
    }

    /// If this fails, raise [`PROTOCOL_VERSION`] and delete the previous version's snapshot.
    #[test]
    fn the_handshake_and_the_frames_are_those_of_their_version() {
        let hello = Hello {
            transport: "shm".to_owned(),
            from: *b"identity-of-mine",
            to: *b"and-that-of-ours",
            nonce: 0x0102_0304_0506_0708,
            pid: 4711,
            max_payload_bytes: 65792,
            hostname: "node3".to_owned(),
            address: vec![1, 2, 3],
        };
        let reply =
            Reply { verdict: Verdict::Refused, nonce: 1, own_nonce: 2, max_payload_bytes: 3, body: b"no".to_vec() };
        let signature =
            Signature { collective: 1, dtype: 2, op: 3, algorithm: 4, root: 5, count: 6, shape_hash: 7, reserved: 8 };
        let cause = Cause { kind: ErrorKind::Mismatch, origin: Rank(3), text: "why".to_owned() };
        let mut lines = vec![
            format!("hello {}", hex(&hello.to_bytes()[..HELLO_ADDRESS_AT + 8])),
            format!("reply {}", hex(&reply.to_bytes()[..REPLY_BODY_AT + 8])),
            format!("verdicts {}", Verdict::ALL.map(|verdict| format!("{verdict:?} {}", verdict as u8)).join(", ")),
            format!("confirm {}", hex(&confirm_bytes(9))),
            format!("note {}", hex(&Note { from: hello.from, to: hello.to, text: b"why".to_vec() }.to_bytes()[..64])),
            format!("signature {}", hex(&signature.to_bytes())),
            format!("cause {}", hex(&cause.to_bytes(64))),
        ];
        for &kind in Kind::ALL {
            let header = Header { kind, flags: 1, root: 2, group: 3, seq: 4, edge: 5, tag: 6, value: 7 };
            lines.push(format!("{kind:?} {}", hex(&header.to_bytes())));
        }
        let whole = Header::whole(&Signature { reserved: 0, ..signature });
        lines.push(format!("whole {}", whole.map_or_else(String::new, |header| hex(&header.to_bytes()))));
        let info = EndpointInfo {
            version: PROTOCOL_VERSION,
            uuid: *b"identity-of-mine",
            pid: 4711,
            uid: 1000,
            hostname: "node3".to_owned(),
            host_id: "a host".to_owned(),
            addresses: vec![SocketAddr::from(([10, 0, 0, 1], 4000))],
            unix_name: "accl-1".to_owned(),
            transports: vec!["shm".to_owned(), "tcp".to_owned()],
            lanes: 1,
        };
        lines.push(info.to_text());
        insta::assert_snapshot!(format!("protocol_version_{PROTOCOL_VERSION}"), lines.join("\n"));
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        let mut out = [0; 100];
        put_text(&mut out, &"ü".repeat(200));
        assert_eq!(text(&out), "ü".repeat(49));
    }

    #[test]
    fn another_version_differs_from_a_stranger() {
        let mut bytes = confirm_bytes(1);
        bytes[..8].copy_from_slice(HELLO_MARK);
        bytes[8] ^= 0x40;
        assert_eq!(Hello::check_prefix(&bytes), Err(Refusal::Version(PROTOCOL_VERSION ^ 0x40)));
        assert_eq!(Hello::check_prefix(b"GET / HTTP/1.1\r\n"), Err(Refusal::Stranger));
        assert_eq!(Hello::check_prefix(&bytes[..10]), Ok(()));
    }
}
