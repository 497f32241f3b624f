//! A simulated world: the protocol of many processes in one thread, on a virtual clock, over links that fail by a seed.
//!
//! One seed is one history. Every history must hold what `history` lists, whatever is drawn: calls end by their deadlines, results
//! are right and the same on all ranks, failures reach everybody, and nothing is left over. A seed that fails is made smaller and
//! printed with what replays it. Owns the drawing of seeds and the search for the smallest failure; read [`history::run`] first.

mod clock;
mod external;
mod history;
mod link;
mod oracle;
mod scenario;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use accl_types::ErrorKind;

use history::{Seen, Violation};
use scenario::{Breaks, Fault, IsFromAny, Scenario};

/// As [`history::run`]; a panic of the world itself counts as what is wrong.
fn run(scenario: &Scenario) -> Result<Seen, Violation> {
    catch_unwind(AssertUnwindSafe(|| history::run(scenario))).unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<String>().cloned();
        let said = said.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(format!("a panic: {}", said.unwrap_or_default()))
    })
}

/// Leaves out calls and faults as long as something goes wrong without them, too.
fn shrink(scenario: &Scenario, mut violation: Violation) -> (Scenario, Violation) {
    let mut smallest = scenario.clone();
    let mut chunk = scenario.parts().max(1);
    while chunk > 0 {
        let left: Vec<usize> = (0..scenario.parts()).filter(|part| !smallest.without.contains(part)).collect();
        let mut is_smaller = false;
        for parts in left.chunks(chunk) {
            let without: Vec<usize> = smallest.without.iter().chain(parts).copied().collect();
            let candidate = scenario.without(&without);
            if let Err(why) = run(&candidate) {
                (smallest, violation, is_smaller) = (candidate, why, true);
            }
        }
        if !is_smaller {
            chunk /= 2;
        }
    }
    (smallest, violation)
}

/// A failure with what replays it.
fn report(scenario: &Scenario, violation: Violation) -> String {
    let (smallest, violation) = shrink(scenario, violation);
    let without: Vec<String> = smallest.without.iter().map(usize::to_string).collect();
    let items: Vec<String> = (0..smallest.items.len())
        .filter(|&item| smallest.has_item(item))
        .map(|item| format!("  item {item}: {:?}", smallest.items[item]))
        .collect();
    let used: Vec<_> =
        (0..smallest.items.len()).filter(|&item| smallest.has_item(item)).map(|item| &smallest.items[item]).collect();
    let groups = smallest.groups.iter().enumerate().filter(|(group, _)| used.iter().any(|item| item.group == *group));
    let groups: Vec<String> = groups
        .map(|(index, group)| {
            let is_used = |rule: &&accl_types::config::AlgorithmRule| {
                used.iter().any(|item| item.group == index && item.collective == rule.collective)
            };
            let rules =
                group.rules.iter().filter(is_used).map(|rule| format!("{}={}", rule.collective, rule.algorithm));
            let rules: Vec<String> = rules.collect();
            let (members, hosts, eager) = (&group.members, &group.hosts, group.eager_bytes);
            format!("  group {index}: processes {members:?}, hosts {hosts:?}, eager {eager}, {}", rules.join(", "))
        })
        .collect();
    format!(
        "seed {}: {violation}\nreplay it with WORLD_SEED={} WORLD_WITHOUT={} cargo nextest run -p accl-engine \
         simulated::replay --run-ignored all\n{} processes, segments of {} bytes, {} looks, faults {:?}\ngroups\n{}\nitems\n{}",
        smallest.seed,
        smallest.seed,
        without.join(","),
        smallest.processes,
        smallest.segment,
        smallest.spins,
        smallest.faults().collect::<Vec<_>>(),
        groups.join("\n"),
        items.join("\n")
    )
}

