//! Cores without a driver; the tests make their progress.

use std::time::Duration;

use accl_executor::call::{CallObserver, Callbacks};
use accl_executor::group::{Core, GroupState};
use accl_executor::peers::{Members, PeerId};
use accl_types::{Bytes, Error, Moment, Rank};
use accl_wire::{EndpointInfo, PROTOCOL_VERSION};

pub const NOW: Moment = Moment::from_nanos(1);
pub const SEGMENT: usize = 4096;
pub const GROUP: u64 = 7;

pub fn info(process: u8) -> EndpointInfo {
    EndpointInfo {
        version: PROTOCOL_VERSION,
        uuid: [process; 16],
        pid: u32::from(process),
        uid: 0,
        hostname: format!("host-{process}"),
        host_id: "one".to_owned(),
        addresses: Vec::new(),
        unix_name: String::new(),
        transports: Vec::new(),
        lanes: 1,
    }
}

/// Returns the core of a process without links, as `rank` in a group of `world` ranks, and the peers by rank.
pub fn core_of(rank: u32, world: u8) -> (Core, Vec<PeerId>) {
    let mut core = Core::new(SEGMENT as u64, || NOW);
    let peers: Vec<PeerId> = (0..world).map(|process| core.net.introduce(&info(process), false)).collect();
    let members = Members::new(peers.clone(), Bytes(1 << 20));
    core.add_group(GroupState::new(GROUP, "g".into(), Rank(rank), Duration::from_secs(1), members), NOW);
    (core, peers)
}

/// The observer of a call for which no thread waits.
pub struct NoObserver;

impl CallObserver for NoObserver {
    fn ended(&self, _: Option<&Error>) -> Callbacks {
        Callbacks::new()
    }
}
