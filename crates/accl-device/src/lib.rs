//! The device of a rank, a collective engine on an FPGA or its emulation, as an offload of the engine.
//!
//! Owns the way from a call of a group to the calls of a device: which collectives the device executes, its thread, the
//! buffers through which tensors reach it, and the packets of devices in software. The driver of the device and its
//! buses are in `accl-cclo`. Read [`DeviceKind`] first.

#![forbid(unsafe_code)]

mod counts;
mod handle;
mod kind;
#[cfg(all(test, accl_loom))]
mod loom_tests;
mod open_devices;
mod opening;
mod port;
mod shared;
mod staging;
mod worker;

pub use kind::{DeviceKind, check};
pub use shared::OpenBus;
