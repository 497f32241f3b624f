//! The closed instruction set: what an algorithm may say.
//!
//! Owns the vocabulary of schedules over symbolic chunks. It knows no byte counts ([`crate::Layout`]), no dependencies
//! and no message numbers ([`crate::Program`]). Read [`Action`] first, then [`Schedule`].

use accl_types::{Collective, Rank};
use smallvec::SmallVec;

use crate::Topology;

/// A buffer of the call, as one rank sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Buf {
    /// What the caller gave. Never written, unless it is the same memory as `Out`.
    In,
    /// What the caller gets. Undefined before the first write, except on the root of a broadcast.
    Out,
    /// Temporary memory of the call, undefined at its start.
    Scratch,
    /// Encoded chunks of an encoded program, each written once. No algorithm names it: see [`crate::Program::encoded`].
    Code,
}

impl Buf {
    /// How many there are, for tables by buffer.
    pub(crate) const COUNT: usize = 4;
}

/// What an encoded chunk is to the call: settings may give each role a codec of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// A part of the sum, between ranks of one host, in an algorithm that composes over hosts.
    IntraNode,
    /// A part of the sum on its way to who finishes it.
    Reduce,
    /// What ranks end with.
    Result,
}

/// An encoded chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Code {
    /// It has the elements of this chunk of `In` or `Out`.
    pub like: (Buf, u32),
    /// What it is to the call.
    pub role: Role,
}

/// `len` consecutive chunks of one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChunkRange {
    /// The buffer.
    pub buf: Buf,
    /// Index of the first chunk.
    pub first: u32,
    /// Number of chunks.
    pub len: u32,
}

/// The payload of one message or operand: ranges of chunks, concatenated in order. Ranges are never empty, and two that
/// follow each other in one buffer are kept as one, so that equal payloads compare equal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Span(SmallVec<[ChunkRange; 2]>);

impl Span {
    /// No chunks: the payload of a message that only says "I am here".
    pub fn empty() -> Span {
        Span::default()
    }

    /// One chunk.
    pub fn chunk(buf: Buf, chunk: u32) -> Span {
        Span::range(buf, chunk, 1)
    }

    /// `len` chunks from `first` on.
    pub fn range(buf: Buf, first: u32, len: u32) -> Span {
        let mut span = Span::empty();
        span.push(buf, first, len);
        span
    }

    /// Chunks `start`, `start + 1`, ... of a buffer with `modulus` chunks, wrapping to 0: at most two ranges.
    pub fn cyclic(buf: Buf, start: u32, len: u32, modulus: u32) -> Span {
        let head = len.min(modulus - start);
        let mut span = Span::range(buf, start, head);
        span.push(buf, 0, len - head);
        span
    }

    /// Appends `len` chunks from `first` on.
    pub fn push(&mut self, buf: Buf, first: u32, len: u32) {
        if len == 0 {
            return;
        }
        match self.0.last_mut() {
            Some(last) if last.buf == buf && last.first + last.len == first => last.len += len,
            Some(_) | None => self.0.push(ChunkRange { buf, first, len }),
        }
    }

    /// The ranges in payload order.
    pub fn ranges(&self) -> &[ChunkRange] {
        &self.0
    }

    /// The chunks in payload order.
    pub fn chunks(&self) -> impl Iterator<Item = (Buf, u32)> + '_ {
        self.0.iter().flat_map(|range| (range.first..range.first + range.len).map(|chunk| (range.buf, chunk)))
    }

    /// Number of chunks.
    pub fn chunk_count(&self) -> u32 {
        self.0.iter().map(|range| range.len).sum()
    }

    /// Whether there are no chunks. (A span with chunks may still have no bytes in a given call.)
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromIterator<(Buf, u32)> for Span {
    fn from_iter<I: IntoIterator<Item = (Buf, u32)>>(chunks: I) -> Span {
        let mut span = Span::empty();
        chunks.into_iter().for_each(|(buf, chunk)| span.push(buf, chunk, 1));
        span
    }
}

/// Which operand of a receive-and-reduce comes first. The rule of the house: the one that holds the lowest rank's
/// contribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// `dst = incoming op local`
    IncomingFirst,
    /// `dst = local op incoming`
    LocalFirst,
}

/// Whether a reduction is the last one of its chunks: AVG divides there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Finish {
    /// More contributions follow.
    No,
    /// All contributions are in.
    Yes,
}

