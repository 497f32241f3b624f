//! Every failure is an error on every rank that names the culprit. It is never a hang and never a wrong number.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use accl_engine::{Blocks, CallDesc, Waited};
use accl_testkit::{Fabric, Member, THRIFTY, World, WorldOptions, calls, every_transport, finish};
use accl_types::{Collective, Dtype, Error, ErrorKind, Rank, ReduceOp};

fn fabrics() -> impl Iterator<Item = Fabric> {
    every_transport().into_iter().chain([THRIFTY]).map(Fabric::Over).chain([Fabric::Loopback(4)])
}

fn options(world: u32, fabric: Fabric) -> WorldOptions {
    WorldOptions::new(world).over(fabric).timeout(Duration::from_secs(20))
}

fn error_of(result: accl_types::Result<()>) -> Error {
    result.expect_err("the call must fail")
}

/// Runs calls that differ from rank to rank. Every rank must learn of the disagreement in that call or in its next one.
fn disagree(name: &str, world: u32, call: impl Fn(&Member) -> accl_types::Result<()> + Sync, words: &[&str]) {
    for fabric in fabrics() {
        let errors = World::new(options(world, fabric)).run("g", |member| match call(&member) {
            Err(error) => error,
            // A call that completed early learns of the disagreement with the next call.
            Ok(()) => error_of(member.barrier()),
        });
        for (rank, error) in errors.iter().enumerate() {
            let text = error.to_string();
            assert!(
                matches!(error.kind, ErrorKind::Mismatch | ErrorKind::Aborted),
                "{name} over {fabric:?}, rank {rank}: {text}"
            );
            for word in words {
                assert!(text.contains(word), "{name} over {fabric:?}, rank {rank}: `{word}` is not in: {text}");
            }
        }
    }
}

#[test]
fn different_kinds_of_calls_are_named_on_all_ranks() {
    let call = |member: &Member| {
        if member.rank == 1 { member.barrier() } else { member.all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum) }
    };
    disagree(
        "kind",
        3,
        call,
        &["ranks disagree on call 0", "rank 1 called barrier", "called all_reduce(float32, SUM, 8 elements)"],
    );
}

#[test]
fn different_sizes_are_named_on_all_ranks() {
    let call = |member: &Member| member.all_reduce(&mut vec![1.0_f32; 8 + member.rank / 2], ReduceOp::Sum);
    disagree("size", 3, call, &["rank 2 called all_reduce(float32, SUM, 9 elements)"]);
}

#[test]
fn large_calls_of_different_sizes_are_named_on_all_ranks() {
    let call = |member: &Member| member.all_reduce(&mut vec![1.0_f32; 1_000_000 + member.rank], ReduceOp::Sum);
    disagree("size", 2, call, &["1000000 elements", "1000001 elements"]);
}

#[test]
fn different_dtypes_and_operators_are_named() {
    let dtypes = |member: &Member| {
        if member.rank == 0 {
            member.all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum)
        } else {
            member.all_reduce(&mut [1_i32; 8], ReduceOp::Sum)
        }
    };
    disagree("dtype", 2, dtypes, &["float32", "int32"]);
    let op = |member: &Member| {
        member.all_reduce(&mut [1.0_f32; 8], if member.rank == 0 { ReduceOp::Min } else { ReduceOp::Max })
    };
    disagree("operator", 2, op, &["MIN", "MAX"]);
}

#[test]
fn different_roots_are_named_although_a_root_may_leave_early() {
    let broadcast = |member: &Member| member.broadcast(&mut [1.0_f32; 8], member.rank as u32);
    disagree("broadcast", 2, broadcast, &["root 0", "root 1"]);
    let reduce = |member: &Member| member.reduce(&mut [1.0_f32; 8], ReduceOp::Sum, 1 - member.rank as u32);
    disagree("reduce", 2, reduce, &["root 0", "root 1"]);
}

#[test]
fn splits_that_do_not_match_are_named() {
    let call = |member: &Member| {
        // Rank 0 expects 5 elements from rank 1, which sends 7.
        let input = if member.rank == 0 { [5, 5] } else { [7, 5] };
        let output = [5, 5];
        let data = vec![1.0_f32; input.iter().sum()];
        let mut out = vec![0.0_f32; 10];
        member.all_to_all(&data, &input, &mut out, &output, false)
    };
    disagree("splits", 2, call, &["28 bytes", "20"]);
}

