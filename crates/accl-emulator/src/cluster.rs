//! Engines of one process, which reach each other without a socket.
//!
//! Owns the set of engines that can advance, and their packets for other processes. Read [`Cluster::settle`] first.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use accl_cclo::control::{About, Reply, Request, Status};

use crate::engine::{Caller, Ends, Engine, Peers};
use crate::fabric::Fabric;
use crate::trace::Trace;

/// Number of waiting packets of one engine at another of the same process at which the sending engine waits.
const MOST_WAITING: usize = 256;

/// A packet for an engine of another process.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) to: u32,
    /// Job of the packet; zero if the host has named no job.
    pub(crate) job: u32,
    pub(crate) packet: Vec<u8>,
}

/// Engines with successive ranks.
pub(crate) struct Cluster {
    first: u32,
    engines: Vec<Engine>,
    /// Engines that may be able to advance.
    awake: VecDeque<usize>,
    is_awake: Vec<bool>,
    /// Engines that wait for room for their packets.
    stalled: BTreeSet<usize>,
    /// Packets of each engine for other processes, and how many more packets the other processes take.
    outgoing: Vec<VecDeque<Outgoing>>,
    room: Vec<usize>,
    trace: Option<Trace>,
}

/// Fabric for one engine while it advances. It accesses only the engines that receive its packets.
struct Bootstrap<'a> {
    first: u32,
    /// Engines of the process with lower and with higher ranks.
    lower: &'a [Engine],
    higher: &'a [Engine],
    from: u32,
    /// Number of the engine's packets to itself that wait.
    held_here: usize,
    /// Number of packets that other processes have room for.
    elsewhere: usize,
    sent: Vec<(u32, Vec<u8>)>,
    /// Number of packets sent to each engine of the process.
    sent_here: BTreeMap<usize, usize>,
    was_refused: Cell<bool>,
}

impl Bootstrap<'_> {
    /// Returns the index of the engine with this session, if it is in this process.
    fn index(&self, session: u32) -> Option<usize> {
        let index = session.checked_sub(self.first)? as usize;
        (index <= self.lower.len() + self.higher.len()).then_some(index)
    }

    /// Returns how many packets of the advancing engine wait at another engine of the process.
    fn held(&self, index: usize) -> usize {
        let other = match index.checked_sub(self.lower.len()) {
            None => self.lower.get(index),
            Some(0) => return self.held_here,
            Some(above) => self.higher.get(above - 1),
        };
        other.map_or(0, |other| other.held(self.from))
    }

    fn room(&self, session: u32) -> usize {
        let Some(index) = self.index(session) else { return self.elsewhere };
        let sent = self.sent_here.get(&index).copied().unwrap_or(0);
        MOST_WAITING.saturating_sub(self.held(index) + sent)
    }
}

impl Fabric for Bootstrap<'_> {
    fn send(&mut self, session: u32, packet: [&[u8]; 3]) {
        self.sent.push((session, packet.concat()));
        match self.index(session) {
            Some(index) => *self.sent_here.entry(index).or_default() += 1,
            None => self.elsewhere = self.elsewhere.saturating_sub(1),
        }
    }

    fn has_room(&self, session: u32) -> bool {
        let has_room = self.room(session) > 0;
        self.was_refused.set(self.was_refused.get() | !has_room);
        has_room
    }
}

impl Cluster {
    /// Creates a cluster of engines with ranks from `first` on.
    pub(crate) fn new(first: u32, engines: Vec<Engine>, trace: Option<Trace>) -> Self {
        let count = engines.len();
        Self {
            first,
            engines,
            awake: VecDeque::new(),
            is_awake: vec![false; count],
            stalled: BTreeSet::new(),
            outgoing: (0..count).map(|_| VecDeque::new()).collect(),
            room: vec![0; count],
            trace,
        }
    }

    fn index(&self, rank: u32) -> Option<usize> {
        let index = rank.checked_sub(self.first)? as usize;
        (index < self.engines.len()).then_some(index)
    }

    /// Lets an engine advance that has new input, and then all engines that can advance as a result.
    pub(crate) fn go_on(&mut self, rank: u32) {
        if let Some(index) = self.index(rank) {
            self.wake(index);
            self.settle();
        }
    }

    /// Marks an engine that may be able to advance.
    fn wake(&mut self, index: usize) {
        if !std::mem::replace(&mut self.is_awake[index], true) {
            self.awake.push_back(index);
        }
    }

