//! The choice of a call's algorithm.
//!
//! Owns the rule of choice and the check of a user's overrides. Pure: all ranks of a group get the same result from the
//! same arguments. So all ranks must have the same constants of the [`Machine`]; the engine ensures that. The costs of
//! a row are in its file. Read [`Chooser::choose`] first.

use std::sync::OnceLock;

use accl_types::config::AlgorithmRule;
use accl_types::{Bytes, Collective, Error, Result, nearest};

use crate::algorithms::{ALGORITHMS, Algorithm, Encodes, Sums, find};
use crate::cost::{Cost, IntraNode, Machine, Placement, Prices};
use crate::topology::Topology;

/// Largest world in which an all_to_all exchanges with all ranks at once. The sizes of an all_to_all differ from rank
/// to rank, so they must not affect the choice.
const DIRECT_WORLD: u32 = 16;

/// Largest world, and largest buffer in bytes, in which sums of types narrower than their arithmetic are rounded once.
const TOGETHER_WORLD: u32 = 8;
const TOGETHER_BYTES: u64 = 64 << 10;
/// Such sums are rounded once only if that is predicted to take at most this many tenths of the shortest time.
const TOGETHER_TENTHS: u64 = 12;

/// The facts on which a group's choices depend, apart from the call.
#[derive(Clone, Copy, Debug)]
pub struct Basis {
    /// The constants, equal on all ranks.
    pub machine: Machine,
    /// The placement of the ranks, as all ranks know it.
    pub placement: Placement,
    /// Whether the choice ignores hosts, constants and placement. Then the defaults and a single host are used.
    pub deterministic: bool,
}

/// The choice in one group. The costs of rows are counted once per collective, at its first call.
#[derive(Debug)]
pub struct Chooser {
    rules: Vec<AlgorithmRule>,
    topology: Topology,
    /// The topology by which costs are counted.
    seen: Topology,
    prices: Prices,
    costs: [OnceLock<Vec<(&'static Algorithm, Cost)>>; Collective::ALL.len()],
}

impl Chooser {
    /// A chooser for a group with these hosts and overrides.
    pub fn new(topology: Topology, rules: Vec<AlgorithmRule>, basis: &Basis) -> Chooser {
        let (seen, machine, placement) = match basis.deterministic {
            true => {
                let world = topology.world();
                let segment_bytes = basis.placement.segment_bytes;
                let placement = Placement { intra_node: IntraNode::Shm, cores: world, segment_bytes };
                (Topology::flat(world), Machine::default(), placement)
            }
            false => (topology.clone(), basis.machine, basis.placement),
        };
        let prices = Prices::new(machine, placement, &seen);
        Chooser { rules, topology, seen, prices, costs: Default::default() }
    }

    /// The hosts of the group.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Returns the algorithm of a call: the last rule that fits, so that later entries refine earlier ones. Without a
    /// rule, it is the row with the shortest predicted time, or the first one of equals.
    ///
    /// `bytes` is the size of the call's largest buffer (`Out` of all_gather and gather, `In` of reduce_scatter and
    /// scatter), which all ranks know. It is ignored for an all_to_all, to which only rules that begin at 0 apply.
    /// There one rank may give splits that happen to be equal and another rank none, and the ranks must agree.
    ///
    /// # Errors
    /// `Configuration` for a rule of this collective that names an unknown algorithm; the message has the nearest name.
    /// `Configuration` for a rule that fits the size but names an algorithm that cannot run here.
    /// `Unsupported` for point-to-point calls, which have no schedules.
    pub fn choose(&self, collective: Collective, bytes: Bytes, equal_blocks: bool) -> Result<&'static Algorithm> {
        self.choose_among(collective, bytes, equal_blocks, |_| true)
    }

    /// Like [`Chooser::choose`], for a sum or product of a type narrower than its arithmetic, such as 16-bit floats.
    /// For small buffers in small worlds, returns a row that adds [`Sums::Together`] if it takes little more time than
    /// the fastest row.
    ///
    /// # Errors
    /// The same as [`Chooser::choose`].
    pub fn choose_narrow(
        &self,
        collective: Collective,
        bytes: Bytes,
        equal_blocks: bool,
    ) -> Result<&'static Algorithm> {
        let fastest = self.choose(collective, bytes, equal_blocks)?;
        // Two contributions are rounded once with every row.
        if !(3..=TOGETHER_WORLD).contains(&self.topology.world()) || bytes.0 > TOGETHER_BYTES {
            return Ok(fastest);
        }
        // If a rule applies, this is the same row.
        let together = self.choose_among(collective, bytes, equal_blocks, |row| row.sums == Sums::Together)?;
        let time_ps = |row| u128::from(self.time_ps(row, collective, bytes, equal_blocks));
        let is_affordable = time_ps(together) * 10 <= time_ps(fastest) * u128::from(TOGETHER_TENTHS);
        Ok(if is_affordable { together } else { fastest })
    }

