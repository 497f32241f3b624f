//! Calls by reference: ranks read each other's memory, and the results have the bits of the plain call.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use accl_engine::{
    ALGORITHMS, Blocks, CallDesc, External, ExternalCopy, ExternalTask, MemoryKind, Publisher, PublishingNeeds,
    Staging, TensorDesc,
};
use accl_schedule::Topology;
use accl_testkit::publisher::Published;
use accl_testkit::{Member, Rng, World};
use accl_types::{Collective, Dtype, Elems, ErrorKind, Rank, ReduceOp, Result};

use crate::calls::options;

const PATIENCE: Duration = Duration::from_secs(20);
const DEVICE: MemoryKind = MemoryKind::Device { id: 3 };

/// Manner in which the workers of a device do their tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    /// All tiles that are ready, task by task.
    Eager,
    /// A few tiles at a time, of a task that is drawn, reported late.
    Slow,
    /// Fails the second task.
    Fails,
    /// Has no memory to publish in.
    Poor,
}

/// A device whose memory all ranks of the process read.
struct Device {
    manner: Manner,
    queue: Mutex<Sender<(Arc<Published>, ExternalTask)>>,
    begun: AtomicUsize,
    is_over: Arc<AtomicBool>,
}

impl Device {
    fn new(manner: Manner, seed: u64) -> Arc<Self> {
        let (queue, tasks) = channel();
        let is_over: Arc<AtomicBool> = Arc::default();
        let over = is_over.clone();
        std::thread::spawn(move || serve(manner, &tasks, &over, Rng::new(seed)));
        Arc::new(Self { manner, queue: Mutex::new(queue), begun: AtomicUsize::new(0), is_over })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

fn serve(manner: Manner, tasks: &Receiver<(Arc<Published>, ExternalTask)>, is_over: &AtomicBool, mut rng: Rng) {
    let mut running: Vec<(Arc<Published>, ExternalTask, usize)> = Vec::new();
    let begin = Instant::now();
    while !is_over.load(Ordering::Relaxed) || !running.is_empty() {
        assert!(begin.elapsed() < 6 * PATIENCE, "a task does not end");
        running.extend(tasks.try_iter().map(|(published, task)| (published, task, 0)));
        running.retain(|(_, task, _)| !task.is_cancelled());
        if running.is_empty() {
            std::thread::sleep(Duration::from_micros(50));
            continue;
        }
        let drawn = if manner == Manner::Slow { rng.below(running.len() as u64) as usize } else { 0 };
        let (published, task, made) = &mut running[drawn];
        let reduction = task.reduction().unwrap().clone();
        let ready = task.ready_copies();
        let end = if manner == Manner::Slow { ready.min(*made + 1 + rng.below(2) as usize) } else { ready };
        // SAFETY: the addresses are host memory; these tiles are ready, and were not reported.
        unsafe { published.reduce(&reduction, *made..end) };
        *made = end;
        if manner != Manner::Slow || rng.below(2) == 0 {
            task.note_made(end);
        }
        let (is_done, next) = (task.made_copies() == reduction.tiles.len(), (drawn + 1) % running.len());
        if is_done {
            running.swap_remove(drawn).1.done();
        } else {
            running.swap(0, next);
        }
        std::thread::yield_now();
    }
}

struct Stage(Arc<Device>);

struct Worker(Arc<Device>, Arc<Published>);

impl fmt::Debug for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device that is {:?}", self.0.manner)
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "worker that is {:?}", self.0.manner)
    }
}

impl Staging for Stage {
    fn copy_in(&self, _: &[ExternalCopy], _: usize, _: &Arc<dyn Any + Send + Sync>) -> Result<Arc<dyn External>> {
        panic!("nothing is copied to host memory")
    }

    fn copy_out(&self) -> Arc<dyn External> {
        panic!("nothing is copied from host memory")
    }

    fn publisher(&self, needs: PublishingNeeds) -> Result<Publisher> {
        if self.0.manner == Manner::Poor {
            return Err(accl_types::Error::exhausted("no memory to publish in"));
        }
        let published = Arc::new(Published::new(needs));
        let scratch = published.scratch();
        Ok(Publisher { worker: Arc::new(Worker(self.0.clone(), published)), scratch })
    }
}

