//! Counters of a snapshot: by group, by peer, and the waits of callers.

use std::time::Duration;

use accl_engine::Traffic;
use accl_testkit::{Fabric, Member, World, WorldOptions, finish};
use accl_types::{Rank, ReduceOp};

const FABRICS: [Fabric; 3] = [Fabric::Shm, Fabric::Tcp, Fabric::Loopback(64)];

fn with_peer(member: &Member, rank: u32) -> Traffic {
    let snapshot = member.group.snapshot();
    snapshot.peers.iter().find(|peer| peer.rank == Some(Rank(rank))).and_then(|peer| peer.of_group).unwrap()
}

#[test]
fn what_one_rank_has_sent_for_a_group_the_other_has_received() {
    for fabric in FABRICS {
        let world = World::new(WorldOptions::new(3).over(fabric));
        let sums = |member: Member, calls: usize, count: usize| {
            for _ in 0..calls {
                let mut data = vec![1.0_f32; count];
                member.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            }
            member.barrier().unwrap();
            member
        };
        // Small calls take the fast path over shared memory; the large ones do not.
        let small = world.run("small", |member| sums(member, 10, 3));
        let large = world.run("large", |member| sums(member, 5, 100_000));
        for (group, least) in [(&small, 10 * 3 * 4), (&large, 5 * 100_000 * 4)] {
            let mut sent = 0;
            for (one, other) in [(0, 1), (1, 2), (2, 0)] {
                let (there, back) = (with_peer(&group[one], other as u32), with_peer(&group[other], one as u32));
                let (sent_there, came_back) =
                    ((there.frames_sent, there.bytes_sent), (back.frames_received, back.bytes_received));
                assert_eq!(sent_there, came_back, "{fabric:?} {there:?} {back:?}");
                sent += there.bytes_sent + with_peer(&group[other], one as u32).bytes_sent;
            }
            assert!(sent >= least * 2, "{fabric:?}: {sent} of {least}");
        }
        let snapshot = small[0].group.snapshot();
        let [group] = &snapshot.groups[..] else { panic!("a snapshot of a group has that group") };
        assert_eq!((group.collectives, group.messages, group.failed), (11, 0, 0));
        let ranks = snapshot.peers.iter().filter_map(|peer| peer.of_group).fold(Traffic::default(), Traffic::plus);
        assert_eq!(group.traffic, ranks);
        // The link has carried the frames of both groups.
        let link = snapshot.peers.iter().find(|peer| peer.rank == Some(Rank(1))).unwrap().traffic;
        assert!(link.bytes_sent >= with_peer(&small[0], 1).bytes_sent + with_peer(&large[0], 1).bytes_sent);
    }
}

#[test]
fn a_wait_is_counted_with_its_time() {
    const LATE: Duration = Duration::from_millis(50);
    let world = World::new(WorldOptions::new(2).over(Fabric::Shm));
    let group = world.run("g", |member| {
        let mut data = [0_u8; 4];
        if member.rank == 0 {
            finish(&member.post_recv(&mut data, Some(1), 1).unwrap()).unwrap();
        } else {
            std::thread::sleep(LATE);
            finish(&member.post_send(&data, 0, 1).unwrap()).unwrap();
        }
        member
    });
    let snapshot = group[0].group.snapshot();
    assert_eq!((snapshot.groups[0].waits, snapshot.groups[0].messages), (1, 1));
    // Rank 0 began to wait shortly after rank 1 had begun to sleep.
    assert!(snapshot.groups[0].waited > LATE / 10, "{:?}", snapshot.groups[0].waited);
    assert_eq!(group[1].group.snapshot().groups[0].waits, 0);
}

/// Returns the mean number of links that the root of a gather over TCP polls per sleep, while the other ranks arrive
/// one by one.
fn polls_of_a_root(ranks: u32) -> f64 {
    const COUNT: usize = 4096;
    let options = WorldOptions::new(ranks).over(Fabric::Tcp).with("spin_us", "0").with("algorithm", "gather=flat");
    let world = World::new(options.timeout(Duration::from_secs(60)));
    let members = world.run("g", |member| {
        member.group.connect_all(&mut || false).unwrap();
        member.barrier().unwrap();
        member
    });
    let before = world.engines[0].snapshot();
    std::thread::scope(|scope| {
        for member in &members {
            scope.spawn(move || {
                let input = vec![member.rank as u32; COUNT];
                let mut output = vec![0; if member.rank == 0 { COUNT * member.world } else { 0 }];
                std::thread::sleep(Duration::from_millis(3 * member.rank as u64));
                member.gather(&input, &mut output, 0).unwrap();
            });
        }
    });
    let after = world.engines[0].snapshot();
    (after.work.links_polled - before.work.links_polled) as f64 / (after.parks - before.parks).max(1) as f64
}

#[test]
fn a_sleep_of_a_call_with_twenty_peers_costs_no_more_than_of_one_with_two() {
    let (few, many) = (polls_of_a_root(3), polls_of_a_root(21));
    assert!(many < 2.0 * few + 6.0, "{few} links are looked at in each sleep with 2 peers, {many} with 20");
}
