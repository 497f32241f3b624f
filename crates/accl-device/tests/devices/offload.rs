//! A group with a device: the device does what it can, and the host does the rest. A failure ends the call on all ranks
//! with its cause.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use accl_device::DeviceKind;
use accl_engine::{Blocks, CallDesc, Mode, TensorDesc, Waited};
use accl_testkit::devices::{Faithful, LocalDevices, Network, SimDevices};
use accl_testkit::{Fabric, Member, World, calls, finish};
use accl_types::{Collective, Dtype, Elems, Error, ErrorKind, Rank, ReduceOp};

use crate::worlds::{PATIENCE, design, options, value, values, world, world_of};

fn device_line(member: &Member) -> String {
    let text = member.group.describe();
    text.lines().find(|line| line.starts_with("device ")).unwrap_or_else(|| panic!("{text}")).to_owned()
}

#[test]
fn the_device_does_every_collective_and_says_so() {
    for network in [Network::Udp, Network::Tcp, Network::Rdma] {
        for ranks in 1..=5_u32 {
            let (world, _devices) = world(ranks, network);
            world.run("g", |member| {
                let (rank, n) = (member.rank, member.world);
                for count in [0, 1, n - 1, n, n + 1, 1000] {
                    let all = |at: usize| -> i64 { (0..n).map(|rank| value(rank, at)).sum() };
                    let mut data = values(rank, count);
                    member.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                    assert_eq!(data, (0..count).map(all).collect::<Vec<_>>());
                    let mut data = values(rank, count);
                    member.all_reduce(&mut data, ReduceOp::Max).unwrap();
                    let most = |at: usize| (0..n).map(|rank| value(rank, at)).max().unwrap();
                    assert_eq!(data, (0..count).map(most).collect::<Vec<_>>());
                    let whole: Vec<i64> = (0..n).flat_map(|rank| values(rank, count)).collect();
                    let mut gathered = vec![-1; n * count];
                    member.all_gather(&values(rank, count), &mut gathered, &vec![count; n]).unwrap();
                    assert_eq!(gathered, whole);
                    let mut part = vec![-1; count];
                    member.reduce_scatter(&values(rank, n * count), &vec![count; n], &mut part, ReduceOp::Sum).unwrap();
                    assert_eq!(part, (rank * count..(rank + 1) * count).map(all).collect::<Vec<_>>());
                    let mut crossed = vec![-1; n * count];
                    let counts = vec![count; n];
                    member.all_to_all(&values(rank, n * count), &counts, &mut crossed, &counts, true).unwrap();
                    let from = |from: usize| (rank * count..(rank + 1) * count).map(move |at| value(from, at));
                    assert_eq!(crossed, (0..n).flat_map(from).collect::<Vec<_>>());
                    for root in [0, n - 1] {
                        let mut data = values(rank, count);
                        member.broadcast(&mut data, root as u32).unwrap();
                        assert_eq!(data, values(root, count));
                        let mut data = values(rank, count);
                        member.reduce(&mut data, ReduceOp::Sum, root as u32).unwrap();
                        let expected: Vec<i64> = (0..count).map(all).collect();
                        assert_eq!(data, if rank == root { expected } else { values(rank, count) });
                        let mut gathered = vec![-1; if rank == root { n * count } else { 0 }];
                        member.gather(&values(rank, count), &mut gathered, root as u32).unwrap();
                        assert_eq!(gathered, if rank == root { whole.clone() } else { Vec::new() });
                        let mut part = vec![-1; count];
                        let input = if rank == root { values(root, n * count) } else { Vec::new() };
                        member.scatter(&input, &mut part, root as u32).unwrap();
                        assert_eq!(
                            part,
                            (rank * count..(rank + 1) * count).map(|at| value(root, at)).collect::<Vec<_>>()
                        );
                    }
                }
                let line = device_line(&member);
                for part in
                    ["all_reduce int64 SUM 6", "all_reduce int64 MAX 6", "broadcast int64 12", "scatter int64 12"]
                {
                    assert!(line.contains(part), "{network:?} {n}: {line}");
                }
                assert_eq!(line.contains("all_to_all int64 6"), network == Network::Rdma, "{line}");
            });
        }
    }
}

