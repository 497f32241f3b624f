//! The frames that travel on links: a 40-byte header and a payload, little endian.
//!
//! A pure codec: owns the layout of headers, call signatures and error causes; knows no links and no meaning of the
//! numbers beyond their place. Links carry frames as opaque bytes. Read [`Header`] first.

use accl_types::{Error, ErrorKind, Rank, Result};

/// Bytes of an encoded [`Header`].
pub const HEADER_BYTES: usize = 40;
/// Bytes of an encoded [`Signature`].
pub const SIGNATURE_BYTES: usize = 32;
/// What a link must carry beyond the payload of a segment: header, signature, and room for later fields.
pub const OVERHEAD_BYTES: usize = 256;
/// Flag: the sender wants to be granted more bytes on this edge.
pub const WANTS_GRANT: u8 = 1;
/// Flag: the last frame of its edge.
pub const LAST: u8 = 2;

const CAUSE_FIXED_BYTES: usize = 5;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// First frame of an edge; the payload starts with a [`Signature`].
    Begin = 1,
    /// More bytes of an edge.
    Data = 2,
    /// `value` is what the sender may have sent in all on this edge, in bytes.
    Grant = 3,
    /// `value` eager bytes are given back.
    Window = 4,
    /// The group failed; the payload is a [`Cause`].
    Cause = 5,
    /// The peer leaves in good order.
    Goodbye = 6,
    /// First frame of a point-to-point message; carries the tag and a [`Signature`].
    P2pBegin = 7,
    /// More bytes of a point-to-point message.
    P2pData = 8,
    /// As [`Kind::Grant`], for a point-to-point message.
    P2pGrant = 9,
}

impl Kind {
    /// Every kind, in code order.
    pub const ALL: &'static [Kind] = &[
        Kind::Begin,
        Kind::Data,
        Kind::Grant,
        Kind::Window,
        Kind::Cause,
        Kind::Goodbye,
        Kind::P2pBegin,
        Kind::P2pData,
        Kind::P2pGrant,
    ];

    /// The kind with this code, or `None`.
    pub fn from_code(code: u8) -> Option<Kind> {
        Self::ALL.get(usize::from(code).wrapping_sub(1)).copied()
    }
}

/// What every frame starts with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the frame is.
    pub kind: Kind,
    /// [`WANTS_GRANT`], [`LAST`].
    pub flags: u8,
    /// Bytes that follow the header.
    pub payload_len: u32,
    /// The group, as agreed at its creation.
    pub group: u64,
    /// The call's number in the group.
    pub seq: u64,
    /// Ordinal of the message among all from sender to receiver in the call.
    pub edge: u32,
    /// Tag of a point-to-point message.
    pub tag: u32,
    /// Meaning depends on the kind.
    pub value: u64,
}

impl Header {
    /// A header of `kind` with everything else zero.
    pub fn new(kind: Kind) -> Header {
        Header { kind, flags: 0, payload_len: 0, group: 0, seq: 0, edge: 0, tag: 0, value: 0 }
    }

    /// Bytes of the whole frame.
    pub fn frame_bytes(&self) -> usize {
        HEADER_BYTES + self.payload_len as usize
    }

    /// Writes the header into the first [`HEADER_BYTES`] bytes of `frame`.
    ///
    /// # Panics
    /// Panics when `frame` is shorter than that.
    #[inline]
    pub fn emit(&self, frame: &mut [u8]) {
        let Some(out) = frame.first_chunk_mut::<HEADER_BYTES>() else {
            panic!("a frame has at least {HEADER_BYTES} bytes, this one {}", frame.len())
        };
        out[0] = self.kind as u8;
        out[1] = self.flags;
        out[2..4].fill(0);
        out[4..8].copy_from_slice(&self.payload_len.to_le_bytes());
        out[8..16].copy_from_slice(&self.group.to_le_bytes());
        out[16..24].copy_from_slice(&self.seq.to_le_bytes());
        out[24..28].copy_from_slice(&self.edge.to_le_bytes());
        out[28..32].copy_from_slice(&self.tag.to_le_bytes());
        out[32..40].copy_from_slice(&self.value.to_le_bytes());
    }

