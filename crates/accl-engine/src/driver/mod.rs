//! Progress: waiting, driving, the background thread.
//!
//! Progress is one pass over the core under its lock. A submitting thread makes one pass; a waiting thread spins over
//! passes for a while (`waiting`). Then one thread drives, and parks in the poller, while the others sleep on their
//! calls; `election` decides which one. Owns the lock, the poller, and the definition of a pass and of a sleep. Read
//! [`Driver::wait`] first.

pub(crate) mod fast_turn;
pub(crate) mod lanes;
mod links;
pub(crate) mod packets;
mod pinned_thread;
pub(crate) mod waiting;

use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use accl_transport::{Poller, Waker};
use accl_types::{Error, Moment};

use self::pinned_thread::PinnedThread;
use crate::completion::CompletionPool;
use crate::election::{Election, Host, Stint};
use crate::events;
use crate::in_flight::InFlight;
use crate::jobs::Jobs;
use crate::signals;
use crate::sync::{Mutex, MutexGuard};
use crate::time;
use crate::wanted::WantedLinks;
use accl_executor::call::CallState;
use accl_executor::group::{Completed, Core, WakeDecision};

/// How long after an asynchronous call the background thread leaves the links to the submitting thread. Usually more
/// calls follow, or a wait, each with its own passes. Waking for every event meanwhile would take the core from the
/// submitting thread.
const SUBMITTING: Duration = Duration::from_micros(30);
/// Maximum number of such deferrals in a row: some thread must check deadlines.
const MOST_LEFT: u32 = 10;

/// Number of passes of a waiting thread between polls for events on links that its call does not need.
const ROUNDS_BEFORE_POLL: u32 = 16;

/// Drives the protocol of one process on one lane: its lock, its poller, its threads.
pub(crate) struct Driver {
    core: Mutex<Core>,
    /// Set when the first group is created.
    polling: OnceLock<Polling>,
    pool: CompletionPool,
    wanted: WantedLinks,
    /// How long a wait spins, if the setting was given.
    spin: Option<Duration>,
    /// Whether some group has more ranks on this host than cores.
    shares_cores: AtomicBool,
    /// Whether all groups with several lanes have a core for each lane of each rank on their hosts.
    lanes_have_own_cores: AtomicBool,
    /// On lanes after the first: jobs for the lane's thread, which begin parts of calls.
    jobs: Jobs,
    /// Whether the lane's thread polls in a loop and need not be woken.
    is_spinning: AtomicBool,
    /// Whether its last such loop ended without any events.
    has_spun_in_vain: AtomicBool,
    election: Election,
    waits: AtomicU64,
    /// Number of times a caller has tested whether a call is done.
    tests: AtomicU32,
    /// Whether periodic checks are off, so that no thread wakes for them.
    without_tick: AtomicBool,
    /// Time of the last asynchronous call, in nanoseconds.
    submitted: AtomicU64,
    /// Time at which the last wait for a call of several parts ended, in nanoseconds.
    cut_ended: AtomicU64,
    /// Number of times in a row that the background thread has left the links to a submitting thread.
    left: AtomicU32,
    /// Number of times a thread has slept in the poller.
    parks: AtomicU64,
    /// Number of times a thread has polled for events without sleeping.
    polls: AtomicU64,
    /// Fork generation of the process that created this driver. In a child forked later, the driver is dead.
    born: u64,
    /// Reference to itself, for the background thread.
    me: Weak<Driver>,
    /// CPU binding of the background thread.
    pub(crate) thread: PinnedThread,
    /// Drivers of all lanes, if the process has several.
    lanes: OnceLock<Vec<Weak<Driver>>>,
}

/// The poller that a driver thread sleeps in, and the waker that ends the sleep.
pub(crate) struct Polling {
    pub(crate) poller: Poller,
    pub(crate) waker: Arc<Waker>,
}

/// The core under its lock. On release, callbacks of completed calls go to completion threads, and requests for links
/// go to the connector thread.
pub(crate) struct Locked<'a> {
    core: Option<MutexGuard<'a, Core>>,
    driver: &'a Driver,
}

impl Deref for Locked<'_> {
    type Target = Core;

    #[inline(always)]
    fn deref(&self) -> &Core {
        let Some(core) = &self.core else { unreachable!("only the end takes it away") };
        core
    }
}

impl DerefMut for Locked<'_> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Core {
        let Some(core) = &mut self.core else { unreachable!("only the end takes it away") };
        core
    }
}

impl Drop for Locked<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.has_deferred() {
            self.run_deferred();
        }
    }
}

