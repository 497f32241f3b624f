//! Links as the driver hears of them: made, lost, gone.
//!
//! Owns what a link's coming and going tells the core and the driver that sleeps. Not here: how links are made, which is the connector's matter. Read [`Driver::attach`] first.

use accl_executor::group::Fate;
use accl_transport::{Traced, Watched};
use accl_types::Error;
use accl_wire::{EndpointInfo, Stance};

use super::Driver;
use crate::events;
use crate::time;
use crate::wanted::WantedLinks;

impl Driver {
    /// Links that calls want.
    pub(crate) fn wanted(&self) -> &WantedLinks {
        &self.wanted
    }

    /// Gives a peer that waits for its link the one that `take` takes. `false`: nobody here waits for one.
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
            // Under the lock: a driver that the first event wakes must find the link.
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

    /// A peer cannot be reached.
    pub(crate) fn lose(&self, uuid: &[u8; 16], error: Error) {
        self.with_core(|core| {
            if let Some(id) = core.net.find(uuid) {
                core.lose(id, error, time::now());
            }
        });
        self.after_links();
    }

    /// What is thought of a peer that greets.
    pub(crate) fn stance_to(&self, uuid: &[u8; 16]) -> Stance {
        let stance = self.with_core(|core| core.stance_to(uuid, time::now()));
        if stance != Stance::Unlinked {
            // The look may have taken what a sleeper was to be woken by.
            self.wake_driver_if(true);
        }
        stance
    }

    /// Those of these peers that have no link and have not gone.
    pub(crate) fn still_unlinked(&self, infos: Vec<EndpointInfo>) -> Vec<EndpointInfo> {
        if infos.is_empty() {
            return infos;
        }
        self.with_core(|core| {
            let is_unlinked = |info: &EndpointInfo| core.net.find(&info.uuid).is_none_or(|id| core.net.is_unlinked(id));
            infos.into_iter().filter(is_unlinked).collect()
        })
    }

    /// A process without a link has ended in good order.
    pub(crate) fn depart(&self, uuid: &[u8; 16], is_assumed: bool) {
        self.with_core(|core| {
            if let Some(id) = core.net.find(uuid) {
                core.depart(id, is_assumed, time::now());
            }
        });
        self.after_links();
    }

    /// See [`Core::on_note`].
    pub(crate) fn on_note(&self, from: &[u8; 16], note: &[u8]) -> Fate {
        let answer = self.with_core(|core| core.on_note(from, note, time::now()));
        self.after_links();
        answer
    }

    /// Whether a process was a peer and has gone, and is none again.
    pub(crate) fn has_gone(&self, uuid: &[u8; 16]) -> bool {
        self.with_core(|core| core.net.gone(uuid).is_some())
    }

    /// A driver that sleeps has not said so on a new link, and whoever waits for a call may find it over.
    fn after_links(&self) {
        self.wake_driver_if(true);
        if self.with_core(|core| core.has_work()) {
            self.ensure_driver();
        }
    }
}
