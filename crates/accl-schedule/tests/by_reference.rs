//! Every row by reference, against the symbolic checker.

use accl_schedule::check::{BlockSizes, Case, check_equal, check_programs};
use accl_schedule::{ALGORITHMS, Algorithm, Buf, OpKind, Program, Span, Topology};
use accl_types::{Collective, Rank};

const WORLDS: std::ops::RangeInclusive<u32> = 1..=13;

fn topologies(world: u32) -> [Topology; 3] {
    [
        Topology::flat(world),
        Topology::new((0..world).map(|rank| rank * 2 / world).collect()),
        Topology::new((0..world).collect()),
    ]
}

/// Calls `each` with every row that moves data, in every small world, with some roots.
fn for_each_case(worlds: impl Iterator<Item = u32>, mut each: impl FnMut(&Algorithm, &Case)) {
    for world in worlds {
        for row in ALGORITHMS.iter().filter(|row| row.collective != Collective::Barrier) {
            for topology in topologies(world).iter().filter(|topology| (row.applies)(world, topology)) {
                let blocks = if row.needs_equal_blocks { BlockSizes::Equal } else { BlockSizes::Different };
                for root in [0, world - 1].into_iter().take(if row.collective.is_rooted() { 2 } else { 1 }) {
                    let case = Case { collective: row.collective, world, root: Rank(root), topology, blocks };
                    each(row, &case);
                }
            }
        }
    }
}

fn by_reference(row: &Algorithm, case: &Case) -> Vec<Program> {
    let plain = case.programs(row.build);
    (0..).zip(&plain).map(|(rank, program)| program.by_reference(&case.request(rank))).collect()
}

#[test]
fn every_row_reduces_by_reference_in_the_plain_order() {
    for_each_case(WORLDS, |row, case| {
        let [plain, report] = check_equal(case, &case.programs(row.build), &by_reference(row, case))
            .unwrap_or_else(|why| panic!("{} {} {case:?}: {why}", row.collective, row.name));
        assert_eq!(report.bytes, plain.bytes, "{} {} {case:?}", row.collective, row.name);
        assert_eq!(report.encodings, 0, "{} {} {case:?}", row.collective, row.name);
    });
}

/// Passes each operation of each rank's program to `mutate`, and checks that the resulting programs are refused.
fn refuses(what: &str, mutate: impl Fn(&Program, usize) -> Option<Program>) {
    let mut refused = 0;
    for_each_case(2..=5, |row, case| {
        let programs = by_reference(row, case);
        for (rank, op) in (0..programs.len()).flat_map(|rank| (0..programs[rank].ops.len()).map(move |op| (rank, op))) {
            let Some(mutant) = mutate(&programs[rank], op) else { continue };
            let mut programs = programs.clone();
            programs[rank] = mutant;
            let report = check_programs(case, &programs);
            assert!(report.is_err(), "{what}: {op} of rank {rank}, {} {} {case:?}", row.collective, row.name);
            refused += 1;
        }
    });
    assert!(refused > 100, "only {refused} cases of {what}");
}

fn is_signal(kind: &OpKind) -> bool {
    matches!(kind, OpKind::Send { src: span, .. } | OpKind::Recv { dst: span, .. } if *span == Span::empty())
}

#[test]
fn a_rank_that_leaves_before_the_others_have_read_is_refused() {
    refuses("a signal that does not wait for a read", |program, op| {
        let first = program.ops.iter().position(|op| is_signal(&op.kind))?;
        let reads = |op: usize| program.ops[op].kind.reads().iter().any(|span| span.ranges()[0].buf == Buf::Code);
        if op >= first || matches!(program.ops[op].kind, OpKind::Send { .. }) || !reads(op) {
            return None;
        }
        let mut mutant = program.clone();
        mutant.ops[first].deps.retain(|dep| dep.on as usize != op);
        Some(mutant)
    });
}

#[test]
fn a_program_with_one_barrier_at_its_end_is_refused() {
    for_each_case(2..=5, |row, case| {
        let mut programs = by_reference(row, case);
        for program in &mut programs {
            let signals = program.ops.iter().filter(|op| is_signal(&op.kind)).count();
            program.ops.truncate(program.ops.len() - signals / 2);
        }
        let why =
            check_programs(case, &programs).expect_err("a rank may have died before its memory was read").to_string();
        assert!(why.contains("to have lived when all had read"), "{} {} {case:?}: {why}", row.collective, row.name);
    });
}

#[test]
fn operands_in_another_order_are_refused() {
    refuses("reversed operands", |program, op| {
        let OpKind::Combine { srcs, .. } = &program.ops[op].kind else { return None };
        if srcs.len() < 2 {
            return None;
        }
        let mut mutant = program.clone();
        let OpKind::Combine { srcs, .. } = &mut mutant.ops[op].kind else { return None };
        srcs.reverse();
        Some(mutant)
    });
}
