//! The checker refuses schedules that are wrong in one place.

use accl_schedule::check::{BlockSizes, Case, Report, check_programs};
use accl_schedule::{
    ALGORITHMS, Action, Algorithm, ChunkRange, Finish, OpKind, Order, Program, Schedule, Span, Topology,
};
use accl_types::{Collective, Rank};

const WORLDS: [u32; 6] = [2, 3, 4, 5, 6, 8];

/// Calls `each` for every row in each of the worlds above. Rooted collectives have a root in the middle.
fn for_each_case(mut each: impl FnMut(&Algorithm, &Case)) {
    for row in ALGORITHMS {
        for world in WORLDS {
            let topologies = [
                Topology::flat(world),
                Topology::new((0..world).map(|rank| rank * 2 / world).collect()),
                Topology::new((0..world).map(|rank| rank % 3).collect()),
            ];
            for topology in topologies.iter().filter(|topology| (row.applies)(world, topology)) {
                let blocks = if row.needs_equal_blocks { BlockSizes::Equal } else { BlockSizes::Different };
                let root = if row.collective.is_rooted() { Rank(world / 2) } else { Rank(0) };
                each(row, &Case { collective: row.collective, world, root, topology, blocks });
                if row.requires.is_empty() {
                    break;
                }
            }
        }
    }
}

/// Whether the checker accepts the programs, including their costs.
fn accepts(case: &Case, programs: &[Program], cost: &Report) -> bool {
    check_programs(case, programs).is_ok_and(|report| report == *cost)
}

/// Checks that every schedule that `mutate` derives from an action (given its schedule and index) is refused.
fn refuses(what: &str, mutate: impl Fn(&Case, &Schedule, usize) -> Vec<Schedule>) {
    let mut refused = 0;
    for_each_case(|row, case| {
        let programs = case.programs(row.build);
        let cost = check_programs(case, &programs).unwrap();
        for rank in 0..case.world {
            let request = case.request(rank);
            let schedule = (row.build)(&request);
            for index in 0..schedule.actions.len() {
                for mutant in mutate(case, &schedule, index) {
                    let mut programs = programs.clone();
                    programs[rank as usize] = mutant.clone().lower(&request);
                    assert!(
                        !accepts(case, &programs, &cost),
                        "{what} of action {index} of rank {rank} is not seen in {} {} world {}: {:?} became {:?}",
                        row.collective,
                        row.name,
                        case.world,
                        schedule.actions,
                        mutant.actions,
                    );
                    refused += 1;
                }
            }
        }
    });
    assert!(refused > 100, "only {refused} cases of {what}");
}

fn replaced(schedule: &Schedule, index: usize, action: Action) -> Vec<Schedule> {
    let mut mutant = schedule.clone();
    mutant.actions[index] = action;
    vec![mutant]
}

#[test]
fn a_dropped_action_is_refused() {
    refuses("loss", |case, schedule, index| {
        let fence = schedule.actions[index] == Action::Fence;
        if fence && (index + 1 == schedule.actions.len() || has_spare_fences(case)) {
            return Vec::new();
        }
        let mut mutant = schedule.clone();
        mutant.actions.remove(index);
        vec![mutant]
    });
}

#[test]
fn a_repeated_action_is_refused() {
    refuses("repetition", |_, schedule, index| match &schedule.actions[index] {
        Action::Fence | Action::Copy { .. } => Vec::new(),
        // Reducing once more into the same place is wrong only if the place is an operand.
        Action::Reduce { dst, srcs, .. } if !srcs.contains(dst) => Vec::new(),
        action => {
            let mut mutant = schedule.clone();
            mutant.actions.insert(index, action.clone());
            vec![mutant]
        }
    });
}

#[test]
fn another_peer_is_refused() {
    refuses("another peer", |case, schedule, index| {
        let next = |peer: Rank| Rank((peer.0 + 1) % case.world);
        let mutants = match schedule.actions[index].clone() {
            Action::Send { src, to } => vec![Action::Send { src, to: next(to) }],
            Action::Recv { dst, from } => vec![Action::Recv { dst, from: next(from) }],
            Action::RecvReduce { dst, local, from, order, finish } => {
                vec![Action::RecvReduce { dst, local, from: next(from), order, finish }]
            }
            Action::RecvCopySend { dst, from, to } => {
                let mut others = to.clone();
                others[0] = next(others[0]);
                vec![
                    Action::RecvCopySend { dst: dst.clone(), from: next(from), to },
                    Action::RecvCopySend { dst, from, to: others },
                ]
            }
            Action::RecvReduceSend { dst, local, from, to, order, finish } => vec![
                Action::RecvReduceSend { dst: dst.clone(), local: local.clone(), from: next(from), to, order, finish },
                Action::RecvReduceSend { dst, local, from, to: next(to), order, finish },
            ],
            Action::Copy { .. } | Action::Reduce { .. } | Action::Fence => Vec::new(),
        };
        mutants.into_iter().flat_map(|action| replaced(schedule, index, action)).collect()
    });
}

