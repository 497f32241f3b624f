//! Symbolic execution: the contents of every chunk as an expression over the inputs.
//!
//! Each expression is stored once and identified by a number, so that comparing and copying are cheap.

use std::collections::{HashMap, HashSet};

use accl_types::Collective;
use smallvec::{SmallVec, smallvec};

use super::case::{Case, Violation};
use super::model::{Wanted, block_counts, chunk_counts, wanted};
use super::order::Graph;
use crate::ir::{Buf, Finish, Order, Span};
use crate::program::{Op, OpKind, Places, Program};

/// The maximum changes of an element on its way to an output.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Changes {
    /// Number of times that the element is encoded.
    pub(super) encodings: u32,
    /// Number of consecutive reductions of the element. After each one, a type narrower than the arithmetic is rounded.
    pub(super) roundings: u32,
}

impl Changes {
    pub(super) fn max(self, other: Changes) -> Changes {
        Changes { encodings: self.encodings.max(other.encodings), roundings: self.roundings.max(other.roundings) }
    }
}

/// An expression.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Node {
    /// The initial contents of a chunk on a rank.
    Leaf { rank: u32, chunk: u32 },
    /// A reduction, with its operands in order.
    Reduction { operands: SmallVec<[u32; 2]>, finish: Finish },
    /// The decoded value of a rank's encoding of an expression. No two encodings are equal, even of one expression.
    Encoded { value: u32, rank: u32, code: u32 },
}

/// All expressions.
#[derive(Default)]
pub(super) struct Pool {
    nodes: Vec<Node>,
    /// The lowest rank in each expression.
    lowest: Vec<u32>,
    /// The maximum number of encodings in each expression.
    encodings: Vec<u32>,
    /// The maximum number of consecutive reductions in each expression.
    roundings: Vec<u32>,
    numbers: HashMap<Node, u32>,
}

impl Pool {
    fn number(&mut self, node: Node) -> u32 {
        if let Some(&number) = self.numbers.get(&node) {
            return number;
        }
        let lowest = match &node {
            Node::Leaf { rank, .. } => *rank,
            Node::Encoded { value, .. } => self.lowest[*value as usize],
            Node::Reduction { operands, .. } => {
                operands.iter().map(|&operand| self.lowest[operand as usize]).min().unwrap_or(u32::MAX)
            }
        };
        let encodings = match &node {
            Node::Leaf { .. } => 0,
            Node::Encoded { value, .. } => self.encodings[*value as usize] + 1,
            Node::Reduction { operands, .. } => {
                operands.iter().map(|&operand| self.encodings[operand as usize]).max().unwrap_or(0)
            }
        };
        let roundings = match &node {
            Node::Leaf { .. } => 0,
            Node::Encoded { value, .. } => self.roundings[*value as usize],
            Node::Reduction { operands, .. } => {
                operands.iter().map(|&operand| self.roundings[operand as usize]).max().unwrap_or(0) + 1
            }
        };
        let number = self.nodes.len() as u32;
        self.nodes.push(node.clone());
        self.lowest.push(lowest);
        self.encodings.push(encodings);
        self.roundings.push(roundings);
        self.numbers.insert(node, number);
        number
    }

    fn reduction(&mut self, operands: SmallVec<[u32; 2]>, finish: Finish) -> Result<u32, Violation> {
        let lowest = |operand: u32| self.lowest[operand as usize];
        match operands.windows(2).all(|pair| lowest(pair[0]) < lowest(pair[1])) {
            true => Ok(self.number(Node::Reduction { operands, finish })),
            false => Err(Violation::new("operands are not in the order of their lowest ranks")),
        }
    }

    /// Adds operands one after the other. The two operands of each addition are sorted, because their order does not
    /// matter.
    fn sum(&mut self, operands: &[u32], finish: Finish) -> Result<u32, Violation> {
        let [first, rest @ ..] = operands else { return Err(Violation::new("combines nothing")) };
        let mut sum = *first;
        for (&operand, left) in rest.iter().zip((0..rest.len()).rev()) {
            let mut pair: SmallVec<[u32; 2]> = smallvec![sum, operand];
            pair.sort_by_key(|&operand| self.lowest[operand as usize]);
            sum = self.reduction(pair, if left == 0 { finish } else { Finish::No })?;
        }
        Ok(sum)
    }

