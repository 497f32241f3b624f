//! External operations stage tensors in other memory. A call never gives memory back while an external operation uses
//! it.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::calls::{both_ways, max_min};
use crate::error_probe::probed;
use accl_engine::codec::Rounding;
use accl_engine::{
    Blocks, Call, CallDesc, External, ExternalCopy, ExternalTask, MemoryKind, Mode, Residuals, Staging, TensorDesc,
    Waited,
};
use accl_testkit::{Fabric, Member, World, WorldOptions, calls, finish};
use accl_types::config::WorkerCount;
use accl_types::{Collective, Dtype, Elems, Error, ErrorKind, Rank, ReduceOp, Result};

const FABRICS: &[Fabric] = &[Fabric::Loopback(4), Fabric::Shm, Fabric::Tcp];
const PATIENCE: Duration = Duration::from_secs(20);
const DEVICE: MemoryKind = MemoryKind::Device { id: 3 };
/// Bits in which the contents of device memory differ from their values. Code that treats device memory as host memory
/// gets wrong values.
const MASK: u8 = 0x5a;

/// Returns the options of a world in which a call has one part, and so one task for each direction.
fn options(world: u32, fabric: Fabric) -> WorldOptions {
    let mut options = WorldOptions::new(world).over(fabric).timeout(PATIENCE);
    options.config.worker_count = WorkerCount::Exactly(0);
    options
}

/// When a stand-in for a device does its tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    /// The task is done before `begin` returns.
    AtOnce,
    /// The task is done on a thread of its own.
    Later,
    /// The task is done on a thread of its own, with a pause before each copy into host memory.
    Slow,
    /// The task is done when the test does it.
    Held,
    /// The task fails at once.
    Fails,
    /// The task is done when the test does it. `begin` and `cancel` panic.
    Panics,
}

/// A stand-in for a device.
#[derive(Debug)]
struct Device {
    when: When,
    begun: AtomicUsize,
    cancels: AtomicUsize,
    /// Bytes of the copies of all tasks.
    copied: AtomicU64,
    queue: Mutex<Sender<ExternalTask>>,
    held: Mutex<Receiver<ExternalTask>>,
}

impl Device {
    fn new(when: When) -> Arc<Self> {
        let (queue, held) = channel();
        let (begun, cancels, copied) = Default::default();
        Arc::new(Self { when, begun, cancels, copied, queue: Mutex::new(queue), held: Mutex::new(held) })
    }

    fn begun(&self) -> usize {
        self.begun.load(Ordering::Relaxed)
    }

    /// Returns a task that was begun, or waits for one.
    fn take(&self) -> ExternalTask {
        self.held.lock().unwrap().recv_timeout(PATIENCE).expect("no task was begun")
    }
}

impl External for Device {
    fn name(&self) -> &str {
        "stand-in"
    }

    fn begin(&self, task: ExternalTask) {
        self.begun.fetch_add(1, Ordering::Relaxed);
        let bytes = task.copies().iter().map(|copy| copy.host.len_bytes()).sum();
        self.copied.fetch_add(bytes, Ordering::Relaxed);
        match self.when {
            // This thread may not wait for more to become ready.
            When::AtOnce if task.ready_copies() == task.copies().len() => copy(task),
            When::AtOnce => drop(std::thread::spawn(|| copy(task))),
            When::Later => drop(std::thread::spawn(|| copy(task))),
            When::Slow => drop(std::thread::spawn(|| copy_slowly(task))),
            When::Held => self.queue.lock().unwrap().send(task).unwrap(),
            When::Fails => task.fail("its fan has stopped"),
            When::Panics => {
                self.queue.lock().unwrap().send(task).unwrap();
                panic!("the stand-in was begun");
            }
        }
    }

    fn cancel(&self) {
        self.cancels.fetch_add(1, Ordering::Relaxed);
        assert!(self.when != When::Panics, "the stand-in was asked to stop");
    }
}

/// Copies between the device's memory and the host's memory as soon as the bytes are ready, and completes the task.
fn copy(task: ExternalTask) {
    let begin = Instant::now();
    while task.made_copies() < task.copies().len() {
        let (made, ready) = (task.made_copies(), task.ready_copies());
        task.copies()[made..ready].iter().for_each(|copy| copy_one(&task, copy));
        task.note_made(ready);
        if task.is_cancelled() {
            return;
        }
        assert!(begin.elapsed() < PATIENCE, "{ready} copies are ready");
        std::thread::yield_now();
    }
    task.done();
}

fn copy_slowly(task: ExternalTask) {
    let is_slow = !task.is_copy_out();
    for piece in 0..if is_slow { task.copies().len() } else { 0 } {
        std::thread::sleep(Duration::from_millis(20));
        copy_one(&task, &task.copies()[piece]);
        task.note_made(piece + 1);
    }
    copy(task);
}

fn copy_one(task: &ExternalTask, copy: &ExternalCopy) {
    assert_eq!((copy.tensor.memory(), copy.host.memory()), (DEVICE, MemoryKind::Host));
    for at in 0..copy.host.len_bytes() as usize {
        // SAFETY: the tensor is dense and has these bytes. Only this task may access them and their host memory until
        // it reports the copy.
        unsafe {
            let (device, host) = (copy.tensor.address().add(copy.at as usize + at), copy.host.address().add(at));
            if task.is_copy_out() {
                *device = *host ^ MASK;
            } else {
                *host = *device ^ MASK;
            }
        }
    }
}

/// Returns values as the device's memory holds them.
fn masked(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).map(|byte| byte ^ MASK).collect()
}

