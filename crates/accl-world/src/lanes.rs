//! The lanes of simulated processes other than the first lane. A group that fails on one lane fails on all lanes of the
//! process.
//!
//! A lane behaves like a process without threads. Owns what `jobs` and the deferred work of `driver` own in a real
//! process: the jobs given to lanes. Read [`LaneOf`] first.

use std::sync::Arc;

use super::clock::{self, Agenda, Event};
use super::world::{LaneJobs, Violation, World};
use accl_engine::internals::{CoreJob, Lane, Next};
use accl_engine::sync::Mutex;
use accl_executor::group::{Completed, FailedGroup};

/// Maximum nanoseconds until a lane runs a job: `SOON`, or `LATER` if its thread is busy.
const SOON: u64 = 30_000;
const LATER: u64 = 500_000;

/// Returns the delay of this job, in nanoseconds.
fn delay(of: u64) -> u64 {
    let word = accl_types::hash::hash_words([of, clock::nanos()]);
    (word >> 2) % if word.is_multiple_of(4) { LATER } else { SOON }
}

/// A lane that receives parts of calls.
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

    /// Does nothing: a lane runs each job at the job's event.
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

impl World<'_> {
    /// Runs a job on its lane, or drops the job if the process has died.
    pub(super) fn do_job(&mut self, index: usize) -> Result<(), Violation> {
        let (node, job) = {
            let (node, job) = &mut self.jobs.lock()[index];
            (*node, job.take())
        };
        let Some((core, job)) = self.processes[node].core.as_mut().zip(job) else { return Ok(()) };
        job(core);
        self.schedule_wake(node);
        self.settle_and_note(node)
    }

    /// Schedules the failure of these groups on the other lanes of the process.
    pub(super) fn note_failed_groups(&mut self, node: usize, failed: Vec<FailedGroup>) {
        for FailedGroup { group, error, notify } in failed {
            for other in self.scenario.nodes(node % self.scenario.processes).filter(|&other| other != node) {
                self.enter(delay(other as u64), Event::Failed { index: self.failures.len() });
                self.failures.push((other, FailedGroup { group, error: error.clone(), notify }));
            }
        }
    }

    /// Fails a group on a lane after it has failed on another lane.
    pub(super) fn fail_lane(&mut self, index: usize) -> Result<(), Violation> {
        let node = self.failures[index].0;
        self.fail_lane_now(index);
        self.settle_and_note(node)
    }

    /// Applies failures to all lanes of a process at once, before a thread of the process goes on.
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
        self.poll(node);
        let (_, failed) = &self.failures[index];
        let Some(core) = &mut self.processes[node].core else { return };
        if self.scenario.traces {
            println!(
                "lane {node} learns that group {} has failed, {:?}: {}",
                failed.group, failed.notify, failed.error
            );
        }
        if core.fail_with_lane(failed, node < self.scenario.processes, clock::now()) {
            core.net.flush_all();
            self.schedule_wake(node);
        }
    }

    fn settle_and_note(&mut self, node: usize) -> Result<(), Violation> {
        self.settle(node);
        self.note_ends(node)
    }
}
