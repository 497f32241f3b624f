//! The buffers of each collective: their chunks, sizes, and contents before and after.
//!
//! Sizes are symbols: two chunks have the same size in every call exactly if their symbols are equal.

use accl_types::Collective;

use super::case::{BlockSizes, Case, Violation};
use crate::algorithms::Fraction;
use crate::ir::{Buf, Division, Role, Span};
use crate::program::{OpKind, Program};

/// A size as a symbol: pieces per block, the piece, and the block.
pub(super) type Size = (u32, u32, u32);

/// Number of blocks of `In` and `Out` on a rank.
pub(super) fn block_counts(case: &Case, rank: u32) -> (u32, u32) {
    let at_root = |blocks| if rank == case.root.0 { blocks } else { 0 };
    match case.collective {
        Collective::AllReduce => (1, 1),
        Collective::ReduceScatter => (case.world, 1),
        Collective::AllGather => (1, case.world),
        Collective::Broadcast => (0, 1),
        Collective::Reduce => (1, at_root(1)),
        Collective::Gather => (1, at_root(case.world)),
        Collective::Scatter => (at_root(case.world), 1),
        Collective::AllToAll => (case.world, case.world),
        Collective::Barrier | Collective::Send | Collective::Recv => (0, 0),
    }
}

/// Number of chunks of each buffer: `In`, `Out`, `Scratch`, `Code`.
pub(super) fn chunk_counts(case: &Case, rank: u32, program: &Program) -> [u32; Buf::COUNT] {
    let (ins, outs) = block_counts(case, rank);
    let own = [program.scratch.len() as u32, program.codes.len() as u32];
    [program.in_division.chunks(ins), program.out_division.chunks(outs), own[0], own[1]]
}

/// The size of a chunk.
pub(super) fn size(case: &Case, rank: u32, program: &Program, buf: Buf, chunk: u32) -> Size {
    let (division, buf) = match buf {
        Buf::In => (program.in_division, buf),
        Buf::Out => (program.out_division, buf),
        Buf::Scratch => {
            let (like, chunk) = program.scratch[chunk as usize];
            return size(case, rank, program, like, chunk);
        }
        Buf::Code => {
            let (like, chunk) = program.codes[chunk as usize].like;
            return size(case, rank, program, like, chunk);
        }
    };
    let pieces = division.pieces();
    let (block, piece) = (chunk / pieces, chunk % pieces);
    let is_input = buf == Buf::In;
    let of_block = match case.collective {
        Collective::AllReduce | Collective::Reduce | Collective::Broadcast => 0,
        Collective::Barrier | Collective::Send | Collective::Recv => 0,
        Collective::ReduceScatter | Collective::Scatter => {
            if is_input {
                block
            } else {
                rank
            }
        }
        Collective::AllGather | Collective::Gather => {
            if is_input {
                rank
            } else {
                block
            }
        }
        Collective::AllToAll => {
            if is_input {
                rank * case.world + block
            } else {
                block * case.world + rank
            }
        }
    };
    match case.blocks {
        BlockSizes::Equal => (pieces, piece, 0),
        BlockSizes::Different => (pieces, piece, of_block),
    }
}

/// The sizes of a payload, in elements.
pub(super) fn sizes(case: &Case, rank: u32, program: &Program, span: &Span) -> Vec<Size> {
    span.chunks().map(|(buf, chunk)| size(case, rank, program, buf, chunk)).collect()
}

/// The sizes of a message in bytes. The size of an encoded chunk also depends on its role.
pub(super) fn wire_sizes(case: &Case, rank: u32, program: &Program, span: &Span) -> Vec<(Size, Option<Role>)> {
    let role = |(buf, chunk): (Buf, u32)| (buf == Buf::Code).then(|| program.codes[chunk as usize].role);
    sizes(case, rank, program, span).into_iter().zip(span.chunks().map(role)).collect()
}

