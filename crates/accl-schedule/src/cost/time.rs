//! Time from counts: the time that a machine needs for a schedule, predicted without running it.
//!
//! A phase takes as long as the slowest of its limits:
//! * the work of its busiest rank;
//! * the chain of its messages;
//! * the connection of its busiest host;
//! * the cores of a host with fewer cores than ranks.
//!
//! Phases follow one another. Read [`Prices::time_ps`] first.

use accl_types::{Bytes, Collective};

use crate::cost::counts::{Arriving, Cost, Phase};
use crate::cost::machine::{Link, Machine, SIZES, rate};
use crate::cost::reach::Ends;
use crate::topology::Topology;

/// Recently used data is as close in the cache hierarchy as buffers of this size.
const NEAR_BYTES: u64 = SIZES[1];

/// Core switches per step of a chain and per awaited message, in units of 1 / `WAIT_UNIT`.
const WAIT_PER_STEP: u128 = 3;
const WAIT_PER_MESSAGE: u128 = 1;
const WAIT_UNIT: u128 = 5;

/// The connection between ranks of one host, as a class of cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IntraNode {
    /// Shared memory, or a transport of similar cost.
    Shm,
    /// Sockets, or a transport of similar cost.
    Tcp,
}

/// The facts about the placement of ranks that affect times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The connection between ranks of one host.
    pub intra_node: IntraNode,
    /// Number of cores that the ranks of a host have together.
    pub cores: u32,
    /// Maximum bytes of a frame.
    pub segment_bytes: u64,
}

/// The prices of counted things in one group.
#[derive(Clone, Copy, Debug)]
pub struct Prices {
    machine: Machine,
    placement: Placement,
    world: u64,
    hosts: u64,
    /// Number of ranks on the largest host.
    ranks: u64,
}

/// The times of one message of a given size on one kind of link.
#[derive(Clone, Copy)]
struct Message {
    /// The sender's part.
    send: u128,
    /// The sender's part if the bytes were just received or computed, segment by segment.
    relay: u128,
    /// The receiver's part.
    recv: u128,
    latency: u128,
    /// Both ends of the first segment.
    first: u128,
    /// A grant, for a segment that needs its own.
    grant: u128,
}

impl Prices {
    /// Prices for ranks with this placement.
    pub fn new(machine: Machine, placement: Placement, topology: &Topology) -> Prices {
        let (hosts, ranks) = (topology.host_count().max(1), topology.largest_host().max(1));
        let (world, hosts, ranks) = (topology.world().into(), hosts.into(), ranks.into());
        Prices { machine: machine.smoothed(), placement, world, hosts, ranks }
    }

    /// Picoseconds of a call whose largest buffer has `bytes` bytes.
    pub fn time_ps(&self, collective: Collective, cost: &Cost, bytes: Bytes) -> u64 {
        let bytes = bytes.0;
        let call = match cost.phases.iter().any(|phase| phase.all.inter_node > 0) {
            true => self.machine.tcp.call_ps,
            false => self.intra_node().call_ps,
        };
        let mut before = None;
        let mut phases = 0;
        for phase in &cost.phases {
            // Chunks of equal size stream from phase to phase.
            phases += self.phase(phase, before == Some(phase.part), bytes);
            before = Some(phase.part);
        }
        let rate_of = |rates| self.with_all_at_it(u128::from(rate(rates, bytes)));
        let (copied, reduced) = (rate_of(&self.machine.copied_ps_per_kib), rate_of(&self.machine.reduced_ps_per_kib));
        // The first operand costs as much as a copy to the result; each further one is read and added.
        let operands = u128::from(cost.operands.saturating_sub(1));
        let summed = per_kib(copied + reduced, cost.operand.of_bytes(bytes)) * operands;
        let copied = per_kib(copied, cost.copied.of_bytes(bytes));
        let alone = (copied + summed) * u128::from(self.ranks_per_core());
        let call = u128::from(call) + u128::from(self.machine.block_ps) * u128::from(self.blocks(collective));
        (call * u128::from(self.ranks_per_core()) + phases + alone).try_into().unwrap_or(u64::MAX)
    }

    fn intra_node(&self) -> &Link {
        match self.placement.intra_node {
            IntraNode::Shm => &self.machine.shm,
            IntraNode::Tcp => &self.machine.tcp,
        }
    }

    /// Number of ranks that share a core.
    fn ranks_per_core(&self) -> u64 {
        self.ranks.div_ceil(u64::from(self.placement.cores).max(1))
    }

    /// Number of tensors in the longest tensor list of a call.
    fn blocks(&self, collective: Collective) -> u64 {
        match collective {
            Collective::ReduceScatter
            | Collective::AllGather
            | Collective::Gather
            | Collective::Scatter
            | Collective::AllToAll => self.world,
            Collective::AllReduce
            | Collective::Broadcast
            | Collective::Reduce
            | Collective::Barrier
            | Collective::Send
            | Collective::Recv => 0,
        }
    }

