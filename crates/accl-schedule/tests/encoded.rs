//! Every row with encoded messages, against the symbolic checker.

use std::collections::HashMap;

use accl_schedule::algorithms::find;
use accl_schedule::check::{BlockSizes, Case, check_programs};
use accl_schedule::{ALGORITHMS, Algorithm, Buf, Encodes, OpKind, Program, Role, Span, Topology, encodes};
use accl_types::{Collective, Rank};

const WORLDS: std::ops::RangeInclusive<u32> = 1..=17;

/// Hosts of equal and of different sizes, contiguous and interleaved.
fn topologies(world: u32) -> Vec<Topology> {
    vec![
        Topology::flat(world),
        Topology::new((0..world).map(|rank| rank * 2 / world).collect()),
        Topology::new((0..world).map(|rank| rank / 4).collect()),
        Topology::new((0..world).map(|rank| rank % 3).collect()),
        Topology::new((0..world).map(|rank| u32::from(rank == 0)).collect()),
        Topology::new((0..world).collect()),
    ]
}

fn case<'a>(row: &Algorithm, topology: &'a Topology) -> Case<'a> {
    let blocks = if row.needs_equal_blocks { BlockSizes::Equal } else { BlockSizes::Different };
    Case { collective: row.collective, world: topology.world(), root: Rank(0), topology, blocks }
}

/// Calls `each` with every row that can encode in every small world.
fn for_each_case(mut each: impl FnMut(&Algorithm, &Case)) {
    for row in ALGORITHMS.iter().filter(|row| encodes(row.collective)) {
        for world in WORLDS {
            for topology in topologies(world).iter().filter(|topology| (row.applies)(world, topology)) {
                each(row, &case(row, topology));
            }
        }
    }
}

fn encoded(row: &Algorithm, case: &Case) -> Vec<Program> {
    let plain = case.programs(row.build);
    (0..case.world).zip(&plain).map(|(rank, program)| program.encoded(row, &case.request(rank))).collect()
}

#[test]
fn all_ranks_decode_the_same_version_in_every_row_that_says_so() {
    let mut most = HashMap::new();
    for_each_case(|row, case| {
        let plain = check_programs(case, &case.programs(row.build)).unwrap();
        let report = check_programs(case, &encoded(row, case));
        if row.encodes != Encodes::No {
            let report = report.unwrap_or_else(|why| panic!("{} {} {case:?}: {why}", row.collective, row.name));
            assert_eq!(report.bytes, plain.bytes, "{} {} {case:?}", row.collective, row.name);
            assert!(report.steps <= plain.steps, "{} {} {case:?}", row.collective, row.name);
            if row.encodes == Encodes::Twice && !row.composes_over_hosts() {
                assert!(report.encodings <= 2, "{} {} {case:?}: {}", row.collective, row.name, report.encodings);
            }
            let most = most.entry((row.collective.name(), row.name)).or_insert(0);
            *most = report.encodings.max(*most);
        } else if case.world > 2 {
            let why = report.expect_err("the row could say that it encodes").to_string();
            assert!(why.contains("same expression"), "{} {}: {why}", row.collective, row.name);
        }
    });
    for row in ALGORITHMS.iter().filter(|row| row.encodes == Encodes::Often) {
        assert!(most[&(row.collective.name(), row.name)] > 2, "{} {} need not be named", row.collective, row.name);
    }
}

/// Passes each operation of each rank's program to `mutate`, and checks that the resulting programs are refused.
fn refuses(what: &str, mutate: impl Fn(&Program, usize) -> Option<Program>) {
    let mut refused = 0;
    for_each_case(|row, case| {
        if row.encodes == Encodes::No || case.world > 6 {
            return;
        }
        let programs = encoded(row, case);
        for rank in 0..programs.len() {
            for op in 0..programs[rank].ops.len() {
                let Some(mutant) = mutate(&programs[rank], op) else { continue };
                let mut programs = programs.clone();
                programs[rank] = mutant;
                let report = check_programs(case, &programs);
                assert!(
                    report.is_err(),
                    "{what} of operation {op} of rank {rank}: {} {} {case:?}",
                    row.collective,
                    row.name
                );
                refused += 1;
            }
        }
    });
    assert!(refused > 100, "only {refused} cases of {what}");
}

/// The results and operands of a combination.
fn combination(program: &Program, op: usize) -> Option<(Vec<Span>, Vec<Span>)> {
    match &program.ops[op].kind {
        OpKind::Combine { dsts, srcs, .. } => Some((dsts.to_vec(), srcs.to_vec())),
        _ => None,
    }
}

#[test]
fn a_rank_that_keeps_better_values_than_it_sends_is_refused() {
    // The chunk of `Out` is computed from the operands instead of the encoded bytes.
    refuses("keeping", |program, op| {
        let (dsts, srcs) = combination(program, op).filter(|(dsts, _)| dsts.len() == 2)?;
        let OpKind::Combine { finish, pass, .. } = program.ops[op].kind else { return None };
        let mut mutant = program.clone();
        mutant.ops[op].kind = OpKind::Combine { dsts: dsts[..1].into(), srcs: srcs.clone().into(), finish, pass };
        let mut kept = mutant.ops[op].clone();
        kept.kind = OpKind::Combine { dsts: dsts[1..].into(), srcs: srcs.into(), finish, pass: 0 };
        for later in mutant.ops.iter_mut().flat_map(|later| &mut later.deps).filter(|dep| dep.on as usize > op) {
            later.on += 1;
        }
        mutant.ops.insert(op + 1, kept);
        Some(mutant)
    });
}

