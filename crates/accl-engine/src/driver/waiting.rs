//! Waiting: for a call, for calls of groups, for the delivery of what was sent.
//!
//! Owns how long a waiter polls by itself before it sleeps. `election` decides which thread drives while all others
//! sleep; `lanes` has what a waiter does on other lanes. Read [`Driver::wait`] first.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use accl_executor::call::{CallState, Waited};
use accl_executor::group::Core;
use accl_executor::peers::{Mark, PeerId};
use accl_types::{Error, Moment};
use smallvec::SmallVec;

use super::{Driver, ROUNDS_BEFORE_POLL, handle_arrived};
use crate::election::Waiter;
use crate::in_flight::InFlight;
use crate::offload::{Helping, Progress};
use crate::time;

/// Interval at which a waiter checks for signals, in milliseconds.
const TICK_MS: u64 = 50;
/// Spin time when every rank of the host has a core of its own.
pub(super) const SPIN_OWN_CORE: Duration = Duration::from_micros(200);
/// Spin time when ranks share cores. Each poll then yields the core, so more polls cost the other ranks nothing.
pub(super) const SPIN_SHARED_CORE: Duration = Duration::from_micros(100);
/// Number of passes without events before a yield when ranks share cores: a spinning waiter keeps another rank from
/// sending.
pub(super) const PASSES_BEFORE_YIELD: u32 = 2;

/// Number of passes without events before a waiter helps with the parts on other lanes (a few microseconds), and
/// between later attempts.
const PASSES_BEFORE_HELP: u32 = 64;
const PASSES_BETWEEN_HELP: u32 = 8;
/// Like `PASSES_BEFORE_HELP`, for a call whose parts were left to the waiter, so that no thread was woken for them.
const PASSES_BEFORE_NEXT: u32 = 2;

/// Pauses between two checks whether the peers have received what was sent: the first one, and the longest.
const FIRST_PAUSE: Duration = Duration::from_micros(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(5);

/// Returns an interrupt that stays set: once `interrupt` has returned true, later waits end at once.
pub(crate) fn lasting(interrupt: &mut dyn FnMut() -> bool) -> impl FnMut() -> bool {
    let mut is_interrupted = false;
    move || {
        is_interrupted = is_interrupted || interrupt();
        is_interrupted
    }
}

/// How a wait for the delivery of what was sent ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    Complete,
    /// The deadline passed.
    Late,
    /// The interrupt hook returned true.
    Interrupted,
}

