//! Engines of one process as devices of its threads: a bus without a socket.
//!
//! Owns the lock on the engines; their behaviour is in the rest of this crate. Read [`LocalBus`] first.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use accl_cclo::memory_map::Network;
use accl_types::{Error, ErrorKind, Result};

use crate::cluster::Cluster;
use crate::direct::{Direct, DirectBus, HandedOut, Reach};
use crate::engine::Engine;
use crate::program::Faithful;

/// Engines of all ranks, in one process.
pub struct LocalEngines(Mutex<LockedEngines>);

struct LockedEngines {
    cluster: Cluster,
    handed_out: Vec<HandedOut>,
}

impl LocalEngines {
    /// Creates one engine for each rank.
    pub fn new(network: Network, faithful: Faithful, ranks: u32) -> Arc<Self> {
        let engines = (0..ranks).map(|_| Engine::new(network, faithful)).collect();
        let cluster = Cluster::new(0, engines, None);
        Arc::new(Self(Mutex::new(LockedEngines { cluster, handed_out: vec![[0; 2]; ranks as usize] })))
    }

    /// Runs a function on an engine, and then lets the engines advance. Returns `None` if there is no such engine.
    pub fn with<R>(&self, rank: u32, what: impl FnOnce(&mut Engine) -> R) -> Option<R> {
        let mut inner = self.lock();
        let result = what(inner.cluster.engine(rank)?);
        inner.cluster.go_on(rank);
        Some(result)
    }

    fn lock(&self) -> MutexGuard<'_, LockedEngines> {
        // A panic in an engine only fails the call at hand; calls of other ranks fail by their deadlines.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Connection to the engine of a rank.
pub type LocalBus = DirectBus<LocalEngine>;

/// Engine of a rank, among the engines of this process.
#[derive(Clone)]
pub struct LocalEngine {
    engines: Arc<LocalEngines>,
    rank: u32,
    name: String,
}

impl LocalBus {
    /// Connects to the engine of a rank.
    pub fn new(engines: &Arc<LocalEngines>, rank: u32) -> Self {
        Self(LocalEngine { engines: engines.clone(), rank, name: format!("the engine of rank {rank} in this process") })
    }
}

impl Reach for LocalEngine {
    fn with<R>(&self, f: impl FnOnce(Direct<'_>, &mut HandedOut) -> Result<R>) -> Result<R> {
        let mut inner = self.engines.lock();
        let LockedEngines { cluster, handed_out } = &mut *inner;
        let engine = cluster.engine(self.rank).zip(handed_out.get_mut(self.rank as usize));
        let (engine, handed_out) =
            engine.ok_or_else(|| Error::new(ErrorKind::Device, format!("{}: there is no such engine", self.name)))?;
        f(Direct { engine, name: &self.name }, handed_out)
    }

    fn go_on(&self) {
        self.engines.lock().cluster.go_on(self.rank);
    }

    fn name(&self) -> &str {
        &self.name
    }
}
