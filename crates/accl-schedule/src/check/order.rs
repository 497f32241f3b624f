//! The order of operations: messages between ranks, hazards within a rank, cycles.

use std::collections::HashMap;

use super::case::{Case, Violation};
use super::model::{Size, wire_sizes};
use crate::ir::{Buf, Role};
use crate::program::{OpKind, Places, Program};

/// The size and role of one chunk of a message.
type Wire = (Size, Option<Role>);

/// Segments per message in the deadlock proof: a first, a middle and a last one.
const SEGMENTS: usize = 3;

/// Marks the absence of an operation.
const NONE: u32 = u32::MAX;

/// All operations of all ranks, numbered consecutively, with the messages between them.
pub(super) struct Graph {
    /// Number of the first operation of each rank, and the total.
    first: Vec<u32>,
    /// For each send and receive, the operation at the other end of the message.
    partner: Vec<u32>,
    /// The operations that depend on each operation `op`: `later[starts[op]..starts[op + 1]]`, each with whether it may
    /// stream.
    starts: Vec<u32>,
    later: Vec<(u32, bool)>,
}

impl Graph {
    /// Builds the graph and matches messages.
    pub fn new(case: &Case, programs: &[Program]) -> Result<Graph, Violation> {
        let mut first = vec![0];
        for program in programs {
            first.push(first[first.len() - 1] + program.ops.len() as u32);
        }
        let partner = match_messages(case, programs, &first)?;

        let total = partner.len();
        let mut starts = vec![0u32; total + 1];
        for_each_dep(programs, &first, |on, _, _| starts[on as usize + 1] += 1);
        for op in 0..total {
            starts[op + 1] += starts[op];
        }
        let mut next = starts.clone();
        let mut later = vec![(0, false); starts[total] as usize];
        for_each_dep(programs, &first, |on, op, stream| {
            later[next[on as usize] as usize] = (op, stream);
            next[on as usize] += 1;
        });
        Ok(Graph { first, partner, starts, later })
    }

    /// The rank of an operation and its index on that rank.
    pub fn locate(&self, op: u32) -> (usize, usize) {
        let rank = self.first.partition_point(|&first| first <= op) - 1;
        (rank, (op - self.first[rank]) as usize)
    }

    /// The number of operation `index` of a rank.
    pub fn number(&self, rank: usize, index: usize) -> u32 {
        self.first[rank] + index as u32
    }

    /// The operation at the other end of a message.
    pub fn partner(&self, op: u32) -> u32 {
        self.partner[op as usize]
    }

    fn later(&self, op: u32) -> &[(u32, bool)] {
        &self.later[self.starts[op as usize] as usize..self.starts[op as usize + 1] as usize]
    }

    /// Returns an order in which all operations can run one by one if messages are buffered.
    pub fn sequence(&self, programs: &[Program]) -> Result<Vec<u32>, Violation> {
        let mut missing: Vec<u32> = Vec::with_capacity(self.partner.len());
        for program in programs {
            missing.extend(program.ops.iter().map(|op| op.deps.len() as u32 + u32::from(receives(&op.kind))));
        }
        let mut ready: Vec<u32> = (0..missing.len() as u32).filter(|&op| missing[op as usize] == 0).collect();
        let mut sequence = Vec::with_capacity(missing.len());
        while let Some(op) = ready.pop() {
            sequence.push(op);
            let mut done = |op: u32| {
                missing[op as usize] -= 1;
                if missing[op as usize] == 0 {
                    ready.push(op);
                }
            };
            self.later(op).iter().for_each(|&(later, _)| done(later));
            let (rank, index) = self.locate(op);
            if let OpKind::Send { .. } = programs[rank].ops[index].kind {
                done(self.partner(op));
            }
        }
        match missing.iter().position(|&missing| missing > 0) {
            None => Ok(sequence),
            Some(op) => Err(self.stuck(programs, op as u32)),
        }
    }