#[test]
fn another_order_of_operands_is_refused() {
    let flipped = |order| match order {
        Order::IncomingFirst => Order::LocalFirst,
        Order::LocalFirst => Order::IncomingFirst,
    };
    refuses("order", |_, schedule, index| match schedule.actions[index].clone() {
        Action::RecvReduce { dst, local, from, order, finish } => {
            replaced(schedule, index, Action::RecvReduce { dst, local, from, order: flipped(order), finish })
        }
        Action::RecvReduceSend { dst, local, from, to, order, finish } => {
            replaced(schedule, index, Action::RecvReduceSend { dst, local, from, to, order: flipped(order), finish })
        }
        Action::Reduce { dst, mut srcs, finish } => {
            srcs.swap(0, 1);
            replaced(schedule, index, Action::Reduce { dst, srcs, finish })
        }
        Action::Send { .. }
        | Action::Recv { .. }
        | Action::RecvCopySend { .. }
        | Action::Copy { .. }
        | Action::Fence => Vec::new(),
    });
}

#[test]
fn finishing_too_early_or_not_at_all_is_refused() {
    let flipped = |finish| match finish {
        Finish::No => Finish::Yes,
        Finish::Yes => Finish::No,
    };
    refuses("finish", |_, schedule, index| match schedule.actions[index].clone() {
        Action::RecvReduce { dst, local, from, order, finish } => {
            replaced(schedule, index, Action::RecvReduce { dst, local, from, order, finish: flipped(finish) })
        }
        Action::RecvReduceSend { dst, local, from, to, order, finish } => {
            let finish = flipped(finish);
            replaced(schedule, index, Action::RecvReduceSend { dst, local, from, to, order, finish })
        }
        Action::Reduce { dst, srcs, finish } => {
            replaced(schedule, index, Action::Reduce { dst, srcs, finish: flipped(finish) })
        }
        Action::Send { .. }
        | Action::Recv { .. }
        | Action::RecvCopySend { .. }
        | Action::Copy { .. }
        | Action::Fence => Vec::new(),
    });
}

#[test]
fn another_chunk_is_refused() {
    refuses("another chunk", |_, schedule, index| {
        let moved = |span: &Span| {
            let mut moved = Span::empty();
            for (at, ChunkRange { buf, first, len }) in span.ranges().iter().enumerate() {
                moved.push(*buf, if at == 0 { first + 1 } else { *first }, *len);
            }
            moved
        };
        let mutants = match schedule.actions[index].clone() {
            Action::Send { src, to } if !src.is_empty() => vec![Action::Send { src: moved(&src), to }],
            Action::Recv { dst, from } if !dst.is_empty() => vec![Action::Recv { dst: moved(&dst), from }],
            Action::Send { .. } | Action::Recv { .. } | Action::Fence => Vec::new(),
            Action::RecvReduce { dst, local, from, order, finish } => vec![
                Action::RecvReduce { dst: moved(&dst), local: local.clone(), from, order, finish },
                Action::RecvReduce { dst, local: moved(&local), from, order, finish },
            ],
            Action::RecvCopySend { dst, from, to } => vec![Action::RecvCopySend { dst: moved(&dst), from, to }],
            Action::RecvReduceSend { dst, local, from, to, order, finish } => {
                vec![Action::RecvReduceSend { dst, local: moved(&local), from, to, order, finish }]
            }
            Action::Copy { dst, src } => {
                vec![Action::Copy { dst: moved(&dst), src: src.clone() }, Action::Copy { dst, src: moved(&src) }]
            }
            Action::Reduce { dst, srcs, finish } => vec![Action::Reduce { dst: moved(&dst), srcs, finish }],
        };
        mutants.into_iter().flat_map(|action| replaced(schedule, index, action)).collect()
    });
}

