//! What an engine is doing and has done, at one moment, as plain data: for people, tools and tests.
//!
//! Owns the form of what is shown; what is counted is counted where it happens. Read [`Snapshot`] first.

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

/// What an engine is doing and has done.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// What progress has cost.
    pub work: Work,
    /// How often a thread has slept until news came.
    pub parks: u64,
    /// How often one has asked the system for news without sleeping.
    pub looks: u64,
    /// Processes that this one has been in a group with: all, or those of one group by rank.
    pub peers: Vec<PeerSnapshot>,
    /// Groups that this process is in: all, or the one that was asked.
    pub groups: Vec<GroupSnapshot>,
}

/// A peer process.
#[derive(Clone, Debug)]
pub struct PeerSnapshot {
    /// Its identity.
    uuid: [u8; 16],
    /// Its rank in the group that was asked; `None` when the engine was.
    pub rank: Option<Rank>,
    /// `host worker-3, pid 4711`.
    pub process: String,
    /// Transport and addresses of the link to it; `None` before it is made, and after the peer has gone.
    pub link: Option<String>,
    /// Why nothing more comes from it, once that is so.
    pub gone: Option<String>,
    /// What has gone there and come from there over its link, for all groups.
    pub traffic: Traffic,
    /// As much of that as carries data of calls of the group that was asked; `None` when the engine was.
    pub of_group: Option<Traffic>,
    /// System calls made for its link.
    pub system_calls: u64,
}

/// A group.
#[derive(Clone, Debug)]
pub struct GroupSnapshot {
    /// Its number, which is the same on all ranks.
    pub id: u64,
    /// Its name for messages.
    pub name: String,
    /// This process's rank.
    pub rank: Rank,
    /// Number of ranks.
    pub world: u32,
    /// Collectives that were made here.
    pub collectives: u64,
    /// Messages that were made here, sends and receives.
    pub messages: u64,
    /// How many of all these have failed.
    pub failed: u64,
    /// What its calls have sent and received, with all ranks.
    pub traffic: Traffic,
    /// Of that, what went by each of its lanes.
    pub lanes: Vec<Traffic>,
    /// How often a caller has waited for a call that was not done when it was made.
    pub waits: u64,
    /// How long all these waits took.
    pub waited: Duration,
    /// Why the group takes no more calls, if it does not.
    pub failure: Option<String>,
    /// Calls that have been made and are not done.
    pub in_flight: Vec<CallSnapshot>,
}

/// A call in flight.
#[derive(Clone, Debug)]
pub struct CallSnapshot {
    /// What it does.
    pub collective: Collective,
    /// Its number in the group.
    pub seq: u64,
    /// For how long it has been in flight.
    pub age: Duration,
    /// The ranks that it waits for; none if it waits for any, or for its turn.
    pub awaits: Vec<Rank>,
    /// An external operation that is under way for it, in words. A call that has failed is in flight until it has stopped.
    pub external: Option<String>,
}

impl Snapshot {
    /// System calls for links and for news. Those for memory and threads are not among them.
    pub fn system_calls(&self) -> u64 {
        self.parks + self.looks + self.peers.iter().map(|peer| peer.system_calls).sum::<u64>()
    }

    fn new(driver: &Driver, peers: Vec<PeerSnapshot>, groups: Vec<GroupSnapshot>, work: Work) -> Self {
        Self { work, parks: driver.parks(), looks: driver.looks(), peers, groups }
    }

    /// Adds what went by the lanes beside the first, which have the same peers and groups; for each peer, also what went for this group.
    fn add_lanes(&mut self, others: &[Arc<Driver>], of_group: Option<u64>) {
        let places: HashMap<[u8; 16], usize> =
            self.peers.iter().enumerate().map(|(place, peer)| (peer.uuid, place)).collect();
        for (number, lane) in (1..).zip(others) {
            (self.parks, self.looks) = (self.parks + lane.parks(), self.looks + lane.looks());
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
                // The same operation leads from the identity of a lane to that of the first one.
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

    /// Of nothing: the lock may have been held by another thread when the process forked, and then nobody ever gives it back.
    fn of_a_forked_child(driver: &Driver) -> Self {
        Self::new(driver, Vec::new(), Vec::new(), Work::default())
    }
}

impl Engine {
    /// What this process is doing and has done, in all its groups. It takes the lock of the engine for as long as it takes to
    /// write this down, which grows with the number of peers and groups. In a forked child it takes no lock, and there is nothing
    /// to write down.
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
    /// As [`Engine::snapshot`], of this group and its ranks. After the group has been left, and in a forked child, of nothing.
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

/// By peer, what the calls of all groups that there are have sent and received.
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

/// What the calls of a group have sent and received, with all ranks.
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
        failure: state.poison().map(ToString::to_string),
        in_flight: in_flight.collect(),
    }
}