/// The workers of a call, one for each direction.
#[derive(Debug)]
struct Workers {
    copy_in: Arc<dyn External>,
    copy_out: Arc<dyn External>,
}

impl Staging for Workers {
    fn copy_in(&self, _: &[ExternalCopy], _: usize, _: &Arc<dyn Any + Send + Sync>) -> Result<Arc<dyn External>> {
        Ok(self.copy_in.clone())
    }

    fn copy_out(&self) -> Arc<dyn External> {
        self.copy_out.clone()
    }
}

/// Stages a call by one worker for both directions.
fn staging(worker: &Arc<impl External + 'static>) -> Option<Arc<dyn Staging>> {
    Some(Arc::new(Workers { copy_in: worker.clone(), copy_out: worker.clone() }))
}

/// Describes a tensor in the device's memory.
fn on_device(bytes: &mut [u8]) -> TensorDesc {
    TensorDesc::dense(bytes.as_mut_ptr(), Dtype::F32, Elems(bytes.len() as u64 / 4)).in_memory(DEVICE)
}

fn all_reduce(bytes: &mut [u8], device: &Arc<Device>, mode: Mode) -> CallDesc {
    let mut desc = CallDesc::new(Collective::AllReduce, Dtype::F32);
    desc.outputs = Blocks::of(on_device(bytes));
    desc.mode = mode;
    desc.staging = staging(device);
    desc
}

fn values(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|at| (rank + at % 7) as f32).collect()
}

fn sums(world: usize, count: usize) -> Vec<f32> {
    (0..count).map(|at| (0..world).map(|rank| (rank + at % 7) as f32).sum()).collect()
}

#[test]
fn an_all_reduce_between_a_copy_in_and_a_copy_out_is_right_wherever_its_tensors_lie() {
    for &fabric in FABRICS {
        for when in [When::AtOnce, When::Later] {
            for count in [0, 1, 100, 100_000] {
                World::new(options(3, fabric)).run("g", |member| {
                    let (device, expected) = (Device::new(when), sums(3, count));
                    for round in 0..3 {
                        // In each round, one rank has its tensor in host memory.
                        if member.rank == round {
                            let mut data = values(member.rank, count);
                            member.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                            assert_eq!(data, expected);
                            continue;
                        }
                        let mut bytes = masked(&values(member.rank, count));
                        member.call(all_reduce(&mut bytes, &device, Mode::Blocking)).unwrap();
                        assert!(bytes == masked(&expected), "{fabric:?} {when:?} {count}: other bytes came out");
                    }
                    let expected = if count == 0 { 0 } else { 4 };
                    assert_eq!(device.begun(), expected, "a copy-in and a copy-out of each call with elements");
                });
            }
        }
    }
}

#[test]
fn each_part_of_a_call_copies_its_own_bytes() {
    const COUNT: usize = 300_000;
    let mut options = options(2, Fabric::Tcp);
    options.config.worker_count = WorkerCount::Exactly(2);
    World::new(options).run("g", |member| {
        let device = Device::new(When::Later);
        for _ in 0..5 {
            let mut bytes = masked(&values(member.rank, COUNT));
            member.call(all_reduce(&mut bytes, &device, Mode::Blocking)).unwrap();
            assert!(bytes == masked(&sums(2, COUNT)));
        }
        assert_eq!(device.begun(), 5 * 3 * 2, "each part has a copy-in and a copy-out");
        assert_eq!(device.copied.load(Ordering::Relaxed), 5 * 2 * 4 * COUNT as u64, "no byte is copied twice");
    });
}

#[test]
fn calls_whose_inputs_or_outputs_alone_are_elsewhere_are_staged() {
    World::new(options(3, Fabric::Shm)).run("g", |member| {
        let device = Device::new(When::Later);
        let mut input = masked(&values(member.rank, 5));
        let mut output = [[0.0_f32; 5]; 3];
        let mut desc = CallDesc::new(Collective::AllGather, Dtype::F32);
        desc.inputs = Blocks::of(on_device(&mut input));
        desc.outputs = output.iter_mut().map(|part| [calls::write(part)]).collect();
        desc.staging = staging(&device);
        member.call(desc).unwrap();
        (0..3).for_each(|rank| assert_eq!(output[rank][..], values(rank, 5)[..]));
        assert_eq!(device.begun(), 1, "there is nothing to copy out");

        // On ranks other than the root, the tensor of a reduce is only read.
        let mut bytes = masked(&values(member.rank, 9));
        let before = bytes.clone();
        let mut desc = all_reduce(&mut bytes, &device, Mode::Blocking);
        (desc.collective, desc.root) = (Collective::Reduce, Rank(2));
        member.call(desc).unwrap();
        assert!(bytes == if member.rank == 2 { masked(&sums(3, 9)) } else { before });
    });
}

#[test]
fn equal_sizes_in_other_memory_are_another_shape() {
    World::new(options(2, Fabric::Shm)).run("g", |member| {
        let device = Device::new(When::AtOnce);
        for _ in 0..4 {
            let mut data = values(member.rank, 4);
            member.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, sums(2, 4));
            let mut bytes = masked(&values(member.rank, 4));
            member.call(all_reduce(&mut bytes, &device, Mode::Blocking)).unwrap();
            assert_eq!(bytes, masked(&sums(2, 4)));
        }
    });
}