    /// Checks that no deadlock occurs if a sender may be at most one segment ahead of its receiver.
    pub fn check_rendezvous(&self, programs: &[Program]) -> Result<(), Violation> {
        let total = self.partner.len();
        let mut missing = vec![0u32; total * SEGMENTS];
        let at = |op: u32, segment: usize| op as usize * SEGMENTS + segment;
        for (rank, program) in programs.iter().enumerate() {
            for (index, op) in program.ops.iter().enumerate() {
                let number = self.number(rank, index);
                for segment in 0..SEGMENTS {
                    let streamed = op.deps.iter().filter(|dep| dep.stream).count();
                    let complete = if segment == 0 { op.deps.len() - streamed } else { 1 };
                    let message = match op.kind {
                        OpKind::Send { .. } => segment > 0,
                        OpKind::Recv { .. } | OpKind::RecvReduce { .. } => true,
                        OpKind::Copy { .. } | OpKind::Reduce { .. } | OpKind::Combine { .. } => false,
                    };
                    missing[at(number, segment)] = (streamed + complete) as u32 + u32::from(message);
                }
            }
        }
        let mut ready: Vec<usize> = (0..missing.len()).filter(|&node| missing[node] == 0).collect();
        let mut left = missing.len();
        while let Some(node) = ready.pop() {
            left -= 1;
            let (op, segment) = ((node / SEGMENTS) as u32, node % SEGMENTS);
            let last = segment + 1 == SEGMENTS;
            let mut done = |node: usize| {
                missing[node] -= 1;
                if missing[node] == 0 {
                    ready.push(node);
                }
            };
            if !last {
                done(at(op, segment + 1));
            }
            for &(later, stream) in self.later(op) {
                if stream {
                    done(at(later, segment));
                } else if last {
                    done(at(later, 0));
                }
            }
            let partner = self.partner(op);
            if partner != NONE {
                let (rank, index) = self.locate(op);
                if !receives(&programs[rank].ops[index].kind) {
                    done(at(partner, segment));
                } else if !last {
                    done(at(partner, segment + 1));
                }
            }
        }
        if left == 0 {
            return Ok(());
        }
        let node = missing.iter().position(|&missing| missing > 0).unwrap_or(0);
        Err(self.stuck(programs, (node / SEGMENTS) as u32))
    }

    fn stuck(&self, programs: &[Program], op: u32) -> Violation {
        let (rank, index) = self.locate(op);
        Violation::new("waits in a cycle").at(rank as u32, index, &programs[rank].ops[index].kind)
    }

    /// Number of messages in the longest chain in which each message is sent after the previous one was received.
    pub fn longest_chain(&self, programs: &[Program], sequence: &[u32]) -> u32 {
        let mut level = vec![0u32; self.partner.len()];
        for &op in sequence {
            let (rank, index) = self.locate(op);
            if receives(&programs[rank].ops[index].kind) {
                level[op as usize] = level[op as usize].max(level[self.partner(op) as usize] + 1);
            }
            for &(later, _) in self.later(op) {
                level[later as usize] = level[later as usize].max(level[op as usize]);
            }
        }
        level.into_iter().max().unwrap_or(0)
    }
}

fn receives(kind: &OpKind) -> bool {
    match kind {
        OpKind::Recv { .. } | OpKind::RecvReduce { .. } => true,
        OpKind::Send { .. } | OpKind::Copy { .. } | OpKind::Reduce { .. } | OpKind::Combine { .. } => false,
    }
}

fn for_each_dep(programs: &[Program], first: &[u32], mut each: impl FnMut(u32, u32, bool)) {
    for (program, &first) in programs.iter().zip(first) {
        for (index, op) in (0..).zip(&program.ops) {
            op.deps.iter().for_each(|dep| each(first + dep.on, first + index, dep.stream));
        }
    }
}

/// One end of a message: its sender, receiver and ordinal, and the sizes of its payload. `None` for other operations.
fn message(case: &Case, rank: u32, program: &Program, index: usize) -> Option<((u32, u32, u32), Vec<Wire>)> {
    let op = &program.ops[index];
    match &op.kind {
        OpKind::Send { src, to } => Some(((rank, to.0, op.edge), wire_sizes(case, rank, program, src))),
        OpKind::Recv { dst, from } | OpKind::RecvReduce { dst, from, .. } => {
            Some(((from.0, rank, op.edge), wire_sizes(case, rank, program, dst)))
        }
        OpKind::Copy { .. } | OpKind::Reduce { .. } | OpKind::Combine { .. } => None,
    }
}

