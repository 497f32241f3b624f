//! Two-level broadcast: a binomial tree over one rank of each host; that rank then sends the data to the others on its
//! host.
//! Steps floor(log2 h) + 1; a buffer crosses the network h-1 times in total. Wins if several hosts have several ranks
//! each.

use crate::algorithms::prelude::*;
use crate::patterns::binomial::{self, Node};
use crate::patterns::flat;

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 63,
    name: "two_level",
    collective: Collective::Broadcast,
    build,
    applies: several_hosts,
    requires: "at least two hosts",
    needs_equal_blocks: false,
    encodes: Encodes::No,
    sums: Sums::InTurn,
    steps: |_, topology| floor_log2(topology.host_count()) + u32::from(topology.largest_host() > 1),
    bytes: |_, topology| Fraction::new(ceil_log2(topology.host_count()) + topology.largest_host() - 1, 1),
    steps_formula: "floor(log2 h) + 1; at most, for hosts of different sizes",
    bytes_formula: "ceil(log2 h) + L-1; at most, for hosts of different sizes; L: ranks of the largest host",
    cost: |_, topology| {
        let across = Among::Leaders(topology, 1);
        let tree = binomial::phase(across, Arriving::Copied).busiest(ceil_log2(across.size()), 0);
        Cost::of([tree, flat::from_root(Among::Hosts(topology), Fraction::WHOLE)])
    },
    wins: "several hosts with several ranks each",
    source: "composition over hosts",
};

fn build(request: &Request) -> Schedule {
    let mut schedule = Schedule::new(Division::Whole, Division::Whole);
    let topology = request.topology;
    let (host, root_host) = (topology.host_of(request.rank), topology.host_of(request.root));
    let leader = |host: u32| if host == root_host { request.root } else { Rank(topology.ranks_of(host)[0]) };
    if request.rank != leader(host) {
        schedule.recv(leader(host), whole(Buf::Out));
        return schedule;
    }
    let node = Node::at(topology.host_count(), root_host, host);
    let leader_at = |position| leader(node.rank(position).0);
    // Across the network first, because it takes longer.
    let mut to: Vec<Rank> = node.children().rev().map(leader_at).collect();
    to.extend(topology.ranks_of(host).iter().map(|&rank| Rank(rank)).filter(|&rank| rank != request.rank));
    match node.parent() {
        Some(parent) => schedule.recv_copy_send(leader_at(parent), to, whole(Buf::Out)),
        None => to.into_iter().for_each(|rank| schedule.send(rank, whole(Buf::Out))),
    }
    schedule
}
