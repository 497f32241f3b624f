//! The cost of one more peer, and of one more group, for ranks that do not use it, by the engine's own counters.
//!
//! Every rank is a separate engine, and all engines are in this process. The default group has all ranks. The program
//! counts the calls of a group of two ranks, a sleep of one of the two, and a call of all ranks. It prints Markdown.
//! Arguments: parts of `TRANSPORT/RANKS/` such as `tcp/32/`, and `groups`; none means all. Memory counts are best with
//! a process for each of them, as in `make scaling`.

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
/// Number of ranks in the worlds with many groups.
const RANKS_WITH_GROUPS: u32 = 8;
const CALLS: u32 = 100;
const BATCHES: u32 = 20;
const PARKS: u32 = 50;

fn main() {
    let arguments = Arguments::of_process();
    let (ranks, groups) = if sweep::is_test() { (&RANKS[..2], &GROUPS[..1]) } else { (RANKS, GROUPS) };
    let mut calls = String::new();
    println!("{FORMS_HEAD}");
    for &(name, fabric) in FABRICS {
        for &ranks in ranks.iter().filter(|ranks| arguments.want(&format!("{name}/{ranks}/"))) {
            calls += &row(name, fabric, ranks);
        }
    }
    println!("\n{}{calls}", calls_head("ranks"));
    if arguments.want("groups") {
        let mut calls = String::new();
        for &(name, fabric) in FABRICS {
            for &groups in groups {
                let busy = world(fabric, RANKS_WITH_GROUPS, None);
                calls += &row_of_calls(&format!("{name}, {groups}"), fabric, busy, RANKS_WITH_GROUPS, groups);
            }
        }
        println!("{}{calls}", calls_head("groups of two"));
    }
}

const FORMS_HEAD: &str = "| ranks | links of a rank | descriptors | shared memory | other memory | created in | first all_reduce |\n\
                          |---|---:|---:|---:|---:|---:|---:|";

fn calls_head(first: &str) -> String {
    format!(
        "| {first} | system calls a call | links polled | frames sent | bytes sent | system calls a sleep | links polled \
         |\n|---|---:|---:|---:|---:|---:|---:|\n"
    )
}

fn world(fabric: Fabric, ranks: u32, spin_us: Option<&str>) -> World {
    let options = WorldOptions::new(ranks).over(fabric).timeout(Duration::from_secs(300));
    World::new(spin_us.into_iter().fold(options, |options, spin_us| options.with("spin_us", spin_us)))
}

/// Measures one world: prints a line with its resources, and returns the cost of calls as a line of the second table.
fn row(name: &str, fabric: Fabric, ranks: u32) -> String {
    let before = Usage::now();
    let world = world(fabric, ranks, None);
    let begin = Instant::now();
    let job = world.run("job", |member| member);
    let formed = begin.elapsed();
    let after = Usage::now();
    let links = job[0].group.snapshot().peers.iter().filter(|peer| peer.link.is_some()).count() - 1;
    let begin = Instant::now();
    together(&job, |member| {
        let mut data = [1.0_f32];
        must(member.all_reduce(&mut data, ReduceOp::Sum));
        assert_eq!(data, [ranks as f32]);
    });
    let first = begin.elapsed();
    drop(job);
    let share = |total: f64| total / f64::from(ranks);
    println!(
        "| {name}, {ranks} | {links} | {:.1} | {:.0} KiB | {:.0} KiB | {:.0} ms | {:.1} ms |",
        share(after.descriptors - before.descriptors),
        share(after.shared_kib - before.shared_kib),
        share(after.own_kib - before.own_kib),
        formed.as_secs_f64() * 1e3,
        first.as_secs_f64() * 1e3,
    );
    row_of_calls(&format!("{name}, {ranks}"), fabric, world, ranks, 1)
}

/// Returns the cost of calls of a group of two, in a world with `groups` such groups, and of one rank's sleep.
/// The sleep is measured in a second, equal world whose ranks do not spin before they sleep.
fn row_of_calls(name: &str, fabric: Fabric, busy: World, ranks: u32, groups: usize) -> String {
    let pairs = pairs_among(&busy, groups);
    let Some(pair) = pairs.last() else { return String::new() };
    together(pair, |member| sums(member, CALLS));
    // Take the batch with the fewest polls: if one rank waits for its turn on a core, the other polls repeatedly.
    let batches = (0..BATCHES).map(|_| {
        let before = busy.engines[0].snapshot();
        together(pair, |member| sums(member, CALLS));
        Cost::between(&before, &busy.engines[0].snapshot()).share(u64::from(CALLS))
    });
    let call = batches.min_by(|one, other| one.links.total_cmp(&other.links)).unwrap_or_default();
    drop(pairs);
    // Both worlds at once would need too many descriptors.
    drop(busy);

    let sleepy = world(fabric, ranks, Some("0"));
    let _job = sleepy.run("job", |member| member);
    let pairs = pairs_among(&sleepy, groups);
    let Some(pair) = pairs.last() else { return String::new() };
    let before = sleepy.engines[0].snapshot();
    together(pair, |member| {
        for _ in 0..PARKS {
            let mut data = [0_u8; 4];
            if member.rank == 0 {
                must(member.post_recv(&mut data, Some(1), 1).and_then(|call| finish(&call)));
            } else {
                std::thread::sleep(Duration::from_millis(2));
                must(member.post_send(&data, 0, 1).and_then(|call| finish(&call)));
            }
        }
    });
    let after = sleepy.engines[0].snapshot();
    let sleep = Cost::between(&before, &after).share((after.parks - before.parks).max(1));
    format!(
        "| {name} | {:.2} | {:.1} | {:.2} | {:.0} | {:.1} | {:.1} |\n",
        call.system_calls, call.links, call.frames, call.bytes, sleep.system_calls, sleep.links
    )
}

/// Creates `groups` groups of ranks 0 and 1.
fn pairs_among(world: &World, groups: usize) -> Vec<Vec<Member>> {
    (0..groups).map(|index| world.run_ranks(&format!("pair {index}"), &[0, 1], |member| member)).collect()
}

fn sums(member: &Member, calls: u32) {
    for _ in 0..calls {
        let mut data = [1.0_f32];
        must(member.all_reduce(&mut data, ReduceOp::Sum));
    }
}

fn must(done: accl_types::Result<()>) {
    done.unwrap_or_else(|error| panic!("{error}"));
}

fn together(members: &[Member], body: impl Fn(&Member) + Sync) {
    std::thread::scope(|scope| members.iter().for_each(|member| drop(scope.spawn(|| body(member)))));
}

/// Differences of counters between two snapshots.
#[derive(Default)]
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
            links: sum(|snapshot| snapshot.work.links_polled),
            frames: sum(|snapshot| snapshot.peers.iter().map(|peer| peer.traffic.frames_sent).sum()),
            bytes: sum(|snapshot| snapshot.peers.iter().map(|peer| peer.traffic.bytes_sent).sum()),
        }
    }

    fn share(self, count: u64) -> Self {
        let share = |total: f64| total / count as f64;
        let Self { system_calls, links, frames, bytes } = self;
        Self { system_calls: share(system_calls), links: share(links), frames: share(frames), bytes: share(bytes) }
    }
}

/// Resources of this process.
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
        // Both ends of every link are mapped here, so each page counts twice.
        Self { descriptors, shared_kib: field("RssShmem:") / 2.0, own_kib: field("RssAnon:") }
    }
}
