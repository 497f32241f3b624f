//! Completion of a call whose parts are done by several lanes.
//!
//! The caller has the first part. It completes when the [`Join`] does, which is an external operation of its plan. The
//! other parts begin with the call. Owns the start of the other parts, the number of those still running, and the first
//! of their errors. A group that fails on one lane fails on all lanes; the drivers do that. So no part continues for
//! long after another part has failed. Read [`Join`] first.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use accl_types::{Error, Moment};

use accl_executor::call::{CallDesc, CallObserver, Callbacks, External, ExternalTask};
use accl_executor::group::{Caller, Core, Prepared};

use crate::sync::Mutex;

/// Joins the parts of a call: the first part waits for it.
pub struct Join {
    state: Mutex<JoinState>,
}

struct JoinState {
    /// Number of other parts that have not ended.
    left: u32,
    /// The error of the first part that failed.
    error: Option<Error>,
    /// Whether a part failed without its group failing. Then nothing else notifies the first lane.
    has_failed_alone: bool,
    /// Whether the first lane knows that the call has failed.
    is_cancelled: bool,
    /// Set from the time at which the first part reaches the join until all other parts have ended.
    task: Option<ExternalTask>,
}

/// Work that a lane does with its core.
pub type CoreJob = Box<dyn FnOnce(&mut Core) + Send>;

/// Gives each lane a job, and wakes the first lane unless `wakes` is false.
fn hand_out(lanes: &Arc<[Arc<dyn Lane>]>, jobs: Vec<CoreJob>, wakes: bool) {
    let of = jobs.len().min(lanes.len());
    let given: Vec<_> = lanes.iter().zip(jobs).enumerate().collect();
    // The last lane first: a thread that is awake begins at once, and the threads that it wakes must find a job.
    for (after, (lane, job)) in given.into_iter().rev() {
        lane.give(wakes.then(|| Next { lanes: lanes.clone(), after, of }), job);
    }
    if wakes {
        lanes.iter().take(1).for_each(|lane| lane.wake());
    }
}

/// A lane, as the receiver of parts.
pub trait Lane: Send + Sync {
    /// Queues `job` for the lane's thread, which drops `next` before it runs the job. If the thread has ended, both are
    /// dropped.
    fn give(&self, next: Option<Next>, job: CoreJob);

    /// Wakes the lane's thread for its job. If another thread has run the job meanwhile, wakes the lanes after it
    /// instead.
    fn wake(&self);
}

/// Wakes the next lanes when it is dropped. Threads are woken in a tree, because each wake-up takes as long as copying
/// 100 KiB. The caller has a part of its own to do.
pub struct Next {
    lanes: Arc<[Arc<dyn Lane>]>,
    after: usize,
    of: usize,
}

impl Drop for Next {
    fn drop(&mut self) {
        let first = 2 * self.after + 1;
        self.lanes[..self.of].iter().skip(first).take(2).for_each(|lane| lane.wake());
    }
}

/// The parts of a call except the first, ready to begin.
pub struct Parts {
    /// The rank that issues the call.
    pub caller: Arc<Caller>,
    /// At least one lane for each part.
    pub lanes: Arc<[Arc<dyn Lane>]>,
    /// Descriptions and memory of the parts after the first.
    pub parts: Vec<(CallDesc, Prepared)>,
    /// Sequence number of the call.
    pub seq: u64,
    /// Time at which the first part started.
    pub now: Moment,
    /// Whether sleeping threads are woken for the parts. If not, the thread that waits for the call does them.
    pub wakes: bool,
}

/// Reports the end of one of the other parts to the [`Join`]. If it is dropped before that, the part has not begun and
/// will not begin.
struct OtherPart {
    join: Weak<Join>,
    has_ended: AtomicBool,
}

impl OtherPart {
    fn end(&self, error: Option<&Error>, is_alone: bool) {
        if !self.has_ended.swap(true, Ordering::Relaxed)
            && let Some(join) = self.join.upgrade()
        {
            join.end(error, is_alone);
        }
    }
}

