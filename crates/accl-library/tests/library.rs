//! Collectives that `sidestep` gives to a library as a whole. Results are the same, and all ranks have one order. A
//! failure does not hang, and it does not give back memory that the library may still write.

use std::ops::Deref;
use std::sync::atomic::Ordering;
use std::sync::{Barrier, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use accl_engine::{Blocks, CallDesc, Mode, TensorDesc};
use accl_library::LibraryKind;
use accl_testkit::{Fabric, Library, Member, World, WorldOptions, calls, finish, library};
use accl_types::{Collective, Dtype, Elems, Error, ErrorKind, ReduceOp};

/// Time that a test waits for an expected event.
const PATIENCE: Duration = Duration::from_secs(20);

/// Exclusive use of the process's library by one test. Dropping it resets the library's switches.
struct Turn {
    library: &'static Library,
    _alone: MutexGuard<'static, ()>,
}

impl Turn {
    fn take() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let turn = Self { library: library(), _alone: alone };
        turn.begun.store(0, Ordering::Relaxed);
        turn.abandoned.store(0, Ordering::Relaxed);
        turn.closed_after_failure.store(0, Ordering::Relaxed);
        turn
    }

    fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }
}

impl Deref for Turn {
    type Target = Library;

    fn deref(&self) -> &Library {
        self.library
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        for flag in [&self.fails, &self.refuses, &self.is_stuck, &self.leaves_to_host] {
            flag.store(false, Ordering::Relaxed);
        }
    }
}

fn options(world: u32) -> WorldOptions {
    WorldOptions::new(world).over(Fabric::Shm).with("sidestep", "all=mpi").timeout(Duration::from_secs(20))
}

/// Returns a world whose engines know the library.
fn world_of(options: WorldOptions) -> World {
    let world = World::new(options);
    world.engines.iter().for_each(|engine| engine.add_offload(LibraryKind::new("mpi")).unwrap());
    world
}

/// Contribution of rank `rank`: small whole numbers, so that sums are exact in every order.
fn numbers(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|at| ((rank * 31 + at * 7) % 97) as f32).collect()
}

/// Runs every collective, in place where possible. Returns all results one after the other.
fn every_collective(member: &Member, count: usize) -> Vec<f32> {
    let Member { rank, world, .. } = *member;
    let mine = numbers(rank, count);
    let blocks = numbers(rank, count * world);
    let counts = vec![count; world];
    let mut all = Vec::new();
    let mut data = mine.clone();
    member.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    all.append(&mut data);
    data = mine.clone();
    member.broadcast(&mut data, 1).unwrap();
    all.append(&mut data);
    data = mine.clone();
    member.reduce(&mut data, ReduceOp::Sum, 1).unwrap();
    if rank == 1 {
        all.append(&mut data);
    }
    data = vec![0.0; count];
    member.reduce_scatter(&blocks, &counts, &mut data, ReduceOp::Sum).unwrap();
    all.append(&mut data);
    data = vec![0.0; count * world];
    member.all_gather(&mine, &mut data, &counts).unwrap();
    all.append(&mut data);
    // The contribution lies at its place in the result.
    data = vec![0.0; count * world];
    data[rank * count..][..count].copy_from_slice(&mine);
    let own: *const f32 = data[rank * count..].as_ptr();
    let mut desc = CallDesc::new(Collective::AllGather, Dtype::F32);
    desc.inputs = Blocks::of(TensorDesc::dense(own.cast_mut().cast(), Dtype::F32, Elems(count as u64)));
    let block =
        |at: usize| [TensorDesc::dense(data[at * count..].as_ptr().cast_mut().cast(), Dtype::F32, Elems(count as u64))];
    desc.outputs = (0..world).map(block).collect();
    member.call(desc).unwrap();
    all.append(&mut data);
    data = vec![0.0; if rank == 2 { count * world } else { 0 }];
    member.gather(&mine, &mut data, 2).unwrap();
    all.append(&mut data);
    data = vec![0.0; count];
    member.scatter(&blocks, &mut data, 0).unwrap();
    all.append(&mut data);
    data = vec![0.0; count * world];
    member.all_to_all(&blocks, &counts, &mut data, &counts, true).unwrap();
    all.append(&mut data);
    all
}