#[test]
fn a_message_of_another_size_is_named_on_both_sides() {
    let call = |member: &Member| {
        let call = if member.rank == 0 {
            member.post_send(&[1_i64; 5], 1, 4)?
        } else {
            let mut got = vec![0_i64; 6];
            let call = member.post_recv(&mut got, Some(0), 4)?;
            finish(&call)?;
            return Ok(());
        };
        finish(&call)
    };
    disagree("message", 2, call, &["sent 5 elements of int64", "receives 6 elements"]);
}

#[test]
fn a_missing_rank_is_named_when_the_time_is_up() {
    for fabric in fabrics() {
        let options = options(3, fabric).timeout(Duration::from_millis(300));
        let errors = World::new(options).run("g", |member| {
            if member.rank == 2 {
                // Rank 2 comes after the others have given up. Receives from itself make it poll its links meanwhile.
                let patience = Instant::now() + Duration::from_secs(10);
                while member.group.error().is_none() && Instant::now() < patience {
                    let mut desc = CallDesc::new(Collective::Recv, Dtype::U8);
                    desc.timeout = Some(Duration::from_secs(60));
                    desc.peer = Some(Rank(2));
                    desc.outputs = Blocks::of(calls::write::<u8>(&mut []));
                    if let Ok(call) = member.group.submit(desc) {
                        let _ = call.wait(Some(Duration::from_millis(5)), &mut || false);
                    }
                }
            }
            error_of(member.all_reduce(&mut [1.0_f32; 4], ReduceOp::Sum))
        });
        for (rank, error) in errors.iter().enumerate() {
            let text = error.to_string();
            assert!(text.contains(" Timed out waiting 3") && text.contains("rank 2 (host "), "rank {rank}: {text}");
            // Rank 0 or 1 may reach its deadline before the other rank has issued its call.
            assert!(matches!(error.kind, ErrorKind::Aborted | ErrorKind::Timeout), "{text}");
            assert!(
                errors.iter().any(|error| error.kind == ErrorKind::Timeout) && errors[2].kind == ErrorKind::Aborted,
                "{errors:?}"
            );
        }
    }
}

#[test]
fn a_refused_call_consumes_no_number() {
    World::new(options(2, Fabric::Loopback(4))).run("g", |member| {
        if member.rank == 0 {
            let mut desc = CallDesc::new(Collective::Broadcast, Dtype::F32);
            desc.root = Rank(5);
            desc.outputs = Blocks::of(calls::write(&mut [1.0_f32]));
            let error = member.group.submit(desc).map(drop).expect_err("root 5 of 2");
            assert_eq!(error.kind, ErrorKind::InvalidArgument, "{error}");
            let error = error_of(member.all_reduce(&mut [1.0_f32; 3], ReduceOp::Band));
            assert_eq!(error.kind, ErrorKind::Unsupported, "{error}");
            assert!(error.to_string().contains("BAND"), "{error}");
        }
        let mut data = [member.rank as f32 + 1.0; 3];
        member.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [3.0; 3]);
    });
}

#[test]
fn abort_ends_a_wait_in_another_thread_and_on_other_ranks() {
    for fabric in fabrics() {
        let errors = World::new(options(2, fabric)).run("g", |member| {
            if member.rank == 0 {
                let mut data = [1.0_f32; 4];
                let desc = member.all_reduce_desc(&mut data, ReduceOp::Sum, accl_engine::Mode::Async);
                let call = member.group.submit(desc).unwrap();
                let group = member.group.clone();
                let aborter = std::thread::spawn(move || group.abort("the test wants it"));
                let error = error_of(finish(&call));
                aborter.join().unwrap();
                error
            } else {
                // Waits for a message that rank 0 never sends.
                error_of(member.post_recv(&mut [0_u8; 4], Some(0), 9).and_then(|call| finish(&call)))
            }
        });
        for error in errors {
            assert_eq!(error.kind, ErrorKind::Aborted, "{error}");
            assert!(error.to_string().contains("the test wants it"), "{error}");
        }
    }
}

