//! The CCLO in software: an engine that takes the calls of a host, moves data through its memories, and exchanges packets with its peers.
//!
//! Owns what firmware and data path of an engine do, its memories, and what becomes of packets that come; with the behaviour of
//! `accl_cclo::hazards`, as it is or repaired. Has no sockets, threads or clock but for [`serve`]: whoever
//! runs an engine hands it requests and packets, and carries what it sends over a [`Fabric`]. Read [`Engine`] and [`program`] first.

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
