//! Engines of one process as devices of its threads: a bus without a socket.
//!
//! Owns the lock over the engines. What engines do is in the rest of this crate. Read [`LocalBus`] first.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use accl_cclo::memory_map::Network;
use accl_types::{Error, ErrorKind, Result};

use crate::cluster::Cluster;
use crate::direct::{Direct, DirectBus, HandedOut, Reach};
use crate::engine::Engine;
use crate::program::Faithful;

/// The engines of all ranks, in one process.
pub struct LocalEngines(Mutex<Inner>);

struct Inner {
    cluster: Cluster,
    handed_out: Vec<HandedOut>,
}

impl LocalEngines {
    /// One engine for each rank.
    pub fn new(network: Network, faithful: Faithful, ranks: u32) -> Arc<Self> {
        let engines = (0..ranks).map(|_| Engine::new(network, faithful)).collect();
        let cluster = Cluster::new(0, engines, None);
        Arc::new(Self(Mutex::new(Inner { cluster, handed_out: vec![[0; 2]; ranks as usize] })))
    }

    /// Does something with an engine, with which it and others may be able to go on. `None`: there is no such engine.
    pub fn with<R>(&self, rank: u32, what: impl FnOnce(&mut Engine) -> R) -> Option<R> {
        let mut inner = self.lock();
        let result = what(inner.cluster.engine(rank)?);
        inner.cluster.go_on(rank);
        Some(result)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic of an engine is that of its call, and all others fail by their deadlines.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection to the engine of a rank.
pub type LocalBus = DirectBus<LocalEngine>;

/// The engine of a rank, among those of this process.
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
        let Inner { cluster, handed_out } = &mut *inner;
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
