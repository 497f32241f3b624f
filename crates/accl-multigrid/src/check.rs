//! The checker of plans: proves that the lists of all ranks fit together.
//!
//! The checker does not look at the values. It proves that:
//! * Sends match receives in order for each pair of ranks and pass, without tags.
//! * No deadlock occurs when one thread executes each list, even if a send completes only with its receive and no
//!   receive is posted early.
//! * Every value is made once, is read only while it exists, and is freed once.
//! * Each layer has one final evaluation per micro-batch and pass, always on the same rank.
//! * All ranks take part in every norm.
//!
//! Read [`check`] first.

use std::collections::{HashMap, HashSet};
use std::fmt;

use accl_types::Rank;

use crate::plan::{Op, Pass, Plan, Value};

/// A defect of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation(String);

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Violation {}

/// Counts of a checked plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Messages of all ranks together.
    pub messages: u64,
    /// Evaluations of layers on all ranks together.
    pub evaluations: u64,
}

/// Checks the lists of all ranks.
///
/// # Errors
/// The first violation that is found.
pub fn check(plan: &Plan) -> Result<Report, Violation> {
    check_names(plan)?;
    check_values(plan)?;
    check_finals(plan)?;
    check_norms(plan)?;
    check_messages(plan)?;
    check_rendezvous(plan)?;
    let count = |is: fn(&Op) -> bool| plan.ranks.iter().flatten().filter(|op| is(op)).count() as u64;
    Ok(Report {
        messages: count(|op| matches!(op, Op::Send { .. })),
        evaluations: count(|op| matches!(op, Op::Eval { .. })),
    })
}

fn lists(plan: &Plan) -> impl Iterator<Item = (Rank, &[Op])> {
    (0..).map(Rank).zip(plan.ranks.iter().map(Vec::as_slice))
}

fn violation<T>(text: String) -> Result<T, Violation> {
    Err(Violation(text))
}

fn check_values(plan: &Plan) -> Result<(), Violation> {
    let mut makers: HashMap<Value, Rank> = HashMap::new();
    for &(rank, value) in plan.inputs.iter().chain(&plan.guesses) {
        if makers.insert(value, rank).is_some() {
            return violation(format!("value {value} is an input or a guess twice"));
        }
    }
    let outside = makers.clone();
    for (rank, list) in lists(plan) {
        let mut live: HashSet<Value> = outside.iter().filter(|&(_, &on)| on == rank).map(|(&value, _)| value).collect();
        let mut gone = HashSet::new();
        for (at, op) in list.iter().enumerate() {
            if let Some(value) = op.reads().find(|value| !live.contains(value)) {
                let why = if gone.contains(&value) { "already freed" } else { "not available" };
                return violation(format!(
                    "rank {rank} reads value {value}, which is {why}, in operation {at}: {op:?}"
                ));
            }
            if let Some(value) = op.makes() {
                if !live.insert(value) || gone.contains(&value) {
                    return violation(format!("rank {rank} makes value {value} a second time in operation {at}"));
                }
                if value as usize >= plan.points.len().min(plan.meshes.len()) {
                    return violation(format!("value {value} of rank {rank} has no shape"));
                }
                if !matches!(op, Op::Recv { .. }) && makers.insert(value, rank).is_some() {
                    return violation(format!("rank {rank} makes value {value}, which another rank also makes"));
                }
            }
            check_meshes(plan, rank, op)?;
            if let Op::Free { value } = op {
                if !live.remove(value) {
                    return violation(format!("rank {rank} frees value {value}, which it does not have"));
                }
                gone.insert(*value);
            }
        }
        let kept: HashSet<Value> =
            plan.outputs.iter().chain(&plan.states).filter(|&&(on, _)| on == rank).map(|&(_, value)| value).collect();
        if let Some(value) = live.symmetric_difference(&kept).min() {
            let what = if kept.contains(value) { "ends without" } else { "never frees" };
            return violation(format!("rank {rank} {what} value {value}"));
        }
    }
    Ok(())
}

