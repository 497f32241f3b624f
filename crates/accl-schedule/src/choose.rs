//! Which algorithm a call takes.
//!
//! Owns the rule of choice and the check of a user's overrides. Pure: all ranks of a group get the same answer from the
//! same arguments, which is why nothing measured on one rank may enter. The limits below were set for shared memory on
//! few cores; a cost model can replace [`by_rule`] without touching anything else.

use accl_types::config::AlgorithmRule;
use accl_types::{Collective, Error, Result, nearest};

use crate::algorithms::{ALGORITHMS, Algorithm, find};
use crate::topology::Topology;

/// Up to this size only the number of steps counts.
const TINY_BYTES: u64 = 8 << 10;
/// Up to this size a whole buffer in each step costs less than more steps with parts of it.
const SMALL_BYTES: u64 = 32 << 10;
/// From this size per rank on, a ring's or chain's many steps overlap well enough.
const PIPELINED_BYTES_PER_RANK: u64 = 32 << 10;
/// From this size on a rooted call is better pipelined than sent from one rank several times.
const ROOTED_LARGE_BYTES: u64 = 256 << 10;
/// In worlds up to this one a rank can talk to all others at once without crowding.
const DIRECT_WORLD: u32 = 16;
/// In worlds up to this one it can also send the whole buffer to all of them, if it is tiny.
const ONE_SHOT_WORLD: u32 = 8;
/// In worlds up to this one a rooted call needs no tree.
const FLAT_WORLD: u32 = 3;
/// In worlds up to this one the first segment gets to the end of a chain soon enough.
const CHAIN_WORLD: u32 = 64;

/// The algorithm of a call. All ranks of a group get the same answer from the same arguments.
///
/// `bytes` is the size of the largest buffer of the call (`Out` of all_gather and gather, `In` of reduce_scatter,
/// scatter), which all ranks know. It is ignored for an all_to_all (only rules that begin at 0 apply): one rank may give
/// splits that happen to be equal and another none, and they must agree. The last rule that fits wins, so that later entries refine earlier ones.
/// `deterministic` leaves the topology out of the choice; rules are honoured all the same.
///
/// # Errors
/// `Configuration` for a rule of this collective that names an unknown algorithm (with the nearest name), and for one
/// that fits the size but names an algorithm that cannot run here; `Unsupported` for point-to-point calls, which have
/// no schedules.
pub fn choose(
    collective: Collective,
    world: u32,
    bytes: u64,
    equal_blocks: bool,
    topology: &Topology,
    rules: &[AlgorithmRule],
    deterministic: bool,
) -> Result<&'static Algorithm> {
    let bytes = if collective == Collective::AllToAll { 0 } else { bytes };
    let mut chosen = None;
    for rule in rules.iter().filter(|rule| rule.collective == collective) {
        let row = find(collective, &rule.algorithm).ok_or_else(|| unknown(rule))?;
        if (rule.min_bytes..=rule.max_bytes).contains(&bytes) {
            chosen = Some(row);
        }
    }
    if let Some(row) = chosen {
        check_applies(row, world, equal_blocks, topology)?;
        return Ok(row);
    }
    let flat;
    let topology = if deterministic {
        flat = Topology::flat(world);
        &flat
    } else {
        topology
    };
    let name = by_rule(collective, world, bytes, equal_blocks, topology)
        .ok_or_else(|| Error::unsupported(format!("{collective} is point-to-point and has no algorithms")))?;
    find(collective, name).ok_or_else(|| Error::internal(format!("no row for {collective} {name}")))
}

/// Checks overrides before the first call: at group creation, where the user sees the error at its cause.
///
/// # Errors
/// `Configuration` for a rule that names an unknown algorithm (with the nearest name) or one that cannot run in this
/// world. Whether blocks are equal is known only at a call.
pub fn check_rules(world: u32, topology: &Topology, rules: &[AlgorithmRule]) -> Result<()> {
    for rule in rules {
        if rule.collective.is_point_to_point() {
            return Err(Error::configuration(format!("{} is point-to-point and has no algorithms", rule.collective)));
        }
        let row = find(rule.collective, &rule.algorithm).ok_or_else(|| unknown(rule))?;
        check_applies(row, world, true, topology)?;
    }
    Ok(())
}

fn check_applies(row: &'static Algorithm, world: u32, equal_blocks: bool, topology: &Topology) -> Result<()> {
    let Some(why) = obstacle(row, world, equal_blocks, topology) else { return Ok(()) };
    let others =
        names(|other| other.collective == row.collective && obstacle(other, world, equal_blocks, topology).is_none());
    Err(Error::configuration(format!(
        "algorithm {} of {} does not apply: {why}; applicable: {others}",
        row.name, row.collective
    )))
}