#[test]
fn every_collective_gives_what_the_host_gives() {
    let turn = Turn::take();
    for count in [0, 1, 300, 70_000] {
        let before = turn.begun();
        let by_library = world_of(options(3)).run("g", |member| every_collective(&member, count));
        assert_eq!(turn.begun() - before, 9 * 3, "all of them went to the library");
        let by_host = world_of(options(3).with("sidestep", "")).run("g", |member| every_collective(&member, count));
        assert_eq!(by_library, by_host, "{count} elements");
    }
    assert_eq!(turn.abandoned.load(Ordering::Relaxed), 0);
}

#[test]
fn tensors_that_are_not_in_one_piece_are_gathered_from_and_scattered_to() {
    let turn = Turn::take();
    world_of(options(2)).run("g", |member| {
        let mine = numbers(member.rank, 100);
        let mut apart = [vec![0.0_f32; 100], vec![1.0; 7], vec![0.0; 100]];
        let mut desc = CallDesc::new(Collective::AllGather, Dtype::F32);
        desc.inputs = Blocks::of(calls::read(&mine));
        let [first, _, second] = &mut apart;
        desc.outputs = [[calls::write(first)], [calls::write(second)]].into_iter().collect();
        member.call(desc).unwrap();
        assert_eq!((&apart[0], &apart[2]), (&numbers(0, 100), &numbers(1, 100)));
        // Every second element of a tensor.
        let mut wide = numbers(member.rank, 200);
        let mut desc = CallDesc::new(Collective::AllReduce, Dtype::F32);
        desc.outputs = Blocks::of(TensorDesc::strided(wide.as_mut_ptr().cast(), Dtype::F32, &[100], &[2]).unwrap());
        member.call(desc).unwrap();
        let (zero, one, own) = (numbers(0, 200), numbers(1, 200), numbers(member.rank, 200));
        for at in 0..200 {
            assert_eq!(wide[at], if at % 2 == 0 { zero[at] + one[at] } else { own[at] }, "element {at}");
        }
    });
    assert_eq!(turn.begun(), 4);
}

#[test]
fn what_a_library_would_do_otherwise_stays_with_the_host() {
    let turn = Turn::take();
    world_of(options(2)).run("g", |member| {
        member.barrier().unwrap();
        let mut data = [1.0_f32, f32::NAN];
        member.all_reduce(&mut data, ReduceOp::Min).unwrap();
        assert!(data[1].is_nan());
        member.all_reduce(&mut [1_i16; 4], ReduceOp::Sum).unwrap();
        member.all_reduce(&mut [1.0_f32; 4], ReduceOp::Avg).unwrap();
        let (rank, mut output) = (member.rank, [0_i32; 4]);
        let counts = if rank == 0 { ([1, 3], [1, 3]) } else { ([3, 1], [3, 1]) };
        member.all_to_all(&[7_i32; 4], &counts.0, &mut output, &counts.1, false).unwrap();
        assert_eq!(output, [7; 4]);
    });
    world_of(options(2).with("deterministic", "1")).run("g", |member| {
        member.all_reduce(&mut [1.0_f32; 4], ReduceOp::Sum).unwrap();
    });
    world_of(options(1)).run("g", |member| member.all_reduce(&mut [1.0_f32; 4], ReduceOp::Sum).unwrap());
    assert_eq!(turn.begun(), 0);
}

#[test]
fn only_the_collectives_that_are_named_go_to_the_library() {
    let turn = Turn::take();
    world_of(options(2).with("sidestep", "broadcast=mpi,all_gather=host")).run("g", |member| {
        member.all_reduce(&mut [1.0_f32; 4], ReduceOp::Sum).unwrap();
        member.broadcast(&mut [1.0_f32; 4], 0).unwrap();
        let text = member.group.describe();
        assert!(text.contains("mpi does broadcast: 1 so far"), "{text}");
        let mut desc = CallDesc::new(Collective::Broadcast, Dtype::F32);
        let mut data = [1.0_f32; 4];
        desc.outputs = Blocks::of(calls::write(&mut data));
        assert_eq!(member.group.algorithm_of(&desc).unwrap(), "mpi");
    });
    assert_eq!(turn.begun(), 2);
}