#[test]
fn an_external_operation_that_ends_late_wakes_its_waiter() {
    for &fabric in FABRICS {
        for mode in [Mode::Blocking, Mode::Async] {
            World::new(options(2, fabric)).run("g", |member| {
                let device = Device::new(When::Held);
                let mut bytes = masked(&values(member.rank, 1000));
                let call = member.group.submit(all_reduce(&mut bytes, &device, mode)).unwrap();
                let worker = device.clone();
                let worker = std::thread::spawn(move || {
                    // Long enough for the waiting thread to fall asleep.
                    for _ in 0..2 {
                        let task = worker.take();
                        std::thread::park_timeout(Duration::from_millis(30));
                        copy(task);
                    }
                });
                finish(&call).unwrap();
                worker.join().unwrap();
                assert!(bytes == masked(&sums(2, 1000)));
            });
        }
    }
}

#[test]
fn a_failure_of_an_external_operation_names_it_and_its_cause_on_all_ranks() {
    for &fabric in FABRICS {
        let errors = World::new(options(3, fabric)).run("g", |member| {
            let device = Device::new(if member.rank == 1 { When::Fails } else { When::Later });
            let mut bytes = masked(&values(member.rank, 50));
            member.call(all_reduce(&mut bytes, &device, Mode::Blocking)).unwrap_err()
        });
        for (rank, error) in errors.iter().enumerate() {
            let text = error.to_string();
            assert_eq!(error.kind, ErrorKind::Device, "rank {rank}: {text}");
            let words = ["all_reduce", "copy-in by `stand-in` failed", "its fan has stopped", "check the output of"];
            assert!(words.iter().all(|word| text.contains(word)), "rank {rank}: {text}");
            let blame = if rank == 1 { "[rank 1]" } else { "rank 1 reported" };
            assert!(text.contains(blame), "rank {rank}: {text}");
        }
    }
}

/// Checks that a call which fails during its external operation ends only after the operation has stopped, and that
/// nothing is written later. Returns the error of the call.
fn fails_under_way(world: u32, make_fail: impl Fn(&Member) + Sync, timeout: Duration) -> Error {
    let errors = World::new(options(world, Fabric::Shm)).run("g", |member| {
        if member.rank != 0 {
            make_fail(&member);
            return None;
        }
        let device = Device::new(When::Held);
        let mut bytes = masked(&values(0, 100));
        let mut desc = all_reduce(&mut bytes, &device, Mode::Async);
        desc.timeout = Some(timeout);
        let call = member.group.submit(desc).unwrap();
        let task = device.take();
        assert!(!task.is_cancelled());
        make_fail(&member);
        until("the group has failed", || poll(&call).is_some() || task.is_cancelled());
        assert!(task.is_cancelled() && device.cancels.load(Ordering::Relaxed) == 1);
        // The task may take its time, and writes. Until the group is left, a snapshot shows what the call waits for.
        if let Some(group) = member.group.snapshot().groups.first() {
            let seen: Vec<_> =
                group.in_flight.iter().map(|call| (call.awaits.len(), call.external.as_deref())).collect();
            assert!(matches!(seen[..], [(0, Some(what))] if what.contains("copy-in by `stand-in`")), "{seen:?}");
        }
        let waited = call.wait(Some(Duration::from_millis(50)), &mut || false);
        assert!(matches!(waited, Waited::TimedOut(_)), "the call has ended under its external operation: {waited:?}");
        copy(task);
        let error = match call.wait(Some(PATIENCE), &mut || false) {
            Waited::Failed(error) => error,
            other => panic!("{other:?}"),
        };
        assert_eq!(device.begun(), 1, "nothing begins in a call that has failed");
        Some(error)
    });
    errors.into_iter().flatten().next().unwrap()
}

fn poll(call: &Call) -> Option<()> {
    let _ = call.wait(Some(Duration::from_millis(1)), &mut || false);
    call.is_done().then_some(())
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < PATIENCE, "not before the test's patience was over: {what}");
        std::thread::yield_now();
    }
}

/// Takes part in rank 0's call until the call has failed.
fn take_part(member: &Member) -> Result<()> {
    member.all_reduce(&mut values(member.rank, 100), ReduceOp::Sum)
}

#[test]
fn an_abort_waits_for_the_external_operation_under_way() {
    let abort = |member: &Member| match member.rank {
        0 => member.group.abort("the test wants it"),
        _ => drop(take_part(member)),
    };
    let error = fails_under_way(2, abort, PATIENCE);
    assert_eq!(error.kind, ErrorKind::Aborted, "{error}");
}

#[test]
fn who_leaves_the_group_waits_for_the_external_operation_under_way() {
    let leave = |member: &Member| match member.rank {
        0 => drop(member.group.leave()),
        _ => drop(take_part(member)),
    };
    let error = fails_under_way(2, leave, PATIENCE);
    assert_eq!(error.kind, ErrorKind::Aborted, "{error}");
    assert!(error.to_string().contains("the group was destroyed while calls were in flight"), "{error}");
}

#[test]
fn a_panic_in_an_external_operation_fails_its_call_when_it_has_let_go_of_the_memory() {
    let device = Device::new(When::Panics);
    World::new(options(2, Fabric::Shm)).run("g", |member| {
        if member.rank != 0 {
            let _ = take_part(&member);
            return;
        }
        let mut memory = masked(&values(0, 100));
        let call = member.group.submit(all_reduce(&mut memory, &device, Mode::Async)).unwrap();
        let task = device.take();
        member.group.abort("the test ends it");
        let soon = Some(Duration::from_millis(100));
        assert!(matches!(call.wait(soon, &mut || false), Waited::TimedOut(_)), "the task is under way");
        task.done();
        assert!(matches!(call.wait(Some(PATIENCE), &mut || false), Waited::Failed(_)));
    });
}