/// The name of the row to take; none for point-to-point calls.
fn by_rule(
    collective: Collective,
    world: u32,
    bytes: u64,
    equal_blocks: bool,
    topology: &Topology,
) -> Option<&'static str> {
    let two_level = topology.host_count() > 1 && topology.largest_host() > 1 && bytes > TINY_BYTES;
    let pipelined = bytes >= PIPELINED_BYTES_PER_RANK * u64::from(world);
    Some(match collective {
        // Two ranks exchange and reduce in place; one-shot would copy to scratch first.
        Collective::AllReduce if bytes <= TINY_BYTES && world != 2 && world <= ONE_SHOT_WORLD => "direct",
        Collective::AllReduce if bytes <= TINY_BYTES => "recursive_doubling",
        Collective::AllReduce if two_level => "two_level",
        Collective::AllReduce if world <= DIRECT_WORLD => "direct_two_phase",
        Collective::AllReduce if bytes <= SMALL_BYTES => "recursive_doubling",
        Collective::AllReduce if pipelined => "ring",
        Collective::AllReduce if world.is_power_of_two() => "rabenseifner",
        Collective::AllReduce => "circulant",

        Collective::ReduceScatter if world <= DIRECT_WORLD => "direct",
        Collective::ReduceScatter if pipelined => "ring",
        Collective::ReduceScatter if world.is_power_of_two() => "recursive_halving",
        Collective::ReduceScatter => "circulant",

        Collective::AllGather if world <= DIRECT_WORLD => "direct",
        Collective::AllGather if pipelined => "ring",
        Collective::AllGather => "bruck",

        Collective::Broadcast if two_level => "two_level",
        Collective::Broadcast | Collective::Reduce if world <= FLAT_WORLD && bytes < ROOTED_LARGE_BYTES => "flat",
        Collective::Broadcast | Collective::Reduce
            if bytes >= ROOTED_LARGE_BYTES && pipelined && world <= CHAIN_WORLD =>
        {
            "chain"
        }
        Collective::Broadcast | Collective::Reduce => "binomial",

        Collective::Gather | Collective::Scatter if !equal_blocks || world <= DIRECT_WORLD || pipelined => "flat",
        Collective::Gather | Collective::Scatter => "binomial",

        Collective::AllToAll if world <= DIRECT_WORLD => "direct",
        Collective::AllToAll => "pairwise",

        Collective::Barrier => "dissemination",
        Collective::Send | Collective::Recv => return None,
    })
}

/// The rule in words, for the page of algorithms.
pub(crate) fn choice_text() -> String {
    let [tiny, small, per_rank, large] =
        [TINY_BYTES, SMALL_BYTES, PIPELINED_BYTES_PER_RANK, ROOTED_LARGE_BYTES].map(|bytes| bytes >> 10);
    format!(
        "All ranks take the same algorithm, from nothing but collective, size, world and hosts (with
`ACCL_DETERMINISTIC=1` not even hosts). The first line that fits decides. *Pipelined* means at least {per_rank} KiB per
rank; *hosts* means that several hosts have ranks, one of them several, and that the buffer is above {tiny} KiB.

| collective | rule |
|---|---|
| all_reduce | up to {tiny} KiB: `direct` for up to {ONE_SHOT_WORLD} ranks (not for two), else `recursive_doubling`; hosts: `two_level`; up to {DIRECT_WORLD} ranks: `direct_two_phase`; up to {small} KiB: `recursive_doubling`; pipelined: `ring`; a power of two: `rabenseifner`; else `circulant` |
| reduce_scatter | up to {DIRECT_WORLD} ranks: `direct`; pipelined: `ring`; a power of two: `recursive_halving`; else `circulant` |
| all_gather | up to {DIRECT_WORLD} ranks: `direct`; pipelined: `ring`; else `bruck` |
| broadcast, reduce | broadcast with hosts: `two_level`; up to {FLAT_WORLD} ranks below {large} KiB: `flat`; from {large} KiB, pipelined, up to {CHAIN_WORLD} ranks: `chain`; else `binomial` |
| gather, scatter | blocks that differ, up to {DIRECT_WORLD} ranks, or pipelined: `flat`; else `binomial` |
| all_to_all | up to {DIRECT_WORLD} ranks: `direct`; else `pairwise` (`bruck` only when asked for: a rank that gives splits cannot know whether all blocks are equal) |
| barrier | `dissemination` |
"
    )
}

/// Why a row cannot run here.
fn obstacle(row: &Algorithm, world: u32, equal_blocks: bool, topology: &Topology) -> Option<String> {
    if !(row.applies)(world, topology) {
        let hosts = topology.host_count();
        return Some(format!("it needs {}, and the group has {world} ranks on {hosts} host(s)", row.requires));
    }
    (row.needs_equal_blocks && !equal_blocks).then(|| "it needs blocks of equal size".to_owned())
}

fn unknown(rule: &AlgorithmRule) -> Error {
    let of_collective = |row: &Algorithm| row.collective == rule.collective;
    let known = ALGORITHMS.iter().filter(|row| of_collective(row)).map(|row| row.name);
    let hint = nearest(&rule.algorithm, known).map(|name| format!("; did you mean {name}?")).unwrap_or_default();
    let known = names(of_collective);
    Error::configuration(format!("unknown algorithm `{}` for {}{hint} known: {known}", rule.algorithm, rule.collective))
}

