//! Base operations with their dependencies: the input of the executor.
//!
//! Owns the lowering of a [`Schedule`]: fused actions are split, hazards on chunks become dependencies, and messages
//! are numbered per pair of ranks. Knows no bytes and no time. Read [`Program`] and [`Dep`] first.

use accl_types::{Collective, Rank};
use smallvec::SmallVec;

use crate::ir::{Action, Buf, Code, Division, Finish, Order, Request, Schedule, Span};

/// One rank's operations in program order; dependencies point backwards only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// The operations.
    pub ops: Vec<Op>,
    /// The division of `In` into chunks.
    pub in_division: Division,
    /// The division of `Out` into chunks.
    pub out_division: Division,
    /// Scratch chunk k has the size of this chunk of `In` or `Out`.
    pub scratch: Vec<(Buf, u32)>,
    /// The encoded or published chunk that each chunk of `Code` is. Empty for plain programs.
    pub codes: Vec<Code>,
    /// Whether messages are references to published chunks: see [`Program::by_reference`].
    pub is_by_reference: bool,
}

/// One operation. All spans of an operation have the same length in bytes. Byte k of the result depends only on byte k
/// of the operands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Op {
    /// The kind of operation.
    pub kind: OpKind,
    /// For a send or receive: the number of this message among all messages from its sender to its receiver, from 0.
    /// Otherwise 0.
    pub edge: u32,
    /// The dependencies: each earlier operation at most once, ascending.
    pub deps: SmallVec<[Dep; 2]>,
}

/// The base operations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OpKind {
    /// Send `src` to a peer.
    Send {
        /// The payload.
        src: Span,
        /// The peer.
        to: Rank,
    },
    /// Receive into place.
    Recv {
        /// The destination of the payload.
        dst: Span,
        /// The peer.
        from: Rank,
    },
    /// Receive and reduce with `local`; `dst` may be `local`.
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
    /// Copy; skipped if both sides are the same memory.
    Copy {
        /// The result.
        dst: Span,
        /// The source.
        src: Span,
    },
    /// Reduce in the order of `srcs`.
    Reduce {
        /// The result; may be one of the operands.
        dst: Span,
        /// The operands, at least two.
        srcs: Vec<Span>,
        /// Whether this is the last reduction of these chunks.
        finish: Finish,
    },
    /// Decode, add and encode one chunk; only in encoded programs. The other operands are added to the first one in
    /// their order. If `dsts` has a chunk of `Code`, the sum is encoded into it. If `dsts` also has a chunk of `Out`,
    /// that chunk gets the decoded value.
    ///
    /// In programs by reference: copy the only operand, or reduce the operands in their order, into one chunk.
    Combine {
        /// The results: a chunk of `Code`, one of `Out`, or both in this order.
        dsts: SmallVec<[Span; 2]>,
        /// The operands: a chunk of `In` or `Code` each; in programs by reference, of any buffer.
        srcs: SmallVec<[Span; 2]>,
        /// Whether this is the last reduction of the chunk.
        finish: Finish,
        /// 0 if the operand is this rank's own contribution. Otherwise the count, from 1, of sums of these elements
        /// that this rank encodes.
        pass: u32,
    },
}

/// A dependency on an earlier operation of the same rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dep {
    /// Index of the earlier operation.
    pub on: u32,
    /// If true, byte k of this operation may follow byte k of `on`. Otherwise `on` must be complete before this
    /// operation begins.
    pub stream: bool,
}

impl Schedule {
    /// Splits fused actions, finds dependencies and numbers messages. `request` is the one that the schedule was built
    /// for. The dependencies hold whether or not the engine lets `In` and `Out` share memory.
    pub fn lower(self, request: &Request) -> Program {
        let ops = self.actions.iter().map(ops_of).sum();
        let mut lowering = Lowering::new(Places::new(&self, request), request.world, ops);
        for action in self.actions {
            lowering.action(action);
        }
        Program {
            ops: lowering.ops,
            in_division: self.in_division,
            out_division: self.out_division,
            scratch: self.scratch,
            codes: Vec::new(),
            is_by_reference: false,
        }
    }
}

/// Number of operations that an action becomes.
fn ops_of(action: &Action) -> usize {
    match action {
        Action::Fence => 0,
        Action::Send { .. } | Action::Recv { .. } | Action::RecvReduce { .. } => 1,
        Action::Copy { .. } | Action::Reduce { .. } => 1,
        Action::RecvReduceSend { .. } => 2,
        Action::RecvCopySend { to, .. } => 1 + to.len(),
    }
}

