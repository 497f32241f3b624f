//! The links of a simulated world: how they are created, and what happens to them and to their processes (deaths, cuts,
//! notes).
//!
//! Owns what `connector` owns in a real process. `link` defines how a link carries frames. Read
//! [`World::strike`] and [`World::dial`] first.

use accl_types::{Error, Rank};

use super::clock::{self, Event};
use super::link::SimulatedLink;
use super::scenario::{Fault, Linking};
use super::world::{Asked, State, Violation, World, info};
use accl_engine::internals::Found;
use accl_executor::peers::neighbours;

impl World<'_> {
    pub(super) fn strike(&mut self, index: usize) {
        self.struck.insert(index);
        match self.faults[index].clone() {
            Fault::Kill { process, .. } => self.kill(process),
            Fault::Cut { wire, .. } => self.wires[wire].lock().cut(),
            Fault::Stall { wire, end, wait, .. } => self.wires[wire].lock().stall(end, wait),
            Fault::Vanish { process, .. } => {
                for (wire, (ends, _)) in self.wires.iter().zip(&self.scenario.wires) {
                    if self.scenario.nodes(process).any(|node| ends.contains(&node)) {
                        wire.lock().fall_silent();
                    }
                }
                self.kill(process);
            }
            Fault::Flip { .. }
            | Fault::Disagree { .. }
            | Fault::Late { .. }
            | Fault::Abort { .. }
            | Fault::Leave { .. }
            | Fault::Break { .. } => {}
        }
    }

    /// Kills a process with all its lanes.
    fn kill(&mut self, process: usize) {
        self.scenario.nodes(process).for_each(|node| self.kill_node(node));
    }

    pub(super) fn kill_node(&mut self, process: usize) {
        let host = &mut self.processes[process];
        host.core = None;
        host.died_at.get_or_insert(clock::nanos());
        host.sleep = None;
        host.threads.iter_mut().for_each(|thread| thread.state = State::Over);
        let wires = &self.scenario.wires;
        self.pending.retain(|&(wire, end), _| wires[wire].0[end] != process);
    }

    /// Returns the fault of a rank's call, if there is one.
    pub(super) fn fault_of(&mut self, item: usize, rank: usize) -> Option<Fault> {
        let at = |fault: &Fault| match fault {
            Fault::Disagree { item, rank, .. }
            | Fault::Late { item, rank, .. }
            | Fault::Abort { item, rank }
            | Fault::Leave { item, rank } => Some((*item, *rank)),
            _ => None,
        };
        let index = self.faults.iter().position(|fault| at(fault) == Some((item, rank)))?;
        self.struck.insert(index);
        Some(self.faults[index].clone())
    }

    pub(super) fn wire_between(&self, one: usize, other: usize) -> Option<usize> {
        self.scenario.wires.iter().position(|(ends, _)| ends.contains(&one) && ends.contains(&other) && one != other)
    }

    /// Creates a link that a process wants, as `connector` does.
    pub(super) fn dial(&mut self, wire: usize, process: usize) {
        if self.dialled.contains(&wire) || self.processes[process].core.is_none() {
            return;
        }
        let ends = self.scenario.wires[wire].0;
        let peer = if ends[0] == process { ends[1] } else { ends[0] };
        let latency = self.wires[wire].lock().latency();
        if self.wires[wire].lock().is_silent() {
            // No answer arrives before a deadline passes.
        } else if self.processes[peer].core.is_none() || self.wires[wire].lock().is_cut() {
            self.enter(latency, Event::Refused { process, peer });
        } else {
            self.connect(wire);
            for end in 0..2 {
                let wait = self.wires[wire].lock().latency();
                self.enter(wait, Event::Attach { wire, end });
            }
        }
    }

    /// Delivers a note, as the `connector` of the sender and of the receiver do.
    pub(super) fn deliver(&mut self, index: usize) -> Result<(), Violation> {
        let (from, note) = &self.notes[index];
        let (from, to) = (*from, usize::from(note.to.uuid[0]));
        let is_reached = self.wire_between(from, to).is_some_and(|wire| self.is_passable(wire));
        let sender = self.processes[from].core.as_ref();
        if !is_reached || !sender.is_some_and(|core| core.is_note_needed(&note.to.uuid, note.group)) {
            return Ok(());
        }
        if let Some(core) = &mut self.processes[to].core {
            core.on_note(&info(from).uuid, &note.bytes, clock::now());
            self.schedule_wake(to);
            self.settle(to);
            self.note_ends(to)?;
        }
        Ok(())
    }

    /// Creates both ends of a wire.
    fn connect(&mut self, wire: usize) {
        self.dialled.insert(wire);
        for end in 0..2 {
            self.pending.insert((wire, end), SimulatedLink::new(&self.wires[wire], end));
        }
    }

    /// Gives an end of a wire to its process.
    pub(super) fn attach(&mut self, wire: usize, end: usize) {
        let ends = self.scenario.wires[wire].0;
        let Some(link) = self.pending.remove(&(wire, end)) else { return };
        let host = &mut self.processes[ends[end]];
        if let (Some(core), Some(peer)) = (&mut host.core, host.peers[ends[1 - end]]) {
            let slot = self.wires[wire].lock().slot(end);
            core.attach(peer, Box::new(link), Some(slot), clock::now());
            let now = clock::nanos();
            self.linked_at.entry(wire).and_modify(|(_, last)| *last = now).or_insert((now, now));
            self.schedule_wake(ends[end]);
        }
    }

    /// Handles a failed connection. If the peer has ended, the process asks others about it; if only the wire is cut,
    /// the peer is lost.
    pub(super) fn refuse(&mut self, process: usize, peer: usize) -> Result<(), Violation> {
        if self.processes[peer].core.is_none() {
            let error = Error::peer_lost("its process has ended");
            self.processes[process].peer_probe.begin(info(peer).uuid, error, clock::now());
            return self.inquire(process);
        }
        self.handle(process, peer, Found::Lost(Error::peer_lost("there is no way to it")));
        Ok(())
    }

    /// Asks others about peers, and applies what was found, as `connector` does.
    pub(super) fn inquire(&mut self, process: usize) -> Result<(), Violation> {
        let numbers = self.questions.len() as u64..;
        let host = &mut self.processes[process];
        let Some(core) = &host.core else { return Ok(()) };
        let mut numbers = numbers.into_iter();
        let number = || numbers.next().unwrap_or_default();
        let questions = host.peer_probe.ask(clock::now(), |uuid| core.neighbours_of(uuid), number);
        for question in questions {
            let to = usize::from(question.to.uuid[0]);
            let index = self.questions.len();
            self.questions.push(Asked { from: process, to, question, answer: None, knows_loss: false });
            let wait = self.wire_between(process, to).map_or(0, |wire| self.wires[wire].lock().latency());
            self.enter(wait, Event::Question { index });
        }
        for (uuid, found) in self.processes[process].peer_probe.take_found() {
            let peer = usize::from(uuid[0]);
            // A peer that was lost or has left before this answer is not checked again.
            if self.lacks_link(process, peer) {
                self.check_fate(process, peer, &found)?;
            }
            self.handle(process, peer, found);
        }
        if let Some(at) = self.processes[process].peer_probe.next() {
            self.agenda.lock().enter_at(at.nanos(), Event::Inquire { process });
        }
        Ok(())
    }

    fn lacks_link(&self, process: usize, peer: usize) -> bool {
        let host = &self.processes[process];
        host.core.as_ref().zip(host.peers[peer]).is_some_and(|(core, peer)| core.net.is_unlinked(peer))
    }

    fn handle(&mut self, process: usize, peer: usize, found: Found) {
        let host = &mut self.processes[process];
        if let (Some(core), Some(peer)) = (&mut host.core, host.peers[peer]) {
            match found {
                Found::Left { is_assumed } => core.depart(peer, is_assumed, clock::now()),
                Found::Lost(error) => core.lose(peer, error, clock::now()),
            }
            self.schedule_wake(process);
        }
    }

    /// Answers a question about a process, if the question arrives.
    pub(super) fn ask(&mut self, index: usize) -> Result<(), Violation> {
        let Asked { from, to, ref question, .. } = self.questions[index];
        let wire = self.wire_between(from, to);
        let is_reached = wire.is_some_and(|wire| self.is_passable(wire));
        if let Some(core) = self.processes[to].core.as_mut().filter(|_| is_reached) {
            let answer = core.on_note(&info(from).uuid, &question.bytes, clock::now());
            let about = question.bytes.last().map_or(0, |&byte| usize::from(byte));
            let knows_loss = self.knows_loss(to, about);
            let asked = &mut self.questions[index];
            (asked.answer, asked.knows_loss) = (Some(answer), knows_loss);
            self.schedule_wake(to);
            self.settle(to);
            self.note_ends(to)?;
        }
        let wait = wire.map_or(0, |wire| self.wires[wire].lock().latency());
        self.enter(wait, Event::Answer { index });
        Ok(())
    }

    /// Gives the answer to the process that asked, or reports to it that there is none.
    pub(super) fn answer(&mut self, index: usize) -> Result<(), Violation> {
        let Asked { from, ref question, answer, .. } = self.questions[index];
        self.processes[from].peer_probe.answer(question.number, answer, clock::now());
        self.inquire(from)?;
        self.settle(from);
        self.note_ends(from)
    }

    /// Whether notes, questions and answers, which are sent outside links, get through.
    fn is_passable(&self, wire: usize) -> bool {
        let wire = self.wires[wire].lock();
        !wire.is_cut() && !wire.is_silent()
    }

    /// Creates the links to the rank's neighbours that the scenario requires when the group is created.
    pub(super) fn link_neighbours(&mut self, process: usize, group: usize) {
        let spec = &self.scenario.groups[group];
        let Some(rank) = spec.rank_of(process) else { return };
        for neighbour in neighbours(Rank(rank as u32), spec.members.len() as u32) {
            let Some(wire) = self.wire_between(process, spec.members[neighbour.index()]) else { continue };
            match self.scenario.linking {
                Linking::AtFirst => {}
                Linking::Late => self.enter(0, Event::Dial { wire, process }),
                Linking::WithGroups if self.dialled.contains(&wire) => (0..2).for_each(|end| self.attach(wire, end)),
                Linking::WithGroups => {
                    let peer = spec.members[neighbour.index()];
                    if self.processes[peer].core.is_none() || self.wires[wire].lock().is_cut() {
                        self.enter(0, Event::Refused { process, peer });
                    } else if !self.wires[wire].lock().is_silent() {
                        self.connect(wire);
                        (0..2).for_each(|end| self.attach(wire, end));
                    }
                }
            }
        }
    }
}
