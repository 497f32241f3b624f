//! Whole collectives of another library, such as MPI's, for the calls that the setting `sidestep` gives to it.
//!
//! The library belongs to a transport, which offers its collectives. `route` decides which calls the library executes,
//! `request` translates a call for the library. `handle` is the group's side, `running` has the collectives in flight.
//! `worker` calls the library: on a waiting thread, or on a thread that all groups of the process share. Read
//! [`LibraryKind`] first.

mod handle;
mod request;
mod route;
mod running;
mod worker;

pub use handle::LibraryKind;