impl External for Worker {
    fn name(&self) -> &str {
        "stand-in"
    }

    fn begin(&self, task: ExternalTask) {
        if self.0.manner == Manner::Fails && self.0.begun.fetch_add(1, Ordering::Relaxed) == 1 {
            return task.fail("its fan has stopped");
        }
        self.0.queue.lock().unwrap().send((self.1.clone(), task)).unwrap();
    }
}

/// Random bytes that are sensible values of every dtype.
fn elements(rng: &mut Rng, count: usize, dtype: Dtype) -> Vec<u8> {
    let value = |rng: &mut Rng| (rng.next_u64() >> 40) as f32 / (1 << 22) as f32 - 2.0;
    let mut bytes = Vec::new();
    for _ in 0..count {
        match dtype {
            Dtype::F32 => bytes.extend(value(rng).to_le_bytes()),
            Dtype::F64 => bytes.extend(f64::from(value(rng)).to_le_bytes()),
            Dtype::F16 => bytes.extend(half::f16::from_f32(value(rng)).to_bits().to_le_bytes()),
            Dtype::BF16 => bytes.extend(half::bf16::from_f32(value(rng)).to_bits().to_le_bytes()),
            _ => bytes.extend((0..dtype.size_bytes()).map(|_| rng.below(2) as u8)),
        }
    }
    bytes
}

/// One call on every rank.
#[derive(Clone, Copy, Debug)]
struct Case {
    collective: Collective,
    dtype: Dtype,
    op: ReduceOp,
    root: u32,
    count: usize,
    /// Whether blocks differ in size.
    is_uneven: bool,
    /// Whether a contribution lies in its place among the results, or the reverse.
    is_in_place: bool,
}

/// A sum of float32 over all ranks.
fn sum_of(count: usize) -> Case {
    let (collective, dtype, op) = (Collective::AllReduce, Dtype::F32, ReduceOp::Sum);
    Case { collective, dtype, op, root: 0, count, is_uneven: false, is_in_place: false }
}

/// Issues the call. Returns the bytes of its outputs.
fn run(member: &Member, case: Case, device: Option<&Arc<Device>>) -> Result<Vec<u8>> {
    let Case { collective, dtype, op, root, count, is_uneven, is_in_place } = case;
    let (rank, world) = (member.rank, member.group.world() as usize);
    let mut rng = Rng::new(rank as u64 * 31 + count as u64 + 1);
    let size = dtype.size_bytes();
    let of = |index: usize| if is_uneven { count + index * 3 } else { count };
    let is_root = rank == root as usize;
    let (inputs, outputs): (Vec<usize>, Vec<usize>) = match collective {
        Collective::AllReduce | Collective::Broadcast | Collective::Reduce => (vec![], vec![count]),
        Collective::ReduceScatter => ((0..world).map(of).collect(), vec![of(rank)]),
        Collective::AllGather => (vec![of(rank)], (0..world).map(of).collect()),
        Collective::Gather => (vec![count], vec![count; if is_root { world } else { 0 }]),
        Collective::Scatter => (vec![count; if is_root { world } else { 0 }], vec![count]),
        _ => ((0..world).map(|to| of(rank * 2 + to)).collect(), (0..world).map(|from| of(from * 2 + rank)).collect()),
    };
    let total = |counts: &[usize]| counts.iter().sum::<usize>() * size;
    let contributed = if inputs.is_empty() { total(&outputs) } else { total(&inputs) };
    let mut memory = elements(&mut rng, contributed / size, dtype);
    memory.resize(total(&inputs) + total(&outputs), 0);
    let base = memory.as_mut_ptr();
    let blocks = |counts: &[usize], mut at: usize| -> Blocks {
        let block = |&count: &usize| {
            let tensor = TensorDesc::dense(base.wrapping_add(at), dtype, Elems(count as u64));
            at += count * size;
            [if device.is_some() { tensor.in_memory(DEVICE) } else { tensor }]
        };
        counts.iter().map(block).collect()
    };
    let mut desc = CallDesc::new(collective, dtype);
    (desc.op, desc.root, desc.equal_blocks) = (op, Rank(root), !is_uneven);
    let outputs_at = total(&inputs);
    (desc.inputs, desc.outputs) = (blocks(&inputs, 0), blocks(&outputs, outputs_at));
    if is_in_place && collective == Collective::AllGather {
        let own = outputs_at + total(&outputs[..rank]);
        memory.copy_within(0..total(&inputs), own);
        desc.inputs = blocks(&inputs, own);
    }
    if is_in_place && collective == Collective::ReduceScatter {
        desc.outputs = blocks(&outputs, total(&inputs[..rank]));
    }
    desc.staging = device.map(|device| Arc::new(Stage(device.clone())) as Arc<dyn Staging>);
    desc.is_by_reference = device.is_some();
    member.call(desc)?;
    // On other ranks than the root, the output of a reduce is undefined.
    let keeps = collective != Collective::Reduce || is_root;
    Ok(if keeps { memory } else { Vec::new() })
}