/// Checks that operands and result are on one mesh, and that final evaluations are on the finest mesh.
fn check_meshes(plan: &Plan, rank: Rank, op: &Op) -> Result<(), Violation> {
    let mesh = |value: Value| plan.meshes[value as usize];
    let is_right = match *op {
        Op::Coarsen { src, dst } => mesh(dst) == mesh(src) + 1,
        Op::Refine { src, dst } => mesh(src) == mesh(dst) + 1,
        Op::Send { .. } | Op::Recv { .. } | Op::Free { .. } => true,
        Op::Eval { src, is_final: true, .. } if mesh(src) > 0 => false,
        _ => {
            let all: HashSet<u32> = op.reads().chain(op.makes()).map(mesh).collect();
            all.len() <= 1
        }
    };
    match is_right {
        true => Ok(()),
        false => violation(format!("rank {rank} combines states of different meshes: {op:?}")),
    }
}

/// Checks that everything that is named exists: ranks, layers, points, micro-batches, passes.
fn check_names(plan: &Plan) -> Result<(), Violation> {
    let ranks = plan.ranks.len();
    let sides = [&plan.inputs, &plan.guesses, &plan.outputs, &plan.states];
    for &(rank, value) in sides.into_iter().flatten() {
        if rank.index() >= ranks || value as usize >= plan.points.len() {
            return violation(format!(
                "value {value} of rank {rank} is an input or output, but the value or the rank does not exist"
            ));
        }
    }
    if let Some(point) = plan.points.iter().find(|&&point| point > plan.layers) {
        return violation(format!("a value has the shape of point {point}, but the net ends at point {}", plan.layers));
    }
    let outputs = if plan.is_final { plan.micro_batches } else { 0 };
    if [plan.inputs.len(), plan.outputs.len()] != [plan.micro_batches, outputs].map(|count| count as usize) {
        return violation(format!(
            "the numbers of inputs or outputs do not match {} micro-batches",
            plan.micro_batches
        ));
    }
    for (rank, list) in lists(plan) {
        for op in list {
            let is_known = match *op {
                Op::Eval { pass, layer, span, micro_batch, .. } => {
                    plan.passes.contains(&pass)
                        && layer < plan.layers
                        && (1..=plan.layers - layer).contains(&span)
                        && micro_batch < plan.micro_batches
                }
                Op::Forget { layer, micro_batch } => layer < plan.layers && micro_batch < plan.micro_batches,
                Op::Loss { micro_batch, .. } => micro_batch < plan.micro_batches && plan.passes.len() == 2,
                Op::Send { pass, .. } | Op::Recv { pass, .. } => plan.passes.contains(&pass),
                _ => true,
            };
            if !is_known {
                return violation(format!("rank {rank} refers to something that the plan does not have: {op:?}"));
            }
        }
    }
    Ok(())
}

