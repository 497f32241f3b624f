//! The checker of plans: proves that the lists of all ranks fit together.
//!
//! It proves that sends match receives in order for each pair of ranks and pass, without tags; that nothing waits in a circle when one thread
//! walks each list, even if a send ends only where it is received and nothing is received ahead; that every value is made once, is read only while
//! it is there, and is given up once; that each layer is evaluated for good once for each micro-batch, always by the same rank; and that all ranks
//! take part in every norm. What the values are is not its matter. Read [`check`] first.

use std::collections::{HashMap, HashSet};
use std::fmt;

use accl_types::Rank;

use crate::plan::{Op, Pass, Plan, Value};

/// What is wrong with a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation(String);

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Violation {}

/// What was counted on the way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Messages of all ranks.
    pub messages: u64,
    /// Evaluations of layers, of all ranks.
    pub evaluations: u64,
}

/// Checks the lists of all ranks.
///
/// # Errors
/// The first thing found wrong.
pub fn check(plan: &Plan) -> Result<Report, Violation> {
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
            return violation(format!("value {value} comes from outside twice"));
        }
    }
    let outside = makers.clone();
    for (rank, list) in lists(plan) {
        let mut live: HashSet<Value> = outside.iter().filter(|&(_, &on)| on == rank).map(|(&value, _)| value).collect();
        let mut gone = HashSet::new();
        for (at, op) in list.iter().enumerate() {
            if let Some(value) = op.reads().find(|value| !live.contains(value)) {
                let why = if gone.contains(&value) { "given up before" } else { "not there" };
                return violation(format!("rank {rank} reads value {value} in operation {at}, which is {why}: {op:?}"));
            }
            if let Some(value) = op.makes() {
                if !live.insert(value) || gone.contains(&value) {
                    return violation(format!("rank {rank} makes value {value} a second time in operation {at}"));
                }
                if value as usize >= plan.points.len() {
                    return violation(format!("value {value} of rank {rank} has no shape"));
                }
                if !matches!(op, Op::Recv { .. }) && makers.insert(value, rank).is_some() {
                    return violation(format!("rank {rank} makes value {value}, which another one makes"));
                }
            }
            if let Op::Free { value } = op {
                if !live.remove(value) {
                    return violation(format!("rank {rank} gives up value {value}, which it does not have"));
                }
                gone.insert(*value);
            }
        }
        let kept: HashSet<Value> =
            plan.outputs.iter().chain(&plan.states).filter(|&&(on, _)| on == rank).map(|&(_, value)| value).collect();
        if let Some(value) = live.symmetric_difference(&kept).min() {
            let what = if kept.contains(value) { "does not have at the end" } else { "never gives up" };
            return violation(format!("rank {rank} {what} value {value}"));
        }
    }
    Ok(())
}

fn check_finals(plan: &Plan) -> Result<(), Violation> {
    let mut owners: HashMap<u32, Rank> = HashMap::new();
    let mut counts: HashMap<(Pass, u32, u32), u32> = HashMap::new();
    for (rank, list) in lists(plan) {
        for op in list {
            let &Op::Eval { pass, layer, micro_batch, is_final, .. } = op else { continue };
            if *owners.entry(layer).or_insert(rank) != rank {
                return violation(format!("layer {layer} is evaluated by rank {rank} and another one"));
            }
            if is_final {
                *counts.entry((pass, layer, micro_batch)).or_default() += 1;
            }
        }
    }
    let wanted = plan.finals.iter().flat_map(|&pass| {
        (0..plan.layers).flat_map(move |layer| (0..plan.micro_batches).map(move |micro| (pass, layer, micro)))
    });
    for key in wanted {
        match counts.remove(&key) {
            Some(1) => {}
            found => {
                let (pass, layer, micro) = key;
                let times = found.unwrap_or(0);
                return violation(format!(
                    "layer {layer} is evaluated for good {times} times in the {pass:?} pass of micro-batch {micro}"
                ));
            }
        }
    }
    match counts.keys().min() {
        Some((pass, layer, _)) => {
            violation(format!("layer {layer} is evaluated for good in a {pass:?} pass that has no such"))
        }
        None => Ok(()),
    }
}

/// All ranks post the same norms in the same order and await each, and each interval is in each once.
fn check_norms(plan: &Plan) -> Result<(), Violation> {
    let mut intervals: HashMap<u32, Vec<u32>> = HashMap::new();
    let mut first: Option<Vec<u32>> = None;
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
            return violation(format!("rank {rank} has squares or norms that nobody waits for"));
        }
        if *first.get_or_insert_with(|| posted.clone()) != posted {
            return violation(format!("rank {rank} posts other norms than rank 0"));
        }
    }
    for (iteration, mut found) in intervals {
        found.sort_unstable();
        if !found.iter().copied().eq(0..plan.intervals) {
            return violation(format!("the norm of iteration {iteration} is not of all intervals, each once"));
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
                "what rank {from} sends to rank {to} is not what that expects, in the {pass:?} pass"
            ));
        }
    }
    match received.keys().next() {
        Some((_, from, to)) => violation(format!("rank {to} expects of rank {from} what that never sends")),
        None => Ok(()),
    }
}

/// Walks all lists at once, where a send and its receive happen together or not at all.
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
                    // Its sender brings it on.
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
