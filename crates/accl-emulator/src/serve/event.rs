//! What happens at the sockets of a rank, as its engine is told.
//!
//! Owns the words alone: tasks of sockets send them, and the one task of all engines acts on them. Read [`Event`] first.

use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::engine::Caller;

/// Before another connection is taken, where the process has no room for more.
pub(super) const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A connection of a host, among all that a rank has ever had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct HostId(pub(super) u64);

impl HostId {
    /// As its engine knows it.
    pub(super) fn caller(self) -> Caller {
        Caller(self.0)
    }
}

/// What happens to the engines.
pub(super) enum Event {
    /// A host asks.
    Request { rank: u32, host: HostId, text: Vec<u8>, reply: oneshot::Sender<String> },
    /// It asks no more: its connection has ended.
    Gone { rank: u32, host: HostId },
    /// A packet of a job has come; more come of the same peer once the permit is gone.
    Packet { to: u32, from: u32, job: u32, packet: Vec<u8>, permit: OwnedSemaphorePermit },
    /// A kernel has something, and has more once it is told so.
    Fed { rank: u32, bytes: Vec<u8>, more: oneshot::Sender<()> },
    /// An engine of another process listens to one of this.
    Heard { rank: u32, by: u32 },
    /// It does not any more.
    Unheard { rank: u32, by: u32 },
    /// An engine of this process listens to one of another.
    Found { rank: u32, peer: u32 },
    /// It has gone. All that it has sent has come before.
    Lost { rank: u32, peer: u32 },
}