/// Checks that each layer has one final evaluation per micro-batch and pass, all on its owner. The adjoint comes after
/// the evaluation. Then the layer is forgotten, unless another plan continues. Also checks that a computation uses
/// values of one micro-batch only.
fn check_finals(plan: &Plan) -> Result<(), Violation> {
    let mut owners: HashMap<u32, Rank> = HashMap::new();
    let mut counts: HashMap<(Pass, u32, u32), u32> = HashMap::new();
    let mut losses: HashMap<u32, u32> = HashMap::new();
    let (makes_forward, makes_adjoint) = (plan.passes.contains(&Pass::Forward), plan.passes.contains(&Pass::Adjoint));
    for (rank, list) in lists(plan) {
        let mut recorded: HashSet<(u32, u32)> = HashSet::new();
        let mut forgotten: HashSet<(u32, u32)> = HashSet::new();
        for op in list {
            match *op {
                Op::Eval { pass, layer, micro_batch, is_final, .. } => {
                    if *owners.entry(layer).or_insert(rank) != rank {
                        return violation(format!("layer {layer} is evaluated by rank {rank} and by another rank"));
                    }
                    let key = (layer, micro_batch);
                    if is_final {
                        *counts.entry((pass, layer, micro_batch)).or_default() += 1;
                    }
                    match pass {
                        Pass::Forward => {
                            if is_final {
                                recorded.insert(key);
                            }
                        }
                        Pass::Adjoint if makes_forward && !recorded.contains(&key) => {
                            return violation(format!(
                                "the adjoint of layer {layer} comes before its evaluation on rank {rank}"
                            ));
                        }
                        Pass::Adjoint if forgotten.contains(&key) => {
                            return violation(format!(
                                "the adjoint of layer {layer} comes after it was forgotten on rank {rank}"
                            ));
                        }
                        Pass::Adjoint => {}
                    }
                }
                Op::Forget { layer, micro_batch } if !forgotten.insert((layer, micro_batch)) => {
                    return violation(format!("layer {layer} is forgotten twice on rank {rank}"));
                }
                Op::Loss { micro_batch, .. } => *losses.entry(micro_batch).or_default() += 1,
                _ => {}
            }
        }
        let evaluated = list.iter().filter_map(|op| match *op {
            // If there is no final sweep, another plan continues and forgets the layers.
            Op::Eval { pass: Pass::Adjoint, layer, micro_batch, .. } if plan.is_final => Some((layer, micro_batch)),
            _ => None,
        });
        if evaluated.collect::<HashSet<_>>() != forgotten {
            return violation(format!("rank {rank} does not forget exactly the layers that it evaluated"));
        }
    }
    if makes_forward && makes_adjoint {
        for micro in 0..plan.micro_batches {
            if losses.get(&micro) != Some(&1) {
                return violation(format!("micro-batch {micro} has no loss or several losses"));
            }
        }
    }
    let passes = plan.passes.iter().filter(|_| plan.is_final);
    let wanted = passes.flat_map(|&pass| {
        (0..plan.layers).flat_map(move |layer| (0..plan.micro_batches).map(move |micro| (pass, layer, micro)))
    });
    for key in wanted {
        match counts.remove(&key) {
            Some(1) => {}
            found => {
                let (pass, layer, micro) = key;
                let times = found.unwrap_or(0);
                return violation(format!(
                    "layer {layer} has {times} final evaluations, expected 1, in pass {pass:?} of micro-batch {micro}"
                ));
            }
        }
    }
    if let Some((pass, layer, _)) = counts.keys().min() {
        return violation(format!("layer {layer} has an unexpected final evaluation in a {pass:?} pass"));
    }
    check_micro_batches(plan)
}

/// Checks that values of different micro-batches are never combined.
fn check_micro_batches(plan: &Plan) -> Result<(), Violation> {
    if plan.micro_batches == 1 {
        return Ok(());
    }
    let mut of: HashMap<Value, u32> = (0..).zip(&plan.inputs).map(|(micro, &(_, value))| (value, micro)).collect();
    let all = || plan.ranks.iter().flatten();
    for op in all() {
        if let Op::Eval { micro_batch, dst, .. } | Op::Loss { micro_batch, dst, .. } = *op {
            of.insert(dst, micro_batch);
        }
    }
    for op in all() {
        let micro = match *op {
            Op::Eval { micro_batch, .. } | Op::Loss { micro_batch, .. } => Some(micro_batch),
            Op::Advance { increment, .. } => of.get(&increment).copied(),
            _ => None,
        };
        let Some(micro) = micro else { continue };
        if let Some(dst) = op.makes() {
            of.insert(dst, micro);
        }
    }
    for op in all() {
        let micro = match *op {
            Op::Eval { micro_batch, .. } | Op::Loss { micro_batch, .. } => Some(micro_batch),
            _ => op.makes().and_then(|dst| of.get(&dst).copied()),
        };
        let other = op.reads().find(|value| of.get(value).copied() != micro);
        if let (Some(value), Some(micro), false) = (other, micro, matches!(op, Op::Send { .. })) {
            return violation(format!("micro-batch {micro} reads value {value} of another micro-batch: {op:?}"));
        }
    }
    let outputs = (0..).zip(&plan.outputs).find(|&(micro, &(_, value))| of.get(&value) != Some(&micro));
    match outputs {
        Some((micro, _)) => violation(format!("the output of micro-batch {micro} belongs to another micro-batch")),
        None => Ok(()),
    }
}