#[test]
fn what_no_device_does_is_done_by_the_host() {
    let (world, devices) = world(3, Network::Udp);
    world.run("g", |member| {
        let mut data = [1.5_f32, 2.5];
        member.all_reduce(&mut data, ReduceOp::Avg).unwrap();
        assert_eq!(data, [1.5, 2.5]);
        let mut data = [member.rank as f32];
        member.all_reduce(&mut data, ReduceOp::Max).unwrap();
        assert_eq!(data, [2.0]);
        let mut data = [1_u8; 5];
        member.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [3; 5]);
        member.barrier().unwrap();
        let counts = [0, 1, 2];
        let mut uneven = [-1; 3];
        member.all_gather(&values(member.rank, member.rank), &mut uneven, &counts).unwrap();
        assert_eq!(uneven[..], [value(1, 0), value(2, 0), value(2, 1)]);
        let to = ((member.rank + 1) % 3) as u32;
        let send = member.post_send(&[7_i32], to, 0).unwrap();
        let mut got = [0_i32];
        let receive = member.post_recv(&mut got, Some(((member.rank + 2) % 3) as u32), 0).unwrap();
        finish(&send).and_then(|()| finish(&receive)).unwrap();
        assert_eq!(got, [7]);
        assert!(device_line(&member).ends_with(": 0 calls"), "{}", device_line(&member));
        let name = |op, dtype| {
            let mut desc = CallDesc::new(Collective::AllReduce, dtype);
            let mut memory = [0_u64; 4];
            desc.op = op;
            desc.outputs = Blocks::of(TensorDesc::dense(memory.as_mut_ptr().cast(), dtype, Elems(4)));
            member.group.algorithm_of(&desc).unwrap()
        };
        assert_eq!(name(ReduceOp::Sum, Dtype::F32), "device");
        assert!(name(ReduceOp::Avg, Dtype::F32) != "device" && name(ReduceOp::Sum, Dtype::BF16) != "device");
    });
    assert_eq!(devices.faults().started.load(Ordering::Relaxed), 0);
}

#[test]
fn a_collective_that_is_side_stepped_is_done_by_the_host() {
    let side = options(2, Network::Rdma).with("sidestep", "broadcast=host,all_reduce");
    let (world, _devices) = world_of(side, Network::Rdma);
    world.run("g", |member| {
        member.broadcast(&mut [1_i32], 0).unwrap();
        member.all_reduce(&mut [1_i32], ReduceOp::Sum).unwrap();
        assert!(device_line(&member).ends_with(": 0 calls"));
        member.reduce(&mut [1_i32], ReduceOp::Sum, 0).unwrap();
        assert!(device_line(&member).ends_with(": 1 calls: reduce int32 SUM 1"), "{}", device_line(&member));
    });
}

#[test]
fn nothing_reaches_a_device_before_all_ranks_agree() {
    for network in [Network::Udp, Network::Rdma] {
        for ranks in [2, 3, 5] {
            for what in ["dtype", "operator", "count", "root", "blocks"] {
                let (world, devices) = world(ranks, network);
                let errors = world.run("g", |member| {
                    let is_odd = member.rank + 1 == member.world;
                    let mut longs = [1_i64; 8];
                    let mut ints = [1_i32; 8];
                    match (what, is_odd) {
                        ("dtype", true) => member.all_reduce(&mut ints, ReduceOp::Sum),
                        ("operator", true) => member.all_reduce(&mut longs, ReduceOp::Max),
                        ("count", true) => member.all_reduce(&mut longs[..7], ReduceOp::Sum),
                        ("root", _) => member.broadcast(&mut longs, u32::from(is_odd)),
                        ("blocks", _) => {
                            let count = if is_odd { 1 } else { 2 };
                            let counts = vec![count; member.world];
                            let input = vec![0_i64; member.world * count];
                            let mut output = vec![0_i64; count];
                            member.reduce_scatter(&input, &counts, &mut output, ReduceOp::Sum)
                        }
                        _ => member.all_reduce(&mut longs, ReduceOp::Sum),
                    }
                    .unwrap_err()
                });
                for error in errors {
                    assert_eq!(error.kind, ErrorKind::Mismatch, "{what}: {error}");
                }
                assert_eq!(devices.faults().started.load(Ordering::Relaxed), 0, "{what} among {ranks}");
            }
        }
    }
}

