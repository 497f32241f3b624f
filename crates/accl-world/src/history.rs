//! Runs one history of a simulated world, from its first event to its last.
//!
//! Owns the event loop, and decides when a history is complete. `ranks`, `driving` and `wiring` implement the events;
//! `invariants` checks the result. Read [`run`] first.

use std::collections::BTreeMap;

use accl_types::ErrorKind;

use super::clock::{self, Event};
use super::devices::Devices;
use super::external::ExternalTasks;
use super::scenario::{Fault, Scenario};
use super::world::{Bits, Seen, State, Violation, World};

/// Maximum number of events. A history with more counts as one that does not end.
const MOST_EVENTS: u64 = 500_000;

/// Runs the history of a scenario.
///
/// # Errors
/// The first invariant that this history violates.
pub(super) fn run(scenario: &Scenario) -> Result<Seen, Violation> {
    let is_well = scenario.faults().next().is_none();
    let has_codecs = scenario.items.iter().any(|item| item.codec.is_some());
    // The result bits of encoded calls depend on their inputs only. A history without faults therefore gives the
    // expected bits.
    let bits =
        if is_well || !has_codecs { BTreeMap::new() } else { play(&scenario.without_faults(), BTreeMap::new())?.1 };
    play(scenario, bits).map(|(seen, _)| seen)
}

/// How calls completed, by item and process.
pub(super) type Outcomes = BTreeMap<(usize, usize), Result<(), ErrorKind>>;

/// Runs a scenario and returns how each of its calls completed, without the checks at the end of [`run`].
pub(super) fn outcomes(scenario: &Scenario) -> Result<Outcomes, Violation> {
    clock::reset();
    let mut world = World::new(scenario);
    world.go()?;
    let ends = world.made.iter().filter_map(|(&call, made)| Some((call, made.outcome()?.map_err(|error| error.kind))));
    Ok(ends.collect())
}

/// Runs one history with all checks. Encoded results must equal `bits`, by item; the bits of further items are added
/// and returned.
fn play(scenario: &Scenario, bits: Bits) -> Result<(Seen, Bits), Violation> {
    clock::reset();
    let mut world = World::new(scenario);
    world.bits = bits;
    world.go()?;
    world.check_failure_reports()?;
    world.read_the_rest()?;
    world.check_rest()?;
    world.end()?;
    world.check_calls()?;
    Ok((world.seen, world.bits))
}