const COLLECTIVES: [Collective; 8] = [
    Collective::AllReduce,
    Collective::ReduceScatter,
    Collective::AllGather,
    Collective::AllToAll,
    Collective::Broadcast,
    Collective::Reduce,
    Collective::Gather,
    Collective::Scatter,
];

/// Every algorithm of every collective, over worlds of two to five ranks.
#[test]
fn results_have_the_bits_of_the_plain_call_for_every_algorithm() {
    const KINDS: [(Dtype, ReduceOp); 6] = [
        (Dtype::F32, ReduceOp::Sum),
        (Dtype::BF16, ReduceOp::Avg),
        (Dtype::I32, ReduceOp::Max),
        (Dtype::F64, ReduceOp::Product),
        (Dtype::F16, ReduceOp::Sum),
        (Dtype::U8, ReduceOp::Bor),
    ];
    let mut turn = 0_usize;
    for collective in COLLECTIVES {
        for hosts in [&[0, 0][..], &[0, 0, 0], &[0, 0, 0, 0, 0]] {
            let topology = Topology::new(hosts.to_vec());
            let fits = |row: &&accl_engine::Algorithm| {
                row.collective == collective && (row.applies)(hosts.len() as u32, &topology)
            };
            for row in ALGORITHMS.iter().filter(fits) {
                turn += 1;
                World::new(options(hosts, collective.name(), row.name)).run("g", |member| {
                    for kind in 0..3 {
                        let turn = turn + kind;
                        let (dtype, op) = KINDS[turn % KINDS.len()];
                        let case = Case {
                            collective,
                            dtype,
                            op,
                            root: (turn % hosts.len()) as u32,
                            count: [0, 7, 1000, 700_001][(turn + kind) % 4],
                            is_uneven: turn.is_multiple_of(3) && !row.needs_equal_blocks,
                            is_in_place: turn.is_multiple_of(2),
                        };
                        let plain = run(&member, case, None).unwrap();
                        let manner = if kind == 1 { Manner::Eager } else { Manner::Slow };
                        let device = Device::new(manner, turn as u64);
                        let found = run(&member, case, Some(&device)).unwrap();
                        assert!(found == plain, "{} of {case:?}: other bits", row.name);
                    }
                });
            }
        }
    }
}

#[test]
fn calls_in_flight_together_do_not_disturb_each_other() {
    World::new(options(&[0, 0, 0], "all_reduce", "ring")).run("g", |member| {
        let device = Device::new(Manner::Slow, 5);
        let mut calls = Vec::new();
        let mut tensors: Vec<Vec<f32>> =
            (0..6).map(|index| vec![(member.rank + index) as f32; 400_000 + index]).collect();
        for tensor in &mut tensors {
            let mut desc = CallDesc::new(Collective::AllReduce, Dtype::F32);
            let of = TensorDesc::dense(tensor.as_mut_ptr().cast(), Dtype::F32, Elems(tensor.len() as u64));
            desc.outputs = Blocks::of(of.in_memory(DEVICE));
            desc.mode = accl_engine::Mode::Async;
            desc.staging = Some(Arc::new(Stage(device.clone())));
            desc.is_by_reference = true;
            calls.push(member.group.submit(desc).unwrap());
        }
        calls.into_iter().for_each(|call| accl_testkit::finish(&call).unwrap());
        for (index, tensor) in tensors.iter().enumerate() {
            assert!(tensor.iter().all(|&value| value == (3 + 3 * index) as f32), "call {index}");
        }
    });
}