impl Driver {
    /// Waits, at most until `until`, until the peers' hosts have received what was sent to them. An acknowledgement
    /// raises no event, so this function polls. Usually there is nothing to wait for.
    pub(crate) fn await_delivery(
        &self,
        mut marks: Vec<Mark>,
        until: Moment,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Delivery {
        // External operations may still use memory of failed calls; if an operation never stops, the call itself
        // reports it.
        let _ = self.await_all(until, interrupt, |core| !core.has_stopping());
        self.await_all(until, interrupt, |core| {
            marks.retain_mut(|mark| !core.net.is_delivered(mark));
            marks.is_empty()
        })
    }

    /// Waits, at most until `until`, until the asynchronous collectives of these groups have completed.
    pub(crate) fn await_calls(&self, groups: &[u64], until: Moment, interrupt: &mut dyn FnMut() -> bool) {
        let is_over = |core: &mut Core| {
            let mut groups = groups.iter().filter_map(|id| core.group(*id));
            !groups.any(|group| group.has_async_calls(&core.net))
        };
        self.await_all(until, interrupt, is_over);
    }

    /// Makes progress until `is_over` returns true, the deadline passes, or `interrupt` returns true.
    fn await_all(
        &self,
        until: Moment,
        interrupt: &mut dyn FnMut() -> bool,
        mut is_over: impl FnMut(&mut Core) -> bool,
    ) -> Delivery {
        let mut pause = FIRST_PAUSE;
        let mut asked = time::now();
        loop {
            let now = time::now();
            // Takes data that peers send meanwhile off the links: unread data would reset them when this process ends.
            let Some(mut core) = self.try_lock_until(until) else { return Delivery::Late };
            // Polls for disconnects on links of every kind.
            self.ask(&core);
            let handled = core.guarded(|core| {
                let has_events = handle_arrived(core) | core.take_driver_unnotified();
                (is_over(core), has_events)
            });
            drop(core);
            if matches!(handled, Ok((_, true))) {
                self.wake_driver_if(true);
            }
            if !matches!(handled, Ok((false, _))) {
                return Delivery::Complete;
            }
            if now >= until {
                return Delivery::Late;
            }
            if now.since(asked) >= Duration::from_millis(TICK_MS) {
                asked = now;
                if interrupt() {
                    return Delivery::Interrupted;
                }
            }
            std::thread::sleep(pause.min(until - now));
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    pub(crate) fn wait(
        self: &Arc<Self>,
        call: &InFlight,
        timeout: Option<Duration>,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Waited {
        if let Some(outcome) = call.released() {
            if !call.is_done() && !self.is_forked() {
                self.ensure_driver();
            }
            return outcome;
        }
        if let Err(forked) = self.refuse_if_forked() {
            return Waited::Failed(call.in_context(forked));
        }
        let begin = time::now();
        let until = timeout.map(|timeout| begin + timeout);
        let waited = self.spin(call, until).unwrap_or_else(|| {
            let stay = WaiterGuard { driver: self, me: Waiter(self.waits.fetch_add(1, Ordering::Relaxed)) };
            self.wait_slowly(stay.me, call, timeout, until, interrupt)
        });
        let now = time::now();
        if call.is_cut {
            self.note_cut_ended(now);
        }
        call.waits.add(now.since(begin));
        waited
    }

    /// Returns whether ranks of this host must share cores.
    pub(super) fn shares_cores(&self) -> bool {
        self.shares_cores.load(Ordering::Relaxed)
    }

    /// Polls in a loop for a short while.
    fn spin(&self, call: &InFlight, until: Option<Moment>) -> Option<Waited> {
        let shared = self.shares_cores() || call.is_cut && !self.lanes_have_own_cores.load(Ordering::Relaxed);
        let budget = match self.spin {
            Some(spin) => spin,
            None if shared => SPIN_SHARED_CORE,
            None => SPIN_OWN_CORE,
        };
        let start = time::now();
        let (mut last_event, mut idle_polls) = (start, 0_u32);
        // Gives threads that were woken a moment to start.
        let patience = if call.is_left_to_waiter { PASSES_BEFORE_NEXT } else { PASSES_BEFORE_HELP };
        let mut wants_driver = false;
        let mut lane_help = call.is_cut.then(|| self.lane_help());
        let mut is_helping = false;
        // While this thread polls, peers need not wake a sleeping driver thread.
        let mut poll_guard = PollGuard { driver: self, is_on: false };
        let mut needed: Option<SmallVec<[PeerId; 4]>> = None;
        let mut must_poll = false;
        let helping = call.helped.as_deref().map(Helping::begin);
        for round in 0_u32.. {
            let now = time::now();
            if let Some(mut core) = self.try_lock() {
                poll_guard.is_on = poll_guard.is_on || core.watch();
                let streams = needed.get_or_insert_with(|| {
                    let peers = core.peers_of(call);
                    // These peers need not signal that they have sent something: this thread polls their links.
                    peers.iter().for_each(|&peer| core.net.poll_link(peer));
                    must_poll = core.polls_among(&peers);
                    core.streams_among(&peers)
                });
                streams.iter().for_each(|&peer| core.net.force_poll(peer));
                // Events of other links can wait a little.
                let is_others_turn = round % ROUNDS_BEFORE_POLL == ROUNDS_BEFORE_POLL - 1;
                if streams.is_empty() || is_others_turn {
                    self.poll(&core);
                }
                let moved = core.pass(now) | core.take_driver_unnotified();
                let wake = !poll_guard.is_on && core.must_wake_driver(None);
                wants_driver = core.net.wants_driver();
                drop(core);
                if moved {
                    (last_event, idle_polls) = (time::now(), 0);
                }
                if moved || wake {
                    self.wake_driver_if(wake);
                }
            }
            // Needed when other calls keep making progress, so that passes without events are rare.
            let is_overdue = call.is_left_to_waiter && now.since(start) >= SPIN_OWN_CORE;
            if let Some(lane_help) = &mut lane_help
                && (idle_polls >= patience || lane_help.watches || is_overdue)
                && (is_helping || call.is_left_to_waiter || round.is_multiple_of(PASSES_BETWEEN_HELP))
            {
                is_helping = lane_help.help(call, is_overdue, now);
                last_event = if is_helping { time::now() } else { last_event };
            }
            if let Some(outcome) = call.released() {
                // A call that only releases its waiters still needs progress.
                if wants_driver || !call.is_done() {
                    self.ensure_driver();
                }
                return Some(outcome);
            }
            // Some components make progress on a call only while they are polled.
            let progress = helping.as_ref().map_or(Progress::Idle, Helping::help);
            // For a cut call on cores of its own, the budget counts from the last event. The same holds if a link must
            // be polled, where no event would wake a sleeper. After one tick the waiter stops, to check for signals.
            let is_over = if progress != Progress::Idle && self.spin.is_none() {
                now.since(start) >= Duration::from_millis(TICK_MS)
            } else if !must_poll && (shared || !call.is_cut) || self.spin.is_some() {
                now.since(start) >= budget
            } else {
                now.since(last_event) >= budget || now.since(start) >= Duration::from_millis(TICK_MS)
            };
            if is_over || until.is_some_and(|until| now >= until) {
                drop((poll_guard, lane_help));
                // A sleeping driver thread does not know this call's deadline yet: until now this thread watched it.
                if self.with_core(|core| core.must_wake_driver(core.next_deadline())) {
                    self.wake_driver_if(true);
                }
                return None;
            }
            idle_polls += 1;
            if shared && idle_polls > PASSES_BEFORE_YIELD {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
        None
    }

    fn wait_slowly(
        &self,
        me: Waiter,
        call: &InFlight,
        timeout: Option<Duration>,
        until: Option<Moment>,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Waited {
        let mut asked: Option<Moment> = None;
        self.election.wait(me, call, self, || {
            let now = time::now();
            if until.is_some_and(|until| now >= until) {
                return Err(Waited::TimedOut(self.wait_timed_out(call, timeout.unwrap_or_default(), now)));
            }
            if asked.is_none_or(|asked| now.since(asked) >= Duration::from_millis(TICK_MS)) {
                asked = Some(now);
                // The hook may wait for the interpreter's lock, or issue calls and wait for them. Other threads drive
                // meanwhile, and this thread cannot be elected while it is busy.
                self.election.stand_aside(me, self);
                if interrupt() {
                    return Err(Waited::Interrupted);
                }
            }
            let tick = self.ticks().then(|| now + Duration::from_millis(TICK_MS));
            Ok([until, tick].into_iter().flatten().min())
        })
    }

    fn wait_timed_out(&self, call: &CallState, timeout: Duration, now: Moment) -> Error {
        let text = self.with_core(|core| {
            core.with_group(call.group_id, now, |group, context| {
                let awaited = group.awaited(call);
                group.timeout_text(call, &awaited, timeout, context.net)
            })
        });
        call.in_context(Error::timeout(text.unwrap_or_else(|| format!("Timed out waiting {}ms", timeout.as_millis()))))
    }
}

/// Marks that a thread polls the links in place of a sleeping driver thread.
struct PollGuard<'a> {
    driver: &'a Driver,
    is_on: bool,
}

impl Drop for PollGuard<'_> {
    fn drop(&mut self) {
        if self.is_on {
            let decision = self.driver.with_core(|core| core.unwatch(time::now()));
            self.driver.apply_wake(decision);
        }
    }
}

/// A waiter's part in the election. It ends with the wait, also if an interrupt hook panics.
struct WaiterGuard<'a> {
    driver: &'a Driver,
    me: Waiter,
}

impl Drop for WaiterGuard<'_> {
    fn drop(&mut self) {
        self.driver.election.leave(self.me, self.driver);
    }
}
