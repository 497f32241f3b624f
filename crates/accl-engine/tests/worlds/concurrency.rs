//! Many threads, many groups, many calls: no thread sleeps without a driver, and no call waits for a periodic poll.

use std::time::{Duration, Instant};

use accl_engine::{Blocks, CallDesc, Mode};
use accl_testkit::{Fabric, Member, Rng, THRIFTY, World, WorldOptions, calls, every_transport, finish};
use accl_types::{Collective, Dtype, Rank, ReduceOp};

fn fabrics() -> impl Iterator<Item = Fabric> {
    every_transport().into_iter().chain([THRIFTY]).map(Fabric::Over).chain([Fabric::Loopback(3)])
}

fn world(size: u32, fabric: Fabric) -> World {
    let options = WorldOptions::new(size).over(fabric).with("segment_bytes", "1KiB").timeout(Duration::from_secs(30));
    let world = World::new(options);
    world.engines.iter().for_each(|engine| engine.without_tick());
    world
}

fn sum_ones(member: &Member, count: usize) {
    let mut data = vec![1.0_f32; count];
    member.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    assert!(data.iter().all(|&x| x == member.world as f32));
}

#[test]
fn threads_on_groups_of_their_own_do_not_disturb_each_other() {
    for fabric in fabrics() {
        let world = world(2, fabric);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let world = &world;
                scope.spawn(move || {
                    world.run(&format!("g{thread}"), |member| {
                        let mut rng = Rng::new(thread);
                        for _ in 0..60 {
                            sum_ones(&member, rng.below(3000) as usize);
                        }
                    });
                });
            }
        });
    }
}

#[test]
fn calls_on_several_groups_may_be_issued_in_different_orders() {
    for fabric in fabrics() {
        let world = world(3, fabric);
        // Each rank holds the same four groups and uses them in an order of its own.
        let groups: Vec<Vec<Member>> = (0..4).map(|g| world.run(&format!("g{g}"), |member| member)).collect();
        std::thread::scope(|scope| {
            for rank in 0..3 {
                let groups = &groups;
                scope.spawn(move || {
                    for round in 0..20 {
                        let mut buffers = vec![vec![1.0_f32; 2500]; 4];
                        let mut calls = Vec::new();
                        for (step, data) in buffers.iter_mut().enumerate() {
                            let member = &groups[(step + rank + round) % 4][rank];
                            let desc = member.all_reduce_desc(data, ReduceOp::Sum, Mode::Async);
                            calls.push(member.group.submit(desc).unwrap());
                        }
                        calls.iter().for_each(|call| finish(call).unwrap());
                        assert!(buffers.iter().flatten().all(|&x| x == 3.0), "round {round}, rank {rank}");
                    }
                });
            }
        });
    }
}

#[test]
fn asynchronous_calls_end_without_a_waiter() {
    for fabric in fabrics() {
        world(2, fabric).run("g", |member| {
            for count in [1, 5000, 100_000] {
                let mut data = vec![1.0_f32; count];
                let desc = member.all_reduce_desc(&mut data, ReduceOp::Sum, Mode::Async);
                let call = member.group.submit(desc).unwrap();
                let patience = Instant::now() + Duration::from_secs(20);
                while !call.is_done() {
                    assert!(Instant::now() < patience, "{count} elements over {fabric:?}");
                    std::thread::yield_now();
                }
                assert!(data.iter().all(|&x| x == 2.0));
            }
        });
    }
}

#[test]
fn many_calls_of_all_sizes_are_outstanding_together() {
    for fabric in fabrics() {
        // Default segments, so that frames which arrive before their call stay on the link for a while.
        let world = World::new(WorldOptions::new(3).over(fabric).timeout(Duration::from_secs(30)));
        world.engines.iter().for_each(|engine| engine.without_tick());
        world.run("g", |member| {
            let mut rng = Rng::new(7);
            let counts: Vec<usize> = (0..60).map(|_| [0, 1, 700, 20_000, 150_000][rng.below(5) as usize]).collect();
            let mut buffers: Vec<Vec<f32>> = counts.iter().map(|&count| vec![1.0; count]).collect();
            let mut calls = Vec::new();
            for (index, data) in buffers.iter_mut().enumerate() {
                if index % 20 == 7 * member.rank {
                    std::thread::park_timeout(Duration::from_millis(2));
                }
                let desc = member.all_reduce_desc(data, ReduceOp::Sum, Mode::Async);
                calls.push(member.group.submit(desc).unwrap());
            }
            // Rank 1 waits for the last call first.
            if member.rank == 1 {
                calls.reverse();
            }
            calls.iter().for_each(|call| finish(call).unwrap());
            assert!(buffers.iter().flatten().all(|&x| x == 3.0), "{fabric:?}, rank {}", member.rank);
        });
    }
}

#[test]
fn a_call_begins_although_an_earlier_one_waits_for_it() {
    for fabric in fabrics() {
        let world = world(2, fabric);
        world.run("g", |member| {
            let first = member.group.reserve_seqs(2).unwrap();
            let (mut sum, mut sent) = (vec![1.0_f32; 300_000], vec![member.rank as f32; 300_000]);
            let mut all_reduce = member.all_reduce_desc(&mut sum, ReduceOp::Sum, Mode::Async);
            all_reduce.seq = Some(first);
            let mut broadcast = CallDesc::new(Collective::Broadcast, Dtype::F32);
            broadcast.outputs = Blocks::of(calls::write(&mut sent));
            (broadcast.root, broadcast.seq, broadcast.mode) = (Rank(1), Some(first + 1), Mode::Async);
            // Rank 0 issues the all_reduce only after it has received the broadcast, which rank 1 issues after its
            // all_reduce.
            let made = if member.rank == 0 {
                let broadcast = member.group.submit(broadcast).unwrap();
                finish(&broadcast).unwrap();
                vec![member.group.submit(all_reduce).unwrap()]
            } else {
                [all_reduce, broadcast].map(|desc| member.group.submit(desc).unwrap()).to_vec()
            };
            made.iter().for_each(|call| finish(call).unwrap());
            assert!(sum.iter().all(|&x| x == 2.0) && sent.iter().all(|&x| x == 1.0), "{fabric:?}");
        });
    }
}

