//! Recursive doubling all_reduce: in step k, ranks at distance 2^k exchange their whole partial results and reduce.
//! Steps log2(n), one or two more if n is not a power of two (the first ranks are folded in pairs). Bytes per rank: the
//! buffer in each step. Wins for small buffers in larger worlds. R. Thakur, R. Rabenseifner, W. Gropp, IJHPCA 19
//! (2005).

use crate::algorithms::prelude::*;
use crate::patterns::fold::{self, Fold, added_steps};
use crate::patterns::{by_rank, halving};

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 3,
    name: "recursive_doubling",
    collective: Collective::AllReduce,
    build,
    applies: always,
    requires: "",
    needs_equal_blocks: false,
    encodes: Encodes::No,
    sums: Sums::InTurn,
    steps: |n, _| floor_log2(n) + added_steps(n),
    bytes: |n, _| Fraction::new(floor_log2(n) + u32::from(!n.is_power_of_two()), 1),
    steps_formula: "log2 n; floor(log2 n) + 1 for p < n <= 3p/2, + 2 above",
    bytes_formula: "ceil(log2 n)",
    cost: |n, topology| {
        let (among, all) = (Among::World(topology), Fraction::WHOLE);
        let core = halving::phases(among, floor_power_of_two(n), |_| all, Arriving::Reduced).rev().map(Phase::swapping);
        let leave = fold::leave(among, added_steps(n).saturating_sub(1), all);
        Cost::of([fold::enter(among, all)].into_iter().chain(core).chain([leave]))
    },
    wins: "small buffers in larger worlds",
    source: "Thakur, Rabenseifner, Gropp 2005",
};

fn build(request: &Request) -> Schedule {
    let mut schedule = Schedule::new(Division::Whole, Division::Whole);
    let (input, output) = (whole(Buf::In), whole(Buf::Out));
    let world = Team::world(request);
    match Fold::of(&world) {
        Fold::Guest { host } => {
            schedule.send(world.rank(host), input);
            schedule.recv(world.rank(host), output);
        }
        Fold::Member { guest, core } => {
            let team = core.team;
            let mut local = input;
            if let Some(guest) = guest {
                schedule.recv_reduce(world.rank(guest), output.clone(), local, Order::LocalFirst, Finish::No);
                local = output.clone();
            }
            let mut distance = 1;
            while distance < team.size() {
                let peer = team.index() ^ distance;
                let finish = if 2 * distance == team.size() { Finish::Yes } else { Finish::No };
                schedule.send(team.rank(peer), local.clone());
                let order = by_rank(peer, team.index());
                schedule.recv_reduce(team.rank(peer), output.clone(), local, order, finish);
                local = output.clone();
                distance *= 2;
            }
            if let Some(guest) = guest {
                schedule.send(world.rank(guest), output.clone());
            }
            if world.size() == 1 {
                schedule.copy(output, local);
            }
        }
    }
    schedule
}