#[test]
fn an_engine_that_ends_gives_no_memory_back_under_an_external_operation() {
    let device = Device::new(When::Held);
    let world = World::new(options(1, Fabric::Shm));
    let mut held = world.run("g", |member| {
        let mut memory = masked(&values(0, 100));
        let call = member.group.submit(all_reduce(&mut memory, &device, Mode::Async)).unwrap();
        (call, device.take(), memory)
    });
    let (call, task, memory) = held.remove(0);
    // The shutdown of the engine also waits for the task, for a limited time.
    let ending = std::thread::spawn(|| drop(world));
    let soon = Some(Duration::from_millis(100));
    assert!(matches!(call.wait(soon, &mut || false), Waited::TimedOut(_)), "the task is under way");
    task.done();
    assert!(matches!(call.wait(Some(PATIENCE), &mut || false), Waited::Failed(_)));
    ending.join().unwrap();
    drop(memory);
}

#[test]
fn a_deadline_waits_for_the_external_operation_under_way_and_names_it() {
    let late = |member: &Member| {
        if member.rank != 0 {
            let _ = take_part(member);
        }
    };
    let error = fails_under_way(2, late, Duration::from_millis(300));
    assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
    let words = ["all_reduce", "Timed out waiting 300ms", "the external operation copy-in by `stand-in` on this rank"];
    assert!(words.iter().all(|word| error.to_string().contains(word)), "{error}");
}

#[test]
fn the_end_of_another_rank_waits_for_the_external_operation_under_way() {
    let go = AtomicBool::new(false);
    let vanish = |member: &Member| match member.rank {
        0 => go.store(true, Ordering::Release),
        1 => {
            // The rank takes part, so that the ranks agree on the call, and then leaves.
            let mut data = values(1, 100);
            let call = member.group.submit(member.all_reduce_desc(&mut data, ReduceOp::Sum, Mode::Async)).unwrap();
            until("rank 0 has begun", || {
                let _ = call.wait(Some(Duration::from_millis(1)), &mut || false);
                go.load(Ordering::Acquire)
            });
            let _ = member.group.leave();
            let _ = call.wait(Some(PATIENCE), &mut || false);
        }
        _ => drop(take_part(member)),
    };
    let error = fails_under_way(3, vanish, PATIENCE);
    assert!(matches!(error.kind, ErrorKind::PeerLost | ErrorKind::Aborted), "{error}");
}

#[test]
fn nothing_is_copied_out_where_ranks_make_different_calls() {
    for &fabric in FABRICS {
        World::new(options(2, fabric)).run("g", |member| {
            let device = Device::new(When::AtOnce);
            let mut bytes = masked(&values(member.rank, 50 + member.rank));
            let before = bytes.clone();
            let error = member.call(all_reduce(&mut bytes, &device, Mode::Blocking)).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Mismatch, "{error}");
            assert!(bytes == before, "{fabric:?}: the tensor was written");
        });
    }
}

#[test]
fn a_root_copies_its_broadcast_in_and_the_others_copy_it_out() {
    for &fabric in FABRICS {
        World::new(options(4, fabric)).run("g", |member| {
            let device = Device::new(When::Later);
            for _ in 0..20 {
                let mut bytes = masked(&values(if member.rank == 2 { 7 } else { 0 }, 30));
                let mut desc = all_reduce(&mut bytes, &device, Mode::Blocking);
                (desc.collective, desc.root) = (Collective::Broadcast, Rank(2));
                member.call(desc).unwrap();
                assert!(bytes == masked(&values(7, 30)));
            }
            assert_eq!(device.begun(), 20, "one copy of each call");
        });
    }
}

/// A device that copies in one piece at a time, as the test allows.
#[derive(Debug, Default)]
struct Stepwise {
    task: Mutex<Option<ExternalTask>>,
    out: Mutex<Option<ExternalTask>>,
}

impl External for Stepwise {
    fn name(&self) -> &str {
        "stepwise"
    }

    fn begin(&self, task: ExternalTask) {
        let held = if task.is_copy_out() { &self.out } else { &self.task };
        *held.lock().unwrap() = Some(task);
    }
}

/// Results of a large call are copied out while most of its tensor has yet to be copied in.
#[test]
fn a_call_streams_behind_its_copies() {
    const COUNT: usize = 4 << 20;
    World::new(options(2, Fabric::Shm)).run("g", |member| {
        let device: Arc<Stepwise> = Arc::default();
        let mut bytes = masked(&values(member.rank, COUNT));
        let mut desc = CallDesc::new(Collective::AllReduce, Dtype::F32);
        desc.outputs = Blocks::of(on_device(&mut bytes));
        desc.mode = Mode::Async;
        desc.staging = staging(&device);
        let call = member.group.submit(desc).unwrap();
        let task = device.task.lock().unwrap().take().unwrap();
        let pieces = task.copies().len();
        assert_eq!((pieces, task.ready_copies()), (16, 16), "pieces of 1 MiB");
        let out = || device.out.lock().unwrap();
        for piece in 0..pieces {
            assert!(out().as_ref().is_none_or(|out| out.ready_copies() < pieces), "more is final than has arrived");
            copy_one(&task, &task.copies()[piece]);
            task.note_made(piece + 1);
            if piece == 11 {
                until("something is final", || {
                    let _ = call.wait(Some(Duration::from_millis(1)), &mut || false);
                    out().is_some()
                });
            }
        }
        task.done();
        until("the copy-out has begun", || out().is_some());
        copy(out().take().unwrap());
        finish(&call).unwrap();
        assert!(bytes == masked(&sums(2, COUNT)));
    });
}

