//! Collectives of a group that a transport's library does as a whole because a setting says so; usually MPI's.
//!
//! `route` decides which calls the library does, `request` translates a call for the library. `handle` is the group's
//! side, `running` has the collectives in flight. `worker` calls the library: on a waiting thread, or on a thread that
//! all groups of the process share.

mod handle;
mod request;
mod route;
mod running;
mod worker;

pub(crate) use handle::{LibraryOffload, named};
pub(crate) use worker::{Found, Worker, Workers};
