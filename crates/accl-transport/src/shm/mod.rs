//! Shared memory between two processes of one host and user: a ring in each direction.
//!
//! Owns the memory ([`region`]), how much of it may be used ([`budget`]), the link itself ([`link`]) and how two processes make one
//! ([`provider`]). Nothing here has a name in a file system.

pub(crate) mod budget;
mod link;
mod provider;
pub(crate) mod region;

pub(crate) use provider::ROW;
