//! The driver of one of several lanes: what its thread does, and what others do for it.
//!
//! Owns when the thread of a lane is woken, how long it stays awake, and that whoever waits for a call does parts of it whose threads do not come: their
//! cores may be busy with something else for milliseconds. Read [`Driver::spin_on_lane`] and [`Beside::help`] first.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use accl_executor::call::{CallState, Encoded, Mode};
use accl_executor::group::FailedGroup;
use accl_types::{Error, Moment};

use super::waiting::{PASSES_BEFORE_YIELD, SPIN_OWN_CORE, SPIN_SHARED_CORE};
use super::{Driver, ROUNDS_BEFORE_LOOK};
use crate::jobs::{Errand, Job};
use crate::lanes::Cut;
use crate::time;

/// How long the thread of a lane with a core of its own looks for its next part: calls come one after the other, and waking it takes as long as a part.
const LINGER: Duration = Duration::from_micros(100);
/// Least predicted time of a call, in picoseconds, for whose parts threads that sleep are woken while its caller waits: each takes some tens of microseconds to
/// come, and where other threads have its core it may be sent away for milliseconds in the middle of a part.
const LEAST_WAKE_PS: u64 = 1_000_000_000;

impl Driver {
    /// Starts the thread of a lane for whose calls nobody waits.
    ///
    /// # Errors
    /// `Exhausted` when the system has no thread for it.
    pub(crate) fn start_thread(&self) -> accl_types::Result<()> {
        match self.election.start_background(self) {
            true => Ok(()),
            false => Err(Error::exhausted(
                "no thread for parts of large calls; raise the limit with `ulimit -u`, or set ACCL_WORKER_COUNT=0",
            )),
        }
    }

    /// A group has several lanes, each with a core of its own on each rank, or not.
    pub(crate) fn set_lanes_have_own_cores(&self, is_so: bool) {
        self.lanes_have_own_cores.fetch_and(is_so, Ordering::Relaxed);
    }

    /// As if each lane had a core of its own.
    #[cfg(all(test, not(accl_loom)))]
    pub(crate) fn pretend_own_cores(&self) {
        self.lanes_have_own_cores.store(true, Ordering::Relaxed);
    }

    /// As a waiter that the thread of a lane is too slow for.
    #[cfg(all(test, not(accl_loom)))]
    pub(crate) fn do_jobs_for_another(&self) -> usize {
        self.jobs.run_for_another()
    }

    /// A call of several parts is no longer waited for.
    pub(crate) fn note_cut_ended(&self, now: Moment) {
        self.cut_ended.store(now.nanos(), Ordering::Relaxed);
    }

    /// For what must not keep it alive.
    pub(crate) fn weak(&self) -> Weak<Driver> {
        self.me.clone()
    }

    /// Whether a call's parts on other lanes are left to its caller, who waits for it: threads that sleep are not worth waking for it, unless calls come one
    /// after the other. Those that are awake do them all the same.
    pub(crate) fn leaves_parts_to_waiter(&self, cut: &Cut, now: Moment) -> bool {
        // What encoding takes is not predicted, and who does not spin does no parts.
        let is_small = cut.predicted_ps < LEAST_WAKE_PS && !matches!(cut.first.encoding, Encoded::As(_));
        let is_waited_for = cut.first.mode == Mode::Blocking && self.spin.is_none_or(|spin| !spin.is_zero());
        let ended = Moment::from_nanos(self.cut_ended.load(Ordering::Relaxed));
        is_small && is_waited_for && now.since(ended) >= LINGER
    }

    /// Leaves the thread of a lane something to do, for which [`Driver::wake_for_jobs`] wakes it. If it ends before, that is dropped.
    pub(crate) fn leave_job(&self, job: Job, errand: Option<Errand>) {
        self.jobs.add(job, errand);
    }

    /// Wakes the thread of a lane, unless it looks for jobs by itself, which it does once more when it has stopped. Where somebody else has done its jobs only
    /// the errands are left, and they are done here.
    pub(crate) fn wake_for_jobs(&self) {
        if self.is_spinning.load(Ordering::SeqCst) {
            return;
        }
        if self.jobs.are_there() {
            self.ensure_driver();
            self.wake_driver_if(true);
        } else {
            self.jobs.run_errands();
        }
    }

