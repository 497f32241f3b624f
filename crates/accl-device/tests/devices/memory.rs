//! Tensors of a device's calls: tensors that share memory, many tensors, empty tensors, several dtypes, strided
//! tensors.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Barrier, mpsc};
use std::time::Duration;

use accl_device::DeviceKind;
use accl_engine::{Blocks, CallDesc, Mode, TensorDesc};
use accl_testkit::devices::{Faithful, LocalDevices, Network, SimDevices};
use accl_testkit::{Fabric, Member, World, calls, finish};
use accl_types::{Collective, Dtype, Elems, ErrorKind, Rank, ReduceOp};

use crate::worlds::{PATIENCE, options, value, values, world};

/// Elements of a block that three ranks send in several pieces: a device's buffers have 4 MiB.
const MANY: usize = (5 << 20) / 8 + 3;

fn calls_of_device(member: &Member) -> u64 {
    let text = member.group.describe();
    let line = text.lines().find(|line| line.starts_with("device ")).unwrap_or_else(|| panic!("{text}"));
    let count = line.split(": ").find_map(|part| part.strip_suffix(" calls")).unwrap_or_else(|| panic!("{line}"));
    count.parse().unwrap()
}

fn sum(ranks: usize, at: usize) -> i64 {
    (0..ranks).map(|rank| value(rank, at)).sum()
}

/// Describes a block of a tensor: `count` elements from element `at` on.
fn block(data: *mut i64, at: usize, count: usize) -> TensorDesc {
    TensorDesc::dense(data.wrapping_add(at).cast(), Dtype::I64, Elems(count as u64))
}

#[test]
fn who_gathers_into_the_tensor_that_it_contributes_from_has_all_of_it() {
    for network in [Network::Tcp, Network::Rdma] {
        for count in [0, 1, 5, MANY] {
            world(3, network).0.run("g", |member| {
                for collective in [Collective::AllGather, Collective::Gather] {
                    let mut data = vec![-1; 3 * count];
                    data[member.rank * count..][..count].copy_from_slice(&values(member.rank, count));
                    let base = data.as_mut_ptr();
                    let mut desc = CallDesc::new(collective, Dtype::I64);
                    desc.root = Rank(u32::from(collective == Collective::Gather));
                    desc.inputs = Blocks::of(block(base, member.rank * count, count));
                    let receives = collective == Collective::AllGather || member.rank == 1;
                    desc.outputs = (0..3).filter(|_| receives).map(|rank| [block(base, rank * count, count)]).collect();
                    member.call(desc).unwrap();
                    for rank in (0..3).filter(|rank| receives || *rank == member.rank) {
                        let got = &data[rank * count..][..count];
                        assert!(got == values(rank, count), "{network:?} {collective} {count} from {rank}");
                    }
                }
                assert_eq!(calls_of_device(&member), 2);
            });
        }
    }
}

#[test]
fn who_keeps_a_part_of_the_tensor_that_it_contributes_has_the_rest_as_it_was() {
    for network in [Network::Tcp, Network::Rdma] {
        for count in [0, 1, 5, MANY] {
            world(3, network).0.run("g", |member| {
                for collective in [Collective::ReduceScatter, Collective::Scatter] {
                    let mut data = values(member.rank, 3 * count);
                    let base = data.as_mut_ptr();
                    let gives = collective == Collective::ReduceScatter || member.rank == 2;
                    let mut desc = CallDesc::new(collective, Dtype::I64);
                    desc.root = Rank(if collective == Collective::Scatter { 2 } else { 0 });
                    desc.inputs = (0..3).filter(|_| gives).map(|rank| [block(base, rank * count, count)]).collect();
                    desc.outputs = Blocks::of(block(base, member.rank * count, count));
                    member.call(desc).unwrap();
                    for (at, &got) in data.iter().enumerate() {
                        let is_kept = at / count.max(1) == member.rank;
                        let expected = match collective {
                            _ if !is_kept => value(member.rank, at),
                            Collective::ReduceScatter => sum(3, at),
                            _ => value(2, at),
                        };
                        assert_eq!(got, expected, "{network:?} {collective} {count} at {at}");
                    }
                }
            });
        }
    }
}