#[test]
fn calls_in_flight_reach_the_device_in_the_order_of_their_numbers_on_all_ranks() {
    for network in [Network::Tcp, Network::Rdma] {
        let (world, _devices) = world(3, network);
        world.run("g", |member| {
            for round in 0..10 {
                let mut data: Vec<Vec<i64>> = (0..20).map(|call| values(member.rank + call, 1 + call * 37)).collect();
                // The calls with reserved sequence numbers are issued last, but come first in the order of numbers.
                let first = member.group.reserve_seqs(2).unwrap();
                let make = |call: usize, data: &mut Vec<i64>| {
                    let mut desc = match call % 3 {
                        0 => CallDesc::new(Collective::Broadcast, Dtype::I64),
                        _ => CallDesc::new(Collective::AllReduce, Dtype::I64),
                    };
                    desc.root = Rank(if call.is_multiple_of(3) { (call % 2) as u32 } else { 0 });
                    desc.mode = Mode::Async;
                    desc.outputs = Blocks::of(calls::write(data));
                    desc.seq = (call >= 18).then(|| first + (call as u64 - 18));
                    member.group.submit(desc).unwrap()
                };
                let mut calls: Vec<_> =
                    data[..18].iter_mut().enumerate().map(|(call, data)| make(call, data)).collect();
                std::thread::sleep(Duration::from_millis((member.rank * 3) as u64));
                calls.extend(data[18..].iter_mut().enumerate().map(|(call, data)| make(call + 18, data)));
                member.group.conclude_seqs(first..first + 2, None);
                calls.iter().for_each(|call| finish(call).unwrap());
                for (call, data) in data.iter().enumerate() {
                    let expected = |at: usize| -> i64 {
                        match call % 3 {
                            0 => value(call % 2 + call, at),
                            _ => (0..3).map(|rank| value(rank + call, at)).sum(),
                        }
                    };
                    let expected: Vec<i64> = (0..data.len()).map(expected).collect();
                    assert_eq!(*data, expected, "{network:?} round {round} call {call}");
                }
            }
        });
    }
}

#[test]
fn what_is_larger_than_the_staging_buffers_goes_in_pieces() {
    let (world, _devices) = world(3, Network::Tcp);
    world.run("g", |member| {
        let count = (9 << 20) / 4 + 5;
        let mut data: Vec<f32> = (0..count).map(|at| value(member.rank, at) as f32).collect();
        member.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        let expected = |at: usize| (0..3).map(|rank| value(rank, at)).sum::<i64>() as f32;
        assert!(data.iter().enumerate().all(|(at, got)| *got == expected(at)));
        let part = count / 2;
        let mine: Vec<f32> = (0..part).map(|at| value(member.rank, at) as f32).collect();
        let mut all = vec![-1.0_f32; 3 * part];
        member.all_gather(&mine, &mut all, &[part; 3]).unwrap();
        assert!(all.iter().enumerate().all(|(at, got)| *got == value(at / part, at % part) as f32));
    });
}

#[test]
fn tensors_of_any_layout_are_packed_for_the_device() {
    let (world, _devices) = world(2, Network::Udp);
    world.run("g", |member| {
        let mut grid: Vec<f32> = (0..12).map(|at| (at + member.rank) as f32).collect();
        let mut desc = CallDesc::new(Collective::AllReduce, Dtype::F32);
        // Every second column of three rows.
        desc.outputs = Blocks::of(TensorDesc::strided(grid.as_mut_ptr().cast(), Dtype::F32, &[3, 2], &[4, 2]).unwrap());
        member.call(desc).unwrap();
        for (at, got) in grid.iter().enumerate() {
            let own = (at + member.rank) as f32;
            assert_eq!(*got, if at % 2 == 0 { (2 * at + 1) as f32 } else { own });
        }
        assert!(device_line(&member).ends_with("1 calls: all_reduce float32 SUM 1"));
    });
}

fn wait(member: &Member, data: &mut [i64], timeout: Duration) -> Error {
    let mut desc = member.all_reduce_desc(data, ReduceOp::Sum, Mode::Blocking);
    desc.timeout = Some(timeout);
    member.call(desc).unwrap_err()
}

