//! Two-level reduce_scatter: each owner of a host reduces its host's contributions for all ranks that belong to owners
//! with its number. These owners then exchange halves, or pass sums around a ring if the number of hosts is not a power
//! of two. Guests get their block from their owner.
//! Steps 1 inside and log2(h) or h-1 across. Wins if several hosts have several ranks each: only one sum per host
//! crosses the network for each byte.

use crate::algorithms::prelude::*;
use crate::patterns::hosts::{self, HostPosition};
use crate::patterns::{direct, halving, ring};

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 24,
    name: "two_level",
    collective: Collective::ReduceScatter,
    build,
    applies: several_hosts,
    requires: "at least two hosts",
    needs_equal_blocks: false,
    encodes: Encodes::Twice,
    sums: Sums::InTurn,
    steps: |_, topology| hosts::steps(topology),
    bytes: |_, topology| hosts::bytes(topology),
    steps_formula: "1 + log2 h, or 1 + h-1 if h is not a power of two; 1 more for hosts of different sizes",
    bytes_formula: "(n-1)/n; more for hosts of different sizes",
    cost,
    wins: "several hosts with several ranks each",
    source: "composition over hosts",
};

fn cost(n: u32, topology: &Topology) -> Cost {
    let part = Fraction::new(topology.host_count() * hosts::most_belonging(topology), n);
    let inside = Phase::to_owners(Among::Hosts(topology), topology.smallest_host(), part);
    let across = hosts::across_phases(topology, Arriving::Reduced);
    Cost::of([inside].into_iter().chain(across).chain([hosts::guests_phase(topology)]))
}

fn build(request: &Request) -> Schedule {
    let mut schedule = Schedule::new(Division::Blocks, Division::Whole);
    let position = HostPosition::of(request);
    let (inside, own) = (position.inside(), request.rank.0);
    let input = |owner| position.all_belonging(owner).map(|rank| (Buf::In, rank)).collect::<Span>();
    if position.index >= position.owners {
        direct::reduce_scatter(&mut schedule, &inside, position.owners, input, |_| Span::empty(), Finish::No);
        schedule.recv(inside.rank(position.owner()), whole(Buf::Out));
        return schedule;
    }
    // This rank's own block is reduced in place; the other blocks are reduced in scratch.
    let mut slots = Vec::new();
    for rank in position.all_belonging(position.index).filter(|&rank| rank != own) {
        slots.push((rank, schedule.scratch_like(Buf::In, rank)));
    }
    slots.sort_unstable();
    let sum = |rank: u32| match slots.binary_search_by_key(&rank, |&(rank, _)| rank) {
        Ok(slot) => (Buf::Scratch, slots[slot].1),
        Err(_) => (Buf::Out, 0),
    };
    let acc = |first, hosts| position.belonging(position.index, first, hosts).map(sum).collect::<Span>();
    let all_hosts = request.topology.host_count();
    direct::reduce_scatter(&mut schedule, &inside, position.owners, input, |_| acc(0, all_hosts), Finish::No);

    let counterparts = position.across();
    let across = Team::of(&counterparts, position.host);
    let alone = inside.size() == 1;
    let src = |first, hosts| match alone {
        true => position.belonging(position.index, first, hosts).map(|rank| (Buf::In, rank)).collect(),
        false => acc(first, hosts),
    };
    if all_hosts.is_power_of_two() {
        halving::reduce_scatter_of(&mut schedule, &across, src, acc);
    } else {
        ring::reduce_scatter(&mut schedule, &across, |host| src(host, 1), |host| acc(host, 1), Finish::Yes);
    }
    for guest in position.guests() {
        schedule.send(Rank(guest), std::iter::once(sum(guest)).collect());
    }
    schedule
}
