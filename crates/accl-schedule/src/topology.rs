//! The ranks of each host. Owns only the grouping; the engine determines it.

use accl_types::Rank;

/// The host of each rank of a group. Hosts are numbered in the order of their first rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Topology {
    host_of: Vec<u32>,
    hosts: Vec<Vec<u32>>,
}

impl Topology {
    /// All ranks on one host.
    pub fn flat(world: u32) -> Topology {
        Topology::new(vec![0; world as usize])
    }

    /// Creates the topology from `hosts[r]`, the host of rank r. Any numbers are allowed; equal numbers mean the same
    /// host.
    pub fn new(hosts: Vec<u32>) -> Topology {
        let mut number_of = std::collections::HashMap::new();
        let mut topology = Topology { host_of: Vec::with_capacity(hosts.len()), hosts: Vec::new() };
        for (rank, host) in hosts.into_iter().enumerate() {
            let number = *number_of.entry(host).or_insert_with(|| {
                topology.hosts.push(Vec::new());
                topology.hosts.len() - 1
            });
            topology.host_of.push(number as u32);
            topology.hosts[number].push(rank as u32);
        }
        topology
    }

    /// Number of ranks.
    pub fn world(&self) -> u32 {
        self.host_of.len() as u32
    }

    /// Number of hosts.
    pub fn host_count(&self) -> u32 {
        self.hosts.len() as u32
    }

    /// The host of a rank.
    pub fn host_of(&self, rank: Rank) -> u32 {
        self.host_of[rank.index()]
    }

    /// The ranks of a host, ascending.
    pub fn ranks_of(&self, host: u32) -> &[u32] {
        &self.hosts[host as usize]
    }

    /// The ranks of each host, ascending.
    pub fn hosts(&self) -> &[Vec<u32>] {
        &self.hosts
    }

    /// Number of ranks on the host with the fewest ranks.
    pub fn smallest_host(&self) -> u32 {
        self.hosts.iter().map(|ranks| ranks.len() as u32).min().unwrap_or(0)
    }

    /// Number of ranks on the host with the most ranks.
    pub fn largest_host(&self) -> u32 {
        self.hosts.iter().map(|ranks| ranks.len() as u32).max().unwrap_or(0)
    }
}
