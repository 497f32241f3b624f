//! Predicts the time of calls for any number of ranks from the cost model; no process is started.
//!
//! The algorithm choice is the same as a group's. Read [`Scenario`] first.

use accl_schedule::cost::{Machine, Placement};
use accl_schedule::{Basis, Chooser, Topology};
use accl_types::config::Config;
use accl_types::{Bytes, Collective, Error, Result};

use crate::settings::intra_node_of;

/// Maximum number of ranks that [`predict`] accepts.
pub const MAX_RANKS: u32 = 1 << 17;

/// Ranks, hosts and settings for which calls are predicted.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Constants of every host, and of the network between hosts.
    pub machine: Machine,
    /// Number of ranks.
    pub ranks: u32,
    /// Ranks of each host; the last one may have fewer.
    pub ranks_per_host: u32,
    /// Cores that the ranks of a host share.
    pub cores_per_host: u32,
    /// Transports, algorithm overrides and the segment length.
    pub config: Config,
}

/// Predicted algorithm and times of one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prediction {
    /// Bytes of the largest buffer.
    pub bytes: Bytes,
    /// Name of the algorithm that the call would use.
    pub chosen: &'static str,
    /// Algorithms that can run here, each with its predicted time in picoseconds.
    pub times_ps: Vec<(&'static str, u64)>,
}

/// Predicts calls of `collective`, one for each of `sizes`, with blocks of equal size.
///
/// # Errors
/// * `InvalidArgument` if a number of ranks or cores is out of range.
/// * `Configuration` if an algorithm override cannot run here.
/// * `Unsupported` for point-to-point calls.
pub fn predict(scenario: &Scenario, collective: Collective, sizes: &[Bytes]) -> Result<Vec<Prediction>> {
    let Scenario { ranks, ranks_per_host, cores_per_host, .. } = *scenario;
    if !(1..=MAX_RANKS).contains(&ranks) {
        return Err(Error::invalid_argument(format!("ranks: expected 1 to {MAX_RANKS}, got {ranks}")));
    }
    if ranks_per_host == 0 || cores_per_host == 0 {
        return Err(Error::invalid_argument("each host must have at least one rank and one core"));
    }
    let topology = Topology::new((0..ranks).map(|rank| rank / ranks_per_host).collect());
    accl_schedule::check_rules(&topology, &scenario.config.algorithm)?;
    let intra_node = intra_node_of(&scenario.config);
    let placement = Placement { intra_node, cores: cores_per_host, segment_bytes: scenario.config.segment_bytes };
    let basis = Basis { machine: scenario.machine, placement, deterministic: scenario.config.deterministic };
    let chooser = Chooser::new(topology, scenario.config.algorithm.clone(), &basis);
    let predict = |&bytes: &Bytes| {
        let chosen = chooser.choose(collective, bytes, true)?.name;
        let times_ps = chooser.predict(collective, bytes, true).map(|(row, time_ps)| (row.name, time_ps)).collect();
        Ok(Prediction { bytes, chosen, times_ps })
    };
    sizes.iter().map(predict).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scenario(ranks: u32, ranks_per_host: u32) -> Scenario {
        let machine = Machine::default();
        Scenario { machine, ranks, ranks_per_host, cores_per_host: ranks_per_host, config: Config::default() }
    }

    #[test]
    fn the_largest_world_is_predicted_and_what_is_chosen_is_the_least() {
        for (ranks, per_host) in [(1, 1), (2, 2), (4096, 8), (MAX_RANKS, 8)] {
            for found in
                predict(&scenario(ranks, per_host), Collective::AllReduce, &[4, 1 << 20, 1 << 30].map(Bytes)).unwrap()
            {
                let least = found.times_ps.iter().map(|&(_, time)| time).min();
                let chosen = found.times_ps.iter().find(|(name, _)| *name == found.chosen).map(|&(_, time)| time);
                assert_eq!(chosen, least, "{ranks} ranks: {found:?}");
            }
        }
    }

    #[test]
    fn a_faster_network_is_never_slower() {
        let time = |sent_ps_per_kib| {
            let mut scenario = scenario(64, 4);
            scenario.machine.network.sent_ps_per_kib = sent_ps_per_kib;
            predict(&scenario, Collective::AllReduce, &[Bytes(1 << 24)]).unwrap().remove(0).times_ps
        };
        for ((name, fast), (_, slow)) in time(81_920).into_iter().zip(time(8_192_000)) {
            assert!(fast <= slow, "{name}");
        }
    }

    #[test]
    fn what_makes_no_world_is_refused() {
        for (ranks, per_host) in [(0, 1), (MAX_RANKS + 1, 1), (4, 0)] {
            assert!(predict(&scenario(ranks, per_host), Collective::AllReduce, &[Bytes(4)]).is_err());
        }
        let mut alone = scenario(4, 4);
        alone.config.set_option("algorithm", "all_reduce=two_level").unwrap();
        assert!(predict(&alone, Collective::AllReduce, &[Bytes(4)]).unwrap_err().message.contains("two hosts"));
    }
}
