//! The builders of plans.
//!
//! Owns how operations get into the lists. A value that another rank reads is sent and received as soon as that need is
//! found. So all ranks together can run their lists one operation after the other, each send together with its receive.
//! A value computed before on the same rank is not computed again.
//! Read [`Builder`] first; the plans themselves are in `mgrit` and `pipeline`.

mod mgrit;
mod pipeline;

use std::collections::{HashMap, HashSet};

use accl_types::Rank;

use crate::cycle::Reuse;
use crate::kind::StepRule;
use crate::line::LineStep;
use crate::plan::{Op, Pass, Phase, Plan, Value};

pub use mgrit::mgrit;
pub use pipeline::{Schedule, pipeline};

/// The state that a value is: at a point, on a mesh.
#[derive(Clone, Copy)]
struct Spot {
    point: u32,
    mesh: u32,
}

/// A computation and its operands.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Expression {
    Eval { pass: Pass, layer: u32, span: u32, src: Value },
    Advance { span: u32, src: Value, increment: Value },
    Stretch { span: u32, src: Value, stepped: Value },
    Coarsen { src: Value },
    Refine { src: Value },
    Add { a: Value, b: Value },
    Subtract { a: Value, b: Value },
}

/// The lists under construction.
struct Builder {
    ranks: Vec<Vec<Op>>,
    /// The state that each value is, and the rank that makes it.
    values: Vec<(Spot, Rank)>,
    /// The ranks that values have been sent to.
    copies: HashSet<(Value, Rank)>,
    known: HashMap<Expression, Value>,
    /// The rank and list position of the operation that evaluates a value.
    evals: HashMap<Value, (Rank, usize)>,
    reuse: Reuse,
    /// The micro-batch of the next evaluations.
    micro_batch: u32,
    phase: Option<Phase>,
    /// The phase that each rank's list is in.
    phases: Vec<Option<Phase>>,
}

impl Builder {
    fn new(ranks: u32, reuse: Reuse) -> Self {
        Self {
            ranks: vec![Vec::new(); ranks as usize],
            values: Vec::new(),
            copies: HashSet::new(),
            known: HashMap::new(),
            evals: HashMap::new(),
            reuse,
            micro_batch: 0,
            phase: None,
            phases: vec![None; ranks as usize],
        }
    }

    /// Adds a value that a rank makes or receives from outside.
    fn value(&mut self, spot: Spot, on: Rank) -> Value {
        self.values.push((spot, on));
        self.values.len() as Value - 1
    }

    fn emit(&mut self, on: Rank, op: Op) -> usize {
        let list = &mut self.ranks[on.index()];
        if self.phases[on.index()] != self.phase
            && let Some(phase) = self.phase
        {
            list.push(Op::Phase(phase));
            self.phases[on.index()] = self.phase;
        }
        list.push(op);
        list.len() - 1
    }

    /// Sends a value to a rank, unless the rank has it.
    fn need(&mut self, pass: Pass, value: Value, on: Rank) {
        let (_, maker) = self.values[value as usize];
        if maker != on && self.copies.insert((value, on)) {
            self.emit(maker, Op::Send { pass, to: on, value });
            self.emit(on, Op::Recv { pass, from: maker, value });
        }
    }

    /// Returns the value of an expression. If it is not known, this rank computes it.
    fn make(
        &mut self,
        expression: Expression,
        pass: Pass,
        spot: Spot,
        on: Rank,
        op: impl FnOnce(Value) -> Op,
    ) -> Value {
        if self.reuse != Reuse::Nothing
            && let Some(&value) = self.known.get(&expression)
        {
            return value;
        }
        let dst = self.value(spot, on);
        let op = op(dst);
        for src in op.reads() {
            self.need(pass, src, on);
        }
        let at = self.emit(on, op);
        if matches!(op, Op::Eval { .. }) {
            self.evals.insert(dst, (on, at));
        }
        self.known.insert(expression, dst);
        dst
    }

