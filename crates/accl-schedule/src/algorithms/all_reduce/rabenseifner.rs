//! Rabenseifner's all_reduce: recursive halving reduce_scatter, then recursive doubling all_gather.
//! Steps 2 log2(n), two more if n is not a power of two (the first ranks are folded in pairs). Bytes per rank: 2(p-1)/p
//! of the buffer among a power of two p, and one buffer more for a rank that acts for a partner. Wins for medium
//! buffers in large worlds. R. Rabenseifner, ICCS 2004.

use crate::algorithms::prelude::*;
use crate::patterns::fold::{self, Fold};
use crate::patterns::halving;

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 4,
    name: "rabenseifner",
    collective: Collective::AllReduce,
    build,
    applies: always,
    requires: "",
    needs_equal_blocks: false,
    encodes: Encodes::Often,
    sums: Sums::InTurn,
    steps: |n, _| 2 * floor_log2(n) + if n.is_power_of_two() { 0 } else { 2 },
    bytes: |n, _| {
        let p = floor_power_of_two(n);
        Fraction::new(2 * (p - 1) + if p == n { 0 } else { p }, p)
    },
    steps_formula: "2 log2 n; 2 floor(log2 n) + 2 if n is not a power of two",
    bytes_formula: "2(p-1)/p, +1 if n is not a power of two",
    cost: |n, topology| {
        let (among, p) = (Among::World(topology), floor_power_of_two(n));
        let core = |arriving| halving::phases(among, p, |blocks| Fraction::new(blocks, p), arriving);
        let core = core(Arriving::Reduced).chain(core(Arriving::Copied).rev());
        let (enter, leave) = (fold::enter(among, Fraction::WHOLE), fold::leave(among, 1, Fraction::WHOLE));
        Cost::of([enter].into_iter().chain(core).chain([leave]))
    },
    wins: "medium buffers in large worlds, best with a power of two",
    source: "Rabenseifner 2004",
};

fn build(request: &Request) -> Schedule {
    let division = Division::Even { chunks: floor_power_of_two(request.world) };
    let mut schedule = Schedule::new(division, division);
    let all = |buf| Span::range(buf, 0, floor_power_of_two(request.world));
    let (input, output) = (Strip::chunks(Buf::In), Strip::chunks(Buf::Out));
    let world = Team::world(request);
    match Fold::of(&world) {
        Fold::Guest { host } => {
            schedule.send(world.rank(host), all(Buf::In));
            schedule.recv(world.rank(host), all(Buf::Out));
        }
        Fold::Member { guest, core } => {
            let mut local = input;
            if let Some(guest) = guest {
                let guest = world.rank(guest);
                schedule.recv_reduce(guest, all(Buf::Out), all(Buf::In), Order::LocalFirst, Finish::No);
                local = output;
            }
            halving::reduce_scatter(&mut schedule, &core.team, local, output);
            halving::all_gather(&mut schedule, &core.team, output);
            if let Some(guest) = guest {
                schedule.send(world.rank(guest), all(Buf::Out));
            }
            if world.size() == 1 {
                schedule.copy(all(Buf::Out), all(Buf::In));
            }
        }
    }
    schedule
}
