//! Calls whose parts several lanes do have the same bits, and the same outcomes, as on one lane.
//!
//! `ACCL_TEST_WORKERS=2 cargo nextest run -p accl-engine` runs all other tests with calls that are cut into parts.

use std::sync::{Arc, Barrier};
use std::time::Duration;

use crate::calls::{bits_of, blocks, both_ways, data, encoded, encoding, max_min, options, rows};
use accl_engine::codec::Rounding;
use accl_engine::{Blocks, CallDesc, Mode, Residuals, TensorDesc};
use accl_testkit::{Fabric, Member, World, WorldOptions, finish};
use accl_types::config::WorkerCount;
use accl_types::{Collective, Dtype, ErrorKind, Rank, ReduceOp};

/// Elements that fill at least three parts of minimum size, and no multiple of a tile or a cache line.
const COUNT: usize = 220_013;

/// Creates a world in which each rank has `lanes` lanes.
fn world(mut options: WorldOptions, lanes: u32) -> World {
    options.config.worker_count = WorkerCount::Exactly(lanes - 1);
    // Ranks on hosts with different names share no memory.
    let fabric = if options.hosts.iter().all(|host| *host == options.hosts[0]) { Fabric::Shm } else { Fabric::Tcp };
    World::new(options.over(fabric))
}

fn bytes_by_lane(member: &Member) -> Vec<u64> {
    member.group.snapshot().groups[0].lanes.iter().map(|lane| lane.bytes_sent + lane.bytes_received).collect()
}

#[test]
fn encoded_sums_and_what_was_lost_have_the_same_bits_on_any_number_of_lanes() {
    for hosts in [&[0, 0][..], &[0, 0, 1]] {
        for algorithm in rows(Collective::AllReduce, hosts) {
            let results = [1, 2, 3].map(|lanes| {
                world(options(hosts, "all_reduce", algorithm), lanes).run("g", |member| {
                    let (kept, of_sums) = (vec![0.0_f32; COUNT], vec![0.0_f32; COUNT]);
                    let residuals = Residuals {
                        contributions: vec![kept.as_ptr() as usize],
                        sums: vec![of_sums.as_ptr() as usize],
                        ..Residuals::default()
                    };
                    let mut encoding = encoding(vec![both_ways(max_min(3, 64, Rounding::Stochastic), 5)]);
                    encoding.residuals = Some(Arc::new(residuals));
                    let mut bits = Vec::new();
                    for step in 0..3 {
                        encoding.step = step;
                        let mut mine = data(member.rank, COUNT, step);
                        crate::calls::all_reduce(&member, &mut mine, ReduceOp::Avg, &encoding);
                        bits.push([bits_of(&mine), bits_of(&kept), bits_of(&of_sums)]);
                    }
                    let moved = bytes_by_lane(&member);
                    assert!(moved.len() == lanes as usize && moved.iter().all(|&bytes| bytes > 0), "{moved:?}");
                    bits
                })
            });
            assert!(results[0] == results[1] && results[0] == results[2], "{algorithm}");
        }
    }
}

#[test]
fn encoded_blocks_have_the_same_bits_on_any_number_of_lanes() {
    let hosts = [0, 0, 0];
    for (collective, name) in [(Collective::AllGather, "all_gather"), (Collective::ReduceScatter, "reduce_scatter")] {
        for algorithm in rows(collective, &hosts) {
            let results = [1, 3].map(|lanes| {
                world(options(&hosts, name, algorithm), lanes).run("g", |member| {
                    let encoding = encoding(vec![both_ways(max_min(4, 128, Rounding::Stochastic), 2)]);
                    let (one, all) = (data(member.rank, COUNT, 3), data(member.rank, 3 * COUNT, 4));
                    let (input, output) = match collective {
                        Collective::AllGather => (blocks(&one, &[COUNT]), blocks(&all, &[COUNT; 3])),
                        _ => (blocks(&all, &[COUNT; 3]), blocks(&one, &[COUNT])),
                    };
                    member.call(encoded(collective, input, output, &encoding)).unwrap();
                    let moved = bytes_by_lane(&member);
                    assert!(moved.iter().all(|&bytes| bytes > 0), "{moved:?}");
                    (bits_of(&one), bits_of(&all))
                })
            });
            assert!(results[0] == results[1], "{algorithm}");
        }
    }
}

#[test]
fn a_group_has_as_many_lanes_as_each_of_its_ranks_and_small_calls_take_one() {
    let mut options = WorldOptions::new(2);
    options.config.worker_count = WorkerCount::Exactly(2);
    let world = World::new(options.over(Fabric::Tcp));
    world.engines[1].set_least_part_bytes(256 << 10);
    world.engines[0].set_least_part_bytes(256 << 10);
    world.run("g", |member| {
        member.all_reduce(&mut [1.0_f32; 1000], ReduceOp::Sum).unwrap();
        let moved = bytes_by_lane(&member);
        assert!(moved.len() == 3 && moved[0] > 0 && moved[1..] == [0, 0], "{moved:?}");
    });
}