    /// Evaluates a layer. If a final evaluation was requested and the value is known from a non-final one, that one
    /// becomes final or a second one is added.
    fn eval(
        &mut self,
        pass: Pass,
        (layer, span, on): (u32, u32, Rank),
        spot: Spot,
        src: Value,
        is_final: bool,
    ) -> Value {
        let expression = Expression::Eval { pass, layer, span, src };
        let micro_batch = self.micro_batch;
        let value = self.make(expression, pass, spot, on, |dst| Op::Eval {
            pass,
            layer,
            span,
            micro_batch,
            src,
            dst,
            is_final,
        });
        if is_final && let Some(&(on, at)) = self.evals.get(&value) {
            let Op::Eval { is_final, .. } = &mut self.ranks[on.index()][at] else {
                unreachable!("the recorded position has an evaluation")
            };
            if !*is_final && self.reuse == Reuse::Values {
                // The result is the earlier evaluation's, bit for bit, and is not read.
                let dst = self.value(spot, on);
                self.need(pass, src, on);
                self.emit(on, Op::Eval { pass, layer, span, micro_batch, src, dst, is_final: true });
            } else {
                *is_final = true;
            }
        }
        value
    }

    /// One step from `src` to a point, on the rank that has its layer.
    fn step(&mut self, pass: Pass, step: &LineStep, point: u32, src: Value, is_final: bool) -> Value {
        let &LineStep { layer, span, kind, evaluator: on } = step;
        let mesh = self.values[src as usize].0.mesh;
        let spot = Spot { point, mesh };
        match kind.rule(pass) {
            StepRule::Whole => {
                // A layer that is not a step of an equation sees states on the finest mesh.
                let fine = (0..mesh).fold(src, |value, _| self.refine(pass, on, value));
                let made = self.eval(pass, (layer, 1, on), Spot { point, mesh: 0 }, fine, is_final);
                (0..mesh).fold(made, |value, _| self.coarsen(pass, on, value))
            }
            StepRule::EvalSpan => self.eval(pass, (layer, span, on), spot, src, is_final),
            StepRule::Stretch => {
                let stepped = self.eval(pass, (layer, 1, on), spot, src, is_final);
                if span == 1 {
                    return stepped;
                }
                let expression = Expression::Stretch { span, src, stepped };
                self.make(expression, pass, spot, on, |dst| Op::Stretch { span, src, stepped, dst })
            }
            StepRule::Advance => {
                let increment = self.eval(pass, (layer, 1, on), spot, src, is_final);
                let expression = Expression::Advance { span, src, increment };
                self.make(expression, pass, spot, on, |dst| Op::Advance { span, src, increment, dst })
            }
        }
    }

    /// The value on the next coarser mesh, computed by rank `on`.
    fn coarsen(&mut self, pass: Pass, on: Rank, src: Value) -> Value {
        let Spot { point, mesh } = self.values[src as usize].0;
        let spot = Spot { point, mesh: mesh + 1 };
        self.make(Expression::Coarsen { src }, pass, spot, on, |dst| Op::Coarsen { src, dst })
    }

    /// The value on the next finer mesh, computed by rank `on`.
    fn refine(&mut self, pass: Pass, on: Rank, src: Value) -> Value {
        let Spot { point, mesh } = self.values[src as usize].0;
        let spot = Spot { point, mesh: mesh - 1 };
        self.make(Expression::Refine { src }, pass, spot, on, |dst| Op::Refine { src, dst })
    }

    fn add(&mut self, pass: Pass, on: Rank, a: Value, b: Value) -> Value {
        let spot = self.values[a as usize].0;
        self.make(Expression::Add { a, b }, pass, spot, on, |dst| Op::Add { a, b, dst })
    }

    fn subtract(&mut self, pass: Pass, on: Rank, a: Value, b: Value) -> Value {
        let spot = self.values[a as usize].0;
        self.make(Expression::Subtract { a, b }, pass, spot, on, |dst| Op::Subtract { a, b, dst })
    }

    /// The finished plan, with operations that free values after their last use.
    fn finish(self, plan: Plan) -> Plan {
        let points = self.values.iter().map(|&(spot, _)| spot.point).collect();
        let meshes = self.values.iter().map(|&(spot, _)| spot.mesh).collect();
        let mut plan = Plan { ranks: self.ranks, points, meshes, ..plan };
        if self.reuse != Reuse::Nothing {
            leave_out_unread(&mut plan);
        }
        let kept: HashSet<(Rank, Value)> = plan.outputs.iter().chain(&plan.states).copied().collect();
        for (rank, list) in (0..).map(Rank).zip(&mut plan.ranks) {
            *list = freed(std::mem::take(list), plan.is_final, |value| kept.contains(&(rank, value)));
            let mut read: HashSet<Value> = list.iter().flat_map(Op::reads).collect();
            // A value from outside that is never read is also freed.
            let given = plan.inputs.iter().chain(&plan.guesses).filter(|&&(on, _)| on == rank);
            let unread: Vec<Op> = given
                .filter(|&&key| !kept.contains(&key) && read.insert(key.1))
                .map(|&(_, value)| Op::Free { value })
                .collect();
            list.splice(0..0, unread);
        }
        plan
    }
}

