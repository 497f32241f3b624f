//! Hosts that do not answer: the system would keep retransmitting for a quarter of an hour.
//!
//! Owns when such hosts are looked for, and when one counts as vanished. Read [`Core::check_silence`] first.

use std::time::Duration;

use accl_types::{Error, Moment};

use super::core::Core;

/// Unresponsive time after which a host counts as vanished, if no call has a shorter timeout. Keep-alive allows an idle
/// link the same time.
pub const VANISHED: Duration = Duration::from_secs(30);
/// Interval between checks for unresponsive hosts.
pub const SILENCE_CHECK_INTERVAL: Duration = Duration::from_secs(1);

impl Core {
    /// Returns when a driver that goes to sleep now must check for unresponsive hosts, if any link needs it. While the
    /// driver sleeps, other threads may send, and do not wake it for this.
    pub(super) fn next_silence_check(&self, now: Moment) -> Option<Moment> {
        let asked = self.silence_at.filter(|_| self.net.awaits_answers());
        asked.or_else(|| self.net.has_streams().then(|| now + VANISHED))
    }

    /// Gives up peers whose host has vanished. The system would keep retransmitting for a quarter of an hour, and no
    /// call on the link waits that long.
    pub(super) fn check_silence(&mut self, now: Moment) {
        let is_late = || self.next_deadline().is_some_and(|deadline| deadline <= now);
        if self.silence_at.is_some_and(|at| now < at) && !is_late() {
            return;
        }
        self.silence_at = Some(now + SILENCE_CHECK_INTERVAL);
        for (id, silence) in self.net.take_unresponsive() {
            let allowed = self.active.iter().filter_map(|group| self.groups.get(group)?.least_allowance(id)).min();
            if silence >= allowed.unwrap_or(VANISHED).min(VANISHED) {
                let error = Error::peer_lost(format!(
                    "{}: its host has not answered for {} ms, despite retransmissions; check the network \
                     between the hosts",
                    self.net.describe(id),
                    silence.as_millis()
                ));
                self.net.abandon(id);
                self.net.mark_gone(id, error);
            }
        }
    }
}