#[test]
fn many_calls_in_flight_are_done_in_one_order_alongside_host_calls() {
    let turn = Turn::take();
    world_of(options(3)).run("g", |member| {
        for round in 0..20 {
            let mut sums: Vec<Vec<f32>> = (0..8).map(|at| numbers(member.rank + at + round, 500)).collect();
            let mut means: Vec<Vec<f32>> = (0..8).map(|at| vec![(at + round) as f32; 40]).collect();
            let calls: Vec<_> = sums
                .iter_mut()
                .zip(&mut means)
                .flat_map(|(sum, mean)| {
                    let sum = member.group.submit(member.all_reduce_desc(sum, ReduceOp::Sum, Mode::Async)).unwrap();
                    let mean = member.group.submit(member.all_reduce_desc(mean, ReduceOp::Avg, Mode::Async)).unwrap();
                    [sum, mean]
                })
                .collect();
            calls.iter().for_each(|call| finish(call).unwrap());
            for (at, (sum, mean)) in sums.iter().zip(&means).enumerate() {
                let of = |rank: usize| numbers(rank + at + round, 500);
                let expected: Vec<f32> = of(0).iter().zip(of(1)).zip(of(2)).map(|((a, b), c)| a + b + c).collect();
                assert_eq!((sum, mean), (&expected, &vec![(at + round) as f32; 40]));
            }
        }
    });
    assert_eq!(turn.begun(), 20 * 8 * 3);
}

#[test]
fn ranks_that_make_different_calls_never_enter_the_library() {
    let turn = Turn::take();
    let errors = world_of(options(2)).run("g", |member| {
        if member.rank == 0 {
            member.all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum).unwrap_err()
        } else {
            member.broadcast(&mut [1.0_f32; 8], 0).unwrap_err()
        }
    });
    for error in errors {
        assert!(matches!(error.kind, ErrorKind::Mismatch | ErrorKind::Aborted), "{error}");
        assert!(error.message.contains("ranks disagree on call 0"), "{error}");
        assert!(!error.context.must_leak_memory, "no call had begun: {error}");
    }
    assert_eq!(turn.begun(), 0);
}

#[test]
fn groups_that_a_library_does_nothing_for_are_done_by_the_host() {
    let turn = Turn::take();
    turn.leaves_to_host.store(true, Ordering::Relaxed);
    world_of(options(2)).run("g", |member| {
        let mut data = [1.0_f32; 4];
        member.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [2.0; 4]);
    });
    assert_eq!(turn.begun(), 0);
}

/// Runs a world of two ranks whose call never completes, with a timeout under which both ranks enter the library. On a
/// busy machine, a rank may reach its deadline before the other rank has issued its call. Then neither rank enters the
/// library, and a longer timeout is tried.
fn with_all_ranks_in_the_library<R>(turn: &Turn, run: impl Fn(Duration) -> R) -> R {
    for timeout in [400, 1600, 6400] {
        let before = turn.begun();
        let result = run(Duration::from_millis(timeout));
        if turn.begun() - before == 2 {
            return result;
        }
    }
    panic!("a rank has not issued its call within seconds");
}

/// Returns the errors of an all_reduce that every rank issues.
fn errors_of_all_reduce(turn: &Turn, world: &World) -> Vec<Error> {
    let before = turn.begun();
    let errors = world.run("g", |member| {
        let error = member.all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum).unwrap_err();
        let next = member.all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum).unwrap_err();
        assert_eq!(next.kind, ErrorKind::Aborted, "the group is over: {next}");
        error
    });
    assert!(turn.begun() - before <= 2);
    errors
}

