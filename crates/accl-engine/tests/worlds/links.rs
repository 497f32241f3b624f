//! Links are created when they are first needed. Deaths, departures and failures also reach ranks that have no link to
//! their source.

use std::time::{Duration, Instant};

use accl_testkit::{Fabric, Member, THRIFTY, World, WorldOptions, every_transport, finish};
use accl_types::{Error, ErrorKind, Rank, ReduceOp};

fn fabrics() -> impl Iterator<Item = Fabric> {
    every_transport().into_iter().chain([THRIFTY]).map(Fabric::Over)
}
/// Size of a world. Rank 0 of the world has no link to `STRANGERS` at the beginning.
const WORLD: u32 = 32;
const STRANGERS: [u32; 4] = [3, 5, 17, 29];
/// Far shorter than any deadline here.
const SOON: Duration = Duration::from_secs(10);
/// Time after which other processes have found out everything that they can.
const LATER: Duration = Duration::from_secs(2);

fn world(world: u32, fabric: Fabric) -> World {
    World::new(WorldOptions::new(world).over(fabric).timeout(Duration::from_secs(30)))
}

fn links(member: &Member) -> usize {
    let snapshot = member.group.snapshot();
    snapshot.peers.iter().filter(|peer| peer.link.is_some() && peer.rank != Some(Rank(member.rank as u32))).count()
}

fn send(member: &Member, to: u32, value: i32) -> accl_types::Result<()> {
    finish(&member.post_send(&[value], to, 7)?)
}

fn receive(member: &Member, from: u32) -> accl_types::Result<i32> {
    let mut data = [0_i32];
    finish(&member.post_recv(&mut data, Some(from), 7)?)?;
    Ok(data[0])
}

fn sum_ones(member: &Member) -> accl_types::Result<()> {
    let mut data = [1.0_f32; 3];
    member.all_reduce(&mut data, ReduceOp::Sum)?;
    assert_eq!(data, [member.world as f32; 3]);
    Ok(())
}

fn error_of<T>(result: accl_types::Result<T>, what: &str) -> Error {
    match result {
        Ok(_) => panic!("{what} must fail"),
        Err(error) => error,
    }
}

#[test]
fn a_rank_begins_with_links_to_its_neighbours_and_makes_others_when_it_needs_them() {
    for fabric in fabrics() {
        let counted = std::sync::Barrier::new(WORLD as usize);
        let counts = world(WORLD, fabric).run("g", |member| {
            let before = links(&member);
            counted.wait();
            // The other ranks need do nothing for that.
            if member.rank == 0 {
                STRANGERS.iter().for_each(|&rank| send(&member, rank, 40 + rank as i32).unwrap());
            } else if STRANGERS.contains(&(member.rank as u32)) {
                assert_eq!(receive(&member, 0).unwrap(), 40 + member.rank as i32);
            }
            let after = links(&member);
            member.barrier().unwrap();
            (before, after)
        });
        for (rank, (before, after)) in counts.into_iter().enumerate() {
            let rank = rank as u32;
            // The neighbours are 1, 2, 4 and 8 away in each direction, and 16 away.
            assert_eq!(before, 9, "rank {rank} over {fabric:?}");
            let more = if rank == 0 { STRANGERS.len() } else { usize::from(STRANGERS.contains(&rank)) };
            assert_eq!(after, before + more, "rank {rank} over {fabric:?}");
        }
    }
}

#[test]
fn a_rank_that_makes_no_call_is_linked_to_all_the_same() {
    for fabric in fabrics() {
        let world = world(8, fabric);
        let sent = std::sync::Barrier::new(2);
        world.run("g", |member| match member.rank {
            // Rank 3 is not a neighbour of rank 0.
            0 => {
                send(&member, 3, 5).unwrap();
                sent.wait();
            }
            3 => {
                sent.wait();
                assert_eq!(receive(&member, 0).unwrap(), 5);
            }
            _ => {}
        });
    }
}

