//! Links and notes that calls want, on their way from the driver's lock to the thread that makes them.
//!
//! Owns the queues between the two; who makes links is in `session::connector`. Read [`WantedLinks`] first.

use std::sync::{Arc, OnceLock};

use accl_transport::Waker;
use accl_wire::EndpointInfo;

use crate::sync::Mutex;
use accl_executor::peers::Note;

/// The infos of peers to which links are wanted, and what they are to be told besides.
#[derive(Default)]
pub(crate) struct WantedLinks {
    wishes: Mutex<(Vec<EndpointInfo>, Vec<Note>)>,
    /// Of the thread that makes them.
    waker: OnceLock<Arc<Waker>>,
}

impl WantedLinks {
    /// Whom to tell of more.
    pub(crate) fn set_waker(&self, waker: Arc<Waker>) {
        let _ = self.waker.set(waker);
    }

    pub(crate) fn add(&self, links: Vec<EndpointInfo>, notes: Vec<Note>) {
        {
            let mut wishes = self.wishes.lock();
            wishes.0.extend(links);
            wishes.1.extend(notes);
        }
        if let Some(waker) = self.waker.get() {
            waker.wake();
        }
    }

    pub(crate) fn take(&self) -> (Vec<EndpointInfo>, Vec<Note>) {
        std::mem::take(&mut self.wishes.lock())
    }
}