#[test]
fn a_device_that_does_not_come_back_is_named_on_all_ranks_soon_after_the_deadline() {
    for hangs in [0, 2] {
        let (world, devices) = world(3, Network::Udp);
        let errors = world.run("g", |member| {
            member.all_reduce(&mut [1_i64], ReduceOp::Sum).unwrap();
            member.barrier().unwrap();
            devices.faults().hangs.store(hangs, Ordering::Relaxed);
            let (begin, allowed) = (Instant::now(), Duration::from_millis(300));
            let error = wait(&member, &mut [1, 2, 3], allowed);
            let took = begin.elapsed();
            // Another rank may have issued the call earlier and reached its deadline earlier.
            assert!(took >= allowed / 2 && took < allowed + Duration::from_millis(1500), "{took:?}: {error}");
            (member.all_reduce(&mut [1_i64], ReduceOp::Sum).unwrap_err(), error)
        });
        for (rank, (later, error)) in (0..).zip(errors) {
            let text = error.to_string();
            assert_eq!(error.kind, ErrorKind::Timeout, "{text}");
            let words = ["Timed out waiting", "all_reduce", "the engine of rank", "it expects", "takes no more calls"];
            assert!(words.iter().all(|word| text.contains(word)), "rank {rank}: {text}");
            assert!(later.to_string().contains("First cause"), "{later}");
        }
    }
}

#[test]
fn a_device_that_has_gone_fails_its_call_at_once_on_all_ranks() {
    let (world, devices) = world(3, Network::Rdma);
    let errors = world.run("g", |member| {
        member.all_reduce(&mut [1_i64], ReduceOp::Sum).unwrap();
        member.barrier().unwrap();
        devices.faults().is_gone.store(1, Ordering::Relaxed);
        let begin = Instant::now();
        let error = wait(&member, &mut [1, 2, 3], PATIENCE);
        assert!(begin.elapsed() < PATIENCE / 4, "{error}");
        error
    });
    for error in errors {
        let text = error.to_string();
        assert_eq!(error.kind, ErrorKind::Device, "{text}");
        assert!(text.contains("the engine of rank 1") && text.contains("closed the connection"), "{text}");
    }
}

#[test]
fn an_abort_in_the_middle_of_a_call_of_a_device_ends_it_at_once() {
    let (world, devices) = world(2, Network::Udp);
    devices.faults().holds.store(true, Ordering::Relaxed);
    let both = Barrier::new(2);
    world.run("g", |member| {
        let mut data = [1_i64; 100];
        let call = member.group.submit(member.all_reduce_desc(&mut data, ReduceOp::Sum, Mode::Async)).unwrap();
        let soon = Duration::from_millis(100);
        assert!(matches!(call.wait(Some(soon), &mut || false), Waited::TimedOut(_)));
        both.wait();
        let begin = Instant::now();
        if member.rank == 0 {
            member.group.abort("the test wants it");
        }
        match call.wait(Some(PATIENCE), &mut || false) {
            Waited::Failed(error) => assert_eq!(error.kind, ErrorKind::Aborted, "{error}"),
            other => panic!("{other:?}"),
        }
        assert!(begin.elapsed() < PATIENCE / 2, "{:?}", begin.elapsed());
    });
}

#[test]
fn a_wait_that_gives_up_kills_neither_call_nor_device() {
    let (world, devices) = world(2, Network::Udp);
    devices.faults().holds.store(true, Ordering::Relaxed);
    let both = Barrier::new(2);
    world.run("g", |member| {
        let mut data = [1_i64; 100];
        let call = member.group.submit(member.all_reduce_desc(&mut data, ReduceOp::Sum, Mode::Async)).unwrap();
        let soon = Duration::from_millis(50);
        assert!(matches!(call.wait(Some(soon), &mut || false), Waited::TimedOut(_)));
        both.wait();
        devices.faults().holds.store(false, Ordering::Relaxed);
        finish(&call).unwrap();
        assert_eq!(data, [2; 100]);
    });
}

#[test]
fn a_device_that_does_not_open_is_every_ranks_error() {
    let (world, devices) = world(3, Network::Udp);
    devices.faults().does_not_open.store(1, Ordering::Relaxed);
    let errors = world.try_run("g");
    for error in errors {
        let error = error.err().expect("no group");
        assert!(error.to_string().contains("the card of rank 1 has no power"), "{error}");
    }
}

