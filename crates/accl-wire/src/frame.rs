//! The frames that links carry. Each has a head, which encodes a [`Header`], and a payload. All numbers are little
//! endian.
//!
//! This module is a pure codec: it owns the layout of headers, call signatures and error causes. It knows no links, and
//! no meaning of the numbers beyond their position. Links carry frames as opaque bytes. Read [`Header`] first.

use accl_types::{Error, ErrorKind, Rank, Result};

use crate::link::HEAD_BYTES;

/// Bytes of an encoded [`Signature`].
pub const SIGNATURE_BYTES: usize = 32;
/// Bytes that a link must carry in a payload in addition to a segment: the signature, and room for later fields.
pub const OVERHEAD_BYTES: usize = 256;
/// Flag: the sender asks the receiver to grant more bytes on this edge.
pub const WANTS_GRANT: u8 = 1;
/// Flag: this is the last [`Kind::Hello`] frame of a hello.
pub const LAST: u8 = 2;

const CAUSE_FIXED_BYTES: usize = 5;

/// Kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// First frame of an edge (a message of a collective). The payload starts with a [`Signature`].
    Begin = 1,
    /// More bytes of an edge.
    Data = 2,
    /// Clear to send: `value` is the total number of bytes that the sender may have sent on this edge.
    Grant = 3,
    /// The receiver returns `value` bytes of eager window to the sender.
    Window = 4,
    /// The group failed; the payload is a [`Cause`].
    Cause = 5,
    /// Disconnect message: the peer leaves the group or, with group 0, its process exits cleanly. A rank also sends it
    /// when it leaves a failed group.
    Disconnect = 6,
    /// First frame of a point-to-point message; carries the tag and a [`Signature`].
    P2pBegin = 7,
    /// More bytes of a point-to-point message.
    P2pData = 8,
    /// Clear to send, like [`Kind::Grant`], for a point-to-point message.
    P2pGrant = 9,
    /// A whole message in one frame, in place of [`Kind::Begin`]. The signature is in the header and not in the
    /// payload, so a tiny message occupies the smallest unit that a link can move.
    BeginWhole = 10,
    /// Hello message, sent first on a new link. The payload is a [`Groups`] with the groups that contain both
    /// processes; the last such frame has [`LAST`]. The receiver replies for each group that it has left, with a
    /// [`Kind::Disconnect`], and for each that has failed, with a [`Kind::Cause`].
    Hello = 11,
    /// Question what happened to the process whose identity is the payload. It is sent in a note (out of band), never
    /// on a link.
    PeerFate = 12,
    /// Packets between the devices of two ranks of a group. `value` is the total number of packet bytes that the sender
    /// of this frame has taken from its receiver. The payload may be empty.
    Packets = 13,
}

impl Kind {
    /// All kinds, in the order of their codes.
    pub const ALL: &'static [Kind] = &[
        Kind::Begin,
        Kind::Data,
        Kind::Grant,
        Kind::Window,
        Kind::Cause,
        Kind::Disconnect,
        Kind::P2pBegin,
        Kind::P2pData,
        Kind::P2pGrant,
        Kind::BeginWhole,
        Kind::Hello,
        Kind::PeerFate,
        Kind::Packets,
    ];

    /// Returns whether a frame of this kind carries bytes of a call, or begins a call without bytes.
    pub fn carries_data(self) -> bool {
        match self {
            Kind::Begin | Kind::Data | Kind::P2pBegin | Kind::P2pData | Kind::BeginWhole => true,
            Kind::Grant
            | Kind::Window
            | Kind::Cause
            | Kind::Disconnect
            | Kind::P2pGrant
            | Kind::Hello
            | Kind::PeerFate
            | Kind::Packets => false,
        }
    }

    /// Returns the kind with this code, or `None` if the code is unknown.
    pub fn from_code(code: u8) -> Option<Kind> {
        Self::ALL.get(usize::from(code).wrapping_sub(1)).copied()
    }
}

/// Payload of a [`Kind::Hello`]: the numbers of groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups<'a>(&'a [u8]);