/// Finds the other end of each send and receive.
fn match_messages(case: &Case, programs: &[Program], first: &[u32]) -> Result<Vec<u32>, Violation> {
    let total = first[first.len() - 1] as usize;
    let mut sends: HashMap<(u32, u32, u32), u32> = HashMap::new();
    let mut partner = vec![NONE; total];
    let each = |wanted: bool, visit: &mut dyn FnMut(usize, usize) -> Result<(), Violation>| {
        for (rank, program) in programs.iter().enumerate() {
            for (index, op) in program.ops.iter().enumerate() {
                let is_message = receives(&op.kind) || matches!(op.kind, OpKind::Send { .. });
                if is_message && receives(&op.kind) == wanted {
                    visit(rank, index).map_err(|why| why.at(rank as u32, index, &op.kind))?;
                }
            }
        }
        Ok::<(), Violation>(())
    };
    let end = |rank: usize, index: usize| message(case, rank as u32, &programs[rank], index);
    each(false, &mut |rank, index| {
        if let Some((key, _)) = end(rank, index)
            && sends.insert(key, first[rank] + index as u32).is_some()
        {
            return Err(Violation::new("two messages have the same number"));
        }
        Ok(())
    })?;
    each(true, &mut |rank, index| {
        let Some((key, expected)) = end(rank, index) else { return Ok(()) };
        let Some(send) = sends.remove(&key) else {
            return Err(Violation::new("receives a message that no rank sends"));
        };
        let sender = key.0 as usize;
        let sent = end(sender, (send - first[sender]) as usize).map(|(_, sizes)| sizes);
        if sent.as_ref() != Some(&expected) {
            return Err(Violation::new(format!("expects sizes {expected:?}, got {sent:?}")));
        }
        let recv = first[rank] + index as u32;
        partner[send as usize] = recv;
        partner[recv as usize] = send;
        Ok(())
    })?;
    each(false, &mut |rank, index| match partner[first[rank] as usize + index] {
        NONE => Err(Violation::new("sends a message that no rank receives")),
        _ => Ok(()),
    })?;
    Ok(partner)
}

/// Checks that every message among the given ranks has two ends with the same sizes.
pub(super) fn check_messages(case: &Case, ranks: &[u32], programs: &[Program]) -> Result<(), Violation> {
    let mut ends: HashMap<(u32, u32, u32), Vec<Wire>> = HashMap::new();
    for wanted in [false, true] {
        for (&rank, program) in ranks.iter().zip(programs) {
            for (index, op) in program.ops.iter().enumerate().filter(|(_, op)| receives(&op.kind) == wanted) {
                let Some((key, sizes)) = message(case, rank, program, index) else { continue };
                let peer = if wanted { key.0 } else { key.1 };
                if !ranks.contains(&peer) {
                    continue;
                }
                let ok = if wanted { ends.remove(&key) == Some(sizes) } else { ends.insert(key, sizes).is_none() };
                if !ok {
                    return Err(Violation::new("no matching message of these sizes").at(rank, index, &op.kind));
                }
            }
        }
    }
    match ends.keys().next() {
        None => Ok(()),
        Some((from, to, edge)) => {
            Err(Violation::new(format!("message {edge} from rank {from} to rank {to} has no receiver")))
        }
    }
}

/// Sets of earlier operations of one rank, with one bit per operation.
struct Before {
    words: usize,
    /// The operations that are complete before the operation begins.
    complete: Vec<u64>,
    /// The operations that are ahead of the operation byte by byte.
    stream: Vec<u64>,
}

impl Before {
    fn new(program: &Program) -> Before {
        let words = program.ops.len().div_ceil(64);
        let mut before =
            Before { words, complete: vec![0; words * program.ops.len()], stream: vec![0; words * program.ops.len()] };
        for (index, op) in program.ops.iter().enumerate() {
            let (from, row) = (index * words, index * words);
            for dep in &op.deps {
                let on = dep.on as usize;
                for word in 0..words {
                    let complete = before.complete[on * words + word];
                    let mut stream = before.stream[on * words + word];
                    stream |= if on / 64 == word { 1 << (on % 64) } else { 0 };
                    if dep.stream {
                        before.complete[row + word] |= complete;
                        before.stream[row + word] |= stream;
                    } else {
                        before.complete[from + word] |= complete | stream;
                    }
                }
            }
        }
        before
    }

