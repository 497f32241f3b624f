//! The closed instruction set of algorithms.
//!
//! Owns the vocabulary of schedules over symbolic chunks. It knows no byte counts ([`crate::Layout`]), no dependencies
//! and no message numbers ([`crate::Program`]). Read [`Action`] first, then [`Schedule`].

use accl_types::{Collective, Rank};
use smallvec::SmallVec;

use crate::Topology;

/// A buffer of the call, as one rank sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Buf {
    /// The caller's input. Never written, unless it is the same memory as `Out`.
    In,
    /// The caller's output. Undefined before the first write, except on the root of a broadcast.
    Out,
    /// Temporary memory of the call, undefined at its start.
    Scratch,
    /// Encoded chunks of an encoded program, or published chunks of a program by reference, each written once. Algorithms
    /// do not use it: see [`crate::Program::encoded`] and [`crate::Program::by_reference`].
    Code,
}

impl Buf {
    /// Number of buffers, for tables by buffer.
    pub(crate) const COUNT: usize = 4;
}

/// The role of an encoded chunk in the call. Settings may give each role its own codec.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// A partial sum between ranks of one host, in an algorithm that composes over hosts.
    IntraNode,
    /// A partial sum that is sent to the rank that continues or finishes it.
    Reduce,
    /// A value that ranks end with.
    Result,
}

/// An encoded chunk, or a published one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Code {
    /// The chunk of `In` or `Out` that has the same elements.
    pub like: (Buf, u32),
    /// The role in the call.
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

/// The payload of one message or operand: ranges of chunks, concatenated in order. Ranges are never empty. Two ranges
/// that follow each other in one buffer are merged, so that equal payloads compare equal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Span(SmallVec<[ChunkRange; 2]>);

impl Span {
    /// No chunks: the payload of a message that only signals.
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

/// The first operand of a receive-and-reduce. By convention, it is the one that contains the lowest rank's
/// contribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// `dst = incoming op local`
    IncomingFirst,
    /// `dst = local op incoming`
    LocalFirst,
}

/// Whether a reduction is the last one of its chunks. AVG divides in the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Finish {
    /// More contributions follow.
    No,
    /// All contributions are included.
    Yes,
}

/// One instruction of one rank. An algorithm emits instructions as if they ran one after the other; [`Schedule::lower`]
/// finds which may overlap. The spans of one action have the same chunk sizes in the same order.
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
    /// Receive, keep, and forward to other ranks.
    RecvCopySend {
        /// Where the payload is kept.
        dst: Span,
        /// The peer it comes from.
        from: Rank,
        /// The peers it goes to.
        to: SmallVec<[Rank; 1]>,
    },
    /// Receive, reduce, and forward the result.
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
    /// Copy within this rank. The engine skips it if both sides are the same memory.
    Copy {
        /// The result.
        dst: Span,
        /// The source.
        src: Span,
    },
    /// Reduce several operands of this rank in the given order.
    Reduce {
        /// The result; may be one of the operands.
        dst: Span,
        /// The operands, at least two.
        srcs: Vec<Span>,
        /// Whether this is the last reduction of these chunks.
        finish: Finish,
    },
    /// Later actions begin after everything since the last fence is complete on this rank. Used for messages without
    /// payload, whose order no chunk determines, and to limit the messages in flight. Lowered to dependencies.
    Fence,
}

/// How a buffer is cut into chunks. Chunk boundaries lie on elements; chunks follow each other without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Division {
    /// Chunk 0 is the whole buffer.
    Whole,
    /// All elements of the buffer are split evenly. If they do not divide, the first chunks have one element more.
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

/// The part of one rank in one collective: the result of an algorithm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// The instructions in program order.
    pub actions: Vec<Action>,
    /// The division of `In` into chunks.
    pub in_division: Division,
    /// The division of `Out` into chunks.
    pub out_division: Division,
    /// Scratch chunk k has the size of this chunk of `In` or `Out`.
    pub scratch: Vec<(Buf, u32)>,
}

impl Division {
    /// Number of chunks per block if a buffer of one block is divided this way.
    pub fn pieces(self) -> u32 {
        match self {
            Division::Whole | Division::Blocks => 1,
            Division::Even { chunks } => chunks,
            Division::SplitBlocks { pieces } => pieces,
        }
    }

    /// Number of chunks of a buffer of `blocks` blocks.
    pub fn chunks(self, blocks: u32) -> u32 {
        match self {
            Division::Whole => u32::from(blocks > 0),
            Division::Even { chunks } => chunks * u32::from(blocks > 0),
            Division::Blocks => blocks,
            Division::SplitBlocks { pieces } => blocks * pieces,
        }
    }
}

/// Builders: one method per action, so that an algorithm reads like its steps.
impl Schedule {
    /// An empty schedule.
    pub fn new(in_division: Division, out_division: Division) -> Schedule {
        Schedule { actions: Vec::new(), in_division, out_division, scratch: Vec::new() }
    }

    /// Adds a scratch chunk of the given chunk's size and returns its index.
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

    /// [`Action::RecvCopySend`], or a plain [`Action::Recv`] if `to` is empty.
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

/// The input of an algorithm: one rank's part in one collective.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The collective.
    pub collective: Collective,
    /// Ranks in the group.
    pub world: u32,
    /// The rank whose schedule is built.
    pub rank: Rank,
    /// The root of a rooted collective; rank 0 otherwise.
    pub root: Rank,
    /// The ranks of each host.
    pub topology: &'a Topology,
}