impl World<'_> {
    fn go(&mut self) -> Result<(), Violation> {
        for (process, host) in self.processes.iter().enumerate() {
            (0..host.threads.len()).for_each(|thread| self.enter(0, Event::Run { process, thread }));
        }
        for (index, fault) in self.faults.iter().enumerate() {
            if let Fault::Kill { at, .. } | Fault::Cut { at, .. } | Fault::Vanish { at, .. } | Fault::Stall { at, .. } =
                fault
            {
                self.enter(*at, Event::Fault { index });
            }
        }
        self.go_on(|world| world.is_at_rest())
    }

    /// Handles events until `is_over` returns true.
    fn go_on(&mut self, is_over: impl Fn(&Self) -> bool) -> Result<(), Violation> {
        while !is_over(self) {
            let next = self.agenda.lock().next();
            let Some(event) = next else {
                return Err(format!("nothing will ever happen again, and calls are in flight: {}", self.unfinished()));
            };
            self.seen.events += 1;
            if self.seen.events > MOST_EVENTS {
                return Err(format!("the world does not come to rest: {}", self.unfinished()));
            }
            if self.scenario.traces {
                println!("{} {event:?}", clock::nanos());
            }
            self.happen(event)?;
            let violation = self.devices.lock().take_violation();
            violation.map_or(Ok(()), Err)?;
        }
        Ok(())
    }

    fn happen(&mut self, event: Event) -> Result<(), Violation> {
        if let Event::Run { process, .. }
        | Event::Drive { process }
        | Event::Ring { process }
        | Event::TimeIsUp { process, .. } = event
        {
            self.check_waits(process)?;
        }
        match event {
            Event::Run { process, thread } => self.run_thread(process, thread)?,
            Event::Drive { process } => self.drive(process),
            Event::Ring { process } => self.ring(process),
            Event::TimeIsUp { process, sleep } => {
                if self.processes[process].sleep.is_some_and(|(number, _)| number == sleep) {
                    self.check_progress(process)?;
                    self.wake(process);
                }
            }
            Event::Arrive { wire, end, is_quiet } => self.wires[wire].lock().on_arrival(end, is_quiet),
            Event::Ended { wire, end, process } => {
                self.wires[wire].lock().on_end(end);
                self.ring(process);
            }
            Event::Fault { index } => self.strike(index),
            Event::Job { index } => self.do_job(index)?,
            Event::Failed { index } => self.fail_lane(index)?,
            Event::Dial { wire, process } => self.dial(wire, process),
            Event::Attach { wire, end } => {
                self.attach(wire, end);
                let process = self.scenario.wires[wire].0[end];
                self.settle(process);
                self.note_ends(process)?;
            }
            Event::Refused { process, peer } => self.refuse(process, peer)?,
            Event::Inquire { process } => self.inquire(process)?,
            Event::Question { index } => self.ask(index)?,
            Event::Answer { index } => self.answer(index)?,
            Event::Note { index } => self.deliver(index)?,
            Event::Device { group, rank, job } => {
                let process = self.scenario.groups[group].members[rank];
                let is_alive = self.processes[process].core.is_some();
                Devices::turn(&self.devices, &self.agenda, (group, rank, job), is_alive);
            }
            Event::DeviceIsLate { group, rank, job } => Devices::is_late(&self.devices, (group, rank, job)),
            Event::External { process, task } => {
                let is_alive = self.processes[process].core.is_some();
                ExternalTasks::turn(&self.external_tasks, task, process, &self.agenda, is_alive);
            }
        }
        if let Event::Run { process, .. }
        | Event::Refused { process, .. }
        | Event::Drive { process }
        | Event::Ring { process }
        | Event::Ended { process, .. }
        | Event::TimeIsUp { process, .. } = event
        {
            self.settle(process);
            self.note_ends(process)?;
        }
        Ok(())
    }

    /// Whether every call has completed, every thread has finished its program, and only deadlines are on the agenda.
    fn is_at_rest(&self) -> bool {
        self.agenda.lock().is_quiet()
            && self.living().all(|(_, host)| host.threads.iter().all(|thread| thread.state == State::Over))
            && self.living().all(|(process, _)| self.calls_of(process).all(|(_, made)| made.outcome().is_some()))
    }

    /// Polls the links of all processes until nothing moves. A process without calls in flight does not poll, so frames
    /// for it stay unread until its next call.
    fn read_the_rest(&mut self) -> Result<(), Violation> {
        for _ in 0..1000 {
            let mut moved = false;
            for process in 0..self.processes.len() {
                self.poll(process);
                if let Some(core) = &mut self.processes[process].core {
                    moved |= core.pass_whole(clock::now());
                    self.settle(process);
                    self.note_ends(process)?;
                }
            }
            self.go_on(|world| world.agenda.lock().is_quiet())?;
            if !moved {
                return Ok(());
            }
        }
        Err("the processes never stop talking to each other".to_owned())
    }

    /// Ends all processes, one after the other.
    fn end(&mut self) -> Result<(), Violation> {
        for process in 0..self.processes.len() {
            for group in 0..self.scenario.groups.len() {
                self.leave(process, group);
            }
            let Some(core) = &mut self.processes[process].core else { continue };
            let _ = core.guarded(|core| {
                core.send_disconnect();
                core.net.close_all();
            });
            self.kill_node(process);
        }
        self.go_on(|world| world.agenda.lock().is_quiet())
    }
}