#[test]
fn a_rank_that_left_is_named() {
    for fabric in fabrics() {
        World::new(options(3, fabric)).run("g", |member| {
            member.barrier().unwrap();
            if member.rank == 2 {
                member.group.shutdown().unwrap();
                return;
            }
            let error = error_of(member.barrier());
            let text = error.to_string();
            assert!(text.contains("rank 2 (host ") && text.contains("left the group"), "{fabric:?}: {text}");
        });
    }
}

#[test]
fn a_destroyed_group_refuses_and_a_new_one_over_the_same_store_works() {
    let world = World::new(options(2, Fabric::Shm));
    for round in 0..5 {
        world.run("again", |member| {
            let mut data = [round as f32; 2];
            member.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, [2.0 * round as f32; 2]);
            member.barrier().unwrap();
            member.group.shutdown().unwrap();
            let error = error_of(member.barrier());
            assert_eq!(error.kind, ErrorKind::Aborted);
            assert!(error.to_string().contains("destroyed"), "{error}");
        });
    }
}

#[test]
fn an_interrupt_ends_a_wait_soon() {
    World::new(options(2, Fabric::Shm)).run("g", |member| {
        if member.rank == 0 {
            let mut got = [0_u8; 1];
            let call = member.post_recv(&mut got, Some(1), 0).unwrap();
            let mut polls = 0;
            let waited = call.wait(None, &mut || {
                polls += 1;
                polls == 3
            });
            // The message comes only after the barrier.
            assert_eq!(waited, Waited::Interrupted);
            member.barrier().unwrap();
            finish(&call).unwrap();
        } else {
            member.barrier().unwrap();
            finish(&member.post_send(&[1_u8], 0, 0).unwrap()).unwrap();
        }
    });
}

#[test]
fn a_monitored_barrier_names_who_is_missing_and_leaves_the_group_usable() {
    World::new(options(3, Fabric::Loopback(8))).run("g", |member| {
        let patience = Duration::from_secs(10);
        let monitored = |timeout, wait_all| {
            let result = member.group.monitored_barrier(timeout, wait_all, &mut || false);
            result.map_err(|error| error.to_string())
        };
        monitored(patience, false).unwrap();
        let short = Duration::from_millis(150);
        // First rank 0 comes alone, then the other ranks do. The barriers in between separate the phases.
        if member.rank == 0 {
            let first = monitored(short, false).unwrap_err();
            assert!(first.contains("Rank 1 failed to pass monitoredBarrier"), "{first}");
            let all = monitored(short, true).unwrap_err();
            assert!(all.contains("Ranks 1, 2 failed to pass monitoredBarrier"), "{all}");
            let zero = monitored(Duration::ZERO, false).unwrap_err();
            assert!(zero.contains("Rank 0 timed out in monitoredBarrier"), "{zero}");
        }
        member.barrier().unwrap();
        monitored(patience, false).unwrap();
        if member.rank != 0 {
            let alone = monitored(short, false).unwrap_err();
            let words = format!("Rank {} successfully reached monitoredBarrier, but received errors", member.rank);
            assert!(alone.contains(&words), "{alone}");
        }
        member.barrier().unwrap();
        member.group.monitored_barrier(patience, true, &mut || false).unwrap();
    });
}

/// Both ranks wait as roots, so neither sends a part of the call.
#[test]
fn roots_that_cross_find_out() {
    let reduce = |member: &Member| member.reduce(&mut [1.0_f32; 8], ReduceOp::Sum, member.rank as u32);
    disagree("reduce", 2, reduce, &["root 0", "root 1"]);
    let gather = |member: &Member| member.gather(&[1.0_f32; 8], &mut [0.0; 16], member.rank as u32);
    disagree("gather", 2, gather, &["root 0", "root 1"]);
}

