//! Groups inside the engine: their state, and everything that the driver's lock protects.

mod admission;
mod completed;
mod context;
mod core;
mod ended;
mod failure;
mod history;
mod inbox;
mod lanes;
mod packets;
mod sequence;
mod state;
mod stopping;
mod submit;

pub use completed::{Completed, FailedGroup, Notify};
pub use context::Context;
pub use core::Core;
pub use core::PeerFate;
pub use core::SILENCE_CHECK_INTERVAL;
pub use core::VANISHED;
pub use core::WakeDecision;
pub use core::Work;
pub use failure::GRACE;
pub use lanes::LaneNumbers;
pub use packets::PacketSink;
pub use state::CallInFlight;
pub use state::Departure;
pub use state::FastPathEnd;
pub use state::GroupState;
pub use stopping::STOP_WITHIN;
pub use submit::Caller;
pub use submit::Launched;
pub use submit::Prepared;