impl<'a> Groups<'a> {
    /// Returns the payloads that together name all `groups`, each of at most `most_bytes` bytes. If `groups` is empty,
    /// returns one payload that names none.
    pub fn payloads(groups: &[u64], most_bytes: usize) -> impl Iterator<Item = Vec<u8>> {
        let many = (most_bytes / size_of::<u64>()).max(1);
        let chunks = groups.chunks(many).chain(groups.is_empty().then_some(groups));
        chunks.map(|chunk| chunk.iter().flat_map(|group| group.to_le_bytes()).collect())
    }

    /// Parses a payload.
    ///
    /// # Errors
    /// `Protocol` if the length is not a multiple of the size of a group number.
    pub fn parse(payload: &'a [u8]) -> Result<Self> {
        if !payload.len().is_multiple_of(size_of::<u64>()) {
            return Err(Error::protocol(format!(
                "a payload of {} bytes is not a list of group numbers",
                payload.len()
            )));
        }
        Ok(Self(payload))
    }

    /// Returns the groups in the order in which they were named.
    pub fn iter(self) -> impl Iterator<Item = u64> + use<'a> {
        let (numbers, _) = self.0.as_chunks::<8>();
        numbers.iter().map(|bytes| u64::from_le_bytes(*bytes))
    }
}

/// Header of a frame, encoded in its head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Kind of the frame.
    pub kind: Kind,
    /// Bit set of [`WANTS_GRANT`] and [`LAST`].
    pub flags: u8,
    /// Root of the collective, in a [`Kind::BeginWhole`].
    pub root: u32,
    /// Number of the group, agreed at its creation.
    pub group: u64,
    /// Sequence number of the call in the group.
    pub seq: u64,
    /// Number of this message among all messages from the sender to the receiver in the call.
    pub edge: u32,
    /// Tag of a point-to-point message. In a [`Kind::BeginWhole`], the four codes of its signature.
    pub tag: u32,
    /// Value whose meaning depends on `kind`.
    pub value: u64,
}

impl Header {
    /// Returns a header of `kind` with all other fields zero.
    pub fn new(kind: Kind) -> Header {
        Header { kind, flags: 0, root: 0, group: 0, seq: 0, edge: 0, tag: 0, value: 0 }
    }

    /// Returns the header of a [`Kind::BeginWhole`] with this signature; the caller sets group, call and edge. Returns
    /// `None` if the signature does not fit and needs a [`Kind::Begin`].
    pub fn whole(signature: &Signature) -> Option<Header> {
        let Signature { collective, dtype, op, algorithm, root, count, shape_hash, reserved } = *signature;
        let count = u32::try_from(count).ok().filter(|_| reserved == 0)?;
        let mut header = Header::new(Kind::BeginWhole);
        header.root = root;
        header.tag = u32::from_le_bytes([collective, dtype, op, algorithm]);
        header.value = u64::from(shape_hash) << 32 | u64::from(count);
        Some(header)
    }

    /// Returns the signature in the header of a [`Kind::BeginWhole`].
    pub fn whole_signature(&self) -> Signature {
        let [collective, dtype, op, algorithm] = self.tag.to_le_bytes();
        let (count, shape_hash) = (u64::from(self.value as u32), (self.value >> 32) as u32);
        Signature { collective, dtype, op, algorithm, root: self.root, count, shape_hash, reserved: 0 }
    }

    /// Writes the header into `head`.
    #[inline]
    pub fn emit(&self, head: &mut [u8; HEAD_BYTES]) {
        head[0] = self.kind as u8;
        head[1] = self.flags;
        head[2..4].fill(0);
        head[4..8].copy_from_slice(&self.root.to_le_bytes());
        head[8..16].copy_from_slice(&self.group.to_le_bytes());
        head[16..24].copy_from_slice(&self.seq.to_le_bytes());
        head[24..28].copy_from_slice(&self.edge.to_le_bytes());
        head[28..32].copy_from_slice(&self.tag.to_le_bytes());
        head[32..40].copy_from_slice(&self.value.to_le_bytes());
    }