impl Locked<'_> {
    /// Releases the lock, then has the callbacks run and the links made.
    #[cold]
    fn run_deferred(&mut self) {
        let Completed { callbacks, calls, failed, losses, .. } = self.take_completed();
        let (wanted, notes) = self.net.take_wanted();
        let reports = usize::from(!calls.is_empty() || !losses.is_empty());
        self.driver.pool.hold(callbacks.len() + reports);
        self.core = None;
        // A thread that waits for a call continues as soon as the call completes, and may end the process. The hold
        // makes that end wait until everything below is done or has panicked.
        let _held = Held { pool: &self.driver.pool, count: reports };
        // Losses first: a launcher that has seen a rank die may end this process at any moment.
        losses.iter().for_each(events::lost);
        failed.into_iter().for_each(|group| self.driver.fail_on_other_lanes(&group));
        self.driver.pool.post_held(callbacks);
        if !wanted.is_empty() || !notes.is_empty() {
            self.driver.wanted.add(wanted, notes);
        }
        // Last, because a log may be slow.
        calls.iter().for_each(|call| events::ended(call));
    }
}

/// Processes what has arrived and checks for disconnects. Returns `true` if a peer has disconnected. The system then
/// reports nothing more for that link, so a sleeping driver thread must be woken.
fn handle_arrived(core: &mut Core) -> bool {
    let (before, now) = (core.net.departures(), time::now());
    core.pass_whole(now);
    core.check(now);
    core.net.departures() != before
}

/// Releases a [`CompletionPool::hold`] when it is dropped.
struct Held<'a> {
    pool: &'a CompletionPool,
    count: usize,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.pool.let_go(self.count);
    }
}

