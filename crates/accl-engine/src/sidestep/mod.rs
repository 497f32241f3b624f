//! Collectives of a group that the library of a transport does whole, since a setting says so: MPI's, mostly.
//!
//! Which calls those are is in `route`, what such a call is for the library in `request`; `handle` is the group's side of it, `running`
//! what the library is at, and `worker` who calls it: whoever waits, or a thread that all groups of the process have in common.

mod handle;
mod request;
mod route;
mod running;
mod worker;

pub(crate) use handle::{Sidestep, named};
pub(crate) use worker::{Found, Worker, Workers};
