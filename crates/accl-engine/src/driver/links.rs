//! Changes of links as the driver sees them: made, lost, disconnected.
//!
//! Owns what such a change means for the core and for a sleeping driver thread. Links are made elsewhere, by the
//! connector. Read [`Driver::attach`] first.

use accl_executor::group::PeerFate;
use accl_transport::{Traced, Watched};
use accl_types::Error;
use accl_wire::{EndpointInfo, Stance};

use super::Driver;
use crate::events;
use crate::time;
use crate::wanted::WantedLinks;

impl Driver {
    /// Returns the queue of links that calls want.
    pub(crate) fn wanted(&self) -> &WantedLinks {
        &self.wanted
    }

    /// Attaches the link that `take` returns to a peer that waits for one. Returns `false` if no peer here waits for
    /// it.
    pub(crate) fn attach(&self, uuid: &[u8; 16], take: impl FnOnce() -> Option<Box<dyn Watched>>) -> bool {
        let Some(polling) = self.polling.get() else { return false };
        let has_taken = self.with_core(|core| {
            let Some(id) = core.net.find(uuid).filter(|&id| core.net.is_unlinked(id)) else { return false };
            let Some(mut link) = take() else { return false };
            let peer = core.net.host_and_pid(id);
            tracing::debug!(peer, link = link.describe(), "linked");
            if events::follows_frames() {
                link = Box::new(Traced::new(link, events::of_frames(peer)));
            }
            // Under the lock: the first event may wake a driver thread, which must find the link.
            match polling.poller.watch(&mut link) {
                Ok(slot) => core.attach(id, link, slot, time::now()),
                Err(error) => core.lose(id, error, time::now()),
            }
            true
        });
        if has_taken {
            self.after_links();
        }
        has_taken
    }

    /// Marks a peer as unreachable.
    pub(crate) fn lose(&self, uuid: &[u8; 16], error: Error) {
        self.with_core(|core| {
            if let Some(id) = core.net.find(uuid) {
                core.lose(id, error, time::now());
            }
        });
        self.after_links();
    }

    /// Returns how to answer a peer that says hello.
    pub(crate) fn stance_to(&self, uuid: &[u8; 16]) -> Stance {
        let stance = self.with_core(|core| core.stance_to(uuid, time::now()));
        if stance != Stance::Unlinked {
            // The poll may have consumed an event that was to wake a sleeping thread.
            self.wake_driver_if(true);
        }
        stance
    }

    /// Returns the peers from `infos` that have no link and are not gone.
    pub(crate) fn still_unlinked(&self, infos: Vec<EndpointInfo>) -> Vec<EndpointInfo> {
        if infos.is_empty() {
            return infos;
        }
        self.with_core(|core| {
            let is_unlinked = |info: &EndpointInfo| core.net.find(&info.uuid).is_none_or(|id| core.net.is_unlinked(id));
            infos.into_iter().filter(is_unlinked).collect()
        })
    }

    /// Marks a process without a link as having ended cleanly.
    pub(crate) fn depart(&self, uuid: &[u8; 16], is_assumed: bool) {
        self.with_core(|core| {
            if let Some(id) = core.net.find(uuid) {
                core.depart(id, is_assumed, time::now());
            }
        });
        self.after_links();
    }

    /// Handles an out-of-band message, as `Core::on_note` describes.
    pub(crate) fn on_note(&self, from: &[u8; 16], note: &[u8]) -> PeerFate {
        let answer = self.with_core(|core| core.on_note(from, note, time::now()));
        self.after_links();
        answer
    }

    /// Returns whether a process was a peer, is gone, and has not become a peer again.
    pub(crate) fn has_gone(&self, uuid: &[u8; 16]) -> bool {
        self.with_core(|core| core.net.gone(uuid).is_some())
    }

    /// Wakes the driver thread: while asleep it has not announced on a new link that it sleeps. It also wakes waiters
    /// whose calls may have completed.
    fn after_links(&self) {
        self.wake_driver_if(true);
        if self.with_core(|core| core.has_work()) {
            self.ensure_driver();
        }
    }
}
