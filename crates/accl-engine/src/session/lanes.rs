//! Number of lanes of a group, and the group's state on each of them.
//!
//! Owns that number, which all ranks compute from the infos of all ranks. [`crate::lanes`] defines lanes and the
//! cutting of calls. Read [`Lanes::of`] first.

use std::sync::Arc;

use accl_executor::group::GroupState;
use accl_executor::peers::{Members, PeerId};
use accl_schedule::Topology;
use accl_schedule::cost::{Machine, SIZES};
use accl_types::{Bytes, Result};
use accl_wire::EndpointInfo;

use super::rendezvous::RankInfo;
use crate::cores::HostLoad;
use crate::cpus;
use crate::driver::Driver;
use crate::engine::{Engine, Parts};
use crate::lanes::Numbers;
use crate::spec::GroupSpec;

/// The group's state on each of its lanes, the first lane first.
pub(super) type LaneStates = Vec<GroupState>;

/// Number of lanes of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lanes {
    pub(super) count: u32,
    /// Whether each host has a core for each lane of each of its ranks.
    pub(super) have_own_cores: bool,
}

impl Lanes {
    /// Lanes of a group of one rank, or of a group with a component that executes the large calls.
    pub(super) const ONE: Self = Self { count: 1, have_own_cores: true };

    /// Returns the lanes of a group of these ranks: the number of the rank with the fewest. It is the same on all
    /// ranks.
    pub(super) fn of(infos: &[RankInfo], topology: &Topology) -> Self {
        let machine = infos.first().and_then(|info| info.machine).unwrap_or_default();
        // For each host its ranks in this group, and the cores for each rank, counting other ranks on the host as well.
        let hosts: Vec<(Vec<&RankInfo>, HostLoad)> = (0..topology.host_count())
            .map(|host| {
                let here: Vec<_> = topology.ranks_of(host).iter().map(|&rank| &infos[rank as usize]).collect();
                let host_load = HostLoad::of(here.iter().map(|info| &info.cores));
                let host_load =
                    here.iter().map(|info| info.host_load).fold(host_load, |host_load, seen| seen.or(host_load));
                (here, host_load)
            })
            .collect();
        let of_host = |(here, host_load): &(Vec<&RankInfo>, HostLoad)| {
            let useful = useful_lanes(*host_load, hosts.len(), &machine);
            let of_rank = |info: &&RankInfo| if info.has_auto_lanes { useful } else { u64::MAX };
            here.iter().map(|info| of_rank(info).min(u64::from(info.info.lanes))).min().unwrap_or(1)
        };
        let count = hosts.iter().map(of_host).min().unwrap_or(1).max(1);
        let have_own_cores = hosts.iter().all(|(_, host_load)| count <= u64::from(host_load.share));
        Self { count: count as u32, have_own_cores }
    }
}

/// Returns the number of useful lanes per rank of a host: at most the number of cores per rank. It is also at most the
/// number that the memory or, with several hosts, the network can keep busy, whichever is larger.
fn useful_lanes(HostLoad { ranks, share }: HostLoad, hosts: usize, machine: &Machine) -> u64 {
    let ranks = u64::from(ranks);
    let by_memory = if ranks > 1 { machine.memory_cores.div_ceil(ranks) } else { 1 };
    let by_network = if hosts > 1 { network_cores(machine).div_ceil(ranks) } else { 1 };
    u64::from(share).min(by_memory.max(by_network)).max(1)
}

/// Returns the number of cores needed to send and receive at the speed of a host's network connection.
fn network_cores(machine: &Machine) -> u64 {
    let of_largest = |rates: &[u64; SIZES.len()]| rates[SIZES.len() - 1];
    let of_core = of_largest(&machine.tcp.sent_ps_per_kib) + of_largest(&machine.tcp.received_ps_per_kib);
    of_core.div_ceil(machine.network.sent_ps_per_kib.max(1))
}

impl Engine {
    /// Creates the group's state on each of its `lanes`, which may be one; the first lane uses the peers `first`.
    ///
    /// # Errors
    /// `Exhausted` when the system has no thread for a lane; the errors of [`Engine::introduce`].
    pub(super) fn on_lanes(
        &self,
        parts: Parts<'_>,
        spec: &GroupSpec,
        id: u64,
        infos: &[RankInfo],
        first: Vec<PeerId>,
        lanes: Lanes,
    ) -> Result<LaneStates> {
        let others = lanes.count.saturating_sub(1) as usize;
        let numbers: Arc<Numbers> = Arc::default();
        let name: Arc<str> = spec.name.as_str().into();
        let state = |lane: u32, driver: &Driver, peers: Vec<PeerId>| {
            driver.with_core(|core| core.expect_group(id, peers.clone()));
            let members = Members::new(peers, Bytes(spec.config.eager_bytes));
            let mut state = GroupState::new(id, name.clone(), spec.rank, spec.timeout, members);
            if others > 0 {
                state.set_lane(lane, numbers.clone());
            }
            if spec.config.timing {
                state.enable_timing();
            }
            state
        };
        let mut states = vec![state(0, &self.driver, first)];
        for (lane, driver) in (1..).zip(self.other_lanes()).take(others) {
            driver.start_thread()?;
            let there: Vec<EndpointInfo> = infos.iter().map(|info| info.info.of_lane(lane)).collect();
            let peers = self.introduce(driver, parts.info, &there, spec.rank.index())?;
            states.push(state(lane, driver, peers));
        }
        // Ranks that share cores do so whatever they do for this group.
        if others > 0 || !lanes.have_own_cores {
            self.lanes().for_each(|lane| lane.set_lanes_have_own_cores(lanes.have_own_cores));
        }
        if others > 0 {
            // Peers may have connected before they were introduced.
            parts.connector.hand_over();
        }
        Ok(states)
    }

