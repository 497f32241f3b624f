//! A device and the end of its group. The device is released with the group, even if parts of the group are still
//! referenced. It is closed before it is opened again.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use accl_device::DeviceKind;
use accl_engine::{Group, GroupRole, GroupSpec, Mode, Waited};
use accl_testkit::devices::{Faithful, LocalDevices, Network};
use accl_testkit::{Member, World};
use accl_types::{Error, ErrorKind, Rank, ReduceOp};

use crate::worlds::{PATIENCE, options, world_of};

const SOON: Duration = Duration::from_secs(5);
const NO_RANK: u32 = u32::MAX;

fn world(ranks: u32) -> (World, Arc<LocalDevices>) {
    world_with(ranks, PATIENCE)
}

fn world_with(ranks: u32, timeout: Duration) -> (World, Arc<LocalDevices>) {
    world_of(options(ranks, Network::Udp).timeout(timeout), Network::Udp)
}

fn add_up(member: &Member) {
    let mut data = [1_i64; 50];
    member.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    assert_eq!(data, [member.world as i64; 50]);
    assert!(member.group.describe().contains("1 calls: all_reduce int64 SUM 1"), "{}", member.group.describe());
}

fn open(devices: &LocalDevices) -> u32 {
    devices.faults().open.load(Ordering::SeqCst)
}

fn await_closed(devices: &LocalDevices) {
    let begin = Instant::now();
    while open(devices) != 0 {
        assert!(begin.elapsed() < SOON, "{} devices are open", open(devices));
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_group_that_is_left_and_still_held_has_no_device_open() {
    let (world, devices) = world(2);
    let held = world.run("g", |member| {
        add_up(&member);
        let mut data = [1_i64; 50];
        let call = member.group.submit(member.all_reduce_desc(&mut data, ReduceOp::Sum, Mode::Async)).unwrap();
        call.wait(None, &mut || false);
        member.group.shutdown().unwrap();
        (member.group, call)
    });
    await_closed(&devices);
    world.run("h", |member| add_up(&member));
    drop(held);
}

#[test]
fn devices_of_a_group_that_was_not_made_are_left_and_open_for_the_next() {
    let (world, devices) = world(3);
    devices.faults().does_not_open.store(1, Ordering::SeqCst);
    let failed = world.try_run("g");
    assert!(failed.iter().all(Result::is_err));
    await_closed(&devices);
    devices.faults().does_not_open.store(NO_RANK, Ordering::SeqCst);
    world.run("h", |member| add_up(&member));
}

/// Ends a call while the device of rank 0 is stuck in it.
fn end_stuck(member: &Member, devices: &LocalDevices) {
    add_up(member);
    member.barrier().unwrap();
    devices.faults().is_stuck.store(0, Ordering::SeqCst);
    let mut data = [1_i64; 50];
    let call = member.group.submit(member.all_reduce_desc(&mut data, ReduceOp::Sum, Mode::Async)).unwrap();
    let begin = Instant::now();
    while !devices.faults().waits.load(Ordering::SeqCst) {
        assert!(begin.elapsed() < SOON, "the device is asked nothing");
        std::thread::sleep(Duration::from_millis(1));
    }
    member.group.abort("the test wants it");
    // The stuck device does not use the memory of the call, so the call ends.
    assert!(matches!(call.wait(Some(SOON), &mut || false), Waited::Failed(_)));
}

fn leave_stuck(world: &World, devices: &LocalDevices) {
    world.run("g", |member| {
        end_stuck(&member, devices);
        let _ = member.group.shutdown();
    });
}

#[test]
fn a_stuck_device_is_not_opened_again_before_it_is_left() {
    let (world, devices) = world(1);
    leave_stuck(&world, &devices);
    assert_eq!(open(&devices), 1);
    let begin = Instant::now();
    let delay = Duration::from_millis(400);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(delay);
            assert_eq!(open(&devices), 1, "another was opened next to the one that is stuck");
            devices.faults().is_stuck.store(NO_RANK, Ordering::SeqCst);
        });
        world.run("h", |member| add_up(&member));
        assert!(begin.elapsed() >= delay);
    });
    await_closed(&devices);
}

