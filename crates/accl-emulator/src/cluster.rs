//! The engines of one process, which reach each other without a socket.
//!
//! Owns which of them can go on, and what they have for engines elsewhere. Read [`Cluster::settle`] first.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use accl_cclo::control::{About, Reply, Request, Status};

use crate::engine::{Caller, Ends, Engine, Peers};
use crate::fabric::Fabric;
use crate::trace::Trace;

/// Packets of one engine that another of the same process has not found a place for, before it waits.
const MOST_WAITING: usize = 256;

/// A packet for an engine of another process.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) to: u32,
    /// Of which job it is; zero: its host has said nothing of jobs.
    pub(crate) job: u32,
    pub(crate) packet: Vec<u8>,
}

/// Engines with successive ranks.
pub(crate) struct Cluster {
    first: u32,
    engines: Vec<Engine>,
    /// Those that may be able to go on.
    awake: VecDeque<usize>,
    is_awake: Vec<bool>,
    /// Those that would go on if there were room.
    stalled: BTreeSet<usize>,
    /// What each has for other processes, and how many packets more these take.
    outgoing: Vec<VecDeque<Outgoing>>,
    room: Vec<usize>,
    trace: Option<Trace>,
}

/// Carries what one engine sends while it goes on. It looks at those engines alone that something is for.
struct Carrier<'a> {
    first: u32,
    /// The engines of the process that have a lower rank, and those with a higher one.
    lower: &'a [Engine],
    higher: &'a [Engine],
    from: u32,
    /// Packets of its own that it holds.
    held_here: usize,
    /// What other processes have room for.
    elsewhere: usize,
    sent: Vec<(u32, Vec<u8>)>,
    /// How many went to each engine of the process.
    sent_here: BTreeMap<usize, usize>,
    was_refused: Cell<bool>,
}

impl Carrier<'_> {
    /// Which engine of the process has a session.
    fn index(&self, session: u32) -> Option<usize> {
        let index = session.checked_sub(self.first)? as usize;
        (index <= self.lower.len() + self.higher.len()).then_some(index)
    }

    /// Packets of this engine that another of the process has found no place for.
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

impl Fabric for Carrier<'_> {
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
    /// Engines from this rank on.
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

    /// An engine has been given something to do: it and all that follow go on.
    pub(crate) fn go_on(&mut self, rank: u32) {
        if let Some(index) = self.index(rank) {
            self.wake(index);
            self.settle();
        }
    }

    /// An engine may be able to go on.
    fn wake(&mut self, index: usize) {
        if !std::mem::replace(&mut self.is_awake[index], true) {
            self.awake.push_back(index);
        }
    }

    /// There may be room for those that have waited for it.
    pub(crate) fn wake_stalled(&mut self) {
        for index in std::mem::take(&mut self.stalled) {
            self.wake(index);
        }
    }

    /// The engine of a rank of this process.
    pub(crate) fn engine(&mut self, rank: u32) -> Option<&mut Engine> {
        let index = self.index(rank)?;
        self.engines.get_mut(index)
    }

    /// Changes what an engine knows of its peers, with which it may be able to go on.
    pub(crate) fn tell(&mut self, rank: u32, what: impl FnOnce(&mut Engine)) {
        if let Some(index) = self.index(rank) {
            what(&mut self.engines[index]);
            self.wake(index);
        }
    }

    /// Says whether the peers of a rank are there.
    pub(crate) fn set_peers(&mut self, rank: u32, peers: Peers) {
        self.tell(rank, |engine| engine.set_peers(peers));
    }

    /// What the engine of a rank is, of so many.
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

    /// Starts a call of a rank's host whose words mean nothing.
    pub(crate) fn start_unknown(&mut self, rank: u32, caller: Caller, control: u32) -> Option<Reply> {
        let index = self.index(rank)?;
        let is_started = self.engines[index].start_unknown(caller, control);
        self.wake(index);
        self.settle();
        Some(Reply::Status(if is_started { Status::Good } else { Status::NoControl }))
    }

    /// Writes down what was asked and answered.
    pub(crate) fn trace_exchange(&self, rank: u32, request: &[u8], reply: &str) {
        if let Some(trace) = &self.trace {
            trace.exchange(rank, request, reply);
        }
    }

    /// Hands a packet of another process to its engine.
    pub(crate) fn take(&mut self, rank: u32, sender: u32, job: u32, packet: &[u8]) {
        if let Some(trace) = &self.trace {
            trace.packet(sender, rank, packet);
        }
        if let Some(index) = self.index(rank) {
            self.deliver(index, sender, job, packet);
        }
    }

    /// A packet of another job than that of its engine was on its way when that one was reset, and goes nowhere.
    fn deliver(&mut self, index: usize, sender: u32, job: u32, packet: &[u8]) {
        if self.engines[index].job() == job {
            self.engines[index].take(sender, packet);
            self.wake(index);
        } else {
            self.engines[index].miss(sender);
        }
    }

    /// How many packets more other processes take of a rank.
    pub(crate) fn set_room(&mut self, rank: u32, packets: usize) {
        if let Some(index) = self.index(rank) {
            self.room[index] = packets;
        }
    }

    /// Until none of the engines can go on without another process.
    pub(crate) fn settle(&mut self) {
        loop {
            let mut has_moved = false;
            while let Some(index) = self.awake.pop_front() {
                self.is_awake[index] = false;
                has_moved |= self.advance(index);
            }
            // Whatever one has moved may have made room for another.
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
        let mut carrier = Carrier {
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
        // What is sent now is of this job: a reset, with which another may begin, sends nothing, and neither does what follows it at once.
        let job = engine.job();
        let has_moved = engine.advance(&mut carrier);
        let Carrier { sent, was_refused, .. } = carrier;
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

    /// What a rank has for other processes, in order.
    pub(crate) fn outgoing(&mut self, rank: u32) -> Option<&mut VecDeque<Outgoing>> {
        let index = self.index(rank)?;
        self.outgoing.get_mut(index)
    }

    /// Gives an engine bytes of a kernel.
    pub(crate) fn feed(&mut self, rank: u32, bytes: &[u8]) {
        self.tell(rank, |engine| engine.feed(bytes));
    }
}

#[cfg(test)]
mod tests {
    use accl_cclo::call::{ConfigFunction, Descriptor};
    use accl_cclo::memory_map::{self as map, Network, RxBuffer, RxStatus};
    use accl_cclo::wire::{Header, MessageKind, packets};

    use super::*;
    use crate::program::Faithful;

    /// An engine that has been reset for a job, and lets packets in.
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
            let said = "packets of another job have come from rank 1, 1 in all, and went nowhere";
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