/// Checks that chunks exist, the spans of one operation have equal sizes, peers are other ranks, inputs are not
/// written, and divisions fit.
pub(super) fn check_shape(case: &Case, rank: u32, program: &Program) -> Result<(), Violation> {
    check_divisions(case, program).map_err(|Violation(why)| Violation(format!("rank {rank}: {why}")))?;
    let counts = chunk_counts(case, rank, program);
    for &(like, chunk) in program.scratch.iter().chain(program.codes.iter().map(|code| &code.like)) {
        let known = match like {
            Buf::In | Buf::Out => chunk < counts[like as usize],
            Buf::Scratch | Buf::Code => false,
        };
        if !known {
            return Err(Violation::new(format!(
                "rank {rank}: a chunk has the size of {like:?} {chunk}, which does not exist"
            )));
        }
    }
    for (index, op) in program.ops.iter().enumerate() {
        let check = || {
            let spans = op.kind.reads().iter().chain(op.kind.writes());
            for range in spans.clone().flat_map(|span| span.ranges()) {
                if range.len == 0 || range.first + range.len > counts[range.buf as usize] {
                    return Err(Violation::new(format!("{range:?} is not in the buffer")));
                }
            }
            let sizes: Vec<_> = spans.map(|span| sizes(case, rank, program, span)).collect();
            if sizes.windows(2).any(|pair| pair[0] != pair[1]) {
                return Err(Violation::new("operands differ in size"));
            }
            if op.kind.writes().iter().flat_map(|span| span.ranges()).any(|range| range.buf == Buf::In) {
                return Err(Violation::new("writes an input"));
            }
            match &op.kind {
                OpKind::Send { to: peer, .. }
                | OpKind::Recv { from: peer, .. }
                | OpKind::RecvReduce { from: peer, .. } => {
                    if peer.0 == rank || peer.0 >= case.world {
                        return Err(Violation::new("no such peer"));
                    }
                }
                OpKind::Reduce { srcs, .. } if srcs.len() < 2 => {
                    return Err(Violation::new("reduces fewer than two operands"));
                }
                OpKind::Combine { dsts, srcs, .. } if program.is_by_reference => check_by_reference(dsts, srcs)?,
                OpKind::Combine { dsts, srcs, .. } => check_combine(dsts, srcs)?,
                OpKind::Copy { .. } | OpKind::Reduce { .. } => {}
            }
            if op.deps.iter().any(|dep| dep.on as usize >= index) {
                return Err(Violation::new("depends on a later operation"));
            }
            for dep in op.deps.iter().filter(|dep| dep.stream) {
                let other = &program.ops[dep.on as usize].kind;
                let other = other.reads().iter().chain(other.writes()).next();
                if other.map(|span| self::sizes(case, rank, program, span)).as_ref() != sizes.first() {
                    return Err(Violation::new(format!("streams after operation {} of a different size", dep.on)));
                }
            }
            Ok(())
        };
        check().map_err(|why| why.at(rank, index, &op.kind))?;
    }
    Ok(())
}

/// Checks a combination: one chunk each from `In` or `Code`, into `Code`, `Out` or both. A chunk that is only decoded
/// is not encoded again.
fn check_combine(dsts: &[Span], srcs: &[Span]) -> Result<(), Violation> {
    let bufs = |spans: &[Span]| spans.iter().flat_map(|span| span.chunks()).map(|(buf, _)| buf).collect::<Vec<_>>();
    let (to, from) = (bufs(dsts), bufs(srcs));
    if dsts.len() != to.len() || srcs.len() != from.len() {
        return Err(Violation::new("combines a span of several chunks"));
    }
    let to_is_fit = matches!(to[..], [Buf::Code] | [Buf::Out] | [Buf::Code, Buf::Out]);
    if !to_is_fit || from.is_empty() || from.iter().any(|buf| !matches!(buf, Buf::In | Buf::Code)) {
        return Err(Violation::new("combines buffers that cannot be combined"));
    }
    if from == [Buf::Code] && to.contains(&Buf::Code) {
        return Err(Violation::new("encodes an unchanged chunk again"));
    }
    Ok(())
}