impl OpKind {
    /// The spans that the operation reads.
    pub fn reads(&self) -> &[Span] {
        match self {
            OpKind::Send { src, .. } | OpKind::Copy { src, .. } => std::slice::from_ref(src),
            OpKind::RecvReduce { local, .. } => std::slice::from_ref(local),
            OpKind::Reduce { srcs, .. } => srcs,
            OpKind::Combine { srcs, .. } => srcs,
            OpKind::Recv { .. } => &[],
        }
    }

    /// The spans that the operation writes.
    pub fn writes(&self) -> &[Span] {
        match self {
            OpKind::Recv { dst, .. }
            | OpKind::RecvReduce { dst, .. }
            | OpKind::Copy { dst, .. }
            | OpKind::Reduce { dst, .. } => std::slice::from_ref(dst),
            OpKind::Combine { dsts, .. } => dsts,
            OpKind::Send { .. } => &[],
        }
    }

    /// The span of access `index`; reads are numbered first, then writes.
    pub(crate) fn access(&self, index: u32) -> Option<&Span> {
        let reads = self.reads();
        reads.get(index as usize).or_else(|| self.writes().get(index as usize - reads.len()))
    }
}

/// The places of chunks if all buffers that the engine may alias are aliased. Two chunks that may be the same memory
/// have the same place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Places {
    alias: Alias,
}

/// The buffers that may be the same memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Alias {
    Nothing,
    /// `In[i]` is `Out[i + first]`, for `len` values of i.
    InIsOut {
        first: u32,
        len: u32,
    },
    /// `Out[i]` is `In[i + first]`, for `len` values of i.
    OutIsIn {
        first: u32,
        len: u32,
    },
}

impl Places {
    pub(crate) fn new(schedule: &Schedule, request: &Request) -> Places {
        Places::of(schedule.in_division, schedule.out_division, request)
    }

    pub(crate) fn of(in_division: Division, out_division: Division, request: &Request) -> Places {
        let rank = request.rank.0;
        let (ins, outs) = (in_division.pieces(), out_division.pieces());
        let is_root = request.rank == request.root;
        let alias = match request.collective {
            Collective::AllReduce | Collective::Reduce => Alias::InIsOut { first: 0, len: ins },
            Collective::AllGather => Alias::InIsOut { first: rank * ins, len: ins },
            Collective::Gather if is_root => Alias::InIsOut { first: rank * ins, len: ins },
            Collective::ReduceScatter => Alias::OutIsIn { first: rank * outs, len: outs },
            Collective::Scatter if is_root => Alias::OutIsIn { first: rank * outs, len: outs },
            Collective::Gather
            | Collective::Scatter
            | Collective::Broadcast
            | Collective::AllToAll
            | Collective::Barrier
            | Collective::Send
            | Collective::Recv => Alias::Nothing,
        };
        Places { alias }
    }

    /// The places if nothing is aliased.
    pub(crate) fn separate() -> Places {
        Places { alias: Alias::Nothing }
    }

    pub(crate) fn place(&self, buf: Buf, chunk: u32) -> (Buf, u32) {
        match (self.alias, buf) {
            (Alias::InIsOut { first, len }, Buf::In) if chunk < len => (Buf::Out, first + chunk),
            (Alias::OutIsIn { first, len }, Buf::Out) if chunk < len => (Buf::In, first + chunk),
            (
                Alias::Nothing | Alias::InIsOut { .. } | Alias::OutIsIn { .. },
                Buf::In | Buf::Out | Buf::Scratch | Buf::Code,
            ) => (buf, chunk),
        }
    }

    /// Whether two payloads are the same memory in the same order.
    pub(crate) fn same(&self, a: &Span, b: &Span) -> bool {
        a == b
            || (self.alias != Alias::Nothing
                && a.chunk_count() == b.chunk_count()
                && a.chunks().map(|(buf, c)| self.place(buf, c)).eq(b.chunks().map(|(buf, c)| self.place(buf, c))))
    }
}

/// An access of an earlier operation: operation and index of the access in it.
type Access = (u32, u32);

/// The last accesses to a chunk.
#[derive(Clone, Default)]
struct Chunk {
    writer: Option<Access>,
    /// The readers since the last write.
    readers: SmallVec<[Access; 2]>,
}

/// An earlier access that an access of the current operation must come after.
type Hazard = (Access, u32);