/// Tests the same while no thread waits: the background thread asks the other rank.
#[test]
fn roots_that_cross_in_the_background_find_out() {
    let call = |member: &Member| {
        // An earlier call keeps the background thread parked while the next call is issued.
        let mut never = [0_u8; 1];
        let waiting = member.post_recv(&mut never, Some(1 - member.rank as u32), 5)?;
        std::thread::park_timeout(Duration::from_millis(20));
        let mut data = [1.0_f32; 8];
        let mut desc = CallDesc::new(Collective::Reduce, Dtype::F32);
        desc.root = Rank(member.rank as u32);
        desc.mode = accl_engine::Mode::Async;
        desc.outputs = Blocks::of(calls::write(&mut data));
        let call = member.group.submit(desc)?;
        let patience = Instant::now() + Duration::from_secs(10);
        while !(call.is_done() && waiting.is_done()) && Instant::now() < patience {
            std::thread::yield_now();
        }
        finish(&call)
    };
    disagree("reduce", 2, call, &["root 0", "root 1"]);
}

/// The barrier's messages need no grant: rank 0 may lack the time to give one, and the eager window may be used up.
#[test]
fn a_monitored_barrier_works_without_an_eager_window() {
    World::new(options(3, Fabric::Shm).with("eager_bytes", "0")).run("g", |member| {
        let monitored = |patience| member.group.monitored_barrier(patience, true, &mut || false);
        for _ in 0..20 {
            monitored(Duration::from_secs(10)).unwrap();
        }
        if member.rank == 1 {
            // Rank 0 does not come, so the barrier takes the given time.
            let began = Instant::now();
            assert_eq!(monitored(Duration::from_millis(100)).unwrap_err().kind, ErrorKind::Timeout);
            assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        }
        member.barrier().unwrap();
        monitored(Duration::from_secs(10)).unwrap();
    });
}

#[test]
fn a_rank_whose_monitored_barrier_was_interrupted_is_not_taken_for_present() {
    World::new(options(2, Fabric::Shm)).run("g", |member| {
        if member.rank == 1 {
            let error = member.group.monitored_barrier(Duration::from_secs(10), true, &mut || true).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Aborted);
            member.barrier().unwrap();
            member.barrier().unwrap();
        } else {
            member.barrier().unwrap();
            let result = member.group.monitored_barrier(Duration::from_millis(200), true, &mut || false);
            assert!(result.unwrap_err().message.contains("Rank 1 failed to pass"));
            member.barrier().unwrap();
        }
        member.group.monitored_barrier(Duration::from_secs(10), true, &mut || false).unwrap();
    });
}

/// A release or message of the barrier to a rank that has left is never received. For the ranks that stay, destroying
/// the group must not fail because of that.
#[test]
fn a_monitored_barrier_with_a_rank_that_left_fails_alone() {
    World::new(options(3, Fabric::Shm)).run("g", |member| {
        member.barrier().unwrap();
        if member.rank == 2 {
            member.group.shutdown().unwrap();
            return;
        }
        let result = member.group.monitored_barrier(Duration::from_millis(300), true, &mut || false);
        assert!(result.is_err());
        // The two ranks that stay can still exchange messages, and leave without an error.
        let mut got = [0_u8];
        if member.rank == 0 {
            finish(&member.post_send(&[7_u8], 1, 3).unwrap()).unwrap();
        } else {
            finish(&member.post_recv(&mut got, Some(0), 3).unwrap()).unwrap();
            assert_eq!(got, [7]);
        }
        member.group.shutdown().unwrap();
    });
}

/// Rank 0's broadcast ends before rank 1 issues another call, and rank 0 issues no further one.
#[test]
fn a_disagreement_that_no_call_could_raise_is_raised_by_destroy() {
    for fabric in fabrics() {
        let turn = std::sync::Barrier::new(2);
        World::new(options(2, fabric)).run("g", |member| {
            if member.rank == 0 {
                member.broadcast(&mut [1.0_f32; 4], 0).unwrap();
                turn.wait();
                turn.wait();
                // On a busy machine, the kernel may deliver sent data late.
                std::thread::sleep(Duration::from_millis(50));
                let error = member.group.shutdown().expect_err(&format!("over {fabric:?}"));
                assert_eq!(error.kind, ErrorKind::Mismatch, "{error}");
                assert!(error.message.contains("broadcast") && error.message.contains("all_reduce"), "{error}");
            } else {
                turn.wait();
                let error = error_of(member.all_reduce(&mut [1.0_f32; 4], ReduceOp::Sum));
                assert_eq!(error.kind, ErrorKind::Mismatch, "{error}");
                // The call has ended as soon as another thread knows of the failure. The failure has been sent to the
                // peer once this rank has left.
                member.group.shutdown().unwrap();
                turn.wait();
            }
        });
    }
}