/// Removes operations whose results are never read, such as the last coarse point of the last coarsest-level solve.
fn leave_out_unread(plan: &mut Plan) {
    let kept = plan.outputs.iter().chain(&plan.states).copied();
    let mut reads: HashMap<Value, Vec<Value>> = HashMap::new();
    let mut open: Vec<Value> = kept.clone().map(|(_, value)| value).collect();
    for op in plan.ranks.iter().flatten() {
        match *op {
            Op::Send { .. } | Op::Recv { .. } => {}
            Op::Eval { is_final: true, .. } | Op::SquareNorm { .. } | Op::Loss { .. } => open.extend(op.reads()),
            _ => {}
        }
        if let (Some(value), false) = (op.makes(), matches!(op, Op::Recv { .. })) {
            reads.insert(value, op.reads().collect());
        }
    }
    let mut needed = HashSet::new();
    while let Some(value) = open.pop() {
        if needed.insert(value) {
            open.extend(reads.get(&value).into_iter().flatten());
        }
    }
    let is_made_for_something = |op: &Op| match op {
        Op::Recv { .. } | Op::Eval { is_final: true, .. } | Op::Loss { .. } => true,
        _ => op.makes().is_none_or(|value| needed.contains(&value)),
    };
    // A received value may have no reader left on the receiving rank.
    let mut read_on: HashSet<(Rank, Value)> = kept.collect();
    for (rank, list) in (0..).map(Rank).zip(&plan.ranks) {
        let left = list.iter().filter(|op| is_made_for_something(op) && !matches!(op, Op::Send { .. }));
        read_on.extend(left.flat_map(Op::reads).map(|value| (rank, value)));
    }
    for (rank, list) in (0..).map(Rank).zip(&mut plan.ranks) {
        list.retain(|op| match *op {
            Op::Send { to, value, .. } => read_on.contains(&(to, value)),
            Op::Recv { value, .. } => read_on.contains(&(rank, value)),
            _ => is_made_for_something(op),
        });
    }
}

/// Adds `Op::Free` for every value that is not kept. It comes after the value's last use. For a sent value it comes at
/// the end of the next phase, when the send has usually completed. If the plan is final, also adds `Op::Forget` for
/// what each layer has stored for its adjoint.
fn freed(list: Vec<Op>, is_final: bool, is_kept: impl Fn(Value) -> bool) -> Vec<Op> {
    let mut last = HashMap::new();
    let mut sent = HashSet::new();
    for (at, op) in list.iter().enumerate() {
        op.reads().chain(op.makes()).for_each(|value| {
            last.insert(value, at);
        });
        if let Op::Send { value, .. } = op {
            sent.insert(*value);
        }
    }
    let phases: Vec<usize> =
        list.iter().enumerate().filter(|(_, op)| matches!(op, Op::Phase(_))).map(|(at, _)| at).collect();
    let mut ends: Vec<Vec<Value>> = vec![Vec::new(); list.len()];
    let mut uses: Vec<_> = last.into_iter().filter(|&(value, _)| !is_kept(value)).collect();
    uses.sort_unstable();
    for (value, at) in uses {
        let at = match sent.contains(&value) {
            // Before the phase after the next one begins.
            true => {
                phases.get(phases.partition_point(|&phase| phase <= at) + 1).map_or(list.len() - 1, |&phase| phase - 1)
            }
            false => at,
        };
        ends[at].push(value);
    }
    let mut forgotten = HashMap::new();
    for (at, op) in list.iter().enumerate() {
        if let (true, &Op::Eval { pass: Pass::Adjoint, layer, micro_batch, .. }) = (is_final, op) {
            forgotten.insert((layer, micro_batch), at);
        }
    }
    let forgotten: HashMap<usize, Op> =
        forgotten.into_iter().map(|((layer, micro_batch), at)| (at, Op::Forget { layer, micro_batch })).collect();
    let freed = |(at, (op, ends)): (usize, (Op, Vec<Value>))| {
        let forget = forgotten.get(&at).copied();
        [op].into_iter().chain(forget).chain(ends.into_iter().map(|value| Op::Free { value }))
    };
    list.into_iter().zip(ends).enumerate().flat_map(freed).collect()
}