#[test]
fn two_that_link_to_each_other_at_once_get_one_link() {
    for fabric in fabrics() {
        for round in 0..10 {
            let counts = world(12, fabric).run("g", |member| {
                let world = member.world as u32;
                let mine = [member.rank as i32];
                let mut slots = vec![[-1_i32]; world as usize];
                let sends = (0..world).map(|peer| member.post_send(&mine, peer, peer).unwrap());
                let sends: Vec<_> = sends.collect();
                let receives = slots
                    .iter_mut()
                    .zip(0..)
                    .map(|(slot, peer)| member.post_recv(slot, Some(peer), member.rank as u32).unwrap());
                let receives: Vec<_> = receives.collect();
                sends.iter().chain(&receives).for_each(|call| finish(call).unwrap());
                let outputs: Vec<i32> = slots.iter().map(|slot| slot[0]).collect();
                assert_eq!(outputs, (0..world as i32).collect::<Vec<_>>(), "round {round}");
                sum_ones(&member).unwrap();
                links(&member)
            });
            assert!(counts.iter().all(|&count| count == 11), "round {round} over {fabric:?}: {counts:?}");
        }
    }
}

#[test]
fn the_death_of_a_rank_reaches_who_was_never_linked_to_it() {
    for fabric in fabrics() {
        let world = world(WORLD, fabric);
        let dead = std::sync::Barrier::new(WORLD as usize);
        world.run("g", |member| {
            match member.rank {
                0 => send(&member, 1, 1).unwrap(),
                1 => assert_eq!(receive(&member, 0).unwrap(), 1),
                17 => world.engines[17].vanish(),
                _ => {}
            }
            dead.wait();
            if member.rank == 17 {
                return;
            }
            let begin = Instant::now();
            let error = error_of(sum_ones(&member), "a call that needs a dead rank");
            let took = begin.elapsed();
            assert!(took < SOON, "rank {} over {fabric:?}: {took:?}: {error}", member.rank);
            // A rank that issues its call after the group has failed gets an error with the same cause.
            assert!(matches!(error.kind, ErrorKind::PeerLost | ErrorKind::Aborted), "{error}");
            assert!(error.to_string().contains("rank 17 (host") && error.to_string().contains("is lost"), "{error}");
        });
    }
}

#[test]
fn a_call_with_a_dead_rank_that_it_was_never_linked_to_fails_at_once() {
    for fabric in fabrics() {
        for receives in [false, true] {
            let world = world(WORLD, fabric);
            let dead = std::sync::Barrier::new(WORLD as usize);
            world.run("g", |member| {
                if member.rank == 17 {
                    world.engines[17].vanish();
                }
                dead.wait();
                // Ranks 5 and 17 are 12 apart, so they are not neighbours.
                if member.rank == 5 {
                    let begin = Instant::now();
                    let result = if receives { receive(&member, 17).map(drop) } else { send(&member, 17, 1) };
                    let error = error_of(result, "a message");
                    assert!(begin.elapsed() < SOON, "{:?}: {error}", begin.elapsed());
                    assert_eq!(error.kind, ErrorKind::PeerLost, "{error}");
                    let text = error.to_string();
                    assert!(text.contains("rank 17") && text.contains("its process has ended"), "{text}");
                }
            });
        }
    }
}

#[test]
fn a_rank_that_left_the_group_before_anybody_was_linked_to_it_has_left() {
    for fabric in fabrics() {
        let world = world(8, fabric);
        let left = std::sync::Barrier::new(8);
        world.run("g", |member| {
            if member.rank == 3 {
                member.group.shutdown().unwrap();
            }
            left.wait();
            if member.rank == 0 {
                let begin = Instant::now();
                let error = error_of(receive(&member, 3), "a receive from who has left");
                assert!(begin.elapsed() < SOON, "{:?}: {error}", begin.elapsed());
                assert_eq!(error.kind, ErrorKind::PeerLost, "{error}");
                assert!(error.to_string().contains("rank 3") && error.to_string().contains("has left"), "{error}");
            }
            left.wait();
        });
    }
}

#[test]
fn who_links_to_a_rank_that_failed_learns_the_cause() {
    for fabric in fabrics() {
        // Two of the other ranks, 0 and 6, are not neighbours of rank 3.
        let world = world(8, fabric);
        let failed = std::sync::Barrier::new(8);
        let causes = world.run("g", |member| {
            if member.rank == 3 {
                member.group.abort("the third had enough");
                // The rank leaves at once.
                member.group.shutdown().unwrap();
            }
            failed.wait();
            let error = if member.rank == 3 { None } else { Some(error_of(receive(&member, 3), "a receive")) };
            failed.wait();
            error.map(|error| error.to_string())
        });
        for (rank, cause) in causes.into_iter().enumerate().filter_map(|(rank, cause)| Some((rank, cause?))) {
            assert!(cause.contains("the third had enough"), "rank {rank} over {fabric:?}: {cause}");
        }
    }
}