/// Each rank is a world of its own with its own number of lanes.
#[test]
fn the_least_number_of_lanes_of_any_rank_counts() {
    for workers in [[0, 2], [2, 1], [63, 0]] {
        let worlds = workers.map(|workers| {
            let mut options = WorldOptions::new(1).over(Fabric::Shm);
            options.config.worker_count = WorkerCount::Exactly(workers);
            World::new(options)
        });
        let store = accl_testkit::MemoryStore::default();
        let engines = worlds.each_ref().map(|world| world.engines[0].clone());
        std::thread::scope(|scope| {
            for (rank, engine) in (0..).zip(&engines) {
                let store = &store;
                scope.spawn(move || {
                    let spec = accl_engine::GroupSpec {
                        name: "g".to_owned(),
                        rank: Rank(rank),
                        world: 2,
                        timeout: Duration::from_secs(30),
                        config: engine.config().clone(),
                        master: None,
                        global_ranks: Vec::new(),
                        role: accl_engine::GroupRole::Default,
                    };
                    let member = Member::new(engine.create_group(spec, store, &mut || false).unwrap());
                    let mut sum = vec![1.0_f32; COUNT];
                    member.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                    assert!(sum.iter().all(|&value| value == 2.0));
                    let lanes = workers.iter().min().unwrap() + 1;
                    assert_eq!(bytes_by_lane(&member).len(), lanes as usize, "{workers:?}");
                });
            }
        });
    }
}

/// Both ranks are in this process. By the built-in constants, eight cores reach a host's memory bandwidth.
#[test]
fn auto_gives_each_rank_a_lane_for_each_core_that_it_has_to_itself() {
    let mut options = WorldOptions::new(2).over(Fabric::Shm);
    options.config.worker_count = WorkerCount::Auto;
    let cores = std::thread::available_parallelism().unwrap().get();
    World::new(options).run("g", |member| {
        for _ in 0..3 {
            let mut sum = vec![1.0_f32; COUNT];
            member.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert!(sum.iter().all(|&value| value == 2.0));
        }
        assert_eq!(bytes_by_lane(&member).len(), (cores / 2).clamp(1, 4));
    });
}

#[test]
fn what_ends_a_group_ends_the_parts_of_its_calls_on_all_lanes() {
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        let mut options = WorldOptions::new(3).over(fabric);
        options.config.worker_count = WorkerCount::Exactly(2);
        let made = Barrier::new(3);
        let errors = World::new(options).run("g", |member| {
            let mut sums = vec![vec![1.0_f32; COUNT]; 4];
            if member.rank == 2 {
                // The other ranks are in the middle of their calls.
                made.wait();
                member.group.abort("the test wants it");
                return None;
            }
            let calls: Vec<_> = sums
                .iter_mut()
                .map(|sum| member.group.submit(member.all_reduce_desc(sum, ReduceOp::Sum, Mode::Async)).unwrap())
                .collect();
            made.wait();
            let errors: Vec<_> = calls.iter().map(|call| finish(call).unwrap_err()).collect();
            assert!(member.group.snapshot().groups[0].in_flight.is_empty(), "nothing touches the tensors any more");
            Some(errors)
        });
        for error in errors.into_iter().flatten().flatten() {
            let text = error.to_string();
            assert!(error.kind == ErrorKind::Aborted && text.contains("the test wants it"), "{text}");
        }
    }
}

#[test]
fn strided_tensors_are_packed_and_scaled_once_for_all_lanes() {
    for op in [ReduceOp::Sum, ReduceOp::PremulSum, ReduceOp::Avg] {
        let results = [1, 3].map(|lanes| {
            world(WorldOptions::new(2), lanes).run("g", |member| {
                let mut values = data(member.rank, 2 * COUNT, 9);
                let mut desc = CallDesc::new(Collective::AllReduce, Dtype::F32);
                (desc.op, desc.factor) = (op, if op == ReduceOp::PremulSum { 0.3 } else { 1.0 });
                let base = values.as_mut_ptr().cast();
                desc.outputs = Blocks::of(TensorDesc::strided(base, Dtype::F32, &[COUNT as i64], &[2]).unwrap());
                member.call(desc).unwrap();
                bits_of(&values)
            })
        });
        assert!(results[0] == results[1], "{op}");
    }
}

#[test]
fn a_deadline_that_is_set_later_counts_on_all_lanes_and_names_who_is_missing() {
    let mut options = WorldOptions::new(2).over(Fabric::Shm);
    options.config.worker_count = WorkerCount::Exactly(2);
    let over = Barrier::new(2);
    let errors = World::new(options).run("g", |member| {
        member.group.set_timeout(Duration::from_millis(300));
        let mut sum = vec![1.0_f32; COUNT];
        // The other rank does not come.
        let error = if member.rank == 0 { member.all_reduce(&mut sum, ReduceOp::Sum).err() } else { None };
        over.wait();
        error
    });
    let error = errors[0].as_ref().unwrap();
    let text = error.to_string();
    assert!(error.kind == ErrorKind::Timeout && text.contains("300ms") && text.contains("missing: rank 1"), "{text}");
}