#[test]
fn frames_of_a_call_that_is_not_made_yet_hold_nothing_up() {
    for fabric in fabrics() {
        let world = World::new(WorldOptions::new(2).over(fabric).timeout(Duration::from_secs(30)));
        world.engines.iter().for_each(|engine| engine.without_tick());
        let [early, late] = ["early", "late"].map(|name| world.run(name, |member| member));
        std::thread::scope(|scope| {
            for rank in 0..2 {
                let (early, late) = (&early[rank], &late[rank]);
                scope.spawn(move || {
                    for round in 0..20 {
                        let mut data = vec![1.0_f32; 5000];
                        let call = |data: &mut Vec<f32>| {
                            early.group.submit(early.all_reduce_desc(data, ReduceOp::Sum, Mode::Async)).unwrap()
                        };
                        // The frames of this call from one rank arrive on the link before the frames of the other
                        // calls.
                        let ahead = (round % 2 == rank).then(|| call(&mut data));
                        sum_ones(late, 5000);
                        finish(&ahead.unwrap_or_else(|| call(&mut data))).unwrap();
                        assert!(data.iter().all(|&x| x == 2.0), "{fabric:?}, round {round}");
                    }
                });
            }
        });
    }
}

#[test]
fn a_late_rank_wakes_a_parked_one() {
    for fabric in fabrics() {
        world(2, fabric).run("g", |member| {
            for round in 0..30 {
                if round % 2 == member.rank {
                    // Longer than any thread spins: the other side is parked by now.
                    std::thread::park_timeout(Duration::from_millis(3));
                }
                sum_ones(&member, if round % 3 == 0 { 1 } else { 4000 });
            }
        });
    }
}

#[test]
fn callbacks_may_submit_and_wait() {
    world(2, Fabric::Shm).run("g", |member| {
        let (sender, receiver) = std::sync::mpsc::channel();
        let mut data = vec![1.0_f32; 300];
        let call = member.group.submit(member.all_reduce_desc(&mut data, ReduceOp::Sum, Mode::Async)).unwrap();
        fn chain(member: &Member, depth: usize, call: &accl_engine::Call, done: std::sync::mpsc::Sender<usize>) {
            let member = member.clone();
            let watched = call.when_done(Box::new(move || {
                let mut data = vec![1.0_f32; 100 * (depth + 1)];
                let desc = member.all_reduce_desc(&mut data, ReduceOp::Sum, Mode::Async);
                let next = member.group.submit(desc).unwrap();
                if depth > 0 {
                    chain(&member, depth - 1, &next, done.clone());
                }
                finish(&next).unwrap();
                assert!(data.iter().all(|&x| x == 2.0));
                done.send(depth).unwrap();
            }));
            watched.unwrap();
        }
        chain(&member, 8, &call, sender);
        let mut depths: Vec<usize> =
            (0..9).map(|_| receiver.recv_timeout(Duration::from_secs(20)).expect("the chain must end")).collect();
        depths.sort_unstable();
        assert_eq!(depths, (0..9).collect::<Vec<_>>());
        finish(&call).unwrap();
    });
}

#[test]
fn small_blocking_calls_during_a_pending_receive_wake_no_background_thread() {
    const CALLS: u64 = 2000;
    for count in [1, 2000] {
        // A waiting thread polls for as long as a call takes, so no thread has a reason to sleep.
        let world = World::new(
            WorldOptions::new(2).over(Fabric::Shm).with("spin_us", "1000000").timeout(Duration::from_secs(120)),
        );
        let parks = || world.engines.iter().map(|engine| engine.parks()).collect::<Vec<_>>();
        let begun = std::sync::Barrier::new(2);
        let slept = world.run("g", |member| {
            let (mut data, mut got) = (vec![1.0_f32; count], [0_i64]);
            let other = 1 - member.rank as u32;
            let receive = member.post_recv(&mut got, Some(other), 1).unwrap();
            for _ in 0..10 {
                member.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            }
            // From here on the background thread drives the receive.
            let patience = Instant::now() + Duration::from_secs(20);
            while parks().contains(&0) {
                assert!(Instant::now() < patience, "no thread polls the receive");
                std::thread::yield_now();
            }
            begun.wait();
            let before = world.engines[member.rank].parks();
            for _ in 0..CALLS {
                data.fill(1.0);
                member.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert!(data.iter().all(|&x| x == 2.0));
            }
            begun.wait();
            let slept = world.engines[member.rank].parks() - before;
            let send = member.post_send(&[7 + member.rank as i64], other, 1).unwrap();
            finish(&receive).unwrap();
            finish(&send).unwrap();
            assert_eq!(got, [7 + i64::from(other)]);
            slept
        });
        println!("{CALLS} calls of {count} elements: the background threads slept {slept:?} times");
        assert!(slept.iter().all(|&slept| slept <= CALLS / 20), "{CALLS} calls of {count} elements: {slept:?}");
    }
}