/// Assigns dependencies to operations and numbers to messages, one operation after the other.
pub(crate) struct Lowering {
    places: Places,
    sent: Vec<u32>,
    received: Vec<u32>,
    /// First operation after the last fence.
    section: u32,
    /// The operations between the last two fences.
    before_section: std::ops::Range<u32>,
    pub(crate) ops: Vec<Op>,
    /// Working memory of `dependencies`.
    hazards: Vec<Hazard>,
    chunks: [Vec<Chunk>; Buf::COUNT],
}

impl Lowering {
    /// Reserves memory for about `ops` operations.
    pub(crate) fn new(places: Places, world: u32, ops: usize) -> Lowering {
        Lowering {
            places,
            sent: vec![0; world as usize],
            received: vec![0; world as usize],
            section: 0,
            before_section: 0..0,
            ops: Vec::with_capacity(ops),
            hazards: Vec::new(),
            chunks: [const { Vec::new() }; Buf::COUNT],
        }
    }

    pub(crate) fn action(&mut self, action: Action) {
        match action {
            Action::Send { src, to } => self.push(OpKind::Send { src, to }),
            Action::Recv { dst, from } => self.push(OpKind::Recv { dst, from }),
            Action::RecvReduce { dst, local, from, order, finish } => {
                self.push(OpKind::RecvReduce { dst, local, from, order, finish });
            }
            Action::RecvCopySend { dst, from, to } => {
                self.push(OpKind::Recv { dst: dst.clone(), from });
                for to in to {
                    self.push(OpKind::Send { src: dst.clone(), to });
                }
            }
            Action::RecvReduceSend { dst, local, from, to, order, finish } => {
                self.push(OpKind::RecvReduce { dst: dst.clone(), local, from, order, finish });
                self.push(OpKind::Send { src: dst, to });
            }
            Action::Copy { dst, src } => self.push(OpKind::Copy { dst, src }),
            Action::Reduce { dst, srcs, finish } => self.push(OpKind::Reduce { dst, srcs, finish }),
            Action::Fence => {
                let end = self.ops.len() as u32;
                if end > self.section {
                    self.before_section = self.section..end;
                    self.section = end;
                }
            }
        }
    }

    pub(crate) fn push(&mut self, kind: OpKind) {
        let edge = match &kind {
            OpKind::Send { to, .. } => next(&mut self.sent, *to),
            OpKind::Recv { from, .. } | OpKind::RecvReduce { from, .. } => next(&mut self.received, *from),
            OpKind::Copy { .. } | OpKind::Reduce { .. } | OpKind::Combine { .. } => 0,
        };
        let deps = self.dependencies(&kind);
        self.ops.push(Op { kind, edge, deps });
    }

    /// Returns the dependencies of the next operation and records its accesses.
    fn dependencies(&mut self, kind: &OpKind) -> SmallVec<[Dep; 2]> {
        let op = self.ops.len() as u32;
        let mut hazards = std::mem::take(&mut self.hazards);
        hazards.clear();
        let reads = kind.reads();
        for (access, span) in (0u32..).zip(reads) {
            for (buf, chunk) in span.chunks() {
                let state = self.chunk(buf, chunk);
                hazards.extend(state.writer.map(|writer| (writer, access)));
                state.readers.push((op, access));
            }
        }
        for (access, span) in (reads.len() as u32..).zip(kind.writes()) {
            for (buf, chunk) in span.chunks() {
                let state = self.chunk(buf, chunk);
                // The operation's own reads are the last readers in the list.
                let others = state.readers.partition_point(|reader| reader.0 < op);
                // Readers already follow the writer byte by byte, so it is enough to wait for them.
                let earlier = if others == 0 { state.writer.as_slice() } else { &state.readers[..others] };
                // A span that names a chunk twice must not wait for itself.
                hazards.extend(earlier.iter().filter(|earlier| earlier.0 < op).map(|&earlier| (earlier, access)));
                state.writer = Some((op, access));
                state.readers.clear();
            }
        }
        if !hazards.is_sorted() {
            hazards.sort_unstable();
        }
        hazards.dedup();
        let mut deps: SmallVec<[Dep; 2]> = self.before_section.clone().map(|on| Dep { on, stream: false }).collect();
        for of_one_op in hazards.chunk_by(|a, b| a.0.0 == b.0.0) {
            let on = of_one_op[0].0.0;
            // A fence has already ordered everything before this section.
            if on < self.section {
                continue;
            }
            let earlier = &self.ops[on as usize].kind;
            let stream =
                of_one_op.iter().all(|&((_, theirs), ours)| match (earlier.access(theirs), kind.access(ours)) {
                    (Some(theirs), Some(ours)) => self.places.same(theirs, ours),
                    (None, _) | (_, None) => false,
                });
            deps.push(Dep { on, stream });
        }
        self.hazards = hazards;
        deps
    }

