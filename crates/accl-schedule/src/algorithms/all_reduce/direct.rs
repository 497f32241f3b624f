//! One-shot all_reduce: every rank sends its whole buffer to every other rank and reduces in rank order.
//! Steps 1; bytes per rank n-1 times the buffer. Wins for tiny buffers, where only the number of steps counts. Scratch
//! holds n-1 buffers; 16-bit floats are rounded only once.

use crate::algorithms::prelude::*;

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 1,
    name: "direct",
    collective: Collective::AllReduce,
    build,
    applies: always,
    requires: "",
    needs_equal_blocks: false,
    encodes: Encodes::Twice,
    sums: Sums::Together,
    steps: |n, _| u32::from(n > 1),
    bytes: |n, _| Fraction::new(n - 1, 1),
    steps_formula: "1",
    bytes_formula: "n-1",
    cost: |n, topology| {
        let all = Phase::from_owners(Among::World(topology), n, Fraction::WHOLE, Arriving::Copied);
        Cost::of([all]).reduces(n)
    },
    wins: "tiny buffers in small worlds",
    source: "folklore (one-shot)",
};

fn build(request: &Request) -> Schedule {
    let mut schedule = Schedule::new(Division::Whole, Division::Whole);
    let team = Team::world(request);
    let mut operands = vec![IN; team.size() as usize];
    for step in 1..team.size() {
        let (to, from) = (team.after(step), team.before(step));
        let slot = Span::chunk(Buf::Scratch, schedule.scratch_like(Buf::In, 0));
        schedule.send(team.rank(to), whole(Buf::In));
        schedule.recv(team.rank(from), slot);
        operands[from as usize] = Some(step - 1);
    }
    let operand = |slot: Option<u32>| slot.map_or(whole(Buf::In), |slot| Span::chunk(Buf::Scratch, slot));
    match team.size() {
        1 => schedule.copy(whole(Buf::Out), whole(Buf::In)),
        _ => schedule.reduce(whole(Buf::Out), operands.into_iter().map(operand).collect(), Finish::Yes),
    }
    schedule
}

/// Marks the operand that is not in scratch.
const IN: Option<u32> = None;
