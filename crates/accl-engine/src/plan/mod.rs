//! Plans: what is the same for all calls of one shape, worked out once and kept.

pub(crate) mod build;
pub(crate) mod cache;
pub(crate) mod encoded;
pub(crate) mod op;
pub(crate) mod region;
pub(crate) mod shape;
pub(crate) mod signature;

pub(crate) use build::Plan;
pub(crate) use cache::{Planner, Plans};
pub(crate) use encoded::{Coded, Combination, Operand};
pub(crate) use op::{ExternalStep, PlanOp, PlanOpKind};
pub(crate) use region::Region;
pub(crate) use shape::{AllShapes, Draft, Shape, Shapes};