fn message(bytes: &mut [u8], device: &Arc<Device>, collective: Collective, peer: Option<u32>) -> CallDesc {
    let mut desc = CallDesc::new(collective, Dtype::F32);
    let blocks = Blocks::of(on_device(bytes));
    *if collective == Collective::Send { &mut desc.inputs } else { &mut desc.outputs } = blocks;
    (desc.peer, desc.mode) = (peer.map(Rank), Mode::Async);
    desc.staging = staging(device);
    desc
}

/// Messages of more bytes than a ring has, each between a device and host memory or two devices.
#[test]
fn a_message_passes_through_a_ring_wherever_its_tensors_lie() {
    for &fabric in FABRICS {
        for (count, when) in [(0, When::Later), (1, When::AtOnce), (1000, When::Later), (5_000_000, When::Later)] {
            for (from_device, to_device, from_any) in [(true, true, true), (true, false, false), (false, true, false)] {
                World::new(options(2, fabric)).run("g", |member| {
                    let device = Device::new(when);
                    let mut host = values(7, count);
                    let mut bytes = masked(&host);
                    if member.rank == 0 {
                        let call = match from_device {
                            true => member.group.submit(message(&mut bytes, &device, Collective::Send, Some(1))),
                            false => member.post_send(&host, 1, 0),
                        };
                        // A message behind the staged one arrives although it has its bytes at once.
                        let behind = member.post_send(&[member.rank as u8], 1, 3).unwrap();
                        finish(&call.unwrap()).unwrap();
                        finish(&behind).unwrap();
                        return;
                    }
                    bytes.fill(0);
                    host.fill(0.0);
                    let peer = if from_any { None } else { Some(0) };
                    let call = match to_device {
                        true => member.group.submit(message(&mut bytes, &device, Collective::Recv, peer)),
                        false => member.post_recv(&mut host, peer, 0),
                    };
                    let mut behind = [9_u8];
                    finish(&member.post_recv(&mut behind, Some(0), 3).unwrap()).unwrap();
                    let call = call.unwrap();
                    finish(&call).unwrap();
                    assert_eq!((behind, call.source_rank()), ([0], Some(Rank(0))));
                    let expected = values(7, count);
                    assert!(
                        if to_device { bytes == masked(&expected) } else { host == expected },
                        "{fabric:?} {count}"
                    );
                });
            }
        }
    }
}

#[test]
fn messages_behind_one_whose_bytes_have_not_arrived_overtake_its_bytes() {
    for &fabric in FABRICS {
        World::new(options(2, fabric)).run("g", |member| {
            let device = Device::new(When::Held);
            let mut bytes = masked(&values(3, 100));
            if member.rank == 0 {
                let call = member.group.submit(message(&mut bytes, &device, Collective::Send, Some(1))).unwrap();
                finish(&member.post_send(&[5_u8], 1, 3).unwrap()).unwrap();
                let mut answer = [0_u8];
                finish(&member.post_recv(&mut answer, Some(1), 4).unwrap()).unwrap();
                copy(device.take());
                return finish(&call).unwrap();
            }
            let mut host = [0.0_f32; 100];
            let call = member.post_recv(&mut host, Some(0), 0).unwrap();
            let mut behind = [0_u8];
            finish(&member.post_recv(&mut behind, Some(0), 3).unwrap()).unwrap();
            assert!(!call.is_done());
            finish(&member.post_send(&behind, 0, 4).unwrap()).unwrap();
            finish(&call).unwrap();
            assert_eq!(host[..], values(3, 100)[..]);
        });
    }
}

/// The peer of a message has done its part when this rank has the bytes.
#[test]
fn a_message_that_is_being_copied_out_waits_for_its_device_and_not_for_its_peer() {
    World::new(options(2, Fabric::Shm)).run("g", |member| {
        if member.rank == 0 {
            finish(&member.post_send(&values(3, 100), 1, 0).unwrap()).unwrap();
            return;
        }
        let device = Device::new(When::Held);
        let mut bytes = vec![0; 400];
        let mut desc = message(&mut bytes, &device, Collective::Recv, Some(0));
        desc.timeout = Some(Duration::from_millis(500));
        let call = member.group.submit(desc).unwrap();
        until("the copy-out has begun", || {
            let _ = call.wait(Some(Duration::from_millis(1)), &mut || false);
            device.begun() == 1
        });
        let task = device.take();
        // Rank 0 may leave now.
        until("the task is wanted back", || {
            let _ = call.wait(Some(Duration::from_millis(1)), &mut || false);
            task.is_cancelled()
        });
        assert!(!call.is_done(), "the call has ended under its external operation");
        drop(task);
        let Waited::Failed(error) = call.wait(Some(PATIENCE), &mut || false) else { panic!("it has failed") };
        assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
        let words = ["recv", "the external operation copy-out by `stand-in` on this rank"];
        assert!(words.iter().all(|word| error.to_string().contains(word)), "{error}");
    });
}

#[test]
fn a_failed_copy_of_a_message_is_an_error_of_both_ranks() {
    for (rank, step) in [(0, "copy-in"), (1, "copy-out")] {
        let errors = World::new(options(2, Fabric::Shm)).run("g", |member| {
            let device = Device::new(if member.rank == rank { When::Fails } else { When::Later });
            let mut bytes = masked(&values(3, 100));
            let (collective, peer) = if member.rank == 0 { (Collective::Send, 1) } else { (Collective::Recv, 0) };
            let call = member.group.submit(message(&mut bytes, &device, collective, Some(peer)));
            let ended = call.and_then(|call| finish(&call));
            // The sender of a message is done when its bytes have left.
            let ended = ended.and_then(|()| member.barrier());
            ended.unwrap_err()
        });
        for (of, error) in errors.iter().enumerate() {
            let text = error.to_string();
            assert_eq!(error.kind, ErrorKind::Device, "rank {of}: {text}");
            assert!(text.contains(&format!("{step} by `stand-in` failed: its fan has stopped")), "rank {of}: {text}");
        }
    }
}