    fn chunk(&mut self, buf: Buf, chunk: u32) -> &mut Chunk {
        let (buf, chunk) = self.places.place(buf, chunk);
        let chunks = &mut self.chunks[buf as usize];
        if chunks.len() <= chunk as usize {
            chunks.resize(chunk as usize + 1, Chunk::default());
        }
        &mut chunks[chunk as usize]
    }
}

fn next(counters: &mut [u32], peer: Rank) -> u32 {
    let counter = &mut counters[peer.index()];
    *counter += 1;
    *counter - 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithms::find;
    use crate::topology::Topology;

    fn lowered(collective: Collective, name: &str, world: u32, rank: u32) -> Program {
        let topology = Topology::flat(world);
        let request = Request { collective, world, rank: Rank(rank), root: Rank(0), topology: &topology };
        let row = find(collective, name).expect("the row exists");
        (row.build)(&request).lower(&request)
    }

    fn deps(program: &Program) -> Vec<Vec<(u32, bool)>> {
        program.ops.iter().map(|op| op.deps.iter().map(|dep| (dep.on, dep.stream)).collect()).collect()
    }

    #[test]
    fn a_relay_streams_behind_what_it_receives() {
        // Receive, then forward.
        assert_eq!(deps(&lowered(Collective::Broadcast, "chain", 4, 1)), [vec![], vec![(0, true)]]);
        let reduce = lowered(Collective::Reduce, "chain", 4, 1);
        assert!(
            matches!(reduce.ops[0].kind, OpKind::RecvReduce { .. })
                && matches!(reduce.ops[1].kind, OpKind::Send { .. })
        );
        assert_eq!(deps(&reduce), [vec![], vec![(0, true)]]);
    }

    #[test]
    fn an_exchange_in_place_overwrites_byte_by_byte_behind_its_own_sending() {
        // Two ranks: send `In`, then receive and reduce `In` into `Out`, which may be the same memory.
        let program = lowered(Collective::AllReduce, "recursive_doubling", 2, 0);
        assert_eq!(deps(&program), [vec![], vec![(0, true)]]);
    }

    #[test]
    fn one_large_all_reduce_of_two_is_a_pipeline_throughout() {
        let program = lowered(Collective::AllReduce, "direct_two_phase", 2, 0);
        // Send `In` 1, reduce into 0, send 0 as it becomes ready, receive 1 over the sent data.
        assert_eq!(deps(&program), [vec![], vec![], vec![(1, true)], vec![(0, true)]]);
    }

    #[test]
    fn parts_of_a_payload_wait_for_all_of_it() {
        let program = lowered(Collective::Scatter, "binomial", 4, 2);
        // Position 2 receives blocks 2 and 3 and forwards block 3.
        assert_eq!(deps(&program), [vec![], vec![(0, false)]]);
    }

    #[test]
    fn a_fence_holds_back_what_follows() {
        let program = lowered(Collective::Barrier, "dissemination", 4, 0);
        let both = vec![(0, false), (1, false)];
        assert_eq!(deps(&program), [vec![], vec![], both.clone(), both]);
    }

    #[test]
    fn messages_are_numbered_per_directed_pair() {
        let program = lowered(Collective::AllReduce, "ring", 3, 0);
        let edges = |sends: bool| -> Vec<u32> {
            let is_send = |op: &&Op| matches!(op.kind, OpKind::Send { .. }) == sends;
            program.ops.iter().filter(is_send).map(|op| op.edge).collect()
        };
        assert_eq!(edges(true), [0, 1, 2, 3]);
        assert_eq!(edges(false), [0, 1, 2, 3]);
    }

    #[test]
    fn dependencies_grow_with_the_operations_and_not_faster() {
        for row in crate::ALGORITHMS.iter().filter(|row| row.requires.is_empty()) {
            let program = lowered(row.collective, row.name, 4096, 7);
            let deps: usize = program.ops.iter().map(|op| op.deps.len()).sum();
            let bound = 16 * program.ops.len();
            assert!(
                deps <= bound,
                "{} {}: {deps} dependencies of {} operations",
                row.collective,
                row.name,
                program.ops.len()
            );
        }
    }
}
