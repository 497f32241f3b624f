//! The executor: calls in flight, from incoming frames to outgoing frames.

mod context;
mod externals;
mod fast_path;
mod p2p;
mod run;
mod transfer;

pub(crate) use context::RunContext;
pub use context::SpinLimit;
pub(crate) use fast_path::FastPath;
pub use p2p::PRIVATE_TAGS;
pub(crate) use p2p::{FromAny, Message, P2p};
pub use run::OFFLOAD_GRACE;
pub(crate) use run::{PROBE, PROBE_AFTER, Run};
