//! What the layer above holds: groups, calls in flight, and what both are made from.

pub(crate) mod call;
mod connect;
pub(crate) mod default_codec;
pub(crate) mod error_stats;
pub(crate) mod group;
pub(crate) mod monitored;
pub(crate) mod planning;
pub(crate) mod snapshot;
pub(crate) mod spec;
