//! Events from the sockets of a rank to the task that owns the engines.
//!
//! Owns only the definitions: the tasks of sockets send events, and the one task of all engines handles them. Read [`Event`] first.

use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::engine::Caller;

/// Pause before the next connection is accepted if the process has no free file descriptors.
pub(super) const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Identifier of a host's connection, unique among all connections that a rank has ever had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct HostId(pub(super) u64);

impl HostId {
    /// Returns the identifier that the engine uses for this host.
    pub(super) fn caller(self) -> Caller {
        Caller(self.0)
    }
}

/// Event that concerns an engine.
pub(super) enum Event {
    /// A host has sent a request.
    Request { rank: u32, host: HostId, text: Vec<u8>, reply: oneshot::Sender<String> },
    /// The connection of a host has ended.
    Gone { rank: u32, host: HostId },
    /// A packet of a job has arrived. The socket reads more packets of the same peer once the permit is dropped.
    Packet { to: u32, from: u32, job: u32, packet: Vec<u8>, permit: OwnedSemaphorePermit },
    /// A kernel has sent bytes. The socket reads more bytes once `more` is notified.
    Fed { rank: u32, bytes: Vec<u8>, more: oneshot::Sender<()> },
    /// An engine of another process has subscribed to an engine of this process.
    Subscribed { rank: u32, by: u32 },
    /// An engine of another process is no longer subscribed.
    Unsubscribed { rank: u32, by: u32 },
    /// An engine of this process has subscribed to an engine of another process.
    Found { rank: u32, peer: u32 },
    /// The connection to an engine of another process has ended. All packets that it sent have been delivered before this event.
    Lost { rank: u32, peer: u32 },
}
