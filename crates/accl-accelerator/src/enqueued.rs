//! The flag of a call whose copies are all enqueued.
//!
//! This module owns its state and its notification. Read [`Flag`] first.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use accl_engine::Enqueued;
use parking_lot::Mutex;

type Notify = Box<dyn Fn(bool) + Send>;

/// Set once, by the part of the call that enqueues the last copy.
#[derive(Default)]
pub(crate) struct Flag {
    is_set: AtomicBool,
    notify: Mutex<Option<Notify>>,
}

impl Flag {
    pub(crate) fn set(&self) {
        // Locked, so that a notification that is registered meanwhile learns of both steps.
        let mut kept = self.notify.lock();
        let notify = kept.take();
        notify.iter().for_each(|notify| notify(false));
        // Release: a thread that sees the flag also sees the event behind the last copy.
        self.is_set.store(true, Ordering::Release);
        notify.iter().for_each(|notify| notify(true));
    }
}

impl Enqueued for Flag {
    fn is_set(&self) -> bool {
        self.is_set.load(Ordering::Acquire)
    }

    fn notify_with(&self, notify: Notify) {
        let mut kept = self.notify.lock();
        if self.is_set() {
            drop(kept);
            notify(false);
            notify(true);
        } else {
            *kept = Some(notify);
        }
    }
}

impl fmt::Debug for Flag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flag").field("is_set", &self.is_set()).finish_non_exhaustive()
    }
}
