//! Every algorithm of the table moves real bytes through whole worlds in one process; oracles give the expected
//! results.

use accl_schedule::{ALGORITHMS, Algorithm, Topology};
use accl_testkit::{Fabric, Member, World, WorldOptions, every_transport};
use accl_types::{Collective, ReduceOp};

const WORLDS: &[u32] = &[1, 2, 3, 4, 5, 8];
/// Element counts for segments of 1 KiB: none, one, fewer than ranks, some segments and a rest, many segments.
const COUNTS: &[usize] = &[0, 1, 3, 1000, 20_011];

/// Contribution of rank `rank` at `index`: small integers, so that sums are exact in every order.
fn value(rank: usize, index: usize) -> f32 {
    ((rank * 31 + index * 7) % 97) as f32
}

fn input(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|index| value(rank, index)).collect()
}

fn sum(world: usize, index: usize) -> f32 {
    (0..world).map(|rank| value(rank, index)).sum()
}

/// Uneven block lengths that add up to about `count`.
fn uneven(world: usize, count: usize) -> Vec<usize> {
    (0..world).map(|rank| count / world + rank % 3 * usize::from(count > 0)).collect()
}

fn check(member: &Member, algorithm: &Algorithm, count: usize) {
    let (rank, world) = (member.rank, member.world);
    let what = format!("{} {}, world {world}, rank {rank}, count {count}", algorithm.collective, algorithm.name);
    let done = |result: accl_types::Result<()>| result.unwrap_or_else(|error| panic!("{what}: {error}"));
    match algorithm.collective {
        Collective::AllReduce => {
            let mut data = input(rank, count);
            done(member.all_reduce(&mut data, ReduceOp::Sum));
            assert!((0..count).all(|i| data[i] == sum(world, i)), "{what}");
        }
        Collective::ReduceScatter => {
            let counts = if algorithm.needs_equal_blocks { vec![count; world] } else { uneven(world, count) };
            let data = input(rank, counts.iter().sum());
            let mut out = vec![-1.0; counts[rank]];
            done(member.reduce_scatter(&data, &counts, &mut out, ReduceOp::Sum));
            let first: usize = counts[..rank].iter().sum();
            assert!((0..out.len()).all(|i| out[i] == sum(world, first + i)), "{what}");
            assert_eq!(data, input(rank, data.len()), "{what}: the input was written");
        }
        Collective::AllGather => {
            let counts = if algorithm.needs_equal_blocks { vec![count; world] } else { uneven(world, count) };
            let mut out = vec![-1.0; counts.iter().sum()];
            done(member.all_gather(&input(rank, counts[rank]), &mut out, &counts));
            let expected: Vec<f32> = (0..world).flat_map(|r| input(r, counts[r])).collect();
            assert_eq!(out, expected, "{what}");
        }
        Collective::Broadcast => {
            for root in 0..world {
                let mut data = input(rank, count);
                done(member.broadcast(&mut data, root as u32));
                assert_eq!(data, input(root, count), "{what}, root {root}");
            }
        }
        Collective::Reduce => {
            for root in 0..world {
                let mut data = input(rank, count);
                done(member.reduce(&mut data, ReduceOp::Sum, root as u32));
                if rank == root {
                    assert!((0..count).all(|i| data[i] == sum(world, i)), "{what}, root {root}");
                } else {
                    assert_eq!(data, input(rank, count), "{what}, root {root}: written off the root");
                }
            }
        }
        Collective::Gather => {
            for root in 0..world {
                let mut out = vec![-1.0; if rank == root { count * world } else { 0 }];
                done(member.gather(&input(rank, count), &mut out, root as u32));
                if rank == root {
                    let expected: Vec<f32> = (0..world).flat_map(|r| input(r, count)).collect();
                    assert_eq!(out, expected, "{what}, root {root}");
                }
            }
        }
        Collective::Scatter => {
            for root in 0..world {
                let data = if rank == root { input(root, count * world) } else { Vec::new() };
                let mut out = vec![-1.0; count];
                done(member.scatter(&data, &mut out, root as u32));
                assert_eq!(out, input(root, count * world)[rank * count..][..count], "{what}, root {root}");
            }
        }
        Collective::AllToAll => {
            // Rank s sends rank d `count + s + 2 d` elements, or `count` where all blocks must be equal.
            let equal = algorithm.needs_equal_blocks;
            let len = |s: usize, d: usize| if equal || count == 0 { count } else { count + s + 2 * d };
            let block = |s: usize, d: usize| input(s * world + d, len(s, d));
            let data: Vec<f32> = (0..world).flat_map(|d| block(rank, d)).collect();
            let to: Vec<usize> = (0..world).map(|d| len(rank, d)).collect();
            let from: Vec<usize> = (0..world).map(|s| len(s, rank)).collect();
            let mut out = vec![-1.0; from.iter().sum()];
            done(member.all_to_all(&data, &to, &mut out, &from, equal));
            let expected: Vec<f32> = (0..world).flat_map(|s| block(s, rank)).collect();
            assert_eq!(out, expected, "{what}");
        }
        Collective::Barrier => done(member.barrier()),
        Collective::Send | Collective::Recv => unreachable!("no schedules"),
    }
}

