//! The time that a plan takes.
//!
//! Owns the execution of all lists with one clock per rank, in whole picoseconds, so that equal constants give equal
//! times on every processor.
//! The caller supplies the constants. Layers should be timed while all ranks compute, or their times come out too
//! short. Read [`predict_times`] first.

use std::collections::{HashMap, HashSet};

use accl_types::{Bytes, Rank};

use crate::plan::{Op, Pass, Plan, Value};

/// Times of one layer, in picoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerTimes {
    /// The forward evaluation, not recorded.
    pub plain: u64,
    /// The forward evaluation, recorded.
    pub recorded: u64,
    /// The vector-Jacobian product for the input alone.
    pub input_vjp: u64,
    /// The vector-Jacobian product for the input and the parameters.
    pub full_vjp: u64,
}

/// Times of everything that is not a layer, in picoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// Adding two states, per KiB of the result.
    pub add_per_kib: u64,
    /// Starting to send or receive a message: the rank's own time.
    pub message: u64,
    /// Time from the sending of an empty message to its arrival.
    pub latency: u64,
    /// Additional time per KiB of a message.
    pub wire_per_kib: u64,
    /// Time from the last rank's posting of a norm until the norm is known.
    pub norm: u64,
}

/// The costs of a net.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Costs {
    /// Times of each layer.
    pub layers: Vec<LayerTimes>,
    /// Bytes of a state at each point.
    pub state: Vec<Bytes>,
    /// The share of these costs on each coarser mesh of states. Meshes beyond the list cost as much as the finest.
    pub shares: Vec<Share>,
    /// Times of everything else.
    pub rates: Rates,
}

/// A coarser mesh's share of the finest mesh's costs, in thousandths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Share of the bytes of a state.
    pub bytes: u64,
    /// Share of the time of a layer.
    pub time: u64,
}

/// An operation that takes time, with its begin and end in picoseconds from the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Activity {
    /// The operation, by its position in the list.
    pub op: usize,
    /// When the operation began. Before, the rank waited for operands.
    pub begin: u64,
    /// When the operation ended.
    pub end: u64,
}

/// The times of all operations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Time until the last rank has finished, in picoseconds.
    pub total: u64,
    /// The activities of each rank.
    pub ranks: Vec<Vec<Activity>>,
}

impl Costs {
    fn of(&self, plan: &Plan, op: &Op) -> u64 {
        let kib = |value, rate| self.bytes(plan, value) * rate / 1024;
        match *op {
            Op::Eval { pass, layer, span, src, is_final, .. } => {
                let times = &self.layers[layer as usize];
                let mesh = plan.meshes[src as usize];
                let time = match (pass, is_final) {
                    (Pass::Forward, false) => times.plain,
                    (Pass::Forward, true) => times.recorded,
                    // A coarse step, or a step on coarser states, is recorded first.
                    (Pass::Adjoint, false) if span > 1 || mesh > 0 => times.recorded + times.input_vjp,
                    (Pass::Adjoint, false) => times.input_vjp,
                    (Pass::Adjoint, true) => times.full_vjp,
                };
                self.share(mesh).map_or(time, |share| time * share.time / 1000)
            }
            Op::Advance { dst, .. } | Op::Stretch { dst, .. } | Op::Add { dst, .. } | Op::Subtract { dst, .. } => {
                kib(dst, self.rates.add_per_kib)
            }
            Op::Coarsen { src, .. } => kib(src, self.rates.add_per_kib),
            Op::Refine { dst, .. } => kib(dst, self.rates.add_per_kib),
            Op::SquareNorm { a, .. } => kib(a, self.rates.add_per_kib),
            Op::Send { .. } | Op::Recv { .. } => self.rates.message,
            Op::Phase(_)
            | Op::PostNorm { .. }
            | Op::AwaitNorm { .. }
            | Op::Loss { .. }
            | Op::Free { .. }
            | Op::Forget { .. } => 0,
        }
    }

    fn way(&self, plan: &Plan, value: Value) -> u64 {
        self.rates.latency + self.bytes(plan, value) * self.rates.wire_per_kib / 1024
    }

    fn bytes(&self, plan: &Plan, value: Value) -> u64 {
        let whole = self.state[plan.points[value as usize] as usize].0;
        self.share(plan.meshes[value as usize]).map_or(whole, |share| whole * share.bytes / 1000)
    }

    fn share(&self, mesh: u32) -> Option<&Share> {
        self.shares.get(mesh.checked_sub(1)? as usize)
    }
}

/// Computes when each operation of a checked plan begins and ends. A message is sent at once, as if its receive was
/// already posted. Operations that read the message wait for its arrival.
///
/// # Panics
/// If the checker refuses the plan, or if `costs` has fewer layers or points than the plan.
pub fn predict_times(plan: &Plan, costs: &Costs) -> Timing {
    let ranks = plan.ranks.len();
    let mut at = vec![0; ranks];
    let mut clocks = vec![0_u64; ranks];
    let mut activities: Vec<Vec<Activity>> = vec![Vec::new(); ranks];
    // When each sent value arrives at its receiver.
    let mut arrivals: HashMap<(Value, Rank), u64> = HashMap::new();
    // Values whose receive a rank has begun.
    let mut pending: Vec<HashSet<Value>> = vec![HashSet::new(); ranks];
    let mut norms: HashMap<u32, (usize, u64)> = HashMap::new();
    loop {
        let mut has_moved = false;
        for rank in 0..ranks {
            let me = Rank(rank as u32);
            'list: while let Some(op) = plan.ranks[rank].get(at[rank]) {
                let mut ready = clocks[rank];
                for value in op.reads().filter(|value| pending[rank].contains(value)) {
                    let Some(&arrival) = arrivals.get(&(value, me)) else { break 'list };
                    ready = ready.max(arrival);
                }
                match *op {
                    Op::AwaitNorm { iteration } => match norms.get(&iteration) {
                        Some(&(posted, last)) if posted == ranks => ready = ready.max(last + costs.rates.norm),
                        _ => break 'list,
                    },
                    Op::PostNorm { iteration } => {
                        let (posted, last) = norms.entry(iteration).or_default();
                        *posted += 1;
                        *last = (*last).max(ready);
                    }
                    Op::Recv { value, .. } => {
                        pending[rank].insert(value);
                    }
                    _ => {}
                }
                let took = costs.of(plan, op);
                clocks[rank] = ready + took;
                if took > 0 {
                    activities[rank].push(Activity { op: at[rank], begin: ready, end: clocks[rank] });
                }
                if let Op::Send { to, value, .. } = *op {
                    arrivals.insert((value, to), clocks[rank] + costs.way(plan, value));
                }
                at[rank] += 1;
                has_moved = true;
            }
        }
        if !has_moved {
            assert!((0..ranks).all(|rank| at[rank] == plan.ranks[rank].len()), "a checked plan completes");
            break;
        }
    }
    let outcomes = plan.outputs.iter().chain(&plan.states);
    let arrived = outcomes.filter_map(|&(rank, value)| arrivals.get(&(value, rank)).copied());
    Timing { total: clocks.into_iter().chain(arrived).max().unwrap_or(0), ranks: activities }
}
