//! Queue of jobs for the thread of a lane.
//!
//! A thread that issues a call gives parts of it to other lanes, without waiting for their locks and without doing
//! their work. Owns two rules. No job is kept once its thread has ended. A waiter that runs a job does not wake other
//! threads in place of the lane's thread. Read [`Jobs`] first.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::sync::Mutex;

/// Work for the thread of a lane. If a job is dropped, it is not run.
pub type Job = Box<dyn FnOnce() + Send>;

/// A value that the lane's thread drops before it runs a job; the drop wakes other lanes.
pub(crate) type Deferred = Box<dyn Send>;

/// Jobs, run in the order in which they were added.
#[derive(Default)]
pub(crate) struct Jobs {
    waiting: Mutex<Waiting>,
    /// Whether there are jobs, readable without the lock because it is polled often.
    are_there: AtomicBool,
    /// Whether there are deferred values, readable without the lock because it is polled often.
    has_deferred: AtomicBool,
}

#[derive(Default)]
struct Waiting {
    jobs: Vec<Job>,
    deferred: Vec<Deferred>,
    is_over: bool,
}

impl Jobs {
    /// Adds a job and its deferred value. If the lane's thread has ended, both are dropped.
    pub(crate) fn add(&self, job: Job, deferred: Option<Deferred>) {
        let mut waiting = self.waiting.lock();
        if !waiting.is_over {
            waiting.jobs.push(job);
            if let Some(deferred) = deferred {
                waiting.deferred.push(deferred);
                self.has_deferred.store(true, Ordering::SeqCst);
            }
            self.are_there.store(true, Ordering::SeqCst);
            return;
        }
        drop(waiting);
        drop((job, deferred));
    }

    /// Returns whether jobs are waiting.
    pub(crate) fn are_there(&self) -> bool {
        self.are_there.load(Ordering::SeqCst)
    }

    /// Returns whether the lane's thread has something to do: a job, or only a deferred value to drop.
    pub(crate) fn want_thread(&self) -> bool {
        self.are_there() || self.has_deferred.load(Ordering::SeqCst)
    }

    /// On the lane's thread: drops the deferred values, then runs the jobs. They include those whose job another thread
    /// has run. Returns whether there were any jobs.
    pub(crate) fn run(&self) -> bool {
        if !self.want_thread() {
            return false;
        }
        let (deferred, jobs) = {
            let mut waiting = self.waiting.lock();
            (self.take_deferred(&mut waiting), self.take_jobs(&mut waiting))
        };
        drop(deferred);
        do_all(jobs) > 0
    }

    /// On another thread: runs the jobs and returns how many there were. The deferred values stay for the lane's
    /// thread, because each takes as long as a job.
    pub(crate) fn run_for_another(&self) -> usize {
        if !self.are_there() {
            return 0;
        }
        let jobs = self.take_jobs(&mut self.waiting.lock());
        do_all(jobs)
    }

    /// Drops the deferred values that are waiting.
    pub(crate) fn drop_deferred(&self) {
        let deferred = self.take_deferred(&mut self.waiting.lock());
        drop(deferred);
    }

    /// Marks the lane's thread as ended. Waiting jobs and deferred values are dropped, and so are those added later.
    pub(crate) fn end(&self) {
        let left = {
            let mut waiting = self.waiting.lock();
            waiting.is_over = true;
            (self.take_jobs(&mut waiting), self.take_deferred(&mut waiting))
        };
        // Without the lock: the destructors may take locks.
        drop(left);
    }

    fn take_jobs(&self, waiting: &mut Waiting) -> Vec<Job> {
        self.are_there.store(false, Ordering::SeqCst);
        std::mem::take(&mut waiting.jobs)
    }

    fn take_deferred(&self, waiting: &mut Waiting) -> Vec<Deferred> {
        self.has_deferred.store(false, Ordering::SeqCst);
        std::mem::take(&mut waiting.deferred)
    }
}

/// Runs the jobs and returns their number.
fn do_all(jobs: Vec<Job>) -> usize {
    let count = jobs.len();
    jobs.into_iter().for_each(|job| job());
    count
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn jobs_are_done_once_in_their_order_and_none_is_kept_after_the_end() {
        let (jobs, done) = (Jobs::default(), Arc::new(Mutex::new(Vec::new())));
        let add = |number: usize| {
            let done = done.clone();
            jobs.add(Box::new(move || done.lock().push(number)), None);
        };
        assert!(!jobs.run());
        [1, 2].into_iter().for_each(add);
        assert!(jobs.are_there() && jobs.run() && !jobs.are_there() && !jobs.run());
        assert_eq!(*done.lock(), [1, 2]);

        let kept = Arc::new(AtomicUsize::new(0));
        let hold = || {
            let kept = kept.clone();
            let deferred = Box::new(kept.clone()) as Deferred;
            jobs.add(Box::new(move || drop(kept)), Some(deferred));
        };
        hold();
        assert_eq!(Arc::strong_count(&kept), 3);
        jobs.end();
        hold();
        assert_eq!(Arc::strong_count(&kept), 1);
        assert!(!jobs.run());
    }

    #[test]
    fn deferred_drops_stay_on_the_lane_thread_after_another_thread_ran_the_job() {
        let (jobs, kept) = (Jobs::default(), Arc::new(()));
        jobs.add(Box::new(|| ()), Some(Box::new(kept.clone())));
        assert!(jobs.run_for_another() == 1 && !jobs.are_there() && jobs.want_thread());
        assert_eq!(Arc::strong_count(&kept), 2, "a waiter drops no deferred values");
        assert!(!jobs.run(), "the job is done");
        assert!(!jobs.want_thread());
        assert_eq!(Arc::strong_count(&kept), 1);
    }
}
