//! The driver of one of several lanes: what its thread does, and what other threads do for it.
//!
//! Owns when the thread of a lane is woken and how long it stays awake. A thread that waits for a call runs the parts
//! whose threads do not start: their cores may be busy with other work for milliseconds. Read [`Driver::spin_on_lane`]
//! and [`LaneHelp::help`] first.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use accl_executor::call::{CallState, Encoded, Mode};
use accl_executor::group::FailedGroup;
use accl_types::{Error, Moment};

use super::waiting::{PASSES_BEFORE_YIELD, SPIN_OWN_CORE, SPIN_SHARED_CORE};
use super::{Driver, ROUNDS_BEFORE_POLL};
use crate::jobs::{Deferred, Job};
use crate::lanes::{CoreJob, Cut, Lane, Next};
use crate::time;

/// How long a lane's thread with a core of its own polls for its next part. Calls follow each other, and waking the
/// thread takes as long as a part.
const LINGER: Duration = Duration::from_micros(100);
/// Minimum predicted time of a call, in picoseconds, for which sleeping threads are woken while its caller waits. Each
/// thread takes some tens of microseconds to start. If other threads use its core, it may be preempted for milliseconds
/// in the middle of a part.
const LEAST_WAKE_PS: u64 = 1_000_000_000;

impl Lane for Driver {
    fn give(&self, next: Option<Next>, job: CoreJob) {
        let me = self.weak();
        let job = move || {
            if let Some(lane) = me.upgrade() {
                lane.with_core(job);
            }
        };
        self.leave_job(Box::new(job), next.map(|next| Box::new(next) as Deferred));
    }

    fn wake(&self) {
        self.wake_for_jobs();
    }
}

impl Driver {
    /// Starts the thread of a lane whose calls have no waiting thread.
    ///
    /// # Errors
    /// `Exhausted` when the system has no thread for it.
    pub(crate) fn start_thread(&self) -> accl_types::Result<()> {
        match self.election.start_background(self) {
            true => Ok(()),
            false => Err(Error::exhausted(
                "cannot start a worker thread for large calls; raise the process limit with `ulimit -u`, or set \
                 ACCL_WORKER_COUNT=0",
            )),
        }
    }

    /// Records whether each lane of a group with several lanes has a core of its own on each rank.
    pub(crate) fn set_lanes_have_own_cores(&self, is_so: bool) {
        self.lanes_have_own_cores.fetch_and(is_so, Ordering::Relaxed);
    }

    /// Acts as if each lane had a core of its own.
    #[cfg(all(test, not(accl_loom)))]
    pub(crate) fn pretend_own_cores(&self) {
        self.lanes_have_own_cores.store(true, Ordering::Relaxed);
    }

    /// Runs the jobs as a waiter does when the lane's thread is too slow.
    #[cfg(all(test, not(accl_loom)))]
    pub(crate) fn do_jobs_for_another(&self) -> usize {
        self.jobs.run_for_another()
    }

    /// Records that a call of several parts is no longer waited for.
    pub(crate) fn note_cut_ended(&self, now: Moment) {
        self.cut_ended.store(now.nanos(), Ordering::Relaxed);
    }

    /// Returns a weak reference, for holders that must not keep the driver alive.
    pub(crate) fn weak(&self) -> Weak<Driver> {
        self.me.clone()
    }

    /// Returns whether a call's parts on other lanes are left to its waiting caller. Sleeping threads are not worth
    /// waking for a small call, unless calls follow each other closely. Threads that are awake run the parts anyway.
    pub(crate) fn leaves_parts_to_waiter(&self, cut: &Cut, now: Moment) -> bool {
        // Encoding time is not predicted, and a waiter that does not spin runs no parts.
        let is_small = cut.predicted_ps < LEAST_WAKE_PS && !matches!(cut.first.encoding, Encoded::As(_));
        let is_waited_for = cut.first.mode == Mode::Blocking && self.spin.is_none_or(|spin| !spin.is_zero());
        let ended = Moment::from_nanos(self.cut_ended.load(Ordering::Relaxed));
        is_small && is_waited_for && now.since(ended) >= LINGER
    }

