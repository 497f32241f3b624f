//! The frames that travel on links: a header in the head, and a payload; little endian.
//!
//! A pure codec: owns the layout of headers, call signatures and error causes; knows no links and no meaning of the
//! numbers beyond their place. Links carry frames as opaque bytes. Read [`Header`] first.

use accl_types::{Error, ErrorKind, Rank, Result};

use crate::link::HEAD_BYTES;

/// Bytes of an encoded [`Signature`].
pub const SIGNATURE_BYTES: usize = 32;
/// What a link must carry in a payload beyond a segment: signature, and room for later fields.
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
    /// As [`Kind::Begin`], of a message that is whole in this frame: the signature is in the header and not in the
    /// payload, so that a tiny message takes as little as a link can move.
    Whole = 10,
    /// A greeting, first on a new link: the groups in which the sender has the receiver, as [`Groups`], the last with [`LAST`]. It
    /// is answered for those that the receiver has left, by a [`Kind::Goodbye`], or that have failed, by a [`Kind::Cause`].
    Groups = 11,
    /// A question, in a note and never on a link: what has become of the process whose identity is the payload.
    Fate = 12,
    /// Packets between the devices of two ranks of a group. `value` is how many bytes of packets the sender has taken of the receiver, in all;
    /// the payload may be empty.
    Packets = 13,
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
        Kind::Whole,
        Kind::Groups,
        Kind::Fate,
        Kind::Packets,
    ];

    /// Whether a frame of this kind carries bytes of a call, or begins one that has none.
    pub fn carries_data(self) -> bool {
        match self {
            Kind::Begin | Kind::Data | Kind::P2pBegin | Kind::P2pData | Kind::Whole => true,
            Kind::Grant
            | Kind::Window
            | Kind::Cause
            | Kind::Goodbye
            | Kind::P2pGrant
            | Kind::Groups
            | Kind::Fate
            | Kind::Packets => false,
        }
    }

    /// The kind with this code, or `None`.
    pub fn from_code(code: u8) -> Option<Kind> {
        Self::ALL.get(usize::from(code).wrapping_sub(1)).copied()
    }
}

/// The payload of a [`Kind::Groups`]: numbers of groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups<'a>(&'a [u8]);

impl<'a> Groups<'a> {
    /// The payloads that name all these groups, each of at most so many bytes; one that names none if there are none.
    pub fn payloads(groups: &[u64], most_bytes: usize) -> impl Iterator<Item = Vec<u8>> {
        let many = (most_bytes / size_of::<u64>()).max(1);
        let chunks = groups.chunks(many).chain(groups.is_empty().then_some(groups));
        chunks.map(|chunk| chunk.iter().flat_map(|group| group.to_le_bytes()).collect())
    }

    /// Takes a payload apart.
    ///
    /// # Errors
    /// `Protocol` when it is not whole.
    pub fn parse(payload: &'a [u8]) -> Result<Self> {
        if !payload.len().is_multiple_of(size_of::<u64>()) {
            return Err(Error::protocol(format!("{} bytes cannot be numbers of groups", payload.len())));
        }
        Ok(Self(payload))
    }

    /// The groups, in the order in which they were named.
    pub fn iter(self) -> impl Iterator<Item = u64> + use<'a> {
        let (numbers, _) = self.0.as_chunks::<8>();
        numbers.iter().map(|bytes| u64::from_le_bytes(*bytes))
    }
}

/// What every frame's head holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the frame is.
    pub kind: Kind,
    /// [`WANTS_GRANT`], [`LAST`].
    pub flags: u8,
    /// Of a [`Kind::Whole`]: the root.
    pub root: u32,
    /// The group, as agreed at its creation.
    pub group: u64,
    /// The call's number in the group.
    pub seq: u64,
    /// Ordinal of the message among all from sender to receiver in the call.
    pub edge: u32,
    /// Tag of a point-to-point message. Of a [`Kind::Whole`]: the codes of its signature.
    pub tag: u32,
    /// Meaning depends on the kind.
    pub value: u64,
}

impl Header {
    /// A header of `kind` with everything else zero.
    pub fn new(kind: Kind) -> Header {
        Header { kind, flags: 0, root: 0, group: 0, seq: 0, edge: 0, tag: 0, value: 0 }
    }

    /// The header of a [`Kind::Whole`] with this signature; group, call and edge are left to the caller. `None`: the
    /// signature needs a [`Kind::Begin`].
    pub fn whole(signature: &Signature) -> Option<Header> {
        let Signature { collective, dtype, op, algorithm, root, count, shape_hash, reserved } = *signature;
        let count = u32::try_from(count).ok().filter(|_| reserved == 0)?;
        let mut header = Header::new(Kind::Whole);
        header.root = root;
        header.tag = u32::from_le_bytes([collective, dtype, op, algorithm]);
        header.value = u64::from(shape_hash) << 32 | u64::from(count);
        Some(header)
    }

    /// The signature in the header of a [`Kind::Whole`].
    pub fn whole_signature(&self) -> Signature {
        let [collective, dtype, op, algorithm] = self.tag.to_le_bytes();
        let (count, shape_hash) = (u64::from(self.value as u32), (self.value >> 32) as u32);
        Signature { collective, dtype, op, algorithm, root: self.root, count, shape_hash, reserved: 0 }
    }

    /// Writes the header.
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

    /// As [`Header::emit`], into bytes of its own.
    #[inline]
    pub fn to_bytes(&self) -> [u8; HEAD_BYTES] {
        let mut head = [0; HEAD_BYTES];
        self.emit(&mut head);
        head
    }

    /// Reads a header.
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

/// The head of a frame that differs from `head` by its edge only.
#[inline]
pub fn with_edge(head: &[u8; HEAD_BYTES], edge: u32) -> [u8; HEAD_BYTES] {
    let mut head = *head;
    head[24..28].copy_from_slice(&edge.to_le_bytes());
    head
}

/// Whether two heads are the same. The operator would call the C library, which for so few bytes takes longer.
#[inline]
pub fn is_same_head(a: &[u8; HEAD_BYTES], b: &[u8; HEAD_BYTES]) -> bool {
    let word = |head: &[u8; HEAD_BYTES], i| u64_at(head, 8 * i) & if CHECKS_SIGNATURES { u64::MAX } else { PLACE[i] };
    let words = |head: &[u8; HEAD_BYTES]| std::array::from_fn::<u64, { HEAD_BYTES / 8 }, _>(|i| word(head, i));
    words(a).iter().zip(words(b)).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

/// Masks the words of a head to kind, group, call and edge: to what a frame is matched by.
const PLACE: [u64; HEAD_BYTES / 8] = [0xff, u64::MAX, u64::MAX, 0xffff_ffff, 0];

/// Whether ranks compare the signatures of their collectives. Always, but in the build by which `make bench-peers` tells
/// what that costs: there ranks that disagree are not told so, and get wrong numbers.
pub const CHECKS_SIGNATURES: bool = !cfg!(accl_without_signatures);

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
    pub shape_hash: u32,
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
        out[16..24].copy_from_slice(&u64::from(self.shape_hash).to_le_bytes());
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
            shape_hash: u32_at(head, 16),
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
        let header = Header { group: 7, seq: 9, tag: 3, value: 11, ..Header::new(Kind::Whole) };
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
