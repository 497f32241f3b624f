//! Calls whose tensors lie on a stand-in for an accelerator, over the engine.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use accl_accelerator::{Accelerators, CallStreams, Direction, Pinning, StreamCopy, StreamEvent};
use accl_engine::{Blocks, CallDesc, LentMemory, MemoryKind, Mode, TensorDesc, Waited};
use accl_testkit::{Fabric, Member, World, WorldOptions, finish};
use accl_types::config::WorkerCount;
use accl_types::{Collective, Dtype, Elems, Error, ErrorKind, Rank, Result};

const FABRICS: &[Fabric] = &[Fabric::Loopback(4), Fabric::Shm, Fabric::Tcp];
const PATIENCE: Duration = Duration::from_secs(20);
const DEVICE: MemoryKind = MemoryKind::Device { id: 0 };

/// When the streams of the stand-in do their work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    /// A copy is made when it is enqueued.
    Early,
    /// A copy is made when an event behind it was asked for twice.
    Late,
    /// Copies are made once the test says so. Copies to tensors are not taken before.
    Held,
    /// Copies to tensors are made once the test says so. They are taken before.
    HeldOut,
    /// The device takes no copies in this direction.
    Refused(Direction),
    /// The device takes copies and records no event behind them.
    Unrecorded,
    /// Events in this direction report that the device has failed.
    Broken(Direction),
    /// Events have a defect.
    Panics,
}

/// A stand-in for an accelerator and its streams.
#[derive(Debug)]
struct Device {
    when: When,
    is_released: AtomicBool,
    in_flight: AtomicUsize,
    finished: AtomicUsize,
}

impl Device {
    fn new(when: When) -> Arc<Self> {
        let (is_released, in_flight, finished) = Default::default();
        Arc::new(Self { when, is_released, in_flight, finished })
    }

    fn release(&self) {
        self.is_released.store(true, Ordering::Release);
    }

    fn is_released(&self) -> bool {
        self.is_released.load(Ordering::Acquire)
    }
}

type Queue = Arc<Mutex<VecDeque<Pending>>>;

struct Pending {
    from: *const u8,
    to: *mut u8,
    len_bytes: usize,
    asked: usize,
}

// SAFETY: the addresses belong to tensors and host memory that the call keeps until the copy is made.
unsafe impl Send for Pending {}

/// The streams of one call: a queue for each direction.
struct Streams {
    device: Arc<Device>,
    inputs: Vec<usize>,
    outputs: Vec<usize>,
    queues: [Queue; 2],
    enqueued: [usize; 2],
    has_finished: bool,
}

impl std::fmt::Debug for Streams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Streams").finish_non_exhaustive()
    }
}

impl CallStreams for Streams {
    fn device(&self) -> String {
        "stand-in:0".to_owned()
    }

    fn copy(&mut self, copy: StreamCopy) -> Result<()> {
        assert!(!self.has_finished, "a copy is enqueued after the last one");
        if self.device.when == When::Refused(copy.direction) {
            return Err(Error::device("its fan has stopped"));
        }
        let side = if copy.direction == Direction::In { &self.inputs } else { &self.outputs };
        let tensor = side[copy.piece as usize] + copy.at as usize;
        let (from, to) = match copy.direction {
            Direction::In => (tensor as *const u8, copy.host),
            Direction::Out => (copy.host.cast_const(), tensor as *mut u8),
        };
        let pending = Pending { from, to, len_bytes: copy.len_bytes as usize, asked: 0 };
        self.enqueued[copy.direction as usize] += 1;
        if self.device.when == When::Early {
            pending.make();
        } else {
            self.device.in_flight.fetch_add(1, Ordering::Relaxed);
            self.queues[copy.direction as usize].lock().unwrap().push_back(pending);
        }
        Ok(())
    }

    fn record(&mut self, direction: Direction) -> Result<Box<dyn StreamEvent>> {
        let (device, queue) = (self.device.clone(), self.queues[direction as usize].clone());
        if self.device.when == When::Unrecorded {
            return Err(Error::device("it records no events"));
        }
        let left = queue.lock().unwrap().len();
        Ok(Box::new(Event { device, direction, queue, left: Mutex::new(left) }))
    }

    fn may_copy(&mut self, direction: Direction) -> Result<bool> {
        Ok(direction == Direction::In || self.device.when != When::Held || self.device.is_released())
    }

