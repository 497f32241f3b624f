//! The ranks of several hosts as owners and guests, for blocks that belong to one rank each.
//!
//! Each host has as many owners as the smallest host has ranks. Rank number i of a host belongs to the owner whose
//! number is i modulo the number of owners. Owners with the same number on all hosts exchange the blocks of all ranks
//! that belong to them.

use super::Team;
use crate::algorithms::Fraction;
use crate::cost::{Among, Arriving, Phase};
use crate::ir::Request;
use crate::topology::Topology;

/// One rank's position: its host, and its number there.
#[derive(Clone, Copy, Debug)]
pub struct HostPosition<'a> {
    topology: &'a Topology,
    /// The rank's host.
    pub host: u32,
    /// The rank's number on its host.
    pub index: u32,
    /// Number of owners on each host.
    pub owners: u32,
}

impl<'a> HostPosition<'a> {
    /// The position of the request's rank.
    pub fn of(request: &Request<'a>) -> HostPosition<'a> {
        let topology = request.topology;
        let host = topology.host_of(request.rank);
        let index = topology.ranks_of(host).partition_point(|&rank| rank < request.rank.0) as u32;
        HostPosition { topology, host, index, owners: topology.smallest_host() }
    }

    /// The ranks of its host.
    pub fn inside(&self) -> Team<'a> {
        Team::of(self.topology.ranks_of(self.host), self.index)
    }

    /// The owners with its number on all hosts.
    pub fn across(&self) -> Vec<u32> {
        self.topology.hosts().iter().map(|ranks| ranks[self.index as usize]).collect()
    }

    /// The number of its owner, which may be the rank itself.
    pub fn owner(&self) -> u32 {
        self.index % self.owners
    }

    /// The ranks that belong to owner number `owner`, on `hosts` hosts from `first` on.
    pub fn belonging(&self, owner: u32, first: u32, hosts: u32) -> impl Iterator<Item = u32> + use<'a> {
        let step = self.owners as usize;
        let hosts = &self.topology.hosts()[first as usize..(first + hosts) as usize];
        hosts.iter().flat_map(move |ranks| ranks.iter().skip(owner as usize).step_by(step).copied())
    }

    /// The ranks that belong to owner number `owner` on all hosts.
    pub fn all_belonging(&self, owner: u32) -> impl Iterator<Item = u32> + use<'a> {
        self.belonging(owner, 0, self.topology.host_count())
    }

    /// The rank's guests, if it is an owner.
    pub fn guests(&self) -> impl Iterator<Item = u32> + use<'a> {
        self.belonging(self.owner(), self.host, 1).skip(1)
    }
}

/// Maximum number of ranks that belong to one owner on its host, including the owner.
pub fn most_belonging(topology: &Topology) -> u32 {
    topology.largest_host().div_ceil(topology.smallest_host())
}

/// The exchange between hosts as counts, a block of the largest buffer from each host. It goes by halves if the number
/// of hosts is a power of two, else around a ring.
pub fn across_phases(topology: &Topology, arriving: Arriving) -> Vec<Phase> {
    let across = Among::Leaders(topology, topology.smallest_host());
    let part = |hosts: u32| Fraction::new(hosts * most_belonging(topology), topology.world());
    if across.size().is_power_of_two() {
        super::halving::phases(across, across.size(), part, arriving).collect()
    } else {
        vec![Phase::around(across, part(1), arriving)]
    }
}

/// A block from each owner to its guests, or back, as counts.
pub fn guests_phase(topology: &Topology) -> Phase {
    let owners = topology.smallest_host();
    let guests = (owners..topology.largest_host()).map(|index| (index % owners, index));
    let all = Among::Hosts(topology).pairs(guests);
    let most = most_belonging(topology) - 1;
    Phase::linked(1, all, Fraction::new(1, topology.world()), Arriving::Copied).busiest(most, 0)
}

/// Longest chain of messages: inside a host, across hosts, and to guests.
pub fn steps(topology: &Topology) -> u32 {
    let hosts = topology.host_count();
    let across = if hosts.is_power_of_two() { super::floor_log2(hosts) } else { hosts - 1 };
    let guests = u32::from(topology.largest_host() > topology.smallest_host());
    u32::from(topology.largest_host() > 1) + across + guests
}

/// Blocks that the busiest rank sends or receives; an upper bound if hosts differ in size.
pub fn bytes(topology: &Topology) -> Fraction {
    let (n, hosts, most) = (topology.world(), topology.host_count(), most_belonging(topology));
    let inside = (topology.largest_host() - 1) * hosts * most;
    Fraction::new(if most > 1 { inside.max(n) } else { inside } + (hosts - 1) * most + most - 1, n)
}
