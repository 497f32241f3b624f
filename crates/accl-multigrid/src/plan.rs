//! The operations of ranks, as lists.
//!
//! Owns the instruction set and the data of a plan. A value is made once, by one rank, and keeps its number on ranks to
//! which it is sent. Values never change. Read [`Op`] first.

use accl_types::Rank;

/// Number of a value in its plan: a state or the increment of a state.
pub type Value = u32;

/// The direction of a pass through the layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pass {
    /// Evaluates the layers from the first to the last.
    Forward,
    /// Computes the layers' vector-Jacobian products from the last to the first.
    Adjoint,
}

/// The part of a solve that operations belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PhaseKind {
    /// F-relaxation: from every C-point up to the next one, which does not change.
    FRelax,
    /// C-relaxation: from every C-point to the next one, which changes too.
    CRelax,
    /// The residual at C-points, and the problem of the coarser level.
    Restrict,
    /// The sequential solve of the coarsest level.
    CoarsestSolve,
    /// The final sweep, which evaluates every layer finally.
    Final,
    /// The layers of a rank, one after the other, in a pipeline.
    Chunk,
    /// The loss of an output.
    Loss,
}

/// The position in a solve, for progress reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Phase {
    /// The part.
    pub kind: PhaseKind,
    /// The level; 0 in a pipeline.
    pub level: u32,
    /// The iteration from 0; in a pipeline, the micro-batch.
    pub iteration: u32,
}

/// One operation of a rank. A rank executes its list in order. An operation that reads a value waits for its receive. A
/// receive is placed where all lists could meet even if a send completes only with its receive. It may be posted
/// earlier, if the order for each pair of ranks and pass stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the sentence of an operation names its fields")]
pub enum Op {
    /// The following operations belong to this phase.
    Phase(Phase),
    /// Evaluates a layer at `src`. The kind's [rule](crate::Kind::rule) says what the layer computes.
    ///
    /// Forward: the increment f(src) for [`Advance`](crate::StepRule::Advance), otherwise the next state. For
    /// [`EvalSpan`](crate::StepRule::EvalSpan) the step covers `span` fine steps.
    ///
    /// Adjoint: the vector-Jacobian product at the state of the layer's final evaluation. It is the product of f for
    /// [`Advance`](crate::StepRule::Advance), otherwise of the whole step. For
    /// [`EvalSpan`](crate::StepRule::EvalSpan) the step covers `span` fine steps.
    Eval {
        pass: Pass,
        layer: u32,
        /// Number of fine steps, if the layer takes the length of a step; otherwise 1.
        span: u32,
        /// The micro-batch of a pipeline; otherwise 0.
        micro_batch: u32,
        src: Value,
        dst: Value,
        /// Whether this is the final evaluation. It is recorded; in the adjoint pass it also computes the gradients of
        /// parameters.
        is_final: bool,
    },
    /// `dst = src + span * dt * increment`.
    Advance { span: u32, src: Value, increment: Value, dst: Value },
    /// `dst = src + span * (stepped - src)`: a coarse step made from a fine one.
    Stretch { span: u32, src: Value, stepped: Value, dst: Value },
    /// `dst` is `src` on the next coarser mesh of states.
    Coarsen { src: Value, dst: Value },
    /// `dst` is `src` on the next finer mesh.
    Refine { src: Value, dst: Value },
    /// `dst = a + b`.
    Add { a: Value, b: Value, dst: Value },
    /// `dst = a - b`.
    Subtract { a: Value, b: Value, dst: Value },
    /// Computes the squared norm of `a - b` for an interval of the finest level, in double precision.
    SquareNorm { interval: u32, a: Value, b: Value },
    /// Sends the squares of an iteration to all ranks, which add them in the order of intervals.
    PostNorm { iteration: u32 },
    /// Waits until the norm of an iteration is known.
    AwaitNorm { iteration: u32 },
    /// Computes the loss of an output; `dst` is the gradient of the loss.
    Loss { micro_batch: u32, src: Value, dst: Value },
    /// Sends the value to a rank, without waiting for completion.
    Send { pass: Pass, to: Rank, value: Value },
    /// Receives the value from a rank, without waiting for it.
    Recv { pass: Pass, from: Rank, value: Value },
    /// Releases the value. The caller that executes the list keeps its memory until its sends have completed.
    Free { value: Value },
    /// Releases what a layer's final evaluation has stored for its adjoint. Plans without a final sweep do not contain
    /// it.
    Forget { layer: u32, micro_batch: u32 },
}

impl Op {
    /// The values that the operation reads.
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

    /// The value that the operation makes or receives on its rank, or `None`.
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
    /// The list of each rank.
    pub ranks: Vec<Vec<Op>>,
    /// The point of the finest level that each value is a state of; it determines the value's shape.
    pub points: Vec<u32>,
    /// The mesh of each value: how often its state has been made coarser. On coarser meshes there are no final
    /// evaluations. Adjoints there use the state of the final evaluation, made coarser.
    pub meshes: Vec<u32>,
    /// The values from outside, with the ranks that get them: one input per micro-batch, or the gradient of the output.
    pub inputs: Vec<(Rank, Value)>,
    /// The values of a guess, with their ranks: for the C-points of the finest level after the first point of the pass.
    pub guesses: Vec<(Rank, Value)>,
    /// The values that remain at the end: one output per micro-batch, or the gradient of the input.
    pub outputs: Vec<(Rank, Value)>,
    /// The final values of the C-points if there is no final sweep, in the order of [`Plan::guesses`].
    pub states: Vec<(Rank, Value)>,
    /// The iterations that have a norm.
    pub norms: Vec<u32>,
    /// Number of intervals, whose squares add up to a norm.
    pub intervals: u32,
    /// Number of layers.
    pub layers: u32,
    /// Number of micro-batches.
    pub micro_batches: u32,
    /// The passes that the plan contains.
    pub passes: Vec<Pass>,
    /// Whether each layer has its final evaluation in these passes.
    pub is_final: bool,
}
