//! The lanes of simulated processes beside the first: what they are given to do, and that a group which fails on one of them fails on all.
//!
//! A lane is as a process without threads. Owns what `jobs` and the errands of `driver` own in a real process. Read [`LaneOf`] first.

use std::sync::Arc;

use super::clock::{self, Agenda, Event};
use super::world::{LaneJobs, Violation, World};
use crate::jobs::Job;
use crate::lanes::{CoreJob, Lane, Next, Starter};
use crate::sync::Mutex;
use accl_executor::group::{Completed, FailedGroup};

/// Until a lane does what it was given, at most, in nanoseconds: soon, or after what its thread is in the middle of.
const SOON: u64 = 30_000;
const LATER: u64 = 500_000;

/// How long that takes this time.
fn delay(of: u64) -> u64 {
    let word = accl_types::hash::hash_words([of, clock::nanos()]);
    (word >> 2) % if word.is_multiple_of(4) { LATER } else { SOON }
}

/// A lane as parts are given to it.
pub(super) struct LaneOf {
    pub(super) node: usize,
    pub(super) jobs: Arc<Mutex<LaneJobs>>,
    pub(super) agenda: Arc<Mutex<Agenda>>,
}

impl Lane for LaneOf {
    fn give(&self, next: Option<Next>, job: CoreJob) {
        drop(next);
        self.leave(job);
    }

    /// It comes by itself.
    fn wake(&self) {}
}

impl LaneOf {
    fn leave(&self, job: CoreJob) {
        let index = {
            let mut jobs = self.jobs.lock();
            jobs.push((self.node, Some(job)));
            jobs.len() - 1
        };
        self.agenda.lock().enter(delay(index as u64), Event::Job { index });
    }
}

impl Starter for LaneOf {
    fn post(self: Box<Self>, job: Job) {
        self.leave(Box::new(|_| job()));
    }
}

impl World<'_> {
    /// A lane does what it was given, or drops it if its process has died.
    pub(super) fn do_job(&mut self, index: usize) -> Result<(), Violation> {
        let (node, job) = {
            let (node, job) = &mut self.jobs.lock()[index];
            (*node, job.take())
        };
        let Some((core, job)) = self.processes[node].core.as_mut().zip(job) else { return Ok(()) };
        job(core);
        self.kick(node);
        self.settle_and_note(node)
    }

    /// These groups have failed on a lane of a process.
    pub(super) fn note_failed_groups(&mut self, node: usize, failed: Vec<FailedGroup>) {
        for FailedGroup { group, error, tell } in failed {
            for other in self.scenario.nodes(node % self.scenario.processes).filter(|&other| other != node) {
                self.enter(delay(other as u64), Event::Failed { index: self.failures.len() });
                self.failures.push((other, FailedGroup { group, error: error.clone(), tell }));
            }
        }
    }

    /// A lane learns that a group has failed on another one.
    pub(super) fn fail_lane(&mut self, index: usize) -> Result<(), Violation> {
        let node = self.failures[index].0;
        self.fail_lane_now(index);
        self.settle_and_note(node)
    }

    /// What a thread of a process has done so far is known on all lanes before it goes on.
    pub(super) fn fail_lanes_now(&mut self, process: usize) {
        for node in self.scenario.nodes(process) {
            let Some(core) = &mut self.processes[node].core else { return };
            let Completed { callbacks, failed, .. } = core.take_completed();
            callbacks.into_iter().for_each(|callback| callback());
            self.note_failed_groups(node, failed);
        }
        for index in 0..self.failures.len() {
            if self.failures[index].0 % self.scenario.processes == process {
                self.fail_lane_now(index);
            }
        }
    }

    fn fail_lane_now(&mut self, index: usize) {
        let node = self.failures[index].0;
        self.look(node);
        let (_, failed) = &self.failures[index];
        let Some(core) = &mut self.processes[node].core else { return };
        if self.scenario.traces {
            println!("lane {node} hears that group {} has failed, {:?}: {}", failed.group, failed.tell, failed.error);
        }
        if core.fail_with_lane(failed, node < self.scenario.processes, clock::now()) {
            core.net.flush_all();
            self.kick(node);
        }
    }

    fn settle_and_note(&mut self, node: usize) -> Result<(), Violation> {
        self.settle(node);
        self.note_ends(node)
    }
}
