//! Messages whose tensors only external operations can access: how they follow their copies.
//!
//! This module owns what a message awaits after it has moved all its bytes. `memory::message` has the ring through which
//! the bytes pass. Read [`P2p::follow_copies`] first.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use accl_types::Error;
use smallvec::SmallVec;

use super::super::context::RunContext;
use super::{Message, P2p, Receiving, grant};
use crate::call::{CallState, Wake};

impl P2p {
    /// Ends a message that has moved all its bytes. A staged message still waits for its copies, but not for its peer.
    pub(super) fn moved(&mut self, message: Message) {
        if !message.memory.is_staged() {
            return self.end(message);
        }
        if !message.is_private {
            *self.count_of(message.peer) -= 1;
        }
        self.copying.push(message);
        // The copies may have ended before. Release and acquire: their news is not lost if this comes later.
        self.has_news.swap(true, Ordering::AcqRel);
    }

    /// Returns what a worker calls when the copies of a staged message have gone on. `wake` wakes the driver.
    pub(crate) fn wake(&self, wake: &Wake) -> Wake {
        let (has_news, wake) = (self.has_news.clone(), wake.clone());
        Arc::new(move || {
            // Release: the pass that takes the news sees the progress of the copies.
            has_news.swap(true, Ordering::AcqRel);
            wake();
        })
    }

    /// Follows the copies of staged messages. Returns whether anything has changed.
    pub(super) fn follow_copies(&mut self, env: &mut RunContext<'_>) -> bool {
        // A load is cheaper than a swap, and there is hardly ever news.
        if !self.has_news.load(Ordering::Relaxed) || !self.has_news.swap(false, Ordering::Acquire) {
            return false;
        }
        for &(to, id) in &self.staged_sends {
            let peer = &mut self.peers[to.index()];
            if peer.begun.contains_key(&id) {
                peer.ready.insert(id);
            }
            self.sendable.insert(to);
        }
        for (from, id) in self.staged_receives.iter().copied().collect::<SmallVec<[_; 4]>>() {
            if let Some(Receiving { message, incoming }) = self.peers[from.index()].receiving.get_mut(&id) {
                grant(from, id, message, incoming, env);
            }
        }
        let sends = self.staged_sends.iter().filter_map(|&(to, id)| self.peers[to.index()].sending(id));
        let receives = self.staged_receives.iter().filter_map(|(from, id)| self.peers[from.index()].receiving.get(id));
        let staged = sends.map(|sending| &sending.message).chain(receives.map(|receiving| &receiving.message));
        let failed = |message: &Message| Some((message.call.clone(), message.memory.has_ended().err()?));
        let failed = staged.chain(&self.copying).find_map(failed);
        self.failure = self.failure.take().or(failed);
        let has_ended = |message: &Message| matches!(message.memory.has_ended(), Ok(true));
        let (over, copying) = std::mem::take(&mut self.copying).into_iter().partition::<Vec<_>, _>(has_ended);
        self.copying = copying;
        for message in over {
            self.calls.remove(&message.call.seq);
            self.private -= usize::from(message.is_private);
            if let Some(deadline) = message.deadline {
                self.deadlines.remove(&(deadline, message.call.seq));
            }
            self.done.push(message);
        }
        true
    }

    /// Returns whether messages have moved all their bytes, and still await copies.
    pub(crate) fn awaits_copies(&self) -> bool {
        !self.copying.is_empty()
    }

    /// Takes the reason why the copies of a message have failed, with its call.
    pub(crate) fn take_failure(&mut self) -> Option<(Arc<CallState>, Error)> {
        self.failure.take()
    }
}
