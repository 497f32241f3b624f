//! A simulated world: the protocol of many processes in one thread, on a virtual clock, over links that fail as a seed
//! determines.
//!
//! One seed is one history. Every history must satisfy what `invariants` checks, whatever is drawn. Calls end by their
//! deadlines, and results are right and the same on all ranks. Failures reach all ranks, and nothing is left over. A
//! failing seed is made smaller and printed with the command that replays it. Owns the search through the seeds, and
//! the tests. Read `history::run` first.
//!
//! The crate has tests only. `.ci/fuzz_world` searches longer, and `.ci/mutants` plants defects that the search must find.

#![cfg(test)]

mod clock;
mod devices;
mod driving;
mod external;
mod history;
mod invariants;
mod lanes;
mod link;
mod oracle;
mod ranks;
mod scenario;
mod shrink;
mod wiring;
mod world;

use std::time::{Duration, Instant};

use accl_types::config::AlgorithmRule;
use accl_types::{Collective, ErrorKind};

use scenario::{Breaks, Fault, IsFromAny, Linking, Scenario, Step};
use shrink::{report, run};
use world::Seen;

/// Returns an argument of the search, from the environment.
#[expect(clippy::disallowed_methods, reason = "no setting, but an argument of a test")]
fn argument(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn number(name: &str) -> Option<u64> {
    argument(name).map(|text| text.parse().unwrap_or_else(|_| panic!("{name} must be a number, not `{text}`")))
}

/// Runs histories of consecutive seeds for `time`. Returns their number and the sum of their counts.
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
                all.coded += seen.coded;
                all.by_reference += seen.by_reference;
                all.offloaded += seen.offloaded;
                all.cut += seen.cut;
            }
            Err(violation) => panic!("{}", report(&scenario, violation)),
        }
        seed += 1;
    }
    (seed - first, all)
}

