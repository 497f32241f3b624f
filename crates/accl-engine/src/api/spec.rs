//! What a group is made from.

use std::net::IpAddr;
use std::time::Duration;

use accl_types::Rank;
use accl_types::config::Config;

/// Role of a group in its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupRole {
    /// The default process group, which has the process's device. The caller knows it: no other argument says so.
    Default,
    /// Any other group: a sub-group, or one of other processes over a store of its own.
    Other,
}

/// What a group is made from.
#[derive(Clone, Debug)]
pub struct GroupSpec {
    /// Name for messages.
    pub name: String,
    /// This process's rank.
    pub rank: Rank,
    /// Number of ranks.
    pub world: u32,
    /// How long a call may take, and the making of the group.
    pub timeout: Duration,
    /// Settings; those of process scope must equal the first group's.
    pub config: Config,
    /// Address of the store's master, if known: the interface with the route to it is offered to peers first.
    pub master: Option<IpAddr>,
    /// Ranks in the job of this group's ranks: the job whose ranks meet in the same store. Empty where the ranks are the job's own numbers, or
    /// no job is known.
    pub global_ranks: Vec<u64>,
    /// Role of the group.
    pub role: GroupRole,
}