/// Describes the blocks of one tensor on the device.
fn blocks_of(bytes: &mut [u8], of: usize) -> Blocks {
    let len = bytes.len() / of;
    bytes.chunks_mut(len).map(|block| [on_device(block)]).collect()
}

/// On host memory, contributions are packed before anything is written.
#[test]
fn tensors_that_share_memory_give_the_results_of_the_host() {
    const COUNT: usize = 400_000;
    for workers in [0, 2] {
        for first in [0, 2] {
            let mut options = options(3, Fabric::Shm);
            options.config.worker_count = WorkerCount::Exactly(workers);
            World::new(options).run("g", |member| {
                // One rank's device is slower than the others'.
                let device = Device::new(if member.rank == first { When::Slow } else { When::Later });
                let block = |from: usize, to: usize| values(from * 5 + to, COUNT);
                // Input and output of an all_to_all are one tensor.
                let sent: Vec<f32> = (0..3).flat_map(|to| block(member.rank, to)).collect();
                let mut bytes = masked(&sent);
                let mut desc = CallDesc::new(Collective::AllToAll, Dtype::F32);
                (desc.inputs, desc.outputs) = (blocks_of(&mut bytes, 3), blocks_of(&mut bytes, 3));
                desc.staging = staging(&device);
                member.call(desc).unwrap();
                let expected: Vec<f32> = (0..3).flat_map(|from| block(from, member.rank)).collect();
                assert!(bytes == masked(&expected), "all_to_all over one tensor");

                // The contribution to an all_gather lies in another rank's block of the output.
                let mut bytes = masked(&vec![0.0; 3 * COUNT]);
                let of_next = (member.rank + 1) % 3 * 4 * COUNT;
                bytes[of_next..of_next + 4 * COUNT].copy_from_slice(&masked(&values(member.rank, COUNT)));
                let mut desc = CallDesc::new(Collective::AllGather, Dtype::F32);
                desc.inputs = Blocks::of(on_device(&mut bytes[of_next..of_next + 4 * COUNT]));
                (desc.outputs, desc.staging) = (blocks_of(&mut bytes, 3), staging(&device));
                member.call(desc).unwrap();
                let expected: Vec<f32> = (0..3).flat_map(|from| values(from, COUNT)).collect();
                assert!(bytes == masked(&expected), "all_gather from another block");

                // One tensor is given twice.
                let mut bytes = masked(&values(member.rank, COUNT));
                let mut desc = all_reduce(&mut bytes, &device, Mode::Blocking);
                desc.outputs = Blocks::default();
                desc.outputs.push([on_device(&mut bytes), on_device(&mut bytes)]);
                member.call(desc).unwrap();
                assert!(bytes == masked(&sums(3, COUNT)), "one tensor given twice");
            });
        }
    }
}

/// Parts of such calls begin and end within elements.
#[test]
fn tensors_of_several_dtypes_are_whole_in_calls_of_several_parts() {
    const COUNT: usize = 100_000;
    let mut options = options(2, Fabric::Shm);
    options.config.worker_count = WorkerCount::Exactly(2);
    World::new(options).run("g", |member| {
        let device = Device::new(When::Later);
        for root in 0..2 {
            let is_root = member.rank as u32 == root;
            let mut small = if is_root { [1 ^ MASK, 2 ^ MASK, 3 ^ MASK] } else { [0; 3] };
            let mut large = masked(&values(if is_root { 7 } else { 0 }, COUNT));
            let mut desc = CallDesc::new(Collective::Broadcast, Dtype::U8);
            let first = TensorDesc::dense(small.as_mut_ptr(), Dtype::U8, Elems(3)).in_memory(DEVICE);
            desc.outputs.push([first, on_device(&mut large)]);
            (desc.root, desc.staging) = (Rank(root), staging(&device));
            member.call(desc).unwrap();
            assert_eq!(small, [1 ^ MASK, 2 ^ MASK, 3 ^ MASK]);
            assert!(large == masked(&values(7, COUNT)), "root {root}");
        }
    });
}

/// The copy-out has made everything that is final, so it is the peer that is late.
#[test]
fn a_timeout_names_the_peer_while_the_copy_out_waits_for_it() {
    const COUNT: usize = 3 << 20;
    let errors = World::new(options(2, Fabric::Shm)).run("g", |member| {
        let device: Arc<Stepwise> = Arc::default();
        let mut bytes = masked(&values(member.rank, COUNT));
        let mut desc = CallDesc::new(Collective::AllReduce, Dtype::F32);
        desc.outputs = Blocks::of(on_device(&mut bytes));
        desc.mode = Mode::Async;
        desc.staging = staging(&device);
        desc.timeout = Some(Duration::from_millis(if member.rank == 0 { 1500 } else { 20_000 }));
        let call = member.group.submit(desc).unwrap();
        let task = device.task.lock().unwrap().take().unwrap();
        let pieces = task.copies().len();
        // Rank 1 has only a part of its tensor.
        let most = if member.rank == 0 { pieces } else { pieces * 3 / 4 };
        task.copies()[..most].iter().for_each(|copy| copy_one(&task, copy));
        task.note_made(most);
        let mut out: Option<ExternalTask> = None;
        until("the call has failed", || {
            let _ = call.wait(Some(Duration::from_millis(1)), &mut || false);
            out = out.take().or_else(|| device.out.lock().unwrap().take());
            if let Some(out) = &out {
                let (made, ready) = (out.made_copies(), out.ready_copies());
                out.copies()[made..ready].iter().for_each(|copy| copy_one(out, copy));
                out.note_made(ready);
            }
            task.is_cancelled()
        });
        drop((task, out));
        match call.wait(Some(PATIENCE), &mut || false) {
            Waited::Failed(error) => error,
            other => panic!("{other:?}"),
        }
    });
    let text = errors[0].to_string();
    assert!(errors[0].kind == ErrorKind::Timeout && !text.contains("copy-out") && text.contains("rank 1"), "{text}");
}