impl Drop for OtherPart {
    fn drop(&mut self) {
        if !*self.has_ended.get_mut() {
            self.end(Some(&Error::aborted("the process exited before a part of the call was started")), true);
        }
    }
}

impl Join {
    /// Creates a join for `others` parts in addition to the first.
    pub fn new(others: u32) -> Arc<Self> {
        let state = JoinState { left: others, error: None, has_failed_alone: false, is_cancelled: false, task: None };
        Arc::new(Self { state: Mutex::new(state) })
    }

    /// Gives up after the call was not issued: no part will begin.
    pub fn give_up(&self) {
        let mut state = self.state.lock();
        state.left = 0;
        state.finish();
    }

    /// Gives the lanes their parts after the call was issued. The caller must hold no lock.
    pub fn begin_parts(self: &Arc<Self>, parts: Parts) {
        let Parts { caller, lanes, parts, seq, now, wakes } = parts;
        // Create all observers before the first part starts: if a later step panics, the drop of the others reports
        // their end.
        let part = || Arc::new(OtherPart { join: Arc::downgrade(self), has_ended: AtomicBool::new(false) });
        let observers: Vec<_> = parts.iter().map(|_| part()).collect();
        let job = |((desc, prepared), observer): ((CallDesc, Prepared), Arc<OtherPart>)| {
            let desc = CallDesc { seq: Some(seq), ..desc };
            let caller = caller.clone();
            // The lane's own thread starts its part: the first steps copy as much as there is room for.
            Box::new(move |core: &mut Core| {
                if let Err(refused) = caller.start(core, &desc, prepared, None, observer.clone(), now) {
                    // If the group has failed on this lane, the first lane learns of it separately, with the rank that
                    // caused it.
                    let cause = core.group(caller.group).and_then(|group| group.failure().cloned());
                    let is_alone = cause.is_none();
                    observer.end(Some(&cause.unwrap_or(refused)), is_alone);
                }
            }) as CoreJob
        };
        hand_out(&lanes, parts.into_iter().zip(observers).map(job).collect(), wakes);
    }

    /// Records that a part has ended, or will not begin. `is_alone` says that its group has not failed with it.
    fn end(&self, error: Option<&Error>, is_alone: bool) {
        let mut state = self.state.lock();
        state.left -= 1;
        if let Some(error) = error {
            state.error.get_or_insert_with(|| error.clone());
            state.has_failed_alone |= is_alone;
        }
        state.finish();
    }
}

impl JoinState {
    /// Ends the task once all parts have ended. If the group failed on another lane, the task stays until the first
    /// lane has received that failure with the rank that caused it.
    fn finish(&mut self) {
        let may_end = self.error.is_none() || self.has_failed_alone || self.is_cancelled;
        let Some(task) = self.task.take_if(|_| self.left == 0 && may_end) else { return };
        match self.error.take() {
            None => task.done(),
            Some(error) => task.fail_with(error),
        }
    }
}

impl External for Join {
    fn name(&self) -> &str {
        "lanes"
    }

    fn begin(&self, task: ExternalTask) {
        let mut state = self.state.lock();
        state.task = Some(task);
        // The other parts may have been faster.
        state.finish();
    }

    fn cancel(&self) {
        let mut state = self.state.lock();
        state.is_cancelled = true;
        state.finish();
    }
}

impl CallObserver for OtherPart {
    fn ended(&self, error: Option<&Error>) -> Callbacks {
        self.end(error, false);
        Callbacks::new()
    }
}

impl fmt::Debug for Join {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Join").finish_non_exhaustive()
    }
}

#[cfg(all(test, not(accl_loom)))]
mod tests {
    use std::time::Duration;

    use accl_schedule::cost::Machine;
    use accl_types::config::{Config, WorkerCount};
    use accl_types::{Collective, Dtype, Elems, Rank};