/// One instruction of one rank. An algorithm emits them as if they ran one after the other; what may overlap is found by
/// [`Schedule::lower`]. The spans of one action have the same chunk sizes in the same order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send `src` to a peer.
    Send {
        /// The payload.
        src: Span,
        /// The peer.
        to: Rank,
    },
    /// Receive into place.
    Recv {
        /// Where the payload goes.
        dst: Span,
        /// The peer.
        from: Rank,
    },
    /// Receive and reduce: `dst = incoming op local` or the other way round; `dst` may be `local`.
    RecvReduce {
        /// The result.
        dst: Span,
        /// This rank's operand.
        local: Span,
        /// The peer.
        from: Rank,
        /// Which operand comes first.
        order: Order,
        /// Whether this is the last reduction of these chunks.
        finish: Finish,
    },
    /// Receive, keep, and pass on to others.
    RecvCopySend {
        /// Where the payload is kept.
        dst: Span,
        /// The peer it comes from.
        from: Rank,
        /// The peers it goes to.
        to: SmallVec<[Rank; 1]>,
    },
    /// Receive, reduce, and pass the result on.
    RecvReduceSend {
        /// The result.
        dst: Span,
        /// This rank's operand.
        local: Span,
        /// The peer it comes from.
        from: Rank,
        /// The peer the result goes to.
        to: Rank,
        /// Which operand comes first.
        order: Order,
        /// Whether this is the last reduction of these chunks.
        finish: Finish,
    },
    /// Copy within this rank. Skipped by the engine where both sides are the same memory.
    Copy {
        /// The result.
        dst: Span,
        /// The source.
        src: Span,
    },
    /// Reduce several operands of this rank in the order given.
    Reduce {
        /// The result; may be one of the operands.
        dst: Span,
        /// The operands, at least two.
        srcs: Vec<Span>,
        /// Whether this is the last reduction of these chunks.
        finish: Finish,
    },
    /// What follows begins after everything since the last fence is complete on this rank. For messages without payload,
    /// whose order no chunk shows, and where fewer messages in flight are wanted. Lowered to dependencies.
    Fence,
}

/// How a buffer is cut into chunks. Chunk boundaries lie on elements; chunks follow each other without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Division {
    /// Chunk 0 is everything.
    Whole,
    /// All elements of the buffer split evenly; the first chunks are one element larger where it does not divide.
    Even {
        /// Number of chunks.
        chunks: u32,
    },
    /// Chunk i is block i of the call.
    Blocks,
    /// Chunk `i * pieces + j` is the j-th even piece of block i.
    SplitBlocks {
        /// Pieces per block.
        pieces: u32,
    },
}

/// What one rank does in one collective: the result of an algorithm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// The instructions in program order.
    pub actions: Vec<Action>,
    /// How `In` is cut.
    pub in_division: Division,
    /// How `Out` is cut.
    pub out_division: Division,
    /// Scratch chunk k has the size of this chunk of `In` or `Out`.
    pub scratch: Vec<(Buf, u32)>,
}

impl Division {
    /// Chunks per block where a buffer of one block is cut this way.
    pub fn pieces(self) -> u32 {
        match self {
            Division::Whole | Division::Blocks => 1,
            Division::Even { chunks } => chunks,
            Division::SplitBlocks { pieces } => pieces,
        }
    }

    /// Number of chunks of a buffer of so many blocks.
    pub fn chunks(self, blocks: u32) -> u32 {
        match self {
            Division::Whole => u32::from(blocks > 0),
            Division::Even { chunks } => chunks * u32::from(blocks > 0),
            Division::Blocks => blocks,
            Division::SplitBlocks { pieces } => blocks * pieces,
        }
    }
}

/// Building: one method an action, so that an algorithm reads as what it does.
impl Schedule {
    /// No actions yet.
    pub fn new(in_division: Division, out_division: Division) -> Schedule {
        Schedule { actions: Vec::new(), in_division, out_division, scratch: Vec::new() }
    }

    /// Adds a scratch chunk of the size of this chunk and returns its index.
    pub fn scratch_like(&mut self, buf: Buf, chunk: u32) -> u32 {
        self.scratch.push((buf, chunk));
        self.scratch.len() as u32 - 1
    }

    /// [`Action::Send`]
    pub fn send(&mut self, to: Rank, src: Span) {
        self.actions.push(Action::Send { src, to });
    }

    /// [`Action::Recv`]
    pub fn recv(&mut self, from: Rank, dst: Span) {
        self.actions.push(Action::Recv { dst, from });
    }

    /// [`Action::RecvReduce`]
    pub fn recv_reduce(&mut self, from: Rank, dst: Span, local: Span, order: Order, finish: Finish) {
        self.actions.push(Action::RecvReduce { dst, local, from, order, finish });
    }

    /// [`Action::RecvReduceSend`]
    pub fn recv_reduce_send(&mut self, from: Rank, to: Rank, dst: Span, local: Span, order: Order, finish: Finish) {
        self.actions.push(Action::RecvReduceSend { dst, local, from, to, order, finish });
    }

    /// [`Action::RecvCopySend`]; a plain [`Action::Recv`] when there is nobody to pass it on to.
    pub fn recv_copy_send(&mut self, from: Rank, to: impl IntoIterator<Item = Rank>, dst: Span) {
        let to: SmallVec<[Rank; 1]> = to.into_iter().collect();
        self.actions.push(if to.is_empty() {
            Action::Recv { dst, from }
        } else {
            Action::RecvCopySend { dst, from, to }
        });
    }

    /// [`Action::Copy`]
    pub fn copy(&mut self, dst: Span, src: Span) {
        self.actions.push(Action::Copy { dst, src });
    }

    /// [`Action::Reduce`]
    pub fn reduce(&mut self, dst: Span, srcs: Vec<Span>, finish: Finish) {
        self.actions.push(Action::Reduce { dst, srcs, finish });
    }

    /// [`Action::Fence`]
    pub fn fence(&mut self) {
        self.actions.push(Action::Fence);
    }
}

/// What an algorithm is asked to build: one rank's part in one collective.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The collective.
    pub collective: Collective,
    /// Ranks in the group.
    pub world: u32,
    /// The rank that asks.
    pub rank: Rank,
    /// The root of a rooted collective; rank 0 otherwise.
    pub root: Rank,
    /// Who shares a host.
    pub topology: &'a Topology,
}
