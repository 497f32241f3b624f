//! Threads that run what callers attach to a call: `when_done` callbacks and blocking bodies.
//!
//! A job may submit calls and wait for them, and may wait for another job. So a few threads take jobs at once, and one
//! more joins them whenever the queue stalls; idle threads exit. Posting starts no thread, because the posting thread
//! makes progress for others. Instead, as long as jobs are announced or queued, one thread stays outside all jobs,
//! watches the queue and starts others. Owns the threads; knows nothing of calls. Read [`CompletionPool`] first.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use accl_types::{Error, Result};

use crate::signals;
use crate::sync::{Condvar, Mutex, MutexGuard};

/// How long an idle thread stays alive.
const IDLE: Duration = Duration::from_secs(10);
/// Number of jobs that start without a delay. Most jobs are short, and more threads would only wait for the
/// interpreter's lock.
const AT_ONCE: usize = 3;
/// Time without a job taken after which a queue counts as stalled: the running jobs may wait for a queued one.
const STANDSTILL: Duration = Duration::from_millis(5);
/// Each group of this many threads adds another `STANDSTILL` to that time. If this many jobs did not help, they are
/// slow rather than stuck.
const THREADS_PER_STEP: u32 = 16;
/// Interval at which a wait for jobs calls `interrupt`.
const ASK_INTERRUPT: Duration = Duration::from_millis(50);

type PoolJob = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct PoolState {
    /// The queued jobs, each with the time at which it was posted.
    jobs: VecDeque<(Instant, PoolJob)>,
    /// Time at which the last job was taken.
    taken: Option<Instant>,
    /// Number of jobs announced but not yet posted.
    expected: usize,
    /// Number of threads that are alive or about to be.
    threads: usize,
    /// Number of those threads that the system has not yet started.
    starting: usize,
    /// Number of those threads that are inside a job.
    busy: usize,
    stopping: bool,
}

impl PoolState {
    /// Returns the number of threads outside all jobs.
    fn free(&self) -> usize {
        self.threads - self.busy
    }

    /// Returns the time at which a free thread may take the oldest job; `None` without a job.
    fn take_at(&self) -> Option<Instant> {
        let (posted, _) = self.jobs.front()?;
        // If two threads are free, the other one goes on watching.
        if self.busy < AT_ONCE || self.free() > 1 {
            return Some(*posted);
        }
        let still_since = self.taken.map_or(*posted, |taken| taken.max(*posted));
        Some(still_since + STANDSTILL * (1 + self.threads as u32 / THREADS_PER_STEP))
    }

    /// Returns whether the queue needs a watching thread and has none.
    fn lacks_watcher(&self) -> bool {
        self.free() == 0 && !self.stopping && (self.expected > 0 || !self.jobs.is_empty())
    }
}

#[derive(Default)]
struct PoolShared {
    state: Mutex<PoolState>,
    /// Number of held jobs: they will be posted, or finished by another thread.
    on_their_way: AtomicUsize,
    /// For the pool's threads: a job was posted, an announced job was withdrawn, or the pool stops.
    wake: Condvar,
    /// For threads that wait for the pool: no job or no thread is left, or a thread was started or refused.
    quiet: Condvar,
}

/// A pool of threads that grows when its queue stalls.
#[derive(Clone, Default)]
pub(crate) struct CompletionPool {
    shared: Arc<PoolShared>,
}

impl CompletionPool {
    /// Announces one job: from now on a thread exists that will run it. May start a thread, so the caller must hold
    /// no lock.
    ///
    /// # Errors
    /// `Exhausted` when the system gives no thread; `Aborted` when the pool was stopped.
    pub(crate) fn expect(&self) -> Result<()> {
        let mut state = self.shared.state.lock();
        if state.stopping {
            return Err(Error::aborted("the engine was shut down"));
        }
        state.expected += 1;
        let mut state = self.see_to_watcher(state);
        // The only thread may be one that another caller has requested and that the system may still refuse.
        while state.threads > 0 && state.threads == state.starting {
            self.shared.quiet.wait(&mut state);
        }
        // If the system has no thread left, the job waits for an existing one.
        if state.threads == 0 {
            state.expected -= 1;
            return Err(Error::exhausted("cannot start a completion thread; raise the process limit with `ulimit -u`"));
        }
        Ok(())
    }