    /// Checks that the expression reduces `chunk` of every rank once, and that only its last reduction finishes.
    fn check_complete(&self, number: u32, chunk: u32, world: u32) -> Result<(), Violation> {
        let mut seen = vec![false; world as usize];
        let mut open = vec![(number, Finish::Yes)];
        while let Some((number, expected)) = open.pop() {
            match &self.nodes[number as usize] {
                Node::Leaf { rank, chunk: of } => {
                    if *of != chunk || std::mem::replace(&mut seen[*rank as usize], true) {
                        return Err(Violation::new(format!("it contains chunk {of} of rank {rank} wrongly or twice")));
                    }
                }
                Node::Encoded { value, .. } => open.push((*value, expected)),
                Node::Reduction { operands, finish } => {
                    if *finish != expected {
                        return Err(Violation::new("it is finished too early or not at all"));
                    }
                    open.extend(operands.iter().map(|&operand| (operand, Finish::No)));
                }
            }
        }
        match seen.iter().position(|&seen| !seen) {
            None => Ok(()),
            Some(rank) => Err(Violation::new(format!("the contribution of rank {rank} is missing"))),
        }
    }
}

/// The memory of one rank: the expression in each place, or `None` if the place was not written.
struct RankMemory {
    places: Places,
    /// The chunks of `Code` that are written.
    encoded: HashSet<u32>,
    chunks: [Vec<Option<u32>>; Buf::COUNT],
}

impl RankMemory {
    fn at(&mut self, buf: Buf, chunk: u32) -> &mut Option<u32> {
        let (buf, chunk) = self.places.place(buf, chunk);
        let chunks = &mut self.chunks[buf as usize];
        if chunks.len() <= chunk as usize {
            chunks.resize(chunk as usize + 1, None);
        }
        &mut chunks[chunk as usize]
    }

    fn read(&mut self, span: &Span) -> Result<Vec<u32>, Violation> {
        span.chunks()
            .map(|(buf, chunk)| {
                let unwritten = || Violation::new(format!("reads {buf:?} {chunk}, which was not written"));
                self.at(buf, chunk).ok_or_else(unwritten)
            })
            .collect()
    }

    fn write(&mut self, span: &Span, values: Vec<u32>) {
        span.chunks().zip(values).for_each(|((buf, chunk), value)| *self.at(buf, chunk) = Some(value));
    }
}

/// Runs all operations in an order that respects dependencies and checks the final contents of `Out`. The hazard checks
/// prove that every such order gives the same result. Returns the expressions of all outputs by their numbers in `pool`, too.
pub(super) fn check_values(
    case: &Case,
    programs: &[Program],
    graph: &Graph,
    sequence: &[u32],
    places: &dyn Fn(u32) -> Places,
    pool: &mut Pool,
) -> Result<(Changes, Vec<u32>), Violation> {
    let mut memories: Vec<RankMemory> =
        (0..case.world).map(|rank| initial(case, rank, &programs[rank as usize], places(rank), pool)).collect();
    let mut messages: HashMap<u32, Vec<u32>> = HashMap::new();
    for &number in sequence {
        let (rank, index) = graph.locate(number);
        let program = &programs[rank];
        let kind = &program.ops[index].kind;
        let memory = &mut memories[rank];
        let mut run = || {
            let incoming = |messages: &mut HashMap<u32, Vec<u32>>| {
                messages.remove(&graph.partner(number)).ok_or_else(|| Violation::new("runs before its message is sent"))
            };
            match kind {
                OpKind::Send { src, .. } => {
                    messages.insert(number, memory.read(src)?);
                }
                OpKind::Recv { dst, .. } => memory.write(dst, incoming(&mut messages)?),
                OpKind::RecvReduce { dst, local, order, finish, .. } => {
                    let locals = memory.read(local)?;
                    let pairs = incoming(&mut messages)?.into_iter().zip(locals);
                    let reduced = pairs.map(|(incoming, local)| match order {
                        Order::IncomingFirst => pool.reduction(smallvec![incoming, local], *finish),
                        Order::LocalFirst => pool.reduction(smallvec![local, incoming], *finish),
                    });
                    let reduced = reduced.collect::<Result<_, _>>()?;
                    memory.write(dst, reduced);
                }
                OpKind::Copy { dst, src } => {
                    let values = memory.read(src)?;
                    memory.write(dst, values);
                }
                OpKind::Reduce { dst, srcs, finish } => {
                    let srcs = srcs.iter().map(|src| memory.read(src)).collect::<Result<Vec<_>, _>>()?;
                    let reduced = (0..dst.chunk_count() as usize)
                        .map(|at| pool.reduction(srcs.iter().map(|src| src[at]).collect(), *finish));
                    let reduced = reduced.collect::<Result<_, _>>()?;
                    memory.write(dst, reduced);
                }
                OpKind::Combine { dsts, srcs, finish, .. } => {
                    let mut operands = SmallVec::new();
                    for src in srcs {
                        operands.extend(memory.read(src)?);
                    }
                    let mut value = match (program.is_by_reference, &operands[..]) {
                        (true, &[only]) => only,
                        (true, _) => pool.reduction(operands, *finish)?,
                        (false, operands) => pool.sum(operands, *finish)?,
                    };
                    let code = dsts[0].chunks().find(|(buf, _)| *buf == Buf::Code && !program.is_by_reference);
                    if let Some((_, code)) = code {
                        value = pool.number(Node::Encoded { value, rank: rank as u32, code });
                    }
                    for dst in dsts {
                        memory.write(dst, vec![value]);
                    }
                }
            }
            // Encoded bytes may still be in flight, so a chunk of `Code` must not be written again.
            for (buf, chunk) in kind.writes().iter().flat_map(|span| span.chunks()) {
                if buf == Buf::Code && !memory.encoded.insert(chunk) {
                    return Err(Violation::new("writes an encoded chunk a second time"));
                }
            }
            Ok(())
        };
        run().map_err(|why: Violation| why.at(rank as u32, index, kind))?;
    }
    let (changes, results) = check_outputs(case, programs, pool, &mut memories)?;
    if case.collective == Collective::Barrier {
        check_barrier(case, programs, graph, sequence)?;
    }
    if programs.iter().any(|program| program.is_by_reference) {
        check_leaving(case, programs, graph, sequence)?;
    }
    Ok((changes, results))
}

