//! External operations stage tensors in other memory. A call never gives memory back while an external operation uses
//! it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use accl_engine::{Blocks, Call, CallDesc, External, ExternalTask, MemoryKind, Mode, TensorDesc, Waited};
use accl_testkit::{Fabric, Member, World, WorldOptions, calls, finish};
use accl_types::{Collective, Dtype, Elems, Error, ErrorKind, Rank, ReduceOp, Result};

const FABRICS: &[Fabric] = &[Fabric::Loopback(4), Fabric::Shm, Fabric::Tcp];
const PATIENCE: Duration = Duration::from_secs(20);
const DEVICE: MemoryKind = MemoryKind::Device { id: 3 };
/// Bits in which the contents of device memory differ from their values. Code that treats device memory as host memory
/// gets wrong values.
const MASK: u8 = 0x5a;

fn options(world: u32, fabric: Fabric) -> WorldOptions {
    WorldOptions::new(world).over(fabric).timeout(PATIENCE)
}

/// When a stand-in for a device does its tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    /// The task is done before `begin` returns.
    AtOnce,
    /// The task is done on a thread of its own.
    Later,
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
    queue: Mutex<Sender<ExternalTask>>,
    held: Mutex<Receiver<ExternalTask>>,
}

impl Device {
    fn new(when: When) -> Arc<Self> {
        let (queue, held) = channel();
        let (begun, cancels) = Default::default();
        Arc::new(Self { when, begun, cancels, queue: Mutex::new(queue), held: Mutex::new(held) })
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
        match self.when {
            When::AtOnce => copy(task),
            When::Later => drop(std::thread::spawn(|| copy(task))),
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

/// Copies between the device's memory and the host's memory, and completes the task.
fn copy(task: ExternalTask) {
    for copy in task.copies() {
        let is_on_device = |tensor: &TensorDesc| tensor.memory() == DEVICE;
        assert!(is_on_device(&copy.from) != is_on_device(&copy.to), "one side is the device's");
        assert_eq!(copy.from.len_bytes(), copy.to.len_bytes());
        for at in 0..copy.to.len_bytes() as usize {
            // SAFETY: both tensors are dense and have `len_bytes` bytes, and only this task may access them until it
            // ends.
            unsafe { *copy.to.address().add(at) = *copy.from.address().add(at) ^ MASK };
        }
    }
    task.done();
}

/// Returns values as the device's memory holds them.
fn masked(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).map(|byte| byte ^ MASK).collect()
}

/// Describes a tensor in the device's memory.
fn on_device(bytes: &mut [u8]) -> TensorDesc {
    TensorDesc::dense(bytes.as_mut_ptr(), Dtype::F32, Elems(bytes.len() as u64 / 4)).in_memory(DEVICE)
}

fn all_reduce(bytes: &mut [u8], device: &Arc<Device>, mode: Mode) -> CallDesc {
    let mut desc = CallDesc::new(Collective::AllReduce, Dtype::F32);
    desc.outputs = Blocks::of(on_device(bytes));
    desc.mode = mode;
    desc.staging = Some(device.clone());
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
                    assert_eq!(device.begun(), 4, "a copy-in and a copy-out of each call");
                });
            }
        }
    }
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
        desc.staging = Some(device.clone());
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
fn no_external_operation_begins_where_ranks_make_different_calls() {
    for &fabric in FABRICS {
        World::new(options(2, fabric)).run("g", |member| {
            let device = Device::new(When::AtOnce);
            let mut bytes = masked(&values(member.rank, 50 + member.rank));
            let error = member.call(all_reduce(&mut bytes, &device, Mode::Blocking)).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Mismatch, "{error}");
            assert_eq!(device.begun(), 0, "{fabric:?}: it began before the ranks agreed");
        });
    }
}

/// The root of a broadcast receives nothing, so the ranks that only receive must send it an answer for the agreement.
#[test]
fn ranks_that_only_receive_answer_for_the_agreement() {
    for &fabric in FABRICS {
        World::new(options(4, fabric)).run("g", |member| {
            let device = Device::new(When::AtOnce);
            for _ in 0..20 {
                let mut bytes = masked(&values(if member.rank == 2 { 7 } else { 0 }, 30));
                let mut desc = all_reduce(&mut bytes, &device, Mode::Blocking);
                (desc.collective, desc.root) = (Collective::Broadcast, Rank(2));
                if member.rank == 2 {
                    member.call(desc).unwrap();
                } else {
                    let mut data = [0.0_f32; 30];
                    member.broadcast(&mut data, 2).unwrap();
                    assert_eq!(data[..], values(7, 30)[..]);
                }
            }
        });
    }
}

/// In a chain, an empty message is sent only after the message before it, like a message with data.
#[test]
fn a_chain_of_empty_messages_waits_for_an_external_operation_in_it() {
    for held in [0, 2] {
        World::new(options(3, Fabric::Shm).with("algorithm", "reduce=chain")).run("g", |member| {
            let device = Device::new(When::Held);
            let mut nothing: [u8; 0] = [];
            let mut desc = all_reduce(&mut nothing, &device, Mode::Async);
            (desc.collective, desc.root) = (Collective::Reduce, Rank(1));
            if member.rank != held {
                desc.outputs = Blocks::of(calls::write::<f32>(&mut []));
                desc.staging = None;
            }
            let call = member.group.submit(desc).unwrap();
            if member.rank == held {
                let task = device.take();
                // Gives the root time to end too early.
                let mut received = [0_u8];
                finish(&member.post_recv(&mut received, Some(1), 5).unwrap()).unwrap();
                copy(task);
            } else if member.rank == 1 {
                let waited = call.wait(Some(Duration::from_millis(50)), &mut || false);
                assert!(matches!(waited, Waited::TimedOut(_)), "the root has heard of rank {held}: {waited:?}");
                finish(&member.post_send(&[1_u8], held as u32, 5).unwrap()).unwrap();
            }
            finish(&call).unwrap();
        });
    }
}

#[test]
fn a_tensor_that_nothing_stages_is_refused_with_the_remedy() {
    World::new(options(2, Fabric::Loopback(4))).run("g", |member| {
        let device = Device::new(When::AtOnce);
        let mut bytes = [masked(&[1.0; 8]), masked(&[1.0; 8])];
        let [_, second] = &mut bytes;
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
        plain.staging = Some(device.clone());
        let mut scaled = plain.clone();
        scaled.op = ReduceOp::PremulSum;
        refused(scaled, &["all_reduce", "PREMUL_SUM", "scale it first"]);
        let mut strided = plain.clone();
        let view = TensorDesc::strided(second.as_mut_ptr(), Dtype::F32, &[4], &[2]).unwrap().in_memory(DEVICE);
        strided.outputs = Blocks::of(view);
        refused(strided, &["all_reduce", "output tensor 0", "contiguous"]);
        let mut message = CallDesc::new(Collective::Send, Dtype::F32);
        message.inputs = Blocks::of(on_device(second));
        message.peer = Some(Rank(1));
        message.staging = Some(device.clone());
        refused(message, &["send", "input tensor 0", "messages are not staged"]);
        assert_eq!(device.begun(), 0);
        // The refused calls have taken no sequence numbers.
        member.barrier().unwrap();
    });
}