#[test]
fn a_refused_call_leaves_its_tensor_alone() {
    World::new(options(2, Fabric::Shm)).run("g", |member| {
        member.group.abort("to be refused");
        let mut data = [2.0_f32; 4];
        let mut desc = member.all_reduce_desc(&mut data, ReduceOp::PremulSum, accl_engine::Mode::Blocking);
        desc.factor = 0.5;
        assert_eq!(error_of(member.call(desc)).kind, ErrorKind::Aborted);
        assert_eq!(data, [2.0; 4]);
    });
}

#[test]
fn outputs_that_share_memory_agree_or_are_refused() {
    World::new(options(3, Fabric::Shm)).run("g", |member| {
        let mut data = [member.rank as f32 + 0.1; 300];
        let (first, again, shifted) =
            (calls::write(&mut data[..200]), calls::write(&mut data[..200]), calls::write(&mut data[100..]));
        let mut desc = CallDesc::new(Collective::AllReduce, Dtype::F32);
        desc.outputs.push([first.clone(), again.clone(), shifted]);
        member.call(desc).unwrap();
        let mut expected = [member.rank as f32 + 0.1; 300];
        member.all_reduce(&mut expected, ReduceOp::Sum).unwrap();
        assert_eq!(data, expected);

        let mut desc = CallDesc::new(Collective::AllGather, Dtype::F32);
        desc.inputs = Blocks::of(calls::read(&[1.0_f32; 200]));
        desc.outputs = [[first.clone()], [again], [first]].into_iter().collect();
        let error = error_of(member.call(desc));
        assert_eq!(error.kind, ErrorKind::InvalidArgument);
        assert!(error.message.contains("share memory"), "{error}");
        member.barrier().unwrap();
    });
}

/// A caller's hook may itself issue calls and wait for them during a wait.
#[test]
fn a_call_made_by_an_interrupt_hook_is_driven() {
    let world = World::new(options(2, Fabric::Shm));
    world.engines.iter().for_each(|engine| engine.without_tick());
    world.run("g", |member| {
        let mut data = [1.0_f32; 100];
        let desc = member.all_reduce_desc(&mut data, ReduceOp::Sum, accl_engine::Mode::Async);
        if member.rank == 1 {
            // Rank 0 is parked in its wait by now, and then in the hook.
            std::thread::park_timeout(Duration::from_millis(200));
            finish(&member.post_send(&[5_u8], 0, 1).unwrap()).unwrap();
            finish(&member.group.submit(desc).unwrap()).unwrap();
            return;
        }
        let call = member.group.submit(desc).unwrap();
        let mut asked = 0;
        let waited = call.wait(Some(Duration::from_secs(20)), &mut || {
            asked += 1;
            if asked == 1 {
                let mut got = [0_u8];
                finish(&member.post_recv(&mut got, Some(1), 1).unwrap()).unwrap();
                assert_eq!(got, [5]);
            }
            false
        });
        assert_eq!(waited, Waited::Done);
        assert_eq!(data, [2.0; 100]);
    });
}

/// Bytes that the kernel did not accept at once are sent even if no thread waits or issues a call any more.
#[test]
fn what_a_finished_call_left_behind_is_sent() {
    let data = vec![3_u8; 60_000];
    let make_world = || World::new(options(2, Fabric::Tcp).with("eager_bytes", "64MiB"));
    // Bytes that fit into the buffers: the first connection counts them, and the second fills the buffers.
    let fitting = std::sync::atomic::AtomicUsize::new(0);
    let sent = std::sync::Barrier::new(2);
    make_world().run("g", |member| {
        member.barrier().unwrap();
        if member.rank == 0 {
            while member.post_send(&data, 1, 0).unwrap().is_done() {
                fitting.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            }
            member.group.abort("enough");
        }
        sent.wait();
    });
    // The engine's own buffer holds 256 KiB of them.
    let parts = fitting.into_inner() - 2;
    let posted = std::sync::atomic::AtomicUsize::new(0);
    make_world().run("g", |member| {
        member.barrier().unwrap();
        let mut last = None;
        if member.rank == 0 {
            // If the kernel has less room this time, the last send is in flight, and a thread drives it.
            while last.is_none() && posted.fetch_add(1, std::sync::atomic::Ordering::Relaxed) < parts {
                last = Some(member.post_send(&data, 1, 0).unwrap()).filter(|send| !send.is_done());
            }
        }
        sent.wait();
        if member.rank == 1 {
            for _ in 0..posted.load(std::sync::atomic::Ordering::Relaxed).min(parts) {
                let mut got = vec![0_u8; 60_000];
                finish(&member.post_recv(&mut got, Some(0), 0).unwrap()).unwrap();
                assert!(got == data);
            }
        }
        // Rank 0 does nothing meanwhile.
        sent.wait();
        last.iter().for_each(|send| finish(send).unwrap());
    });
}