#[test]
fn a_worker_that_panics_when_more_is_ready_fails_its_call() {
    #[derive(Debug, Default)]
    struct Panics(Mutex<Vec<ExternalTask>>);

    impl External for Panics {
        fn name(&self) -> &str {
            "stand-in"
        }

        fn begin(&self, task: ExternalTask) {
            self.0.lock().unwrap().push(task);
        }

        fn copies_are_ready(&self) {
            panic!("the stand-in learned of more");
        }
    }

    World::new(options(2, Fabric::Shm)).run("g", |member| {
        let (device, panics) = (Device::new(When::AtOnce), Arc::new(Panics::default()));
        let mut bytes = masked(&values(member.rank, 100));
        let mut desc = all_reduce(&mut bytes, &device, Mode::Async);
        if member.rank == 0 {
            desc.staging = Some(Arc::new(Workers { copy_in: device.clone(), copy_out: panics.clone() }));
        }
        let call = member.group.submit(desc).unwrap();
        if member.rank == 0 {
            until("the task is wanted back", || {
                let _ = call.wait(Some(Duration::from_millis(1)), &mut || false);
                panics.0.lock().unwrap().first().is_some_and(ExternalTask::is_cancelled)
            });
            panics.0.lock().unwrap().clear();
            let Waited::Failed(error) = call.wait(Some(PATIENCE), &mut || false) else { panic!("it has failed") };
            assert!(error.to_string().contains("copy-out by `stand-in` failed: the worker panicked"), "{error}");
        } else {
            let _ = call.wait(Some(PATIENCE), &mut || false);
        }
    });
}

#[test]
fn premul_sum_scales_what_has_been_copied_in() {
    World::new(options(2, Fabric::Shm)).run("g", |member| {
        let device = Device::new(When::Later);
        let mut bytes = masked(&values(member.rank, 1000));
        let mut desc = all_reduce(&mut bytes, &device, Mode::Blocking);
        (desc.op, desc.factor) = (ReduceOp::PremulSum, 0.5);
        member.call(desc).unwrap();
        assert!(bytes == masked(&sums(2, 1000).iter().map(|sum| sum / 2.0).collect::<Vec<_>>()));
        let mut integers = [1_i32; 4];
        let tensor = TensorDesc::dense(integers.as_mut_ptr().cast(), Dtype::I32, Elems(4)).in_memory(DEVICE);
        let mut desc = all_reduce(&mut [], &device, Mode::Blocking);
        (desc.dtype, desc.outputs, desc.op, desc.factor) = (Dtype::I32, Blocks::of(tensor), ReduceOp::PremulSum, 0.5);
        let error = member.group.submit(desc).map(drop).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Unsupported, "{error}");
        assert_eq!(device.begun(), 2, "nothing begins in a call that is refused");
    });
}

#[test]
fn a_worker_that_ends_before_everything_is_final_fails_its_call() {
    World::new(options(2, Fabric::Shm)).run("g", |member| {
        let device: Arc<Stepwise> = Arc::default();
        let mut bytes = masked(&values(member.rank, 3 << 20));
        let mut desc = CallDesc::new(Collective::AllReduce, Dtype::F32);
        desc.outputs = Blocks::of(on_device(&mut bytes));
        desc.mode = Mode::Async;
        desc.staging = staging(&device);
        let call = member.group.submit(desc).unwrap();
        let task = device.task.lock().unwrap().take().unwrap();
        task.copies()[..9].iter().for_each(|copy| copy_one(&task, copy));
        task.note_made(9);
        until("something is final", || poll(&call).is_some() || device.out.lock().unwrap().is_some());
        if let Some(out) = device.out.lock().unwrap().take() {
            assert!(out.ready_copies() < out.copies().len());
            out.done();
        }
        until("the call gives its memory back", || task.is_cancelled());
        drop(task);
        assert!(matches!(call.wait(Some(PATIENCE), &mut || false), Waited::Failed(_)));
    });
}

