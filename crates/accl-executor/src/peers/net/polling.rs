//! Which links passes look at.
//!
//! A link is *polled*, that is, every pass looks at it, or it is *armed*: whoever brings it news posts them on the [`NewsBoard`], and then it is
//! polled again. It is armed when it has been looked at in vain for a while, and before a sleep. So neither a pass nor a sleep costs more
//! with more links.
//!
//! Owns that choice for each link, and what it takes to sleep. Reads no frame. Read [`Net::poll_link`] and [`Net::prepare_park`] first.

use std::sync::Arc;
use std::time::Duration;

use accl_wire::NewsBoard;

use super::{Net, Peer, PeerId};

/// See [`Net::poll_link`]. `true`: a send waits for room there.
fn poll_link(peers: &mut [Peer], polled: &mut Vec<PeerId>, id: PeerId) -> bool {
    let peer = &mut peers[id.0 as usize];
    let Some(link) = peer.link.as_mut().filter(|_| !peer.is_polled) else { return false };
    link.disarm();
    (peer.is_polled, peer.idle_looks) = (true, 0);
    polled.push(id);
    std::mem::take(&mut peer.is_armed_for_room)
}

impl Net {
    /// A link that is looked at so often in vain is armed. For simulations, whose threads look less often.
    pub fn set_looks_before_arming(&mut self, looks: u32) {
        self.looks_before_arming = looks;
    }

    /// Where news of links are posted from now on.
    pub fn set_board(&mut self, board: Arc<dyn NewsBoard>) {
        self.board = Some(board);
    }

    /// The peers whose links are looked at, one by one from 0: meanwhile some may go and others take their numbers.
    #[inline]
    pub(crate) fn polled(&self, index: usize) -> Option<PeerId> {
        self.polled.get(index).copied()
    }

    /// How often a link has been looked at so far.
    pub(crate) fn looks(&self) -> u64 {
        self.looks
    }

    /// Passes look at this peer's link from now on.
    pub fn poll_link(&mut self, id: PeerId) {
        self.owes_pass |= poll_link(&mut self.peers, &mut self.polled, id);
    }

    /// Every send that waits for room has tried again, and its link is to be armed for room if there was none. What a link has been refused is
    /// forgotten with its arming, so no link is armed before that.
    pub(crate) fn end_pass(&mut self) {
        self.owes_pass = false;
    }

    /// The links of which news were posted are polled from now on.
    #[inline]
    pub(crate) fn take_news(&mut self) {
        let Self { board, by_slot, peers, polled, owes_pass, .. } = self;
        if let Some(board) = board {
            board.take(&mut |slot| {
                // One that has gone may have left news behind.
                if let Some(&id) = by_slot.get(&slot) {
                    *owes_pass |= poll_link(peers, polled, id);
                }
            });
        }
    }

    /// A pass has looked at a link, and found something or not. One that has brought nothing for a while is armed.
    #[inline]
    pub(crate) fn note_look(&mut self, id: PeerId, has_found: bool) {
        self.looks += 1;
        let peer = &mut self.peers[id.0 as usize];
        peer.idle_looks = if has_found { 0 } else { peer.idle_looks + 1 };
        if peer.idle_looks >= self.looks_before_arming {
            self.arm_idle(id);
        }
    }

    #[cold]
    fn arm_idle(&mut self, id: PeerId) {
        let peer = &mut self.peers[id.0 as usize];
        peer.idle_looks = 0;
        // A send that waits for room tries again in every pass, and says so then.
        let waits_for_room = std::mem::take(&mut peer.wants_room) || !peer.outbox.is_empty();
        if peer.slot.is_some() && peer.is_polled && !waits_for_room {
            self.arm(id);
            if !self.peer(id).is_polled {
                self.polled.retain(|&polled| polled != id);
            }
        }
    }

    /// Arms a polled link. `true`: it is polled on, since something has come up.
    fn arm(&mut self, id: PeerId) -> bool {
        self.looks += 1;
        let peer = &mut self.peers[id.0 as usize];
        let wants_room = std::mem::take(&mut peer.wants_room) || !peer.outbox.is_empty();
        let Some(link) = &mut peer.link else { return false };
        let is_news = link.arm(wants_room);
        // Others are to know when to look again by themselves.
        let interval = link.poll_interval();
        self.poll_interval = self.poll_interval.into_iter().chain(interval).min();
        if is_news {
            link.disarm();
        }
        peer.is_armed_for_room = wants_room && !is_news;
        peer.is_polled = is_news || interval.is_some() || peer.slot.is_none();
        is_news
    }

    /// Arms all links. `true`: something has come up.
    fn arm_all(&mut self) -> bool {
        self.room_wanted = false;
        self.poll_interval = None;
        let mut is_news = false;
        let mut index = 0;
        while let Some(id) = self.polled(index) {
            is_news |= self.arm(id);
            if self.peer(id).is_polled {
                index += 1;
            } else {
                self.polled.swap_remove(index);
            }
        }
        is_news
    }

    /// Before a sleep: arms all links, and has the first news wake the sleeper. `true`: something came up meanwhile, and a pass is due.
    pub(crate) fn prepare_park(&mut self) -> bool {
        self.take_news();
        self.owes_pass || self.arm_all() || self.board.as_ref().is_some_and(|board| board.listen())
    }

    /// A thread looks for news while the driver sleeps: they wake nobody.
    pub(crate) fn mute(&mut self) {
        if let Some(board) = &self.board {
            board.mute();
        }
    }

    /// While the driver sleeps: arms the links that a pass has looked at. `true`: something came up meanwhile.
    pub(crate) fn arm_again(&mut self) -> bool {
        !self.polled.is_empty() && self.arm_all()
    }

    /// How long a sleeper may leave the links alone, after [`Net::prepare_park`].
    pub(crate) fn poll_interval(&self) -> Option<Duration> {
        self.poll_interval
    }

    /// Whether there is something of which nobody would tell a sleeper: a send waits for room that is not asked for yet, or a link is polled.
    pub(crate) fn is_unarmed(&self) -> bool {
        self.room_wanted || self.polled.iter().any(|&id| self.peer(id).slot.is_some())
    }

    /// The driver sleeps no more. What it has armed stays so, but for what is always polled.
    pub(crate) fn unpark(&mut self) {
        self.mute();
        for index in 0..self.polled.len() {
            if let Some(link) = self.link(self.polled[index]) {
                link.disarm();
            }
        }
    }
}
