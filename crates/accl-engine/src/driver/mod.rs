//! Who makes progress: waiting, driving, the background thread.
//!
//! Progress is one pass over the core under its lock. Whoever submits makes one; whoever waits spins over it a while. Then one thread
//! drives, and parks in the poller, while others sleep on their calls: which one is up to `election`. Owns the lock, the poller, and what
//! a pass and a sleep are. Read [`Driver::wait`] first.

mod lanes;

use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use accl_transport::{Poller, Traced, Waker, Watched};
use accl_types::{Error, Moment};
use accl_wire::{EndpointInfo, Stance};
use smallvec::SmallVec;

use crate::completion::CompletionPool;
use crate::election::{Election, Host, Stint, Waiter};
use crate::events;
use crate::in_flight::InFlight;
use crate::jobs::Jobs;
use crate::signals;
use crate::sync::{Mutex, MutexGuard};
use crate::time;
use crate::wanted::WantedLinks;
use accl_executor::call::{CallState, Waited};
use accl_executor::exec::SpinLimit;
use accl_executor::group::{Completed, Core, Fate, Relief};
use accl_executor::peers::{Mark, PeerId};

/// How often a waiter looks for signals, in milliseconds.
const TICK_MS: u64 = 50;
/// Spinning when every rank of the host has a core of its own.
const SPIN_OWN_CORE: Duration = Duration::from_micros(200);
/// Yielding when ranks share cores: each look gives the core away, so more of them cost nobody anything.
const SPIN_SHARED_CORE: Duration = Duration::from_micros(100);
/// How long after an asynchronous call the background thread leaves the links to who made it. As a rule more calls follow, or a wait, each with passes of its
/// own; to be woken for whatever comes meanwhile would take that thread's core from it.
const SUBMITTING: Duration = Duration::from_micros(30);
/// So often in a row at most: somebody must look at deadlines.
const MOST_LEFT: u32 = 10;
/// Passes without news before a yield when ranks share cores: who waits here keeps another rank from sending.
const PASSES_BEFORE_YIELD: u32 = 2;

/// Passes without news of a thread that waits for a call before it looks after the parts on other lanes, a few microseconds; and from then on between looks.
const PASSES_BEFORE_HELP: u32 = 64;
const PASSES_BETWEEN_HELP: u32 = 8;
/// As the first, where no thread was woken.
const PASSES_BEFORE_NEXT: u32 = 2;
/// Passes of a thread that waits before it asks for news of links that its call does not need.
const ROUNDS_BEFORE_LOOK: u32 = 16;

