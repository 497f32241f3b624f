//! The executor: calls in flight, from frames that come to frames that go.

pub(crate) mod context;
mod externals;
pub(crate) mod fast_path;
pub(crate) mod p2p;
pub(crate) mod run;
pub(crate) mod transfer;

pub(crate) use context::{RunContext, SpinLimit};
pub(crate) use fast_path::FastPath;
pub(crate) use p2p::{FromAny, Message, P2p, PRIVATE_TAGS};
pub(crate) use run::{PROBE, PROBE_AFTER, Run, answer_probe};
