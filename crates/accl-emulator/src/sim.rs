//! Engine of one rank in the rank's own process, as a device: a bus without a socket, with packets that the caller transports.
//!
//! Owns the engine and its allocated addresses. The engine advances whenever its driver polls a call, on the driver's thread. Between calls it only
//! has packets to take, which wait until then. A register access is a lock and a word, below a microsecond. The bench `targets` measures that, and
//! two engines on two threads. Read [`SimBus`] first.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use accl_cclo::memory_map::Network;
use accl_cclo::packets::Packets;
use accl_types::Result;

use crate::direct::{Direct, DirectBus, HandedOut, Reach};
use crate::engine::Engine;
use crate::fabric::Fabric;
use crate::program::Faithful;

/// Number of waiting packets of a rank at which the engine takes no more from that rank.
const MOST_HELD: usize = 64;

/// Connection to the engine of this process.
pub type SimBus = DirectBus<SimEngine>;

/// Engine of this process, with the transport of its packets.
#[derive(Clone)]
pub struct SimEngine {
    name: Arc<str>,
    packets: Arc<dyn Packets>,
    inner: Arc<Mutex<LockedEngine>>,
}

struct LockedEngine {
    engine: Engine,
    handed_out: HandedOut,
}

/// Fabric for packets to other ranks, with ranks as sessions.
struct Outward<'a>(&'a dyn Packets);

impl Fabric for Outward<'_> {
    fn send(&mut self, session: u32, packet: [&[u8]; 3]) {
        self.0.send(session, &packet.concat());
    }

    fn has_room(&self, session: u32) -> bool {
        self.0.has_room(session)
    }
}

impl SimBus {
    /// Creates the engine of a rank, which reaches other ranks through `packets`.
    pub fn new(network: Network, faithful: Faithful, rank: u32, packets: Arc<dyn Packets>) -> Self {
        let inner = LockedEngine { engine: Engine::new(network, faithful), handed_out: [0; 2] };
        let name = format!("the engine of rank {rank} in its process").into();
        Self(SimEngine { name, packets, inner: Arc::new(Mutex::new(inner)) })
    }
}

impl SimEngine {
    fn lock(&self) -> MutexGuard<'_, LockedEngine> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reach for SimEngine {
    fn with<R>(&self, f: impl FnOnce(Direct<'_>, &mut HandedOut) -> Result<R>) -> Result<R> {
        let mut inner = self.lock();
        let LockedEngine { engine, handed_out } = &mut *inner;
        f(Direct { engine, name: &self.name }, handed_out)
    }

    fn go_on(&self) {
        let mut inner = self.lock();
        loop {
            let mut has_come = false;
            while let Some((from, packet)) = self.packets.receive(&|from| inner.engine.held(from) < MOST_HELD) {
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

    fn pause(&self, at_most: Duration) {
        self.packets.wait(at_most);
    }

    fn name(&self) -> &str {
        &self.name
    }
}