/// Between looks at whether the peers have what they were sent.
const FIRST_PAUSE: Duration = Duration::from_micros(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(5);

/// Looks of a call on the fast path when every rank has a core of its own: a few microseconds.
const FAST_PATH_SPINS: u32 = 300;
/// When ranks share cores: looks before each yield, which are far cheaper than a pass, and yields.
const FAST_PATH_SPINS_SHARED: u32 = 20;
const FAST_PATH_YIELDS: u32 = 8;

/// An interrupt that stays: who asked once for the end does not wait again.
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
    /// The time is up.
    Late,
    /// The interrupt hook asked to stop.
    Interrupted,
}

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
        let Completed { callbacks, calls, failed, .. } = self.take_completed();
        let (wanted, notes) = self.net.take_wanted();
        let told = usize::from(!calls.is_empty());
        self.driver.pool.hold(callbacks.len() + told);
        self.core = None;
        failed.into_iter().for_each(|group| self.driver.fail_elsewhere(&group));
        self.driver.pool.post_held(callbacks);
        if !wanted.is_empty() || !notes.is_empty() {
            self.driver.wanted.add(wanted, notes);
        }
        // Last, since a log may be slow. Whoever waits for a call goes on as soon as it has ended, and the process may end: that waits
        // until this is told, or has panicked.
        let _held = Held { pool: &self.driver.pool, count: told };
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
            "this process was forked from the one that made the group, and a group does not survive a fork; make a group of \
             its own in the child, or start the child with spawn",
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

    // ---- links

    /// Links that calls want.
    pub(crate) fn wanted(&self) -> &WantedLinks {
        &self.wanted
    }

    /// Gives a peer that waits for its link the one that `take` takes. `false`: nobody here waits for one.
    pub(crate) fn attach(&self, uuid: &[u8; 16], take: impl FnOnce() -> Option<Box<dyn Watched>>) -> bool {
        let Some(polling) = self.polling.get() else { return false };
        let has_taken = self.with_core(|core| {
            let Some(id) = core.net.find(uuid).filter(|&id| core.net.is_unlinked(id)) else { return false };
            let Some(mut link) = take() else { return false };
            let peer = core.net.host_and_pid(id);
            tracing::debug!(peer, link = link.describe(), "linked");
            if events::follows_frames() {
                link = Box::new(Traced::new(link, events::of_frames(peer)));
            }
            // Under the lock: a driver that the first event wakes must find the link.
            match polling.poller.watch(&mut link) {
                Ok(slot) => core.attach(id, link, slot, time::now()),
                Err(error) => core.lose(id, error, time::now()),
            }
            true
        });
        if has_taken {
            self.after_links();
        }
        has_taken
    }

    /// A peer cannot be reached.
    pub(crate) fn lose(&self, uuid: &[u8; 16], error: Error) {
        self.with_core(|core| {
            if let Some(id) = core.net.find(uuid) {
                core.lose(id, error, time::now());
            }
        });
        self.after_links();
    }

    /// What is thought of a peer that greets.
    pub(crate) fn stance_to(&self, uuid: &[u8; 16]) -> Stance {
        let stance = self.with_core(|core| core.stance_to(uuid, time::now()));
        if stance != Stance::Unlinked {
            // The look may have taken what a sleeper was to be woken by.
            self.wake_driver_if(true);
        }
        stance
    }

    /// Those of these peers that have no link and have not gone.
    pub(crate) fn still_unlinked(&self, infos: Vec<EndpointInfo>) -> Vec<EndpointInfo> {
        if infos.is_empty() {
            return infos;
        }
        self.with_core(|core| {
            let is_unlinked = |info: &EndpointInfo| core.net.find(&info.uuid).is_none_or(|id| core.net.is_unlinked(id));
            infos.into_iter().filter(is_unlinked).collect()
        })
    }

    /// A process without a link has ended in good order.
    pub(crate) fn depart(&self, uuid: &[u8; 16], is_assumed: bool) {
        self.with_core(|core| {
            if let Some(id) = core.net.find(uuid) {
                core.depart(id, is_assumed, time::now());
            }
        });
        self.after_links();
    }

    /// See [`Core::on_note`].
    pub(crate) fn on_note(&self, from: &[u8; 16], note: &[u8]) -> Fate {
        let answer = self.with_core(|core| core.on_note(from, note, time::now()));
        self.after_links();
        answer
    }

    /// Whether a process was a peer and has gone, and is none again.
    pub(crate) fn has_gone(&self, uuid: &[u8; 16]) -> bool {
        self.with_core(|core| core.net.gone(uuid).is_some())
    }

    /// A driver that sleeps has not said so on a new link, and whoever waits for a call may find it over.
    fn after_links(&self) {
        self.wake_driver_if(true);
        if self.with_core(|core| core.has_work()) {
            self.ensure_driver();
        }
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
        let unsent = core.net.has_unsent();
        drop(core);
        if moved || wake {
            self.wake_driver_if(wake);
        }
        if unsent {
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
        let unsent = self.with_core(|core| {
            core.net.flush_all();
            core.net.has_unsent()
        });
        if unsent {
            self.ensure_driver();
        }
    }

    /// Wakes the driver so that it looks at everything anew.
    pub(crate) fn kick(&self) {
        Host::kick(self);
    }

    // ---- waiting

    /// Waits until the peers' hosts have what was sent to them, at most until then. An acknowledgement is no event, so this
    /// looks again and again; mostly there is nothing to wait for.
    pub(crate) fn await_delivery(
        &self,
        mut marks: Vec<Mark>,
        until: Moment,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Delivery {
        // External operations that still work on memory of calls that have failed; a call says itself if one never stops.
        let _ = self.await_all(until, interrupt, |core| !core.has_stopping());
        self.await_all(until, interrupt, |core| {
            marks.retain_mut(|mark| !core.net.is_delivered(mark));
            marks.is_empty()
        })
    }

    /// Waits until the collectives of these groups that were made asynchronously are over, at most until then.
    pub(crate) fn await_calls(&self, groups: &[u64], until: Moment, interrupt: &mut dyn FnMut() -> bool) {
        let is_over = |core: &mut Core| {
            let mut groups = groups.iter().filter_map(|id| core.group(*id));
            !groups.any(|group| group.has_async_calls(&core.net))
        };
        self.await_all(until, interrupt, is_over);
    }

    /// Makes progress until it is over, until then, or until the interrupt.
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
            // What the peers send meanwhile is taken off the links, or the end of this process would reset them.
            let Some(mut core) = self.try_lock_until(until) else { return Delivery::Late };
            // Ends of links of any kind are looked for.
            self.ask(&core);
            let looked = core.guarded(|core| {
                let is_news = look(core) | core.take_owed_to_driver();
                (is_over(core), is_news)
            });
            drop(core);
            if matches!(looked, Ok((_, true))) {
                self.wake_driver_if(true);
            }
            if !matches!(looked, Ok((false, _))) {
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
        if let Some(outcome) = call.outcome() {
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

    /// Whether ranks of this host must share cores.
    fn shares_cores(&self) -> bool {
        self.shares_cores.load(Ordering::Relaxed)
    }

    /// How long a call on the fast path looks for a frame. It holds the lock, so not for long.
    pub(crate) fn spin_limit(&self) -> SpinLimit {
        match self.spin {
            Some(spin) if spin.is_zero() => SpinLimit { spins: 0, yields: 0, yield_now: std::thread::yield_now },
            _ if self.shares_cores() => {
                SpinLimit { spins: FAST_PATH_SPINS_SHARED, yields: FAST_PATH_YIELDS, yield_now: std::thread::yield_now }
            }
            _ => SpinLimit { spins: FAST_PATH_SPINS, yields: 0, yield_now: std::thread::yield_now },
        }
    }

    /// Looks again and again for a short while.
    fn spin(&self, call: &InFlight, until: Option<Moment>) -> Option<Waited> {
        let shared = self.shares_cores() || call.is_cut && !self.lanes_have_own_cores.load(Ordering::Relaxed);
        let budget = match self.spin {
            Some(spin) => spin,
            None if shared => SPIN_SHARED_CORE,
            None => SPIN_OWN_CORE,
        };
        let start = time::now();
        let (mut news, mut looks) = (start, 0_u32);
        // Threads that were woken are given a moment to come.
        let patience = if call.is_left_to_waiter { PASSES_BEFORE_NEXT } else { PASSES_BEFORE_HELP };
        let mut unsent = false;
        let mut beside = call.is_cut.then(|| self.beside());
        let mut is_helping = false;
        // A driver that sleeps meanwhile need not be woken for what is seen here.
        let mut watch = Watch { driver: self, is_on: false };
        let mut needed: Option<SmallVec<[PeerId; 4]>> = None;
        for round in 0_u32.. {
            let now = time::now();
            if let Some(mut core) = self.try_lock() {
                watch.is_on = watch.is_on || core.watch();
                let streams = needed.get_or_insert_with(|| {
                    let peers = core.peers_of(call);
                    // They need not say that they have sent something: it is looked for here.
                    peers.iter().for_each(|&peer| core.net.poll_link(peer));
                    core.streams_among(&peers)
                });
                streams.iter().for_each(|&peer| core.net.look_again(peer));
                // The others' news can wait a little.
                let is_others_turn = round % ROUNDS_BEFORE_LOOK == ROUNDS_BEFORE_LOOK - 1;
                if streams.is_empty() || is_others_turn {
                    self.look(&core);
                }
                let moved = core.pass(now) | core.take_owed_to_driver();
                let wake = !watch.is_on && core.must_wake_driver(None);
                unsent = core.net.has_unsent();
                drop(core);
                if moved {
                    (news, looks) = (time::now(), 0);
                }
                if moved || wake {
                    self.wake_driver_if(wake);
                }
            }
            // Where other calls move on and on.
            let is_overdue = call.is_left_to_waiter && now.since(start) >= SPIN_OWN_CORE;
            if let Some(beside) = &mut beside
                && (looks >= patience || beside.watches || is_overdue)
                && (is_helping || call.is_left_to_waiter || round.is_multiple_of(PASSES_BETWEEN_HELP))
            {
                is_helping = beside.help(call, is_overdue, now);
                news = if is_helping { time::now() } else { news };
            }
            if let Some(outcome) = call.outcome() {
                if unsent {
                    self.ensure_driver();
                }
                return Some(outcome);
            }
            // A core of its own is there for as long as something comes; then a waiter looks for signals.
            let is_over = if shared || !call.is_cut || self.spin.is_some() {
                now.since(start) >= budget
            } else {
                now.since(news) >= budget || now.since(start) >= Duration::from_millis(TICK_MS)
            };
            if is_over || until.is_some_and(|until| now >= until) {
                drop((watch, beside));
                // Nobody has told a sleeping driver of this call's deadline: until now this thread looked after it.
                if self.with_core(|core| core.must_wake_driver(core.next_deadline())) {
                    self.wake_driver_if(true);
                }
                return None;
            }
            looks += 1;
            if shared && looks > PASSES_BEFORE_YIELD {
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
                // The hook may wait for the interpreter's lock, or make calls and wait for them: others drive meanwhile,
                // and nobody elects who cannot come.
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
                driver.background();
            }
        });
        spawned.is_ok()
    }

    fn now(&self) -> Moment {
        time::now()
    }
}

/// A thread's looking at the links in place of a driver that sleeps.
struct Watch<'a> {
    driver: &'a Driver,
    is_on: bool,
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if self.is_on {
            let relief = self.driver.with_core(|core| core.unwatch(time::now()));
            self.driver.relieve(relief);
        }
    }
}

/// A waiter's part in the election; it ends with the wait, also when an interrupt hook panics.
struct WaiterGuard<'a> {
    driver: &'a Driver,
    me: Waiter,
}

impl Drop for WaiterGuard<'_> {
    fn drop(&mut self) {
        self.driver.election.leave(self.me, self.driver);
    }
}
