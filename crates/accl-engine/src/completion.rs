//! Threads that run what callers attached to a call: `when_done` callbacks and blocking bodies.
//!
//! A job may submit calls and wait for them, so a new thread starts when every thread is inside a job; idle threads
//! retire. Owns the threads; knows nothing of calls. Read [`CompletionPool`] first.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use accl_types::{Error, Result};

use crate::signals;
use crate::sync::{Condvar, Mutex};

/// How long an idle thread stays.
const IDLE: Duration = Duration::from_secs(10);

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Announced and not yet posted.
    expected: usize,
    idle: usize,
    threads: usize,
    stopping: bool,
}

/// A pool that grows when all its threads are busy.
#[derive(Clone, Default)]
pub(crate) struct CompletionPool {
    shared: Arc<(Mutex<State>, Condvar)>,
}

impl CompletionPool {
    /// Announces one job: from now on there is a thread that can run it.
    ///
    /// # Errors
    /// `Exhausted` when the system gives no thread; `Aborted` when the pool was stopped.
    pub(crate) fn expect(&self) -> Result<()> {
        let mut state = self.shared.0.lock();
        if state.stopping {
            return Err(Error::aborted("the engine was shut down"));
        }
        if state.threads == 0 && !self.start_thread(&mut state) {
            return Err(Error::exhausted("no thread for completions; raise the limit of processes (`ulimit -u`)"));
        }
        state.expected += 1;
        Ok(())
    }

    /// Runs an announced job on a completion thread, or drops it when the pool was stopped.
    pub(crate) fn post(&self, job: Job) {
        let (state, wake) = &*self.shared;
        let mut state = state.lock();
        state.expected = state.expected.saturating_sub(1);
        if state.stopping {
            return;
        }
        state.jobs.push_back(job);
        // One idle thread per queued job, or a job could wait behind one that blocks on it. Where the system has no
        // thread left, it waits for one that exists.
        if state.idle >= state.jobs.len() || !self.start_thread(&mut state) {
            wake.notify_one();
        }
    }

    fn start_thread(&self, state: &mut State) -> bool {
        let pool = self.clone();
        let spawned = std::thread::Builder::new().name("accl-complete".into()).spawn(move || pool.work());
        state.threads += usize::from(spawned.is_ok());
        spawned.is_ok()
    }

    /// Lets the threads finish what they are doing and end; queued jobs are dropped. Waits at most `patience`.
    pub(crate) fn stop(&self, patience: Duration) {
        let (state, wake) = &*self.shared;
        let mut state = state.lock();
        state.stopping = true;
        let dropped = std::mem::take(&mut state.jobs);
        wake.notify_all();
        wake.wait_while_for(&mut state, |state| state.threads > 0, patience);
        drop(state);
        drop(dropped);
    }

    fn work(&self) {
        signals::block_all();
        let (state, wake) = &*self.shared;
        let mut guard = state.lock();
        loop {
            if let Some(job) = guard.jobs.pop_front() {
                drop(guard);
                // A callback that panics ends only itself: the bridge turns panics into errors before they get here.
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
                guard = state.lock();
                continue;
            }
            if guard.stopping {
                break;
            }
            guard.idle += 1;
            let timed_out = wake.wait_for(&mut guard, IDLE).timed_out();
            guard.idle -= 1;
            let is_needed = guard.expected > 0 && guard.threads == 1;
            if timed_out && guard.jobs.is_empty() && !is_needed {
                break;
            }
        }
        guard.threads -= 1;
        wake.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_chain_of_jobs_that_wait_for_each_other_ends() {
        fn post_chain(pool: &CompletionPool, depth: usize, done: mpsc::Sender<usize>) {
            let inner = pool.clone();
            pool.expect().unwrap();
            pool.post(Box::new(move || {
                if depth > 0 {
                    let (sender, receiver) = mpsc::channel();
                    post_chain(&inner, depth - 1, sender);
                    receiver.recv_timeout(Duration::from_secs(10)).unwrap();
                }
                done.send(depth).unwrap();
            }));
        }
        let pool = CompletionPool::default();
        let (sender, receiver) = mpsc::channel();
        post_chain(&pool, 16, sender);
        assert_eq!(receiver.recv_timeout(Duration::from_secs(20)), Ok(16));
        pool.stop(Duration::from_secs(5));
    }

    #[test]
    fn a_stopped_pool_takes_nothing() {
        let pool = CompletionPool::default();
        pool.stop(Duration::ZERO);
        let (sender, receiver) = mpsc::channel::<()>();
        pool.post(Box::new(move || drop(sender)));
        assert!(receiver.recv_timeout(Duration::from_secs(10)).is_err());
    }
}
