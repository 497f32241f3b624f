//! The types that the layer above uses: groups, calls in flight, and the values from which both are created.

pub(crate) mod call;
mod connect;
pub(crate) mod default_codec;
pub(crate) mod error_stats;
pub(crate) mod group;
pub(crate) mod monitored;
pub(crate) mod planning;
pub(crate) mod snapshot;
pub(crate) mod spec;
