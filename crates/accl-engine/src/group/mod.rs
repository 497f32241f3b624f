//! Groups inside the engine: their state, and what the driver's lock protects.

mod admission;
mod completed;
pub(crate) mod context;
pub(crate) mod core;
mod ended;
mod failure;
pub(crate) mod history;
mod inbox;
mod sequence;
pub(crate) mod state;
pub(crate) mod stopping;
pub(crate) mod submit;

pub(crate) use completed::Completed;
pub(crate) use context::Context;
pub use core::Work;
pub(crate) use core::{Core, Fate, Relief};
#[cfg(test)]
pub(crate) use failure::GRACE;
pub(crate) use state::{Departure, FastPathEnd, GroupState, Tell};
#[cfg(test)]
pub(crate) use stopping::STOP_WITHIN;
pub(crate) use submit::{Caller, Launched, Prepared};