#[test]
fn ranks_with_other_devices_or_none_make_no_group() {
    for (theirs, word) in
        [("none", "device=none"), ("sim://?design=tcp", "design=tcp"), ("sim://?eager=1MiB", "eager=1MiB")]
    {
        let mine = options(2, Network::Udp);
        let devices = LocalDevices::new(Network::Udp, Faithful::default(), 2);
        let world = World::new(mine);
        world.engines.iter().for_each(|engine| engine.add_offload(DeviceKind::new(devices.clone())).unwrap());
        let errors = world.try_run_with("g", |rank, config| {
            if rank == 1 {
                config.set_option("device", theirs).unwrap();
            }
        });
        for error in errors {
            let error = error.err().expect("no group");
            assert_eq!(error.kind, ErrorKind::Configuration, "{error}");
            assert!(
                error.to_string().contains("the ranks' settings disagree") && error.to_string().contains(word),
                "{error}"
            );
        }
    }
}

#[test]
fn an_engine_without_a_way_to_devices_says_so() {
    let world = World::new(options(1, Network::Udp));
    let error = world.try_run("g").remove(0).err().expect("no group");
    assert!(error.to_string().contains("this engine cannot open devices"), "{error}");
}

#[test]
fn engines_in_the_ranks_processes_reach_one_another_over_their_links() {
    for fabric in [Fabric::Shm, Fabric::Tcp, Fabric::Loopback(4)] {
        for network in [Network::Udp, Network::Rdma] {
            for (ranks, segment) in [(1, "64KiB"), (2, "1KiB"), (3, "64KiB"), (5, "4KiB")] {
                let options = options(ranks, network).over(fabric).with("segment_bytes", segment);
                let world = World::new(options);
                let devices = Arc::new(SimDevices(Faithful::all()));
                world.engines.iter().for_each(|engine| engine.add_offload(DeviceKind::new(devices.clone())).unwrap());
                world.run("g", |member| {
                    let n = member.world;
                    for count in [1, 1000, 300_000] {
                        let mut data = values(member.rank, count);
                        member.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                        let all = |at: usize| -> i64 { (0..n).map(|rank| value(rank, at)).sum() };
                        assert!(data.iter().enumerate().all(|(at, got)| *got == all(at)), "{fabric:?} {network:?} {n}");
                        let mut data = values(member.rank, count);
                        member.broadcast(&mut data, (n - 1) as u32).unwrap();
                        assert_eq!(data, values(n - 1, count));
                    }
                    assert!(device_line(&member).contains(": 6 calls"), "{}", device_line(&member));
                });
            }
        }
    }
}

#[test]
fn an_all_to_all_with_split_sizes_on_some_ranks_alone_says_what_to_do() {
    let (world, devices) = world(2, Network::Rdma);
    let errors = world.run("g", |member| {
        let mut output = [0_i32; 2];
        member.all_to_all(&[1, 2], &[1, 1], &mut output, &[1, 1], member.rank == 0).unwrap_err()
    });
    for error in errors {
        assert_eq!(error.kind, ErrorKind::Mismatch, "{error}");
        let words =
            ["only rank 0 offloads it;", "on all ranks, pass split sizes or none", "sidestep=\"all_to_all=host\""];
        assert!(words.iter().all(|word| error.to_string().contains(word)), "{error}");
    }
    assert_eq!(devices.faults().started.load(Ordering::Relaxed), 0);
}

#[test]
fn a_call_that_waits_for_a_stuck_device_does_not_hide_why_it_is_stuck() {
    let (world, devices) = world(3, Network::Udp);
    let errors = world.run("g", |member| {
        member.all_reduce(&mut [1_i64], ReduceOp::Sum).unwrap();
        member.barrier().unwrap();
        devices.faults().hangs.store(1, Ordering::Relaxed);
        let (mut one, mut other, allowed) = ([1_i64; 5], [1_i64; 5], Duration::from_secs(1));
        let make = |data: &mut [i64], collective| {
            let mut desc = member.all_reduce_desc(data, ReduceOp::Sum, Mode::Async);
            (desc.timeout, desc.collective) = (Some(allowed), collective);
            desc
        };
        let mut barrier = CallDesc::new(Collective::Barrier, Dtype::U8);
        (barrier.timeout, barrier.mode) = (Some(allowed), Mode::Async);
        let first = member.group.submit(make(&mut one, Collective::AllReduce)).unwrap();
        let second = member.group.submit(make(&mut other, Collective::AllReduce)).unwrap();
        let barrier = member.group.submit(barrier).unwrap();
        [finish(&first), finish(&second), finish(&barrier)].map(Result::unwrap_err)
    });
    for error in errors.iter().flatten() {
        assert!(error.to_string().contains("it expects"), "{error}");
    }
}