fn initial(case: &Case, rank: u32, program: &Program, places: Places, pool: &mut Pool) -> RankMemory {
    let mut memory = RankMemory { places, chunks: Default::default(), encoded: HashSet::new() };
    let [ins, outs, ..] = chunk_counts(case, rank, program);
    for chunk in 0..ins {
        *memory.at(Buf::In, chunk) = Some(pool.number(Node::Leaf { rank, chunk }));
    }
    if case.collective == Collective::Broadcast && rank == case.root.0 {
        for chunk in 0..outs {
            *memory.at(Buf::Out, chunk) = Some(pool.number(Node::Leaf { rank, chunk }));
        }
    }
    memory
}

fn check_outputs(
    case: &Case,
    programs: &[Program],
    pool: &Pool,
    memories: &mut [RankMemory],
) -> Result<(Changes, Vec<u32>), Violation> {
    let (mut changes, mut results) = (Changes::default(), Vec::new());
    // The expression that reduces each chunk: found on one rank, then required to be the same on all ranks.
    let mut reductions: HashMap<u32, u32> = HashMap::new();
    // The final expression of each rank's contribution.
    let mut originals: HashMap<(u32, u32), u32> = HashMap::new();
    for (rank, (program, memory)) in (0..).zip(programs.iter().zip(memories)) {
        let (_, blocks) = block_counts(case, rank);
        for chunk in 0..program.out_division.chunks(blocks) {
            let place = |why: &str| Violation::new(format!("chunk {chunk} of the output of rank {rank}: {why}"));
            let number = memory.at(Buf::Out, chunk).ok_or_else(|| place("never written"))?;
            results.push(number);
            changes.encodings = changes.encodings.max(pool.encodings[number as usize]);
            changes.roundings = changes.roundings.max(pool.roundings[number as usize]);
            match wanted(case, rank, program, chunk) {
                Wanted::Original { rank: from, chunk: of } => {
                    let leaf = match pool.nodes[number as usize] {
                        Node::Encoded { value, .. } => value,
                        Node::Leaf { .. } | Node::Reduction { .. } => number,
                    };
                    if pool.nodes[leaf as usize] != (Node::Leaf { rank: from, chunk: of }) {
                        let found = &pool.nodes[number as usize];
                        return Err(place(&format!("holds {found:?}, not chunk {of} of rank {from}")));
                    }
                    if *originals.entry((from, of)).or_insert(number) != number {
                        return Err(place("not the same bytes as on another rank"));
                    }
                }
                Wanted::Reduction { chunk: of } => match reductions.get(&of) {
                    Some(&known) if known == number => {}
                    Some(_) => return Err(place("not the same expression as on another rank")),
                    None => {
                        pool.check_complete(number, of, case.world).map_err(|Violation(why)| place(&why))?;
                        reductions.insert(of, number);
                    }
                },
            }
        }
    }
    Ok((changes, results))
}

/// Returns whether an operation is a message without payload.
fn is_signal(op: &Op) -> bool {
    matches!(&op.kind, OpKind::Send { src: span, .. } | OpKind::Recv { dst: span, .. } if span.is_empty())
}

