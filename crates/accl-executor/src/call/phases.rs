//! Where the time of a call went on this rank: before it began, waiting for peers, moving bytes, arithmetic.
//!
//! Owns these figures and the watch that takes them, which asks a clock that is handed in. A call has them only if its description asks for
//! it: then every piece of arithmetic asks the clock twice. Read [`Phases`] first.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use accl_types::Moment;

/// The times of one call. All of its parts, which different lanes do, enter theirs here.
#[derive(Debug)]
pub struct Phases {
    /// Nanoseconds from the call's making to the beginning of the first part that began.
    queue: AtomicU64,
    /// From then, without arithmetic, to the first message of a peer.
    peers: AtomicU64,
    /// Arithmetic of the part that had most.
    reduce: AtomicU64,
    /// From the call's making to its end.
    total: AtomicU64,
}

/// What has not happened yet.
const NEVER: u64 = u64::MAX;

/// Where the time of a call went. Together they are the time from its making to its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PhaseTimes {
    /// Until this rank began with it.
    pub queue: Duration,
    /// From then until the first message of a peer came, but for arithmetic; zero where none came.
    pub peers: Duration,
    /// Moving bytes, and waiting for more of them.
    pub transfer: Duration,
    /// Reducing, encoding, decoding and copying from tensor to tensor; of the lane that took longest for it.
    pub reduce: Duration,
}

impl Phases {
    /// Of a call that is to be made.
    pub fn new() -> Arc<Self> {
        let never = || AtomicU64::new(NEVER);
        Arc::new(Self { queue: never(), peers: never(), reduce: AtomicU64::new(0), total: AtomicU64::new(0) })
    }

    /// Of a call that has ended.
    pub fn times(&self) -> PhaseTimes {
        let of = |nanos: &AtomicU64| nanos.load(Ordering::Relaxed);
        let total = of(&self.total);
        let queue = of(&self.queue).min(total);
        let reduce = of(&self.reduce).min(total - queue);
        let peers = Some(of(&self.peers)).filter(|&nanos| nanos != NEVER).unwrap_or(0).min(total - queue - reduce);
        let [queue, peers, transfer, reduce] =
            [queue, peers, total - queue - peers - reduce, reduce].map(Duration::from_nanos);
        PhaseTimes { queue, peers, transfer, reduce }
    }

    /// A part of the call has ended, so long after the call was made.
    pub(super) fn ended(&self, after: Duration) {
        self.total.fetch_max(nanos(after), Ordering::Relaxed);
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(NEVER - 1)
}

/// Takes the times of one part of a call.
pub(crate) struct Stopwatch {
    clock: fn() -> Moment,
    made: Moment,
    phases: Arc<Phases>,
    /// When this part began.
    begun: Cell<Option<Moment>>,
    has_met: Cell<bool>,
    /// Arithmetic until now.
    worked: Cell<Duration>,
}

impl Stopwatch {
    /// Of a call that was made then.
    pub(crate) fn new(phases: Arc<Phases>, made: Moment, clock: fn() -> Moment) -> Self {
        Self { clock, made, phases, begun: Cell::default(), has_met: Cell::default(), worked: Cell::default() }
    }

    /// This part begins, unless it has begun before.
    pub(crate) fn begin(&self) -> Moment {
        self.begun.get().unwrap_or_else(|| {
            let now = (self.clock)();
            self.begun.set(Some(now));
            self.phases.queue.fetch_min(nanos(now.since(self.made)), Ordering::Relaxed);
            now
        })
    }

    /// A message of a peer has come.
    pub(crate) fn meet(&self) {
        if !self.has_met.replace(true) {
            let waited = (self.clock)().since(self.begin()).saturating_sub(self.worked.get());
            self.phases.peers.fetch_min(nanos(waited), Ordering::Relaxed);
        }
    }

    /// This part is done. A call that is told so later may be told by a moment that was taken before.
    pub(crate) fn end(&self) {
        self.phases.ended((self.clock)().since(self.made));
    }

    /// Does a piece of arithmetic.
    pub(crate) fn time<T>(&self, work: impl FnOnce() -> T) -> T {
        let from = (self.clock)();
        let done = work();
        let worked = self.worked.get() + (self.clock)().since(from);
        self.worked.set(worked);
        self.phases.reduce.fetch_max(nanos(worked), Ordering::Relaxed);
        done
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

    fn times_in_ms(phases: &Phases) -> [u128; 4] {
        let PhaseTimes { queue, peers, transfer, reduce } = phases.times();
        [queue, peers, transfer, reduce].map(|time| time.as_millis())
    }

    #[test]
    fn every_millisecond_of_a_call_is_in_one_of_its_phases() {
        let phases = Phases::new();
        let watch = Stopwatch::new(phases.clone(), clock(), clock);
        pass(1);
        watch.begin();
        watch.time(|| pass(2));
        pass(4);
        watch.meet();
        pass(8);
        watch.meet();
        watch.time(|| pass(16));
        phases.ended(Duration::from_millis(31));
        assert_eq!(times_in_ms(&phases), [1, 4, 8, 18]);
    }

    #[test]
    fn a_call_that_hears_of_nobody_waits_for_nobody() {
        let phases = Phases::new();
        let watch = Stopwatch::new(phases.clone(), clock(), clock);
        watch.begin();
        watch.time(|| pass(2));
        phases.ended(Duration::from_millis(5));
        assert_eq!(times_in_ms(&phases), [0, 0, 3, 2]);
    }

    #[test]
    fn a_call_that_never_began_was_in_the_queue_all_the_time() {
        let phases = Phases::new();
        phases.ended(Duration::from_millis(5));
        assert_eq!(times_in_ms(&phases), [5, 0, 0, 0]);
    }

    #[test]
    fn of_parts_that_go_on_at_once_the_one_with_most_arithmetic_counts() {
        let phases = Phases::new();
        let [first, second] = [(); 2].map(|()| Stopwatch::new(phases.clone(), clock(), clock));
        first.begin();
        first.time(|| pass(2));
        second.begin();
        second.time(|| pass(3));
        phases.ended(Duration::from_millis(5));
        assert_eq!(times_in_ms(&phases), [0, 0, 2, 3]);
    }
}