    /// Returns the encoded header.
    #[inline]
    pub fn to_bytes(&self) -> [u8; HEAD_BYTES] {
        let mut head = [0; HEAD_BYTES];
        self.emit(&mut head);
        head
    }

    /// Parses a header.
    ///
    /// # Errors
    /// `Protocol` for an unknown kind.
    #[inline]
    pub fn parse(head: &[u8; HEAD_BYTES]) -> Result<Header> {
        let Some(kind) = Kind::from_code(head[0]) else {
            return Err(Error::protocol(format!("a frame of unknown kind {}", head[0])));
        };
        Ok(Header {
            kind,
            flags: head[1],
            root: u32_at(head, 4),
            group: u64_at(head, 8),
            seq: u64_at(head, 16),
            edge: u32_at(head, 24),
            tag: u32_at(head, 28),
            value: u64_at(head, 32),
        })
    }
}

/// Returns a copy of `head` with another edge.
#[inline]
pub fn with_edge(head: &[u8; HEAD_BYTES], edge: u32) -> [u8; HEAD_BYTES] {
    let mut head = *head;
    head[24..28].copy_from_slice(&edge.to_le_bytes());
    head
}

/// Returns whether two heads are equal. If signatures are not checked, only the parts in `PLACE` count. The `==`
/// operator would call the C library, which takes longer for so few bytes.
#[inline]
pub fn is_same_head(a: &[u8; HEAD_BYTES], b: &[u8; HEAD_BYTES]) -> bool {
    let word = |head: &[u8; HEAD_BYTES], i| u64_at(head, 8 * i) & if CHECKS_SIGNATURES { u64::MAX } else { PLACE[i] };
    let words = |head: &[u8; HEAD_BYTES]| std::array::from_fn::<u64, { HEAD_BYTES / 8 }, _>(|i| word(head, i));
    words(a).iter().zip(words(b)).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

/// Masks that reduce the words of a head to kind, group, call and edge, by which a frame is matched to its receive.
const PLACE: [u64; HEAD_BYTES / 8] = [0xff, u64::MAX, u64::MAX, 0xffff_ffff, 0];

/// Whether ranks compare the signatures of their collectives. This is off only in the build with which `make
/// bench-peers` measures the cost of the comparison. In that build, ranks that disagree get wrong numbers without an
/// error.
pub const CHECKS_SIGNATURES: bool = !cfg!(accl_without_signatures);

/// Fingerprint of a call, on which all its ranks must agree. Signatures are compared as a whole.
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
    /// Root rank, or 0 if the collective has none.
    pub root: u32,
    /// Total number of elements.
    pub count: u64,
    /// Hash of the block sizes.
    pub shape_hash: u32,
    /// Hash of the codecs in an encoded collective. In an internal message of the engine, a word for the receiver.
    /// Otherwise 0.
    pub reserved: u64,
}

impl Signature {
    /// Returns the wire form.
    pub fn to_bytes(&self) -> [u8; SIGNATURE_BYTES] {
        let mut out = [0; SIGNATURE_BYTES];
        out[..4].copy_from_slice(&[self.collective, self.dtype, self.op, self.algorithm]);
        out[4..8].copy_from_slice(&self.root.to_le_bytes());
        out[8..16].copy_from_slice(&self.count.to_le_bytes());
        out[16..24].copy_from_slice(&u64::from(self.shape_hash).to_le_bytes());
        out[24..32].copy_from_slice(&self.reserved.to_le_bytes());
        out
    }

    /// Writes the wire form into the first [`SIGNATURE_BYTES`] bytes of `payload`.
    ///
    /// # Panics
    /// Panics if `payload` is shorter than [`SIGNATURE_BYTES`].
    pub fn emit(&self, payload: &mut [u8]) {
        payload[..SIGNATURE_BYTES].copy_from_slice(&self.to_bytes());
    }

