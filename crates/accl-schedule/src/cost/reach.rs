//! The reach of a phase's messages: within a host or between hosts, counted from senders and receivers.
//!
//! Read [`Among`] first.

use accl_types::Rank;

use crate::topology::Topology;

/// The messages of all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reach {
    /// Messages within a host.
    pub intra_node: u64,
    /// Messages between hosts.
    pub inter_node: u64,
    /// Messages that leave or enter the busiest host, whichever are more.
    pub uplink: u64,
}

impl Reach {
    /// All messages.
    pub fn sum(self) -> u64 {
        self.intra_node + self.inter_node
    }

    /// The messages of `times` repetitions.
    #[must_use]
    pub fn times(self, times: u32) -> Reach {
        let times = u64::from(times);
        Reach { intra_node: self.intra_node * times, inter_node: self.inter_node * times, uplink: self.uplink * times }
    }
}

/// Counts of messages or steps, within a host and between hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ends {
    /// Between ranks of one host.
    pub intra_node: u32,
    /// Between hosts.
    pub inter_node: u32,
}

impl Ends {
    /// Both together.
    pub fn sum(self) -> u32 {
        self.intra_node + self.inter_node
    }

    /// `count` messages. If any message of the phase is between hosts, all of them are.
    pub(super) fn of(count: u32, reach: Reach) -> Ends {
        if reach.inter_node > 0 {
            Ends { intra_node: 0, inter_node: count }
        } else {
            Ends { intra_node: count, inter_node: 0 }
        }
    }
}

/// The participants of a phase.
#[derive(Clone, Copy, Debug)]
pub enum Among<'a> {
    /// All ranks.
    World(&'a Topology),
    /// The ranks of each host separately.
    Hosts(&'a Topology),
    /// A number of teams, each with one rank per host.
    Leaders(&'a Topology, u32),
}

impl Among<'_> {
    /// Number of members of the largest team.
    pub fn size(self) -> u32 {
        match self {
            Among::World(topology) => topology.world(),
            Among::Hosts(topology) => topology.largest_host(),
            Among::Leaders(topology, _) => topology.host_count(),
        }
    }

    /// Messages between members, one for each pair of positions in a team. Messages to oneself are not counted.
    pub fn pairs(self, pairs: impl IntoIterator<Item = (u32, u32)>) -> Reach {
        let pairs = pairs.into_iter().filter(|(from, to)| from != to);
        match self {
            Among::World(topology) if topology.host_count() == 1 => {
                Reach { intra_node: pairs.count() as u64, ..Reach::default() }
            }
            Among::World(topology) => {
                let mut counter = Counter::new(topology);
                pairs.for_each(|(from, to)| counter.add(from, to, 1));
                counter.reach
            }
            Among::Hosts(topology) => {
                let mut intra_node = 0;
                for (from, to) in pairs {
                    let fits = |ranks: &&Vec<u32>| ranks.len() as u32 > from.max(to);
                    intra_node += topology.hosts().iter().filter(fits).count() as u64;
                }
                Reach { intra_node, ..Reach::default() }
            }
            Among::Leaders(topology, teams) => {
                let singles = Topology::new((0..topology.host_count()).collect());
                let mut counter = Counter::new(&singles);
                pairs.for_each(|(from, to)| counter.add(from, to, 1));
                counter.reach.times(teams)
            }
        }
    }

    /// Every member sends to the member `distance` positions after it.
    pub fn shift(self, distance: u32) -> Reach {
        let size = self.size();
        match self {
            Among::World(_) | Among::Leaders(..) => self.pairs((0..size).map(|from| (from, (from + distance) % size))),
            Among::Hosts(topology) => {
                let lens = topology.hosts().iter().map(|ranks| ranks.len() as u64);
                let intra_node = lens.filter(|len| !u64::from(distance).is_multiple_of(*len)).sum();
                Reach { intra_node, ..Reach::default() }
            }
        }
    }

    /// Every member sends to, or receives from, each of the first `owners` members.
    pub(super) fn all_pairs(self, owners: u32) -> Reach {
        let owners = u64::from(owners);
        match self {
            Among::World(topology) => {
                let world = u64::from(topology.world());
                let lens = || topology.hosts().iter().map(|ranks| ranks.len() as u64);
                Reach {
                    intra_node: lens().map(|len| len * (len - 1)).sum(),
                    inter_node: lens().map(|len| len * (world - len)).sum(),
                    uplink: lens().map(|len| len * (world - len)).max().unwrap_or(0),
                }
            }
            Among::Hosts(topology) => {
                let intra_node = topology.hosts().iter().map(|ranks| (ranks.len() as u64 - 1) * owners).sum();
                Reach { intra_node, ..Reach::default() }
            }
            Among::Leaders(topology, teams) => {
                let (hosts, teams) = (u64::from(topology.host_count()), u64::from(teams));
                Reach { intra_node: 0, inter_node: teams * hosts * (hosts - 1), uplink: teams * (hosts - 1) }
            }
        }
    }

    /// The path from a member to the root of a tree that crosses hosts most often.
    pub(super) fn longest_path(self, parent: &impl Fn(u32) -> Option<u32>) -> Ends {
        let parents: Vec<Option<u32>> = (0..self.size()).map(parent).collect();
        let host = |member: u32| match self {
            Among::World(topology) => topology.host_of(Rank(member)),
            Among::Hosts(_) => 0,
            Among::Leaders(..) => member,
        };
        let path = |member: u32| {
            let steps = std::iter::successors(Some(member), |&at| parents[at as usize]);
            let mut path = Ends::default();
            for at in steps {
                match parents[at as usize] {
                    Some(above) if host(above) == host(at) => path.intra_node += 1,
                    Some(_) => path.inter_node += 1,
                    None => {}
                }
            }
            path
        };
        (0..self.size()).map(path).max_by_key(|path| (path.inter_node, path.intra_node)).unwrap_or_default()
    }

    /// Maximum number of a rank's team peers that are on other hosts.
    pub(super) fn strangers(self) -> u32 {
        match self {
            Among::World(topology) => topology.world() - topology.smallest_host(),
            Among::Hosts(_) => 0,
            Among::Leaders(topology, _) => topology.host_count() - 1,
        }
    }
}

/// Counts messages by host.
struct Counter<'a> {
    topology: &'a Topology,
    reach: Reach,
    /// For each host: messages that leave it and messages that enter it.
    crossing: Vec<[u64; 2]>,
}

impl<'a> Counter<'a> {
    fn new(topology: &'a Topology) -> Self {
        Self { topology, reach: Reach::default(), crossing: vec![[0; 2]; topology.host_count() as usize] }
    }

    fn add(&mut self, from: u32, to: u32, count: u64) {
        let (from, to) = (self.topology.host_of(Rank(from)), self.topology.host_of(Rank(to)));
        if from == to {
            self.reach.intra_node += count;
            return;
        }
        self.reach.inter_node += count;
        for (host, way) in [(from, 0), (to, 1)] {
            let crossing = &mut self.crossing[host as usize][way];
            *crossing += count;
            self.reach.uplink = self.reach.uplink.max(*crossing);
        }
    }
}