    /// Queues a job for the lane's thread; [`Driver::wake_for_jobs`] wakes it. If the thread ends before, the job is
    /// dropped.
    pub(crate) fn leave_job(&self, job: Job, deferred: Option<Deferred>) {
        self.jobs.add(job, deferred);
    }

    /// Wakes the thread of a lane for its jobs, unless it polls for jobs by itself; it checks once more after it stops
    /// polling. If another thread has run the jobs, only the deferred values are left and they are dropped here.
    pub(crate) fn wake_for_jobs(&self) {
        if self.is_spinning.load(Ordering::SeqCst) {
            return;
        }
        if self.jobs.are_there() {
            self.ensure_driver();
            self.wake_driver_if(true);
        } else {
            self.jobs.drop_deferred();
        }
    }

    /// On the lane's thread: polls until no event has come for a while, or until nothing is left to do and no part
    /// follows. It yields its core between polls if the core is shared, and while it has nothing to do.
    pub(super) fn spin_on_lane(&self) {
        let has_own_core = self.lanes_have_own_cores.load(Ordering::Relaxed) && !self.shares_cores();
        let budget = self.spin.unwrap_or(if has_own_core { SPIN_OWN_CORE } else { SPIN_SHARED_CORE });
        let linger = if has_own_core { LINGER.min(budget) } else { Duration::ZERO };
        let (mut idle, mut has_events, mut is_lingering) = (0, false, false);
        self.is_spinning.store(true, Ordering::SeqCst);
        let mut last_event = time::now();
        for round in 1_u32.. {
            let now = time::now();
            idle += 1;
            if self.jobs.run() {
                (last_event, idle, has_events) = (time::now(), 0, true);
            }
            if let Some(mut core) = self.try_lock() {
                // After a yield the thread may be away for long, so on a shared core it asks the system each time.
                if !has_own_core || round.is_multiple_of(ROUNDS_BEFORE_POLL) {
                    self.ask(&core);
                }
                if core.pass(now) {
                    (last_event, idle, has_events) = (time::now(), 0, true);
                }
                is_lingering = !core.has_work() && !self.jobs.want_thread();
                if is_lingering && (!has_events || now.since(last_event) >= linger) {
                    break;
                }
            }
            if now.since(last_event) >= budget {
                break;
            }
            if is_lingering || !has_own_core && idle > PASSES_BEFORE_YIELD {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
        self.is_spinning.store(false, Ordering::SeqCst);
        self.has_spun_in_vain.store(!has_events, Ordering::Relaxed);
    }

    /// Makes one pass over everything that has arrived. Returns whether anything moved.
    pub(super) fn poll_once(&self) -> bool {
        let mut core = self.lock();
        self.ask(&core);
        core.pass(time::now())
    }

    /// Returns whether this driver belongs to a lane other than the first; no thread waits for that lane's calls.
    pub(super) fn is_other_lane(&self) -> bool {
        let first = self.lanes.get().and_then(|lanes| lanes.first());
        first.is_some_and(|first| !std::ptr::eq(first.as_ptr(), self))
    }

    /// Sets the drivers of all lanes of the process. Only the first call has an effect.
    pub(crate) fn set_lanes(&self, lanes: Vec<Weak<Driver>>) {
        let _ = self.lanes.set(lanes);
    }

    /// Iterates over the drivers of the other lanes, with their numbers.
    fn others(&self) -> impl Iterator<Item = (usize, Arc<Driver>)> {
        let lanes = self.lanes.get().into_iter().flatten().enumerate();
        let there = lanes.filter_map(|(number, lane)| Some((number, lane.upgrade()?)));
        there.filter(|(_, lane)| !std::ptr::eq(&**lane, self))
    }

    /// Fails a group that failed on this lane on all other lanes, after each has processed what had arrived for it. The
    /// first lane notifies the peers, whatever the lane that failed first has sent. The caller must hold no lock.
    pub(crate) fn fail_on_other_lanes(&self, failed: &FailedGroup) {
        for (number, lane) in self.others() {
            let is_there = lane.with_core(|core| {
                lane.poll(core);
                core.fail_with_lane(failed, number == 0, time::now())
            });
            if is_there {
                lane.flush();
                lane.wake();
            }
        }
    }

    /// Returns the state of a waiting thread's help on the other lanes; initially it has done nothing.
    pub(super) fn lane_help(&self) -> LaneHelp {
        let helped = |(_, lane)| Helped { lane, is_watched: false, has_begun: false };
        LaneHelp { lanes: self.others().map(helped).collect(), watches: false }
    }

    /// Makes sure that work begun here continues without this thread. The lane's thread may have found nothing to do
    /// and sleep, or sleep beyond a deadline that it does not know.
    fn hand_over(&self, is_watched: bool) {
        let (decision, must_wake, has_work) = self.with_core(|core| {
            let decision = is_watched.then(|| core.unwatch(time::now()));
            (decision, core.must_wake_driver(core.next_deadline()), core.has_work())
        });
        if let Some(decision) = decision {
            self.apply_wake(decision);
        }
        if must_wake {
            self.wake_driver_if(true);
        }
        if has_work {
            self.ensure_driver();
        }
    }
}

/// A waiting thread's help on the lanes other than its own.
pub(super) struct LaneHelp {
    lanes: Vec<Helped>,
    /// Whether this thread polls the links of a lane in place of a sleeping driver thread, and must continue.
    pub(super) watches: bool,
}

/// A lane that a waiter helps.
struct Helped {
    lane: Arc<Driver>,
    /// Whether its driver thread sleeps without being woken by events, because this thread polls.
    is_watched: bool,
    /// Whether this thread has begun a part on the lane.
    has_begun: bool,
}

impl LaneHelp {
    /// Makes a pass for each part of the call that no other thread works on. If nothing has moved, or a part is
    /// overdue, begins one part whose thread has not started. It begins only one: the more parts a thread has begun,
    /// the less of their links stays in its core's cache. Returns whether anything moved.
    pub(super) fn help(&mut self, call: &CallState, is_overdue: bool, now: Moment) -> bool {
        let mut has_moved = false;
        for helped in &mut self.lanes {
            has_moved |= helped.pass(call, now) == Some(true);
        }
        if !has_moved || is_overdue {
            has_moved |= self.lanes.iter_mut().any(|helped| helped.begin(call, now));
        }
        self.watches = self.lanes.iter().any(|helped| helped.is_watched);
        has_moved
    }
}

impl Helped {
    /// Runs the jobs of the lane's thread, unless that thread is working there. Returns whether there were any jobs.
    fn begin(&mut self, call: &CallState, now: Moment) -> bool {
        if !self.lane.jobs.are_there() || self.lane.try_lock().is_none() {
            return false;
        }
        self.has_begun = true;
        let begun = self.lane.jobs.run_for_another();
        let passed = usize::from(self.pass(call, now).is_some());
        // A job belonged to another call that no thread here waits for, or another thread holds the lane now.
        if begun > passed {
            self.lane.hand_over(false);
        }
        begun > 0
    }

    /// Makes a pass if the call has a part on this lane and no other thread works on it. Returns whether anything
    /// moved; `None` if there was no pass.
    fn pass(&mut self, call: &CallState, now: Moment) -> Option<bool> {
        let mut core = self.lane.try_lock()?;
        let peers = core.peers_of(call);
        // On a lane that is watched, parts of other calls are processed here as well.
        if peers.is_empty() && !self.is_watched {
            return None;
        }
        self.is_watched = self.is_watched || core.watch();
        peers.iter().for_each(|&peer| core.net.poll_link(peer));
        core.streams_among(&peers).into_iter().for_each(|peer| core.net.force_poll(peer));
        Some(self.lane.pass_and_notify(core, self.is_watched, now))
    }
}

impl Drop for Helped {
    fn drop(&mut self) {
        if self.is_watched || self.has_begun {
            self.lane.hand_over(self.is_watched);
        }
        // Jobs were left to a waiter that now sleeps or returns.
        if self.lane.jobs.are_there() {
            self.lane.wake_for_jobs();
        }
    }
}
