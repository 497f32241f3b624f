//! Creation of groups from ranks.

pub(crate) mod connector;
pub(crate) mod cores;
pub(crate) mod create;
mod lanes;
pub(crate) mod peer_probe;
pub(crate) mod rendezvous;
pub(crate) mod store;