    /// Marks the engines that wait for room, since there may be room now.
    pub(crate) fn wake_stalled(&mut self) {
        for index in std::mem::take(&mut self.stalled) {
            self.wake(index);
        }
    }

    /// Returns the engine of a rank of this process.
    pub(crate) fn engine(&mut self, rank: u32) -> Option<&mut Engine> {
        let index = self.index(rank)?;
        self.engines.get_mut(index)
    }

    /// Updates what an engine knows of its peers, after which it may be able to advance.
    pub(crate) fn update(&mut self, rank: u32, what: impl FnOnce(&mut Engine)) {
        if let Some(index) = self.index(rank) {
            what(&mut self.engines[index]);
            self.wake(index);
        }
    }

    /// Sets whether the peers of a rank are connected.
    pub(crate) fn set_peers(&mut self, rank: u32, peers: Peers) {
        self.update(rank, |engine| engine.set_peers(peers));
    }

    /// Returns the self-description of a rank's engine among `ranks` ranks.
    pub(crate) fn about(&self, rank: u32, ranks: u32) -> Option<About> {
        Some(self.engines[self.index(rank)?].about(rank, ranks))
    }

    /// Answers a host of a rank of this process.
    pub(crate) fn answer(&mut self, rank: u32, caller: Caller, ends: Ends, request: &Request) -> Option<Reply> {
        let index = self.index(rank)?;
        let reply = self.engines[index].answer_to(caller, ends, request);
        if matches!(request, Request::Call { .. }) {
            self.wake(index);
            self.settle();
        }
        Some(reply)
    }

    /// Starts a call of a rank's host whose words have no meaning.
    pub(crate) fn start_unknown(&mut self, rank: u32, caller: Caller, control: u32) -> Option<Reply> {
        let index = self.index(rank)?;
        let is_started = self.engines[index].start_unknown(caller, control);
        self.wake(index);
        self.settle();
        Some(Reply::Status(if is_started { Status::Good } else { Status::NoControl }))
    }

    /// Traces a request and its reply.
    pub(crate) fn trace_exchange(&self, rank: u32, request: &[u8], reply: &str) {
        if let Some(trace) = &self.trace {
            trace.exchange(rank, request, reply);
        }
    }

    /// Delivers a packet of another process to its engine.
    pub(crate) fn take(&mut self, rank: u32, sender: u32, job: u32, packet: &[u8]) {
        if let Some(trace) = &self.trace {
            trace.packet(sender, rank, packet);
        }
        if let Some(index) = self.index(rank) {
            self.deliver(index, sender, job, packet);
        }
    }

    /// Delivers a packet to an engine of the same job. Otherwise the packet was in flight when the engine was reset for another job, and is dropped.
    fn deliver(&mut self, index: usize, sender: u32, job: u32, packet: &[u8]) {
        if self.engines[index].job() == job {
            self.engines[index].take(sender, packet);
            self.wake(index);
        } else {
            self.engines[index].miss(sender);
        }
    }

    /// Sets how many more packets of a rank other processes take.
    pub(crate) fn set_room(&mut self, rank: u32, packets: usize) {
        if let Some(index) = self.index(rank) {
            self.room[index] = packets;
        }
    }

    /// Advances engines until none can advance without another process.
    pub(crate) fn settle(&mut self) {
        loop {
            let mut has_moved = false;
            while let Some(index) = self.awake.pop_front() {
                self.is_awake[index] = false;
                has_moved |= self.advance(index);
            }
            // The progress of one engine may have made room for another.
            if !has_moved || self.stalled.is_empty() {
                return;
            }
            self.wake_stalled();
        }
    }

    fn advance(&mut self, index: usize) -> bool {
        let from = self.first + index as u32;
        let (lower, rest) = self.engines.split_at_mut(index);
        let Some((engine, higher)) = rest.split_first_mut() else { return false };
        let mut bootstrap = Bootstrap {
            first: self.first,
            lower,
            higher,
            from,
            held_here: engine.held(from),
            elsewhere: self.room[index].saturating_sub(self.outgoing[index].len()),
            sent: Vec::new(),
            sent_here: BTreeMap::new(),
            was_refused: Cell::new(false),
        };
        // All packets of this advance belong to the current job. A reset may begin another job, but sends no packets, and neither do the calls
        // directly after it.
        let job = engine.job();
        let has_moved = engine.advance(&mut bootstrap);
        let Bootstrap { sent, was_refused, .. } = bootstrap;
        if was_refused.get() {
            self.stalled.insert(index);
        }
        for (to, packet) in sent {
            if let Some(trace) = &self.trace {
                trace.packet(from, to, &packet);
            }
            match self.index(to) {
                Some(peer) => self.deliver(peer, from, job, &packet),
                None => self.outgoing[index].push_back(Outgoing { to, job, packet }),
            }
        }
        has_moved
    }

