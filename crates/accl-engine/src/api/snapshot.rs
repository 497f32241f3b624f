//! State and counters of an engine at one moment, as plain data: for people, tools and tests.
//!
//! Owns the form of the data; other modules maintain the counters. Read [`Snapshot`] first.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use accl_types::{Collective, Rank};

use crate::driver::Driver;
use crate::engine::Engine;
use crate::time;
use accl_executor::group::{CallInFlight, Core, GroupState, Work};
use accl_executor::peers::{Members, PeerId, Traffic};

use super::group::Group;

/// State and counters of an engine.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Cost of progress so far.
    pub work: Work,
    /// Number of times a thread has slept until an event came.
    pub parks: u64,
    /// Number of times a thread has polled the system for events without sleeping.
    pub polls: u64,
    /// Processes that shared a group with this one. A group's snapshot lists only the group's processes, by rank.
    pub peers: Vec<PeerSnapshot>,
    /// Groups that this process is in. A group's snapshot lists only that group.
    pub groups: Vec<GroupSnapshot>,
}

/// A peer process.
#[derive(Clone, Debug)]
pub struct PeerSnapshot {
    /// Identity of the process.
    uuid: [u8; 16],
    /// Rank in the group of a group's snapshot; `None` in an engine's snapshot.
    pub rank: Option<Rank>,
    /// Description of the process, such as `host worker-3, pid 4711`.
    pub process: String,
    /// Transport and addresses of the link to the peer; `None` before the link exists and after the peer is gone.
    pub link: Option<String>,
    /// Why the peer sends nothing more; `None` while it is not gone.
    pub gone: Option<String>,
    /// Traffic to and from the peer over its link, for all groups.
    pub traffic: Traffic,
    /// The part of that traffic that carries data of the group's calls; `None` in an engine's snapshot.
    pub of_group: Option<Traffic>,
    /// Number of system calls made for the peer's link.
    pub system_calls: u64,
}

/// A group.
#[derive(Clone, Debug)]
pub struct GroupSnapshot {
    /// Number of the group, which is the same on all ranks.
    pub id: u64,
    /// Name of the group in messages.
    pub name: String,
    /// Rank of this process.
    pub rank: Rank,
    /// Number of ranks.
    pub world: u32,
    /// Number of collectives issued here.
    pub collectives: u64,
    /// Number of point-to-point messages issued here, sends and receives.
    pub messages: u64,
    /// Number of those collectives and messages that have failed.
    pub failed: u64,
    /// Traffic of the group's calls with all ranks.
    pub traffic: Traffic,
    /// The same traffic, by lane.
    pub lanes: Vec<Traffic>,
    /// Number of times a caller has waited for a call that had not completed when it was issued.
    pub waits: u64,
    /// Total duration of these waits.
    pub waited: Duration,
    /// Why the group accepts no more calls; `None` while it is usable.
    pub failure: Option<String>,
    /// Calls that were issued and have not completed.
    pub in_flight: Vec<CallSnapshot>,
}

/// A call in flight.
#[derive(Clone, Debug)]
pub struct CallSnapshot {
    /// Operation of the call.
    pub collective: Collective,
    /// Sequence number of the call in the group.
    pub seq: u64,
    /// Time that the call has been in flight.
    pub age: Duration,
    /// Ranks that the call waits for; empty if it waits for any rank, or for its turn.
    pub awaits: Vec<Rank>,
    /// Description of the external operation that runs for the call. A failed call stays in flight until that operation
    /// has stopped.
    pub external: Option<String>,
}

impl Snapshot {
    /// Returns the number of system calls for links and for polling events. System calls for memory and threads are not
    /// counted.
    pub fn system_calls(&self) -> u64 {
        self.parks + self.polls + self.peers.iter().map(|peer| peer.system_calls).sum::<u64>()
    }

    fn new(driver: &Driver, peers: Vec<PeerSnapshot>, groups: Vec<GroupSnapshot>, work: Work) -> Self {
        Self { work, parks: driver.parks(), polls: driver.polls(), peers, groups }
    }

    /// Adds the traffic of the lanes after the first, which have the same peers and groups. With `of_group`, also adds
    /// each peer's traffic for that group.
    fn add_lanes(&mut self, others: &[Arc<Driver>], of_group: Option<u64>) {
        let places: HashMap<[u8; 16], usize> =
            self.peers.iter().enumerate().map(|(place, peer)| (peer.uuid, place)).collect();
        for (number, lane) in (1..).zip(others) {
            (self.parks, self.polls) = (self.parks + lane.parks(), self.polls + lane.polls());
            let (peers, groups) = lane.with_core(|core| {
                let of_groups = traffic_of_groups(core);
                let peers: Vec<PeerSnapshot> = core.net.all().map(|id| peer(core, id, &of_groups)).collect();
                let groups: Vec<(u64, Traffic)> = core.groups().map(|state| (state.id(), traffic_of(state))).collect();
                if let Some(members) = of_group.and_then(|id| core.group(id)).map(GroupState::members) {
                    for peer in &mut self.peers {
                        if let (Some(here), Some(rank)) = (&mut peer.of_group, peer.rank) {
                            *here = here.plus(members.traffic(rank));
                        }
                    }
                }
                (peers, groups)
            });
            for there in peers {
                // `lane_uuid` is its own inverse: it maps a lane's identity back to the identity of the first lane.
                let first = accl_wire::lane_uuid(&there.uuid, number);
                if let Some(here) = places.get(&first).and_then(|&place| self.peers.get_mut(place)) {
                    here.traffic = here.traffic.plus(there.traffic);
                    here.system_calls += there.system_calls;
                }
            }
            for (id, traffic) in groups {
                if let Some(here) = self.groups.iter_mut().find(|here| here.id == id) {
                    here.traffic = here.traffic.plus(traffic);
                    here.lanes.push(traffic);
                }
            }
        }
    }