    fn phase(&self, phase: &Phase, relays: bool, bytes: u64) -> u128 {
        let len = phase.part.of_bytes(bytes);
        let frames = u128::from(self.frames(len));
        let peers = phase.sends.sum().max(phase.recvs.sum());
        let intra_node = self.message(self.intra_node(), 0, phase, (len, bytes), peers);
        let inter_node = self.message(&self.machine.tcp, self.machine.network.latency_ps, phase, (len, bytes), peers);

        let received = count(phase.recvs, intra_node.recv, inter_node.recv);
        let sent = count(phase.sends, intra_node.send, inter_node.send);
        let relayed = count(phase.sends, intra_node.relay, inter_node.relay);
        let later = received + relayed;
        let once = received + if relays { relayed } else { sent };
        let longest = if phase.all.inter_node > 0 { &inter_node } else { &intra_node };
        // If a rank only sends or only receives, the work of the rank at the other end comes before or after.
        let one_sided = phase.sends.sum() == 0 || phase.recvs.sum() == 0;
        let other_end = if one_sided { longest.first / 2 } else { 0 };
        let latency = if phase.chain.sum() > 0 { longest.latency } else { 0 };
        // One grant is sent and one is received, and the sender has waited for it.
        let grants = if phase.swaps { (frames - 1) * u128::from(phase.times) * longest.grant } else { 0 };
        let work = latency + once + later * u128::from(phase.times.saturating_sub(1)) + other_end + grants;

        let links = count(phase.chain, intra_node.latency + intra_node.first, inter_node.latency + inter_node.first);
        let chain = links + once - once / frames;

        let sent = u128::from(phase.all.uplink) * per_kib(u128::from(self.machine.network.sent_ps_per_kib), len);
        let sent = crowded(sent, self.machine.crowding_per_mille, peers);
        let uplink = if phase.all.inter_node > 0 { inter_node.latency + sent } else { 0 };

        work.max(chain).max(uplink).max(self.shared(phase, &intra_node, &inter_node))
    }

    fn frames(&self, len: u64) -> u64 {
        len.div_ceil(self.placement.segment_bytes.max(1)).max(1)
    }

    /// If there are more ranks than cores: all work on one host, one rank after the other on each core.
    fn shared(&self, phase: &Phase, intra_node: &Message, inter_node: &Message) -> u128 {
        let turns = self.ranks_per_core();
        if turns <= 1 {
            return 0;
        }
        let of_all = u128::from(phase.all.intra_node) * (intra_node.relay + intra_node.recv)
            + u128::from(phase.all.inter_node) * (inter_node.relay + inter_node.recv);
        let cores = u128::from(self.hosts) * u128::from(self.placement.cores.max(1));
        // Each step of the chain gives the other ranks of the core a turn, and so do some of the awaited messages. The
        // weights were measured.
        let (_, waits) = phase.messages();
        let waits = WAIT_PER_STEP * u128::from(phase.chain.sum()) + WAIT_PER_MESSAGE * u128::from(waits);
        of_all / cores + waits * u128::from(turns) * u128::from(self.machine.switch_ps) / WAIT_UNIT
    }

    fn message(&self, link: &Link, wire_ps: u64, phase: &Phase, (len, bytes): (u64, u64), peers: u32) -> Message {
        let crowd = |rate| self.with_all_at_it(crowded(u128::from(rate), self.machine.crowding_per_mille, peers));
        let sent = crowd(rate(&link.sent_ps_per_kib, bytes));
        let relayed = crowd(rate(&link.sent_ps_per_kib, bytes.min(NEAR_BYTES)));
        let received = crowd(rate(&link.received_ps_per_kib, bytes));
        let received = received
            + match phase.arriving {
                Arriving::Copied => 0,
                Arriving::Reduced => self.with_all_at_it(u128::from(rate(&self.machine.reduced_ps_per_kib, bytes))),
            };
        let frame = u128::from(link.frame_ps);
        let frames = u128::from(self.frames(len)) * frame;
        let latency = u128::from(link.latency_ps) + u128::from(wire_ps);
        Message {
            send: frames + per_kib(sent, len),
            relay: frames + per_kib(relayed, len),
            recv: frames + per_kib(received, len),
            latency,
            first: 2 * frame + per_kib(relayed + received, len.min(self.placement.segment_bytes)),
            grant: 2 * frame + latency,
        }
    }

    /// A rate while all ranks of a host move bytes at once: beyond `memory_cores` cores, memory is not faster.
    fn with_all_at_it(&self, rate: u128) -> u128 {
        let cores = self.ranks.min(u64::from(self.placement.cores).max(1));
        let at_once = cores.max(self.machine.memory_cores);
        rate * u128::from(at_once) / u128::from(self.machine.memory_cores)
    }
}

/// The cost of the messages within hosts and between hosts.
fn count(ends: Ends, intra_node: u128, inter_node: u128) -> u128 {
    u128::from(ends.intra_node) * intra_node + u128::from(ends.inter_node) * inter_node
}

fn per_kib(ps_per_kib: u128, bytes: u64) -> u128 {
    ps_per_kib * u128::from(bytes) / 1024
}

/// Adds the crowding cost for each peer beyond the first.
fn crowded(time: u128, per_mille: u64, peers: u32) -> u128 {
    time + time * u128::from(per_mille) * u128::from(peers.saturating_sub(1)) / 1000
}
