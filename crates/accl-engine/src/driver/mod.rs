//! Who makes progress: waiting, driving, the background thread.
//!
//! Progress is one pass over the core under its lock. Whoever submits makes one; whoever waits spins over it a while (`waiting`). Then one thread
//! drives, and parks in the poller, while others sleep on their calls: which one is up to `election`. Owns the lock, the poller, and what
//! a pass and a sleep are. Read [`Driver::wait`] first.

mod lanes;
mod links;
mod place;
pub(crate) mod waiting;

use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use accl_transport::{Poller, Waker};
use accl_types::{Error, Moment};

use self::place::Place;
use crate::completion::CompletionPool;
use crate::election::{Election, Host, Stint};
use crate::events;
use crate::jobs::Jobs;
use crate::signals;
use crate::sync::{Mutex, MutexGuard};
use crate::time;
use crate::wanted::WantedLinks;
use accl_executor::call::CallState;
use accl_executor::group::{Completed, Core, Relief};

/// How long after an asynchronous call the background thread leaves the links to who made it. As a rule more calls follow, or a wait, each with passes of its
/// own; to be woken for whatever comes meanwhile would take that thread's core from it.
const SUBMITTING: Duration = Duration::from_micros(30);
/// So often in a row at most: somebody must look at deadlines.
const MOST_LEFT: u32 = 10;

/// Passes of a thread that waits before it asks for news of links that its call does not need.
const ROUNDS_BEFORE_LOOK: u32 = 16;

/// What drives the protocol of one process: its lock, its poller, its threads.
pub(crate) struct Driver {
    core: Mutex<Core>,
    /// From the first group on.
    polling: OnceLock<Polling>,
    pool: CompletionPool,
    wanted: WantedLinks,
    /// How long a wait spins, if that was set.
    spin: Option<Duration>,
    /// In some group the ranks of this host are more than their cores.
    shares_cores: AtomicBool,
    /// In no group with several lanes these are more than the cores of their host.
    lanes_have_own_cores: AtomicBool,
    /// Of a lane beside the first: parts of calls that its thread is to begin.
    jobs: Jobs,
    /// The thread of a lane looks again and again, and need not be woken.
    is_spinning: AtomicBool,
    /// It has done so last without any news.
    has_spun_in_vain: AtomicBool,
    election: Election,
    waits: AtomicU64,
    /// How often somebody has asked whether a call is done.
    tests: AtomicU32,
    /// Nobody wakes for a periodic look.
    without_tick: AtomicBool,
    /// When an asynchronous call was last made, in nanoseconds.
    submitted: AtomicU64,
    /// Until when a call of several parts was last waited for, in nanoseconds.
    cut_ended: AtomicU64,
    /// How often in a row the background thread has left the links to who makes calls.
    left: AtomicU32,
    /// How often a driver has slept in the poller.
    parks: AtomicU64,
    /// How often somebody has asked it for news without sleeping.
    looks: AtomicU64,
    /// How often this process had been forked when this was made: in a later child it is dead.
    born: u64,
    /// For the background thread.
    me: Weak<Driver>,
    /// Where the background thread runs.
    pub(crate) place: Place,
    /// Of a process with several lanes: the drivers of all of them.
    lanes: OnceLock<Vec<Weak<Driver>>>,
}

/// What a driver sleeps in, and what wakes it.
pub(crate) struct Polling {
    pub(crate) poller: Poller,
    pub(crate) waker: Arc<Waker>,
}

/// The core under its lock. When that is given back, callbacks of calls that have ended go to their threads, and wishes for links
/// to the one that makes them.
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
        if self.has_errands() {
            self.run_errands();
        }
    }
}

impl Locked<'_> {
    /// Gives the lock back, has the callbacks run and the links made.
    #[cold]
    fn run_errands(&mut self) {
        let Completed { callbacks, calls, failed, losses, .. } = self.take_completed();
        let (wanted, notes) = self.net.take_wanted();
        let told = usize::from(!calls.is_empty() || !losses.is_empty());
        self.driver.pool.hold(callbacks.len() + told);
        self.core = None;
        // Whoever waits for a call goes on as soon as it has ended, and the process may end: that waits until all is told, or this has panicked.
        let _held = Held { pool: &self.driver.pool, count: told };
        // First: a launcher that has seen a rank die may end this one at any moment.
        losses.iter().for_each(events::lost);
        failed.into_iter().for_each(|group| self.driver.fail_elsewhere(&group));
        self.driver.pool.post_held(callbacks);
        if !wanted.is_empty() || !notes.is_empty() {
            self.driver.wanted.add(wanted, notes);
        }
        // Last, since a log may be slow.
        calls.iter().for_each(|call| events::ended(call));
    }
}