/// A polling thread may be the first to see that a peer has gone, and so take the event from the thread that sleeps.
#[test]
fn a_polled_call_fails_with_its_peer_at_once() {
    let (world, rig) = World::rigged(options(2, Fabric::Loopback(16)).timeout(Duration::from_secs(60)));
    let groups = world.run("g", |member| member);
    let mut got = [0_u8; 4];
    let call = groups[0].post_recv(&mut got, Some(1), 0).unwrap();
    let patience = Instant::now() + Duration::from_secs(10);
    while !rig.is_parked() {
        assert!(Instant::now() < patience, "the background thread does not sleep");
        std::thread::sleep(Duration::from_millis(1));
    }
    rig.lose();
    assert!(call.test(), "the pass that found the peer gone left the call running");
    let error = call.error().unwrap();
    assert_eq!(error.kind, ErrorKind::PeerLost, "{error}");
    assert!(error.to_string().contains("rank 1"), "{error}");
}

/// Tests the same with a call that is issued after its peer has gone, while a thread sleeps for another call.
#[test]
fn a_call_made_after_its_peer_went_fails_at_once() {
    let world = World::new(options(3, Fabric::Tcp).timeout(Duration::from_secs(60)));
    let groups = world.run("g", |member| member);
    let pair = world.run_ranks("pair", &[0, 1], |member| member);
    let mut got = [0_u8; 4];
    let waiting = pair[0].post_recv(&mut got, Some(1), 0).unwrap();
    world.engines[2].shutdown();
    let patience = Instant::now() + Duration::from_secs(10);
    while !groups[0].group.describe().contains("no link") {
        assert!(Instant::now() < patience, "no rank sees that rank 2 has left");
        std::thread::sleep(Duration::from_millis(1));
    }
    let began = Instant::now();
    let call = groups[0].post_recv::<u8>(&mut [], Some(2), 0).unwrap();
    while !call.is_done() {
        assert!(began.elapsed() < Duration::from_secs(5), "the call to a rank that has gone runs on");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(call.error().unwrap().kind, ErrorKind::PeerLost);
    finish(&pair[1].post_send(&[1_u8; 4], 0, 0).unwrap()).unwrap();
    finish(&waiting).unwrap();
}

/// A waiter cannot drive while its hook waits for the interpreter's lock, so other waiters must not rely on it.
#[test]
fn calls_end_although_another_waiters_hook_takes_its_time() {
    let world = World::new(options(2, Fabric::Shm));
    let groups = world.run("g", |member| member);
    let (me, other) = (&groups[0], &groups[1]);
    let (asleep, is_asleep) = std::sync::mpsc::channel();
    let (done, both_done) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let wait_for = |tag: u32| {
            let done = done.clone();
            scope.spawn(move || {
                let mut got = [0_u8; 1];
                finish(&me.post_recv(&mut got, Some(1), tag).unwrap()).unwrap();
                assert_eq!(got, [tag as u8]);
                done.send(tag).unwrap();
            })
        };
        let first = wait_for(1);
        // The first waiter drives by now. The one with the hook has slept longest among the others.
        std::thread::sleep(Duration::from_millis(50));
        let third = scope.spawn(move || {
            let call = me.post_recv(&mut [0_u8; 1], Some(1), 3).unwrap();
            let mut asked = 0;
            let waited = call.wait(None, &mut || {
                asked += 1;
                match asked {
                    1 => asleep.send(()).unwrap(),
                    // The hook takes as long as the calls of the other waiters.
                    2 => (0..2).for_each(|_| {
                        both_done.recv_timeout(Duration::from_secs(10)).expect("the others do not wait for this hook");
                    }),
                    _ => {}
                }
                false
            });
            assert_eq!(waited, Waited::Done);
        });
        is_asleep.recv_timeout(Duration::from_secs(10)).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        let second = wait_for(2);
        for tag in [1, 2] {
            // The hook has been called twice by then.
            std::thread::sleep(Duration::from_millis(200));
            finish(&other.post_send(&[tag as u8], 0, tag).unwrap()).unwrap();
        }
        [first, second].into_iter().for_each(|thread| thread.join().unwrap());
        finish(&other.post_send(&[3_u8], 0, 3).unwrap()).unwrap();
        third.join().unwrap();
    });
}