/// Checks that a rank signals only when it has read everything that others published.
fn check_reads(rank: u32, program: &Program) -> Result<(), Violation> {
    let is_published = |op: &Op| op.kind.reads().iter().flat_map(Span::ranges).any(|range| range.buf == Buf::Code);
    let reads: Vec<u32> =
        (0..).zip(&program.ops).filter(|(_, op)| !is_signal(op) && is_published(op)).map(|(op, _)| op).collect();
    for (index, op) in program.ops.iter().enumerate().filter(|(_, op)| is_signal(op)) {
        // Signals follow each other, so it is enough that each follows all reads or an earlier signal.
        let follows = |&on: &u32| op.deps.iter().any(|dep| dep.on == on && !dep.stream);
        let follows_signal = op.deps.iter().any(|dep| is_signal(&program.ops[dep.on as usize]));
        if !follows_signal && !reads.iter().all(follows) {
            return Err(Violation::new("signals before it has read all chunks").at(rank, index, &op.kind));
        }
    }
    Ok(())
}

/// Checks that every rank has begun when a rank completes the barrier: each rank has sent a message that led to this.
fn check_barrier(case: &Case, programs: &[Program], graph: &Graph, sequence: &[u32]) -> Result<(), Violation> {
    let known = Known::spread(case, programs, graph, sequence, |_, _| true);
    known.check_ends(case, programs, graph, "is known to have entered")
}

/// Checks the end of programs by reference: a rank ends only when all ranks are known to have read, and to have lived after
/// that.
fn check_leaving(case: &Case, programs: &[Program], graph: &Graph, sequence: &[u32]) -> Result<(), Violation> {
    for (rank, program) in (0..).zip(programs) {
        check_reads(rank, program)?;
    }
    let read = Known::spread(case, programs, graph, sequence, |_, op| is_signal(op));
    let lived = Known::spread(case, programs, graph, sequence, |number, _| read.missing(number).is_none());
    lived.check_ends(case, programs, graph, "is known to have lived when all had read")
}

/// For each operation, the ranks that have begun for certain when it is complete.
struct Known {
    world: u32,
    words: usize,
    /// One bit for each rank, operation by operation.
    bits: Vec<u64>,
}

impl Known {
    /// Follows dependencies and messages from the operations of each rank for which `begins` is true.
    fn spread(
        case: &Case,
        programs: &[Program],
        graph: &Graph,
        sequence: &[u32],
        begins: impl Fn(u32, &Op) -> bool,
    ) -> Self {
        let words = case.world.div_ceil(64) as usize;
        let mut bits = vec![0u64; sequence.len() * words];
        for &number in sequence {
            let (rank, index) = graph.locate(number);
            let op = &programs[rank].ops[index];
            let mut now = vec![0u64; words];
            now[rank / 64] |= u64::from(begins(number, op)) << (rank % 64);
            let mut learn = |from: u32| {
                let from = &bits[from as usize * words..][..words];
                now.iter_mut().zip(from).for_each(|(now, from)| *now |= from);
            };
            op.deps.iter().for_each(|dep| learn(graph.number(rank, dep.on as usize)));
            match op.kind {
                OpKind::Recv { .. } | OpKind::RecvReduce { .. } => learn(graph.partner(number)),
                OpKind::Send { .. } | OpKind::Copy { .. } | OpKind::Reduce { .. } | OpKind::Combine { .. } => {}
            }
            bits[number as usize * words..][..words].copy_from_slice(&now);
        }
        Self { world: case.world, words, bits }
    }

    /// Returns a rank that has not begun for certain when an operation is complete.
    fn missing(&self, number: u32) -> Option<u32> {
        self.missing_in(&self.bits[number as usize * self.words..][..self.words])
    }

    fn missing_in(&self, bits: &[u64]) -> Option<u32> {
        (0..self.world).find(|&rank| bits[rank as usize / 64] >> (rank % 64) & 1 == 0)
    }

    /// Checks that all ranks have begun when a rank has done all its operations. The rank itself has.
    fn check_ends(&self, case: &Case, programs: &[Program], graph: &Graph, what: &str) -> Result<(), Violation> {
        for (rank, program) in programs.iter().enumerate() {
            let mut end = vec![0u64; self.words];
            end[rank / 64] |= 1 << (rank % 64);
            for number in (0..program.ops.len()).map(|index| graph.number(rank, index)) {
                let of_op = &self.bits[number as usize * self.words..][..self.words];
                end.iter_mut().zip(of_op).for_each(|(end, of_op)| *end |= of_op);
            }
            if let Some(missing) = self.missing_in(&end).filter(|_| case.world > 1) {
                return Err(Violation::new(format!("rank {rank} leaves before rank {missing} {what}")));
            }
        }
        Ok(())
    }
}