impl Driver {
    /// Creates a driver without threads, descriptors or memory. Segments have `segment` bytes; `spin_us` limits how
    /// long a wait spins, in microseconds.
    pub(crate) fn new(segment: u64, spin_us: Option<u64>) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            core: Mutex::new(Core::new(segment, time::now)),
            polling: OnceLock::new(),
            pool: CompletionPool::default(),
            wanted: WantedLinks::default(),
            spin: spin_us.map(Duration::from_micros),
            shares_cores: AtomicBool::new(false),
            lanes_have_own_cores: AtomicBool::new(true),
            is_spinning: AtomicBool::new(false),
            has_spun_in_vain: AtomicBool::new(false),
            jobs: Jobs::default(),
            election: Election::default(),
            waits: AtomicU64::new(1),
            tests: AtomicU32::new(0),
            without_tick: AtomicBool::new(false),
            submitted: AtomicU64::new(0),
            cut_ended: AtomicU64::new(0),
            left: AtomicU32::new(0),
            parks: AtomicU64::new(0),
            polls: AtomicU64::new(0),
            born: accl_transport::fork_generation(),
            me: me.clone(),
            thread: PinnedThread::default(),
            lanes: OnceLock::new(),
        })
    }

    /// Returns whether this process is a forked child of the process that created this driver.
    pub(crate) fn is_forked(&self) -> bool {
        self.born != accl_transport::fork_generation()
    }

    /// Refuses use in a forked child, which has neither the threads nor the connections.
    ///
    /// # Errors
    /// `Aborted` in a forked child.
    pub(crate) fn refuse_if_forked(&self) -> accl_types::Result<()> {
        if !self.is_forked() {
            return Ok(());
        }
        Err(Error::aborted(
            "this process was forked from the process that created the group, and a group does not survive a fork; \
             start the child with spawn, or call destroy_process_group() in the child, which leaves the parent's group \
             unchanged, and create a new group",
        ))
    }

    // ---- the lock

    /// Returns the core once no other thread holds its lock.
    #[inline]
    pub(crate) fn lock(&self) -> Locked<'_> {
        Locked { core: Some(self.core.lock()), driver: self }
    }

    fn try_lock(&self) -> Option<Locked<'_>> {
        self.core.try_lock().map(|core| Locked { core: Some(core), driver: self })
    }

    /// Runs `f` on the core after polling all links for arrivals and disconnects.
    pub(crate) fn after_poll<R>(&self, f: impl FnOnce(&mut Core) -> R) -> R {
        let (result, has_events) = self.with_core(|core| {
            core.net.force_poll_all();
            let has_events = handle_arrived(core);
            let result = f(core);
            (result, has_events | core.take_driver_unnotified() | core.must_wake_driver(None))
        });
        if has_events {
            self.wake_driver_if(true);
        }
        result
    }

    /// Returns the core; `None` if another thread holds the lock until `until`.
    pub(crate) fn try_lock_until(&self, until: Moment) -> Option<Locked<'_>> {
        self.core.try_lock_for(until.since(time::now())).map(|core| Locked { core: Some(core), driver: self })
    }

    /// Runs `f` under the lock.
    pub(crate) fn with_core<R>(&self, f: impl FnOnce(&mut Core) -> R) -> R {
        f(&mut self.lock())
    }

    pub(crate) fn completions(&self) -> &CompletionPool {
        &self.pool
    }

    /// Returns the poller and its waker; `None` before the first group.
    pub(crate) fn polling(&self) -> Option<&Polling> {
        self.polling.get()
    }

    /// Sets the poller and its waker. Only the first call has an effect.
    pub(crate) fn set_polling(&self, polling: Polling) {
        let (waker, bitmap) = (polling.waker.clone(), polling.poller.bitmap());
        if self.polling.set(polling).is_ok() {
            self.with_core(|core| {
                core.set_wake(Arc::new(move || waker.wake()));
                core.net.set_bitmap(bitmap);
            });
        }
    }

    /// Records that ranks of this host must share cores from now on.
    pub(crate) fn share_cores(&self) {
        self.shares_cores.store(true, Ordering::Relaxed);
    }

    /// Switches off periodic checks: a waiter's checks for signals and the driver's checks for unresponsive hosts.
    /// Without them a lost wake-up hangs instead of causing a delay. For tests.
    pub(crate) fn without_tick(&self) {
        self.without_tick.store(true, Ordering::Relaxed);
    }

    fn ticks(&self) -> bool {
        !self.without_tick.load(Ordering::Relaxed)
    }

    /// Returns how often a thread of this engine has slept in the poller. For tests.
    pub(crate) fn parks(&self) -> u64 {
        self.parks.load(Ordering::Relaxed)
    }

    /// Returns how often a thread has polled for events without sleeping.
    pub(crate) fn polls(&self) -> u64 {
        self.polls.load(Ordering::Relaxed)
    }

    // ---- passes

    /// Polls the system for events, for the passes that follow: a pass reads a socket only after an event for it was
    /// seen. Does nothing while a driver thread sleeps: that thread receives the events itself, and polling here would
    /// take them from it.
    pub(crate) fn poll(&self, core: &Core) {
        if core.net.has_streams() {
            self.ask(core);
        }
    }

    /// Like [`Driver::poll`], but also polls if no link is a stream. On the other links frames are seen without the
    /// system, but disconnects are not.
    pub(crate) fn ask(&self, core: &Core) {
        if !core.is_parked()
            && let Some(polling) = self.polling.get()
        {
            self.polls.fetch_add(1, Ordering::Relaxed);
            // After a failed poll the events are still there.
            let _ = polling.poller.poll();
        }
    }

    /// Makes one pass, waiting for the lock.
    pub(crate) fn pass_now(&self) {
        let mut core = self.lock();
        self.poll(&core);
        core.pass_whole(time::now());
        let wake = core.must_wake_driver(None);
        let moved = core.take_driver_unnotified();
        drop(core);
        if moved || wake {
            self.wake_driver_if(wake);
        }
    }

    /// Makes one pass unless another thread holds the lock. Also for a caller that tests a call in a loop.
    pub(crate) fn try_pass(&self, call: Option<&CallState>) {
        let Some(mut core) = self.try_lock() else { return };
        match call.map(|call| core.streams_of(call)).filter(|streams| !streams.is_empty()) {
            Some(streams) => {
                streams.into_iter().for_each(|peer| core.net.force_poll(peer));
                if self.tests.fetch_add(1, Ordering::Relaxed).is_multiple_of(ROUNDS_BEFORE_POLL) {
                    self.poll(&core);
                }
            }
            None => self.poll(&core),
        }
        self.pass_and_notify(core, false, time::now());
    }

    /// Makes a pass and wakes the driver thread where needed; less often if the lane is watched. Returns whether
    /// anything moved.
    fn pass_and_notify(&self, mut core: Locked<'_>, is_watched: bool, now: Moment) -> bool {
        let moved = core.pass(now) | core.take_driver_unnotified();
        let wake = !is_watched && core.must_wake_driver(None);
        let wants_driver = core.net.wants_driver();
        drop(core);
        if moved || wake {
            self.wake_driver_if(wake);
        }
        if wants_driver {
            self.ensure_driver();
        }
        moved
    }

    /// Follows the start of a call: makes one pass for an asynchronous call, and ensures a driver thread where one is
    /// needed.
    pub(crate) fn after_start(&self, call: &CallState) {
        if call.is_async && !call.is_done() {
            self.submitted.store(time::now().nanos(), Ordering::Relaxed);
            self.try_pass(None);
        }
        if call.is_done() && self.with_core(Core::take_poll_due) {
            self.pass_now();
        }
        // A waiting thread drives for its own call. No thread does so for an asynchronous call, or for bytes of a
        // completed call that the kernel did not take yet.
        if (call.is_done() || call.is_async) && self.with_core(|core| core.has_work()) {
            self.ensure_driver();
        }
    }

    /// Sends what is buffered; a driver thread sends what the kernel does not take now.
    pub(crate) fn flush(&self) {
        let wants_driver = self.with_core(|core| {
            core.net.flush_all();
            core.net.wants_driver()
        });
        if wants_driver {
            self.ensure_driver();
        }
    }

    /// Wakes the driver thread so that it checks everything again.
    pub(crate) fn wake(&self) {
        Host::wake(self);
    }

    // ---- the election

    /// Ensures that some thread makes progress while no thread waits.
    fn ensure_driver(&self) {
        self.election.ensure_driver(self);
    }

    /// Follows another thread's pass. The driver thread must not sleep on if its own call may have completed, or if it
    /// `must` check again.
    fn wake_driver_if(&self, must: bool) {
        self.election.wake_driver_if(must, self);
    }

    /// Runs the background thread. Panics are caught where they arise, and all calls fail. If a panic gets here anyway,
    /// the thread must live on: no other thread checks the deadlines of calls without a waiter.
    fn background(&self) {
        loop {
            match catch_unwind(AssertUnwindSafe(|| self.election.background_turn(self))) {
                Ok(Stint::Over) => {}
                Ok(Stint::Last) => return self.jobs.end(),
                Err(panic) => {
                    self.is_spinning.store(false, Ordering::SeqCst);
                    self.with_core(|core| core.fail_all(&*panic));
                    self.election.depose_background();
                }
            }
        }
    }

    /// Acts on the end of a [`Core::watch`]; runs without the lock.
    pub(crate) fn apply_wake(&self, decision: WakeDecision) {
        match decision {
            WakeDecision::KeepAsleep => {}
            WakeDecision::CheckCall => self.wake_driver_if(false),
            WakeDecision::Wake => self.wake_driver_if(true),
        }
    }

    /// Asks the background thread to end.
    pub(crate) fn stop_background(&self) {
        self.election.stop_background(self);
    }

    /// Waits until the background thread has ended, for `patience` at the longest.
    pub(crate) fn await_background(&self, patience: Duration) {
        self.election.await_background(patience);
    }
}

