//! A panic inside the engine is an internal error on every rank, and no rank waits for work that the panic left undone.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use accl_engine::{Call, Mode};
use accl_testkit::{EXPLODES, LinkFunction, Member, Rig, World, WorldOptions, finish};
use accl_types::{Error, ErrorKind, ReduceOp, Result};

/// Longer than any test here takes, and shorter than a call's deadline.
const PATIENCE: Duration = Duration::from_secs(10);
/// Functions of a link that every poll of the links, and every sleep, calls.
const STEPS: [LinkFunction; 4] = [LinkFunction::Peek, LinkFunction::CheckPeer, LinkFunction::Arm, LinkFunction::Disarm];

fn options(timeout: Duration) -> WorldOptions {
    WorldOptions::new(2).timeout(timeout)
}

/// Waits for the end of a call without making progress.
fn watch(call: &Call) -> Result<()> {
    let began = Instant::now();
    while !call.is_done() {
        if began.elapsed() > PATIENCE {
            return Err(Error::timeout("no thread ended the call"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    call.error().map_or(Ok(()), Err)
}

fn expect_explosion(error: &Error, step: LinkFunction) {
    assert_eq!(error.kind, ErrorKind::Internal, "{step:?}: {error}");
    assert!(error.to_string().contains(EXPLODES), "{step:?}: {error}");
}

fn explode(step: LinkFunction, call: impl Fn(&Member) -> Result<()> + Sync) {
    let (world, rig) = World::rigged(options(Duration::from_secs(30)));
    let started = AtomicBool::new(false);
    let errors = world.run("g", |member| {
        member.barrier().unwrap();
        // Rank 0's next step of this kind panics. Rank 1 sends what rank 0 needs only after that.
        if member.rank == 0 {
            rig.explode_at(step);
            started.store(true, Ordering::SeqCst);
            return call(&member);
        }
        while !started.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        // The steps before a sleep occur only while there is something to wait for.
        std::thread::sleep(Duration::from_millis(100));
        call(&member)
    });
    expect_explosion(errors[0].as_ref().expect_err("the call must fail where the link explodes"), step);
    // Rank 1 may have had everything that it needed; otherwise it must not wait for ever. If it issues its call late,
    // the call is refused with the cause.
    if let Err(error) = &errors[1] {
        let is_late = error.kind == ErrorKind::Aborted && error.to_string().contains(EXPLODES);
        let kinds = [ErrorKind::Internal, ErrorKind::Timeout, ErrorKind::PeerLost];
        assert!(is_late || kinds.contains(&error.kind), "{step:?}, {:?}: {error}", error.kind);
    }
}

#[test]
fn a_panic_under_a_waiter_is_an_internal_error() {
    for step in STEPS {
        explode(step, |member| member.all_reduce(&mut [1.0_f32; 4], ReduceOp::Sum));
    }
}

#[test]
fn a_panic_under_the_background_thread_is_an_internal_error() {
    for step in STEPS {
        explode(step, |member| {
            let mut data = [1.0_f32; 4];
            let call = member.group.submit(member.all_reduce_desc(&mut data, ReduceOp::Sum, Mode::Async))?;
            let ended = watch(&call);
            // The call writes into `data` until it ends.
            finish(&call).and(ended)
        });
    }
}

/// Issues a call on rank 0 that rank 1 never issues, and leaves it to the background thread. The deadline must end it.
fn expect_deadlines(world: &World, step: LinkFunction) {
    let groups = world.run("later", |member| member);
    let mut data = [1.0_f32; 4];
    let desc = groups[0].all_reduce_desc(&mut data, ReduceOp::Sum, Mode::Async);
    let call = groups[0].group.submit(desc).unwrap();
    let error = watch(&call).unwrap_err();
    assert!(
        call.is_done() && error.message.contains("all_reduce"),
        "{step:?}: deadlines are looked at no more: {error}"
    );
    assert_eq!(error.kind, ErrorKind::Timeout, "{step:?}: {error}");
}

#[test]
fn deadlines_are_checked_after_a_panic_under_the_background_thread() {
    for step in STEPS {
        let (world, rig) = World::rigged(options(Duration::from_millis(300)));
        let groups = world.run("g", |member| member);
        rig.explode_at(step);
        let mut data = [1.0_f32; 4];
        let desc = groups[0].all_reduce_desc(&mut data, ReduceOp::Sum, Mode::Async);
        let call = groups[0].group.submit(desc).unwrap();
        expect_explosion(&watch(&call).unwrap_err(), step);
        expect_deadlines(&world, step);
    }
}

/// The notification of the peers panics, too.
#[test]
fn a_link_that_always_panics_ends_its_calls_and_not_the_background_thread() {
    for step in [LinkFunction::Peek, LinkFunction::Reserve, LinkFunction::Arm] {
        let (world, rig) = World::rigged(options(Duration::from_secs(30)));
        let groups = world.run("g", |member| member);
        let mut never = [0_u8; 4];
        let call = groups[0].post_recv(&mut never, Some(1), 0).unwrap();
        await_parked(&rig);
        rig.explode_always_at(step);
        // A message of the other rank wakes the background thread, whose answer needs room in the link.
        let other = groups[1].post_recv(&mut [0_u8; 4], Some(0), 1).unwrap();
        let send = groups[1].post_send(&[7_u8; 8], 0, 0).unwrap();
        let error = watch(&call).unwrap_err();
        assert!(call.is_done(), "{step:?}: {error}");
        let kinds = [ErrorKind::Internal, ErrorKind::Mismatch];
        assert!(kinds.contains(&error.kind), "{step:?}: {error}");
        groups[1].group.abort("the test is over");
        drop((other, send));
    }
}

fn await_parked(rig: &Rig) {
    let began = Instant::now();
    while !rig.is_parked() {
        assert!(began.elapsed() < PATIENCE, "the background thread does not sleep");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Two sends find room in one progress pass, and the second one panics. The first is complete, and its caller must
/// still learn of that.
#[test]
fn a_panic_after_a_completed_send_leaves_no_rank_waiting() {
    let (world, rig) = World::rigged(options(Duration::from_secs(30)));
    let groups = world.run("g", |member| member);
    // The sends are more than the link holds.
    let sends: Vec<Call> = (0..40).map(|_| groups[0].post_send(&[7_u8; 8], 1, 0).unwrap()).collect();
    assert!(sends.iter().filter(|call| !call.is_done()).count() > 2, "the link holds them all");
    await_parked(&rig);
    rig.explode_after(1, LinkFunction::Commit);
    let mut data = [[0_u8; 8]; 40];
    // The failure may arrive before the last of these receives is posted.
    let receives: Vec<Call> = data.iter_mut().filter_map(|data| groups[1].post_recv(data, Some(0), 0).ok()).collect();
    for call in &sends {
        if let Err(error) = watch(call) {
            assert_eq!(error.kind, ErrorKind::Internal, "{error}");
        }
    }
    groups[1].group.abort("the test is over");
    receives.iter().for_each(|call| drop(finish(call)));
}

#[test]
fn a_second_callback_is_refused_and_the_first_one_is_run() {
    World::new(options(Duration::from_secs(30))).run("g", |member| {
        let mut data = [1.0_f32; 4];
        let call = match member.rank {
            0 => member.group.submit(member.all_reduce_desc(&mut data, ReduceOp::Sum, Mode::Async)).unwrap(),
            _ => {
                std::thread::sleep(Duration::from_millis(50));
                return member.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            }
        };
        let (sender, receiver) = std::sync::mpsc::channel();
        let sends = |who: u32| {
            let sender = sender.clone();
            Box::new(move || sender.send(who).unwrap())
        };
        call.when_done(sends(1)).unwrap();
        // No callback runs twice, and none is dropped without an error.
        let second = call.when_done(sends(2));
        finish(&call).unwrap();
        assert_eq!(receiver.recv_timeout(PATIENCE), Ok(1));
        match second {
            Err(error) => assert_eq!(error.kind, ErrorKind::Internal, "{error}"),
            Ok(()) => assert_eq!(receiver.recv_timeout(PATIENCE), Ok(2), "the call had ended before"),
        }
    });
}