#[test]
fn a_contribution_that_is_left_out_is_refused() {
    refuses("loss", |program, op| {
        let (_, srcs) = combination(program, op).filter(|(_, srcs)| srcs.len() > 1)?;
        let mut mutant = program.clone();
        let OpKind::Combine { srcs: kept, .. } = &mut mutant.ops[op].kind else { return None };
        *kept = srcs[1..].into();
        Some(mutant)
    });
}

#[test]
fn a_relay_that_encodes_again_is_refused() {
    refuses("encoding again", |program, op| {
        let (dsts, srcs) = combination(program, op)?;
        if dsts.len() != 1 || srcs.len() != 1 || srcs[0].ranges()[0].buf != Buf::Code {
            return None;
        }
        let mut mutant = program.clone();
        mutant.codes.push(program.codes[srcs[0].ranges()[0].first as usize]);
        let OpKind::Combine { dsts, .. } = &mut mutant.ops[op].kind else { return None };
        dsts.insert(0, Span::chunk(Buf::Code, mutant.codes.len() as u32 - 1));
        Some(mutant)
    });
}

#[test]
fn another_role_is_refused() {
    refuses("another role", |program, op| {
        let span = match &program.ops[op].kind {
            OpKind::Send { src, .. } => src,
            OpKind::Recv { dst, .. } => dst,
            _ => return None,
        };
        let mut mutant = program.clone();
        let code = &mut mutant.codes[span.ranges()[0].first as usize];
        code.role = if code.role == Role::Reduce { Role::Result } else { Role::Reduce };
        Some(mutant)
    });
}

/// The operands of each sum that a rank computes, each as the rank that it came from.
fn sums(program: &Program, rank: u32) -> Vec<Vec<u32>> {
    let mut senders = vec![rank; program.codes.len()];
    for op in &program.ops {
        if let OpKind::Recv { dst, from } = &op.kind {
            senders[dst.ranges()[0].first as usize] = from.0;
        }
    }
    let of = |(buf, chunk): (Buf, u32)| if buf == Buf::Code { senders[chunk as usize] } else { rank };
    let sum = |op| combination(program, op).map(|(_, srcs)| srcs.iter().flat_map(Span::chunks).map(of).collect());
    (0..program.ops.len()).filter_map(sum).filter(|sum: &Vec<u32>| sum.len() > 1).collect()
}

#[test]
fn owners_and_one_shots_sum_in_the_order_of_ranks() {
    for world in 2..=9 {
        let topology = Topology::flat(world);
        for (collective, name) in [
            (Collective::AllReduce, "direct_two_phase"),
            (Collective::AllReduce, "direct"),
            (Collective::ReduceScatter, "direct"),
        ] {
            let row = find(collective, name).unwrap();
            for (rank, program) in (0..).zip(encoded(row, &case(row, &topology))) {
                assert_eq!(sums(&program, rank), [(0..world).collect::<Vec<_>>()], "{name} rank {rank} of {world}");
            }
        }
    }
}

#[test]
fn a_scatter_reduce_all_gather_encodes_each_chunk_twice() {
    let topology = Topology::flat(4);
    let row = find(Collective::AllReduce, "direct_two_phase").unwrap();
    for program in encoded(row, &case(row, &topology)) {
        let encoded = |op| combination(&program, op).filter(|(dsts, _)| dsts[0].ranges()[0].buf == Buf::Code);
        let passes: Vec<u32> = program
            .ops
            .iter()
            .enumerate()
            .filter(|(op, _)| encoded(*op).is_some())
            .map(|(_, op)| if let OpKind::Combine { pass, .. } = op.kind { pass } else { 0 })
            .collect();
        // A contribution to each of the other three ranks, and the sum of its own chunk.
        assert_eq!(passes, [0, 0, 0, 1]);
        let of = |role| program.codes.iter().filter(|code| code.role == role).count();
        assert_eq!((of(Role::IntraNode), of(Role::Reduce), of(Role::Result)), (0, 6, 4));
    }
}

#[test]
fn hosts_exchange_parts_of_sums_in_another_role_than_their_ranks() {
    let topology = Topology::new(vec![0, 0, 1, 1]);
    let row = find(Collective::AllReduce, "two_level").unwrap();
    for (rank, program) in (0..).zip(encoded(row, &case(row, &topology))) {
        for op in &program.ops {
            let (span, peer) = match &op.kind {
                OpKind::Send { src, to } => (src, to),
                OpKind::Recv { dst, from } => (dst, from),
                _ => continue,
            };
            let role = program.codes[span.ranges()[0].first as usize].role;
            let near = topology.host_of(*peer) == topology.host_of(Rank(rank));
            assert!(role == Role::Result || (role == Role::IntraNode) == near, "{role:?} between {rank} and {peer}");
        }
        let of = |role| program.codes.iter().any(|code| code.role == role);
        assert!(of(Role::IntraNode) && of(Role::Reduce) && of(Role::Result));
    }
}
