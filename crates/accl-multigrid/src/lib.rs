//! Layer-parallel training as data: a list of operations for each rank. Together the lists solve a net of layers by
//! multigrid in time, or run it as a pipeline.
//!
//! Owns the kinds of layers ([`Kind`]), the points of each level ([`Grid`]), the owner of each layer ([`Placement`]),
//! the cycle ([`Cycle`]) and the builders of plans ([`mgrit`], [`pipeline`]). Also owns the checker ([`check`]), the memory that values need
//! ([`memory`]) and the time that a plan takes ([`cost`]).
//! Knows no tensor, thread, clock, socket or environment: the caller that executes the lists computes the layers and
//! sends the states. Read [`Op`] first.
//!
//! The algorithm is the full approximation scheme of Brandt (1977) in time, as in Falgout et al., "Parallel time
//! integration with multigrid" (2014). Layers take the place of time steps, as in Günther et al., "Layer-parallel
//! training of deep residual neural networks" (2020).
#![forbid(unsafe_code)]

mod build;
pub mod check;
pub mod cost;
mod cycle;
mod grid;
mod kind;
mod line;
pub mod memory;
mod placement;
mod plan;

pub use build::{Schedule, mgrit, pipeline};
pub use cycle::{Cycle, Norms, Reuse, Shape, Start};
pub use grid::{Grid, Layer, Level, Step};
pub use kind::{Kind, StepRule};
pub use placement::Placement;
pub use plan::{Op, Pass, Phase, PhaseKind, Plan, Value};