    fn finish(&mut self) -> Result<()> {
        assert!(!std::mem::replace(&mut self.has_finished, true), "the last copy was already enqueued");
        self.device.finished.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

impl Pending {
    fn make(&self) {
        // SAFETY: both sides have these bytes, and the call lets no other code access them until it sees the event.
        unsafe { std::ptr::copy(self.from, self.to, self.len_bytes) };
    }
}

struct Event {
    device: Arc<Device>,
    direction: Direction,
    queue: Queue,
    /// Number of copies before the event that were not made when it was recorded. Events of a stream come in order.
    left: Mutex<usize>,
}

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Event").finish_non_exhaustive()
    }
}

impl StreamEvent for Event {
    fn has_come(&self) -> Result<bool> {
        let is_follower = std::thread::current().name() == Some("accl-accelerator");
        assert_eq!(
            is_follower,
            IS_PREPARED.get(),
            "the follower's thread prepares itself before it asks, no other does"
        );
        assert!(self.device.when != When::Panics, "a defect in the code that follows copies");
        if self.device.when == When::Broken(self.direction) {
            return Err(Error::device("an illegal address was accessed"));
        }
        let is_held = match self.device.when {
            When::Held => true,
            When::HeldOut => self.direction == Direction::Out,
            When::Early | When::Late | When::Refused(_) | When::Unrecorded | When::Broken(_) | When::Panics => false,
        };
        if is_held && !self.device.is_released() {
            return Ok(false);
        }
        let (mut queue, mut left) = (self.queue.lock().unwrap(), self.left.lock().unwrap());
        while *left > 0 {
            let Some(first) = queue.front_mut() else { break };
            first.asked += 1;
            if first.asked < 2 {
                return Ok(false);
            }
            first.make();
            queue.pop_front();
            self.device.in_flight.fetch_sub(1, Ordering::Relaxed);
            *left -= 1;
        }
        Ok(true)
    }
}

#[derive(Debug)]
struct Heap;

thread_local! {
    /// Whether this thread was prepared for the device.
    static IS_PREPARED: Cell<bool> = const { Cell::new(false) };
}

/// Number of blocks that were freed. Each test has a process of its own.
static FREED: AtomicUsize = AtomicUsize::new(0);

impl Pinning for Heap {
    fn allocate(&self, len_bytes: usize) -> Option<LentMemory> {
        // Not zeros: bytes that are used before they have arrived are wrong.
        let memory = LentMemory::pageable(vec![0xee; len_bytes].into());
        Some(memory.returned_to(|memory| {
            FREED.fetch_add(1, Ordering::Relaxed);
            drop(memory);
        }))
    }

    fn enter_thread(&self) {
        IS_PREPARED.set(true);
    }
}

fn accelerators() -> Arc<Accelerators> {
    Accelerators::new(Arc::new(Heap), 64 << 20, 1 << 30)
}

/// Places the tensors of a call on the device.
fn on_device(mut desc: CallDesc, accelerators: &Arc<Accelerators>, device: &Arc<Device>) -> CallDesc {
    let move_all = |blocks: &Blocks| -> Blocks {
        blocks
            .iter()
            .map(|block| block.iter().map(|tensor| tensor.clone().in_memory(DEVICE)).collect::<Vec<_>>())
            .collect()
    };
    let streams = streams_of(&desc, device);
    (desc.inputs, desc.outputs) = (move_all(&desc.inputs), move_all(&desc.outputs));
    desc.staging = Some(accelerators.staging(Box::new(streams), device.when == When::HeldOut, None));
    desc
}

fn streams_of(desc: &CallDesc, device: &Arc<Device>) -> Streams {
    let addresses = |blocks: &Blocks| blocks.pieces().iter().map(|tensor| tensor.address() as usize).collect();
    Streams {
        device: device.clone(),
        inputs: addresses(if desc.inputs.is_empty() { &desc.outputs } else { &desc.inputs }),
        outputs: addresses(&desc.outputs),
        queues: Default::default(),
        enqueued: [0; 2],
        has_finished: false,
    }
}

fn all_reduce(data: &mut [f32], mode: Mode) -> CallDesc {
    let tensor = TensorDesc::dense(data.as_mut_ptr().cast(), Dtype::F32, Elems(data.len() as u64));
    CallDesc { outputs: Blocks::of(tensor), mode, ..CallDesc::new(Collective::AllReduce, Dtype::F32) }
}

