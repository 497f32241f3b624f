//! What a lane's thread has been given to do.
//!
//! Whoever makes a call gives parts of it to other lanes, and neither waits for their locks nor does their work. Owns that no job is kept when nobody
//! will do it. Read [`Jobs`] first.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::sync::Mutex;

/// Something to do on the thread of a lane. One that is dropped is not done.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// Jobs in the order in which they are done.
#[derive(Default)]
pub(crate) struct Jobs {
    waiting: Mutex<Waiting>,
    /// Whether there are any, for who looks often.
    are_there: AtomicBool,
}

#[derive(Default)]
struct Waiting {
    jobs: Vec<Job>,
    is_over: bool,
}

impl Jobs {
    /// Adds a job, unless the thread has ended: then it is dropped.
    pub(crate) fn add(&self, job: Job) {
        let mut waiting = self.waiting.lock();
        if !waiting.is_over {
            waiting.jobs.push(job);
            self.are_there.store(true, Ordering::SeqCst);
            return;
        }
        drop(waiting);
        drop(job);
    }

    /// Whether any wait.
    pub(crate) fn are_there(&self) -> bool {
        self.are_there.load(Ordering::SeqCst)
    }

    /// Does all that wait. Returns whether there were any.
    pub(crate) fn run(&self) -> bool {
        if !self.are_there() {
            return false;
        }
        let jobs = {
            let mut waiting = self.waiting.lock();
            self.are_there.store(false, Ordering::SeqCst);
            std::mem::take(&mut waiting.jobs)
        };
        let were_there = !jobs.is_empty();
        jobs.into_iter().for_each(|job| job());
        were_there
    }

    /// The thread ends. What waits is dropped, and what comes later.
    pub(crate) fn end(&self) {
        let jobs = {
            let mut waiting = self.waiting.lock();
            waiting.is_over = true;
            self.are_there.store(false, Ordering::SeqCst);
            std::mem::take(&mut waiting.jobs)
        };
        // What that tells of may take locks.
        drop(jobs);
    }
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
            jobs.add(Box::new(move || done.lock().push(number)));
        };
        assert!(!jobs.run());
        [1, 2].into_iter().for_each(add);
        assert!(jobs.are_there() && jobs.run() && !jobs.are_there() && !jobs.run());
        assert_eq!(*done.lock(), [1, 2]);

        let kept = Arc::new(AtomicUsize::new(0));
        let hold = || {
            let kept = kept.clone();
            jobs.add(Box::new(move || drop(kept)));
        };
        hold();
        assert_eq!(Arc::strong_count(&kept), 2);
        jobs.end();
        hold();
        assert_eq!(Arc::strong_count(&kept), 1);
        assert!(!jobs.run());
    }
}
