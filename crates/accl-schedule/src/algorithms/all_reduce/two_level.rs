//! Two-level all_reduce: reduce_scatter inside each host, all_reduce of each chunk across hosts, all_gather inside.
//! The buffer has as many chunks as the smallest host has ranks. The first ranks of each host own one chunk each and
//! exchange it with their counterparts on the other hosts. They use halving and doubling if the number of hosts is a
//! power of two, else a ring.
//! Steps 2 inside and 2 log2(h) or 2(h-1) across. Wins if several hosts have several ranks each. Every byte crosses the
//! network as if there were one rank per host, over as many connections as there are owners.

use crate::algorithms::prelude::*;
use crate::patterns::{direct, halving, ring};

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 7,
    name: "two_level",
    collective: Collective::AllReduce,
    build,
    applies: several_hosts,
    requires: "at least two hosts",
    needs_equal_blocks: false,
    encodes: Encodes::Twice,
    sums: Sums::InTurn,
    steps: |_, topology| {
        let hosts = topology.host_count();
        let inside = if topology.largest_host() > 1 { 2 } else { 0 };
        inside + 2 * if hosts.is_power_of_two() { floor_log2(hosts) } else { hosts - 1 }
    },
    bytes: |_, topology| {
        let (hosts, owners) = (topology.host_count(), topology.smallest_host());
        let inside = (topology.largest_host() - 1 + owners - 1) * hosts;
        Fraction::new(inside + 2 * (hosts - 1), owners * hosts)
    },
    steps_formula: "2 + 2 log2 h, or 2 + 2(h-1) if h is not a power of two; at most, for hosts of different sizes",
    bytes_formula: "(L-1 + c-1)/c + 2(h-1)/(hc); L and c: ranks of the largest and the smallest host",
    cost,
    wins: "several hosts with several ranks each",
    source: "composition over hosts",
};

fn cost(_: u32, topology: &Topology) -> Cost {
    let (hosts, owners) = (topology.host_count(), topology.smallest_host());
    let (inside, across) = (Among::Hosts(topology), Among::Leaders(topology, owners));
    let (own, part) = (Fraction::new(1, owners), Fraction::new(1, owners * hosts));
    let mut phases = vec![Phase::to_owners(inside, owners, own)];
    if hosts.is_power_of_two() {
        let halves = |arriving| halving::phases(across, hosts, |len| Fraction::new(len, owners * hosts), arriving);
        phases.extend(halves(Arriving::Reduced).chain(halves(Arriving::Copied).rev()));
    } else {
        phases.extend([Arriving::Reduced, Arriving::Copied].map(|arriving| Phase::around(across, part, arriving)));
    }
    phases.push(Phase::from_owners(inside, owners, own, Arriving::Copied));
    Cost::of(phases)
}

fn build(request: &Request) -> Schedule {
    let topology = request.topology;
    let host = topology.host_of(request.rank);
    let (hosts, owners) = (topology.host_count(), topology.smallest_host());
    let ranks = topology.ranks_of(host);
    let index = ranks.iter().position(|&rank| rank == request.rank.0).map_or(0, |index| index as u32);
    let inside = Team::of(ranks, index);

    // Chunk o * hosts + h is the part of owner o's chunk that host h finishes.
    let division = Division::Even { chunks: owners * hosts };
    let mut schedule = Schedule::new(division, division);
    let owned = |buf, owner| Strip { buf, first: owner * hosts, width: 1 };
    let all_of = |buf, owner| owned(buf, owner).blocks(0, hosts);

    direct::reduce_scatter(
        &mut schedule,
        &inside,
        owners,
        |owner| all_of(Buf::In, owner),
        |owner| all_of(Buf::Out, owner),
        Finish::No,
    );
    if index < owners {
        let counterparts: Vec<u32> = topology.hosts().iter().map(|ranks| ranks[index as usize]).collect();
        let across = Team::of(&counterparts, host);
        let src = owned(if ranks.len() > 1 { Buf::Out } else { Buf::In }, index);
        let out = owned(Buf::Out, index);
        if hosts.is_power_of_two() {
            halving::reduce_scatter(&mut schedule, &across, src, out);
            halving::all_gather(&mut schedule, &across, out);
        } else {
            ring::reduce_scatter(&mut schedule, &across, |h| src.block(h), |h| out.block(h), Finish::Yes);
            ring::all_gather(&mut schedule, &across, out.block(host), |h| out.block(h));
        }
    }
    direct::all_gather(&mut schedule, &inside, owners, all_of(Buf::Out, index.min(owners - 1)), |owner| {
        all_of(Buf::Out, owner)
    });
    schedule
}