    /// Returns an empty snapshot. Another thread may have held the lock when the process forked, and then no thread
    /// ever releases it.
    fn of_a_forked_child(driver: &Driver) -> Self {
        Self::new(driver, Vec::new(), Vec::new(), Work::default())
    }
}

impl Engine {
    /// Returns the state and counters of this process in all its groups. Holds the engine's lock while it copies them,
    /// which takes longer with more peers and groups. In a forked child it takes no lock, and the snapshot is empty.
    pub fn snapshot(&self) -> Snapshot {
        if self.driver.is_forked() {
            return Snapshot::of_a_forked_child(&self.driver);
        }
        let mut snapshot = self.driver.with_core(|core| {
            let of_groups = traffic_of_groups(core);
            let peers = core.net.all().map(|id| peer(core, id, &of_groups)).collect();
            let groups = core.groups().map(|state| group(core, state)).collect();
            Snapshot::new(&self.driver, peers, groups, core.work())
        });
        snapshot.add_lanes(self.other_lanes(), None);
        snapshot
    }
}

impl Group {
    /// Like [`Engine::snapshot`], for this group and its ranks. The snapshot is empty in a forked child, and lacks
    /// peers and the group once the group was left.
    pub fn snapshot(&self) -> Snapshot {
        if self.driver.is_forked() {
            return Snapshot::of_a_forked_child(&self.driver);
        }
        let mut snapshot = self.driver.with_core(|core| {
            let core = &*core;
            let state = core.group(self.caller.group);
            let of_groups = traffic_of_groups(core);
            let of_rank = |members: &Members, rank: Rank| PeerSnapshot {
                rank: Some(rank),
                of_group: Some(members.traffic(rank)),
                ..peer(core, members.peer(rank), &of_groups)
            };
            let members = state.map(GroupState::members);
            let peers = members.into_iter().flat_map(|members| members.ranks().map(|rank| of_rank(members, rank)));
            let peers = peers.collect();
            Snapshot::new(&self.driver, peers, state.map(|state| group(core, state)).into_iter().collect(), core.work())
        });
        snapshot.add_lanes(&self.lanes, Some(self.caller.group));
        snapshot
    }
}

/// Returns the traffic of the calls of all existing groups, by peer.
fn traffic_of_groups(core: &Core) -> HashMap<PeerId, Traffic> {
    let mut found: HashMap<PeerId, Traffic> = HashMap::new();
    for members in core.groups().map(GroupState::members) {
        for rank in members.ranks() {
            let total = found.entry(members.peer(rank)).or_default();
            *total = total.plus(members.traffic(rank));
        }
    }
    found
}

/// Returns the traffic of a group's calls with all ranks.
fn traffic_of(state: &GroupState) -> Traffic {
    let ranks = state.members().ranks().map(|rank| state.members().traffic(rank));
    ranks.fold(Traffic::default(), Traffic::plus)
}

fn peer(core: &Core, id: PeerId, of_groups: &HashMap<PeerId, Traffic>) -> PeerSnapshot {
    let peer = core.net.peer(id);
    let (link, system_calls) = core.net.link_of(id).unzip();
    let traffic = peer.traffic().plus(of_groups.get(&id).copied().unwrap_or_default());
    let (process, gone, system_calls) =
        (core.net.host_and_pid(id), core.net.why_gone(id), system_calls.unwrap_or_default());
    PeerSnapshot { uuid: peer.info().uuid, rank: None, process, link, gone, traffic, of_group: None, system_calls }
}

fn group(core: &Core, state: &GroupState) -> GroupSnapshot {
    let now = time::now();
    let (collectives, messages, failed) = state.counts();
    let in_flight = core.in_flight(state.id()).into_iter().map(|CallInFlight { call, awaits, external }| {
        CallSnapshot { collective: call.collective, seq: call.seq, age: now.since(call.started()), awaits, external }
    });
    let (waits, waited) = state.waits().total();
    let traffic = traffic_of(state);
    GroupSnapshot {
        id: state.id(),
        traffic,
        lanes: vec![traffic],
        waits,
        waited,
        name: state.name().to_string(),
        rank: state.rank(),
        world: state.members().world(),
        collectives,
        messages,
        failed,
        failure: state.failure().map(ToString::to_string),
        in_flight: in_flight.collect(),
    }
}
