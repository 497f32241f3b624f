//! Requests for links and out-of-band notes, passed from calls (under the driver's lock) to the thread that makes
//! links.
//!
//! Owns the queue between them; `connector` makes the links. Read [`WantedLinks`] first.

use std::sync::{Arc, OnceLock};

use accl_transport::Waker;
use accl_wire::EndpointInfo;

use crate::sync::Mutex;
use accl_executor::peers::Note;

/// Endpoint addresses of peers to which links are wanted, and notes to send to peers outside the links.
#[derive(Default)]
pub(crate) struct WantedLinks {
    wishes: Mutex<(Vec<EndpointInfo>, Vec<Note>)>,
    /// Wakes the connector thread; set once that thread's waker exists.
    waker: OnceLock<Arc<Waker>>,
}

impl WantedLinks {
    /// Sets the waker that [`WantedLinks::add`] wakes. Only the first call has an effect.
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