#[test]
fn what_a_rank_that_is_ahead_sends_does_not_keep_out_what_others_wait_for() {
    // The devices have few small rx buffers, and the roots send piece after piece without waiting for a receiver.
    let text = "sim://?design=udp&rx_bytes=1KiB&rx_buffers=4&eager=4KiB";
    for network in [Network::Udp, Network::Tcp] {
        let text = text.replace("udp", design(network));
        let options = options(3, network).with("device", &text);
        let world = World::new(options);
        let devices = Arc::new(SimDevices(Faithful::all()));
        world.engines.iter().for_each(|engine| engine.add_offload(DeviceKind::new(devices.clone())).unwrap());
        world.run("g", |member| {
            for round in 0..20 {
                let mut sums = values(member.rank, 30_000);
                let mut moved: Vec<Vec<i64>> = (0..3).map(|_| values(member.rank, 20_000)).collect();
                let sum = member.group.submit(member.all_reduce_desc(&mut sums, ReduceOp::Sum, Mode::Async)).unwrap();
                let cast = |(index, data): (usize, &mut Vec<i64>)| {
                    let mut desc = CallDesc::new(Collective::Broadcast, Dtype::I64);
                    (desc.root, desc.mode) = (Rank(2 - index as u32), Mode::Async);
                    desc.outputs = Blocks::of(calls::write(data));
                    member.group.submit(desc).unwrap()
                };
                let casts: Vec<_> = moved.iter_mut().enumerate().map(cast).collect();
                [sum].iter().chain(&casts).for_each(|call| finish(call).unwrap());
                let all = |at: usize| -> i64 { (0..3).map(|rank| value(rank, at)).sum() };
                assert!(sums.iter().enumerate().all(|(at, got)| *got == all(at)), "{network:?} {round}");
                for (index, data) in moved.iter().enumerate() {
                    assert!(*data == values(2 - index, 20_000), "{network:?} {round} from {}", 2 - index);
                }
            }
        });
    }
}

#[test]
fn a_host_call_is_late_at_its_deadline_although_a_device_still_works() {
    let (world, devices) = world(2, Network::Udp);
    devices.faults().holds.store(true, Ordering::Relaxed);
    world.run("g", |member| {
        let mut data = [1_i64; 4];
        let working = member.group.submit(member.all_reduce_desc(&mut data, ReduceOp::Sum, Mode::Async)).unwrap();
        if member.rank == 0 {
            let mut byte = [1_u8; 4];
            let mut desc = member.all_reduce_desc(&mut byte, ReduceOp::Sum, Mode::Async);
            desc.timeout = Some(Duration::from_millis(200));
            let begin = Instant::now();
            let error = finish(&member.group.submit(desc).unwrap()).unwrap_err();
            assert!(error.kind == ErrorKind::Timeout && begin.elapsed() < PATIENCE / 2, "{error}");
        }
        finish(&working).unwrap_err();
    });
}

#[test]
fn what_a_device_brings_after_an_abort_is_written_nowhere() {
    let (world, devices) = world(2, Network::Udp);
    let both = Barrier::new(2);
    world.run("g", |member| {
        let mut data = vec![1_i64; 1000];
        member.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        both.wait();
        devices.faults().holds.store(true, Ordering::Relaxed);
        let call = member.group.submit(member.all_reduce_desc(&mut data, ReduceOp::Sum, Mode::Async)).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        both.wait();
        member.group.abort("the test wants it");
        finish(&call).unwrap_err();
        devices.faults().holds.store(false, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(50));
        assert!(data.iter().all(|value| *value == 2), "it holds what it held before the call");
    });
}
