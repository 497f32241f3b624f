//! Groups with a device: what it does and what the host does, with whose memory, and how both end.

mod departures;
mod memory;
mod offload;
mod sessions;
mod worlds;