    use super::*;
    use crate::api::default_codec::DefaultCodec;
    use crate::api::group::Group;
    use crate::driver::Driver;
    use crate::engine::Engine;
    use crate::lanes::Cut;
    use crate::session::store::MemoryStore;
    use crate::spec::{GroupRole, GroupSpec};
    use crate::time;
    use accl_executor::call::{Blocks, Mode, TensorDesc, Waited};
    use accl_executor::group::Notify;

    /// Creates a group of two ranks with two lanes each.
    fn two_ranks() -> Vec<(Arc<Engine>, Arc<Group>)> {
        two_ranks_with(1)
    }

    /// Creates a group of two ranks, each with `helpers` lanes in addition to the first.
    fn two_ranks_with(helpers: u32) -> Vec<(Arc<Engine>, Arc<Group>)> {
        two_ranks_of(&helped_by(helpers))
    }

    fn helped_by(helpers: u32) -> Config {
        Config { worker_count: WorkerCount::Exactly(helpers), ..Config::default() }
    }

    /// Creates a group of two ranks with these settings.
    fn two_ranks_of(config: &Config) -> Vec<(Arc<Engine>, Arc<Group>)> {
        let store = MemoryStore::default();
        let make = |rank| {
            let engine = Engine::new(config.clone(), |_| Machine::default());
            engine.set_least_part_bytes(1);
            let (name, timeout, config) = ("g".to_owned(), Duration::from_secs(30), config.clone());
            let spec = GroupSpec {
                name,
                rank: Rank(rank),
                world: 2,
                timeout,
                config,
                master: None,
                global_ranks: Vec::new(),
                role: GroupRole::Default,
            };
            let group = engine.create_group(spec, &store, &mut || false).unwrap();
            (engine, group)
        };
        std::thread::scope(|scope| {
            let made = [0, 1].map(|rank| scope.spawn(move || make(rank)));
            made.into_iter().map(|made| made.join().unwrap()).collect()
        })
    }

    /// A lane whose thread is awake: it runs a job as soon as it is queued.
    struct Awake {
        number: usize,
        log: Arc<Mutex<Vec<(&'static str, usize)>>>,
    }

    impl Lane for Awake {
        fn give(&self, next: Option<Next>, _: CoreJob) {
            self.log.lock().push(("given", self.number));
            drop(next);
        }

        fn wake(&self) {
            self.log.lock().push(("woken", self.number));
        }
    }

    #[test]
    fn no_thread_is_woken_before_its_part_is_there_and_none_is_left_asleep() {
        for of in 1..=9 {
            let log = Arc::default();
            let lane = |number| Arc::new(Awake { number, log: Arc::clone(&log) }) as Arc<dyn Lane>;
            // A call may have fewer parts than there are lanes.
            let lanes: Arc<[_]> = (0..9).map(lane).collect();
            hand_out(&lanes, (0..of).map(|_| Box::new(|_: &mut Core| ()) as CoreJob).collect(), true);
            let log = log.lock().clone();
            let at = |what| log.iter().position(|seen| *seen == what);
            for number in 0..of {
                assert!(at(("given", number)).unwrap() < at(("woken", number)).unwrap(), "{of} parts: {log:?}");
            }
            assert_eq!(log.len(), 2 * of, "{of} parts: {log:?}");
        }
    }

    #[test]
    fn parts_that_are_left_to_the_waiter_wake_no_thread() {
        let log = Arc::default();
        let lane = |number| Arc::new(Awake { number, log: Arc::clone(&log) }) as Arc<dyn Lane>;
        let lanes: Arc<[_]> = (0..9).map(lane).collect();
        hand_out(&lanes, (0..5).map(|_| Box::new(|_: &mut Core| ()) as CoreJob).collect(), false);
        assert_eq!(*log.lock(), [4, 3, 2, 1, 0].map(|number| ("given", number)));
    }