fn run_all(collective: Collective, make: impl Fn(WorldOptions) -> WorldOptions, worlds: &[u32]) {
    run_each(collective, make, worlds, |member, algorithm| {
        COUNTS.iter().for_each(|&count| check(member, algorithm, count));
    });
}

/// Runs the same with two lanes in addition to the first. The lanes do a part of each call that is large enough.
fn run_lanes(collective: Collective, fabric: Fabric) {
    let make = |options: WorldOptions| options.over(fabric).with("worker_count", "2").with("segment_bytes", "16KiB");
    run_each(collective, make, &[2, 3], |member, algorithm| {
        // Counts below the minimum part, just above two minimum parts, and with three minimum parts in each block.
        [1000, 131_100, 200_003].iter().for_each(|&count| check(member, algorithm, count));
        let snapshot = member.group.snapshot();
        let moved = snapshot.groups[0].lanes.iter().map(|lane| lane.bytes_sent + lane.bytes_received);
        let moved: Vec<u64> = moved.collect();
        // In an all_to_all, some ranks may give split sizes and others not, so it is not cut.
        let is_uneven = collective == Collective::AllToAll;
        let is_cut = collective != Collective::Barrier && !is_uneven;
        assert!(
            moved.len() == 3 && moved[1..].iter().all(|&bytes| (bytes > 0) == is_cut),
            "{}: {moved:?}",
            algorithm.name
        );
    });
}

fn run_each(
    collective: Collective,
    make: impl Fn(WorldOptions) -> WorldOptions,
    worlds: &[u32],
    run: impl Fn(&Member, &Algorithm) + Sync,
) {
    let mut tried = 0;
    for algorithm in ALGORITHMS.iter().filter(|row| row.collective == collective) {
        for &world in worlds {
            let options = make(WorldOptions::new(world).with("segment_bytes", "1KiB"))
                .with("algorithm", &format!("{collective}={}", algorithm.name));
            let hosts: Vec<u32> = options.hosts.iter().map(|host| host.parse().unwrap_or(0)).collect();
            let topology = if hosts.is_empty() { Topology::flat(world) } else { Topology::new(hosts) };
            if !(algorithm.applies)(world, &topology) {
                continue;
            }
            tried += 1;
            World::new(options).run("g", |member| run(&member, algorithm));
        }
    }
    assert!(tried > 0, "no algorithm of {collective} was tried");
}

