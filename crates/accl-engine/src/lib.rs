//! Groups, plan cache, executor, progress and deadlines: the middle of torch-accl.
//!
//! Knows no torch, Python, MPI or device. Read [`Engine`], then [`Group::submit`], then [`Call`].

mod buffers;
mod call;
mod completion;
mod core;
mod desc;
mod engine;
mod env;
mod group;
mod members;
mod monitored;
mod net;
mod p2p;
mod plan;
mod rendezvous;
mod run;
mod signals;
mod state;
mod store;
mod sync;

pub use call::{Call, Waited};
pub use desc::{Blocks, CallDesc, Mode, TensorDesc};
pub use engine::Engine;
pub use env::config_from_environment;
pub use group::{Group, GroupSpec};
pub use store::Store;