    /// Like [`Chooser::choose`], for a call whose messages are encoded; `bytes` is the encoded size of the buffer. Rows
    /// that encode [`Encodes::Often`] are only used by rules, because the accuracy of a result must not depend on which
    /// row is faster.
    ///
    /// # Errors
    /// The same as [`Chooser::choose`], and `Configuration` for a rule that names an algorithm that cannot be encoded.
    pub fn choose_encoded(
        &self,
        collective: Collective,
        bytes: Bytes,
        equal_blocks: bool,
    ) -> Result<&'static Algorithm> {
        let row = self.choose_among(collective, bytes, equal_blocks, |row| row.encodes == Encodes::Twice)?;
        if row.encodes == Encodes::No { Err(cannot_encode(row)) } else { Ok(row) }
    }

    /// Chooses among the rows that `is_wanted` accepts, unless a rule names another row.
    fn choose_among(
        &self,
        collective: Collective,
        bytes: Bytes,
        equal_blocks: bool,
        is_wanted: fn(&Algorithm) -> bool,
    ) -> Result<&'static Algorithm> {
        let bytes = if collective == Collective::AllToAll { Bytes(0) } else { bytes };
        if let Some(row) = self.by_rule(collective, bytes)? {
            check_applies(row, equal_blocks, &self.topology)?;
            return Ok(row);
        }
        if collective == Collective::AllToAll {
            let name = if self.topology.world() <= DIRECT_WORLD { "direct" } else { "pairwise" };
            return find(collective, name).ok_or_else(|| Error::internal(format!("no row for {collective} {name}")));
        }
        let rows = self.predict(collective, bytes, equal_blocks).filter(|(row, _)| is_wanted(row));
        let cheapest = rows.min_by_key(|&(_, time_ps)| time_ps);
        let (row, _) = cheapest
            .ok_or_else(|| Error::unsupported(format!("{collective} is point-to-point and has no algorithms")))?;
        Ok(row)
    }

    /// Returns the rows that can run, each with its predicted time in picoseconds.
    pub fn predict(
        &self,
        collective: Collective,
        bytes: Bytes,
        equal_blocks: bool,
    ) -> impl Iterator<Item = (&'static Algorithm, u64)> {
        let costs = self.costs[collective as usize].get_or_init(|| {
            let world = self.topology.world();
            // Rows that compose over hosts only run if the choice may see hosts.
            let fits = |row: &&Algorithm| row.collective == collective && (row.applies)(world, &self.seen);
            ALGORITHMS.iter().filter(fits).map(|row| (row, (row.cost)(world, &self.seen))).collect()
        });
        let runs = move |row: &Algorithm| equal_blocks || !row.needs_equal_blocks;
        let costs = costs.iter().filter(move |(row, _)| runs(row));
        costs.map(move |(row, cost)| (*row, self.prices.time_ps(collective, cost, bytes)))
    }

    /// Predicted time in picoseconds of the algorithm that [`Chooser::choose`] returns. Returns 0 if there is no such
    /// algorithm, or if not all ranks can know the time, as for an all_to_all.
    pub fn predicted_ps(&self, collective: Collective, bytes: Bytes, equal_blocks: bool) -> u64 {
        if collective == Collective::AllToAll {
            return 0;
        }
        let chosen = self.choose(collective, bytes, equal_blocks);
        chosen.map_or(0, |row| self.time_ps(row, collective, bytes, equal_blocks))
    }

    /// Predicted time of a row in picoseconds; 0 if it cannot run.
    fn time_ps(&self, wanted: &Algorithm, collective: Collective, bytes: Bytes, equal_blocks: bool) -> u64 {
        let found = self.predict(collective, bytes, equal_blocks).find(|(row, _)| row.id == wanted.id);
        found.map_or(0, |(_, time_ps)| time_ps)
    }

    fn by_rule(&self, collective: Collective, bytes: Bytes) -> Result<Option<&'static Algorithm>> {
        let mut chosen = None;
        for rule in self.rules.iter().filter(|rule| rule.collective == collective) {
            let row = find(collective, &rule.algorithm).ok_or_else(|| unknown(rule))?;
            if (rule.min_bytes..=rule.max_bytes).contains(&bytes.0) {
                chosen = Some(row);
            }
        }
        Ok(chosen)
    }
}