/// Takes what has come, and looks who has gone. `true`: somebody has. The end of a link is gone from the system's news with the link, so
/// a driver that sleeps must be woken.
fn look(core: &mut Core) -> bool {
    let (before, now) = (core.net.departures(), time::now());
    core.pass_whole(now);
    core.check(now);
    core.net.departures() != before
}

/// What [`CompletionPool::hold`] holds, until this is dropped.
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
    /// Without threads, descriptors or memory. Segments have `segment` bytes; `spin_us` limits how long a wait spins.
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
            looks: AtomicU64::new(0),
            born: accl_transport::fork_generation(),
            me: me.clone(),
            place: Place::default(),
            lanes: OnceLock::new(),
        })
    }

    /// Whether this process is a forked child of the one that made this.
    pub(crate) fn is_forked(&self) -> bool {
        self.born != accl_transport::fork_generation()
    }

    /// Of a forked child: neither its threads nor its connections are there.
    ///
    /// # Errors
    /// `Aborted` in a forked child.
    pub(crate) fn refuse_if_forked(&self) -> accl_types::Result<()> {
        if !self.is_forked() {
            return Ok(());
        }
        Err(Error::aborted(
            "this process was forked from the one that made the group, and a group does not survive a fork; start the child \
             with spawn, or let it call destroy_process_group(), which leaves the parent's group as it is, and make a group of its own",
        ))
    }

    // ---- the lock

    /// The core, as soon as nobody else has it.
    #[inline]
    pub(crate) fn lock(&self) -> Locked<'_> {
        Locked { core: Some(self.core.lock()), driver: self }
    }

    /// As [`Driver::lock`], for the fast path: to be given back by [`Driver::unlock`].
    #[inline]
    pub(crate) fn lock_briefly(&self) -> MutexGuard<'_, Core> {
        self.core.lock()
    }

    /// Gives the lock back, as the end of a [`Locked`] does.
    #[inline]
    pub(crate) fn unlock(&self, core: MutexGuard<'_, Core>) {
        if core.has_errands() {
            drop(Locked { core: Some(core), driver: self });
        }
    }

    fn try_lock(&self) -> Option<Locked<'_>> {
        self.core.try_lock().map(|core| Locked { core: Some(core), driver: self })
    }

    /// Runs `f` on the core after a look at all links for what has come and who has gone.
    pub(crate) fn after_a_look<R>(&self, f: impl FnOnce(&mut Core) -> R) -> R {
        let (result, is_news) = self.with_core(|core| {
            core.net.look_again_everywhere();
            let is_news = look(core);
            let result = f(core);
            (result, is_news | core.take_owed_to_driver() | core.must_wake_driver(None))
        });
        if is_news {
            self.wake_driver_if(true);
        }
        result
    }

    /// The core, unless another thread has it until then.
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

    /// What it sleeps in; `None` before the first group.
    pub(crate) fn polling(&self) -> Option<&Polling> {
        self.polling.get()
    }

    /// Gives it something to sleep in, once.
    pub(crate) fn set_polling(&self, polling: Polling) {
        let (waker, board) = (polling.waker.clone(), polling.poller.board());
        if self.polling.set(polling).is_ok() {
            self.with_core(|core| {
                core.set_wake(Arc::new(move || waker.wake()));
                core.net.set_board(board);
            });
        }
    }

    /// Ranks of this host must share cores from now on.
    pub(crate) fn share_cores(&self) {
        self.shares_cores.store(true, Ordering::Relaxed);
    }

    /// Switches the periodic looks off, a waiter's at signals and the driver's at silent hosts: without them a lost wake-up
    /// is a hang and not a delay. For tests.
    pub(crate) fn without_tick(&self) {
        self.without_tick.store(true, Ordering::Relaxed);
    }

    fn ticks(&self) -> bool {
        !self.without_tick.load(Ordering::Relaxed)
    }

    /// How often a thread of this engine has slept in the poller. For tests.
    pub(crate) fn parks(&self) -> u64 {
        self.parks.load(Ordering::Relaxed)
    }

    /// How often somebody has asked the poller for news without sleeping.
    pub(crate) fn looks(&self) -> u64 {
        self.looks.load(Ordering::Relaxed)
    }

    // ---- passes

    /// Asks the system what has come, for the passes that follow: of a link of which nobody has seen an event they do not look
    /// at the socket. A driver that sleeps hears of it itself, and its news would be taken from it here.
    pub(crate) fn look(&self, core: &Core) {
        if core.net.has_streams() {
            self.ask(core);
        }
    }

    /// As [`Driver::look`], also for links whose frames are seen without the system, but not their ends.
    pub(crate) fn ask(&self, core: &Core) {
        if !core.is_parked()
            && let Some(polling) = self.polling.get()
        {
            self.looks.fetch_add(1, Ordering::Relaxed);
            // A failure to look leaves the news where they are.
            let _ = polling.poller.look();
        }
    }

    /// One pass, waiting for the lock.
    pub(crate) fn pass_now(&self) {
        let mut core = self.lock();
        self.look(&core);
        core.pass_whole(time::now());
        let wake = core.must_wake_driver(None);
        let moved = core.take_owed_to_driver();
        drop(core);
        if moved || wake {
            self.wake_driver_if(wake);
        }
    }

    /// One pass unless somebody else is at it; also for who asks for a call again and again.
    pub(crate) fn try_pass(&self, call: Option<&CallState>) {
        let Some(mut core) = self.try_lock() else { return };
        match call.map(|call| core.streams_of(call)).filter(|streams| !streams.is_empty()) {
            Some(streams) => {
                streams.into_iter().for_each(|peer| core.net.look_again(peer));
                if self.tests.fetch_add(1, Ordering::Relaxed).is_multiple_of(ROUNDS_BEFORE_LOOK) {
                    self.look(&core);
                }
            }
            None => self.look(&core),
        }
        self.pass_and_tell(core, false, time::now());
    }

    /// A pass, and what the driver must hear of it; less of one that is watched. Returns whether anything moved.
    fn pass_and_tell(&self, mut core: Locked<'_>, is_watched: bool, now: Moment) -> bool {
        let moved = core.pass(now) | core.take_owed_to_driver();
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

    /// After a submission: one pass for an asynchronous call, and a driver if there is none.
    pub(crate) fn submitted(&self, call: &CallState) {
        if call.is_async && !call.is_done() {
            self.submitted.store(time::now().nanos(), Ordering::Relaxed);
            self.try_pass(None);
        }
        if call.is_done() && self.with_core(Core::take_owed_look) {
            self.pass_now();
        }
        // A waiter drives for its own call; nobody does for an asynchronous one, or for bytes that the kernel did not
        // take and whose call is done.
        if (call.is_done() || call.is_async) && self.with_core(|core| core.has_work()) {
            self.ensure_driver();
        }
    }

    /// Sends what is buffered; what the kernel does not take now is left to a driver.
    pub(crate) fn flush(&self) {
        let wants_driver = self.with_core(|core| {
            core.net.flush_all();
            core.net.wants_driver()
        });
        if wants_driver {
            self.ensure_driver();
        }
    }

    /// Wakes the driver so that it looks at everything anew.
    pub(crate) fn kick(&self) {
        Host::kick(self);
    }

    // ---- the election

    /// Sees to it that somebody makes progress while nobody waits.
    fn ensure_driver(&self) {
        self.election.ensure_driver(self);
    }

    /// After another thread's pass: the driver must not sleep on when its call may have ended, or when it `must` look.
    fn wake_driver_if(&self, must: bool) {
        self.election.wake_driver_if(must, self);
    }

    /// The background thread. Panics are caught where they arise, and all calls fail; should one get here all the same,
    /// the thread must live on, since no other looks at the deadlines of calls that nobody waits for.
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

    /// After the end of a [`Core::watch`], without the lock.
    pub(crate) fn relieve(&self, relief: Relief) {
        match relief {
            Relief::SleepsOn => {}
            Relief::MayBeOver => self.wake_driver_if(false),
            Relief::Wake => self.wake_driver_if(true),
        }
    }

    /// Asks the background thread to end.
    pub(crate) fn stop_background(&self) {
        self.election.stop_background(self);
    }

    /// Waits until the background thread has ended, at most for `patience`.
    pub(crate) fn await_background(&self, patience: Duration) {
        self.election.await_background(patience);
    }
}

