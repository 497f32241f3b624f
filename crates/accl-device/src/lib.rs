//! A device that does collectives of a group: its handle, its thread, and its traffic with other ranks' devices.

mod counts;
mod handle;
#[cfg(all(test, accl_loom))]
mod loom_tests;
mod open_devices;
mod opening;
mod port;
mod shared;
mod staging;
mod worker;

pub(crate) use handle::Device;
pub(crate) use open_devices::OpenDevices;
pub(crate) use opening::Opening;
pub use shared::OpenBus;
