//! Shared memory between two processes of one host and user: a ring in each direction.
//!
//! Owns the memory ([`region`]), how much of it may be used ([`budget`]) and the link itself ([`link`]). The
//! descriptors come from the handshake in `endpoint`. Nothing here has a name in a file system.

pub(crate) mod budget;
mod link;
pub(crate) mod region;

pub(crate) use link::{Parts, ShmLink};