impl Host for Driver {
    fn park(&self, call: Option<&InFlight>, until: Option<Moment>) {
        if call.is_none() && self.is_other_lane() {
            // Occasional events, as from a transport that is polled, are not worth staying awake for.
            if self.jobs.want_thread() || !self.has_spun_in_vain.load(Ordering::Relaxed) || self.poll_once() {
                self.spin_on_lane();
            }
            self.jobs.run();
        }
        let Some(polling) = self.polling.get() else { return };
        let now = time::now();
        let begin = Moment::from_nanos(self.submitted.load(Ordering::Relaxed)).after(SUBMITTING);
        if call.is_none() && now < begin && self.left.fetch_add(1, Ordering::Relaxed) < MOST_LEFT {
            std::thread::sleep(begin.since(now));
            return;
        }
        self.left.store(0, Ordering::Relaxed);
        // After a panic every call has failed, and each waiter checks the outcome of its own call.
        let mut core = self.lock();
        let Ok(parked) = core.park(call.map(|call| &**call), until, self.ticks(), now) else { return };
        let Some(until) = parked else {
            // While calls have work of their own, no thread sleeps in the poller, so this thread asks the poller for
            // events.
            self.poll(&core);
            return;
        };
        drop(core);
        // Another thread may have consumed the wake-up for a job or a released call together with other events; from here
        // on no thread does.
        if self.jobs.want_thread() || call.is_some_and(|call| call.released().is_some()) {
            self.lock().unpark(time::now());
            return;
        }
        // A failed wait only makes the loop run without sleeping; deadlines still end it.
        self.parks.fetch_add(1, Ordering::Relaxed);
        let _ = polling.poller.wait((until != Moment::FAR).then(|| until.since(now)));
        self.lock().unpark(time::now());
    }

    fn has_work(&self) -> bool {
        self.jobs.want_thread() || self.with_core(|core| core.has_work())
    }

    fn has_stopping(&self) -> bool {
        self.with_core(|core| core.has_stopping())
    }

    fn wake(&self) {
        if let Some(polling) = self.polling.get() {
            polling.waker.wake();
        }
    }

    fn start_background(&self) -> bool {
        let me = self.me.clone();
        let spawned = std::thread::Builder::new().name("accl-progress".into()).spawn(move || {
            signals::block_all();
            if let Some(driver) = me.upgrade() {
                driver.thread.begin();
                driver.background();
            }
        });
        spawned.is_ok()
    }

    fn now(&self) -> Moment {
        time::now()
    }
}
