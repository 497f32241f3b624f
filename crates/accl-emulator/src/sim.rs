//! The engine of one rank in the rank's own process, as a device: a bus without a socket, and packets that others carry.
//!
//! Owns the engine and the addresses that were handed out. The engine goes on whenever its driver looks at a call, on the driver's thread:
//! between calls it has nothing to do but to take packets, which wait until then. Read [`SimBus`] first.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use accl_cclo::bus::{Bus, Memory};
use accl_cclo::call::Descriptor;
use accl_cclo::memory_map::Network;
use accl_cclo::packets::Packets;
use accl_types::{Error, ErrorKind, Result};

use crate::engine::Engine;
use crate::fabric::Fabric;
use crate::program::Faithful;

/// What addresses of buffers are multiples of.
const ALIGNMENT: u64 = 4096;
/// The control stream that calls are started on.
const CONTROL: usize = 0;

/// A connection to the engine of this process.
#[derive(Clone)]
pub struct SimBus {
    rank: u32,
    packets: Arc<dyn Packets>,
    inner: Arc<Mutex<Inner>>,
}

struct Inner {
    engine: Engine,
    /// How far the memories are handed out: the card's and the host's.
    handed_out: [u64; 2],
}

/// Packets on their way to other ranks: sessions are ranks.
struct Outward<'a>(&'a dyn Packets);

impl Fabric for Outward<'_> {
    fn send(&mut self, session: u32, packet: [&[u8]; 3]) {
        self.0.send(session, &packet.concat());
    }
}

impl SimBus {
    /// The engine of a rank, which reaches the others by these packets.
    pub fn new(network: Network, faithful: Faithful, rank: u32, packets: Arc<dyn Packets>) -> Self {
        let inner = Inner { engine: Engine::new(network, faithful), handed_out: [0; 2] };
        Self { rank, packets, inner: Arc::new(Mutex::new(inner)) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, why: &str) -> Error {
        Error::new(ErrorKind::Device, format!("{}: {why}", self.describe()))
    }

    /// Lets the engine go on as far as it can.
    fn advance(&self, inner: &mut Inner) {
        loop {
            let mut has_come = false;
            while let Some((from, packet)) = self.packets.receive() {
                inner.engine.take(from, &packet);
                has_come = true;
            }
            let has_moved = inner.engine.advance(&mut Outward(&*self.packets));
            if !has_come && !has_moved {
                break;
            }
        }
        self.packets.flush();
    }
}
