//! Groups, plan cache, executor, progress and deadlines: the middle layer of torch-accl.
//!
//! This crate does not depend on torch, Python or MPI. Devices and other libraries execute calls through [`offload`].
//! Read [`Engine`], then [`Group::submit`] and [`Group::submit_blocking`], then [`Call`].

mod api;
mod attempts;
mod completion;
mod connector;
mod cores;
mod cpus;
mod driver;
mod election;
mod engine;
mod env;
mod events;
mod in_flight;
mod jobs;
mod lanes;
pub mod offload;
pub mod predict;
mod session;
mod settings;
mod signals;
mod spec;
#[doc(hidden)]
pub mod sync;
mod time;
mod wanted;

pub use accl_executor::call::{Blocks, CallDesc, MemoryKind, Mode, TRIAL, TensorDesc, Waited};
pub use accl_executor::call::{
    Codecs, Encoded, Encoding, Measured, Probe, ResidualOwner, Residuals, Statistics, TILE_ELEMS, TILE_HEADER_BYTES,
    TensorCodecs,
};
pub use accl_executor::call::{
    CoderNeeds, Enqueued, External, ExternalCollective, ExternalCombination, ExternalCopy, ExternalReduction,
    ExternalTask, LentMemory, PUBLISHED_ALIGN, PublishedOperand, PublishedResult, Publisher, PublishingNeeds,
    REFERENCE_BYTES, ReducedTile, SampleCopies, SampleCopy, SampledResult, Squares, Staging, TileCode, TileOperand,
    TileResidual, TileRun,
};
pub use accl_executor::call::{PhaseTimes, Phases};
pub use accl_executor::group::PacketSink;
pub use accl_executor::group::Work;
pub use accl_executor::memory::{CollectiveMemory, refuse_undefined_outputs};
pub use accl_executor::peers::Traffic;
pub use api::call::Call;
pub use api::error_stats::ErrorStats;
pub use api::group::{Group, Submitted};
pub use api::snapshot::{CallSnapshot, GroupSnapshot, PeerSnapshot, Snapshot};
pub use engine::Engine;
pub use env::{cache_home, config_from_environment, unused_variables};
pub use session::create::refuse_group;
pub use session::store::{MemoryStore, Store, store_failed};
pub use settings::{accepted, check_settings, settings_page};
pub use signals::block_all as block_signals;
pub use spec::{GroupRole, GroupSpec};
pub use time::now;

// Re-exports from the layers below, for listings: the layers above depend only on this crate.
pub use accl_kernels::{codec, describe_isa, supports};
pub use accl_schedule::cost::{CONSTANTS, Machine};
pub use accl_schedule::{ALGORITHMS, Algorithm};
pub use accl_transport::{
    Transport, TransportV1, announce as announce_transport, fork_generation, register_table, transports,
};
pub use accl_wire::EndpointInfo;

/// Parts of the engine from which the crate accl-world builds simulated worlds. They are no interface, and change
/// freely.
#[doc(hidden)]
pub mod internals {
    pub use crate::api::planning::Planning;
    pub use crate::connector::NOTE_DELAY;
    pub use crate::connector::peer_probe::{Found, PeerProbe, Question, ROUND};
    pub use crate::in_flight::{InFlight, Kept, Notifier, Release};
    pub use crate::lanes::{CoreJob, Cut, Lane, Least, Next, Numbers, Parts, parts_of};
}