/// If a rank has reserved sequence numbers and cannot issue the calls, no rank waits for them.
#[test]
fn numbers_that_are_given_up_fail_the_group_on_all_ranks() {
    for fabric in fabrics() {
        let taken = std::sync::Barrier::new(3);
        let errors = World::new(options(3, fabric)).run("g", |member| {
            let first = member.group.reserve_seqs(3).unwrap();
            taken.wait();
            let began = Instant::now();
            if member.rank == 1 {
                member.group.conclude_seqs(first..first + 3, Some(&Error::exhausted("no memory for the test")));
                return error_of(member.barrier());
            }
            let mut data = [1.0_f32; 4];
            let mut desc = member.all_reduce_desc(&mut data, ReduceOp::Sum, accl_engine::Mode::Async);
            desc.seq = Some(first);
            let error = error_of(member.group.submit(desc).and_then(|call| finish(&call)));
            assert!(began.elapsed() < Duration::from_secs(10), "{fabric:?}: notified after {:?}", began.elapsed());
            error
        });
        for (rank, error) in errors.iter().enumerate() {
            let text = error.to_string();
            assert!(
                text.contains("no memory for the test") && (rank == 1 || text.contains("rank 1")),
                "{fabric:?}: {text}"
            );
            assert!(matches!(error.kind, ErrorKind::Exhausted | ErrorKind::Aborted), "{fabric:?}: {text}");
        }
    }
}

/// Work that a rank does after its calls and before it concludes their numbers belongs to the calls.
#[test]
fn a_barrier_waits_for_numbers_that_are_not_concluded() {
    for fabric in fabrics() {
        let concluded = AtomicBool::new(false);
        World::new(options(2, fabric)).run("g", |member| {
            if member.rank == 1 {
                let first = member.group.reserve_seqs(1).unwrap();
                assert_eq!(first, 0);
                let mut data = [1.0_f32; 4];
                let mut desc = member.all_reduce_desc(&mut data, ReduceOp::Sum, accl_engine::Mode::Async);
                desc.seq = Some(first);
                finish(&member.group.submit(desc).unwrap()).unwrap();
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        // The frames of the other rank's barrier arrive meanwhile.
                        std::thread::sleep(Duration::from_millis(200));
                        concluded.store(true, Ordering::SeqCst);
                        member.group.conclude_seqs(first..first + 1, None);
                    });
                    member.barrier().unwrap();
                });
            } else {
                member.all_reduce(&mut [1.0_f32; 4], ReduceOp::Sum).unwrap();
                member.barrier().unwrap();
            }
            assert!(concluded.load(Ordering::SeqCst), "{fabric:?}: rank {} was let through", member.rank);
        });
    }
}

/// When a rank gives up the rest of its numbers, the numbers of calls that it has issued stay valid.
#[test]
fn numbers_of_calls_that_were_made_are_not_given_up() {
    World::new(options(2, Fabric::Shm)).run("g", |member| {
        let first = member.group.reserve_seqs(1).unwrap();
        let mut data = [1.0_f32; 4];
        let mut desc = member.all_reduce_desc(&mut data, ReduceOp::Sum, accl_engine::Mode::Async);
        desc.seq = Some(first);
        let call = member.group.submit(desc).unwrap();
        finish(&call).unwrap();
        member.group.conclude_seqs(first..first + 1, Some(&Error::exhausted("after the call")));
        member.barrier().unwrap();
    });
}
