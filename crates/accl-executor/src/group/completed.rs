//! Calls that have ended, for whoever holds the lock to tell of them without it.
//!
//! Owns the list. Read [`Completed`] first.

use std::sync::Arc;

use accl_types::{Error, Moment};

use crate::call::{CallState, Callback};

/// What is to be done when the lock has been given back.
#[derive(Default)]
pub struct Completed {
    /// To be run.
    pub callbacks: Vec<Callback>,
    /// To be told of, if somebody follows calls.
    pub calls: Vec<Arc<CallState>>,
    is_followed: bool,
    /// There is something in one of the lists.
    has_any: bool,
}

impl Completed {
    /// Somebody follows calls: all that end from now on are kept for that.
    pub(super) fn follow(&mut self) {
        self.is_followed = true;
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        !self.has_any
    }

    /// Ends a call.
    pub(super) fn end(&mut self, call: &Arc<CallState>, error: Option<Error>, now: Moment) {
        self.callbacks.extend(call.finish(now, error));
        if self.is_followed {
            self.calls.push(call.clone());
        }
        self.has_any = !self.callbacks.is_empty() || !self.calls.is_empty();
    }

    /// All that there is; it stays followed.
    pub(super) fn take(&mut self) -> Self {
        let is_followed = self.is_followed;
        std::mem::replace(self, Self { is_followed, ..Self::default() })
    }
}