    /// Splits a payload into its signature and the remaining bytes.
    ///
    /// # Errors
    /// `Protocol` if the payload is too short.
    pub fn parse(payload: &[u8]) -> Result<(Signature, &[u8])> {
        let Some((head, rest)) = payload.split_first_chunk::<SIGNATURE_BYTES>() else {
            return Err(Error::protocol(format!("a payload of {} bytes is too short for a signature", payload.len())));
        };
        let signature = Signature {
            collective: head[0],
            dtype: head[1],
            op: head[2],
            algorithm: head[3],
            root: u32_at(head, 4),
            count: u64_at(head, 8),
            shape_hash: u32_at(head, 16),
            reserved: u64_at(head, 24),
        };
        Ok((signature, rest))
    }
}

/// Cause of a group's failure and the rank where it began.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// Class of the error.
    pub kind: ErrorKind,
    /// Rank that detected the error first.
    pub origin: Rank,
    /// Error message.
    pub text: String,
}

impl Cause {
    /// Returns the payload of a [`Kind::Cause`] frame. The text is cut at a character boundary so that the payload has
    /// at most `max_bytes` bytes.
    pub fn to_bytes(&self, max_bytes: usize) -> Vec<u8> {
        let room = max_bytes.saturating_sub(CAUSE_FIXED_BYTES).min(self.text.len());
        let cut = (0..=room).rev().find(|&i| self.text.is_char_boundary(i)).unwrap_or(0);
        let mut out = Vec::with_capacity(CAUSE_FIXED_BYTES + cut);
        out.push(self.kind as u8);
        out.extend_from_slice(&self.origin.0.to_le_bytes());
        out.extend_from_slice(&self.text.as_bytes()[..cut]);
        out
    }

    /// Parses the payload of a [`Kind::Cause`] frame. Bytes that are not UTF-8 are replaced, because a garbled reason
    /// is better than none.
    ///
    /// # Errors
    /// `Protocol` if the payload is too short or the error class is unknown.
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

#[inline(always)]
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[inline(always)]
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header() -> impl Strategy<Value = Header> {
        (
            (0..Kind::ALL.len(), any::<u8>(), any::<u32>()),
            (any::<u64>(), any::<u64>(), any::<u32>(), any::<u32>(), any::<u64>()),
        )
            .prop_map(|((kind, flags, root), (group, seq, edge, tag, value))| Header {
                kind: Kind::ALL[kind],
                flags,
                root,
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
            prop_assert_eq!(Header::parse(&header.to_bytes()).unwrap(), header);
        }

        #[test]
        fn a_header_holds_all_of_a_signature_or_refuses_it(
            codes: [u8; 4], root: u32, count: u64, shift in 0u32..64, shape_hash: u32, reserved in 0u64..2,
        ) {
            let [collective, dtype, op, algorithm] = codes;
            let count = count >> shift;
            let signature = Signature { collective, dtype, op, algorithm, root, count, shape_hash, reserved };
            match Header::whole(&signature) {
                Some(header) => prop_assert_eq!(header.whole_signature(), signature),
                None => prop_assert!(count > u64::from(u32::MAX) || reserved != 0),
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = bytes.first_chunk().map(Header::parse);
            let _ = Signature::parse(&bytes);
            let _ = Cause::parse(&bytes);
        }

        #[test]
        fn a_signature_comes_back_as_it_went(a: u8, b: u8, c: u8, d: u8, root: u32, count: u64, shape_hash: u32) {
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
            let expected = (1..=13).contains(&code);
            assert_eq!(Kind::from_code(code).map(|kind| kind as u8), expected.then_some(code));
        }
    }

    #[test]
    fn heads_that_differ_in_one_byte_are_not_the_same() {
        let header = Header { group: 7, seq: 9, tag: 3, value: 11, ..Header::new(Kind::BeginWhole) };
        let head = header.to_bytes();
        assert!(is_same_head(&head, &head));
        for at in 0..HEAD_BYTES {
            let mut other = head;
            other[at] ^= 0x80;
            assert!(!is_same_head(&head, &other), "byte {at}");
        }
        assert_eq!(with_edge(&head, 0x0102_0304), Header { edge: 0x0102_0304, ..header }.to_bytes());
    }
}
