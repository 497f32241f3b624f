//! Groups, plan cache, executor, progress and deadlines: the middle of torch-accl.
//!
//! Knows no torch, Python, MPI or device. Read [`Engine`], then [`Group::submit`] and [`Group::run`], then [`Call`].

pub mod audit;
mod buffers;
mod call;
mod coder;
mod completion;
mod core;
mod cores;
mod desc;
mod drive;
pub mod encoding;
mod engine;
mod env;
mod group;
mod hash;
mod history;
mod local;
pub mod machine;
mod members;
mod monitored;
mod net;
mod p2p;
mod plan;
mod rendezvous;
mod run;
mod shape;
mod signals;
pub mod simulate;
mod state;
mod store;
mod straight;
mod sync;

pub use call::{Call, Waited};
pub use desc::{Blocks, CallDesc, Mode, TensorDesc};
pub use engine::Engine;
pub use env::{config_from_environment, foreign_variables};
pub use group::{Group, GroupSpec, Ran};
pub use store::{MemoryStore, Store};

// What the layers below offer, for listings: those above see only this crate.
pub use accl_kernels::{codec, describe_isa, supports};
pub use accl_schedule::cost::{CONSTANTS, Machine};
pub use accl_schedule::{ALGORITHMS, Algorithm};
pub use accl_transport::{Card, TRANSPORTS, Transport};
