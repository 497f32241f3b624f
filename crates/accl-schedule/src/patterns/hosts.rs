//! The ranks of several hosts as owners and guests, for blocks that belong to one rank each.
//!
//! As many ranks of each host as the smallest has are owners; rank number i of a host belongs to owner number i modulo
//! that. Owners of one number on all hosts exchange the blocks of all who belong to them.

use super::Team;
use crate::algorithms::Fraction;
use crate::cost::{Among, Arriving, Phase};
use crate::ir::Request;
use crate::topology::Topology;

/// One rank's place.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    topology: &'a Topology,
    /// Its host.
    pub host: u32,
    /// Its number there.
    pub index: u32,
    /// Owners on each host.
    pub owners: u32,
}

impl<'a> Place<'a> {
    /// Of the rank that asks.
    pub fn of(request: &Request<'a>) -> Place<'a> {
        let topology = request.topology;
        let host = topology.host_of(request.rank);
        let index = topology.ranks_of(host).partition_point(|&rank| rank < request.rank.0) as u32;
        Place { topology, host, index, owners: topology.smallest_host() }
    }

    /// The ranks of its host.
    pub fn inside(&self) -> Team<'a> {
        Team::of(self.topology.ranks_of(self.host), self.index)
    }

    /// The owners of its number on all hosts.
    pub fn across(&self) -> Vec<u32> {
        self.topology.hosts().iter().map(|ranks| ranks[self.index as usize]).collect()
    }

    /// Number of its owner, which may be itself.
    pub fn owner(&self) -> u32 {
        self.index % self.owners
    }

    /// The ranks of so many hosts from `first` on that belong to an owner number.
    pub fn belonging(&self, owner: u32, first: u32, hosts: u32) -> impl Iterator<Item = u32> + use<'a> {
        let step = self.owners as usize;
        let hosts = &self.topology.hosts()[first as usize..(first + hosts) as usize];
        hosts.iter().flat_map(move |ranks| ranks.iter().skip(owner as usize).step_by(step).copied())
    }

    /// All of them.
    pub fn all_belonging(&self, owner: u32) -> impl Iterator<Item = u32> + use<'a> {
        self.belonging(owner, 0, self.topology.host_count())
    }

    /// The guests of its own, if it is an owner.
    pub fn guests(&self) -> impl Iterator<Item = u32> + use<'a> {
        self.belonging(self.owner(), self.host, 1).skip(1)
    }
}

/// Most ranks that belong to an owner on its host, itself included.
pub fn most_belonging(topology: &Topology) -> u32 {
    topology.largest_host().div_ceil(topology.smallest_host())
}

/// The exchange between hosts as counts, a block of the largest buffer from each: by halves among a power of two.
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

/// Longest chain of messages: inside, across, and for guests.
pub fn steps(topology: &Topology) -> u32 {
    let hosts = topology.host_count();
    let across = if hosts.is_power_of_two() { super::floor_log2(hosts) } else { hosts - 1 };
    let guests = u32::from(topology.largest_host() > topology.smallest_host());
    u32::from(topology.largest_host() > 1) + across + guests
}

/// Blocks that the busiest rank sends or receives; a bound for hosts of different sizes.
pub fn bytes(topology: &Topology) -> Fraction {
    let (n, hosts, most) = (topology.world(), topology.host_count(), most_belonging(topology));
    let inside = (topology.largest_host() - 1) * hosts * most;
    Fraction::new(if most > 1 { inside.max(n) } else { inside } + (hosts - 1) * most + most - 1, n)
}
