//! Creation of groups from ranks.

pub(crate) mod create;
mod lanes;
pub(crate) mod rendezvous;
pub(crate) mod store;
