//! Internal messages of the engine, which it takes back when nothing more can come of them.
//!
//! This module owns how they are found. Read [`P2p::cancel`] first.

use accl_types::Rank;

use super::{Message, P2p, PRIVATE_TAGS};
use crate::call::CallState;

impl P2p {
    /// Takes back a private receive that has not been matched.
    pub fn cancel(&mut self, call: &CallState) -> Option<Message> {
        self.take_private_posted(|message| std::ptr::eq(&*message.call, call)).pop()
    }

    /// Takes back private receives that have not been matched, and private sends that have not begun, of the ranks that
    /// `choose` picks.
    pub(crate) fn take_private(&mut self, choose: impl Fn(Rank) -> bool) -> Vec<Message> {
        if self.private == 0 {
            return Vec::new();
        }
        let mut taken = self.take_private_posted(|message| message.peer.is_some_and(&choose));
        let posted = taken.len();
        for (rank, peer) in (0..).map(Rank).zip(&mut self.peers) {
            if peer.unbegun.is_empty() || !choose(rank) {
                continue;
            }
            for sending in std::mem::take(&mut peer.unbegun) {
                self.steps.set(self.steps.get() + 1);
                if sending.message.is_private {
                    taken.push(sending.message);
                } else {
                    peer.unbegun.push_back(sending);
                }
            }
        }
        // `take_private_posted` has already removed the posted ones from the records.
        taken[posted..].iter().for_each(|message| self.leave(message));
        taken
    }

    fn take_private_posted(&mut self, choose: impl Fn(&Message) -> bool) -> Vec<Message> {
        let mut taken = Vec::new();
        for queue in self.posted.range_mut((PRIVATE_TAGS, None)..).map(|(_, queue)| queue) {
            for posted in std::mem::take(queue) {
                self.steps.set(self.steps.get() + 1);
                if choose(&posted.message) {
                    taken.push(posted.message);
                } else {
                    queue.push_back(posted);
                }
            }
        }
        if !taken.is_empty() {
            self.posted.retain(|_, queue| !queue.is_empty());
        }
        taken.iter().for_each(|message| self.leave(message));
        taken
    }
}