    /// Withdraws an announced job that will not be posted.
    pub(crate) fn withdraw(&self) {
        let mut state = self.shared.state.lock();
        state.expected = state.expected.saturating_sub(1);
        self.shared.wake.notify_one();
    }

    /// Runs an announced job on a completion thread, or drops it if the pool was stopped. Starts no thread.
    pub(crate) fn post(&self, job: PoolJob) {
        let PoolShared { state, wake, .. } = &*self.shared;
        let mut state = state.lock();
        state.expected = state.expected.saturating_sub(1);
        if state.stopping {
            return;
        }
        state.jobs.push_back((Instant::now(), job));
        wake.notify_one();
    }

    /// Makes [`CompletionPool::drain`] wait for `count` more jobs. Announced jobs then follow with
    /// [`CompletionPool::post_held`]; other work is reported as finished with [`CompletionPool::let_go`]. A caller uses
    /// this when it must first release a lock that the end of the process also takes.
    pub(crate) fn hold(&self, count: usize) {
        self.shared.on_their_way.fetch_add(count, Ordering::SeqCst);
    }

    /// Reports that `count` of the held jobs are finished.
    pub(crate) fn let_go(&self, count: usize) {
        if count > 0 {
            let state = self.shared.state.lock();
            self.shared.on_their_way.fetch_sub(count, Ordering::SeqCst);
            if self.left(&state) == 0 {
                self.shared.quiet.notify_all();
            }
        }
    }

