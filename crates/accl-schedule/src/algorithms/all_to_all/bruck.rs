//! Bruck's all_to_all: a block for the rank j positions after this one is sent in hops of the powers of two that sum to
//! j. A message has many blocks. Steps log2(n), rounded; bytes per rank about log2(n)/2 of the input. Wins for tiny
//! blocks in large worlds. J. Bruck et al., IEEE TPDS 8 (1997).

use crate::algorithms::prelude::*;
use crate::patterns::bruck;

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 142,
    name: "bruck",
    collective: Collective::AllToAll,
    build,
    applies: always,
    requires: "",
    needs_equal_blocks: true,
    encodes: Encodes::Twice,
    sums: Sums::InTurn,
    steps: |n, _| bruck::steps(n),
    bytes: |n, _| Fraction::new((1..n).map(u32::count_ones).sum(), n),
    steps_formula: "floor(log2 n), + 1 for n > 3p/2",
    bytes_formula: "(sum of the one bits of 1 to n-1)/n, about log2(n)/2",
    cost: |n, topology| {
        let among = Among::World(topology);
        let hop = |bit: u32| {
            let blocks = (1..n).filter(|distance| distance >> bit & 1 == 1).count() as u32;
            let step = u32::from(bit < bruck::steps(n));
            Phase::linked(step, among.shift(1 << bit), Fraction::new(blocks, n), Arriving::Copied)
        };
        Cost::of((0..ceil_log2(n)).map(hop)).copies(Fraction::new(1, n))
    },
    wins: "tiny blocks in large worlds",
    source: "Bruck et al. 1997",
};

fn build(request: &Request) -> Schedule {
    let mut schedule = Schedule::new(Division::Blocks, Division::Blocks);
    let team = Team::world(request);
    let n = team.size();
    schedule.copy(Span::chunk(Buf::Out, team.index()), Span::chunk(Buf::In, team.index()));
    // A block in transit alternates between two slots, so that receiving never waits for sending.
    let mut first_slot = vec![0; n as usize];
    for distance in 1..n {
        first_slot[distance as usize] = schedule.scratch.len() as u32;
        for _ in 0..(distance.count_ones() - 1).min(2) {
            schedule.scratch_like(Buf::In, 0);
        }
    }
    // Location of the block with total distance `distance` after `hops` hops. At the start it is this rank's own block;
    // at the end it came from the rank `distance` positions before.
    let place = |distance: u32, hops: u32| match hops {
        0 => (Buf::In, team.after(distance)),
        hops if hops == distance.count_ones() => (Buf::Out, team.before(distance)),
        hops => (Buf::Scratch, first_slot[distance as usize] + (hops - 1) % 2),
    };
    let mut hop = 1;
    while hop < n {
        let (mut sent, mut received) = (Span::empty(), Span::empty());
        for distance in (1..n).filter(|distance| distance & hop != 0) {
            let hops = (distance & (hop - 1)).count_ones();
            let (buf, chunk) = place(distance, hops);
            sent.push(buf, chunk, 1);
            let (buf, chunk) = place(distance, hops + 1);
            received.push(buf, chunk, 1);
        }
        schedule.send(team.rank(team.after(hop)), sent);
        schedule.recv(team.rank(team.before(hop)), received);
        hop *= 2;
    }
    schedule
}