/// Checks a combination of a program by reference: it makes one chunk.
fn check_by_reference(dsts: &[Span], srcs: &[Span]) -> Result<(), Violation> {
    match dsts {
        [dst] if dst.chunk_count() == 1 && !srcs.is_empty() => Ok(()),
        _ => Err(Violation::new("makes another number of chunks than one")),
    }
}

/// Checks that both sides of a collective are divided equally, block by block.
fn check_divisions(case: &Case, program: &Program) -> Result<(), Violation> {
    let by_block = |division| matches!(division, Division::Blocks | Division::SplitBlocks { .. });
    let (input, output) = (program.in_division, program.out_division);
    let fits = match case.collective {
        Collective::AllReduce | Collective::Reduce => input == output,
        Collective::Broadcast | Collective::Barrier | Collective::Send | Collective::Recv => true,
        Collective::ReduceScatter | Collective::Scatter => by_block(input),
        Collective::AllGather | Collective::Gather => by_block(output),
        Collective::AllToAll => by_block(input) && by_block(output),
    };
    let alike = case.collective == Collective::Broadcast || input.pieces() == output.pieces();
    if fits && alike { Ok(()) } else { Err(Violation::new(format!("divisions {input:?} and {output:?} do not match"))) }
}

/// The contents that a chunk of `Out` must have at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// The reduction over all ranks of chunk `chunk` of `In`.
    Reduction {
        /// The chunk.
        chunk: u32,
    },
    /// The initial contents of chunk `chunk` on rank `rank`.
    Original {
        /// The rank.
        rank: u32,
        /// The chunk of its input.
        chunk: u32,
    },
}

/// Returns the contents that chunk `chunk` of `Out` must have at the end.
pub(super) fn wanted(case: &Case, rank: u32, program: &Program, chunk: u32) -> Wanted {
    let pieces = program.out_division.pieces();
    let (block, piece) = (chunk / pieces, chunk % pieces);
    let reduction = |chunk| match case.world {
        1 => Wanted::Original { rank: 0, chunk },
        _ => Wanted::Reduction { chunk },
    };
    let mine = rank * pieces + piece;
    match case.collective {
        Collective::AllReduce | Collective::Reduce => reduction(chunk),
        Collective::ReduceScatter => reduction(mine),
        Collective::AllGather | Collective::Gather => Wanted::Original { rank: block, chunk: piece },
        Collective::Broadcast => Wanted::Original { rank: case.root.0, chunk },
        Collective::Scatter => Wanted::Original { rank: case.root.0, chunk: mine },
        Collective::AllToAll => Wanted::Original { rank: block, chunk: mine },
        Collective::Barrier | Collective::Send | Collective::Recv => Wanted::Original { rank, chunk },
    }
}

/// The fraction that the busiest rank sends or receives, if all chunks have the same size.
pub(super) fn busiest(case: &Case, programs: &[Program]) -> Fraction {
    let mut largest = 0;
    let mut busiest = 0;
    for (rank, program) in (0..).zip(programs) {
        let [ins, outs, ..] = chunk_counts(case, rank, program);
        largest = largest.max(ins).max(outs);
        let (mut sent, mut received) = (0, 0);
        for op in &program.ops {
            match &op.kind {
                OpKind::Send { src, .. } => sent += src.chunk_count(),
                OpKind::Recv { dst, .. } | OpKind::RecvReduce { dst, .. } => received += dst.chunk_count(),
                OpKind::Copy { .. } | OpKind::Reduce { .. } | OpKind::Combine { .. } => {}
            }
        }
        busiest = busiest.max(sent).max(received);
    }
    Fraction::new(busiest, largest.max(1))
}