    /// Splits `frame` into its header and its payload of exactly `payload_len` bytes.
    ///
    /// # Errors
    /// `Protocol` for an unknown kind or a length that does not fit.
    #[inline]
    pub fn parse(frame: &[u8]) -> Result<(Header, &[u8])> {
        let Some((head, payload)) = frame.split_first_chunk::<HEADER_BYTES>() else {
            return Err(Error::protocol(format!("a frame of {} bytes is shorter than its header", frame.len())));
        };
        let Some(kind) = Kind::from_code(head[0]) else {
            return Err(Error::protocol(format!("a frame of unknown kind {}", head[0])));
        };
        let header = Header {
            kind,
            flags: head[1],
            payload_len: u32_at(head, 4),
            group: u64_at(head, 8),
            seq: u64_at(head, 16),
            edge: u32_at(head, 24),
            tag: u32_at(head, 28),
            value: u64_at(head, 32),
        };
        if header.payload_len as usize != payload.len() {
            return Err(Error::protocol(format!(
                "a {kind:?} frame announces {} bytes and has {}",
                header.payload_len,
                payload.len()
            )));
        }
        Ok((header, payload))
    }
}

/// What all ranks of a call must agree on; compared as a whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Signature {
    /// Code of the collective.
    pub collective: u8,
    /// Code of the dtype.
    pub dtype: u8,
    /// Code of the reduce operator.
    pub op: u8,
    /// Id of the algorithm's table row.
    pub algorithm: u8,
    /// The root, or 0.
    pub root: u32,
    /// Elements in all.
    pub count: u64,
    /// Hash of the block sizes.
    pub shape_hash: u64,
    /// Of a message of the engine's own: a word for its receiver. For codec and call-site hashes.
    pub reserved: u64,
}

impl Signature {
    /// The wire form.
    pub fn to_bytes(&self) -> [u8; SIGNATURE_BYTES] {
        let mut out = [0; SIGNATURE_BYTES];
        out[..4].copy_from_slice(&[self.collective, self.dtype, self.op, self.algorithm]);
        out[4..8].copy_from_slice(&self.root.to_le_bytes());
        out[8..16].copy_from_slice(&self.count.to_le_bytes());
        out[16..24].copy_from_slice(&self.shape_hash.to_le_bytes());
        out[24..32].copy_from_slice(&self.reserved.to_le_bytes());
        out
    }

    /// Writes the wire form into the first [`SIGNATURE_BYTES`] bytes of `payload`.
    ///
    /// # Panics
    /// Panics when `payload` is shorter than that.
    pub fn emit(&self, payload: &mut [u8]) {
        payload[..SIGNATURE_BYTES].copy_from_slice(&self.to_bytes());
    }

    /// Splits a payload into its signature and what follows.
    ///
    /// # Errors
    /// `Protocol` when the payload is too short.
    pub fn parse(payload: &[u8]) -> Result<(Signature, &[u8])> {
        let Some((head, rest)) = payload.split_first_chunk::<SIGNATURE_BYTES>() else {
            return Err(Error::protocol(format!("a payload of {} bytes has no room for a signature", payload.len())));
        };
        let signature = Signature {
            collective: head[0],
            dtype: head[1],
            op: head[2],
            algorithm: head[3],
            root: u32_at(head, 4),
            count: u64_at(head, 8),
            shape_hash: u64_at(head, 16),
            reserved: u64_at(head, 24),
        };
        Ok((signature, rest))
    }
}

/// Why a group failed, and where it began.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// Class of the error.
    pub kind: ErrorKind,
    /// The rank that saw it first.
    pub origin: Rank,
    /// The sentence.
    pub text: String,
}

