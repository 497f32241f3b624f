//! Two-level all_gather: guests send their block to an owner. The owners with the same number on all hosts exchange
//! their blocks: by doubling if the number of hosts is a power of two, else around a ring. Then each owner sends them
//! to all ranks of its host.
//! Steps log2(h) or h-1 across and 1 inside. Wins if several hosts have several ranks each: each byte enters a host
//! once.

use crate::algorithms::prelude::*;
use crate::patterns::hosts::{self, HostPosition};
use crate::patterns::{direct, halving, ring};

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 43,
    name: "two_level",
    collective: Collective::AllGather,
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
    let guests = hosts::guests_phase(topology);
    let (given, taken) = guests.messages();
    let across = hosts::across_phases(topology, Arriving::Copied).into_iter().rev();
    let part = Fraction::new(topology.host_count() * hosts::most_belonging(topology), n);
    let inside = Phase::from_owners(Among::Hosts(topology), topology.smallest_host(), part, Arriving::Copied);
    Cost::of([guests.busiest(taken, given)].into_iter().chain(across).chain([inside])).copies(Fraction::new(1, n))
}

fn build(request: &Request) -> Schedule {
    let mut schedule = Schedule::new(Division::Whole, Division::Blocks);
    let position = HostPosition::of(request);
    let (inside, own) = (position.inside(), request.rank.0);
    let belonging = |owner| position.all_belonging(owner).map(|rank| (Buf::Out, rank)).collect::<Span>();
    if position.index >= position.owners {
        schedule.send(inside.rank(position.owner()), whole(Buf::In));
        // The guest's own block is among the blocks that its owner sends.
        direct::all_gather(&mut schedule, &inside, position.owners, Span::empty(), belonging);
        return schedule;
    }
    schedule.copy(Span::chunk(Buf::Out, own), whole(Buf::In));
    for guest in position.guests() {
        schedule.recv(Rank(guest), Span::chunk(Buf::Out, guest));
    }
    let counterparts = position.across();
    let across = Team::of(&counterparts, position.host);
    let at = |first, hosts| -> Span {
        position.belonging(position.index, first, hosts).map(|rank| (Buf::Out, rank)).collect()
    };
    if across.size().is_power_of_two() {
        halving::all_gather_of(&mut schedule, &across, at);
    } else {
        ring::all_gather(&mut schedule, &across, at(position.host, 1), |host| at(host, 1));
    }
    direct::all_gather(&mut schedule, &inside, position.owners, belonging(position.index), belonging);
    schedule
}
