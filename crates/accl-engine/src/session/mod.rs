//! Creation of groups from ranks.

pub(crate) mod connector;
pub(crate) mod cores;
pub(crate) mod create;
pub(crate) mod inquests;
mod lanes;
pub(crate) mod rendezvous;
pub(crate) mod store;