/// Checks that all ranks post the same norms in the same order and await each one, and that each norm has each interval
/// once.
fn check_norms(plan: &Plan) -> Result<(), Violation> {
    let mut intervals: HashMap<u32, Vec<u32>> = HashMap::new();
    for (rank, list) in lists(plan) {
        let (mut squares, mut posted, mut awaited) = (Vec::new(), Vec::new(), Vec::new());
        for op in list {
            match *op {
                Op::SquareNorm { interval, .. } => squares.push(interval),
                Op::PostNorm { iteration } => {
                    posted.push(iteration);
                    intervals.entry(iteration).or_default().append(&mut squares);
                }
                Op::AwaitNorm { iteration } => awaited.push(iteration),
                _ => {}
            }
        }
        if !squares.is_empty() || posted != awaited {
            return violation(format!("rank {rank} has squares or norms that it does not await"));
        }
        if posted != plan.norms {
            return violation(format!("rank {rank} posts norms that differ from the norms of the plan"));
        }
    }
    for (iteration, mut found) in intervals {
        found.sort_unstable();
        if !found.iter().copied().eq(0..plan.intervals) {
            return violation(format!("the norm of iteration {iteration} does not have each interval exactly once"));
        }
    }
    Ok(())
}

fn check_messages(plan: &Plan) -> Result<(), Violation> {
    let mut sent: HashMap<(Pass, Rank, Rank), Vec<Value>> = HashMap::new();
    let mut received = sent.clone();
    for (rank, list) in lists(plan) {
        for op in list {
            match *op {
                Op::Send { pass, to, value } => sent.entry((pass, rank, to)).or_default().push(value),
                Op::Recv { pass, from, value } => received.entry((pass, from, rank)).or_default().push(value),
                _ => {}
            }
        }
    }
    for (&(pass, from, to), values) in &sent {
        if from == to {
            return violation(format!("rank {from} sends to itself"));
        }
        if received.remove(&(pass, from, to)).as_ref() != Some(values) {
            return violation(format!(
                "the values that rank {from} sends differ from the values that rank {to} expects, in the {pass:?} pass"
            ));
        }
    }
    match received.keys().next() {
        Some((_, from, to)) => violation(format!("rank {to} expects values that rank {from} never sends")),
        None => Ok(()),
    }
}

/// Executes all lists at once; a send and its receive only happen together.
fn check_rendezvous(plan: &Plan) -> Result<(), Violation> {
    let mut at = vec![0; plan.ranks.len()];
    let mut posted: HashMap<u32, usize> = HashMap::new();
    let current = |at: &[usize], rank: Rank| plan.ranks.get(rank.index())?.get(at[rank.index()]).copied();
    loop {
        let mut has_moved = false;
        for (rank, list) in lists(plan) {
            while let Some(op) = list.get(at[rank.index()]) {
                match *op {
                    Op::Send { pass, to, value } => {
                        if current(&at, to) != Some(Op::Recv { pass, from: rank, value }) {
                            break;
                        }
                        at[to.index()] += 1;
                    }
                    // The matching send advances this list.
                    Op::Recv { .. } => break,
                    Op::PostNorm { iteration } => *posted.entry(iteration).or_default() += 1,
                    Op::AwaitNorm { iteration } if posted.get(&iteration) != Some(&plan.ranks.len()) => break,
                    _ => {}
                }
                at[rank.index()] += 1;
                has_moved = true;
            }
        }
        let waiting: Vec<_> = lists(plan).filter_map(|(rank, _)| Some((rank, current(&at, rank)?))).collect();
        if waiting.is_empty() {
            return Ok(());
        }
        if !has_moved {
            let each: Vec<_> = waiting.iter().map(|(rank, op)| format!("rank {rank} at {op:?}")).collect();
            return violation(format!("ranks wait for each other: {}", each.join(", ")));
        }
    }
}
