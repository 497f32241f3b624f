//! Worlds of ranks with devices in their process, and small numbers as inputs of their calls.

use std::sync::Arc;
use std::time::Duration;

use accl_device::DeviceKind;
use accl_testkit::devices::{Faithful, LocalDevices, Network};
use accl_testkit::{Fabric, World, WorldOptions};

/// Maximum time that any operation may take.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub fn design(network: Network) -> &'static str {
    match network {
        Network::Udp => "udp",
        Network::Tcp => "tcp",
        Network::Rdma => "cyt_rdma",
    }
}

pub fn options(world: u32, network: Network) -> WorldOptions {
    let url = format!("sim://?design={}", design(network));
    WorldOptions::new(world).over(Fabric::Shm).timeout(PATIENCE).with("device", &url)
}

pub fn world_of(options: WorldOptions, network: Network) -> (World, Arc<LocalDevices>) {
    let devices = LocalDevices::new(network, Faithful::all(), options.world);
    let world = World::new(options);
    world.engines.iter().for_each(|engine| engine.add_offload(DeviceKind::new(devices.clone())).unwrap());
    (world, devices)
}

pub fn world(ranks: u32, network: Network) -> (World, Arc<LocalDevices>) {
    world_of(options(ranks, network), network)
}

/// Returns small whole numbers; their sums are exact in every dtype.
pub fn value(rank: usize, at: usize) -> i64 {
    ((rank * 5 + at * 3) % 13) as i64
}

pub fn values(rank: usize, count: usize) -> Vec<i64> {
    (0..count).map(|at| value(rank, at)).collect()
}
