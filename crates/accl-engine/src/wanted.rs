//! Links that calls want, on their way from the driver's lock to the thread that makes them.
//!
//! Owns the queue between the two; who makes links is in `session::connector`. Read [`WantedLinks`] first.

use std::sync::{Arc, OnceLock};

use accl_transport::{Card, Waker};

use crate::sync::Mutex;

/// The cards of peers to which links are wanted.
#[derive(Default)]
pub(crate) struct WantedLinks {
    cards: Mutex<Vec<Card>>,
    /// Of the thread that makes them.
    waker: OnceLock<Arc<Waker>>,
}

impl WantedLinks {
    /// Whom to tell of more.
    pub(crate) fn set_waker(&self, waker: Arc<Waker>) {
        let _ = self.waker.set(waker);
    }

    pub(crate) fn add(&self, cards: Vec<Card>) {
        self.cards.lock().extend(cards);
        if let Some(waker) = self.waker.get() {
            waker.wake();
        }
    }

    pub(crate) fn take(&self) -> Vec<Card> {
        std::mem::take(&mut self.cards.lock())
    }
}