#[test]
fn a_device_that_fails_fails_the_call_on_all_ranks() {
    World::new(options(&[0, 0], "all_reduce", "ring")).run("g", |member| {
        let manner = if member.rank == 1 { Manner::Fails } else { Manner::Eager };
        let case = sum_of(10_000);
        let error = run(&member, case, Some(&Device::new(manner, 1))).unwrap_err();
        assert!(error.to_string().contains("its fan has stopped"), "{error}");
    });
}

#[test]
fn a_rank_with_host_memory_and_one_by_reference_are_both_named() {
    World::new(options(&[0, 0], "all_reduce", "ring")).run("g", |member| {
        let case = sum_of(10_000);
        let device = Device::new(Manner::Eager, 1);
        let error = run(&member, case, (member.rank == 0).then_some(&device)).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Mismatch);
        let wanted = "only rank 0 has all tensors on a GPU; move the tensors of rank 1 to its GPU";
        assert!(error.to_string().contains(wanted), "{error}");
    });
}

#[test]
fn splits_that_differ_by_less_than_a_tile_are_a_mismatch() {
    World::new(options(&[0, 0], "all_to_all", "pairwise")).run("g", |member| {
        let device = Device::new(Manner::Eager, 1);
        let mut memory = vec![1.0_f32; 100];
        let base = memory.as_mut_ptr();
        let tensor = |at: usize, count: u64| {
            [TensorDesc::dense(base.wrapping_add(at).cast(), Dtype::F32, Elems(count)).in_memory(DEVICE)]
        };
        let mut desc = CallDesc::new(Collective::AllToAll, Dtype::F32);
        let expected = if member.rank == 0 { 12 } else { 10 };
        desc.inputs = [tensor(0, 10), tensor(10, 10)].into_iter().collect();
        let outputs = if member.rank == 0 { [10, expected] } else { [10, 10] };
        desc.outputs = [tensor(40, outputs[0]), tensor(60, outputs[1])].into_iter().collect();
        (desc.equal_blocks, desc.is_by_reference) = (false, true);
        desc.staging = Some(Arc::new(Stage(device)));
        let error = member.call(desc).unwrap_err();
        assert!(error.to_string().contains("rank 1 sends 40 bytes, but this rank expects 48"), "{error}");
    });
}

#[test]
fn a_rank_without_memory_to_publish_in_refuses_the_call_and_keeps_the_group() {
    World::new(options(&[0, 0], "all_reduce", "ring")).run("g", |member| {
        let case = sum_of(1000);
        let error = run(&member, case, Some(&Device::new(Manner::Poor, 1))).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Exhausted);
        let plain = run(&member, case, None).unwrap();
        assert!(run(&member, case, Some(&Device::new(Manner::Eager, 1))).unwrap() == plain);
    });
}

/// Describes a message of `memory` to or from a rank.
fn message(collective: Collective, memory: &mut [u8], peer: Option<u32>, device: Option<&Arc<Device>>) -> CallDesc {
    let tensor = TensorDesc::dense(memory.as_mut_ptr(), Dtype::U8, Elems(memory.len() as u64));
    let tensor = if device.is_some() { tensor.in_memory(DEVICE) } else { tensor };
    let mut desc = CallDesc::new(collective, Dtype::U8);
    match collective {
        Collective::Send => desc.inputs = Blocks::of(tensor),
        _ => desc.outputs = Blocks::of(tensor),
    }
    (desc.peer, desc.tag, desc.mode) = (peer.map(Rank), 5, accl_engine::Mode::Async);
    desc.staging = device.map(|device| Arc::new(Stage(device.clone())) as Arc<dyn Staging>);
    desc.is_by_reference = device.is_some();
    desc
}