    /// Binds each lane thread to the CPU that the setting lists for it. Called for the job's group with its number of
    /// lanes; other groups contain only some of its ranks.
    pub(super) fn place_threads(&self, infos: &[RankInfo], rank: usize, lanes: u32) {
        let cpus = &self.config.worker_affinity;
        if cpus.is_empty() {
            return;
        }
        let first = threads_before(infos, rank, lanes);
        let threads = threads_of(&infos[rank], lanes);
        let own = cpus.get(first..).unwrap_or_default();
        self.other_lanes().iter().take(threads).zip(own).for_each(|(driver, &cpu)| driver.thread.move_to(cpu));
        if own.len() < threads {
            tracing::warn!(
                "worker_affinity (ACCL_WORKER_AFFINITY or CCL_WORKER_AFFINITY) lists {} CPUs, but the ranks of this \
                 host up to this rank have {} worker threads; the threads without a listed CPU keep their binding",
                cpus.len(),
                first + threads
            );
        }
    }
}

/// Returns the number of lane threads of the ranks on the same host before this rank.
fn threads_before(infos: &[RankInfo], rank: usize, lanes: u32) -> usize {
    let here = &infos[rank].info.host_id;
    let before = infos[..rank].iter().filter(|info| info.info.host_id == *here);
    before.map(|info| threads_of(info, lanes)).sum()
}

/// Returns the number of lane threads of a rank. With `auto` it is the number that the group uses, otherwise the number
/// that the rank has.
fn threads_of(info: &RankInfo, lanes: u32) -> usize {
    let count = if info.has_auto_lanes { lanes } else { info.info.lanes };
    count.saturating_sub(1) as usize
}

/// Logs a warning if `auto` has found one core although the host has more cores than ranks.
pub(super) fn warn_if_bound(spec: &GroupSpec, infos: &[RankInfo]) {
    let cpus = cpus::online();
    if could_have_more(infos, spec.rank.index(), cpus) {
        tracing::warn!(
            "ACCL_WORKER_COUNT=auto adds no thread to this rank, because the rank is bound to one of the machine's \
             {cpus} CPUs; let the launcher bind no ranks, with its option --bind-to none or --cpu-bind=none"
        );
    }
}

/// Returns whether a rank with `auto` lanes is bound to one core although the host has cores to spare. `cpus` is the
/// number of CPUs of the host.
fn could_have_more(infos: &[RankInfo], rank: usize, cpus: usize) -> bool {
    let mine = &infos[rank];
    let ranks = infos.iter().filter(|info| info.info.host_id == mine.info.host_id).count();
    infos.len() > 1 && mine.has_auto_lanes && mine.cores.is_one() && cpus > ranks
}

