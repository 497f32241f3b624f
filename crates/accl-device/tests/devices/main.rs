//! Groups with a device: which calls the device does and which the host does, with which memory, and how devices and
//! groups end.

mod departures;
mod memory;
mod offload;
mod sessions;
mod worlds;