/// What the search is told.
#[expect(clippy::disallowed_methods, reason = "no setting, but an argument of a test")]
fn argument(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn number(name: &str) -> Option<u64> {
    argument(name).map(|text| text.parse().unwrap_or_else(|_| panic!("{name} must be a number, not `{text}`")))
}

/// Histories of one seed after the other, for so long.
fn search(first: u64, time: Duration) -> (u64, Seen) {
    let begin = Instant::now();
    let mut all = Seen::default();
    let mut seed = first;
    while begin.elapsed() < time {
        let scenario = Scenario::draw(seed);
        match run(&scenario) {
            Ok(seen) => {
                all.events += seen.events;
                all.done += seen.done;
                all.failed += seen.failed;
                all.fast += seen.fast;
                all.sleeps += seen.sleeps;
                all.staged += seen.staged;
            }
            Err(violation) => panic!("{}", report(&scenario, violation)),
        }
        seed += 1;
    }
    (seed - first, all)
}

/// `WORLD_SECONDS` sets for how long, and `WORLD_SEED` the first seed.
#[test]
fn what_must_hold_holds_in_every_history() {
    let seconds = number("WORLD_SECONDS").unwrap_or(120);
    let first = number("WORLD_SEED").unwrap_or(1);
    let (worlds, seen) = search(first, Duration::from_secs(seconds));
    println!("{worlds} worlds from seed {first} on in {seconds} s: {seen:?}");
    assert!(seen.done > 0 && seen.failed > 0 && seen.fast > 0 && seen.sleeps > 0 && seen.staged > 0, "{seen:?}");
}

#[test]
fn one_seed_is_one_history() {
    for seed in 1..40 {
        let scenario = Scenario::draw(seed);
        assert_eq!(run(&scenario), run(&scenario), "seed {seed}");
    }
}

#[test]
fn a_failure_reaches_a_rank_whose_link_to_who_saw_it_is_broken() {
    // Rank 0 takes a message from any rank, and so needs rank 1. Rank 2 waits for rank 0, which tells it of the failure, and rank 1
    // for rank 2 alone.
    let messages = [(3, 0, IsFromAny::Yes), (0, 2, IsFromAny::No), (2, 1, IsFromAny::No)];
    let faults = [Fault::Cut { wire: 0, at: 50_000 }, Fault::Late { item: 0, rank: 3, wait: 300_000_000 }];
    let outcomes = history::outcomes(&Scenario::of_messages(4, &messages, &faults)).unwrap();
    assert_eq!(outcomes[&(2, 1)], Err(ErrorKind::PeerLost));
}

#[test]
fn a_receive_from_any_rank_ends_when_all_others_have_left() {
    let faults = [Fault::Leave { item: 0, rank: 1 }];
    let outcomes = history::outcomes(&Scenario::of_messages(2, &[(1, 0, IsFromAny::Yes)], &faults)).unwrap();
    assert_eq!(outcomes[&(0, 0)], Err(ErrorKind::PeerLost));
}

#[test]
fn a_call_keeps_its_memory_until_its_external_operation_has_stopped() {
    for (breaks, kind) in [(Breaks::Hangs, ErrorKind::Timeout), (Breaks::Fails, ErrorKind::Device)] {
        let scenario = Scenario::of_staged(3, &[Fault::Break { item: 0, rank: 1, breaks }]);
        run(&scenario).unwrap_or_else(|violation| panic!("{breaks:?}: {violation}"));
        let outcomes = history::outcomes(&scenario).unwrap();
        assert!(outcomes.values().all(|outcome| *outcome == Err(kind)), "{breaks:?}: {outcomes:?}");
    }
}

#[test]
fn an_external_operation_that_never_stops_is_given_up_with_an_error_of_its_own() {
    let scenario = Scenario::of_staged(2, &[Fault::Break { item: 0, rank: 1, breaks: Breaks::NeverStops }]);
    run(&scenario).unwrap_or_else(|violation| panic!("{violation}"));
    let outcomes = history::outcomes(&scenario).unwrap();
    assert_eq!(outcomes[&(0, 0)], Err(ErrorKind::Timeout), "the other ranks do not wait for it");
    assert_eq!(outcomes[&(0, 1)], Err(ErrorKind::Device));
}

#[test]
fn the_death_of_a_rank_ends_a_staged_call_of_the_others() {
    let faults = [Fault::Kill { process: 0, at: 40_000 }, Fault::Break { item: 0, rank: 1, breaks: Breaks::Hangs }];
    let scenario = Scenario::of_staged(3, &faults);
    run(&scenario).unwrap_or_else(|violation| panic!("{violation}"));
    let outcomes = history::outcomes(&scenario).unwrap();
    assert!([1, 2].iter().all(|rank| outcomes[&(0, *rank)] == Err(ErrorKind::PeerLost)), "{outcomes:?}");
}

/// Runs one world, as a failure names it.
#[test]
#[ignore = "needs WORLD_SEED"]
fn replay() {
    let seed = number("WORLD_SEED").expect("WORLD_SEED names the world");
    let without = argument("WORLD_WITHOUT").unwrap_or_default();
    let without: Vec<usize> = without.split(',').filter_map(|part| part.parse().ok()).collect();
    let mut scenario = Scenario::draw(seed).without(&without);
    scenario.traces = argument("WORLD_TRACE").is_some();
    if let Err(violation) = run(&scenario) {
        panic!("{violation}\n{scenario:#?}");
    }
}