/// Searches for `WORLD_SECONDS` seconds (25 unless set), from seed `WORLD_SEED` (1 unless set).
#[test]
fn what_must_hold_holds_in_every_history() {
    let seconds = number("WORLD_SECONDS").unwrap_or(25);
    let first = number("WORLD_SEED").unwrap_or(1);
    let (worlds, seen) = search(first, Duration::from_secs(seconds));
    println!("{worlds} worlds from seed {first} on in {seconds} s: {seen:?}");
    let counts = [seen.done, seen.failed, seen.fast, seen.sleeps, seen.staged, seen.coded, seen.offloaded, seen.cut];
    let counts = counts.into_iter().chain([seen.by_reference]).collect::<Vec<_>>();
    assert!(counts.iter().all(|count| *count > 0), "{seen:?}");
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
    // Rank 0 receives from any rank, and so it needs rank 1. Rank 2 waits for rank 0, which reports the failure to it.
    // Rank 1 waits for rank 2 only.
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
fn a_receive_from_any_rank_ends_when_all_others_have_left_that_it_has_no_link_to() {
    // Ranks 0 and 3 are not neighbours.
    let faults = [Fault::Leave { item: 0, rank: 3 }];
    let mut scenario = Scenario::of_messages(6, &[(3, 0, IsFromAny::Yes)], &faults);
    scenario.linking = Linking::Late;
    scenario.steps.iter_mut().for_each(|threads| threads[0].push(Step::Leave(0)));
    run(&scenario).unwrap_or_else(|violation| panic!("{violation}"));
    let outcomes = history::outcomes(&scenario).unwrap();
    assert_eq!(outcomes[&(0, 0)], Err(ErrorKind::PeerLost));
}

#[test]
fn a_host_that_vanishes_is_found_although_it_was_sent_something_while_the_driver_slept() {
    let messages = [(0, 1, IsFromAny::No), (1, 0, IsFromAny::No)];
    let mut scenario = Scenario::of_messages(2, &messages, &[Fault::Vanish { process: 0, at: 50_000 }]);
    scenario.timeout = Duration::from_secs(45);
    scenario.items.iter_mut().for_each(|item| item.is_async = vec![true; 2]);
    let sends_late = [Step::Make(0), Step::Call(0), Step::Compute(100_000), Step::Call(1), Step::Wait(0)];
    (scenario.steps[0][0], scenario.steps[1][0]) = (vec![Step::Make(0)], sends_late.to_vec());
    run(&scenario).unwrap_or_else(|violation| panic!("{violation}"));
    assert_eq!(history::outcomes(&scenario).unwrap()[&(0, 1)], Err(ErrorKind::PeerLost));
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

#[test]
fn devices_of_all_ranks_do_a_call_and_whatever_goes_wrong_with_one_of_them_ends_it_everywhere() {
    let breaks = |breaks| Fault::Break { item: 0, rank: 1, breaks };
    let kill = Fault::Kill { process: 0, at: 40_000 };
    let cases: [(&[Fault], Result<(), ErrorKind>); 6] = [
        (&[], Ok(())),
        (&[breaks(Breaks::Fails)], Err(ErrorKind::Device)),
        (&[breaks(Breaks::Drops)], Err(ErrorKind::Device)),
        (&[breaks(Breaks::Hangs)], Err(ErrorKind::Timeout)),
        (&[breaks(Breaks::AllHang)], Err(ErrorKind::Timeout)),
        (&[kill, breaks(Breaks::AllHang)], Err(ErrorKind::PeerLost)),
    ];
    for (faults, end) in cases {
        let scenario = Scenario::of_offloaded(3, faults);
        run(&scenario).unwrap_or_else(|violation| panic!("{faults:?}: {violation}"));
        let outcomes = history::outcomes(&scenario).unwrap();
        let others = outcomes.iter().filter(|((_, process), _)| *process > 0);
        assert!(others.map(|(_, outcome)| *outcome).all(|outcome| outcome == end), "{faults:?}: {outcomes:?}");
    }
}

#[test]
fn what_ends_a_call_of_several_lanes_ends_all_of_its_parts_whichever_lane_it_befalls() {
    // The first lane of three processes has wires 0 to 2; wire 3 belongs to the second lane.
    let cases: [(&[Fault], Result<(), ErrorKind>); 5] = [
        (&[], Ok(())),
        (&[Fault::Kill { process: 0, at: 40_000 }], Err(ErrorKind::PeerLost)),
        (&[Fault::Cut { wire: 3, at: 10_000 }], Err(ErrorKind::PeerLost)),
        (&[Fault::Abort { item: 0, rank: 0 }], Err(ErrorKind::Aborted)),
        (&[Fault::Break { item: 0, rank: 1, breaks: Breaks::Fails }], Err(ErrorKind::Device)),
    ];
    for lanes in [2, 4] {
        for (faults, end) in &cases {
            let mut scenario = Scenario::of_staged(3, faults).with_lanes(lanes);
            scenario.items[0].counts = vec![500];
            let seen = run(&scenario).unwrap_or_else(|violation| panic!("{faults:?}: {violation}"));
            assert!(seen.cut >= 2, "{faults:?}: {seen:?}");
            let outcomes = history::outcomes(&scenario).unwrap();
            let others = outcomes.iter().filter(|((_, process), _)| *process > 0);
            assert!(others.map(|(_, outcome)| *outcome).all(|outcome| outcome == *end), "{faults:?}: {outcomes:?}");
        }
    }
}

/// Rank 0 has sent its last frame over the first lane and waits for another lane. Rank 1 has not received that frame
/// and fails when the wire is cut.
#[test]
fn a_rank_learns_of_a_failure_although_the_first_lane_has_lost_its_wire_to_who_failed() {
    let rule = AlgorithmRule {
        collective: Collective::AllReduce,
        algorithm: "double_binary_tree".to_owned(),
        min_bytes: 0,
        max_bytes: u64::MAX,
    };
    for at in (1..40).map(|step| step * 20_000) {
        let mut scenario = Scenario::of_staged(2, &[Fault::Cut { wire: 0, at }]).with_lanes(2);
        scenario.items[0].counts = vec![500];
        scenario.groups[0].rules = vec![rule.clone()];
        for ((_, spec), nanos) in scenario.wires.iter_mut().zip([50_000, 500_000]) {
            (spec.least, spec.most) = (nanos, nanos);
        }
        run(&scenario).unwrap_or_else(|violation| panic!("cut at {at}: {violation}"));
    }
    // A scenario that a long search found.
    let without = [13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 9, 10, 11, 3, 6, 7];
    let found = Scenario::draw(987_654_352_217).without(&without);
    run(&found).unwrap_or_else(|violation| panic!("{violation}"));
}

/// Runs the world that a failure report names.
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
