//! Threads that run what callers attached to a call: `when_done` callbacks and blocking bodies.
//!
//! A job may submit calls and wait for them, and may wait for another job. So a few threads take jobs at once, and one
//! more joins them whenever the queue stands still; idle threads retire. Posting starts no thread, because whoever
//! posts makes progress for others: as long as jobs are announced or queued, one thread is outside of all jobs, and that one
//! watches the queue and starts others. Owns the threads; knows nothing of calls. Read [`CompletionPool`] first.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use accl_types::{Error, Result};

use crate::signals;
use crate::sync::{Condvar, Mutex, MutexGuard};

/// How long an idle thread stays.
const IDLE: Duration = Duration::from_secs(10);
/// Jobs that run at once without a wait: most are short, and more threads would only wait for the interpreter's lock.
const AT_ONCE: usize = 3;
/// A queue from which nothing was taken for so long stands still: the jobs that run may wait for one that is queued.
const STANDSTILL: Duration = Duration::from_millis(5);
/// With each so many threads a standstill takes `STANDSTILL` longer to be one: jobs of which so many did not help are
/// slow rather than stuck.
const THREADS_PER_STEP: u32 = 16;
/// How often a wait for jobs asks whether to go on.
const ASK_INTERRUPT: Duration = Duration::from_millis(50);

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    /// With the time at which each was posted.
    jobs: VecDeque<(Instant, Job)>,
    /// When the last job was taken.
    taken: Option<Instant>,
    /// Announced and not yet posted.
    expected: usize,
    /// Threads that are alive or about to be.
    threads: usize,
    /// Those of them that the system is being asked for.
    starting: usize,
    /// Those of them that are inside a job.
    busy: usize,
    stopping: bool,
}

impl State {
    /// Threads outside of all jobs.
    fn free(&self) -> usize {
        self.threads - self.busy
    }

    /// When a free thread may take the oldest job; `None` without a job.
    fn take_at(&self) -> Option<Instant> {
        let (posted, _) = self.jobs.front()?;
        // Another free thread goes on watching.
        if self.busy < AT_ONCE || self.free() > 1 {
            return Some(*posted);
        }
        let still_since = self.taken.map_or(*posted, |taken| taken.max(*posted));
        Some(still_since + STANDSTILL * (1 + self.threads as u32 / THREADS_PER_STEP))
    }

    /// Whether somebody must watch the queue and nobody does.
    fn lacks_watcher(&self) -> bool {
        self.free() == 0 && !self.stopping && (self.expected > 0 || !self.jobs.is_empty())
    }
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Jobs that somebody is about to post.
    on_their_way: AtomicUsize,
    /// For the threads: there is a job, one less is announced, or the end has come.
    wake: Condvar,
    /// For who waits for them: no job is left, or no thread.
    quiet: Condvar,
}

/// A pool that grows when its jobs stand still.
#[derive(Clone, Default)]
pub(crate) struct CompletionPool {
    shared: Arc<Shared>,
}

impl CompletionPool {
    /// Announces one job: from now on there is a thread that sees to it. May start one, so no lock is held here.
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
        // The only thread may be one that another caller asks the system for, which may refuse it.
        while state.threads > 0 && state.threads == state.starting {
            self.shared.quiet.wait(&mut state);
        }
        // Where the system has no thread left, the job waits for one that exists.
        if state.threads == 0 {
            state.expected -= 1;
            return Err(Error::exhausted("no thread for completions; raise the limit of processes (`ulimit -u`)"));
        }
        Ok(())
    }

    /// An announced job will not be posted.
    pub(crate) fn withdraw(&self) {
        let mut state = self.shared.state.lock();
        state.expected = state.expected.saturating_sub(1);
        self.shared.wake.notify_one();
    }

    /// Runs an announced job on a completion thread, or drops it when the pool was stopped. Starts no thread.
    pub(crate) fn post(&self, job: Job) {
        let Shared { state, wake, .. } = &*self.shared;
        let mut state = state.lock();
        state.expected = state.expected.saturating_sub(1);
        if state.stopping {
            return;
        }
        state.jobs.push_back((Instant::now(), job));
        wake.notify_one();
    }

    /// So many announced jobs will be posted at once with [`CompletionPool::post_held`], or done by whoever holds them until
    /// [`CompletionPool::let_go`]: [`CompletionPool::drain`] waits for them, too. For who goes on only after it has given a lock back
    /// that the end of the process takes first.
    pub(crate) fn hold(&self, count: usize) {
        self.shared.on_their_way.fetch_add(count, Ordering::SeqCst);
    }

    /// So many of what was held are done.
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
    pub(crate) fn post_held(&self, jobs: Vec<Job>) {
        for job in jobs {
            self.post(job);
            self.shared.on_their_way.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn left(&self, state: &State) -> usize {
        state.jobs.len() + state.busy + self.shared.on_their_way.load(Ordering::SeqCst)
    }

    /// Starts a thread if nobody watches the queue; without the lock while the system makes it.
    fn see_to_watcher<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        if !state.lacks_watcher() {
            return state;
        }
        // It counts as free from here on, so that others do not start one, too.
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

    /// Waits until every job that was posted has run, at most until then, and returns how many have not. Ends early
    /// when `interrupt`, which is asked about every 50 ms and without the lock, returns true.
    pub(crate) fn drain(&self, until: Instant, interrupt: &mut dyn FnMut() -> bool) -> usize {
        let Shared { state, quiet, .. } = &*self.shared;
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

    /// Lets the threads finish what they are doing and end; queued jobs are dropped. Waits at most `patience`.
    pub(crate) fn stop(&self, patience: Duration) {
        let Shared { state, wake, quiet, .. } = &*self.shared;
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
        let Shared { state, wake, quiet, .. } = &*self.shared;
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
                    // Somebody who sleeps without a limit may be the only one left to watch.
                    wake.notify_one();
                }
                let guard_after = self.see_to_watcher(guard);
                drop(guard_after);
                // A callback that panics ends only itself: the bridge turns panics into errors before they get here.
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
    fn who_relies_on_a_thread_that_the_system_then_refuses_is_told() {
        let pool = CompletionPool::default();
        {
            let mut state = pool.shared.state.lock();
            // Another caller asks the system for the only thread.
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
        // More than run at once.
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
    fn draining_waits_for_jobs_that_somebody_is_about_to_post() {
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
    fn draining_waits_for_what_somebody_else_has_yet_to_do() {
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
