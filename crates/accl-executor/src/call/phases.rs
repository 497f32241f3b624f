//! Phase timing of a call on this rank: before it began, waiting for peers, moving bytes, arithmetic, copies of staged
//! tensors.
//!
//! This module owns the times and the stopwatch, which reads a clock that is passed in. Only a call whose description
//! requests it is timed, because each piece of arithmetic then reads the clock twice. Read [`Phases`] first.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use accl_types::Moment;

/// The times of one call, in nanoseconds. All its parts, which different lanes do, record their times here.
#[derive(Debug)]
pub struct Phases {
    /// Time at which the caller submitted the call, on the clock of all other times.
    made: AtomicU64,
    /// Time since `made` until the call's memory was ready.
    prepared: AtomicU64,
    /// Time since `made` until the first part began.
    begun: AtomicU64,
    /// Time since `made` until the first bytes of a staged tensor arrived in host memory.
    arrived: AtomicU64,
    /// Time since `made` until the first message from a peer arrived.
    met: AtomicU64,
    /// Time since `made` until only copies out of host memory were left; 0 if no tensor is copied out.
    handed_over: AtomicU64,
    /// Time since `made` until the call completed.
    total: AtomicU64,
    /// Arithmetic before `met`, of the part that received the first message.
    worked_alone: AtomicU64,
    /// Arithmetic of the part that had the most.
    worked: AtomicU64,
    has_failed: AtomicBool,
}

/// Value for an event that has not happened.
const NEVER: u64 = u64::MAX;

/// Time of a call by phase. The sum of the phases is the time from submission to completion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PhaseTimes {
    /// Time until this rank began the call, without the preparation of its memory.
    pub queue: Duration,
    /// Time that the call spent on copies between host memory and an accelerator alone: from its beginning until the first
    /// bytes of a tensor arrived, and from its last operation until all results were copied. Copies that other phases hide
    /// do not count. Work of the accelerator that precedes the call counts. Zero if no tensor is staged.
    pub bus: Duration,
    /// Time from then until the first message from a peer arrived, without arithmetic. Zero if the call completed
    /// without a message.
    pub peers: Duration,
    /// Time to move bytes, and to wait for more of them.
    pub transfer: Duration,
    /// Time to prepare memory, reduce, encode, decode, and copy between tensors, on the lane that spent most on it.
    pub reduce: Duration,
}

impl Phases {
    /// Creates the times of a call that is about to be submitted.
    pub fn new() -> Arc<Self> {
        let [zero, never] = [|| AtomicU64::new(0), || AtomicU64::new(NEVER)];
        Arc::new(Self {
            made: zero(),
            prepared: zero(),
            begun: never(),
            arrived: never(),
            met: never(),
            handed_over: zero(),
            total: zero(),
            worked_alone: zero(),
            worked: zero(),
            has_failed: AtomicBool::new(false),
        })
    }

    /// Records that the caller submits the call now.
    pub fn make(&self, now: Moment) {
        self.made.store(nanos(now.since(Moment::default())), Ordering::Relaxed);
    }

    /// Records that the call's memory is ready now.
    pub fn prepare(&self, now: Moment) {
        self.prepared.store(self.since_made(now), Ordering::Relaxed);
    }

    /// Returns the times of a completed call; `None` if the call was refused and never ran.
    pub fn times(&self) -> Option<PhaseTimes> {
        let of = |nanos: &AtomicU64| nanos.load(Ordering::Relaxed);
        let total = Some(of(&self.total)).filter(|&total| total > 0)?;
        let prepared = of(&self.prepared).min(total);
        let begun = of(&self.begun).clamp(prepared, total);
        let queue = begun - prepared;
        let reduce = (prepared + of(&self.worked)).min(total - queue);
        let copied_in = match of(&self.arrived) {
            NEVER => 0,
            arrived => arrived.saturating_sub(begun),
        };
        let copied_out = match of(&self.handed_over) {
            0 => 0,
            // Another part may have waited for a peer.
            _ if self.has_failed.load(Ordering::Relaxed) => 0,
            handed_over => total.saturating_sub(handed_over),
        };
        let bus = (copied_in + copied_out).min(total - queue - reduce);
        let left = total - queue - reduce - bus;
        let peers = match of(&self.met) {
            // No message arrived, and the call failed: all remaining time was spent waiting for peers.
            NEVER if self.has_failed.load(Ordering::Relaxed) => left,
            NEVER => 0,
            met => met.saturating_sub(begun + copied_in + of(&self.worked_alone)).min(left),
        };
        let [queue, bus, peers, transfer, reduce] = [queue, bus, peers, left - peers, reduce].map(Duration::from_nanos);
        Some(PhaseTimes { queue, bus, peers, transfer, reduce })
    }