#[test]
fn a_receive_from_any_rank_fails_when_an_unlinked_rank_dies() {
    let world = world(8, Fabric::Tcp);
    let dead = std::sync::Barrier::new(8);
    world.run("g", |member| {
        if member.rank == 3 {
            world.engines[3].vanish();
        }
        dead.wait();
        if member.rank == 0 {
            let mut data = [0_i32];
            let begin = Instant::now();
            let error = error_of(finish(&member.post_recv(&mut data, None, 7).unwrap()), "a receive from any rank");
            assert!(begin.elapsed() < SOON && error.to_string().contains("rank 3"), "{:?}: {error}", begin.elapsed());
        }
        dead.wait();
    });
}

#[test]
fn rings_begin_small_and_grow_with_what_goes_through_them() {
    let world = world(2, Fabric::Shm);
    world.run("g", |member| {
        let ring = || {
            let snapshot = member.group.snapshot();
            let peer = snapshot.peers.iter().find(|peer| peer.rank == Some(Rank(1 - member.rank as u32))).unwrap();
            peer.link.clone().unwrap()
        };
        sum_ones(&member).unwrap();
        assert!(ring().contains("ring of 16 KiB that grows to 1024 KiB"), "{}", ring());
        let mut data = vec![1.0_f32; 4 << 20];
        member.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert!(data.iter().all(|&x| x == 2.0));
        // The final size depends on how far the reader is behind. The ring always grows until one segment fits.
        let ring = ring();
        assert!(!ring.contains("ring of 16 KiB") && ring.contains("KiB that grows to 1024 KiB"), "{ring}");
    });
}

#[test]
fn who_connects_to_all_has_all_links_whether_the_others_do_so_or_not() {
    for fabric in fabrics() {
        for all_do in [false, true] {
            let counted = std::sync::Barrier::new(WORLD as usize);
            let counts = world(WORLD, fabric).run("g", |member| {
                if member.rank == 0 || all_do {
                    member.group.connect_all(&mut || false).unwrap();
                    assert_eq!(links(&member), 31);
                }
                counted.wait();
                let count = links(&member);
                sum_ones(&member).unwrap();
                count
            });
            assert_eq!(counts[0], 31);
            assert!(!all_do || counts.iter().all(|&count| count == 31), "{counts:?}");
        }
    }
}

#[test]
fn who_connects_to_all_learns_which_rank_cannot_be_reached() {
    for fabric in fabrics() {
        let world = world(WORLD, fabric);
        let dead = std::sync::Barrier::new(WORLD as usize);
        world.run("g", |member| {
            if member.rank == 17 {
                world.engines[17].vanish();
            }
            dead.wait();
            if member.rank == 0 {
                let begin = Instant::now();
                let error = error_of(member.group.connect_all(&mut || false), "a link to a dead rank");
                assert!(begin.elapsed() < SOON, "{fabric:?}: {:?}", begin.elapsed());
                assert_eq!(error.kind, ErrorKind::PeerLost, "{error}");
                assert!(error.to_string().contains("rank 17"), "{error}");
                // The living ranks can be reached.
                send(&member, 3, 9).unwrap();
            } else if member.rank == 3 {
                assert_eq!(receive(&member, 0).unwrap(), 9);
            }
        });
    }
}

// Tests for defects that readers of the code have found.

#[test]
fn an_abort_reaches_a_rank_that_waits_although_all_between_them_compute() {
    for fabric in fabrics() {
        let done = std::sync::Barrier::new(8);
        let world = world(8, fabric);
        world.run("g", |member| {
            match member.rank {
                0 => {
                    std::thread::sleep(Duration::from_millis(200));
                    member.group.abort("enough");
                }
                // Rank 3 is not a neighbour of rank 0. It waits for rank 5, which computes and is not a neighbour of
                // rank 0 either.
                3 => {
                    let begin = Instant::now();
                    let error = error_of(receive(&member, 5), "a receive in a group that was aborted");
                    assert!(begin.elapsed() < 2 * SOON, "{fabric:?}: {:?}", begin.elapsed());
                    let text = error.to_string();
                    assert!(text.contains("rank 0 reported") && text.contains("enough"), "{text}");
                }
                _ => {}
            }
            done.wait();
        });
    }
}

