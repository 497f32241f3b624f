//! Creation of the links to all ranks of a group at once. It lets a caller check early that all ranks can reach each
//! other.
//!
//! Owns the waiting; `connector` makes the links, like those that a call requests. Read [`Group::connect_all`]
//! first.

use std::time::Duration;

use accl_types::{Error, Rank, Result};

use super::group::Group;
use crate::time;
use accl_executor::peers::missing;

/// Interval at which `interrupt` is called.
const TICK: Duration = Duration::from_millis(50);

impl Group {
    /// Creates all missing links of this rank at once. Without it, calls create the links that they need, one by one.
    /// The other ranks need not call this. A failure leaves the group usable.
    ///
    /// # Errors
    /// `PeerLost` naming a rank that cannot be reached; `Timeout` after the group's timeout, naming the ranks without a
    /// link. `Aborted` when the group failed or was destroyed (the kind of its cause if no call has raised that), or
    /// `interrupt` returned true. `interrupt` is called
    /// about every 50 ms.
    pub fn connect_all(&self, interrupt: &mut dyn FnMut() -> bool) -> Result<()> {
        let timeout = self.with_state(|group, context| {
            if let Some(error) = group.aborted(None) {
                return Err(error);
            }
            group.members().ranks().for_each(|rank| context.net.want(group.members().peer(rank)));
            Ok(group.timeout())
        })??;
        let deadline = time::now() + timeout;
        let connector = self.engine.parts(None)?.connector;
        loop {
            if self.missing_links()?.is_empty() {
                return Ok(());
            }
            connector.await_change(TICK, || self.has_all_links_or_failed());
            if interrupt() {
                return Err(self.in_context(Error::aborted("interrupted while creating links")));
            }
            if time::now() >= deadline {
                return Err(self.in_context(self.unlinked(timeout, &self.missing_links()?)));
            }
        }
    }

    /// Whether there is nothing to wait for. Does not raise the group's failure, whose first error has its own kind.
    fn has_all_links_or_failed(&self) -> bool {
        let is_over = self.with_state(|group, context| {
            let peers = || group.members().ranks().map(|rank| group.members().peer(rank));
            group.failure().is_some()
                || peers().any(|peer| context.net.why_gone(peer).is_some())
                || peers().all(|peer| context.net.is_linked(peer))
        });
        is_over.unwrap_or(true)
    }

    /// Returns the ranks that have no link yet.
    fn missing_links(&self) -> Result<Vec<Rank>> {
        self.with_state(|group, context| {
            if let Some(error) = group.aborted(None) {
                return Err(error);
            }
            let peer = |rank: Rank| group.members().peer(rank);
            let lost = group.members().ranks().find_map(|rank| Some((rank, context.net.why_gone(peer(rank))?)));
            if let Some((rank, why)) = lost {
                let text = format!("no link to {}: {why}", group.members().describe(rank, context.net));
                return Err(self.in_context(Error::peer_lost(text).with_peer(rank)));
            }
            Ok(group.members().ranks().filter(|&rank| !context.net.is_linked(peer(rank))).collect())
        })?
    }

    fn unlinked(&self, timeout: Duration, missing: &[Rank]) -> Error {
        let listed = self.with_state(|group, context| {
            let missing: Vec<_> = missing.iter().map(|&rank| (rank, group.members().peer(rank))).collect();
            missing::unlinked(&missing, context.net)
        });
        Error::timeout(format!(
            "after {} ms, {} of {} ranks have no link to this rank: {}",
            timeout.as_millis(),
            missing.len(),
            self.caller.world - 1,
            listed.unwrap_or_default()
        ))
    }
}