fn message(data: &mut [f32], collective: Collective, peer: u32) -> CallDesc {
    let tensor = TensorDesc::dense(data.as_mut_ptr().cast(), Dtype::F32, Elems(data.len() as u64));
    let mut desc = CallDesc { peer: Some(Rank(peer)), mode: Mode::Async, ..CallDesc::new(collective, Dtype::F32) };
    *if collective == Collective::Send { &mut desc.inputs } else { &mut desc.outputs } = Blocks::of(tensor);
    desc
}

fn values(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|at| (rank * 3 + at % 11) as f32).collect()
}

fn sums(world: usize, count: usize) -> Vec<f32> {
    (0..count).map(|at| (0..world).map(|rank| (rank * 3 + at % 11) as f32).sum()).collect()
}

fn options(world: u32, fabric: Fabric) -> WorldOptions {
    WorldOptions::new(world).over(fabric).timeout(PATIENCE)
}

#[test]
fn sums_of_tensors_on_an_accelerator_are_those_of_the_host() {
    for &fabric in FABRICS {
        for when in [When::Early, When::Late] {
            let accelerators = accelerators();
            World::new(options(3, fabric)).run("g", |member| {
                let device = Device::new(when);
                for (round, count) in [0, 1, 1000, 1_500_000, 1000, 1_500_000].into_iter().enumerate() {
                    let mut data = values(member.rank, count);
                    let mode = if round % 2 == 0 { Mode::Blocking } else { Mode::Async };
                    let desc = all_reduce(&mut data, mode);
                    // In each round, one rank has its tensor in host memory.
                    let is_here = member.rank != round % 3;
                    let desc = if is_here { on_device(desc, &accelerators, &device) } else { desc };
                    member.call(desc).unwrap();
                    assert!(data == sums(3, count), "{fabric:?} {when:?} {count}");
                }
                assert_eq!(device.in_flight.load(Ordering::Relaxed), 0);
            });
            accelerators.close();
            assert_eq!(accelerators.pinned().used_bytes, 0, "memory was lost");
        }
    }
}

#[test]
fn the_last_of_several_parts_finishes_the_streams() {
    let accelerators = accelerators();
    let mut options = options(2, Fabric::Tcp);
    options.config.worker_count = WorkerCount::Exactly(2);
    World::new(options).run("g", |member| {
        let device = Device::new(When::Late);
        for round in 1..=10 {
            let mut data = values(member.rank, 400_000);
            let desc = on_device(all_reduce(&mut data, Mode::Blocking), &accelerators, &device);
            member.call(desc).unwrap();
            assert!(data == sums(2, 400_000));
            assert_eq!(device.finished.load(Ordering::Relaxed), round);
        }
        assert_eq!(member.group.snapshot().groups[0].lanes.len(), 3);
    });
}

#[test]
fn a_wait_ends_when_all_copies_are_enqueued() {
    for &fabric in FABRICS {
        let accelerators = accelerators();
        World::new(options(2, fabric)).run("g", |member| {
            for mode in [Mode::Blocking, Mode::Async] {
                let device = Device::new(if member.rank == 1 { When::HeldOut } else { When::Late });
                let mut data = values(member.rank, 1000);
                let call = member.group.submit(on_device(all_reduce(&mut data, mode), &accelerators, &device)).unwrap();
                let (sender, callback) = std::sync::mpsc::channel();
                call.when_done(Box::new(move || sender.send(()).unwrap())).unwrap();
                finish(&call).unwrap();
                callback.recv_timeout(PATIENCE).unwrap();
                assert_eq!(call.is_done(), member.rank == 0);
                assert_eq!(device.finished.load(Ordering::Relaxed), 1);
                device.release();
                until("the call completes", || call.test());
                assert_eq!(data, sums(2, 1000));
            }
        });
    }
}

#[test]
fn a_group_that_is_left_while_results_are_copied_does_not_fail_the_call() {
    let accelerators = accelerators();
    World::new(options(2, Fabric::Shm)).run("g", |member| {
        let device = Device::new(if member.rank == 1 { When::HeldOut } else { When::Late });
        for is_message in [false, true] {
            let mut data = values(member.rank, 1000);
            let desc = match (is_message, member.rank) {
                (false, _) => all_reduce(&mut data, Mode::Blocking),
                (true, 0) => message(&mut data, Collective::Send, 1),
                (true, _) => message(&mut data, Collective::Recv, 0),
            };
            let call = member.group.submit(on_device(desc, &accelerators, &device)).unwrap();
            finish(&call).unwrap();
            if is_message {
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        std::thread::sleep(Duration::from_millis(50));
                        device.release();
                    });
                    member.group.shutdown().unwrap();
                });
                assert!(call.is_done() && call.error().is_none(), "{:?}", call.error());
                assert_eq!(data, values(0, 1000));
            }
        }
        assert!(member.group.error().is_none());
    });
}