impl Host for Driver {
    fn park(&self, call: Option<&CallState>, until: Option<Moment>) {
        if call.is_none() && self.is_beside() {
            // What comes now and then, as from a transport that is polled, is not worth waiting awake for.
            if self.jobs.want_thread() || !self.has_spun_in_vain.load(Ordering::Relaxed) || self.looks_and_moves() {
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
        // After a panic every call has failed, and whoever waits looks for what became of its own.
        let mut core = self.lock();
        let Ok(parked) = core.park(call, until, self.ticks(), now) else { return };
        let Some(until) = parked else {
            // While calls have work of their own nobody sleeps in the poller, and links would have no news.
            self.look(&core);
            return;
        };
        drop(core);
        // Another thread may have taken the wake-up for a job with the poller's news; from here on nobody does.
        if self.jobs.want_thread() {
            self.lock().unpark(time::now());
            return;
        }
        // A failure to wait shows as a loop that does not sleep; deadlines still end it.
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

    fn kick(&self) {
        if let Some(polling) = self.polling.get() {
            polling.waker.wake();
        }
    }

    fn start_background(&self) -> bool {
        let me = self.me.clone();
        let spawned = std::thread::Builder::new().name("accl-progress".into()).spawn(move || {
            signals::block_all();
            if let Some(driver) = me.upgrade() {
                driver.place.begin();
                driver.background();
            }
        });
        spawned.is_ok()
    }

    fn now(&self) -> Moment {
        time::now()
    }
}
