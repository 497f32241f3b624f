//! The memory that a rank's values need.
//!
//! Owns which values may use the same place one after the other, and sums of bytes. Read [`ValueMemory::of`] first.

use std::collections::HashMap;

use accl_types::{Bytes, Rank};

use crate::plan::{Op, Pass, Plan, Value};

/// The places of one rank's values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ValueMemory {
    /// Size of each place in bytes.
    pub places: Vec<Bytes>,
    /// The place of each value of the rank, as an index into `places`.
    pub place_of: HashMap<Value, usize>,
    /// Maximum bytes of values that exist at a time. If states differ in size, the places together may be larger.
    pub peak: Bytes,
    /// Maximum bytes at a time of the graphs that final evaluations leave until their adjoint, or until the end of the
    /// plan.
    pub graphs: Bytes,
}

impl ValueMemory {
    /// Computes the memory of a rank. `state` is the bytes of a value at each point of the finest level. `graph` is the
    /// bytes that each layer's final evaluation leaves. `shares` is the thousandths of a state's bytes on each coarser
    /// mesh.
    pub fn of(plan: &Plan, rank: Rank, state: &[Bytes], graph: &[Bytes], shares: &[u64]) -> Self {
        let mut memory = Self::default();
        let mut vacant: HashMap<Bytes, Vec<usize>> = HashMap::new();
        let has_forward = plan.passes.contains(&Pass::Forward);
        let forgets = |op: &Op| match *op {
            Op::Forget { layer, .. } => graph[layer as usize].0,
            _ => 0,
        };
        // The graphs of a preceding forward plan exist from the start.
        let left: u64 = plan.ranks[rank.index()].iter().map(forgets).sum();
        let (mut live, mut held) = (0, if has_forward { 0 } else { left });
        let given = plan.inputs.iter().chain(&plan.guesses).filter(|&&(on, _)| on == rank);
        let enter = |memory: &mut Self, vacant: &mut HashMap<Bytes, Vec<usize>>, live: &mut u64, value: Value| {
            let Bytes(whole) = state[plan.points[value as usize] as usize];
            let mesh = plan.meshes[value as usize].checked_sub(1);
            let bytes =
                Bytes(mesh.and_then(|mesh| shares.get(mesh as usize)).map_or(whole, |share| whole * share / 1000));
            let place = vacant.get_mut(&bytes).and_then(Vec::pop).unwrap_or_else(|| {
                memory.places.push(bytes);
                memory.places.len() - 1
            });
            memory.place_of.insert(value, place);
            *live += bytes.0;
            memory.peak = memory.peak.max(Bytes(*live));
        };
        for &(_, value) in given {
            enter(&mut memory, &mut vacant, &mut live, value);
        }
        for op in &plan.ranks[rank.index()] {
            if let Some(value) = op.makes() {
                enter(&mut memory, &mut vacant, &mut live, value);
            }
            match *op {
                Op::Free { value } => {
                    if let Some(&place) = memory.place_of.get(&value) {
                        live -= memory.places[place].0;
                        vacant.entry(memory.places[place]).or_default().push(place);
                    }
                }
                Op::Eval { pass: Pass::Forward, layer, is_final: true, .. } => held += graph[layer as usize].0,
                _ => {}
            }
            memory.graphs = memory.graphs.max(Bytes(held));
            held = held.saturating_sub(forgets(op));
        }
        memory
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cycle, Grid, Kind, Layer, Placement, Schedule, mgrit, pipeline};

    fn net(layers: u32, factors: &[u32]) -> (Grid, Placement) {
        let grid = Grid::new(&vec![Layer::of(Kind::Increment); layers as usize], factors).unwrap();
        (grid, Placement::even(layers, 2).unwrap())
    }

    #[test]
    fn no_two_values_lie_in_a_place_at_once() {
        let (grid, placement) = net(32, &[4, 2]);
        let plan = mgrit(&grid, &placement, Pass::Forward, &Cycle::new(3)).unwrap();
        for rank in [Rank(0), Rank(1)] {
            let memory = ValueMemory::of(&plan, rank, &[Bytes(10); 33], &[Bytes(7); 32], &[]);
            let mut taken: HashMap<usize, Value> = HashMap::new();
            let given = plan.inputs.iter().filter(|&&(on, _)| on == rank).map(|&(_, value)| value);
            given.for_each(|value| assert!(taken.insert(memory.place_of[&value], value).is_none()));
            for op in &plan.ranks[rank.index()] {
                if let Some(value) = op.makes() {
                    assert_eq!(taken.insert(memory.place_of[&value], value), None, "{op:?}");
                }
                if let Op::Free { value } = op {
                    assert_eq!(taken.remove(&memory.place_of[value]), Some(*value));
                }
            }
            assert_eq!(memory.graphs, Bytes(16 * 7));
            assert_eq!(memory.peak.0, memory.places.iter().map(|bytes| bytes.0).sum::<u64>());
        }
    }

    #[test]
    fn one_forward_one_backward_holds_fewer_graphs_than_fill_drain() {
        let (grid, placement) = net(8, &[]);
        let graphs = |schedule| {
            let plan = pipeline(&grid, &placement, schedule, 8).unwrap();
            [0, 1].map(|rank| ValueMemory::of(&plan, Rank(rank), &[Bytes(1); 9], &[Bytes(1); 8], &[]).graphs.0)
        };
        assert_eq!(graphs(Schedule::FillDrain), [32, 32]);
        assert_eq!(graphs(Schedule::OneForwardOneBackward), [8, 4]);
    }
}