    /// On the thread of a lane: looks again and again, until nothing has come for a while or nothing is left to do and no part follows. It gives its core away
    /// between looks where others have it, too, and while it has nothing to do.
    pub(super) fn spin_on_lane(&self) {
        let has_own_core = self.lanes_have_own_cores.load(Ordering::Relaxed) && !self.shares_cores();
        let budget = self.spin.unwrap_or(if has_own_core { SPIN_OWN_CORE } else { SPIN_SHARED_CORE });
        let linger = if has_own_core { LINGER.min(budget) } else { Duration::ZERO };
        let (mut idle, mut is_news, mut is_lingering) = (0, false, false);
        self.is_spinning.store(true, Ordering::SeqCst);
        let mut news = time::now();
        for round in 1_u32.. {
            let now = time::now();
            idle += 1;
            if self.jobs.run() {
                (news, idle, is_news) = (time::now(), 0, true);
            }
            if let Some(mut core) = self.try_lock() {
                // Who gives the core away is away for long, and asks each time.
                if !has_own_core || round.is_multiple_of(ROUNDS_BEFORE_LOOK) {
                    self.ask(&core);
                }
                if core.pass(now) {
                    (news, idle, is_news) = (time::now(), 0, true);
                }
                is_lingering = !core.has_work() && !self.jobs.want_thread();
                if is_lingering && (!is_news || now.since(news) >= linger) {
                    break;
                }
            }
            if now.since(news) >= budget {
                break;
            }
            if is_lingering || !has_own_core && idle > PASSES_BEFORE_YIELD {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
        self.is_spinning.store(false, Ordering::SeqCst);
        self.has_spun_in_vain.store(!is_news, Ordering::Relaxed);
    }

    /// One pass for whatever has come.
    pub(super) fn looks_and_moves(&self) -> bool {
        let mut core = self.lock();
        self.ask(&core);
        core.pass(time::now())
    }

    /// Whether it is of a lane beside the first, for whose calls nobody waits.
    pub(super) fn is_beside(&self) -> bool {
        let first = self.lanes.get().and_then(|lanes| lanes.first());
        first.is_some_and(|first| !std::ptr::eq(first.as_ptr(), self))
    }

    /// The drivers of all lanes of the process.
    pub(crate) fn set_lanes(&self, lanes: Vec<Weak<Driver>>) {
        let _ = self.lanes.set(lanes);
    }

    /// The drivers of the other lanes, with their numbers.
    fn others(&self) -> impl Iterator<Item = (usize, Arc<Driver>)> {
        let lanes = self.lanes.get().into_iter().flatten().enumerate();
        let there = lanes.filter_map(|(number, lane)| Some((number, lane.upgrade()?)));
        there.filter(|(_, lane)| !std::ptr::eq(&**lane, self))
    }

    /// A group that has failed on one lane fails on all, once each has what had come for it before. The first lane tells the peers, whatever the one has
    /// told that failed first. No lock is held.
    pub(crate) fn fail_elsewhere(&self, failed: &FailedGroup) {
        for (number, lane) in self.others() {
            let is_there = lane.with_core(|core| {
                lane.look(core);
                core.fail_with_lane(failed, number == 0, time::now())
            });
            if is_there {
                lane.flush();
                lane.kick();
            }
        }
    }

    /// What a thread that waits for a call does on the other lanes: nothing yet.
    pub(super) fn beside(&self) -> Beside {
        let helped = |(_, lane)| Helped { lane, is_watched: false, has_begun: false };
        Beside { lanes: self.others().map(helped).collect(), watches: false }
    }

    /// Whatever was begun here goes on by itself: the thread may have found nothing to do, and sleep, or sleep beyond a deadline that it has not been told of.
    fn hand_over(&self, is_watched: bool) {
        let (relief, must_wake, has_work) = self.with_core(|core| {
            let relief = is_watched.then(|| core.unwatch(time::now()));
            (relief, core.must_wake_driver(core.next_deadline()), core.has_work())
        });
        if let Some(relief) = relief {
            self.relieve(relief);
        }
        if must_wake {
            self.wake_driver_if(true);
        }
        if has_work {
            self.ensure_driver();
        }
    }
}

/// What a thread that waits for a call does on the lanes beside its own.
pub(super) struct Beside {
    lanes: Vec<Helped>,
    /// It looks at the links of some lane in place of a driver that sleeps, and must go on to.
    pub(super) watches: bool,
}

/// A lane that a waiter looks after.
struct Helped {
    lane: Arc<Driver>,
    /// Its driver sleeps, and is not woken by what comes.
    is_watched: bool,
    /// A part was begun on it.
    has_begun: bool,
}

impl Beside {
    /// Makes a pass for each part of the call that nobody is at, and if nothing has moved, or one is overdue, begins one whose thread has not come yet: the
    /// more parts one thread has begun, the less of their links stays in its core's cache. Returns whether anything moved.
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
    /// Begins what its thread was given, unless that is at work there. Returns whether there was anything.
    fn begin(&mut self, call: &CallState, now: Moment) -> bool {
        if !self.lane.jobs.are_there() || self.lane.try_lock().is_none() {
            return false;
        }
        self.has_begun = true;
        let begun = self.lane.jobs.run_for_another();
        let looked_after = usize::from(self.pass(call, now).is_some());
        // Of another call, which nobody here waits for, or somebody else has the lane now.
        if begun > looked_after {
            self.lane.hand_over(false);
        }
        begun > 0
    }

    /// A pass, if the call has a part here and nobody is at it: whether anything moved.
    fn pass(&mut self, call: &CallState, now: Moment) -> Option<bool> {
        let mut core = self.lane.try_lock()?;
        let peers = core.peers_of(call);
        // What others have on a lane that is watched is looked after here, too.
        if peers.is_empty() && !self.is_watched {
            return None;
        }
        self.is_watched = self.is_watched || core.watch();
        peers.iter().for_each(|&peer| core.net.poll_link(peer));
        core.streams_among(&peers).into_iter().for_each(|peer| core.net.look_again(peer));
        Some(self.lane.pass_and_tell(core, self.is_watched, now))
    }
}

impl Drop for Helped {
    fn drop(&mut self) {
        if self.is_watched || self.has_begun {
            self.lane.hand_over(self.is_watched);
        }
        // What was left to who waits, and who sleeps now or goes away.
        if self.lane.jobs.are_there() {
            self.lane.wake_for_jobs();
        }
    }
}