/// Rank 0 receives from any rank, `sender` sends late, and other ranks leave and end before that.
fn receive_from_any_while_others_leave(ranks: u32, sender: usize, leaves: impl Fn(usize) -> bool + Sync) {
    for fabric in fabrics() {
        let world = world(ranks, fabric);
        let left = std::sync::Barrier::new(ranks as usize);
        world.run("g", |member| {
            if leaves(member.rank) {
                member.group.shutdown().unwrap();
                world.engines[member.rank].shutdown();
            }
            left.wait();
            if member.rank == 0 {
                let mut data = [0_i32];
                finish(&member.post_recv(&mut data, None, 7).unwrap()).unwrap();
                assert_eq!(data, [5]);
            } else if member.rank == sender {
                // Other processes have long found out that the ranks that left cannot be reached.
                std::thread::sleep(LATER);
                send(&member, 0, 5).unwrap();
            }
            left.wait();
        });
    }
}

#[test]
fn a_rank_that_left_in_good_order_and_ended_is_no_loss_to_who_was_never_linked_to_it() {
    receive_from_any_while_others_leave(8, 1, |rank| rank == 3);
}

#[test]
fn ranks_that_left_in_good_order_are_no_loss_although_those_who_could_say_so_have_left_too() {
    receive_from_any_while_others_leave(12, 11, |rank| !matches!(rank, 0 | 11));
}

#[test]
fn a_send_without_a_waiter_arrives_although_its_rank_leaves_at_once() {
    for fabric in fabrics() {
        let left = std::sync::Barrier::new(8);
        world(8, fabric).run("g", |member| {
            let data = [5_i32];
            if member.rank == 0 {
                let call = member.post_send(&data, 3, 7).unwrap();
                member.group.shutdown().unwrap();
                finish(&call).unwrap();
            } else if member.rank == 3 {
                assert_eq!(receive(&member, 0).unwrap(), 5);
            }
            left.wait();
        });
    }
}

#[test]
fn a_rank_that_another_has_given_up_learns_of_it_when_it_links() {
    for fabric in fabrics() {
        let world = world(8, fabric);
        let given_up = std::sync::Barrier::new(8);
        world.run("g", |member| {
            if member.rank == 0 {
                world.engines[0].give_up(&world.engines[3].info().unwrap());
            }
            given_up.wait();
            if member.rank == 3 {
                let begin = Instant::now();
                let error = error_of(send(&member, 0, 5).and_then(|()| receive(&member, 0)), "a call with 0");
                assert!(begin.elapsed() < 2 * SOON, "{fabric:?}: {:?}: {error}", begin.elapsed());
                assert_eq!(error.kind, ErrorKind::PeerLost, "{error}");
                assert!(error.to_string().contains("it considers this process lost"), "{error}");
            }
            given_up.wait();
        });
        // In a newly created group, the ranks are peers again.
        world.run("h", |member| {
            if member.rank == 3 {
                send(&member, 0, 6).unwrap();
            } else if member.rank == 0 {
                assert_eq!(receive(&member, 3).unwrap(), 6);
            }
            sum_ones(&member).unwrap();
        });
    }
}

/// Number of times that the threads which create links have gone to sleep so far.
fn sleeps_of_connectors() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let of_task = |task: std::io::Result<std::fs::DirEntry>| {
        let status = std::fs::read_to_string(task.ok()?.path().join("status")).ok()?;
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        (field("Name:")? == "accl-connect").then(|| field("voluntary_ctxt_switches:")?.parse::<u64>().ok())?
    };
    tasks.filter_map(of_task).sum()
}