    /// Posts jobs that were held.
    pub(crate) fn post_held(&self, jobs: Vec<PoolJob>) {
        for job in jobs {
            self.post(job);
            self.shared.on_their_way.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn left(&self, state: &PoolState) -> usize {
        state.jobs.len() + state.busy + self.shared.on_their_way.load(Ordering::SeqCst)
    }

    /// Starts a thread if none watches the queue. The lock is released while the system creates the thread.
    fn see_to_watcher<'a>(&'a self, mut state: MutexGuard<'a, PoolState>) -> MutexGuard<'a, PoolState> {
        if !state.lacks_watcher() {
            return state;
        }
        // The thread counts as free from here on, so that other callers do not start one as well.
        (state.threads, state.starting) = (state.threads + 1, state.starting + 1);
        let is_there = MutexGuard::unlocked(&mut state, || {
            let pool = self.clone();
            std::thread::Builder::new().name("accl-complete".into()).spawn(move || pool.work()).is_ok()
        });
        (state.threads, state.starting) = (state.threads - usize::from(!is_there), state.starting - 1);
        if !is_there {
            self.shared.wake.notify_all();
        }
        self.shared.quiet.notify_all();
        state
    }

    /// Waits until every posted or held job has run, at most until `until`, and returns the number that have not.
    /// Returns early if `interrupt` returns true; it is called every 50 ms without the lock.
    pub(crate) fn drain(&self, until: Instant, interrupt: &mut dyn FnMut() -> bool) -> usize {
        let PoolShared { state, quiet, .. } = &*self.shared;
        let mut state = state.lock();
        loop {
            let left = self.left(&state);
            let now = Instant::now();
            if left == 0 || now >= until {
                return left;
            }
            let asked_at = until.min(now + ASK_INTERRUPT);
            while self.left(&state) > 0 && !quiet.wait_until(&mut state, asked_at).timed_out() {}
            if MutexGuard::unlocked(&mut state, &mut *interrupt) {
                return self.left(&state);
            }
        }
    }

    /// Lets the threads finish their current jobs and exit; queued jobs are dropped. Waits at most `patience`.
    pub(crate) fn stop(&self, patience: Duration) {
        let PoolShared { state, wake, quiet, .. } = &*self.shared;
        let mut state = state.lock();
        state.stopping = true;
        let dropped = std::mem::take(&mut state.jobs);
        wake.notify_all();
        quiet.wait_while_for(&mut state, |state| state.threads > 0, patience);
        drop(state);
        drop(dropped);
    }

    fn work(&self) {
        signals::block_all();
        let PoolShared { state, wake, quiet, .. } = &*self.shared;
        let mut guard = state.lock();
        while !guard.stopping {
            let now = Instant::now();
            let take_at = guard.take_at();
            if take_at.is_some_and(|at| at <= now)
                && let Some((_, job)) = guard.jobs.pop_front()
            {
                guard.taken = Some(now);
                guard.busy += 1;
                if !guard.jobs.is_empty() {
                    // A thread that sleeps without a time limit may be the only one left to watch.
                    wake.notify_one();
                }
                let guard_after = self.see_to_watcher(guard);
                drop(guard_after);
                // A panicking callback ends only itself: the bridge turns panics into errors before they get here.
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
                guard = state.lock();
                guard.busy -= 1;
                if guard.busy == 0 && guard.jobs.is_empty() {
                    quiet.notify_all();
                }
                continue;
            }
            let timed_out = wake.wait_until(&mut guard, take_at.unwrap_or(now + IDLE)).timed_out();
            let is_needed = guard.free() == 1 && guard.expected > 0;
            if timed_out && guard.jobs.is_empty() && !is_needed {
                break;
            }
        }
        guard.threads -= 1;
        if guard.threads == 0 {
            quiet.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_caller_gets_an_error_when_the_system_refuses_the_shared_thread() {
        let pool = CompletionPool::default();
        {
            let mut state = pool.shared.state.lock();
            // Another caller has requested the only thread.
            (state.threads, state.starting, state.expected) = (1, 1, 1);
        }
        let other = pool.clone();
        let expecting = std::thread::spawn(move || other.expect());
        while pool.shared.state.lock().expected < 2 {
            std::thread::yield_now();
        }
        {
            let mut state = pool.shared.state.lock();
            (state.threads, state.starting) = (0, 0);
        }
        pool.shared.quiet.notify_all();
        let error = expecting.join().unwrap().unwrap_err();
        assert_eq!(error.kind, accl_types::ErrorKind::Exhausted, "{error}");
    }

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
    fn draining_waits_for_the_jobs_that_run_and_those_that_are_queued() {
        let pool = CompletionPool::default();
        let (sender, receiver) = mpsc::channel();
        // More jobs than run at once.
        for _ in 0..AT_ONCE + 2 {
            let sender = sender.clone();
            pool.expect().unwrap();
            pool.post(Box::new(move || {
                std::thread::sleep(Duration::from_millis(60));
                sender.send(()).unwrap();
            }));
        }
        let soon = Instant::now() + Duration::from_secs(20);
        assert_eq!(pool.drain(soon, &mut || false), 0);
        assert_eq!(receiver.try_iter().count(), AT_ONCE + 2);
        pool.stop(Duration::from_secs(5));
    }

    #[test]
    fn draining_ends_at_its_limit_and_when_it_is_interrupted() {
        let pool = CompletionPool::default();
        let (release, held) = mpsc::channel::<()>();
        pool.expect().unwrap();
        pool.post(Box::new(move || assert!(held.recv_timeout(Duration::from_secs(20)).is_err())));
        assert_eq!(pool.drain(Instant::now() + Duration::from_millis(20), &mut || false), 1);
        assert_eq!(pool.drain(Instant::now() + Duration::from_secs(20), &mut || true), 1);
        drop(release);
        assert_eq!(pool.drain(Instant::now() + Duration::from_secs(20), &mut || false), 0);
        pool.stop(Duration::from_secs(5));
    }

    #[test]
    fn draining_waits_for_held_jobs_that_are_posted_later() {
        let pool = CompletionPool::default();
        pool.expect().unwrap();
        pool.hold(1);
        assert_eq!(pool.drain(Instant::now() + Duration::from_millis(20), &mut || false), 1);
        let (sender, receiver) = mpsc::channel();
        let poster = std::thread::spawn({
            let pool = pool.clone();
            move || {
                std::thread::sleep(Duration::from_millis(60));
                pool.post_held(vec![Box::new(move || sender.send(()).unwrap())]);
            }
        });
        assert_eq!(pool.drain(Instant::now() + Duration::from_secs(20), &mut || false), 0);
        assert_eq!(receiver.try_iter().count(), 1);
        poster.join().unwrap();
        pool.stop(Duration::from_secs(5));
    }

    #[test]
    fn draining_waits_for_held_work_of_other_threads() {
        let pool = CompletionPool::default();
        pool.hold(1);
        assert_eq!(pool.drain(Instant::now() + Duration::from_millis(20), &mut || false), 1);
        let other = std::thread::spawn({
            let pool = pool.clone();
            move || {
                std::thread::sleep(Duration::from_millis(30));
                pool.let_go(1);
            }
        });
        assert_eq!(pool.drain(Instant::now() + Duration::from_secs(20), &mut || false), 0);
        other.join().unwrap();
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
