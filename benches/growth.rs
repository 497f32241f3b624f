//! What one more peer, and one more group, costs those who have nothing to do with it: by the engine's own counters.
//!
//! Every rank is an engine of its own, and all are in this process. The job's group has all of them; what is counted are the calls of
//! a group of two among them, a sleep of one of the two, and a call of all. Prints Markdown. Arguments: `TRANSPORT/RANKS` such as
//! `tcp/32`, any number of them; none means all.

use std::fmt::Write as _;
use std::fs;
use std::time::{Duration, Instant};

use accl_benches::arguments::Arguments;
use accl_benches::sweep;
use accl_engine::Snapshot;
use accl_testkit::{Fabric, Member, World, WorldOptions, finish};
use accl_types::ReduceOp;

const FABRICS: &[(&str, Fabric)] = &[("shm", Fabric::Shm), ("tcp", Fabric::Tcp)];
const RANKS: &[u32] = &[2, 8, 32, 128, 256];
const GROUPS: &[usize] = &[1, 100, 1000];
/// Ranks of the worlds in which groups are counted.
const RANKS_WITH_GROUPS: u32 = 8;
const CALLS: u32 = 1000;
const PARKS: u32 = 50;

fn main() {
    let arguments = Arguments::of_process();
    let (ranks, groups) = if sweep::is_test() { (&RANKS[..2], &GROUPS[..1]) } else { (RANKS, GROUPS) };
    println!("| ranks | links of a rank | descriptors | shared memory | other memory | forms in | first all_reduce |");
    println!("|---|---:|---:|---:|---:|---:|---:|");
    let mut calls = String::new();
    for &(name, fabric) in FABRICS {
        for &ranks in ranks.iter().filter(|ranks| arguments.want(&format!("{name}/{ranks}"))) {
            row(name, fabric, ranks, 1, &mut calls);
        }
    }
    println!("\n{CALLS_HEAD}{calls}");
    let mut calls = String::new();
    if arguments.want("groups") {
        for &(name, fabric) in FABRICS {
            for &groups in groups {
                row_of_calls(
                    &format!("{name}, {groups} groups"),
                    &mut calls,
                    &world(fabric, RANKS_WITH_GROUPS),
                    groups,
                );
            }
        }
        println!("{CALLS_HEAD}{calls}");
    }
}

const CALLS_HEAD: &str = "| ranks | system calls a call | links looked at | frames sent | bytes sent | system calls a sleep | \
                          links looked at |\n|---|---:|---:|---:|---:|---:|---:|\n";

fn world(fabric: Fabric, ranks: u32) -> World {
    World::new(WorldOptions::new(ranks).over(fabric).timeout(Duration::from_secs(300)))
}

/// One world: what it takes, as a line that is printed, and what calls cost, for the second table.
fn row(name: &str, fabric: Fabric, ranks: u32, groups: usize, calls: &mut String) {
    let before = Usage::now();
    let world = world(fabric, ranks);
    let begin = Instant::now();
    let job = world.run("job", |member| member);
    let formed = begin.elapsed();
    let after = Usage::now();
    let links = job[0].group.snapshot().peers.iter().filter(|peer| peer.link.is_some()).count() - 1;
    let begin = Instant::now();
    together(&job, |member| {
        let mut data = [1.0_f32];
        member.all_reduce(&mut data, ReduceOp::Sum).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(data, [ranks as f32]);
    });
    let first = begin.elapsed();
    let share = |total: f64| total / f64::from(ranks);
    println!(
        "| {name}, {ranks} | {links} | {:.1} | {:.0} KiB | {:.0} KiB | {:.0} ms | {:.1} ms |",
        share(after.descriptors - before.descriptors),
        share(after.shared_kib - before.shared_kib),
        share(after.own_kib - before.own_kib),
        formed.as_secs_f64() * 1e3,
        first.as_secs_f64() * 1e3,
    );
    row_of_calls(&format!("{name}, {ranks}"), calls, &world, groups);
}

/// What calls of a group of two cost in a world in which there are so many such groups.
fn row_of_calls(name: &str, calls: &mut String, world: &World, groups: usize) {
    let all: Vec<Vec<Member>> =
        (0..groups).map(|index| world.run_ranks(&format!("pair {index}"), &[0, 1], |member| member)).collect();
    let Some(pair) = all.last() else { return };
    let sum = |member: &Member, calls: u32| {
        for _ in 0..calls {
            let mut data = [1.0_f32];
            member.all_reduce(&mut data, ReduceOp::Sum).unwrap_or_else(|error| panic!("{error}"));
        }
    };
    together(pair, |member| sum(member, CALLS / 10));
    let before = world.engines[0].snapshot();
    together(pair, |member| sum(member, CALLS));
    let after = world.engines[0].snapshot();
    let call = Cost::between(&before, &after).share(CALLS);

    let before = world.engines[0].snapshot();
    together(pair, |member| {
        for _ in 0..PARKS {
            let mut data = [0_u8; 4];
            if member.rank == 0 {
                member
                    .post_recv(&mut data, Some(1), 1)
                    .and_then(|call| finish(&call))
                    .unwrap_or_else(|e| panic!("{e}"));
            } else {
                std::thread::sleep(Duration::from_millis(2));
                member.post_send(&data, 0, 1).and_then(|call| finish(&call)).unwrap_or_else(|e| panic!("{e}"));
            }
        }
    });
    let after = world.engines[0].snapshot();
    let sleep = Cost::between(&before, &after).share((after.parks - before.parks).max(1) as u32);
    let _ = writeln!(
        calls,
        "| {name} | {:.2} | {:.1} | {:.2} | {:.0} | {:.1} | {:.1} |",
        call.system_calls, call.links, call.frames, call.bytes, sleep.system_calls, sleep.links
    );
}

fn together(members: &[Member], body: impl Fn(&Member) + Sync) {
    std::thread::scope(|scope| members.iter().for_each(|member| drop(scope.spawn(|| body(member)))));
}

/// What happened between two moments.
struct Cost {
    system_calls: f64,
    links: f64,
    frames: f64,
    bytes: f64,
}

impl Cost {
    fn between(before: &Snapshot, after: &Snapshot) -> Self {
        let sum = |of: fn(&Snapshot) -> u64| (of(after) - of(before)) as f64;
        Self {
            system_calls: sum(Snapshot::system_calls),
            links: sum(|snapshot| snapshot.work.links_looked_at),
            frames: sum(|snapshot| snapshot.peers.iter().map(|peer| peer.traffic.frames_sent).sum()),
            bytes: sum(|snapshot| snapshot.peers.iter().map(|peer| peer.traffic.bytes_sent).sum()),
        }
    }

    fn share(self, count: u32) -> Self {
        let share = |total: f64| total / f64::from(count);
        let Self { system_calls, links, frames, bytes } = self;
        Self { system_calls: share(system_calls), links: share(links), frames: share(frames), bytes: share(bytes) }
    }
}

/// What this process has.
struct Usage {
    descriptors: f64,
    shared_kib: f64,
    own_kib: f64,
}

impl Usage {
    fn now() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0.0)
        };
        let descriptors = fs::read_dir("/proc/self/fd").map_or(0, Iterator::count) as f64;
        // Both ends of every link are mapped here: each page counts twice.
        Self { descriptors, shared_kib: field("RssShmem:") / 2.0, own_kib: field("RssAnon:") }
    }
}
