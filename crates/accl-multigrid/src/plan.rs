//! What ranks do, as lists of operations.
//!
//! Owns the instruction set and what goes with a plan. A value is made once, by one rank, and has the same number where it was sent to;
//! nothing is ever changed. Read [`Op`] first.

use accl_types::Rank;

/// A state, or the increment of one, by its number in the plan.
pub type Value = u32;

/// What a pass through the layers computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pass {
    /// The layers from the first to the last.
    Forward,
    /// Their vector-Jacobian products from the last to the first.
    Adjoint,
}

/// What part of a solve an operation belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PhaseKind {
    /// From every C-point to the next, without changing that.
    FRelax,
    /// The same, and the C-points, too.
    CRelax,
    /// The residual at C-points, and what the coarser level is to solve.
    Restrict,
    /// The coarsest level, one step after the other.
    March,
    /// Every layer for good.
    Final,
    /// The layers of a rank, one after the other, in a pipeline.
    Chunk,
    /// The loss of what came out.
    Loss,
}

/// Where in a solve an operation is, for who is told of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Phase {
    /// The part.
    pub kind: PhaseKind,
    /// Of a pipeline 0.
    pub level: u32,
    /// From 0; in a pipeline the micro-batch.
    pub iteration: u32,
}

/// One thing that a rank does. A rank does its list in order. What it does with values that are to be received waits for them. A receive stands where
/// all lists could meet even if a message left only when it is received; it may be posted earlier, as long as the order for each pair of ranks and pass is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the sentence of an operation names its fields")]
pub enum Op {
    /// What follows belongs there.
    Phase(Phase),
    /// Evaluates a layer at `src`. Forward: an increment f(src) of [`Kind::Increment`](crate::Kind::Increment), and the next state of others, over
    /// so many fine steps at once of [`Kind::Timed`](crate::Kind::Timed) and [`Kind::Custom`](crate::Kind::Custom). Adjoint: the vector-Jacobian product of the
    /// layer, at the state at which it was evaluated for good: of an increment's function f, and of the whole step of others, over so many fine steps
    /// at once of [`Kind::Custom`](crate::Kind::Custom).
    Eval {
        pass: Pass,
        layer: u32,
        /// How many fine steps it goes, where the layer takes the length of a step; 1 otherwise.
        span: u32,
        /// Of a pipeline; 0 otherwise.
        micro_batch: u32,
        src: Value,
        dst: Value,
        /// This is the evaluation that counts: it is recorded; in the adjoint pass it has the gradients of parameters, too.
        is_final: bool,
    },
    /// `dst = src + span * dt * increment`.
    Advance { span: u32, src: Value, increment: Value, dst: Value },
    /// `dst = src + span * (stepped - src)`: a coarse step by a fine one.
    Stretch { span: u32, src: Value, stepped: Value, dst: Value },
    /// `dst` is `src` on the next coarser mesh of states.
    Coarsen { src: Value, dst: Value },
    /// `dst` is `src` on the next finer mesh.
    Refine { src: Value, dst: Value },
    /// `dst = a + b`.
    Add { a: Value, b: Value, dst: Value },
    /// `dst = a - b`.
    Subtract { a: Value, b: Value, dst: Value },
    /// The square of the norm of `a - b`, for an interval of the finest level, in double precision.
    SquareNorm { interval: u32, a: Value, b: Value },
    /// The squares of an iteration go to all ranks, which add them up in the order of intervals.
    PostNorm { iteration: u32 },
    /// The norm of an iteration is known after this.
    AwaitNorm { iteration: u32 },
    /// Of an output: its loss, and `dst`, the gradient of that.
    Loss { micro_batch: u32, src: Value, dst: Value },
    /// The value leaves for a rank. It does not wait for that.
    Send { pass: Pass, to: Rank, value: Value },
    /// The value will come from a rank.
    Recv { pass: Pass, from: Rank, value: Value },
    /// The value is not needed any more; whoever walks the list keeps it until what was sent of it has left.
    Free { value: Value },
    /// What evaluating a layer for good has left for its adjoint is not needed any more. No plan without a final sweep has it.
    Forget { layer: u32, micro_batch: u32 },
}

impl Op {
    /// The values that it reads.
    pub fn reads(&self) -> impl Iterator<Item = Value> {
        let read = match *self {
            Self::Eval { src, .. } | Self::Coarsen { src, .. } | Self::Refine { src, .. } | Self::Loss { src, .. } => {
                [Some(src), None]
            }
            Self::Advance { src, increment, .. } => [Some(src), Some(increment)],
            Self::Stretch { src, stepped, .. } => [Some(src), Some(stepped)],
            Self::Add { a, b, .. } | Self::Subtract { a, b, .. } | Self::SquareNorm { a, b, .. } => [Some(a), Some(b)],
            Self::Send { value, .. } => [Some(value), None],
            Self::Phase(_)
            | Self::PostNorm { .. }
            | Self::AwaitNorm { .. }
            | Self::Recv { .. }
            | Self::Free { .. }
            | Self::Forget { .. } => [None, None],
        };
        read.into_iter().flatten()
    }

    /// The value that it makes on its rank, or will have received.
    pub fn makes(&self) -> Option<Value> {
        match *self {
            Self::Eval { dst, .. }
            | Self::Advance { dst, .. }
            | Self::Stretch { dst, .. }
            | Self::Coarsen { dst, .. }
            | Self::Refine { dst, .. }
            | Self::Add { dst, .. }
            | Self::Subtract { dst, .. }
            | Self::Loss { dst, .. } => Some(dst),
            Self::Recv { value, .. } => Some(value),
            Self::Phase(_)
            | Self::SquareNorm { .. }
            | Self::PostNorm { .. }
            | Self::AwaitNorm { .. }
            | Self::Send { .. }
            | Self::Free { .. }
            | Self::Forget { .. } => None,
        }
    }
}

/// The lists of all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Of each rank.
    pub ranks: Vec<Vec<Op>>,
    /// Where each value has its shape from: the point of the finest level that it is a state of.
    pub points: Vec<u32>,
    /// On which mesh of states each value is: how often it has been made coarser. On coarser ones layers are evaluated for now alone, and their adjoints at
    /// the state at which they were evaluated for good, made coarser.
    pub meshes: Vec<u32>,
    /// What comes from outside, with the rank that has it: the input, one for each micro-batch, or the gradient of the output.
    pub inputs: Vec<(Rank, Value)>,
    /// What a guess gives, by the C-points of the finest level after the first point of the pass, each where it belongs.
    pub guesses: Vec<(Rank, Value)>,
    /// What is there at the end, and is not freed: the output, one for each micro-batch, or the gradient of the input.
    pub outputs: Vec<(Rank, Value)>,
    /// What C-points have at the end where there is no final sweep, as [`Plan::guesses`].
    pub states: Vec<(Rank, Value)>,
    /// The iterations that have a norm.
    pub norms: Vec<u32>,
    /// Number of intervals, whose squares make it.
    pub intervals: u32,
    /// Number of layers, and of micro-batches in which each is evaluated.
    pub layers: u32,
    /// Number of micro-batches.
    pub micro_batches: u32,
    /// The passes that the plan makes.
    pub passes: Vec<Pass>,
    /// Whether each layer is evaluated for good in them.
    pub is_final: bool,
}