fn names(keep: impl Fn(&Algorithm) -> bool) -> String {
    ALGORITHMS.iter().filter(|row| keep(row)).map(|row| row.name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use accl_types::ErrorKind;

    fn rule(collective: Collective, algorithm: &str, min_bytes: u64, max_bytes: u64) -> AlgorithmRule {
        AlgorithmRule { collective, algorithm: algorithm.to_owned(), min_bytes, max_bytes }
    }

    #[test]
    fn every_call_finds_an_algorithm_that_can_run() {
        let topologies = |world: u32| {
            [
                Topology::flat(world),
                Topology::new((0..world).collect()),
                Topology::new((0..world).map(|rank| rank / 3).collect()),
            ]
        };
        for &collective in Collective::ALL.iter().filter(|collective| !collective.is_point_to_point()) {
            for world in [1, 2, 3, 4, 5, 7, 8, 16, 17, 64, 100, 1024] {
                for topology in topologies(world) {
                    for bytes in [0, 1, 4096, 8192, 8193, 1 << 15, 1 << 18, 1 << 20, 1 << 26, u64::MAX] {
                        for (equal, deterministic) in [(true, false), (false, false), (true, true)] {
                            let row = choose(collective, world, bytes, equal, &topology, &[], deterministic).unwrap();
                            assert_eq!(row.collective, collective);
                            assert_eq!(obstacle(row, world, equal, &topology), None, "{} {world}", row.name);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_deterministic_choice_does_not_see_hosts() {
        let hosts = Topology::new(vec![0, 0, 1, 1]);
        let pick = |topology: &Topology, deterministic| {
            choose(Collective::AllReduce, 4, 1 << 20, true, topology, &[], deterministic).unwrap().name
        };
        assert_eq!(pick(&hosts, false), "two_level");
        assert_eq!(pick(&hosts, true), pick(&Topology::flat(4), false));
    }

    #[test]
    fn the_last_rule_that_fits_wins() {
        let rules = [
            rule(Collective::AllReduce, "ring", 0, u64::MAX),
            rule(Collective::AllReduce, "rabenseifner", 1000, 2000),
            rule(Collective::Broadcast, "chain", 0, u64::MAX),
        ];
        let pick = |collective, bytes| {
            choose(collective, 4, bytes, true, &Topology::flat(4), &rules, false).map(|row| row.name)
        };
        assert_eq!(pick(Collective::AllReduce, 999), Ok("ring"));
        assert_eq!(pick(Collective::AllReduce, 1000), Ok("rabenseifner"));
        assert_eq!(pick(Collective::AllReduce, 2001), Ok("ring"));
        assert_eq!(pick(Collective::Broadcast, 4), Ok("chain"));
        assert_eq!(pick(Collective::Reduce, 4), Ok("binomial"));
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_nearest_even_out_of_its_range() {
        let rules = [rule(Collective::AllReduce, "rings", 1 << 30, u64::MAX)];
        let error = choose(Collective::AllReduce, 4, 4, true, &Topology::flat(4), &rules, false).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Configuration);
        assert!(error.message.contains("did you mean ring?") && error.message.contains("two_level"), "{error}");
    }

    #[test]
    fn a_rule_that_cannot_be_followed_says_why() {
        let refused = |collective, name, equal| {
            let rules = [rule(collective, name, 0, u64::MAX)];
            let error = choose(collective, 4, 4, equal, &Topology::flat(4), &rules, false).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Configuration);
            error.message
        };
        let message = refused(Collective::AllReduce, "two_level", true);
        assert!(message.contains("at least two hosts") && message.contains("4 ranks on 1 host(s)"), "{message}");
        assert!(refused(Collective::AllToAll, "bruck", false).contains("blocks of equal size"));
    }

    #[test]
    fn rules_are_checked_before_the_first_call() {
        let check = |collective, name, topology: &Topology| {
            check_rules(topology.world(), topology, &[rule(collective, name, 7, 9)]).map_err(|error| error.message)
        };
        let (one, two) = (Topology::flat(2), Topology::new(vec![0, 1]));
        assert_eq!(check(Collective::AllReduce, "two_level", &two), Ok(()));
        assert_eq!(check(Collective::AllToAll, "bruck", &one), Ok(()));
        assert!(check(Collective::AllReduce, "two_level", &one).unwrap_err().contains("at least two hosts"));
        assert!(check(Collective::Gather, "binomal", &one).unwrap_err().contains("did you mean binomial?"));
        assert!(check(Collective::Send, "ring", &one).unwrap_err().contains("point-to-point"));
    }

    #[test]
    fn point_to_point_has_no_algorithm() {
        let error = choose(Collective::Send, 4, 4, true, &Topology::flat(4), &[], false).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Unsupported);
    }
}
