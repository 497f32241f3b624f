//! Encoded calls whose tiles a worker computes where the tensors lie: the host gives the same bits, and nothing but encoded
//! bytes is lent to the worker.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::calls::{both_ways, data, encoding, max_min, options, rows};
use crate::error_probe::probed;
use accl_engine::codec::{Codec, Rounding, parse};
use accl_engine::{
    Blocks, CallDesc, Codecs, CoderNeeds, Encoding, External, ExternalCopy, ExternalTask, LentMemory, Measured,
    MemoryKind, ResidualOwner, Residuals, Staging, TensorCodecs, TensorDesc,
};
use accl_testkit::tile_coder::combine;
use accl_testkit::{Fabric, Member, Rng, World};
use accl_types::config::WorkerCount;
use accl_types::{Collective, Dtype, ErrorKind, ReduceOp, Result};

const PATIENCE: Duration = Duration::from_secs(20);
const DEVICE: MemoryKind = MemoryKind::Device { id: 3 };

/// Manner in which the worker does its tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    /// Computes all tiles of a task that are ready, on one thread for all tasks.
    Eager,
    /// Computes a few tiles at a time, of a task that is drawn, and reports them later.
    Slow,
    /// Fails the second task.
    Fails,
    /// Drops each task when it is cancelled, and does nothing else.
    Holds,
    /// Refuses every codec.
    Refuses,
    /// Lends no memory.
    Poor,
    /// Reports half of the tiles, and soon afterwards the others and the end.
    InTwo,
}

/// A stand-in for a device whose tensors are host memory that the engine takes for memory of the device.
struct Device {
    manner: Manner,
    queue: Mutex<Sender<ExternalTask>>,
    /// Bytes lent, tasks begun and copies requested.
    lent: AtomicUsize,
    begun: AtomicUsize,
    copies: AtomicUsize,
    is_over: Arc<AtomicBool>,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device that is {:?}", self.manner)
    }
}

impl Device {
    fn new(manner: Manner, seed: u64) -> Arc<Self> {
        let (queue, tasks) = channel();
        let (lent, begun, copies, is_over) = Default::default();
        let device = Arc::new(Self { manner, queue: Mutex::new(queue), lent, begun, copies, is_over });
        let is_over = device.is_over.clone();
        std::thread::spawn(move || serve(manner, &tasks, &is_over, Rng::new(seed)));
        device
    }