#[test]
fn a_missing_dependency_is_refused() {
    let mut refused = 0;
    for_each_case(|row, case| {
        let programs = case.programs(row.build);
        let cost = check_programs(case, &programs).unwrap();
        for rank in 0..case.world as usize {
            for op in 0..programs[rank].ops.len() {
                for dep in 0..programs[rank].ops[op].deps.len() {
                    let mut programs = programs.clone();
                    let on = programs[rank].ops[op].deps.remove(dep).on;
                    let fence = row.name == "pairwise" || row.collective == Collective::Barrier;
                    // In a barrier, only the sent notifications depend on the received ones.
                    let is_notified = is_send(&programs[rank], op as u32) && !is_send(&programs[rank], on);
                    let spare = fence && (has_spare_fences(case) || !is_notified);
                    // A dependency that is implied by others is not missing.
                    if spare || comes_before(&programs[rank], on, op) {
                        continue;
                    }
                    assert!(
                        !accepts(case, &programs, &cost),
                        "{} {} world {} rank {rank}: {:?} without {on}",
                        row.collective,
                        row.name,
                        case.world,
                        programs[rank].ops[op]
                    );
                    refused += 1;
                }
            }
        }
    });
    assert!(refused > 1000, "only {refused} cases");
}

#[test]
fn streaming_behind_another_payload_is_refused() {
    let mut refused = 0;
    for_each_case(|row, case| {
        let programs = case.programs(row.build);
        if programs.iter().any(|program| program.ops.iter().any(|op| has_no_payload(&op.kind))) {
            return; // a barrier: all empty messages have the same length
        }
        for rank in 0..case.world as usize {
            for op in 0..programs[rank].ops.len() {
                for dep in 0..programs[rank].ops[op].deps.len() {
                    let mut programs = programs.clone();
                    let dep = &mut programs[rank].ops[op].deps[dep];
                    let fenced = row.name == "pairwise";
                    if std::mem::replace(&mut dep.stream, true) || fenced {
                        continue;
                    }
                    let on = dep.on;
                    let mut without = programs[rank].clone();
                    without.ops[op].deps.retain(|dep| dep.on != on);
                    if comes_before(&without, on, op) {
                        continue;
                    }
                    assert!(check_programs(case, &programs).is_err(), "{} {}: {op} on {on}", row.collective, row.name);
                    refused += 1;
                }
            }
        }
    });
    assert!(refused > 50, "only {refused} cases");
}

/// Whether fences only keep messages apart. This holds for all fences of an all_to_all. In a barrier whose world is not
/// a power of two, some messages repeat known facts.
fn has_spare_fences(case: &Case) -> bool {
    match case.collective {
        Collective::AllToAll => true,
        Collective::Barrier => !case.world.is_power_of_two(),
        Collective::AllReduce
        | Collective::ReduceScatter
        | Collective::AllGather
        | Collective::Broadcast
        | Collective::Reduce
        | Collective::Gather
        | Collective::Scatter
        | Collective::Send
        | Collective::Recv => false,
    }
}

fn is_send(program: &Program, op: u32) -> bool {
    matches!(program.ops[op as usize].kind, OpKind::Send { .. })
}

fn has_no_payload(kind: &OpKind) -> bool {
    kind.reads().iter().chain(kind.writes()).all(Span::is_empty)
}

/// Whether `earlier` can be reached from `op` along dependencies.
fn comes_before(program: &Program, earlier: u32, op: usize) -> bool {
    program.ops[op].deps.iter().any(|dep| dep.on == earlier || comes_before(program, earlier, dep.on as usize))
}

#[test]
fn a_message_that_waits_for_all_of_another_in_a_circle_is_refused() {
    // Two ranks exchange in place, which is correct if each may receive byte by byte after its own sending.
    let topology = Topology::flat(2);
    let case = Case {
        collective: Collective::AllReduce,
        world: 2,
        root: Rank(0),
        topology: &topology,
        blocks: BlockSizes::Different,
    };
    let row = accl_schedule::algorithms::find(Collective::AllReduce, "recursive_doubling").unwrap();
    let mut programs = case.programs(row.build);
    assert!(check_programs(&case, &programs).is_ok());
    for program in &mut programs {
        program.ops.iter_mut().flat_map(|op| &mut op.deps).for_each(|dep| dep.stream = false);
    }
    let why = check_programs(&case, &programs).unwrap_err();
    assert!(why.to_string().contains("waits in a cycle"), "{why}");
}