#[test]
fn a_failure_of_the_library_is_an_error_that_says_so_and_that_the_memory_stays() {
    let turn = Turn::take();
    turn.fails.store(true, Ordering::Relaxed);
    let errors = errors_of_all_reduce(&turn, &world_of(options(2)));
    assert!(
        errors.iter().all(|error| error.message.contains("the collective failed in mpi: it was set to fail")),
        "{errors:?}"
    );
    // A rank that learned of the other rank's failure first may not have begun.
    let held = errors.iter().filter(|error| error.context.must_leak_memory).count() as u64;
    assert!(held > 0 && held == turn.abandoned.load(Ordering::Relaxed), "{errors:?}");
    for error in errors {
        assert_eq!(error.to_string().contains("never freed"), error.context.must_leak_memory, "{error}");
    }
}

#[test]
fn a_refusal_of_the_library_holds_no_memory() {
    let turn = Turn::take();
    turn.refuses.store(true, Ordering::Relaxed);
    let errors = errors_of_all_reduce(&turn, &world_of(options(2)));
    assert!(
        errors.iter().any(|error| error.message.contains("could not start the collective: it was set to refuse")),
        "{errors:?}"
    );
    assert!(errors.iter().all(|error| !error.context.must_leak_memory), "{errors:?}");
    assert_eq!(turn.abandoned.load(Ordering::Relaxed), 0);
}

#[test]
fn a_collective_that_the_library_never_ends_is_late_and_its_memory_stays() {
    let turn = Turn::take();
    turn.is_stuck.store(true, Ordering::Relaxed);
    let errors = with_all_ranks_in_the_library(&turn, |timeout| {
        errors_of_all_reduce(&turn, &world_of(options(2).timeout(timeout)))
    });
    assert!(errors.iter().any(|error| error.kind == ErrorKind::Timeout), "{errors:?}");
    for error in errors {
        assert!(error.context.must_leak_memory && error.to_string().contains("never freed"), "{error}");
    }
}

#[test]
fn a_rank_that_leaves_during_a_collective_of_the_library_ends_it_soon() {
    let turn = Turn::take();
    turn.is_stuck.store(true, Ordering::Relaxed);
    let world = world_of(options(3));
    let errors = world.run("g", |member| {
        let mut data = [1.0_f32; 8];
        if member.rank == 2 {
            let call = member.group.submit(member.all_reduce_desc(&mut data, ReduceOp::Sum, Mode::Async)).unwrap();
            while turn.begun() < 3 {
                std::thread::sleep(Duration::from_millis(1));
            }
            member.group.abort("the test wants it");
            return finish(&call).unwrap_err();
        }
        member.all_reduce(&mut data, ReduceOp::Sum).unwrap_err()
    });
    for error in errors {
        assert_eq!(error.kind, ErrorKind::Aborted, "not at its deadline: {error}");
        assert!(error.context.must_leak_memory && error.message.contains("cannot be stopped"), "{error}");
    }
    assert_eq!(turn.abandoned.load(Ordering::Relaxed), 3);
}

#[test]
fn a_library_may_go_on_with_a_gathering_in_place_that_was_given_up() {
    let turn = Turn::take();
    turn.is_stuck.store(true, Ordering::Relaxed);
    // The buffer is larger than what allocators keep, so memory that is freed is unmapped.
    let (count, world) = (9 << 20, 2);
    let kept = with_all_ranks_in_the_library(&turn, |timeout| {
        world_of(options(2).timeout(timeout)).run("g", |member| {
            let mut data = vec![0.0_f32; count * world];
            data[member.rank * count..][..count].fill(1.0 + member.rank as f32);
            let block = |at: usize| {
                TensorDesc::dense(data[at * count..].as_ptr().cast_mut().cast(), Dtype::F32, Elems(count as u64))
            };
            let mut desc = CallDesc::new(Collective::AllGather, Dtype::F32);
            desc.inputs = Blocks::of(block(member.rank));
            desc.outputs = (0..world).map(|at| [block(at)]).collect();
            (member.call(desc).unwrap_err(), data)
        })
    });
    assert!(kept.iter().all(|(error, _)| error.context.must_leak_memory), "{:?}", kept[0].0);
    // The library reads its input and writes the output, which the callers have kept.
    turn.go_on();
    let all = [vec![1.0; count], vec![2.0; count]].concat();
    assert!(kept.iter().all(|(_, data)| *data == all));
}