#[test]
fn a_part_that_copies_nothing_back_is_waited_for() {
    let accelerators = accelerators();
    let mut options = options(2, Fabric::Tcp);
    options.config.worker_count = WorkerCount::Exactly(2);
    World::new(options).run("g", |member| {
        let sizes = [8, 400_000];
        let device = Device::new(if member.rank == 0 { When::HeldOut } else { When::Late });
        let mut inputs = sizes.map(|count| values(member.rank, count));
        let mut output = vec![0.0; sizes[member.rank]];
        let tensor =
            |data: &mut [f32]| TensorDesc::dense(data.as_mut_ptr().cast(), Dtype::F32, Elems(data.len() as u64));
        let mut desc = CallDesc { mode: Mode::Async, ..CallDesc::new(Collective::ReduceScatter, Dtype::F32) };
        desc.inputs = inputs.iter_mut().map(|input| [tensor(input)]).collect();
        desc.outputs = Blocks::of(tensor(&mut output));
        desc.equal_blocks = false;
        let call = member.group.submit(on_device(desc, &accelerators, &device)).unwrap();
        if member.rank == 0 {
            // Another part of the call still reads the inputs, and only its end shows that it does not.
            let waited = call.wait(Some(Duration::from_millis(200)), &mut || false);
            assert!(matches!(waited, Waited::TimedOut(_)), "{waited:?}");
            device.release();
        }
        finish(&call).unwrap();
        until("the call completes", || call.test());
        assert_eq!(output, sums(2, sizes[member.rank]));
    });
}

#[test]
fn memory_of_small_calls_is_lent_again_when_its_copies_have_been_made() {
    let accelerators = accelerators();
    let device = Device::new(When::Held);
    let mut data = values(1, 1000);
    let begin = |data: &mut [f32], device: &Arc<Device>| {
        let desc = all_reduce(data, Mode::Blocking);
        let streams = streams_of(&desc, device);
        accelerators.begin_eager(&desc, Box::new(streams)).unwrap().unwrap()
    };
    let late = begin(&mut data, &device);
    assert!(!late.is_copied_in().unwrap());
    drop(late);
    // The copy of another stream is not held up, and does not use the same memory.
    let early = Device::new(When::Early);
    for _ in 0..100 {
        let call = begin(&mut data, &early);
        assert!(call.is_copied_in().unwrap());
        call.copy_out().unwrap();
    }
    let counts = accelerators.pinned();
    assert!(counts.used_bytes > 0 && counts.idle_bytes <= 2 * counts.used_bytes, "{counts:?}");
    device.release();
    until("the copy has been made", || accelerators.pinned().used_bytes == 0);
    begin(&mut data, &early).leak_memory();
    assert!(accelerators.pinned().used_bytes > 0, "a library may still write to it");
}

#[test]
fn small_calls_free_the_memory_that_is_not_kept() {
    let accelerators = Accelerators::new(Arc::new(Heap), 0, 1 << 30);
    let (device, mut data) = (Device::new(When::Early), values(1, 1000));
    for _ in 0..10 {
        let desc = all_reduce(&mut data, Mode::Blocking);
        let call = accelerators.begin_eager(&desc, Box::new(streams_of(&desc, &device))).unwrap().unwrap();
        call.copy_out().unwrap();
    }
    assert!(FREED.load(Ordering::Relaxed) >= 8, "of 10 blocks");
}

#[test]
fn a_rank_that_has_yet_to_forward_is_not_done_with_a_call() {
    let accelerators = accelerators();
    let mut options = options(3, Fabric::Tcp);
    options.config.set_option("algorithm", "broadcast=chain").unwrap();
    let may_join = std::sync::Barrier::new(2);
    World::new(options).run("g", |member| {
        const COUNT: usize = 2_000_000;
        let device = Device::new(When::HeldOut);
        let mut data = values(if member.rank == 0 { 5 } else { 0 }, COUNT);
        let mut desc = CallDesc { collective: Collective::Broadcast, ..all_reduce(&mut data, Mode::Async) };
        desc.timeout = Some(PATIENCE);
        if member.rank == 2 {
            // The call is late here, so rank 1 cannot send it on.
            may_join.wait();
        }
        let call = member.group.submit(on_device(desc, &accelerators, &device)).unwrap();
        if member.rank == 1 {
            until("most results are copied out", || device.in_flight.load(Ordering::Relaxed) > 0);
            let waited = call.wait(Some(Duration::from_millis(50)), &mut || false);
            assert!(matches!(waited, Waited::TimedOut(_)), "its group could be destroyed now: {waited:?}");
            may_join.wait();
        }
        finish(&call).unwrap();
        device.release();
        until("the call completes", || call.test());
        assert!(data == values(5, COUNT));
    });
}