    /// Returns what stages a call with this device.
    fn staging(self: &Arc<Self>) -> Option<Arc<dyn Staging>> {
        Some(Arc::new(Stage(self.clone())))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

/// Computes the tiles of tasks until nothing sends any more.
fn serve(manner: Manner, tasks: &Receiver<ExternalTask>, is_over: &AtomicBool, mut rng: Rng) {
    let mut running: Vec<(ExternalTask, u32)> = Vec::new();
    let begin = Instant::now();
    while !is_over.load(Ordering::Relaxed) || !running.is_empty() {
        assert!(begin.elapsed() < 6 * PATIENCE, "a task does not end: {running:?}");
        running.extend(tasks.try_iter().map(|task| (task, 0)));
        running.retain(|(task, _)| !task.is_cancelled());
        if running.is_empty() || manner == Manner::Holds {
            std::thread::sleep(Duration::from_micros(50));
            continue;
        }
        let drawn = if manner == Manner::Slow { rng.below(running.len() as u64) as usize } else { 0 };
        let (task, computed) = &mut running[drawn];
        let combination = task.combination().unwrap().clone();
        let ready = task.ready_copies() as u32;
        let end = if manner == Manner::Slow { ready.min(*computed + 1 + rng.below(3) as u32) } else { ready };
        // SAFETY: the addresses are host memory; these tiles are ready, and were not reported.
        unsafe { combine(&combination, *computed..end) };
        *computed = end;
        if manner == Manner::InTwo && end == combination.tiles() {
            task.note_made(task.made_copies().max(end as usize / 2));
            let (begin, wait) = (Instant::now(), Duration::from_nanos(rng.below(20_000)));
            while begin.elapsed() < wait {
                std::hint::spin_loop();
            }
        }
        if manner != Manner::Slow || rng.below(2) == 0 {
            task.note_made(end as usize);
        }
        let (is_done, next) = (task.made_copies() as u32 == combination.tiles(), (drawn + 1) % running.len());
        if is_done {
            running.swap_remove(drawn).0.done();
        } else {
            running.swap(0, next);
        }
        std::thread::yield_now();
    }
}

/// Stages one call, and is the worker of its combinations.
#[derive(Debug)]
struct Stage(Arc<Device>);

/// Copies nothing: a call that is computed on the device has no copies.
#[derive(Debug)]
struct Copier(Arc<Device>);

impl Staging for Stage {
    fn lend(&self, len_bytes: usize) -> Result<Option<LentMemory>> {
        if self.0.manner == Manner::Poor {
            return Ok(None);
        }
        self.0.lent.fetch_add(len_bytes, Ordering::Relaxed);
        Ok(Some(LentMemory::pageable(vec![0xcc; len_bytes].into())))
    }

    fn copy_in(&self, _: &[ExternalCopy], _: usize, _: &Arc<dyn Any + Send + Sync>) -> Result<Arc<dyn External>> {
        Ok(Arc::new(Copier(self.0.clone())))
    }

    fn copy_out(&self) -> Arc<dyn External> {
        Arc::new(Copier(self.0.clone()))
    }

    fn coder(&self, _: &Codecs, _: Dtype, _: CoderNeeds) -> Option<Arc<dyn External>> {
        (self.0.manner != Manner::Refuses).then(|| Arc::new(Stage(self.0.clone())) as Arc<dyn External>)
    }
}

impl External for Stage {
    fn name(&self) -> &str {
        "stand-in"
    }

    fn begin(&self, task: ExternalTask) {
        let begun = self.0.begun.fetch_add(1, Ordering::Relaxed);
        if self.0.manner == Manner::Fails && begun == 1 {
            return task.fail("its fan has stopped");
        }
        self.0.queue.lock().unwrap().send(task).unwrap();
    }
}

impl External for Copier {
    fn name(&self) -> &str {
        "stand-in"
    }

    fn begin(&self, task: ExternalTask) {
        self.0.copies.fetch_add(1, Ordering::Relaxed);
        std::thread::spawn(move || {
            let begin = Instant::now();
            while task.made_copies() < task.copies().len() {
                let (made, ready) = (task.made_copies(), task.ready_copies());
                for copy in &task.copies()[made..ready] {
                    let tensor = copy.tensor.address().wrapping_add(copy.at as usize);
                    let (from, to) = (tensor, copy.host.address());
                    let (from, to) = if task.is_copy_out() { (to, from) } else { (from, to) };
                    // SAFETY: both are host memory of the copy, which this task may access.
                    unsafe { std::ptr::copy(from, to, copy.host.len_bytes() as usize) };
                }
                task.note_made(ready);
                assert!(begin.elapsed() < PATIENCE, "{ready} copies are ready");
                if task.is_cancelled() {
                    return;
                }
                std::thread::yield_now();
            }
            task.done();
        });
    }
}

/// Values of a rank, as elements of a dtype.
fn elements(rank: usize, count: usize, seed: u64, dtype: Dtype) -> Vec<u8> {
    let values = data(rank, count, seed);
    match dtype {
        Dtype::F16 => values.iter().flat_map(|&value| half::f16::from_f32(value).to_bits().to_le_bytes()).collect(),
        Dtype::BF16 => values.iter().flat_map(|&value| half::bf16::from_f32(value).to_bits().to_le_bytes()).collect(),
        _ => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
    }
}

/// Tensors of one call, which both lie in host memory and on the device in turns.
struct Tensors {
    inputs: Vec<Vec<u8>>,
    outputs: Vec<Vec<u8>>,
}

/// Creates the tensors of a collective of `world` ranks. Block r has `count + r` elements.
fn tensors(collective: Collective, rank: usize, world: usize, count: usize, dtype: Dtype) -> Tensors {
    let block = |from: usize, to: usize| elements(from * 7 + to, count + to, 1, dtype);
    let room = |of: usize| vec![0; (count + of) * dtype.size_bytes()];
    let (inputs, outputs) = match collective {
        Collective::AllReduce => (vec![], vec![elements(rank, count, 1, dtype)]),
        Collective::ReduceScatter => ((0..world).map(|to| block(rank, to)).collect(), vec![room(rank)]),
        Collective::AllGather => (vec![block(rank, rank)], (0..world).map(room).collect()),
        _ => ((0..world).map(|to| elements(rank * 7 + to, count, 1, dtype)).collect(), vec![room(0); world]),
    };
    Tensors { inputs, outputs }
}

fn described(tensors: &[Vec<u8>], dtype: Dtype, device: Option<&Arc<Device>>) -> Blocks {
    let describe = |bytes: &Vec<u8>| {
        let elems = accl_types::Elems((bytes.len() / dtype.size_bytes()) as u64);
        let tensor = TensorDesc::dense(bytes.as_ptr().cast_mut(), dtype, elems);
        [if device.is_some() { tensor.in_memory(DEVICE) } else { tensor }]
    };
    tensors.iter().map(describe).collect()
}

/// Issues one call. Returns the bytes of its outputs.
fn run(
    member: &Member,
    (collective, dtype, op): (Collective, Dtype, ReduceOp),
    count: usize,
    encoding: &Encoding,
    device: Option<&Arc<Device>>,
) -> Result<Vec<Vec<u8>>> {
    let tensors = tensors(collective, member.rank, member.group.world() as usize, count, dtype);
    let mut desc = CallDesc::new(collective, dtype);
    desc.op = op;
    desc.inputs = described(&tensors.inputs, dtype, device);
    desc.outputs = described(&tensors.outputs, dtype, device);
    desc.equal_blocks = collective == Collective::AllToAll;
    desc.encoding = encoding.clone().into();
    desc.staging = device.and_then(Device::staging);
    member.call(desc)?;
    Ok(tensors.outputs)
}

fn all(text: &str) -> TensorCodecs {
    let codec: Arc<dyn Codec> = parse(text).unwrap();
    TensorCodecs { intra_node: codec.clone(), reduce: codec.clone(), result: codec, id: 5 }
}

const CODECS: [&str; 9] = [
    "maxmin:4,rounding=stochastic",
    "maxmin:3,bucket=64,rounding=correlated,skip_incomplete",
    "raw",
    "bf16",
    "fp16",
    "sign",
    "e4m3",
    "hadamard:2",
    "topk:4",
];

/// Every rank on the device, every second one, and none.
#[test]
fn results_have_the_bits_of_the_host_for_every_collective_dtype_and_codec() {
    let collectives = [Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather, Collective::AllToAll];
    let hosts: [&[u32]; 3] = [&[0, 0], &[0, 0, 0], &[0, 0, 1, 1]];
    for (index, collective) in collectives.into_iter().enumerate() {
        for (hosts, algorithm) in
            hosts.iter().flat_map(|&hosts| rows(collective, hosts).into_iter().map(move |row| (hosts, row)))
        {
            World::new(options(hosts, collective.name(), algorithm)).run("g", |member| {
                for (number, text) in CODECS.into_iter().enumerate() {
                    let encoding = encoding(vec![all(text)]);
                    let dtype = [Dtype::F32, Dtype::F16, Dtype::BF16][(number + index) % 3];
                    let adds = collective.reduces();
                    let op = if adds && number % 2 == 0 { ReduceOp::Avg } else { ReduceOp::Sum };
                    let count = [0, 5, 300, 40_007][(number + hosts.len() + index) % 4];
                    let what = format!("{} {algorithm} of {count} {dtype}, {text}", collective.name());
                    let call = (collective, dtype, op);
                    let of_host = run(&member, call, count, &encoding, None).unwrap();
                    for all_are_there in [true, false] {
                        let manner = if number % 2 == 0 { Manner::Slow } else { Manner::Eager };
                        let device = Device::new(manner, number as u64 + 1);
                        let is_there = all_are_there || member.rank % 2 == 0;
                        let found = run(&member, call, count, &encoding, is_there.then_some(&device)).unwrap();
                        assert!(found == of_host, "{what}: other bits, {all_are_there}");
                        assert_eq!(device.copies.load(Ordering::Relaxed), 0, "{what}: something was copied");
                        let has_begun = device.begun.load(Ordering::Relaxed) > 0;
                        assert!(has_begun == (is_there && count > 0) || count == 0, "{what}: the device did not work");
                    }
                }
            });
        }
    }
}

/// Only encoded bytes leave the device.
#[test]
fn the_memory_that_is_lent_has_the_size_of_the_codes() {
    const COUNT: usize = 1 << 20;
    World::new(options(&[0, 0], "all_reduce", "direct_two_phase")).run("g", |member| {
        let encoding = encoding(vec![all("maxmin:4")]);
        let device = Device::new(Manner::Eager, 1);
        let call = (Collective::AllReduce, Dtype::F32, ReduceOp::Sum);
        run(&member, call, COUNT, &encoding, Some(&device)).unwrap();
        // Half of the tensor is sent and half received, in each of two phases.
        let lent = device.lent.load(Ordering::Relaxed);
        assert!(lent < 2 * COUNT * 5 / 8, "{lent} bytes for {} bytes of values", 4 * COUNT);
    });
}

/// Residuals of contributions and of sums lie on the device as well.
#[test]
fn residuals_have_the_bits_of_the_host_after_several_calls() {
    const COUNT: usize = 70_001;
    for text in ["maxmin:2,bucket=64", "sign", "topk:5"] {
        for workers in [0, 2] {
            let mut options = options(&[0, 1], "all_reduce", "direct_two_phase").over(Fabric::Tcp);
            options.config.worker_count = WorkerCount::Exactly(workers);
            World::new(options).run("g", |member| {
                let runs = [None, Some(Device::new(Manner::Slow, 3))].map(|device| {
                    let (kept, of_sums) = (vec![0.0_f32; COUNT], vec![0.0_f32; COUNT]);
                    let mut encoding = encoding(vec![both_ways(parse(text).unwrap(), 5)]);
                    encoding.residuals = Some(Arc::new(Residuals {
                        contributions: vec![kept.as_ptr() as usize],
                        sums: vec![of_sums.as_ptr() as usize],
                        memory: if device.is_some() { DEVICE } else { MemoryKind::Host },
                        ..Residuals::default()
                    }));
                    let call = (Collective::AllReduce, Dtype::F32, ReduceOp::Avg);
                    let mut results = Vec::new();
                    for step in 0..3 {
                        encoding.step = step;
                        results.push(run(&member, call, COUNT, &encoding, device.as_ref()).unwrap());
                    }
                    if let Some(device) = device {
                        assert!(device.begun.load(Ordering::Relaxed) > 0, "the device did not work");
                    }
                    let bits = |lost: &[f32]| lost.iter().map(|lost| lost.to_bits()).collect::<Vec<_>>();
                    assert!(kept.iter().any(|lost| *lost != 0.0), "nothing was lost");
                    (results, bits(&kept), bits(&of_sums))
                });
                assert!(runs[0] == runs[1], "{text}: other bits with {workers} workers");
            });
        }
    }
}

/// A tile of zeros may belong to a tensor that no rank has used.
#[test]
fn sums_of_zeros_leave_their_residual_alone() {
    const COUNT: usize = 20_000;
    World::new(options(&[0, 0], "all_reduce", "direct_two_phase")).run("g", |member| {
        let kept = [false, true].map(|on_device| {
            let of_sums = vec![0.5_f32; COUNT];
            let mut encoding = encoding(vec![both_ways(max_min(2, 64, Rounding::Nearest), 5)]);
            let memory = if on_device { DEVICE } else { MemoryKind::Host };
            let sums = vec![of_sums.as_ptr() as usize];
            encoding.residuals =
                Some(Arc::new(Residuals { contributions: vec![0], sums, memory, ..Residuals::default() }));
            let zeros = vec![vec![0_u8; 4 * COUNT]];
            let device = on_device.then(|| Device::new(Manner::Eager, 1));
            let mut desc = CallDesc::new(Collective::AllReduce, Dtype::F32);
            desc.outputs = described(&zeros, Dtype::F32, device.as_ref());
            (desc.encoding, desc.staging) = (encoding.into(), device.as_ref().and_then(Device::staging));
            member.call(desc).unwrap();
            assert!(zeros[0].iter().all(|&byte| byte == 0));
            of_sums
        });
        assert!(kept[0] == kept[1] && kept[1].iter().all(|&lost| lost == 0.5), "a residual was used");
    });
}

/// The driver looks at the number of tiles just before a worker reports the last ones and ends.
#[test]
fn no_tile_is_sent_without_its_header() {
    const COUNT: usize = 1 << 20;
    World::new(options(&[0, 1], "all_reduce", "direct_two_phase").over(Fabric::Tcp)).run("g", |member| {
        let device = Device::new(Manner::InTwo, member.rank as u64 + 1);
        let encoding = encoding(vec![all("maxmin:2")]);
        for _ in 0..60 {
            let call = (Collective::AllReduce, Dtype::F32, ReduceOp::Sum);
            run(&member, call, COUNT, &encoding, Some(&device)).unwrap();
        }
    });
}

/// Such calls are staged, and have the same bits.
#[test]
fn calls_that_the_device_cannot_compute_are_copied() {
    const COUNT: usize = 3000;
    World::new(options(&[0, 0], "all_reduce", "direct_two_phase")).run("g", |member| {
        let call = (Collective::AllReduce, Dtype::F32, ReduceOp::Sum);
        let plain = encoding(vec![all("maxmin:4")]);
        let of_host = run(&member, call, COUNT, &plain, None).unwrap();
        for manner in [Manner::Refuses, Manner::Poor] {
            let device = Device::new(manner, 1);
            assert!(run(&member, call, COUNT, &plain, Some(&device)).unwrap() == of_host);
            let (begun, copies) = (device.begun.load(Ordering::Relaxed), device.copies.load(Ordering::Relaxed));
            assert_eq!((begun, copies), (0, 2), "{manner:?}");
        }

        // Its residuals are host memory.
        let kept = vec![0.0_f32; COUNT];
        let contributions = vec![kept.as_ptr() as usize];
        let mut feedback = plain.clone();
        feedback.residuals = Some(Arc::new(Residuals { contributions, ..Residuals::default() }));
        let device = Device::new(Manner::Eager, 1);
        assert!(run(&member, call, COUNT, &feedback, Some(&device)).unwrap() == of_host);
        assert_eq!((device.begun.load(Ordering::Relaxed), device.copies.load(Ordering::Relaxed)), (0, 2));
    });
}

/// The owner of residuals moves them when the host has to encode.
#[derive(Debug)]
struct Owner {
    on_host: Vec<f32>,
    moves: AtomicUsize,
}

impl ResidualOwner for Owner {
    fn to_host(&self) -> Result<Residuals> {
        self.moves.fetch_add(1, Ordering::Relaxed);
        Ok(Residuals { contributions: vec![self.on_host.as_ptr() as usize], ..Residuals::default() })
    }
}

#[test]
fn residuals_come_to_the_host_when_it_has_to_encode() {
    const COUNT: usize = 3000;
    World::new(options(&[0, 0], "all_reduce", "direct_two_phase")).run("g", |member| {
        let call = (Collective::AllReduce, Dtype::F32, ReduceOp::Sum);
        let mut encoding = encoding(vec![all("maxmin:2")]);
        let of_host = vec![0.0_f32; COUNT];
        let contributions = vec![of_host.as_ptr() as usize];
        encoding.residuals = Some(Arc::new(Residuals { contributions, ..Residuals::default() }));
        let expected = run(&member, call, COUNT, &encoding, None).unwrap();
        for manner in [Manner::Refuses, Manner::Poor, Manner::Eager] {
            let (device, there) = (Device::new(manner, 1), vec![0.0_f32; COUNT]);
            let owner = Arc::new(Owner { on_host: vec![0.0; COUNT], moves: AtomicUsize::new(0) });
            let contributions = vec![there.as_ptr() as usize];
            let residuals = |owner| Residuals { contributions, memory: DEVICE, owner, ..Residuals::default() };
            encoding.residuals = Some(Arc::new(residuals(Some(owner.clone()))));
            assert!(run(&member, call, COUNT, &encoding, Some(&device)).unwrap() == expected, "{manner:?}");
            let is_computed = manner == Manner::Eager;
            assert_eq!(owner.moves.load(Ordering::Relaxed), usize::from(!is_computed), "{manner:?}");
            assert!(if is_computed { &there } else { &owner.on_host } == &of_host, "{manner:?}: another residual");
        }

        let contributions = vec![of_host.as_ptr() as usize];
        encoding.residuals = Some(Arc::new(Residuals { contributions, memory: DEVICE, ..Residuals::default() }));
        let error = run(&member, call, COUNT, &encoding, Some(&Device::new(Manner::Refuses, 1))).unwrap_err();
        assert!(error.message.contains("residuals lie in the memory of device 3; keep them in host"), "{error}");
        member.barrier().unwrap();
    });
}

/// One call's tensors, with what is measured. The last rank has an unusual value in each tensor.
fn measured(
    member: &Member,
    collective: Collective,
    worlds_seed: u32,
    device: Option<&Arc<Device>>,
) -> (Vec<Vec<u8>>, Vec<Measured>) {
    let (rank, world) = (member.rank, member.group.world() as usize);
    let counts = [40_003, 17, 9_000];
    let codecs = ["maxmin:3,bucket=64,meta=float16", "bf16", "maxmin:4,rounding=stochastic"];
    let codecs = codecs.iter().enumerate().map(|(id, text)| TensorCodecs { id: id as u64, ..all(text) }).collect();
    let (mut encoding, stats) = probed(codecs, 8);
    let blocks = if collective == Collective::AllReduce { 1 } else { world };
    let values = |block: usize| {
        (0..).zip(counts).map(move |(seed, count)| {
            let mut values = data(rank * 7 + block, count, seed + u64::from(worlds_seed));
            if rank == 0 && seed == 2 {
                values.fill(0.0);
            }
            if rank + 1 == world {
                values[count / 2] = [f32::NAN, 1e30, f32::INFINITY][seed as usize];
            }
            values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>()
        })
    };
    let tensors: Vec<Vec<Vec<u8>>> = (0..blocks).map(|block| values(block).collect()).collect();
    let kept: Vec<Vec<f32>> = tensors.iter().flatten().map(|bytes| vec![0.01; bytes.len() / 4]).collect();
    let of_sums: Vec<Vec<f32>> = counts.iter().map(|&count| vec![0.0; count]).collect();
    let memory = if device.is_some() { DEVICE } else { MemoryKind::Host };
    let addresses = |of: &[Vec<f32>]| of.iter().map(|of| of.as_ptr() as usize).collect();
    let sums = if blocks == 1 { addresses(&of_sums) } else { vec![] };
    let mut residuals = Residuals { contributions: addresses(&kept), sums, memory, ..Residuals::default() };
    // The first rank has not used the last tensor.
    let flags: Vec<u8> = (0..kept.len()).map(|index| u8::from(rank > 0 || index % counts.len() != 2)).collect();
    if device.is_some() {
        residuals.used = flags.iter().map(|flag| std::ptr::from_ref(flag).expose_provenance()).collect();
    } else {
        let unused = residuals.contributions.iter_mut().zip(&flags).filter(|(_, flag)| **flag == 0);
        unused.for_each(|(address, _)| *address = 0);
    }
    encoding.residuals = Some(Arc::new(residuals));
    let described = |block: &Vec<Vec<u8>>| -> Vec<TensorDesc> {
        described(block, Dtype::F32, device).iter().flatten().cloned().collect()
    };
    let mut results = Vec::new();
    for step in 0..2 {
        encoding.step = step;
        let mut desc = CallDesc::new(collective, Dtype::F32);
        // The block of this rank is reduced in place.
        let own = if blocks == 1 { 0 } else { rank };
        desc.outputs = [described(&tensors[own])].into_iter().collect();
        if blocks > 1 {
            desc.inputs = tensors.iter().map(described).collect();
        }
        (desc.encoding, desc.staging) = (encoding.clone().into(), device.and_then(Device::staging));
        member.call(desc).unwrap();
        results.extend(tensors[own].clone());
    }
    let bits = |of: &[Vec<f32>]| -> Vec<Vec<u8>> {
        of.iter().map(|of| of.iter().flat_map(|lost| lost.to_bits().to_le_bytes()).collect()).collect()
    };
    results.extend(bits(&kept).into_iter().chain(bits(&of_sums)));
    (results, stats.read())
}

/// Samples, squares of residuals, and buckets that become NaN.
#[test]
fn measured_calls_with_residuals_have_the_bits_and_the_figures_of_the_host() {
    for collective in [Collective::AllReduce, Collective::ReduceScatter] {
        let hosts: [&[u32]; 3] = [&[0, 0], &[0, 0, 0], &[0, 0, 1, 1]];
        let worlds =
            hosts.into_iter().flat_map(|hosts| rows(collective, hosts).into_iter().map(move |row| (hosts, row)));
        for ((hosts, algorithm), workers) in worlds.flat_map(|world| [(world, 0), (world, 2)]) {
            let mut options = options(hosts, collective.name(), algorithm);
            options.config.worker_count = WorkerCount::Exactly(workers);
            let rows = World::new(options).run("g", |member| {
                let what = format!("{} {algorithm}, {} ranks, {workers} workers", collective.name(), hosts.len());
                let (expected, figures) = measured(&member, collective, 3, None);
                for all_are_there in [true, false] {
                    let device = Device::new(if all_are_there { Manner::Slow } else { Manner::Eager }, 5);
                    let is_there = all_are_there || member.rank % 2 == 0;
                    let (found, ours) = measured(&member, collective, 3, is_there.then_some(&device));
                    assert!(found == expected, "{what}: other bits");
                    assert_eq!(device.copies.load(Ordering::Relaxed), 0, "{what}: something was copied");
                    assert_eq!(device.begun.load(Ordering::Relaxed) > 0, is_there, "{what}: the device did not work");
                    for (host, ours) in figures.iter().zip(&ours) {
                        let alike = |row: &Measured| {
                            (row.calls, row.compared, row.error, row.square, row.residual_calls, row.non_finite)
                        };
                        assert_eq!(alike(host), alike(ours), "{what}");
                        // The squares of several tiles are added up in another order.
                        let is_near = (host.residual - ours.residual).abs() <= 1e-12 * host.residual;
                        assert!(is_near, "{what}: {host:?} {ours:?}");
                    }
                }
                figures[0]
            });
            // In some algorithms one rank encodes all contributions, or all sums.
            let any = |has: fn(&Measured) -> bool| rows.iter().any(has);
            assert!(any(|row| row.compared > 5000) && any(|row| row.residual > 0.0), "{algorithm}: {rows:?}");
            assert!(any(|row| row.non_finite.not_finite > 0), "{algorithm}: {rows:?}");
        }
    }
}

/// Without a comparison with exact sums, the device counts what the host would count.
#[test]
fn buckets_that_become_nan_are_counted_on_the_device() {
    const COUNT: usize = 40_000;
    let figures = [false, true].map(|on_device| {
        World::new(options(&[0, 0, 0], "all_reduce", "direct_two_phase")).run("g", |member| {
            let device = on_device.then(|| Device::new(Manner::Slow, 2));
            let (encoding, stats) = probed(vec![all("maxmin:4,bucket=64,meta=float16"), all("raw")], 0);
            let mut values = data(member.rank, COUNT, 1);
            (values[7], values[700], values[30_000]) = (f32::NAN, 1e30, f32::INFINITY);
            let other = data(member.rank, 100, 2);
            let bytes = [&values, &other].map(|values| values.iter().flat_map(|value| value.to_le_bytes()).collect());
            let mut desc = CallDesc::new(Collective::AllReduce, Dtype::F32);
            let tensors: Vec<TensorDesc> =
                described(&bytes, Dtype::F32, device.as_ref()).iter().flatten().cloned().collect();
            desc.outputs.push(tensors);
            (desc.encoding, desc.staging) = (encoding.into(), device.as_ref().and_then(Device::staging));
            member.call(desc).unwrap();
            if let Some(device) = device {
                assert!(device.begun.load(Ordering::Relaxed) > 0, "the device did not work");
            }
            stats.read().iter().map(|row| (row.calls, row.non_finite)).collect::<Vec<_>>()
        })
    });
    assert_eq!(figures[0], figures[1]);
    let all: Vec<_> = figures[0].iter().map(|rows| rows[0].1).collect();
    assert!(all.iter().all(|counts| counts.not_finite > 0) && all.iter().any(|counts| counts.too_large > 0), "{all:?}");
}

/// An all_gather whose input is its own block of the output needs no copy on the device either.
#[test]
fn a_call_in_place_is_computed_on_the_device() {
    const COUNT: usize = 5000;
    World::new(options(&[0, 0, 0], "all_gather", "ring")).run("g", |member| {
        let results = [false, true].map(|on_device| {
            let device = on_device.then(|| Device::new(Manner::Eager, 1));
            let mut all_blocks = vec![vec![0_u8; 4 * COUNT]; 3];
            all_blocks[member.rank] = elements(member.rank, COUNT, 1, Dtype::F32);
            let mut desc = CallDesc::new(Collective::AllGather, Dtype::F32);
            desc.outputs = described(&all_blocks, Dtype::F32, device.as_ref());
            desc.inputs = described(&all_blocks[member.rank..][..1], Dtype::F32, device.as_ref());
            desc.encoding = encoding(vec![all("maxmin:4")]).into();
            desc.staging = device.as_ref().and_then(Device::staging);
            member.call(desc).unwrap();
            if let Some(device) = device {
                let (begun, copies) = (&device.begun, &device.copies);
                assert!(begun.load(Ordering::Relaxed) > 0 && copies.load(Ordering::Relaxed) == 0);
            }
            all_blocks
        });
        let equal: Vec<bool> = results[0].iter().zip(&results[1]).map(|(host, device)| host == device).collect();
        assert_eq!(equal, [true; 3], "rank {}: blocks with the bits of the host", member.rank);
    });
}

#[test]
fn a_combination_that_fails_is_an_error_of_all_ranks_with_the_workers_name() {
    let failed = World::new(options(&[0, 0, 0], "all_reduce", "direct_two_phase")).run("g", |member| {
        let manner = if member.rank == 1 { Manner::Fails } else { Manner::Eager };
        let device = Device::new(manner, 1);
        let call = (Collective::AllReduce, Dtype::F32, ReduceOp::Sum);
        let encoding = encoding(vec![all("maxmin:4")]);
        run(&member, call, 100_000, &encoding, Some(&device)).unwrap_err()
    });
    for (rank, error) in failed.iter().enumerate() {
        assert_eq!(error.kind, ErrorKind::Device, "rank {rank}: {error}");
        assert!(error.message.contains("its fan has stopped"), "rank {rank}: {error}");
    }
    assert!(failed[1].message.contains("combine by `stand-in` failed"), "{}", failed[1]);
}

#[test]
fn a_combination_that_does_not_end_is_named_when_the_time_is_over() {
    let mut options = options(&[0, 0], "all_reduce", "direct_two_phase");
    options = options.timeout(Duration::from_millis(300));
    let failed = World::new(options).run("g", |member| {
        let device = Device::new(Manner::Holds, 1);
        let call = (Collective::AllReduce, Dtype::F32, ReduceOp::Sum);
        run(&member, call, 1000, &encoding(vec![all("maxmin:4")]), Some(&device)).unwrap_err()
    });
    assert!(failed.iter().any(|error| error.message.contains("combine by `stand-in`")), "{failed:?}");
    assert!(failed.iter().all(|error| error.kind == ErrorKind::Timeout), "{failed:?}");
}
