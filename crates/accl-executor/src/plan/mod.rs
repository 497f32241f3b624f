//! Plans: the data that all calls of one shape share, computed once and cached.

mod build;
mod cache;
mod encoded;
mod key;
mod op;
mod region;
pub(crate) mod shape;
pub(crate) mod signature;
mod staging;

pub(crate) use build::Plan;
pub use cache::Planner;
pub use cache::Plans;
pub(crate) use encoded::{Coded, Combination, Operand};
pub(crate) use op::{ExternalStep, PlanOp, PlanOpKind};
pub(crate) use region::Region;
pub use shape::AllShapes;
pub use shape::Draft;
pub use shape::Shape;
pub(crate) use shape::Shapes;
pub(crate) use staging::{FinalSegments, Segment, StagedCopies};