#[test]
fn blocks_that_overlap_in_any_other_way_are_read_before_they_are_written() {
    for count in [3, MANY] {
        world(3, Network::Rdma).0.run("g", |member| {
            // The result of the reduction overlaps two blocks of the contribution.
            let mut data = values(member.rank, 3 * count);
            let base = data.as_mut_ptr();
            let mut desc = CallDesc::new(Collective::ReduceScatter, Dtype::I64);
            desc.inputs = (0..3).map(|rank| [block(base, rank * count, count)]).collect();
            desc.outputs = Blocks::of(block(base, count / 2, count));
            member.call(desc).unwrap();
            let first = member.rank * count;
            assert!((0..count).all(|at| data[count / 2 + at] == sum(3, first + at)), "{count}");
            // The blocks of the output are the blocks of the input in reverse order.
            let mut data = values(member.rank, 3 * count);
            let base = data.as_mut_ptr();
            let mut desc = CallDesc::new(Collective::AllToAll, Dtype::I64);
            desc.inputs = (0..3).map(|rank| [block(base, rank * count, count)]).collect();
            desc.outputs = (0..3).map(|rank| [block(base, (2 - rank) * count, count)]).collect();
            member.call(desc).unwrap();
            for from in 0..3 {
                let got = &data[(2 - from) * count..][..count];
                assert!((0..count).all(|at| got[at] == value(from, member.rank * count + at)), "{count} from {from}");
            }
            // A rank's contribution lies where another rank's block goes.
            let mut data = vec![-1; 3 * count];
            let at = (member.rank + 1) % 3 * count;
            data[at..][..count].copy_from_slice(&values(member.rank, count));
            let base = data.as_mut_ptr();
            let mut desc = CallDesc::new(Collective::AllGather, Dtype::I64);
            desc.inputs = Blocks::of(block(base, at, count));
            desc.outputs = (0..3).map(|rank| [block(base, rank * count, count)]).collect();
            member.call(desc).unwrap();
            assert!((0..3).all(|rank| data[rank * count..][..count] == values(rank, count)), "{count}");
            assert_eq!(calls_of_device(&member), 3);
        });
    }
}

#[test]
fn tensors_of_other_layouts_and_many_at_once_have_what_belongs_to_them() {
    for network in [Network::Udp, Network::Rdma] {
        world(3, network).0.run("g", |member| {
            let n = member.world;
            // The tensor consists of every second column; the columns between them must not change.
            let mut grid: Vec<i64> = values(member.rank, 12);
            let mut desc = CallDesc::new(Collective::Broadcast, Dtype::I64);
            desc.root = Rank(1);
            let strided = TensorDesc::strided(grid.as_mut_ptr().cast(), Dtype::I64, &[3, 2], &[4, 2]).unwrap();
            desc.outputs = Blocks::of(strided);
            member.call(desc).unwrap();
            let of = |at: usize| if at.is_multiple_of(2) { 1 } else { member.rank };
            assert!(grid.iter().enumerate().all(|(at, got)| *got == value(of(at), at)), "{grid:?}");
            // Transposed, empty and dense tensors in one call.
            let mut square = values(member.rank, 6);
            let mut rest = values(member.rank, 1000);
            let mut desc = CallDesc::new(Collective::AllReduce, Dtype::I64);
            let transposed = TensorDesc::strided(square.as_mut_ptr().cast(), Dtype::I64, &[3, 2], &[1, 3]).unwrap();
            let empty = || TensorDesc::dense(std::ptr::null_mut(), Dtype::I64, Elems(0));
            desc.outputs.push([empty(), transposed, empty(), calls::write(&mut rest), empty()]);
            member.call(desc).unwrap();
            assert!(square.iter().chain(&rest).zip((0..6).chain(0..1000)).all(|(got, at)| *got == sum(n, at)));
            // Each rank contributes a list of tensors.
            let (mine, more) = (values(member.rank, 3), values(member.rank + 9, 5));
            let mut gathered = vec![-1_i64; n * 8];
            let mut desc = CallDesc::new(Collective::AllGather, Dtype::I64);
            desc.inputs.push([calls::read(&mine), calls::read(&more)]);
            let base = gathered.as_mut_ptr();
            // The tensors of several ranks are interleaved.
            desc.outputs = (0..n).map(|rank| [block(base, rank * 3, 3), block(base, n * 3 + rank * 5, 5)]).collect();
            member.call(desc).unwrap();
            for rank in 0..n {
                assert_eq!(gathered[rank * 3..][..3], values(rank, 3));
                assert_eq!(gathered[n * 3 + rank * 5..][..5], values(rank + 9, 5));
            }
            assert_eq!(calls_of_device(&member), 3);
        });
    }
}