#[test]
fn a_wait_for_a_message_ends_when_all_copies_are_enqueued() {
    let accelerators = accelerators();
    World::new(options(2, Fabric::Tcp)).run("g", |member| {
        let device = Device::new(When::HeldOut);
        let (collective, peer) = if member.rank == 0 { (Collective::Send, 1) } else { (Collective::Recv, 0) };
        let mut data = values(if member.rank == 0 { 5 } else { 0 }, 1000);
        let call =
            member.group.submit(on_device(message(&mut data, collective, peer), &accelerators, &device)).unwrap();
        finish(&call).unwrap();
        assert_eq!(call.is_done(), member.rank == 0);
        device.release();
        until("the message is there", || call.test());
        assert_eq!(data, values(5, 1000));
    });
}

#[test]
fn messages_between_accelerators_arrive() {
    for &fabric in FABRICS {
        for (when, count) in [(When::Early, 10), (When::Late, 10), (When::Late, 5_000_000)] {
            let accelerators = accelerators();
            World::new(options(2, fabric)).run("g", |member| {
                let device = Device::new(when);
                let (collective, peer) = if member.rank == 0 { (Collective::Send, 1) } else { (Collective::Recv, 0) };
                let mut data = values(if member.rank == 0 { 5 } else { 0 }, count);
                let desc = on_device(message(&mut data, collective, peer), &accelerators, &device);
                finish(&member.group.submit(desc).unwrap()).unwrap();
                assert!(data == values(5, count), "{fabric:?} {when:?} {count}");
            });
        }
    }
}

#[test]
fn a_call_behind_long_computing_costs_few_polls() {
    let accelerators = accelerators();
    World::new(options(2, Fabric::Shm)).run("g", |member| {
        let device = Device::new(When::Held);
        let mut data = values(member.rank, 1000);
        let call = member.group.submit(on_device(all_reduce(&mut data, Mode::Async), &accelerators, &device)).unwrap();
        until("the thread polls", || accelerators.polls() > 0);
        let before = accelerators.polls();
        std::thread::sleep(Duration::from_millis(400));
        let polls = accelerators.polls() - before;
        // From 50 us to 400 ms there are 9 times e. The bound leaves room for the polls of the first 50 us.
        assert!(polls < 2_000, "{polls} polls in 400 ms");
        device.release();
        finish(&call).unwrap();
        assert_eq!(data, sums(2, 1000));
    });
}

#[test]
fn an_accelerator_that_fails_is_named_on_all_ranks() {
    for when in [
        When::Refused(Direction::In),
        When::Refused(Direction::Out),
        When::Broken(Direction::In),
        When::Broken(Direction::Out),
    ] {
        let accelerators = accelerators();
        let errors = World::new(options(3, Fabric::Shm)).run("g", |member| {
            let device = Device::new(if member.rank == 1 { when } else { When::Late });
            let mut data = values(member.rank, 1000);
            let made = member.group.submit(on_device(all_reduce(&mut data, Mode::Async), &accelerators, &device));
            if made.is_err() {
                // torch passes the refusal to its caller, who ends the job.
                member.group.abort("the device refused a copy");
            }
            made.and_then(|call| finish(&call)).and_then(|()| member.barrier()).unwrap_err()
        });
        for (rank, error) in errors.iter().enumerate().filter(|_| when != When::Refused(Direction::In)) {
            let why = if matches!(when, When::Broken(_)) { "an illegal address" } else { "its fan has stopped" };
            assert_eq!(error.kind, ErrorKind::Device, "{when:?} rank {rank}: {error}");
            assert!(error.to_string().contains(why), "{when:?} rank {rank}: {error}");
        }
        accelerators.close();
    }
}

