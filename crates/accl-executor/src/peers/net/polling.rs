//! Decides which links a progress pass polls.
//!
//! A link is *polled* (every pass polls it) or *armed*. Events of an armed link are posted on the [`EventBitmap`] by
//! the peer or the poller, and then the link is polled again. A link is armed when several polls found nothing, and
//! before a sleep. The cost of a pass or a sleep therefore does not grow with the number of links.
//!
//! This module owns that choice for each link, and the preparation of a sleep. It reads no frame. Read
//! [`Net::poll_link`] and [`Net::prepare_park`] first.

use std::sync::Arc;
use std::time::Duration;

use accl_wire::EventBitmap;

use super::{Net, Peer, PeerId};

/// Implements [`Net::poll_link`]. Returns `true` if a send waits for room on the link.
fn poll_link(peers: &mut [Peer], polled: &mut Vec<PeerId>, id: PeerId) -> bool {
    let peer = &mut peers[id.0 as usize];
    let Some(link) = peer.link.as_mut().filter(|_| !peer.is_polled) else { return false };
    link.disarm();
    (peer.is_polled, peer.idle_polls) = (true, 0);
    polled.push(id);
    std::mem::take(&mut peer.is_armed_for_room)
}

impl Net {
    /// Sets the number of polls without a frame after which a link is armed. Simulations use it, because their threads
    /// poll less often.
    pub fn set_polls_before_arming(&mut self, polls: u32) {
        self.polls_before_arming = polls;
    }

    /// Sets the event bitmap to which events of links are posted from now on.
    pub fn set_bitmap(&mut self, bitmap: Arc<dyn EventBitmap>) {
        self.bitmap = Some(bitmap);
    }

    /// Returns the peer at `index` in the list of polled links. Callers count from 0, because meanwhile peers may go
    /// and others take their index.
    #[inline]
    pub(crate) fn polled(&self, index: usize) -> Option<PeerId> {
        self.polled.get(index).copied()
    }

    /// Returns the number of times that a link was polled so far.
    pub(crate) fn polls(&self) -> u64 {
        self.polls
    }

    /// Makes passes poll this peer's link from now on.
    pub fn poll_link(&mut self, id: PeerId) {
        self.owes_pass |= poll_link(&mut self.peers, &mut self.polled, id);
    }

    /// Ends a pass: every send that waits for room has tried again, and its link will be armed for room if it found
    /// none. Arming clears the link's record of refused sends, so no link may be armed before this.
    pub(crate) fn end_pass(&mut self) {
        self.owes_pass = false;
    }

    /// Makes passes poll the links whose events were posted.
    #[inline]
    pub(crate) fn take_events(&mut self) {
        let Self { bitmap, by_slot, peers, polled, owes_pass, .. } = self;
        if let Some(bitmap) = bitmap {
            bitmap.take(&mut |slot| {
                // The slot's peer may be gone and have left events behind.
                if let Some(&id) = by_slot.get(&slot) {
                    *owes_pass |= poll_link(peers, polled, id);
                }
            });
        }
    }

    /// Records that a pass has polled a link, and whether it found something. A link that brought nothing for a while
    /// is armed.
    #[inline]
    pub(crate) fn note_poll(&mut self, id: PeerId, has_found: bool) {
        self.polls += 1;
        let peer = &mut self.peers[id.0 as usize];
        peer.idle_polls = if has_found { 0 } else { peer.idle_polls + 1 };
        if peer.idle_polls >= self.polls_before_arming {
            self.arm_idle(id);
        }
    }

    #[cold]
    fn arm_idle(&mut self, id: PeerId) {
        let peer = &mut self.peers[id.0 as usize];
        peer.idle_polls = 0;
        // A send that waits for room tries again in every pass, and sets `wants_room` then.
        let waits_for_room = std::mem::take(&mut peer.wants_room) || !peer.outbox.is_empty();
        if peer.slot.is_some() && peer.is_polled && !waits_for_room {
            self.arm(id);
            if !self.peer(id).is_polled {
                self.polled.retain(|&polled| polled != id);
            }
        }
    }

    /// Arms a polled link. Returns `true` if something was found, so that the link stays polled.
    fn arm(&mut self, id: PeerId) -> bool {
        self.polls += 1;
        let peer = &mut self.peers[id.0 as usize];
        let wants_room = std::mem::take(&mut peer.wants_room) || !peer.outbox.is_empty();
        let Some(link) = &mut peer.link else { return false };
        let has_events = link.arm(wants_room);
        // The sleeping thread must know when to poll this link without an event.
        let interval = link.poll_interval();
        self.poll_interval = self.poll_interval.into_iter().chain(interval).min();
        if has_events {
            link.disarm();
        }
        peer.is_armed_for_room = wants_room && !has_events;
        peer.is_polled = has_events || interval.is_some() || peer.slot.is_none();
        has_events
    }

    /// Arms all links. Returns `true` if something was found.
    fn arm_all(&mut self) -> bool {
        self.room_wanted = false;
        self.poll_interval = None;
        let mut has_events = false;
        let mut index = 0;
        while let Some(id) = self.polled(index) {
            has_events |= self.arm(id);
            if self.peer(id).is_polled {
                index += 1;
            } else {
                self.polled.swap_remove(index);
            }
        }
        has_events
    }

    /// Prepares a sleep: arms all links, and makes the first events wake the sleeping thread. Returns `true` if
    /// something was found, so that a pass is due.
    pub(crate) fn prepare_park(&mut self) -> bool {
        self.take_events();
        self.owes_pass || self.arm_all() || self.bitmap.as_ref().is_some_and(|bitmap| bitmap.listen())
    }

    /// Records that a thread polls for events while the driver sleeps, so that events wake no thread.
    pub(crate) fn mute(&mut self) {
        if let Some(bitmap) = &self.bitmap {
            bitmap.mute();
        }
    }

    /// Arms the links that a pass has polled while the driver sleeps. Returns `true` if something was found.
    pub(crate) fn arm_again(&mut self) -> bool {
        !self.polled.is_empty() && self.arm_all()
    }

    /// Returns how long a sleeping thread may leave the links unpolled, after [`Net::prepare_park`].
    pub(crate) fn poll_interval(&self) -> Option<Duration> {
        self.poll_interval
    }

    /// Returns whether something may happen that wakes no sleeping thread: a send waits for room that is not requested
    /// yet, or a link is polled.
    pub(crate) fn is_unarmed(&self) -> bool {
        self.room_wanted || self.polled.iter().any(|&id| self.peer(id).slot.is_some())
    }

    /// Ends the driver's sleep. Armed links stay armed, except for links that are always polled.
    pub(crate) fn unpark(&mut self) {
        self.mute();
        for index in 0..self.polled.len() {
            if let Some(link) = self.link(self.polled[index]) {
                link.disarm();
            }
        }
    }
}