#[test]
fn tensors_of_several_types_are_moved_byte_by_byte() {
    for network in [Network::Udp, Network::Tcp, Network::Rdma] {
        for (longs, bytes) in [(1, 3), (0, 5), (2, 0), (7, 1)] {
            world(3, network).0.run("g", |member| {
                let n = member.world;
                let mut mine = (values(member.rank, longs), vec![member.rank as u8 + 1; bytes]);
                let mut got = (vec![-1_i64; n * longs], vec![0_u8; n * bytes]);
                let mut desc = CallDesc::new(Collective::AllGather, Dtype::I64);
                desc.inputs.push([calls::read(&mine.0), calls::read(&mine.1)]);
                for rank in 0..n {
                    let (longs, bytes) = (&mut got.0[rank * longs..][..longs], &mut got.1[rank * bytes..][..bytes]);
                    desc.outputs.push([calls::write(longs), calls::write(bytes)]);
                }
                member.call(desc).unwrap();
                assert_eq!(got.0, (0..n).flat_map(|rank| values(rank, longs)).collect::<Vec<_>>());
                assert_eq!(got.1, (0..n).flat_map(|rank| vec![rank as u8 + 1; bytes]).collect::<Vec<_>>());
                let mut desc = CallDesc::new(Collective::Broadcast, Dtype::U8);
                desc.root = Rank(2);
                desc.outputs.push([calls::write(&mut mine.1), calls::write(&mut mine.0)]);
                member.call(desc).unwrap();
                assert_eq!(mine, (values(2, longs), vec![3; bytes]));
            });
        }
    }
}

#[test]
fn calls_of_two_groups_from_many_threads_all_end_with_their_own_results() {
    let world = World::new(options(3, Network::Rdma));
    let devices = Arc::new(SimDevices(Faithful::all()));
    world.engines.iter().for_each(|engine| engine.add_offload(DeviceKind::new(devices.clone())).unwrap());
    let groups: Vec<_> = ["one", "two"].iter().flat_map(|name| world.try_run(name)).map(Result::unwrap).collect();
    std::thread::scope(|scope| {
        for group in &groups {
            for thread in 0..4_usize {
                let member = Member::new(group.clone());
                scope.spawn(move || {
                    // All threads issue the same call, so the order of their calls does not matter.
                    for round in 0..25 {
                        let mut data = values(member.rank, 1000);
                        if (thread + round).is_multiple_of(3) {
                            let desc = member.all_reduce_desc(&mut data, ReduceOp::Sum, Mode::Async);
                            finish(&member.group.submit(desc).unwrap()).unwrap();
                        } else {
                            member.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                        }
                        assert!((0..1000).all(|at| data[at] == sum(3, at)));
                    }
                });
            }
        }
    });
    groups.iter().for_each(|group| assert_eq!(calls_of_device(&Member::new(group.clone())), 100));
}

#[test]
fn a_callback_may_make_a_call_of_the_device_and_wait_for_it() {
    world(2, Network::Udp).0.run("g", |member| {
        let mut data = values(member.rank, 10);
        let call = member.group.submit(member.all_reduce_desc(&mut data, ReduceOp::Sum, Mode::Async)).unwrap();
        let (sender, ended) = mpsc::channel();
        let group = member.group.clone();
        call.when_done(Box::new(move || {
            let member = Member::new(group);
            let mut more = values(member.rank, 3);
            let said = member.all_reduce(&mut more, ReduceOp::Sum);
            sender.send(said.map(|()| more)).unwrap();
        }))
        .unwrap();
        let more = ended.recv_timeout(PATIENCE).unwrap().unwrap();
        assert_eq!(more, (0..3).map(|at| sum(2, at)).collect::<Vec<_>>());
        finish(&call).unwrap();
    });
}