fn bytes_of(rank: usize, index: usize, count: usize) -> Vec<u8> {
    let mut rng = Rng::new((rank * 100 + index) as u64);
    (0..count).map(|_| rng.next_u64() as u8).collect()
}

/// Several messages each way, of less than a tile and of many, in frames of few references.
#[test]
fn messages_by_reference_arrive_whole_and_in_order() {
    for (segment, manner) in [("1KiB", Manner::Slow), ("64KiB", Manner::Eager)] {
        let options = accl_testkit::WorldOptions::new(2).with("segment_bytes", segment);
        World::new(options).run("g", |member| {
            let device = Device::new(manner, 3);
            let other = 1 - member.rank;
            let counts = [1, 70_000, 20 << 20, 3, (5 << 20) + 1];
            let mut sent: Vec<Vec<u8>> =
                counts.iter().enumerate().map(|(index, &count)| bytes_of(member.rank, index, count)).collect();
            let mut received: Vec<Vec<u8>> = counts.iter().map(|&count| vec![0; count]).collect();
            let mut calls = Vec::new();
            for (index, (sent, received)) in sent.iter_mut().zip(&mut received).enumerate() {
                let from = (index % 2 == 0).then_some(other as u32);
                let send = message(Collective::Send, sent, Some(other as u32), Some(&device));
                calls.push(member.group.submit(send).unwrap());
                calls.push(member.group.submit(message(Collective::Recv, received, from, Some(&device))).unwrap());
            }
            calls.iter().for_each(|call| accl_testkit::finish(call).unwrap());
            for (index, (received, count)) in received.iter().zip(counts).enumerate() {
                assert!(*received == bytes_of(other, index, count), "message {index} of {count} bytes");
            }
        });
    }
}

/// The sender may change the tensor when its send has ended, and its published memory may serve another call.
#[test]
fn a_send_ends_when_its_receiver_has_read() {
    World::new(options(&[0, 0], "all_reduce", "ring")).run("g", |member| {
        let device = Device::new(Manner::Slow, 7);
        let mut memory = bytes_of(0, 0, 3 << 20);
        if member.rank == 0 {
            let mut call = member.group.submit(message(Collective::Send, &mut memory, Some(1), Some(&device))).unwrap();
            std::thread::sleep(Duration::from_millis(50));
            assert!(!call.is_done(), "the receive is not issued yet");
            accl_testkit::finish(&call).unwrap();
            call = member.group.submit(message(Collective::Send, &mut memory, Some(1), Some(&device))).unwrap();
            accl_testkit::finish(&call).unwrap();
        } else {
            std::thread::sleep(Duration::from_millis(100));
            for _ in 0..2 {
                let mut received = vec![0; 3 << 20];
                let call = member.group.submit(message(Collective::Recv, &mut received, None, Some(&device))).unwrap();
                accl_testkit::finish(&call).unwrap();
                assert!(received == memory);
            }
        }
    });
}

#[test]
fn messages_of_two_ways_or_sizes_are_a_mismatch() {
    for (count, is_on_device, wanted) in [
        (5000, true, "rank 0 sent 4000 elements of uint8, 4000 bytes with tag 5, but rank 1 receives 5000 elements"),
        (4000, false, "only rank 0 has its tensor on a GPU; move the tensor of rank 1 to its GPU"),
    ] {
        World::new(options(&[0, 0], "all_reduce", "ring")).run("g", |member| {
            let device = Device::new(Manner::Eager, 1);
            let call = if member.rank == 0 {
                message(Collective::Send, &mut vec![1; 4000].leak()[..], Some(1), Some(&device))
            } else {
                message(Collective::Recv, &mut vec![0; count].leak()[..], Some(0), is_on_device.then_some(&device))
            };
            let error = accl_testkit::finish(&member.group.submit(call).unwrap()).unwrap_err();
            assert!(error.to_string().contains(wanted), "{error}");
        });
    }
}
