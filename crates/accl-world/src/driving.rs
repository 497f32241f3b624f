//! The progress driver of a simulated process: it sleeps in the poller while threads wait, and events wake it.
//!
//! Owns what `driver` owns in a real process, except its lock and its threads. One of the waiting threads drives. Read
//! [`World::drive`] first.

use accl_types::Moment;

use super::clock::{self, Event};
use super::world::{State, World};
use accl_engine::internals::NOTE_DELAY;
use accl_executor::group::{Completed, WakeDecision};

/// Nanoseconds that a progress pass takes.
pub(super) const PASS: u64 = 300;

impl World<'_> {
    /// Mirrors `Driver::ask`: fetches the pending events of all links, so that they no longer wake the next sleep in
    /// the poller.
    pub(super) fn poll(&mut self, process: usize) {
        let host = &mut self.processes[process];
        if host.core.as_ref().is_some_and(|core| !core.is_parked()) {
            host.rung = false;
            self.wires.iter().for_each(|wire| wire.lock().ask(process));
        }
    }

    pub(super) fn schedule_wake(&mut self, process: usize) {
        self.enter(200, Event::Ring { process });
    }

    pub(super) fn apply_wake(&mut self, process: usize, decision: WakeDecision) {
        let waits_for_call = self.processes[process].sleep.is_some_and(|(_, waits)| waits);
        match decision {
            WakeDecision::KeepAsleep => {}
            WakeDecision::CheckCall if !waits_for_call => {}
            WakeDecision::CheckCall | WakeDecision::Wake => self.schedule_wake(process),
        }
    }

    /// Wakes the thread that sleeps in the poller. If none sleeps, the next sleep ends at once.
    pub(super) fn ring(&mut self, process: usize) {
        self.processes[process].rung = true;
        if self.processes[process].sleep.is_some() {
            self.wake(process);
        }
    }

    pub(super) fn wake(&mut self, process: usize) {
        let host = &mut self.processes[process];
        (host.rung, host.sleep, host.driver) = (false, None, None);
        self.wires.iter().for_each(|wire| wire.lock().ask(process));
        if let Some(core) = &mut host.core {
            core.unpark(clock::now());
        }
    }

    /// Parks a waiting thread, or the background thread, in the poller.
    pub(super) fn drive(&mut self, process: usize) {
        let host = &mut self.processes[process];
        host.is_about_to_drive = false;
        if host.sleep.is_some() {
            return;
        }
        let asleep = host.threads.iter().enumerate().find_map(|(thread, of)| match of.state {
            State::Asleep { item } => {
                self.made.get(&(item, process)).and_then(|made| Some((thread, made.call.clone()?)))
            }
            _ => None,
        });
        let (driver, asleep) = asleep.unzip();
        let Some(core) = &mut host.core else { return };
        let parked = core.park(asleep.as_deref(), None, true, clock::now());
        if self.scenario.traces {
            println!("drive {process} {parked:?} work {} residue {:?}", core.has_work(), core.residue());
        }
        let Ok(parked) = parked else { return };
        let Some(until) = parked else {
            self.poll(process);
            return;
        };
        host.sleeps += 1;
        self.seen.sleeps += 1;
        (host.sleep, host.driver) = (Some((host.sleeps, asleep.is_some())), driver);
        if host.rung {
            self.wake(process);
        } else if until != Moment::FAR {
            let event = Event::TimeIsUp { process, sleep: host.sleeps };
            self.agenda.lock().enter_at(until.nanos(), event);
        }
    }

    /// Resumes threads that sleep on a completed call, and schedules a driver while one is needed.
    pub(super) fn settle(&mut self, process: usize) {
        let host = &mut self.processes[process];
        let Some(core) = &mut host.core else { return };
        let Completed { callbacks, failed, .. } = core.take_completed();
        callbacks.into_iter().for_each(|callback| callback());
        self.note_failed_groups(process, failed);
        let Some(core) = &mut self.processes[process].core else { return };
        let (wanted, notes) = core.net.take_wanted();
        for note in notes {
            self.notes.push((process, note));
            self.enter(NOTE_DELAY.as_nanos() as u64, Event::Note { index: self.notes.len() - 1 });
        }
        for info in wanted {
            if let Some(wire) = self.wire_between(process, usize::from(info.uuid[0])) {
                self.enter(0, Event::Dial { wire, process });
            }
        }
        let Some(core) = &mut self.processes[process].core else { return };
        let has_work = core.has_work();
        let mut waits = false;
        for thread in 0..self.processes[process].threads.len() {
            let State::Asleep { item } = self.processes[process].threads[thread].state else { continue };
            if !self.is_over(item, process) {
                waits = true;
            } else if self.processes[process].driver != Some(thread) {
                self.resume(process, thread);
            }
        }
        let host = &mut self.processes[process];
        if (has_work || waits) && host.sleep.is_none() && !host.is_about_to_drive {
            host.is_about_to_drive = true;
            self.enter(PASS, Event::Drive { process });
        }
    }
}