impl Cause {
    /// The payload of a [`Kind::Cause`] frame, cut at a character boundary so that it has at most `max_bytes` bytes.
    pub fn to_bytes(&self, max_bytes: usize) -> Vec<u8> {
        let room = max_bytes.saturating_sub(CAUSE_FIXED_BYTES).min(self.text.len());
        let cut = (0..=room).rev().find(|&i| self.text.is_char_boundary(i)).unwrap_or(0);
        let mut out = Vec::with_capacity(CAUSE_FIXED_BYTES + cut);
        out.push(self.kind as u8);
        out.extend_from_slice(&self.origin.0.to_le_bytes());
        out.extend_from_slice(&self.text.as_bytes()[..cut]);
        out
    }

    /// Reads the payload of a [`Kind::Cause`] frame. Bytes that are no UTF-8 are replaced: a garbled reason is better
    /// than none.
    ///
    /// # Errors
    /// `Protocol` when the payload is too short or the class is unknown.
    pub fn parse(payload: &[u8]) -> Result<Cause> {
        let Some((head, text)) = payload.split_first_chunk::<CAUSE_FIXED_BYTES>() else {
            return Err(Error::protocol(format!("a cause of {} bytes is too short", payload.len())));
        };
        let Some(kind) = ErrorKind::from_code(head[0]) else {
            return Err(Error::protocol(format!("a cause of unknown class {}", head[0])));
        };
        Ok(Cause { kind, origin: Rank(u32_at(head, 1)), text: String::from_utf8_lossy(text).into_owned() })
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header() -> impl Strategy<Value = Header> {
        (
            (0..Kind::ALL.len(), any::<u8>(), 0u32..100),
            (any::<u64>(), any::<u64>(), any::<u32>(), any::<u32>(), any::<u64>()),
        )
            .prop_map(|((kind, flags, payload_len), (group, seq, edge, tag, value))| Header {
                kind: Kind::ALL[kind],
                flags,
                payload_len,
                group,
                seq,
                edge,
                tag,
                value,
            })
    }

    proptest! {
        #[test]
        fn a_header_comes_back_as_it_went(header in header()) {
            let mut frame = vec![7; header.frame_bytes()];
            header.emit(&mut frame);
            let (parsed, payload) = Header::parse(&frame).unwrap();
            prop_assert_eq!(parsed, header);
            prop_assert_eq!(payload.len(), header.payload_len as usize);
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = Header::parse(&bytes);
            let _ = Signature::parse(&bytes);
            let _ = Cause::parse(&bytes);
        }

        #[test]
        fn a_signature_comes_back_as_it_went(a: u8, b: u8, c: u8, d: u8, root: u32, count: u64, shape_hash: u64) {
            let signature =
                Signature { collective: a, dtype: b, op: c, algorithm: d, root, count, shape_hash, reserved: !count };
            let bytes = signature.to_bytes();
            prop_assert_eq!(Signature::parse(&bytes).unwrap(), (signature, &[][..]));
        }

        #[test]
        fn a_cause_comes_back_cut_to_what_fits(text: String, max in 0usize..64) {
            let cause = Cause { kind: ErrorKind::PeerLost, origin: Rank(3), text };
            prop_assert_eq!(Cause::parse(&cause.to_bytes(usize::MAX)).unwrap(), cause.clone());
            let cut = cause.to_bytes(max.max(CAUSE_FIXED_BYTES));
            prop_assert!(cut.len() <= max.max(CAUSE_FIXED_BYTES));
            prop_assert!(cause.text.starts_with(&Cause::parse(&cut).unwrap().text));
        }
    }

    #[test]
    fn every_code_leads_back_to_its_kind() {
        for code in 0..=255u8 {
            let expected = (1..=9).contains(&code);
            assert_eq!(Kind::from_code(code).map(|kind| kind as u8), expected.then_some(code));
        }
    }

    #[test]
    fn a_length_that_does_not_fit_is_refused() {
        let mut frame = [0; HEADER_BYTES + 3];
        Header { payload_len: 4, ..Header::new(Kind::Data) }.emit(&mut frame);
        assert_eq!(Header::parse(&frame).unwrap_err().kind, ErrorKind::Protocol);
    }
}