fn cannot_encode(row: &Algorithm) -> Error {
    let rows = ALGORITHMS.iter().filter(|other| other.collective == row.collective && other.encodes != Encodes::No);
    let names: Vec<&str> = rows.map(|row| row.name).collect();
    Error::configuration(format!(
        "{} {}: with compression, ranks would get different results; use one of {}, or do not compress",
        row.collective,
        row.name,
        names.join(", ")
    ))
}

/// Checks overrides before the first call: at group creation, where the user sees the error at its cause.
///
/// # Errors
/// `Configuration` for a rule that names an unknown algorithm (with the nearest name) or one that cannot run in this
/// world. Whether blocks are equal is only known at a call.
pub fn check_rules(topology: &Topology, rules: &[AlgorithmRule]) -> Result<()> {
    for rule in rules {
        if rule.collective.is_point_to_point() {
            return Err(Error::configuration(format!("{} is point-to-point and has no algorithms", rule.collective)));
        }
        let row = find(rule.collective, &rule.algorithm).ok_or_else(|| unknown(rule))?;
        check_applies(row, true, topology)?;
    }
    Ok(())
}

fn check_applies(row: &'static Algorithm, equal_blocks: bool, topology: &Topology) -> Result<()> {
    let Some(why) = obstacle(row, equal_blocks, topology) else { return Ok(()) };
    let others = names(|other| other.collective == row.collective && obstacle(other, equal_blocks, topology).is_none());
    Err(Error::configuration(format!(
        "algorithm {} of {} does not apply: {why}; applicable: {others}",
        row.name, row.collective
    )))
}

/// The rule of choice in words, for the page of algorithms.
pub(crate) fn choice_text() -> String {
    let (together_kib, over, tenths) = (TOGETHER_BYTES >> 10, TOGETHER_TENTHS / 10, TOGETHER_TENTHS % 10);
    format!(
        "If an override fits the call, it is used. Otherwise the algorithm with the lowest predicted time is used. The
prediction combines counts and times. The counts are in the algorithm's file: messages of the busiest rank, their bytes,
the longest chain, and the traffic between hosts. The times are the constants of the machine.
[Decision 12](decisions/0012-a-cost-model-chooses.md) has the formula.

All ranks use the constants of rank 0, which come from the cache that `accl info` shows (`ACCL_CALIBRATION`). They also
use facts of the group: the cores that the ranks of a host have, the transport between them, and the hosts.
`ACCL_DETERMINISTIC=1` ignores all of these. The choice then assumes the built-in constants, one host and a core for
each rank.

Two choices do not depend on the prediction:

* An all_to_all uses `direct` for up to {DIRECT_WORLD} ranks and `pairwise` above. Its sizes differ between
  ranks, so they must not affect the choice.
* An algorithm that needs blocks of equal size is used only if all ranks know that the blocks are equal. A rank that
  passes splits to an all_to_all cannot know this, so `bruck` of all_to_all runs only on request.

Small sums and products of float16 and bfloat16 (at most {together_kib} KiB, 3 to {TOGETHER_WORLD} ranks) prefer an
algorithm that adds *together*, and so rounds once. Its predicted time may be at most {over}.{tenths} times the lowest.

`accl simulate` prints the prediction for every algorithm, and the choice, for a world of any size.
"
    )
}

