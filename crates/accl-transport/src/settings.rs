//! The part of the configuration that an endpoint needs.

use std::net::IpAddr;

use accl_types::config::{Config, IfnameFilter};
use accl_wire::frame;

/// The part of [`Config`] that concerns transports. All ranks must agree on `transports` and `segment_bytes`.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Interfaces whose addresses are offered to peers.
    pub socket_ifname: IfnameFilter,
    /// First and last port to listen on; `None` lets the system choose.
    pub port_range: Option<(u16, u16)>,
    /// Names of [`crate::TRANSPORTS`] rows in the order in which they are tried.
    pub transports: Vec<String>,
    /// Replaces the host's own identity; `None` keeps it.
    pub host_id: Option<String>,
    /// Wanted bytes of one direction of a shared-memory link.
    pub ring_bytes: u64,
    /// Maximum bytes of shared memory that this endpoint creates.
    pub shm_limit: u64,
    /// Maximum payload bytes of one frame.
    pub segment_bytes: u64,
    /// Address of the master, if known: the address of the interface with the route to it is offered first.
    pub master: Option<IpAddr>,
}

impl Settings {
    /// Returns the settings that `config` holds; `master` stays `None`.
    pub fn from_config(config: &Config) -> Settings {
        Settings {
            socket_ifname: config.socket_ifname.clone(),
            port_range: config.port_range,
            transports: config.transports.clone(),
            host_id: config.host_id.clone(),
            ring_bytes: config.ring_bytes,
            shm_limit: config.shm_limit,
            segment_bytes: config.segment_bytes,
            master: None,
        }
    }

    /// Maximum bytes of one payload.
    pub fn max_payload_bytes(&self) -> usize {
        self.segment_bytes as usize + frame::OVERHEAD_BYTES
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self::from_config(&Config::default())
    }
}
