//! Repaired engines give correct results for all ranks, counts, roots, types and protocols. Faithful engines reproduce the table of hazards.

use crate::support::world::{Ended, Settings, World};
use accl_cclo::call::{Descriptor, Operation};
use accl_cclo::memory_map::{DataType, Network, ReduceFunction};
use accl_cclo::return_code::ReturnCode;
use accl_emulator::Faithful;

const DTYPES: [DataType; 5] = [DataType::F16, DataType::F32, DataType::F64, DataType::I32, DataType::I64];
const COLLECTIVES: [Operation; 8] = [
    Operation::Broadcast,
    Operation::Scatter,
    Operation::Gather,
    Operation::Reduce,
    Operation::AllGather,
    Operation::AllReduce,
    Operation::ReduceScatter,
    Operation::AllToAll,
];
const GOOD: Ended = Some(ReturnCode(0));

/// Returns small integers, whose sums are exact in every type.
fn value(rank: u32, index: u32) -> u32 {
    (rank * 7 + index * 3) % 11 + 1
}

fn element(dtype: DataType, value: u32) -> Vec<u8> {
    match dtype {
        DataType::Bytes => vec![value as u8],
        DataType::F16 => half::f16::from_f32(value as f32).to_le_bytes().to_vec(),
        DataType::F32 => (value as f32).to_le_bytes().to_vec(),
        DataType::F64 => f64::from(value).to_le_bytes().to_vec(),
        DataType::I32 => (value as i32).to_le_bytes().to_vec(),
        DataType::I64 => i64::from(value).to_le_bytes().to_vec(),
    }
}

fn elements(dtype: DataType, count: u32, value: impl Fn(u32) -> u32) -> Vec<u8> {
    (0..count).flat_map(|index| element(dtype, value(index))).collect()
}

/// Returns how many elements a rank contributes, and its expected result; `None` if it has no result.
fn expected(call: &Descriptor, dtype: DataType, world: u32, rank: u32) -> (u32, Option<Vec<u8>>) {
    let count = call.count;
    let is_root = rank == call.root;
    let function = ReduceFunction::from_number(call.function).unwrap();
    let reduced = |index: u32| {
        let all = (0..world).map(|rank| value(rank, index));
        match function {
            ReduceFunction::Sum => all.sum(),
            ReduceFunction::Max => all.max().unwrap(),
        }
    };
    let block = |rank: u32, at: u32| move |index: u32| value(rank, at * count + index);
    let all_of = |each: &dyn Fn(u32) -> Vec<u8>| (0..world).flat_map(each).collect::<Vec<u8>>();
    match call.operation {
        Operation::Broadcast => (count, Some(elements(dtype, count, block(call.root, 0)))),
        Operation::Scatter => (count * world, Some(elements(dtype, count, block(call.root, rank)))),
        Operation::Gather => {
            (count, is_root.then(|| all_of(&|from| elements(dtype, count, |index| value(from, index)))))
        }
        Operation::AllGather => (count, Some(all_of(&|from| elements(dtype, count, |index| value(from, index))))),
        Operation::Reduce => (count, is_root.then(|| elements(dtype, count, reduced))),
        Operation::AllReduce => (count, Some(elements(dtype, count, reduced))),
        Operation::ReduceScatter => {
            (count * world, Some(elements(dtype, count, |index| reduced(rank * count + index))))
        }
        Operation::AllToAll => (count * world, Some(all_of(&|from| elements(dtype, count, block(from, rank))))),
        other => panic!("{other:?} is no collective"),
    }
}

struct MatrixCase {
    operation: Operation,
    dtype: DataType,
    function: ReduceFunction,
    count: u32,
    root: u32,
}

/// Runs a collective. Returns how it ended on each rank, and whether the rank has the expected result.
fn run(world: &mut World, settings: &Settings, case: &MatrixCase) -> Vec<(Ended, bool)> {
    let call = Descriptor {
        root: if case.operation.row().has_root { case.root } else { 0 },
        function: case.function.number(),
        ..world.call(case.operation, case.dtype, case.count)
    };
    for rank in 0..settings.world {
        let (given, _) = expected(&call, case.dtype, settings.world, rank);
        world.fill(rank, &elements(case.dtype, given, |index| value(rank, index)));
    }
    let ended = world.run(&vec![call; settings.world as usize]);
    let ranks = 0..settings.world;
    let are_right = ranks.map(|rank| {
        let (given, wanted) = expected(&call, case.dtype, settings.world, rank);
        let Some(wanted) = wanted else { return true };
        let kept = elements(case.dtype, given, |index| value(rank, index));
        match case.operation {
            Operation::Broadcast => world.source(rank, wanted.len()) == wanted,
            _ => world.result(rank, wanted.len()) == wanted && world.source(rank, kept.len()) == kept,
        }
    });
    ended.into_iter().zip(are_right.collect::<Vec<_>>()).collect()
}