    fn has(&self, set: &[u64], op: u32, earlier: u32) -> bool {
        set[op as usize * self.words + earlier as usize / 64] >> (earlier % 64) & 1 == 1
    }
}

/// The past accesses to one chunk in one rank's program.
#[derive(Clone, Default)]
struct Past {
    /// The last write, and the position of the chunk in the written payload.
    writer: Option<(Access, usize)>,
    /// The reads since the last write.
    readers: Vec<Access>,
}

/// An operation and the index of one of its accesses: reads first, then the write.
type Access = (u32, usize);

/// Checks that every two accesses to the same memory are ordered, if one of them writes. Either the earlier operation
/// is complete before the later one begins. Or both go through the same payload, and the later one follows byte by
/// byte. Within an operation, written memory may only be read at the same position.
pub(super) fn check_hazards(places: &Places, rank: u32, program: &Program) -> Result<(), Violation> {
    let before = Before::new(program);
    let mut chunks = Chunks::default();
    for (index, op) in (0u32..).zip(&program.ops) {
        check_op(places, program, &before, &mut chunks, index).map_err(|why| why.at(rank, index as usize, &op.kind))?;
    }
    Ok(())
}

fn check_op(
    places: &Places,
    program: &Program,
    before: &Before,
    chunks: &mut Chunks,
    index: u32,
) -> Result<(), Violation> {
    let span = |(op, access): Access| program.ops[op as usize].kind.access(access as u32);
    let check = |earlier: Access, access: usize| {
        let same = || match (span(earlier), span((index, access))) {
            (Some(a), Some(b)) => places.same(a, b),
            (None, _) | (_, None) => false,
        };
        let ordered =
            before.has(&before.complete, index, earlier.0) || (before.has(&before.stream, index, earlier.0) && same());
        if ordered { Ok(()) } else { Err(Violation::new(format!("races with operation {}", earlier.0))) }
    };
    let kind = &program.ops[index as usize].kind;
    let reads = kind.reads();
    for (access, span) in reads.iter().enumerate() {
        for (buf, chunk) in span.chunks() {
            if let Some((writer, _)) = chunks.at(places.place(buf, chunk)).writer {
                check(writer, access)?;
            }
        }
    }
    for (access, span) in (reads.len()..).zip(kind.writes()) {
        for (position, (buf, chunk)) in span.chunks().enumerate() {
            let past = chunks.at(places.place(buf, chunk));
            if let Some((writer, _)) = past.writer {
                if writer.0 == index {
                    return Err(Violation::new("writes a chunk twice"));
                }
                check(writer, access)?;
            }
            past.readers.iter().try_for_each(|&reader| check(reader, access))?;
            *past = Past { writer: Some(((index, access), position)), readers: Vec::new() };
        }
    }
    for (access, span) in reads.iter().enumerate() {
        for (position, (buf, chunk)) in span.chunks().enumerate() {
            let past = chunks.at(places.place(buf, chunk));
            match past.writer {
                Some((writer, written)) if writer.0 == index && written != position => {
                    return Err(Violation::new("overwrites an operand that it has not read yet"));
                }
                // This operation reads the chunk before it writes it, byte by byte. Accesses after the write are also
                // after this read.
                Some((writer, _)) if writer.0 == index => {}
                Some(_) | None => past.readers.push((index, access)),
            }
        }
    }
    Ok(())
}

/// The past of each chunk.
#[derive(Default)]
struct Chunks([Vec<Past>; Buf::COUNT]);

impl Chunks {
    fn at(&mut self, (buf, chunk): (Buf, u32)) -> &mut Past {
        let chunks = &mut self.0[buf as usize];
        if chunks.len() <= chunk as usize {
            chunks.resize(chunk as usize + 1, Past::default());
        }
        &mut chunks[chunk as usize]
    }
}
