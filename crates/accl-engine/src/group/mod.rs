//! Groups inside the engine: their state, and what the driver's lock protects.

pub(crate) mod context;
pub(crate) mod core;
pub(crate) mod history;
pub(crate) mod state;
pub(crate) mod submit;

pub(crate) use context::Context;
pub(crate) use core::{Core, Relief};
pub(crate) use state::{Departure, FastPathEnd, GroupState, Tell};
pub(crate) use submit::{Caller, Launched, Prepared};
