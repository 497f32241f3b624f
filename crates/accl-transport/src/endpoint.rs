//! Connecting to peers. Stub.

use std::sync::Arc;
use std::time::Instant;

use accl_types::{Error, Result};

use crate::{Card, Link, Settings, Waker};

/// A peer that was not reached.
#[derive(Clone, Debug)]
pub struct Missing {
    /// Its index in the list of peers.
    pub index: usize,
    /// Why, as a clause: `no connection from it yet`, `connection refused by 10.0.0.2:4000`.
    pub why: String,
}

/// Why [`Endpoint::connect`] gave up.
#[derive(Clone, Debug)]
pub struct ConnectError {
    /// `Timeout` when the deadline passed, `Aborted` when interrupted, else what cannot be helped by waiting.
    pub error: Error,
    /// Every peer without a link. Links that were made are kept for the next attempt.
    pub missing: Vec<Missing>,
}

/// This process as its peers see it: one listening port, one Unix socket, one identity.
#[derive(Debug)]
pub struct Endpoint {
    card: Card,
}

impl Endpoint {
    /// Opens the listeners. Peers on this host will write to `waker` when this process is parked.
    ///
    /// # Errors
    /// `Configuration` when no interface or port fits the settings; `Network` or `Exhausted` when the system refuses.
    pub fn new(_settings: Settings, _waker: Arc<Waker>) -> Result<Endpoint> {
        Err(Error::internal("not yet"))
    }

    /// What to publish in the store.
    pub fn card(&self) -> &Card {
        &self.card
    }

    /// Links to all `peers`, in their order, made by connecting and accepting at once. A connection from somebody who
    /// was not asked for is kept and returned by a later call. Calls `interrupted` about every 50 ms.
    ///
    /// # Errors
    /// A [`ConnectError`] that lists the missing peers.
    pub fn connect(
        &mut self,
        _peers: &[Card],
        _deadline: Instant,
        _interrupted: &mut dyn FnMut() -> bool,
    ) -> std::result::Result<Vec<Box<dyn Link>>, ConnectError> {
        Err(ConnectError { error: Error::internal("not yet"), missing: Vec::new() })
    }

    /// Fallbacks since the last call, one sentence each with its remedy.
    pub fn take_warnings(&mut self) -> Vec<String> {
        Vec::new()
    }
}