    #[test]
    fn parts_that_were_left_to_a_waiter_who_stops_spinning_are_done_by_their_threads() {
        let ranks = two_ranks_of(&Config { spin_us: Some(1), ..helped_by(3) });
        std::thread::scope(|scope| {
            for (_, group) in &ranks {
                scope.spawn(move || {
                    for _ in 0..20 {
                        // Calls that follow at once wake threads.
                        std::thread::sleep(Duration::from_millis(1));
                        let mut tensor = vec![1.0_f32; 1 << 15];
                        let call = group.submit(sum_of(&mut tensor, Mode::Blocking)).unwrap();
                        assert!(call.state.is_left_to_waiter);
                        assert_eq!(call.wait(Some(Duration::from_secs(20)), &mut || false), Waited::Done);
                        assert!(tensor.iter().all(|&value| value == 2.0));
                    }
                });
            }
        });
    }

    #[test]
    fn a_waiter_begins_the_parts_that_were_left_to_it_and_wakes_no_thread() {
        // The waiter spins until the test ends.
        let ranks = two_ranks_of(&Config { spin_us: Some(30_000_000), ..helped_by(3) });
        // The first call makes the links and announces them to the drivers.
        std::thread::scope(|scope| {
            for (_, group) in &ranks {
                scope.spawn(|| {
                    let mut tensor = vec![1.0_f32; 1 << 15];
                    let call = group.submit(sum_of(&mut tensor, Mode::Blocking)).unwrap();
                    assert_eq!(call.wait(Some(Duration::from_secs(20)), &mut || false), Waited::Done);
                });
            }
        });
        let (engine, group) = &ranks[0];
        engine.without_tick();
        let lanes = engine.other_lanes();
        // Meanwhile left-over work finishes, and threads that were awake go to sleep.
        std::thread::sleep(Duration::from_millis(200));
        let polls = || lanes.iter().map(|lane| lane.polls() + lane.parks()).collect::<Vec<_>>();
        let before = polls();
        let mut tensor = vec![1.0_f32; 1 << 15];
        let call = group.submit(sum_of(&mut tensor, Mode::Blocking)).unwrap();
        assert!(call.state.is_left_to_waiter);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| call.wait(Some(Duration::from_secs(25)), &mut || false));
            // The peer does not issue the call.
            let has_begun = |lane: &Arc<Driver>| lane.with_core(|core| core.in_flight(group.caller.group).len()) == 1;
            let begin = std::time::Instant::now();
            while !lanes.iter().all(has_begun) && begin.elapsed() < Duration::from_secs(20) {
                std::thread::sleep(Duration::from_millis(1));
            }
            let (all_begun, after) = (lanes.iter().all(has_begun), polls());
            group.abort("the test is over");
            assert!(matches!(waiter.join().unwrap(), Waited::Failed(_)));
            assert!(all_begun, "a part was forgotten");
            assert_eq!(after, before, "a thread was woken");
        });
    }

    #[test]
    fn threads_are_woken_for_large_encoded_unawaited_and_consecutive_calls() {
        let (driver, mut tensor) = (Driver::new(1 << 16, None), [0.0; 64]);
        let left = |mode, predicted_ps, now| {
            let cut = Cut::new(&sum_of(&mut [0.0; 64], mode), 2, predicted_ps).unwrap();
            driver.leaves_parts_to_waiter(&cut, now)
        };
        let (small, large, later) = (999_999_999, 1_000_000_000, time::now() + Duration::from_secs(1));
        assert!(left(Mode::Blocking, small, later));
        assert!(!left(Mode::Blocking, large, later));
        assert!(!left(Mode::Async, small, later));
        let config = Config { compress_all: true, codec: "bf16".to_owned(), ..Config::default() };
        let codec = DefaultCodec::of(&config).unwrap().unwrap();
        let encoded = codec.encoded(&sum_of(&mut tensor, Mode::Blocking), 0).unwrap();
        assert!(!driver.leaves_parts_to_waiter(&Cut::new(&encoded, 2, small).unwrap(), later));
        driver.note_cut_ended(later);
        assert!(!left(Mode::Blocking, small, later + Duration::from_micros(99)));
        assert!(left(Mode::Blocking, small, later + Duration::from_micros(100)));
        let cut = Cut::new(&sum_of(&mut tensor, Mode::Blocking), 2, small).unwrap();
        assert!(!Driver::new(1 << 16, Some(0)).leaves_parts_to_waiter(&cut, later), "no thread spins");
    }

    #[test]
    fn lanes_are_woken_although_a_waiter_has_done_the_part_of_the_one_that_would_wake_them() {
        let ranks = two_ranks_with(3);
        let (engine, _) = &ranks[0];
        let lanes: Arc<[Arc<dyn Lane>]> =
            engine.other_lanes().iter().map(|lane| lane.clone() as Arc<dyn Lane>).collect();
        let (sender, done) = std::sync::mpsc::channel();
        for (after, lane) in lanes.iter().enumerate().rev() {
            let sender = sender.clone();
            let next = Next { lanes: lanes.clone(), after, of: 3 };
            lane.give(Some(next), Box::new(move |_| sender.send(after).unwrap()));
        }
        assert_eq!(engine.other_lanes()[0].do_jobs_for_another(), 1);
        lanes[0].wake();
        let mut seen: Vec<_> =
            (0..3).map(|_| done.recv_timeout(Duration::from_secs(20)).expect("a lane sleeps on")).collect();
        seen.sort_unstable();
        assert_eq!(seen, [0, 1, 2]);
    }

    /// Pretends that the machine has enough cores. On a machine with few cores the lanes' threads take turns, and the
    /// thread that waits for a call does parts of it.
    #[test]
    fn threads_that_spin_do_all_parts_they_are_given_and_stop_when_there_are_no_more() {
        all_parts_are_done(1);
    }

    /// With many threads, some find nothing to do and sleep before a waiter begins their parts.
    #[test]
    fn parts_that_a_waiter_has_begun_do_not_hang_when_it_sleeps_itself() {
        [3, 7].into_iter().for_each(all_parts_are_done);
    }

    fn all_parts_are_done(helpers: u32) {
        const COUNT: usize = 1 << 15;
        let ranks = two_ranks_with(helpers);
        for (engine, _) in &ranks {
            engine.lanes().for_each(|lane| lane.pretend_own_cores());
            engine.without_tick();
        }
        std::thread::scope(|scope| {
            for (_, group) in &ranks {
                scope.spawn(move || {
                    for round in 0..200 {
                        let mut tensor = vec![1.0_f32; COUNT];
                        let mode = if round % 3 == 0 { Mode::Async } else { Mode::Blocking };
                        let call = group.submit(sum_of(&mut tensor, mode)).unwrap();
                        // In that mode no waiting thread helps.
                        let begin = std::time::Instant::now();
                        while mode == Mode::Async && !call.is_done() && begin.elapsed() < Duration::from_secs(20) {
                            std::thread::yield_now();
                        }
                        assert!(mode == Mode::Blocking || call.is_done(), "a part was not begun");
                        assert_eq!(call.wait(Some(Duration::from_secs(20)), &mut || false), Waited::Done);
                        assert!(tensor.iter().all(|&value| value == 2.0));
                    }
                });
            }
        });
        let spent = || rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        let nanos = |time: rustix::time::Timespec| time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64;
        // Work that the last calls left over finishes soon.
        std::thread::sleep(Duration::from_millis(100));
        let before = nanos(spent());
        std::thread::sleep(Duration::from_millis(300));
        let idle = nanos(spent()) - before;
        assert!(idle < 100_000_000, "{idle} ns of processor time while nothing was to be done");
    }

    fn sum_of(tensor: &mut [f32], mode: Mode) -> CallDesc {
        let mut desc = CallDesc::new(Collective::AllReduce, Dtype::F32);
        desc.mode = mode;
        let count = Elems(tensor.len() as u64);
        desc.outputs = Blocks::of(TensorDesc::dense(tensor.as_mut_ptr().cast(), Dtype::F32, count));
        desc
    }

    #[test]
    fn a_job_runs_although_another_thread_took_its_wake_up_with_link_events() {
        let ranks = two_ranks();
        let (engine, group) = &ranks[0];
        engine.without_tick();
        let (lane, id) = (&engine.other_lanes()[0], group.caller.group);
        // The peer does not issue the call, so the lane's thread sleeps in the poller.
        let mut tensor = vec![1.0_f32; 1 << 15];
        let call = group.submit(sum_of(&mut tensor, Mode::Async)).unwrap();
        while lane.with_core(|core| core.in_flight(id).is_empty()) {
            std::thread::yield_now();
        }
        let (sender, done) = std::sync::mpsc::channel();
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(2));
            let core = lane.lock();
            // The thread wakes, finds nothing, and waits for the lock.
            lane.wake();
            std::thread::sleep(Duration::from_millis(2));
            let sender = sender.clone();
            lane.leave_job(Box::new(move || sender.send(()).unwrap()), None);
            lane.wake_for_jobs();
            lane.ask(&core);
            drop(core);
            assert!(done.recv_timeout(Duration::from_secs(10)).is_ok(), "the job was forgotten");
        }
        group.abort("the test is over");
        assert!(matches!(call.wait(Some(Duration::from_secs(20)), &mut || false), Waited::Failed(_)));
    }

    #[test]
    fn a_lane_forwards_the_failure_of_another_rank_and_does_not_announce_it() {
        let ranks = two_ranks();
        let (engine, group) = &ranks[0];
        let id = group.caller.group;
        group.driver.with_core(|core| {
            let error = Error::aborted("rank 1 reported: the test wants it").with_peer(accl_types::Rank(1));
            core.with_group(id, time::now(), |state, context| state.fail(error, context, Notify::Neighbours));
        });
        let failed = engine.other_lanes()[0].with_core(|core| core.group(id).and_then(|group| group.failed()));
        assert_eq!(failed.map(|failed| failed.notify), Some(Notify::Neighbours));
    }

    #[test]
    fn a_call_that_has_not_begun_on_its_first_lane_does_not_end_before_its_parts_on_the_others() {
        const COUNT: usize = 1 << 17;
        let mut tensors = vec![vec![1.0_f32; COUNT]; 2];
        // A call that is withheld begins after a millisecond. On a busy machine that may pass before the checks below.
        for _ in 0..20 {
            let ranks = two_ranks();
            let (engine, group) = &ranks[0];
            let submit = |tensor: &mut Vec<f32>| group.submit(sum_of(tensor, Mode::Async)).unwrap();
            let calls: Vec<_> = tensors.iter_mut().map(submit).collect();
            // The peer issues neither call, so the second one waits for its turn on this lane while the other lane has
            // its part.
            let (other, id) = (&engine.other_lanes()[0], group.caller.group);
            while other.with_core(|core| core.in_flight(id).len()) < 2 {
                std::thread::yield_now();
            }
            group.driver.with_core(|core| {
                let error = Error::aborted("the test wants it");
                core.with_group(id, time::now(), |state, context| state.fail(error, context, Notify::Peers));
                assert_eq!(other.with_core(|core| core.in_flight(id).len()), 2);
                assert!(calls.iter().all(|call| !call.is_done()), "a part may still touch their tensors");
            });
            for call in &calls {
                let _ = call.wait(Some(Duration::from_secs(20)), &mut || false);
                assert!(call.is_done());
            }
            assert_eq!(other.with_core(|core| core.in_flight(id).len()), 0);
        }
    }
}
