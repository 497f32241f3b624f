//! Lanes: additional cores of a process that do parts of large calls.
//!
//! A lane is a core of its own: its lock, its links, its thread. The first lane is the engine's own; small calls use it
//! alone.

mod cut;
mod join;
mod numbers;
mod parts;

pub use cut::Cut;
pub use join::{CoreJob, Lane, Next, Parts};
pub use numbers::Numbers;
pub use parts::{Least, parts_of};
