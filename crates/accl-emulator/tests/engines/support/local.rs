//! Engines of one process as devices of drivers.

use std::sync::Arc;

use accl_cclo::driver::{Driver, Peer, Settings};
use accl_cclo::memory_map::Network;
use accl_emulator::local::{LocalBus, LocalEngines};
use accl_types::Result;

pub fn settings(network: Network, rank: u32, ranks: u32) -> Settings {
    let peer = |session| Peer { ip: [127, 0, 0, 1].into(), port: 5500, session };
    Settings::new(network, rank, (0..ranks).map(peer).collect())
}

pub fn open(engines: &Arc<LocalEngines>, settings: Settings) -> Result<Driver<LocalBus>> {
    let mut looks = 0;
    let bus = LocalBus::new(engines, settings.rank);
    Driver::open(bus, settings, || {
        looks += 1;
        looks < 100
    })
}