    /// Records that a part of the call has completed.
    pub(super) fn end(&self, now: Moment, has_failed: bool) {
        self.total.fetch_max(self.since_made(now).max(1), Ordering::Relaxed);
        self.has_failed.fetch_or(has_failed, Ordering::Relaxed);
    }

    fn since_made(&self, now: Moment) -> u64 {
        nanos(now.since(Moment::default())).saturating_sub(self.made.load(Ordering::Relaxed))
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(NEVER - 1)
}

/// Stopwatch for one part of a call.
pub(crate) struct Stopwatch {
    clock: fn() -> Moment,
    phases: Arc<Phases>,
    has_begun: Cell<bool>,
    has_met: Cell<bool>,
    has_handed_over: Cell<bool>,
    /// Nanoseconds of arithmetic so far.
    worked: Cell<u64>,
}

impl Stopwatch {
    /// Creates a stopwatch for a call that is timed.
    pub(crate) fn new(phases: Arc<Phases>, clock: fn() -> Moment) -> Self {
        let (has_begun, has_met, has_handed_over, worked) = Default::default();
        Self { clock, phases, has_begun, has_met, has_handed_over, worked }
    }

    /// Records that this part begins, unless it has begun before.
    pub(crate) fn begin(&self) {
        if !self.has_begun.replace(true) {
            self.phases.begun.fetch_min(self.now(), Ordering::Relaxed);
        }
    }

    /// Records that bytes of a staged tensor have arrived in host memory, or that a worker has made tiles. The first time counts.
    pub(crate) fn arrive(&self) {
        self.phases.arrived.fetch_min(self.now(), Ordering::Relaxed);
    }

    /// Records that this part has nothing left to do but to copy results out of host memory. The first time counts.
    pub(crate) fn hand_over(&self) {
        if !self.has_handed_over.replace(true) {
            self.phases.handed_over.fetch_max(self.now(), Ordering::Relaxed);
        }
    }

    /// Records that a message from a peer has arrived.
    pub(crate) fn meet(&self) {
        if !self.has_met.replace(true) {
            self.begin();
            let now = self.now();
            if self.phases.met.fetch_min(now, Ordering::Relaxed) > now {
                self.phases.worked_alone.store(self.worked.get(), Ordering::Relaxed);
            }
        }
    }

    /// Records that this part is done. [`Phases::end`] may follow later with a moment that was read earlier; the
    /// maximum counts.
    pub(crate) fn end(&self) {
        self.phases.end((self.clock)(), false);
    }

    /// Runs a piece of arithmetic and adds its time.
    pub(crate) fn time<T>(&self, work: impl FnOnce() -> T) -> T {
        let from = self.now();
        let done = work();
        self.worked.set(self.worked.get() + (self.now() - from));
        self.phases.worked.fetch_max(self.worked.get(), Ordering::Relaxed);
        done
    }

