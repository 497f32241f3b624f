//! Description from which a group is created.

use std::net::IpAddr;
use std::time::Duration;

use accl_types::Rank;
use accl_types::config::Config;

/// Role of a group in its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupRole {
    /// The default process group, which uses the process's device. Only this value identifies it.
    Default,
    /// Any other group: a sub-group, or a group of other processes with a store of its own.
    Other,
}

/// Description from which a group is created.
#[derive(Clone, Debug)]
pub struct GroupSpec {
    /// Name of the group in messages.
    pub name: String,
    /// Rank of this process.
    pub rank: Rank,
    /// Number of ranks.
    pub world: u32,
    /// Maximum time for a call, and for the creation of the group.
    pub timeout: Duration,
    /// Settings. Settings of process scope must equal the first group's.
    pub config: Config,
    /// Address of the store's master, if known. The interface that routes to it is offered to peers first.
    pub master: Option<IpAddr>,
    /// Rank in the job of each rank of this group; the job's ranks meet in the same store. Empty if this group's ranks
    /// are the job's ranks, or if no job is known.
    pub global_ranks: Vec<u64>,
    /// Role of the group.
    pub role: GroupRole,
}