macro_rules! every_algorithm {
    ($($test:ident = $collective:ident;)*) => {
        mod roomy {
            use super::*;
            $(#[test] fn $test() { run_all(Collective::$collective, |options| options, WORLDS); })*
        }
        /// Two frames per link and no eager window, so every wait for room and every grant occurs.
        mod cramped {
            use super::*;
            $(#[test] fn $test() {
                let cramped = |options: WorldOptions| options.over(Fabric::Loopback(2)).with("eager_bytes", "0");
                run_all(Collective::$collective, cramped, &[2, 3, 5]);
            })*
        }
        mod shm {
            use super::*;
            $(#[test] fn $test() { run_all(Collective::$collective, |options| options.over(Fabric::Shm), &[2, 3]); })*
        }
        mod tcp {
            use super::*;
            $(#[test] fn $test() { run_all(Collective::$collective, |options| options.over(Fabric::Tcp), &[2, 3]); })*
        }
        mod lanes_shm {
            use super::*;
            $(#[test] fn $test() { run_lanes(Collective::$collective, Fabric::Shm); })*
        }
        mod lanes_tcp {
            use super::*;
            $(#[test] fn $test() { run_lanes(Collective::$collective, Fabric::Tcp); })*
        }
        /// Transports that the engine does not know by itself.
        mod other_transports {
            use super::*;
            $(#[test] fn $test() {
                for name in every_transport().into_iter().filter(|name| !["shm", "tcp"].contains(name)) {
                    run_all(Collective::$collective, |options| options.over(Fabric::Over(name)), &[3]);
                }
            })*
        }
    };
}

every_algorithm! {
    all_reduce_sums = AllReduce;
    reduce_scatter_gives_each_rank_its_block = ReduceScatter;
    all_gather_gives_all_blocks_to_all = AllGather;
    broadcast_copies_the_root = Broadcast;
    reduce_sums_on_the_root_only = Reduce;
    gather_collects_on_the_root = Gather;
    scatter_deals_out_the_root = Scatter;
    all_to_all_transposes = AllToAll;
    barrier_returns = Barrier;
}

/// Two hosts of different size, given by host identities that the test sets.
#[test]
fn all_reduce_sums_over_uneven_hosts() {
    let hosts = |options: WorldOptions| {
        let world = options.world;
        WorldOptions { hosts: (0..world).map(|rank| (rank / 2).to_string()).collect(), ..options }
    };
    run_all(Collective::AllReduce, hosts, &[3, 4, 5]);
}

#[test]
fn all_ranks_end_with_the_same_bits_whatever_the_order_of_arrival() {
    for world in [2, 3, 5] {
        let results = World::new(WorldOptions::new(world).with("segment_bytes", "1KiB")).run("g", |member| {
            let mut rounds = Vec::new();
            for round in 0..8_usize {
                // The sum of these values depends on the order of additions.
                let mut data: Vec<f32> = (0..3000).map(|i| 1.0 / (1.0 + (i * 7 + member.rank * 13) as f32)).collect();
                if (round + member.rank) % 3 == 0 {
                    std::thread::yield_now();
                }
                member.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                rounds.push(data.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
            }
            rounds
        });
        for rank in 1..world as usize {
            assert_eq!(results[rank], results[0], "rank {rank} of {world}");
        }
        assert!(results[0].windows(2).all(|pair| pair[0] == pair[1]), "rounds differ in a world of {world}");
    }
}

#[test]
fn one_hundred_calls_outstanding_end_in_any_order() {
    World::new(WorldOptions::new(3).with("segment_bytes", "1KiB")).run("g", |member| {
        let mut buffers: Vec<Vec<f32>> = (0..100).map(|call| input(member.rank + call, 700)).collect();
        let calls: Vec<_> = buffers
            .iter_mut()
            .map(|data| {
                let desc = member.all_reduce_desc(data, ReduceOp::Sum, accl_engine::Mode::Async);
                member.group.submit(desc).unwrap()
            })
            .collect();
        for call in calls.iter().rev() {
            accl_testkit::finish(call).unwrap();
        }
        for (call, data) in buffers.iter().enumerate() {
            let expected = |i| (0..3).map(|rank| value(rank + call, i)).sum::<f32>();
            assert!((0..700).all(|i| data[i] == expected(i)), "call {call}");
        }
    });
}