#[test]
fn measured_calls_have_the_same_figures_and_bits_wherever_their_tensors_lie() {
    const COUNT: usize = 300_007;
    /// Figures, bits of the sums, and bits of the residual.
    type Result = ((u64, u64, u64, u64, u64), Vec<Vec<u8>>, Vec<u32>);
    let results: Vec<Vec<Result>> = [(0, false), (0, true), (2, false), (2, true)]
        .into_iter()
        .map(|(workers, is_staged)| {
            let mut options = crate::calls::options(&[0, 1], "all_reduce", "direct_two_phase").over(Fabric::Tcp);
            options.config.worker_count = WorkerCount::Exactly(workers);
            World::new(options).run("g", move |member| {
                let (mut encoding, stats) = probed(vec![both_ways(max_min(4, 64, Rounding::Stochastic), 5)], 64);
                let kept = vec![0.0_f32; COUNT];
                let contributions = vec![kept.as_ptr() as usize];
                encoding.residuals = Some(Arc::new(Residuals { contributions, sums: vec![], ..Residuals::default() }));
                let device = Device::new(When::Later);
                let mut bits = Vec::new();
                for step in 0..2 {
                    encoding.step = step;
                    let mut bytes = masked(&crate::calls::data(member.rank, COUNT, 1 + step));
                    if !is_staged {
                        bytes.iter_mut().for_each(|byte| *byte ^= MASK);
                    }
                    let mut desc = all_reduce(&mut bytes, &device, Mode::Blocking);
                    if !is_staged {
                        let host = TensorDesc::dense(bytes.as_mut_ptr(), Dtype::F32, Elems(COUNT as u64));
                        desc.outputs = Blocks::of(host);
                    }
                    desc.encoding = encoding.clone().into();
                    member.call(desc).unwrap();
                    bits.push(bytes.iter().map(|byte| byte ^ if is_staged { MASK } else { 0 }).collect::<Vec<_>>());
                }
                let lanes = member.group.snapshot().groups[0].lanes.len();
                assert_eq!(lanes, workers as usize + 1);
                let [row] = stats.read()[..] else { panic!("one tensor") };
                let kept: Vec<u32> = kept.iter().map(|lost| lost.to_bits()).collect();
                ((row.calls, row.compared, row.error.to_bits(), row.square.to_bits(), row.residual_calls), bits, kept)
            })
        })
        .collect();
    assert!(results[0][0].0.1 > 0, "something was compared");
    for other in &results[1..] {
        let figures = |all: &[Result]| all.iter().map(|one| one.0).collect::<Vec<_>>();
        assert_eq!(figures(&results[0]), figures(other));
        assert!(results[0] == *other, "other bits");
    }
}

/// The result lies over this rank's own contribution, once in host memory and once on the device.
#[test]
fn a_measured_reduce_scatter_in_place_has_the_figures_of_the_host() {
    const COUNT: usize = 200_000;
    let figures = [[false, false], [true, true], [false, true]].map(|are_staged| {
        let options = crate::calls::options(&[0, 1], "reduce_scatter", "direct").over(Fabric::Tcp);
        World::new(options).run("g", move |member| {
            let codec = || both_ways(max_min(4, 64, Rounding::Nearest), 5);
            let (encoding, stats) = probed(vec![codec(), codec()], 16);
            let device = Device::new(When::Slow);
            let mut tensors = [0, 1].map(|seed| {
                let mut bytes = masked(&crate::calls::data(member.rank, 2 * COUNT, seed));
                if !are_staged[seed as usize] {
                    bytes.iter_mut().for_each(|byte| *byte ^= MASK);
                }
                bytes
            });
            let mut block = |rank: usize| -> Vec<TensorDesc> {
                let parts = tensors.iter_mut().zip(are_staged);
                let part = |(tensor, is_staged): (&mut Vec<u8>, bool)| {
                    let bytes = &mut tensor[4 * COUNT * rank..4 * COUNT * (rank + 1)];
                    let host = TensorDesc::dense(bytes.as_mut_ptr(), Dtype::F32, Elems(COUNT as u64));
                    if is_staged { host.in_memory(DEVICE) } else { host }
                };
                parts.map(part).collect()
            };
            let mut desc = CallDesc::new(Collective::ReduceScatter, Dtype::F32);
            desc.inputs = [block(0), block(1)].into_iter().collect();
            desc.outputs = [block(member.rank)].into_iter().collect();
            desc.encoding = encoding.into();
            desc.staging = staging(&device);
            member.call(desc).unwrap();
            stats.read().iter().map(|row| (row.compared, row.error.to_bits(), row.square.to_bits())).collect::<Vec<_>>()
        })
    });
    assert!(figures[0][0][0].0 > 0, "something was compared");
    assert_eq!(figures[0], figures[1], "on the device");
    assert_eq!(figures[0], figures[2], "on both");
}

#[test]
fn a_tensor_that_nothing_stages_is_refused_with_the_remedy() {
    World::new(options(2, Fabric::Loopback(4))).run("g", |member| {
        let device = Device::new(When::AtOnce);
        let mut bytes = [masked(&[1.0; 8]), masked(&[1.0; 8])];
        let [first, second] = &mut bytes;
        let mut host = [1.0_f32; 8];
        let refused = |desc: CallDesc, words: &[&str]| {
            let error = member.group.submit(desc).map(drop).unwrap_err();
            let text = error.to_string();
            assert_eq!(error.kind, ErrorKind::Unsupported, "{text}");
            let place = format!("[rank {}]", member.rank);
            let words = words.iter().copied().chain([&place[..], "the memory of device 3"]);
            words.for_each(|word| assert!(text.contains(word), "`{word}` is not in: {text}"));
        };
        let mut plain = CallDesc::new(Collective::AllReduce, Dtype::F32);
        plain.outputs.push([calls::write(&mut host), on_device(second)]);
        refused(plain.clone(), &["all_reduce", "output tensor 1", "copy it to host memory first, or set `staging`"]);
        plain.staging = staging(&device);
        let mut two = plain.clone();
        let elsewhere = on_device(first).in_memory(MemoryKind::Device { id: 7 });
        two.outputs = Blocks::default();
        two.outputs.push([elsewhere, on_device(second)]);
        refused(two, &["output tensor 1", "output tensor 0 is in the memory of device 7", "on one device"]);
        assert_eq!(device.begun(), 0);
        // The refused calls have taken no sequence numbers.
        member.barrier().unwrap();
    });
}