    /// Returns a rank's packets for other processes, in order.
    pub(crate) fn outgoing(&mut self, rank: u32) -> Option<&mut VecDeque<Outgoing>> {
        let index = self.index(rank)?;
        self.outgoing.get_mut(index)
    }

    /// Gives an engine bytes from a kernel.
    pub(crate) fn feed(&mut self, rank: u32, bytes: &[u8]) {
        self.update(rank, |engine| engine.feed(bytes));
    }
}

#[cfg(test)]
mod tests {
    use accl_cclo::call::{ConfigFunction, Descriptor};
    use accl_cclo::memory_map::{self as map, Network, RxBuffer, RxStatus};
    use accl_cclo::wire::{Header, MessageKind, packets};

    use super::*;
    use crate::program::Faithful;

    /// Resets the engine for a job, and lets packets in.
    fn set_up(cluster: &mut Cluster, job: u32) {
        cluster.engine(0).unwrap().set_next_job(job);
        let call = |call| Request::Call { control: 0, call };
        cluster.answer(0, Caller::default(), Ends::OfAll, &call(Descriptor::config(ConfigFunction::Reset, 0)));
        for (offset, value) in [(map::RX_BUFFER_COUNT.offset, 1), (map::RX_BUFFER_BYTES.offset, 64)] {
            cluster.answer(0, Caller::default(), Ends::OfAll, &Request::WriteRegister { offset, value });
        }
        for (word, offset) in RxBuffer::idle(0).to_words().into_iter().zip((8..).step_by(4)) {
            cluster.answer(0, Caller::default(), Ends::OfAll, &Request::WriteRegister { offset, value: word });
        }
        cluster.answer(0, Caller::default(), Ends::OfAll, &call(Descriptor::config(ConfigFunction::EnablePackets, 0)));
    }

    fn has_come(cluster: &mut Cluster) -> bool {
        let status = map::TABLES_BEGIN;
        cluster.answer(0, Caller::default(), Ends::OfAll, &Request::ReadRegister { offset: status })
            == Some(Reply::Register(RxStatus::Full.word()))
    }

    #[test]
    fn a_packet_of_a_job_that_was_killed_does_not_get_into_the_next() {
        let header = Header {
            count: 4,
            tag: 0,
            source: 1,
            sequence: 0,
            stream: 0,
            destination: 0,
            kind: MessageKind::Eager,
            is_host: false,
            address: 0,
            communicator: 0,
            packet_number: 0,
        };
        let packet = packets(Network::Udp, &header, &[1; 4], 0).next().unwrap().to_bytes();
        for (job, of, is_taken) in [(8, 7, false), (8, 8, true), (0, 7, false), (8, 0, false), (0, 0, true)] {
            let mut cluster = Cluster::new(0, vec![Engine::new(Network::Udp, Faithful::default())], None);
            cluster.engine(0).unwrap().memory(false).grow(0, 64);
            set_up(&mut cluster, 7);
            set_up(&mut cluster, job);
            cluster.take(0, 1, of, &packet);
            assert_eq!(has_come(&mut cluster), is_taken, "a packet of job {of} for job {job}");
            let trouble = cluster.engine(0).unwrap().trouble();
            let said = "packets of another job arrived from rank 1 and were dropped, 1 in total";
            assert_eq!(trouble.starts_with(said), !is_taken, "{trouble}");
        }
    }

    #[test]
    fn an_engine_whose_host_has_left_it_works_for_no_job() {
        let reset = |cluster: &mut Cluster| {
            let call = Descriptor::config(ConfigFunction::Reset, 0);
            cluster.answer(0, Caller::default(), Ends::OfAll, &Request::Call { control: 0, call }).unwrap();
        };
        let mut cluster = Cluster::new(0, vec![Engine::new(Network::Udp, Faithful::default())], None);
        set_up(&mut cluster, 7);
        cluster.engine(0).unwrap().end_job();
        assert_eq!(cluster.engine(0).unwrap().job(), 7, "what is under way goes on");
        reset(&mut cluster);
        assert_eq!(cluster.engine(0).unwrap().job(), 0);
        set_up(&mut cluster, 8);
        reset(&mut cluster);
        cluster.engine(0).unwrap().end_job();
        assert_eq!(cluster.engine(0).unwrap().job(), 0);
    }
}