#[test]
fn copies_of_tensors_apart_are_given_back_when_their_collective_is_given_up() {
    let turn = Turn::take();
    turn.is_stuck.store(true, Ordering::Relaxed);
    let errors = with_all_ranks_in_the_library(&turn, |timeout| {
        world_of(options(2).timeout(timeout)).run("g", |member| {
            let mine = numbers(member.rank, 8);
            let mut apart = [vec![0.0_f32; 8], vec![1.0; 7], vec![0.0; 8]];
            let mut desc = CallDesc::new(Collective::AllGather, Dtype::F32);
            desc.inputs = Blocks::of(calls::read(&mine));
            let [first, _, second] = &mut apart;
            desc.outputs = [[calls::write(first)], [calls::write(second)]].into_iter().collect();
            member.call(desc).unwrap_err()
        })
    });
    for error in errors {
        assert!(!error.context.must_leak_memory, "the library has copies: {error}");
    }
}

#[test]
fn sums_and_gatherings_are_alike_on_ranks_whose_tensors_lie_otherwise() {
    let turn = Turn::take();
    world_of(options(2)).run("g", |member| {
        // Each rank gives two tensors to one call. On rank 0 they are adjacent, on rank 1 apart.
        let mut data = numbers(member.rank, 300);
        let (first, rest) = data.split_at_mut(100);
        let second = if member.rank == 0 { &mut rest[..100] } else { &mut rest[100..] };
        let expected: Vec<f32> = {
            let theirs = numbers(1 - member.rank, 300);
            let (theirs_first, theirs_rest) = theirs.split_at(100);
            let theirs_second = if member.rank == 1 { &theirs_rest[..100] } else { &theirs_rest[100..] };
            let pairs = first.iter().chain(second.iter()).zip(theirs_first.iter().chain(theirs_second));
            pairs.map(|(a, b)| a + b).collect()
        };
        let mut desc = CallDesc::new(Collective::AllReduce, Dtype::F32);
        desc.outputs = [[calls::write(first), calls::write(second)]].into_iter().collect();
        member.call(desc).unwrap();
        assert_eq!([&*first, &*second].concat(), expected);
    });
    // The library itself rejects calls in which only some ranks are in place.
    assert_eq!(turn.begun(), 2);
}

#[test]
fn a_group_that_has_failed_is_left_as_one() {
    let turn = Turn::take();
    let done = Barrier::new(2);
    world_of(options(2)).run("g", |member| {
        member.all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum).unwrap();
        // If a rank aborts while the other rank's call runs, that call fails, so both wait here first.
        done.wait();
        member.group.abort("the test wants it");
    });
    let left = || turn.closed_after_failure.load(Ordering::Relaxed);
    let begin = Instant::now();
    while left() < 2 && begin.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(left(), 2);
}

#[test]
fn roots_are_those_of_the_group() {
    let turn = Turn::take();
    let world = world_of(options(3));
    world.run_ranks("part", &[2, 0], |member| {
        let mut data = numbers(member.rank, 50);
        member.broadcast(&mut data, 1).unwrap();
        assert_eq!(data, numbers(1, 50));
        let before = data.clone();
        member.reduce(&mut data, ReduceOp::Sum, 0).unwrap();
        if member.rank == 0 {
            assert_eq!(data, before.iter().map(|value| value * 2.0).collect::<Vec<_>>());
        }
    });
    assert_eq!(turn.begun(), 4);
}

#[test]
fn every_group_of_the_library_is_closed_when_its_engine_ends_at_once() {
    let turn = Turn::take();
    let (opened, closed) = (turn.opened.load(Ordering::Relaxed), turn.closed.load(Ordering::Relaxed));
    for _ in 0..30 {
        // The group and its engine are dropped one right after the other.
        world_of(options(2)).run("g", |_| ());
    }
    let begin = Instant::now();
    while turn.closed.load(Ordering::Relaxed) - closed < 60 && begin.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(turn.opened.load(Ordering::Relaxed) - opened, 60);
    assert_eq!(turn.closed.load(Ordering::Relaxed) - closed, 60);
}