/// Returns counts around each limit.
fn counts(settings: &Settings, dtype: DataType) -> Vec<u32> {
    let (world, bytes) = (settings.world, dtype.size_bytes());
    let around = |count: u32| [count - 1, count, count + 1];
    let mut counts = vec![1, world.saturating_sub(1).max(1), world, world + 1];
    counts.extend(around(settings.rx_bytes / bytes));
    counts.extend(around(settings.max_eager / bytes));
    counts.extend(around(settings.max_rendezvous / bytes / world));
    counts.extend(around(settings.max_rendezvous / bytes / world / world));
    counts.sort_unstable();
    counts.dedup();
    counts
}

/// Returns the number of bytes written into one spare buffer: by one rank, or by all ranks if the sum is flat.
fn spare_bytes(case: &MatrixCase, world: u32, is_flat: bool) -> u32 {
    let bytes = case.count * case.dtype.size_bytes() * if is_flat { world } else { 1 };
    match case.operation {
        Operation::Reduce | Operation::AllReduce => bytes,
        Operation::ReduceScatter => world * bytes,
        _ => 0,
    }
}

#[test]
fn repaired_engines_do_what_was_asked() {
    let mut cases = 0;
    for network in [Network::Udp, Network::Tcp, Network::Rdma] {
        for ranks in 1..=5 {
            for (is_host, is_flat) in [(false, true), (true, true), (false, false)] {
                let settings =
                    Settings { is_host, flat_ranks: if is_flat { ranks } else { 1 }, ..Settings::new(network, ranks) };
                let mut world = World::new(settings);
                for (index, operation) in COLLECTIVES.into_iter().enumerate() {
                    let dtype = DTYPES[(index + ranks as usize) % DTYPES.len()];
                    for count in counts(&settings, dtype) {
                        let roots = if operation.row().has_root { ranks } else { 1 };
                        for root in 0..roots {
                            let function = if count % 2 == 0 { ReduceFunction::Sum } else { ReduceFunction::Max };
                            let case = MatrixCase { operation, dtype, function, count, root };
                            let is_large = count * dtype.size_bytes() > settings.max_eager;
                            let overflows = spare_bytes(&case, ranks, is_flat) > settings.max_rendezvous;
                            let is_refused = network == Network::Rdma && ranks > 1 && is_large && overflows;
                            let place = format!(
                                "{network:?}, {ranks} ranks, host {is_host}, flat {is_flat}, {operation:?} of {count} {dtype:?} root {root}"
                            );
                            for (rank, (ended, is_right)) in run(&mut world, &settings, &case).into_iter().enumerate() {
                                if is_refused {
                                    assert_eq!(ended, Some(ReturnCode(1 << 18)), "{place}: rank {rank}");
                                } else {
                                    assert_eq!((ended, is_right), (GOOD, true), "{place}: rank {rank}");
                                }
                            }
                            cases += 1;
                        }
                    }
                }
            }
        }
    }
    assert!(cases > 3000, "{cases}");
}

#[test]
fn every_type_is_added_and_compared() {
    for network in [Network::Udp, Network::Rdma] {
        for dtype in DTYPES {
            for function in [ReduceFunction::Sum, ReduceFunction::Max] {
                for operation in [Operation::Reduce, Operation::AllReduce, Operation::ReduceScatter] {
                    for count in [3, 300] {
                        let settings = Settings::new(network, 3);
                        let case = MatrixCase { operation, dtype, function, count, root: 1 };
                        let ended = run(&mut World::new(settings), &settings, &case);
                        let is_refused = spare_bytes(&case, 3, true) > settings.max_rendezvous;
                        let is_good = ended.iter().all(|ended| *ended == (GOOD, true));
                        assert!(
                            is_good || is_refused,
                            "{network:?} {operation:?} of {count} {dtype:?} {function:?}: {ended:?}"
                        );
                    }
                }
            }
        }
    }
}

/// Returns the outcome of a case on faithful engines: right, wrong without an error, an error, or a hang.
fn faithful(hazard: u8, settings: Settings, case: &MatrixCase) -> &'static str {
    let settings = Settings { faithful: Faithful::default().with(hazard), ..settings };
    let ended = run(&mut World::new(settings), &settings, case);
    match () {
        () if ended.iter().any(|(ended, _)| ended.is_none()) => "hangs",
        () if ended.iter().any(|(ended, _)| *ended != GOOD) => "an error",
        () if ended.iter().any(|(_, is_right)| !is_right) => "wrong",
        () => "right",
    }
}

fn case(operation: Operation, count: u32, root: u32) -> MatrixCase {
    MatrixCase { operation, dtype: DataType::F32, function: ReduceFunction::Sum, count, root }
}