    /// Returns the nanoseconds since the call was submitted.
    fn now(&self) -> u64 {
        self.phases.since_made((self.clock)())
    }
}

impl fmt::Debug for Stopwatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stopwatch").field("phases", &self.phases).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        static NOW: Cell<u64> = const { Cell::new(0) };
    }

    fn pass(ms: u64) {
        NOW.set(NOW.get() + ms);
    }

    fn clock() -> Moment {
        Moment::default() + Duration::from_millis(NOW.get())
    }

    /// Returns the phases, in milliseconds, of a call that is submitted now and then runs `go`: queue, peers, transfer,
    /// reduce. No tensor is staged.
    fn times(has_failed: bool, go: impl FnOnce(&Phases, &dyn Fn() -> Stopwatch)) -> [u128; 4] {
        let [queue, bus, others @ ..] = staged_times(has_failed, go);
        assert_eq!(bus, 0);
        let [peers, transfer, reduce] = others;
        [queue, peers, transfer, reduce]
    }

    /// Returns the phases, in milliseconds, of a call that is submitted now and then runs `go`: queue, bus, peers, transfer,
    /// reduce.
    fn staged_times(has_failed: bool, go: impl FnOnce(&Phases, &dyn Fn() -> Stopwatch)) -> [u128; 5] {
        let phases = Phases::new();
        pass(7);
        phases.make(clock());
        go(&phases, &|| Stopwatch::new(phases.clone(), clock));
        phases.end(clock(), has_failed);
        let PhaseTimes { queue, bus, peers, transfer, reduce } = phases.times().unwrap();
        [queue, bus, peers, transfer, reduce].map(|time| time.as_millis())
    }

    #[test]
    fn every_millisecond_of_a_call_is_in_one_of_its_phases() {
        let found = times(false, |phases, watch| {
            pass(32);
            phases.prepare(clock());
            pass(1);
            let watch = watch();
            watch.begin();
            watch.time(|| pass(2));
            pass(4);
            watch.meet();
            pass(8);
            watch.meet();
            watch.time(|| pass(16));
        });
        assert_eq!(found, [1, 4, 8, 32 + 18]);
    }

    #[test]
    fn time_on_the_bus_is_the_time_before_the_first_byte_arrives_and_after_the_last_operation() {
        let found = staged_times(false, |_, watch| {
            let watch = watch();
            pass(1);
            watch.begin();
            pass(2);
            watch.arrive();
            watch.time(|| pass(4));
            // More bytes arrive while the call waits for a peer.
            pass(8);
            watch.arrive();
            watch.meet();
            pass(16);
            watch.hand_over();
            pass(32);
            watch.hand_over();
        });
        assert_eq!(found, [1, 2 + 32, 8, 16, 4]);
    }

    #[test]
    fn a_part_that_waits_for_a_lost_peer_is_not_on_the_bus() {
        let found = staged_times(true, |_, watch| {
            let [first, second] = [watch(), watch()];
            first.begin();
            second.begin();
            first.arrive();
            first.meet();
            pass(1);
            first.hand_over();
            pass(30);
        });
        assert_eq!(found, [0, 0, 0, 31, 0]);
    }

    #[test]
    fn a_peer_that_comes_before_the_first_byte_is_not_awaited() {
        let found = staged_times(false, |_, watch| {
            let watch = watch();
            watch.begin();
            pass(2);
            watch.meet();
            pass(4);
            watch.arrive();
            pass(8);
        });
        assert_eq!(found, [0, 6, 0, 8, 0]);
    }

    #[test]
    fn a_call_that_awaits_no_rank_reports_no_wait_unless_it_fails() {
        let go = |_: &Phases, watch: &dyn Fn() -> Stopwatch| {
            let watch = watch();
            watch.begin();
            watch.time(|| pass(2));
            pass(3);
        };
        assert_eq!(times(false, go), [0, 0, 3, 2]);
        assert_eq!(times(true, go), [0, 3, 0, 2]);
    }

    #[test]
    fn a_call_that_never_began_was_in_the_queue_all_the_time() {
        assert_eq!(times(true, |_, _| pass(5)), [5, 0, 0, 0]);
        assert_eq!(Phases::new().times(), None, "and one that was refused has none");
    }

    #[test]
    fn of_parts_that_go_on_at_once_the_one_with_most_arithmetic_counts() {
        let found = times(false, |_, watch| {
            let [first, second] = [watch(), watch()];
            first.begin();
            first.time(|| pass(2));
            second.begin();
            second.time(|| pass(3));
        });
        assert_eq!(found, [0, 0, 2, 3]);
    }

    #[test]
    fn a_part_that_begins_when_the_peers_are_there_does_not_hide_that_another_has_waited() {
        let found = times(false, |_, watch| {
            let [first, second] = [watch(), watch()];
            first.begin();
            pass(10);
            second.begin();
            second.meet();
            pass(1);
            first.meet();
        });
        assert_eq!(found, [0, 10, 1, 0]);
    }
}