/// The reason why a row cannot run here, or `None`.
fn obstacle(row: &Algorithm, equal_blocks: bool, topology: &Topology) -> Option<String> {
    let world = topology.world();
    if !(row.applies)(world, topology) {
        let hosts = topology.host_count();
        return Some(format!("it needs {}, but the group has {world} ranks on {hosts} host(s)", row.requires));
    }
    (row.needs_equal_blocks && !equal_blocks).then(|| "it needs blocks of equal size".to_owned())
}

fn unknown(rule: &AlgorithmRule) -> Error {
    let of_collective = |row: &Algorithm| row.collective == rule.collective;
    let known = ALGORITHMS.iter().filter(|row| of_collective(row)).map(|row| row.name);
    let hint = nearest(&rule.algorithm, known).map(|name| format!("; did you mean {name}?")).unwrap_or_default();
    let known = names(of_collective);
    Error::configuration(format!(
        "unknown algorithm `{}` for {}; expected one of {known}{hint}",
        rule.algorithm, rule.collective
    ))
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

    fn basis(deterministic: bool) -> Basis {
        let placement = Placement { intra_node: IntraNode::Shm, cores: 1 << 20, segment_bytes: 64 << 10 };
        Basis { machine: Machine::default(), placement, deterministic }
    }

    fn chooser(topology: &Topology, rules: &[AlgorithmRule]) -> Chooser {
        Chooser::new(topology.clone(), rules.to_vec(), &basis(false))
    }

    fn topologies(world: u32) -> [Topology; 3] {
        [
            Topology::flat(world),
            Topology::new((0..world).collect()),
            Topology::new((0..world).map(|rank| rank / 3).collect()),
        ]
    }

    fn collectives() -> impl Iterator<Item = Collective> {
        Collective::ALL.iter().copied().filter(|collective| !collective.is_point_to_point())
    }

    const SIZES: [u64; 10] = [0, 1, 4096, 8192, 8193, 1 << 15, 1 << 18, 1 << 20, 1 << 26, u64::MAX];

    #[test]
    fn every_call_finds_an_algorithm_that_can_run() {
        for world in [1, 2, 3, 4, 5, 7, 8, 16, 17, 64, 100, 1024] {
            for topology in topologies(world) {
                for deterministic in [false, true] {
                    let chooser = Chooser::new(topology.clone(), Vec::new(), &basis(deterministic));
                    for collective in collectives() {
                        for (bytes, equal) in SIZES.iter().flat_map(|&bytes| [(bytes, true), (bytes, false)]) {
                            let row = chooser.choose(collective, Bytes(bytes), equal).unwrap();
                            assert_eq!(row.collective, collective);
                            assert_eq!(obstacle(row, equal, &topology), None, "{} {world}", row.name);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn more_bytes_never_take_less_time() {
        for world in [2, 3, 4, 7, 16, 100] {
            for topology in topologies(world) {
                for cores in [1, 2, 100] {
                    let placement = Placement { cores, ..basis(false).placement };
                    let chooser = Chooser::new(topology.clone(), Vec::new(), &Basis { placement, ..basis(false) });
                    for collective in collectives() {
                        let mut last: Vec<u64> = Vec::new();
                        let mut bytes = 0;
                        while bytes < 1 << 31 {
                            let now: Vec<u64> =
                                chooser.predict(collective, Bytes(bytes), true).map(|(_, time)| time).collect();
                            let names: Vec<&str> =
                                chooser.predict(collective, Bytes(bytes), true).map(|(row, _)| row.name).collect();
                            for (index, (last, now)) in last.iter().zip(&now).enumerate() {
                                assert!(last <= now, "{collective} {} of {world} at {bytes}", names[index]);
                            }
                            last = now;
                            bytes += bytes / 5 + 1;
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_deterministic_choice_sees_neither_hosts_nor_machine_nor_cores() {
        let hosts = Topology::new(vec![0, 0, 1, 1]);
        let slow: Machine = "shm_frame_ps=900000000 reduced_ps_per_kib=1,1,1,1,1".parse().unwrap();
        let placement = Placement { intra_node: IntraNode::Tcp, cores: 1, segment_bytes: 64 << 10 };
        for bytes in SIZES {
            let pick = |topology: &Topology, basis: Basis| {
                Chooser::new(topology.clone(), Vec::new(), &basis)
                    .choose(Collective::AllReduce, Bytes(bytes), true)
                    .unwrap()
                    .name
            };
            let here = pick(&hosts, Basis { machine: slow, placement, deterministic: true });
            assert_eq!(here, pick(&Topology::flat(4), basis(true)));
            assert_ne!(here, "two_level");
        }
    }

    #[test]
    fn what_the_constants_make_dear_is_avoided() {
        let flat = Topology::flat(8);
        let pick = |text: &str, bytes| {
            let basis = Basis { machine: text.parse().unwrap(), ..basis(false) };
            Chooser::new(flat.clone(), Vec::new(), &basis).choose(Collective::AllReduce, Bytes(bytes), true).unwrap()
        };
        // If only waiting costs time, one step is best. If only frames cost time, the fewest messages are best.
        let waiting = pick("shm_latency_ps=1000000000 shm_frame_ps=0", 1024);
        assert_eq!((waiting.steps)(8, &flat), 1);
        let frames = pick("shm_latency_ps=0 shm_frame_ps=1000000000", 1024);
        assert_eq!(frames.name, "recursive_doubling");
        // If only bytes cost time, the fewest bytes are best.
        let bytes = pick("", 1 << 28);
        assert!((bytes.bytes)(8, &flat) == crate::Fraction::new(14, 8), "{}", bytes.name);
    }

    #[test]
    fn several_ranks_on_several_hosts_meet_on_their_hosts_first() {
        for (world, on_each, bytes) in [(4, 2, 1 << 20), (4, 2, 1 << 26), (64, 8, 1 << 20)] {
            let hosts = Topology::new((0..world).map(|rank| rank / on_each).collect());
            let chosen = chooser(&hosts, &[]).choose(Collective::AllReduce, Bytes(bytes), true).unwrap();
            assert_eq!(chosen.name, "two_level", "{bytes} bytes, {world} ranks");
        }
    }

    #[test]
    fn small_sums_that_round_are_made_together_where_that_is_affordable() {
        let sums = [Collective::AllReduce, Collective::ReduceScatter, Collective::Reduce];
        for (world, collective) in (3..=8).flat_map(|world| sums.map(|collective| (world, collective))) {
            let chooser = chooser(&Topology::flat(world), &[]);
            for bytes in [2, 400, 1 << 12, 1 << 16, (1 << 16) + 1, 1 << 24] {
                let time = |row: &Algorithm| {
                    chooser.predict(collective, Bytes(bytes), true).find(|(other, _)| other.id == row.id).unwrap().1
                };
                let (fastest, narrow) = (
                    chooser.choose(collective, Bytes(bytes), true).unwrap(),
                    chooser.choose_narrow(collective, Bytes(bytes), true).unwrap(),
                );
                assert!(time(narrow) * 10 <= time(fastest) * 12, "{collective} {world} {bytes}");
                if bytes > 1 << 16 {
                    assert_eq!(narrow.name, fastest.name);
                }
                let rows =
                    chooser.predict(collective, Bytes(bytes), true).filter(|(row, _)| row.sums == Sums::Together);
                let together = rows.map(|(_, time)| time).min().unwrap();
                let affordable = bytes <= 1 << 16 && together * 10 <= time(fastest) * 12;
                assert!(narrow.sums == Sums::Together || !affordable, "{collective} {world} {bytes}");
            }
        }
        // An override takes precedence.
        let rules = [rule(Collective::AllReduce, "recursive_doubling", 0, u64::MAX)];
        let ordered = chooser(&Topology::flat(4), &rules);
        assert_eq!(ordered.choose_narrow(Collective::AllReduce, Bytes(64), true).unwrap().name, "recursive_doubling");
    }

    #[test]
    fn rows_that_collect_are_taken_only_for_sums_that_round() {
        for (world, topology) in
            [2, 3, 4, 8, 16].into_iter().flat_map(|world| topologies(world).map(|hosts| (world, hosts)))
        {
            let chooser = chooser(&topology, &[]);
            for (collective, bytes) in collectives().flat_map(|collective| SIZES.map(|bytes| (collective, bytes))) {
                let row = chooser.choose(collective, Bytes(bytes), true).unwrap();
                assert!(!row.name.ends_with("_collected"), "{collective} {world} {bytes}: {}", row.name);
            }
        }
    }

    #[test]
    fn a_long_buffer_is_not_swapped_in_place_segment_by_segment() {
        for topology in [Topology::flat(2), Topology::new(vec![0, 1])] {
            let chooser = chooser(&topology, &[]);
            for bytes in [1 << 22, 1 << 26] {
                let row = chooser.choose(Collective::AllReduce, Bytes(bytes), true).unwrap();
                assert_ne!(row.name, "recursive_doubling", "{bytes}");
            }
        }
    }

    #[test]
    fn the_last_rule_that_fits_wins() {
        let rules = [
            rule(Collective::AllReduce, "ring", 0, u64::MAX),
            rule(Collective::AllReduce, "rabenseifner", 1000, 2000),
            rule(Collective::Broadcast, "chain", 0, u64::MAX),
        ];
        let chooser = chooser(&Topology::flat(4), &rules);
        let pick = |collective, bytes| chooser.choose(collective, Bytes(bytes), true).map(|row| row.name);
        assert_eq!(pick(Collective::AllReduce, 999), Ok("ring"));
        assert_eq!(pick(Collective::AllReduce, 1000), Ok("rabenseifner"));
        assert_eq!(pick(Collective::AllReduce, 2001), Ok("ring"));
        assert_eq!(pick(Collective::Broadcast, 4), Ok("chain"));
        assert_ne!(pick(Collective::Reduce, 4), Ok("chain"));
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_nearest_even_out_of_its_range() {
        let rules = [rule(Collective::AllReduce, "rings", 1 << 30, u64::MAX)];
        let error = chooser(&Topology::flat(4), &rules).choose(Collective::AllReduce, Bytes(4), true).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Configuration);
        assert!(error.message.contains("did you mean ring?") && error.message.contains("two_level"), "{error}");
    }

    #[test]
    fn a_rule_that_cannot_be_followed_says_why() {
        let refused = |collective, name, equal| {
            let rules = [rule(collective, name, 0, u64::MAX)];
            let error = chooser(&Topology::flat(4), &rules).choose(collective, Bytes(4), equal).unwrap_err();
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
            check_rules(topology, &[rule(collective, name, 7, 9)]).map_err(|error| error.message)
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
        let error = chooser(&Topology::flat(4), &[]).choose(Collective::Send, Bytes(4), true).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Unsupported);
    }
}