#[test]
fn dropped_calls_are_done_before_a_barrier_that_follows() {
    world(3, Network::Tcp).0.run("g", |member| {
        let mut data: Vec<Vec<i64>> = (0..20).map(|call| values(member.rank, call * 11)).collect();
        for data in &mut data {
            drop(member.group.submit(member.all_reduce_desc(data, ReduceOp::Sum, Mode::Async)).unwrap());
        }
        member.barrier().unwrap();
        assert!(data.iter().flat_map(|data| data.iter().enumerate()).all(|(at, got)| *got == sum(3, at)));
    });
}

#[test]
fn a_group_that_is_destroyed_waits_for_calls_of_its_device() {
    for _ in 0..10 {
        world(3, Network::Rdma).0.run("g", |member| {
            let mut data: Vec<Vec<i64>> = (0..5).map(|call| values(member.rank, 1 + call * 1000)).collect();
            let make = |data: &mut Vec<i64>| {
                member.group.submit(member.all_reduce_desc(data, ReduceOp::Sum, Mode::Async)).unwrap()
            };
            let calls: Vec<_> = data.iter_mut().map(make).collect();
            member.group.shutdown().unwrap();
            calls.iter().for_each(|call| finish(call).unwrap());
            assert!(data.iter().flat_map(|data| data.iter().enumerate()).all(|(at, got)| *got == sum(3, at)));
        });
    }
}

#[test]
fn a_call_without_any_time_is_late_and_leaves_its_tensor_alone_afterwards() {
    world(2, Network::Udp).0.run("g", |member| {
        let mut data = values(member.rank, 1000);
        let mut desc = member.all_reduce_desc(&mut data, ReduceOp::Sum, Mode::Blocking);
        desc.timeout = Some(Duration::ZERO);
        // The call may also have completed at once.
        if let Err(error) = member.call(desc) {
            assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
            let then = data.clone();
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!(data, then);
        }
    });
}

#[test]
fn what_an_engine_has_sent_to_a_rank_without_a_link_gets_there_although_its_process_ends() {
    for network in [Network::Udp, Network::Rdma] {
        for fabric in [Fabric::Shm, Fabric::Tcp] {
            // Neighbours are a power of two away, so each of eight ranks is linked to five ranks.
            let world = World::new(options(8, network).over(fabric));
            let devices = Arc::new(SimDevices(Faithful::all()));
            world.engines.iter().for_each(|engine| engine.add_offload(DeviceKind::new(devices.clone())).unwrap());
            world.run("g", |member| {
                let mut data = values(member.rank, 2000);
                let said = member.broadcast(&mut data, 0);
                // `leave` does not wait for the group's calls. Data that was sent in the group must still arrive.
                let _ = if fabric == Fabric::Shm { member.group.shutdown() } else { member.group.leave() };
                world.engines[member.rank].shutdown();
                said.unwrap_or_else(|error| panic!("{network:?} {fabric:?}: {error}"));
                assert_eq!(data, values(0, 2000));
            });
        }
    }
}

#[test]
fn who_drops_a_group_while_its_device_works_gets_the_tensor_back_untouched_from_then_on() {
    let world = World::new(options(2, Network::Udp));
    let devices = LocalDevices::new(Network::Udp, Faithful::all(), 2);
    world.engines.iter().for_each(|engine| engine.add_offload(DeviceKind::new(devices.clone())).unwrap());
    devices.faults().holds.store(true, Ordering::Relaxed);
    let groups: Vec<_> = world.try_run("g").into_iter().map(Result::unwrap).collect();
    let have_failed = Barrier::new(2);
    std::thread::scope(|scope| {
        for group in groups {
            let (devices, have_failed) = (&devices, &have_failed);
            scope.spawn(move || {
                let member = Member::new(group);
                let mut data = values(member.rank, 1000);
                let call = member.group.submit(member.all_reduce_desc(&mut data, ReduceOp::Sum, Mode::Async)).unwrap();
                while devices.faults().started.load(Ordering::Relaxed) < 2 {
                    std::thread::yield_now();
                }
                drop(member);
                let error = finish(&call).unwrap_err();
                assert!([ErrorKind::Aborted, ErrorKind::PeerLost].contains(&error.kind), "{error}");
                let then = data.clone();
                have_failed.wait();
                devices.faults().holds.store(false, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(20));
                assert_eq!(data, then);
            });
        }
    });
}
