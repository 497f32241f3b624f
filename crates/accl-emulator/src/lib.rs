//! The CCLO in software: an engine that runs the calls of a host, moves data through its memories, and exchanges packets with its peers.
//!
//! Owns the behaviour of an engine's firmware and data path, its memories, and the handling of received packets. The defects of `accl_cclo::hazards`
//! are either reproduced or repaired. Only [`serve`] and its trace use sockets, threads or a clock. Elsewhere the caller passes requests and packets
//! to an engine, and transports its outgoing packets over a [`Fabric`]. Read [`Engine`] and [`program`] first.
//!
//! In comments, "the original" is the ACCL project's emulator, and "the reference" is the one that `accl_cclo` follows.

#![forbid(unsafe_code)]

mod arithmetic;
mod cluster;
pub mod command;
mod direct;
mod engine;
mod exchange;
mod fabric;
pub mod local;
mod memory;
mod mover;
pub mod program;
mod receiver;
pub mod serve;
pub mod sim;
mod time;
mod trace;

pub use engine::{Caller, Ends, Engine, Peers};
pub use fabric::Fabric;
pub use memory::Memory;
pub use program::Faithful;
pub use time::{CONSTANTS, Constant, Speed};
