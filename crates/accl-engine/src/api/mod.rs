//! The types that the layer above uses: groups and calls in flight.

mod by_reference;
pub(crate) mod call;
mod coded;
mod connect;
pub(crate) mod default_codec;
pub(crate) mod error_stats;
pub(crate) mod group;
pub(crate) mod monitored;
pub(crate) mod planning;
pub(crate) mod snapshot;