#[test]
fn once_all_are_linked_the_threads_that_make_links_sleep() {
    for fabric in fabrics() {
        let step = std::sync::Barrier::new(12);
        world(12, fabric).run("g", |member| {
            let world = member.world as u32;
            let mine = [member.rank as i32];
            // Each rank's calls need links while the other side creates them.
            for apart in [3, 5, 6, 7, 9] {
                std::thread::sleep(Duration::from_micros(300 * (member.rank as u64 * 7 % 5)));
                let mut theirs = [0_i32];
                let send = member.post_send(&mine, (member.rank as u32 + apart) % world, apart).unwrap();
                let from = (member.rank as u32 + world - apart) % world;
                finish(&member.post_recv(&mut theirs, Some(from), apart).unwrap()).unwrap();
                finish(&send).unwrap();
            }
            step.wait();
            if member.rank == 0 {
                // A connection attempt may still wait for its head start, and a promised link or a hello may be in
                // flight. A futile attempt would go on for longer. Other tests of this program run in processes of
                // their own.
                let is_quiet = (0..8).any(|_| {
                    let before = sleeps_of_connectors();
                    std::thread::sleep(LATER / 2);
                    sleeps_of_connectors() == before
                });
                assert!(is_quiet, "{fabric:?}");
            }
            step.wait();
        });
    }
}

#[test]
fn a_receiver_that_sleeps_is_woken_though_the_sender_makes_no_further_call() {
    for fabric in fabrics() {
        // These channels are outside the engine, whose threads may all have ended meanwhile.
        let (report, reports) = std::sync::mpsc::channel();
        let (report, reports) = (std::sync::Mutex::new(report), std::sync::Mutex::new(reports));
        world(2, fabric).run("g", |member| {
            for turn in 0..8_u32 {
                // Times longer than a thread polls before it sleeps, and times about as long.
                std::thread::sleep(Duration::from_micros(if turn % 2 == 0 { 20_000 } else { 100 * u64::from(turn) }));
                let mine = [turn as i32];
                let mut theirs = [-1_i32];
                if member.rank == 0 {
                    finish(&member.post_send(&mine, 1, turn).unwrap()).unwrap();
                    let report = reports.lock().unwrap().recv_timeout(Duration::from_secs(10));
                    assert!(report.is_ok(), "{fabric:?}, turn {turn}: the receiver sleeps on");
                } else {
                    finish(&member.post_recv(&mut theirs, Some(0), turn).unwrap()).unwrap();
                    assert_eq!(theirs, mine);
                    report.lock().unwrap().send(()).unwrap();
                }
            }
        });
    }
}

#[test]
fn a_second_shutdown_waits_for_nothing() {
    for fabric in fabrics() {
        let world = world(4, fabric);
        world.run("g", |member| {
            member.group.shutdown().unwrap();
            world.engines[member.rank].shutdown();
        });
        let begin = Instant::now();
        world.engines.iter().for_each(|engine| engine.shutdown());
        assert!(begin.elapsed() < SOON, "{fabric:?}: {:?}", begin.elapsed());
    }
}

/// Returns how many links rank 0 polls, and how many system calls it makes, per sleep while it receives 50 messages
/// from rank 1. All ranks are linked to each other.
fn cost_of_a_sleep(world: u32, fabric: Fabric) -> (f64, f64) {
    let options = WorldOptions::new(world).over(fabric).with("spin_us", "0").timeout(Duration::from_secs(30));
    let world = World::new(options);
    let members = world.run("g", |member| {
        member.group.connect_all(&mut || false).unwrap();
        member.barrier().unwrap();
        member
    });
    let before = world.engines[0].snapshot();
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            for value in 0..50 {
                std::thread::sleep(Duration::from_millis(1));
                send(&members[1], 0, value).unwrap();
            }
        });
        (0..50).for_each(|value| assert_eq!(receive(&members[0], 1).unwrap(), value));
        sender.join().unwrap();
    });
    let after = world.engines[0].snapshot();
    let sleeps = (after.parks - before.parks) as f64;
    assert!(sleeps >= 10.0, "it must have slept: {sleeps}");
    let polls = (after.work.links_polled - before.work.links_polled) as f64;
    (polls / sleeps, (after.system_calls() - before.system_calls()) as f64 / sleeps)
}

#[test]
fn a_sleep_costs_no_more_with_twenty_links_than_with_one() {
    // Every progress pass polls links whose events no thread posts.
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        let (polls_of_few, calls_of_few) = cost_of_a_sleep(2, fabric);
        let (polls_of_many, calls_of_many) = cost_of_a_sleep(21, fabric);
        assert!(polls_of_many <= polls_of_few + 6.0, "{fabric:?}: {polls_of_few} links before, {polls_of_many} now");
        assert!(calls_of_many <= calls_of_few + 3.0, "{fabric:?}: {calls_of_few} calls before, {calls_of_many} now");
    }
}
