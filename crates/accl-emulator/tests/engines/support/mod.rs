//! Shared parts of the engine tests: worlds in one process, devices of drivers, emulators as processes, recordings.

pub mod bus;
pub mod host;
pub mod local;
pub mod process;
pub mod replay;
pub mod settle;
pub mod world;