#[test]
fn a_device_that_is_stuck_is_not_opened_again_by_another_engine_of_the_process() {
    // A first group that cannot be created takes its engine with it, but not the kind of its device.
    let devices = LocalDevices::new(Network::Udp, Faithful::all(), 1);
    let (kind, config) = (DeviceKind::new(devices.clone()), options(1, Network::Udp).config);
    let group = || {
        let engine = accl_calibrate::engine(config.clone());
        engine.add_offload(kind.clone()).unwrap();
        let spec = GroupSpec {
            name: "g".to_owned(),
            rank: Rank(0),
            world: 1,
            timeout: PATIENCE,
            config: config.clone(),
            master: None,
            global_ranks: Vec::new(),
            role: GroupRole::Default,
        };
        engine.create_group(spec, &accl_engine::MemoryStore::default(), &mut || false)
    };
    let member = Member::new(group().unwrap());
    end_stuck(&member, &devices);
    drop(member);
    assert_eq!(open(&devices), 1);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(300));
            assert_eq!(open(&devices), 1, "another was opened next to the one that is stuck");
            devices.faults().is_stuck.store(NO_RANK, Ordering::SeqCst);
        });
        drop(group().unwrap());
    });
    await_closed(&devices);
}

#[test]
fn a_device_that_stays_stuck_is_named_at_the_deadline_of_the_next_group() {
    let (world, devices) = world_with(1, Duration::from_millis(800));
    leave_stuck(&world, &devices);
    let errors: Vec<Error> = world.try_run("h").into_iter().map(|made| made.err().unwrap()).collect();
    assert_eq!(errors[0].kind, ErrorKind::Timeout, "{}", errors[0]);
    for error in errors {
        assert!(error.to_string().contains("is still busy with an earlier group"), "{error}");
    }
    devices.faults().is_stuck.store(NO_RANK, Ordering::SeqCst);
}

#[test]
fn the_end_of_the_process_leaves_a_stuck_device_behind() {
    let (world, devices) = world(2);
    world.run("g", |member| {
        end_stuck(&member, &devices);
        let begin = Instant::now();
        world.engines[member.rank].shutdown();
        assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    });
    assert_eq!(open(&devices), 1);
    devices.faults().is_stuck.store(NO_RANK, Ordering::SeqCst);
    await_closed(&devices);
}

#[test]
fn a_group_made_out_of_others_has_no_device_and_leaves_the_numbers_of_the_job_alone() {
    let (world, devices) = world(3);
    let whole = world.run("job", |member| {
        add_up(&member);
        member
    });
    let make = |rank: usize, name: &str, global_ranks: &[u64], ranks: &[usize]| -> accl_types::Result<Arc<Group>> {
        let engine = &world.engines[rank];
        let place = ranks.iter().position(|other| *other == rank).unwrap();
        let spec = GroupSpec {
            name: name.to_owned(),
            rank: Rank(place as u32),
            world: ranks.len() as u32,
            timeout: PATIENCE,
            config: engine.config().clone(),
            master: None,
            global_ranks: global_ranks.to_vec(),
            role: GroupRole::Other,
        };
        let store = world.store.prefixed(name);
        engine.create_group(spec, &store, &mut || false)
    };
    let make_all = |name: &str, global_ranks: &[u64], ranks: &[usize]| -> Vec<Arc<Group>> {
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                ranks.iter().map(|&rank| scope.spawn(move || make(rank, name, global_ranks, ranks))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect()
        })
    };
    // The ranks have another order than in the job.
    let merged = make_all("merged", &[], &[2, 1]);
    assert_eq!(open(&devices), 3, "a merged group has opened a device");
    assert!(merged.iter().all(|group| !group.describe().contains("device ")));
    // Rank 2 leaves the job. A process that used the ranks of the merged group would miss rank 0.
    world.engines[2].shutdown();
    let rest = make_all("rest", &[0, 1], &[0, 1]);
    drop((rest, merged, whole));
}