#[test]
fn a_call_that_fails_keeps_its_memory_until_its_copies_have_been_made() {
    let (accelerators, have_issued) = (accelerators(), std::sync::Barrier::new(2));
    World::new(options(2, Fabric::Shm)).run("g", |member| {
        let device = Device::new(When::Held);
        let mut data = values(member.rank, 1000);
        let call = member.group.submit(on_device(all_reduce(&mut data, Mode::Async), &accelerators, &device)).unwrap();
        have_issued.wait();
        member.group.abort("the test wants it");
        let waited = call.wait(Some(Duration::from_millis(100)), &mut || false);
        assert!(matches!(waited, Waited::TimedOut(_)), "a copy may still write: {waited:?}");
        device.release();
        assert!(matches!(call.wait(Some(PATIENCE), &mut || false), Waited::Failed(_)));
        assert_eq!(device.in_flight.load(Ordering::Relaxed), 0);
        assert_eq!(data, values(member.rank, 1000), "nothing is copied out after a failure");
        assert_eq!(device.finished.load(Ordering::Relaxed), 0, "the call has failed");
    });
    until("the memory is back", || accelerators.pinned().used_bytes == 0);
}

#[test]
fn a_refused_call_keeps_its_memory_until_its_copies_have_been_made() {
    let accelerators = accelerators();
    World::new(options(2, Fabric::Shm)).run("g", |member| {
        let device = Device::new(When::Held);
        member.barrier().unwrap();
        let mut data = values(member.rank, 1000);
        let _ = member.group.leave();
        let desc = on_device(all_reduce(&mut data, Mode::Async), &accelerators, &device);
        assert!(member.group.submit(desc).is_err());
        if device.in_flight.load(Ordering::Relaxed) > 0 {
            assert!(accelerators.pinned().used_bytes > 0);
        }
        device.release();
        until("the copies have been made", || device.in_flight.load(Ordering::Relaxed) == 0);
    });
    until("the memory is back", || accelerators.pinned().used_bytes == 0);
}

#[test]
fn memory_of_copies_whose_end_no_event_shows_is_not_used_again() {
    let accelerators = accelerators();
    World::new(options(1, Fabric::Loopback(4))).run("g", |member| {
        let device = Device::new(When::Unrecorded);
        // Leaked on purpose: the copy may still read it.
        let data = Box::leak(values(5, 1000).into_boxed_slice());
        let desc = on_device(message(data, Collective::Send, 0), &accelerators, &device);
        let error = member.group.submit(desc).map(drop).unwrap_err();
        assert!(error.to_string().contains("it records no events"), "{error}");
        assert_eq!(device.in_flight.load(Ordering::Relaxed), 1);
    });
    accelerators.close();
    assert!(accelerators.pinned().used_bytes > 0, "the next call would get this memory");
}

#[test]
fn a_panic_of_the_thread_fails_calls_and_keeps_the_memory_of_copies_in_flight() {
    let accelerators = accelerators();
    World::new(options(1, Fabric::Loopback(4))).run("g", |member| {
        for panics in [true, false] {
            let device = Device::new(if panics { When::Panics } else { When::Late });
            // Leaked on purpose: the copy may still read it.
            let data = Box::leak(values(5, 1000).into_boxed_slice());
            let desc = on_device(message(data, Collective::Send, 0), &accelerators, &device);
            let call = member.group.submit(desc);
            let error = call.and_then(|call| finish(&call)).unwrap_err().to_string();
            assert!(error.contains("may still be in flight: the thread that follows them has panicked"), "{error}");
            assert!(accelerators.pinned().used_bytes > 0, "the next call would get this memory");
        }
    });
    accelerators.close();
}

#[test]
fn the_end_of_the_process_ends_the_thread_and_fails_calls_behind_computing() {
    let (accelerators, have_issued) = (accelerators(), std::sync::Barrier::new(2));
    let errors = World::new(options(2, Fabric::Shm)).run("g", |member: Member| {
        let device = Device::new(When::Held);
        // Leaked on purpose: a copy may still write to it, as the error says.
        let data = Box::leak(values(member.rank, 1000).into_boxed_slice());
        let call = member.group.submit(on_device(all_reduce(data, Mode::Async), &accelerators, &device)).unwrap();
        // The first rank that closes fails its call, and with it the group.
        have_issued.wait();
        accelerators.close();
        match call.wait(Some(PATIENCE), &mut || false) {
            Waited::Failed(error) => error,
            other => panic!("{other:?}"),
        }
    });
    assert!(errors.iter().all(|error| error.to_string().contains("the process exits")), "{errors:?}");
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < PATIENCE, "not before the test's patience was over: {what}");
        std::thread::yield_now();
    }
}
