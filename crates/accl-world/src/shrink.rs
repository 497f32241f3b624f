//! Reports a history that violates an invariant: shrinks its scenario and prints how to replay it.
//!
//! Owns the search for the smallest scenario that still fails, and the report. Read [`report`] first.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::history;
use super::scenario::Scenario;
use super::world::{Seen, Violation};

/// Like [`history::run`], but a panic counts as a violation.
pub(super) fn run(scenario: &Scenario) -> Result<Seen, Violation> {
    catch_unwind(AssertUnwindSafe(|| history::run(scenario))).unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<String>().cloned();
        let said = said.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(format!("a panic: {}", said.unwrap_or_default()))
    })
}

/// Leaves out calls and faults as long as the scenario still fails without them.
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

/// Describes a failure and how to replay it.
pub(super) fn report(scenario: &Scenario, violation: Violation) -> String {
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
        "seed {}: {violation}\nreplay it with WORLD_SEED={} WORLD_WITHOUT={} cargo nextest run -p accl-world \
         --run-ignored all replay\n{} processes, segments of {} bytes, {} looks, faults {:?}\ngroups\n{}\nitems\n{}",
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