/// Logs a warning if this rank has lanes that the group does not use.
pub(super) fn warn_of_unused_lanes(spec: &GroupSpec, infos: &[RankInfo], lanes: Lanes) {
    let mine = &infos[spec.rank.index()];
    if lanes.count >= mine.info.lanes || mine.has_auto_lanes {
        return;
    }
    let (used, here) = (lanes.count - 1, mine.info.lanes - 1);
    let has_fewest = |info: &RankInfo| info.info.lanes == lanes.count || info.has_auto_lanes;
    let rank = infos.iter().position(has_fewest).unwrap_or_default();
    tracing::warn!(
        group = spec.name,
        "this rank has {here} worker threads for large calls, but the group uses only {used}: rank {rank} can use no \
         more"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the lanes of ranks, each given by host, cores and number of lanes; `None` means `auto`.
    fn lanes(ranks: &[(&str, &str, Option<u32>)]) -> Lanes {
        let machine = Machine { memory_cores: 8, ..Machine::default() };
        let mut hosts: Vec<&str> = Vec::new();
        let mut infos = Vec::new();
        let mut places = Vec::new();
        for (host, cores, count) in ranks {
            let place = hosts.iter().position(|known| known == host).unwrap_or_else(|| {
                hosts.push(host);
                hosts.len() - 1
            });
            places.push(place as u32);
            let mut info = RankInfo::for_tests(0, "");
            info.cores = cores.parse().unwrap();
            info.machine = Some(machine);
            (info.info.lanes, info.has_auto_lanes) = (count.unwrap_or(16), count.is_none());
            infos.push(info);
        }
        Lanes::of(&infos, &Topology::new(places))
    }

    #[test]
    fn auto_is_one_lane_where_each_rank_has_a_core_or_less() {
        let alone = Lanes { count: 1, have_own_cores: true };
        assert_eq!(lanes(&[("a", "0-1", None), ("a", "0-1", None)]), alone);
        assert_eq!(lanes(&[("a", "0", None), ("a", "1", None)]), alone);
        assert_eq!(lanes(&[("a", "0-31/2", None), ("a", "0-31/2", None)]), alone, "a quota counts");
        let crowded = [("a", "0-1", None); 4];
        assert_eq!(lanes(&crowded), Lanes { count: 1, have_own_cores: false });
    }

    #[test]
    fn auto_is_as_many_as_cores_and_memory_and_network_have_use_for() {
        let count = |ranks: &[_]| lanes(ranks).count;
        assert_eq!(count(&[("a", "0-31", None); 2]), 4, "eight cores move memory as fast as the host can");
        assert_eq!(count(&[("a", "0-3", None); 2]), 2, "four cores");
        assert_eq!(count(&[("a", "0-31", None); 8]), 1);
        // With the built-in constants one core moves more than ten gigabits per second.
        assert_eq!(count(&[("a", "0-31", None), ("b", "0-31", None)]), 1);
        assert_eq!(network_cores(&Machine::default()), 1);
        let mut fast = Machine::default();
        fast.network.sent_ps_per_kib /= 10;
        assert_eq!(useful_lanes(HostLoad { ranks: 1, share: 32 }, 2, &fast), network_cores(&fast));
        assert!((4..=16).contains(&network_cores(&fast)));
    }

    #[test]
    fn auto_on_one_core_warns_where_the_host_has_more_cores_than_ranks() {
        let bound = |cores: &str, is_auto: bool| {
            let mut info = RankInfo::for_tests(0, "");
            (info.cores, info.has_auto_lanes) = (cores.parse().unwrap(), is_auto);
            info
        };
        let two = [bound("0", true), bound("1", true)];
        assert!(could_have_more(&two, 1, 8));
        assert!(!could_have_more(&two, 1, 2), "each has all that there is for it");
        assert!(!could_have_more(&two[..1], 0, 8), "one rank sends nothing");
        let others = [bound("0-7", true), bound("1", false), bound("0-7/1", true)];
        assert!((0..others.len()).all(|rank| !could_have_more(&others, rank, 8)));
    }

    #[test]
    fn threads_of_a_host_are_counted_in_the_order_of_its_ranks() {
        let mut infos = vec![RankInfo::for_tests(0, ""); 4];
        infos.iter_mut().for_each(|info| info.info.lanes = 4);
        infos[1].info.host_id = "another".into();
        infos[2].has_auto_lanes = true;
        let before: Vec<usize> = (0..4).map(|rank| threads_before(&infos, rank, 2)).collect();
        assert_eq!(before, [0, 0, 3, 4], "three of the first rank; one of the third, which finds out");
    }

    #[test]
    fn ranks_of_a_sub_group_leave_the_cores_of_the_others_alone() {
        let mut infos = vec![RankInfo::for_tests(0, ""); 4];
        for info in &mut infos {
            (info.cores, info.has_auto_lanes, info.info.lanes) = ("0-15".parse().unwrap(), true, 16);
        }
        let of_all = |infos: &[RankInfo]| Lanes::of(infos, &Topology::new(vec![0; infos.len()]));
        assert_eq!(of_all(&infos), Lanes { count: 2, have_own_cores: true });
        infos[2].host_load = HostLoad { ranks: 16, share: 1 };
        assert_eq!(of_all(&infos), Lanes { count: 1, have_own_cores: true });
        // For pinned ranks, this group sees only their own cores.
        infos[2].host_load = HostLoad { ranks: 4, share: 4 };
        assert_eq!(of_all(&infos), Lanes { count: 2, have_own_cores: true });
        infos[2].host_load = HostLoad { ranks: 16, share: 1 };
        infos.iter_mut().for_each(|info| (info.has_auto_lanes, info.info.lanes) = (false, 3));
        assert_eq!(of_all(&infos), Lanes { count: 3, have_own_cores: false });
    }

    #[test]
    fn the_rank_with_the_fewest_counts_and_all_hosts_say_whether_cores_are_shared() {
        let (three, many) = (("a", "0-31", Some(3)), ("a", "0-31", Some(9)));
        assert_eq!(lanes(&[three, many]), Lanes { count: 3, have_own_cores: true });
        assert_eq!(lanes(&[many, ("a", "0-31", None)]).count, 4, "one of them finds out");
        assert_eq!(lanes(&[("a", "0-1", Some(2)); 2]), Lanes { count: 2, have_own_cores: false });
        assert!(!lanes(&[three, three, ("b", "0-1", Some(3))]).have_own_cores);
    }
}
