//! A device that does collectives of a group: its handle, its thread, and its traffic with other ranks' devices.

mod attended;
mod counts;
mod handle;
#[cfg(all(test, accl_loom))]
mod loom_tests;
mod opening;
mod port;
mod shared;
mod staging;
mod worker;

pub(crate) use attended::Attended;
pub(crate) use handle::Device;
pub(crate) use opening::Opening;
pub use shared::OpenBus;
