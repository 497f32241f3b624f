//! Links and notes that calls want, on their way from the driver's lock to the thread that makes them.
//!
//! Owns the queues between the two; who makes links is in `session::connector`. Read [`WantedLinks`] first.

use std::sync::{Arc, OnceLock};

use accl_transport::{Card, Waker};

use crate::peers::Note;
use crate::sync::Mutex;

/// The cards of peers to which links are wanted, and what they are to be told besides.
#[derive(Default)]
pub(crate) struct WantedLinks {
    wishes: Mutex<(Vec<Card>, Vec<Note>)>,
    /// Of the thread that makes them.
    waker: OnceLock<Arc<Waker>>,
}

impl WantedLinks {
    /// Whom to tell of more.
    pub(crate) fn set_waker(&self, waker: Arc<Waker>) {
        let _ = self.waker.set(waker);
    }

    pub(crate) fn add(&self, links: Vec<Card>, notes: Vec<Note>) {
        {
            let mut wishes = self.wishes.lock();
            wishes.0.extend(links);
            wishes.1.extend(notes);
        }
        if let Some(waker) = self.waker.get() {
            waker.wake();
        }
    }

    pub(crate) fn take(&self) -> (Vec<Card>, Vec<Note>) {
        std::mem::take(&mut self.wishes.lock())
    }
}