#[test]
fn the_last_share_of_an_eager_all_reduce_that_is_empty_hangs_it() {
    for (ranks, count, how) in [
        (2, 1, "hangs"),
        (3, 2, "hangs"),
        (3, 4, "hangs"),
        (5, 16, "hangs"),
        (2, 2, "right"),
        (3, 3, "right"),
        (3, 5, "right"),
    ] {
        let case = case(Operation::AllReduce, count, 0);
        assert_eq!(faithful(1, Settings::new(Network::Udp, ranks), &case), how, "{count} of {ranks}");
    }
}

#[test]
fn a_message_larger_than_the_eager_ones_hangs_over_streams_and_datagrams() {
    for network in [Network::Udp, Network::Tcp] {
        for (count, how) in [(256, "right"), (257, "hangs")] {
            assert_eq!(faithful(2, Settings::new(network, 2), &case(Operation::Broadcast, count, 0)), how);
        }
    }
}

#[test]
fn a_rendezvous_gather_hangs_at_a_root_between_others() {
    for (root, how) in [(0, "right"), (1, "hangs"), (2, "right")] {
        assert_eq!(faithful(3, Settings::new(Network::Rdma, 3), &case(Operation::Gather, 300, root)), how);
    }
}

#[test]
fn a_binomial_sum_of_a_power_of_two_ranks_is_not_written() {
    for (ranks, how) in [(2, "wrong"), (3, "right"), (4, "wrong"), (5, "right")] {
        let settings = Settings { flat_ranks: 1, ..Settings::new(Network::Rdma, ranks) };
        assert_eq!(faithful(4, settings, &case(Operation::Reduce, 300, 0)), how, "{ranks} ranks");
        assert_eq!(faithful(4, settings, &case(Operation::AllReduce, 300, 0)), how, "{ranks} ranks");
    }
}

#[test]
fn contributions_larger_than_a_spare_buffer_overwrite_what_lies_behind() {
    // Three ranks contribute 12 KB each, and spare buffers have 16 KiB. The slot of rank 2 reaches into spare buffer 3, which the first sum
    // overwrites.
    let settings = Settings::new(Network::Rdma, 3);
    assert_eq!(faithful(5, settings, &case(Operation::Reduce, 3000, 0)), "wrong");
    assert_eq!(faithful(5, settings, &case(Operation::Reduce, 1365, 0)), "right");
}

#[test]
fn a_rendezvous_reduce_scatter_overwrites_the_source_of_rank_0() {
    let settings = Settings::new(Network::Rdma, 2);
    assert_eq!(faithful(6, settings, &case(Operation::ReduceScatter, 300, 0)), "wrong");
    assert_eq!(faithful(6, settings, &case(Operation::ReduceScatter, 200, 0)), "right");
}

#[test]
fn a_receiver_of_any_tag_takes_no_named_one() {
    let tags = |faithful: Faithful, sent: u32, wanted: u32| {
        let settings = Settings { faithful, ..Settings::new(Network::Udp, 2) };
        let mut world = World::new(settings);
        world.fill(0, &elements(DataType::F32, 4, |index| index));
        world.fill(1, &[]);
        let send = Descriptor { root: 1, tag: sent, ..world.call(Operation::Send, DataType::F32, 4) };
        let recv = Descriptor { root: 0, tag: wanted, ..world.call(Operation::Recv, DataType::F32, 4) };
        world.run(&[send, recv])
    };
    let any = accl_cclo::call::ANY_TAG;
    let seventh = Faithful::default().with(7);
    assert_eq!(tags(seventh, 7, 7), [GOOD, GOOD]);
    assert_eq!(tags(seventh, any, 7), [GOOD, GOOD]);
    assert_eq!(tags(seventh, 7, any), [GOOD, None]);
    assert_eq!(tags(Faithful::default(), 7, any), [GOOD, GOOD]);
    assert_eq!(tags(Faithful::default(), 7, 8), [GOOD, None]);
}

#[test]
fn limits_that_firmware_refuses_are_refused_with_its_codes() {
    use accl_cclo::call::ConfigFunction;
    let mut world = World::new(Settings::new(Network::Udp, 1));
    for (function, value, code) in [
        (ConfigFunction::MaxEagerBytes, 64, ReturnCode::EAGER_TOO_SMALL),
        (ConfigFunction::MaxRendezvousBytes, 1024, ReturnCode::RENDEZVOUS_TOO_SMALL),
    ] {
        assert_eq!(world.run(&[Descriptor::config(function, value)]), [Some(code)]);
    }
    let unknown = Descriptor { function: 9, ..Descriptor::new(Operation::Config) };
    assert_eq!(world.run(&[unknown]), [Some(ReturnCode::NOT_IMPLEMENTED)]);
}
