//! The engine of one process: its endpoint, its links, its groups, and who makes progress.
//!
//! `progress` is one pass over the core under its lock. Whoever submits makes one; whoever waits spins over it a while.
//! Then one thread, the *driver*, parks in the poller, while others sleep on their calls; when the driver leaves, it
//! hands over to a sleeper, or to the background thread if calls are in flight. So nobody sleeps without a driver. Owns
//! this election and the background thread. Read [`Engine`] first.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use accl_schedule::Topology;
use accl_transport::{Card, Endpoint, Link, Poller, Settings, Waker};
use accl_types::config::Config;
use accl_types::{Error, ErrorKind, Rank, Result};

use crate::call::{Call, Waited};
use crate::completion::CompletionPool;
use crate::core::Core;
use crate::desc::Mode;
use crate::group::{Group, GroupSpec};
use crate::members::Members;
use crate::net::PeerId;
use crate::plan::Plans;
use crate::rendezvous::{GroupCard, meet};
use crate::signals;
use crate::state::GroupState;
use crate::store::Store;
use crate::sync::{Condvar, Mutex};

/// How often a waiter looks for signals.
const TICK: Duration = Duration::from_millis(50);
/// How long connecting holds the endpoint before other threads that make groups have a turn.
const CONNECT_SLICE: Duration = Duration::from_millis(200);
/// Spinning when every rank of the host has a core of its own.
const SPIN_OWN_CORE: Duration = Duration::from_micros(200);
/// Yielding when ranks share cores: each look gives the core away, so more of them cost nobody anything.
const SPIN_SHARED_CORE: Duration = Duration::from_micros(100);
/// Looks before the first yield when ranks share cores.
const LOOKS_BEFORE_YIELD: u32 = 20;

/// One per process in production; several in one process in tests.
pub struct Engine {
    core: Mutex<Core>,
    parts: OnceLock<Parts>,
    opening: Mutex<()>,
    /// Settings of process scope, fixed by the first group.
    config: Config,
    pool: CompletionPool,
    turn: Mutex<Turn>,
    background: Condvar,
    /// Most ranks that one host has in any group: tells whether cores are shared.
    ranks_per_host: AtomicU32,
    groups_made: AtomicU64,
    cores: u32,
    /// Length of a waiter's tick in milliseconds; 0: none.
    tick_ms: AtomicU64,
    /// For the background thread.
    me: Weak<Engine>,
}

/// What exists from the first group on.
struct Parts {
    poller: Poller,
    waker: Arc<Waker>,
    endpoint: Mutex<Endpoint>,
}

#[derive(Default)]
struct Turn {
    /// A thread is parked in the poller, or about to be.
    driver: bool,
    /// The call that the driver waits for, if it waits for one.
    driver_call: Option<*const Call>,
    /// Sleepers, oldest first.
    waiters: Vec<Arc<Sleeper>>,
    background_started: bool,
    /// The background thread is asked to drive.
    background_wanted: bool,
    background_stopped: bool,
    stopping: bool,
}

// SAFETY: the pointer is only compared, never followed.
unsafe impl Send for Turn {}

/// A thread that sleeps on a call and can be woken to drive.
struct Sleeper {
    call: *const Call,
}

// SAFETY: the call outlives its registration: the waiting thread borrows it and removes the entry before it returns,
// and entries are used under the lock of `Turn` only.
unsafe impl Send for Sleeper {}
// SAFETY: as above.
unsafe impl Sync for Sleeper {}

impl Engine {
    /// An engine without threads, descriptors or memory; they come with the first group.
    pub fn new(config: Config) -> Arc<Self> {
        let pool = CompletionPool::default();
        // Segments hold whole elements of every dtype.
        let segment = (config.segment_bytes / 64 * 64).max(64);
        Arc::new_cyclic(|me| Self {
            core: Mutex::new(Core::new(pool.clone(), segment)),
            parts: OnceLock::new(),
            opening: Mutex::new(()),
            config,
            pool,
            turn: Mutex::default(),
            background: Condvar::new(),
            ranks_per_host: AtomicU32::new(1),
            groups_made: AtomicU64::new(0),
            cores: std::thread::available_parallelism().map_or(1, |n| n.get() as u32),
            tick_ms: AtomicU64::new(TICK.as_millis() as u64),
            me: me.clone(),
        })
    }

    /// The settings that the engine was made with.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Switches the waiters' periodic look at signals off: without it a lost wake-up is a hang and not a delay. For
    /// tests.
    pub fn without_tick(&self) {
        self.tick_ms.store(0, Ordering::Relaxed);
    }

    // ---- groups

    /// Makes a group: meets the other ranks in the store, connects to those not yet connected.
    ///
    /// # Errors
    /// `Timeout` listing the missing ranks, `Configuration`, `Rendezvous`, `Network`; `Aborted` when interrupted or in a
    /// forked child.
    pub fn create_group(
        self: &Arc<Self>,
        spec: GroupSpec,
        store: &dyn Store,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Arc<Group>> {
        self.make_group(&spec, store, interrupt).map_err(|error| error.in_group(&spec.name).on_rank(spec.rank))
    }

    fn make_group(
        self: &Arc<Self>,
        spec: &GroupSpec,
        store: &dyn Store,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Arc<Group>> {
        if spec.rank.0 >= spec.world {
            return Err(Error::invalid_argument(format!("rank {} does not fit a world of {}", spec.rank, spec.world)));
        }
        self.check_process_settings(&spec.config)?;
        let deadline = Instant::now().checked_add(spec.timeout).unwrap_or_else(far);
        let parts = self.parts(spec.master)?;
        let card = parts.endpoint.lock().card().clone();
        let counter = self.groups_made.fetch_add(1, Ordering::Relaxed);
        let mine = GroupCard { counter, agreed: spec.config.agreed_text(), card };
        let cards = meet(spec, &mine, store, deadline, interrupt)?;
        let peers = self.connect(parts, spec, &mine, &cards, deadline, interrupt)?;

        let hosts = host_indices(&cards);
        let most = hosts.iter().map(|host| hosts.iter().filter(|other| *other == host).count()).max().unwrap_or(1);
        self.ranks_per_host.fetch_max(most as u32, Ordering::Relaxed);
        let name: Arc<str> = spec.name.as_str().into();
        let id = group_id(&cards);
        let members = Members::new(peers, spec.config.eager_bytes);
        let plans = Plans::new(Topology::new(hosts), spec.world, spec.rank);
        let state = GroupState::new(id, name.clone(), spec.rank, spec.config.clone(), spec.timeout, members, plans);
        let now = Instant::now();
        self.with_core(|core| {
            for (rank, card) in cards.iter().enumerate() {
                tracing::info!(
                    group = spec.name,
                    rank,
                    host = card.card.hostname,
                    pid = card.card.pid,
                    link = core.net.describe(state.members.peer(Rank(rank as u32))),
                    "connected"
                );
            }
            core.add_group(state, now);
        });
        Ok(Group::new(self.clone(), id, name, spec.rank, spec.world))
    }

    fn check_process_settings(&self, config: &Config) -> Result<()> {
        let Some((row, mine, theirs)) = self.config.process_differences(config).into_iter().next() else {
            return Ok(());
        };
        Err(Error::configuration(format!(
            "{}: this process already runs with `{mine}` and cannot change to `{theirs}`; give the first group of the \
             process this option",
            row.option
        )))
    }

    fn parts(&self, master: Option<IpAddr>) -> Result<&Parts> {
        if accl_transport::forked() {
            return Err(Error::aborted(
                "this process was forked from one that uses accl, and its connections do not survive a fork; start the \
                 child with spawn",
            ));
        }
        if let Some(parts) = self.parts.get() {
            return Ok(parts);
        }
        let _one = self.opening.lock();
        if self.parts.get().is_none() {
            let poller = Poller::new()?;
            let waker = poller.waker();
            let mut settings = Settings::from_config(&self.config);
            settings.master = master;
            let endpoint = Endpoint::new(settings, waker.clone())?;
            let _ = self.parts.set(Parts { poller, waker, endpoint: Mutex::new(endpoint) });
        }
        self.parts.get().ok_or_else(|| Error::internal("the endpoint was not kept"))
    }

    fn connect(
        &self,
        parts: &Parts,
        spec: &GroupSpec,
        mine: &GroupCard,
        cards: &[GroupCard],
        deadline: Instant,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<PeerId>> {
        loop {
            // Another thread may connect to the same peers: what is missing is asked anew each time.
            let missing: Vec<usize> = self.with_core(|core| {
                (0..cards.len()).filter(|&rank| core.net.find(&cards[rank].card).is_none()).collect()
            });
            if missing.is_empty() {
                break;
            }
            if let Some(own) = missing.iter().copied().find(|&rank| cards[rank].card.uuid == mine.card.uuid) {
                if own != spec.rank.index() {
                    return Err(Error::rendezvous(format!("ranks {own} and {} are the same process", spec.rank)));
                }
                let frame = self.config.segment_bytes as usize + accl_transport::frame::OVERHEAD_BYTES;
                let link = accl_transport::loopback::self_link(frame, parts.waker.clone());
                self.with_core(|core| core.add_link(mine.card.clone(), Box::new(link), &parts.poller))?;
                continue;
            }
            let wanted: Vec<_> = missing.iter().map(|&rank| cards[rank].card.clone()).collect();
            let mut endpoint = parts.endpoint.lock();
            let slice = deadline.min(Instant::now() + CONNECT_SLICE);
            let result = endpoint.connect(&wanted, slice, interrupt);
            for warning in endpoint.take_warnings() {
                tracing::warn!("{warning}");
            }
            drop(endpoint);
            match result {
                Ok(links) => {
                    for (card, link) in wanted.into_iter().zip(links) {
                        self.with_core(|core| match core.net.find(&card) {
                            Some(id) => Ok(id),
                            None => core.add_link(card, link, &parts.poller),
                        })?;
                    }
                }
                Err(failed) if failed.error.kind == ErrorKind::Timeout && Instant::now() < deadline => {}
                Err(failed) => {
                    let who: Vec<String> = failed
                        .missing
                        .iter()
                        .map(|m| {
                            let rank = missing[m.index];
                            format!("rank {rank} ({}): {}", cards[rank].card.place(), m.why)
                        })
                        .collect();
                    return Err(Error::new(failed.error.kind, format!("{}; {}", failed.error.message, who.join("; "))));
                }
            }
        }
        self.with_core(|core| {
            cards
                .iter()
                .map(|card| {
                    core.net.find(&card.card).ok_or_else(|| Error::peer_lost(format!("{} left", card.card.place())))
                })
                .collect()
        })
    }

    /// This process as its peers see it.
    ///
    /// # Errors
    /// As [`Engine::create_group`], when the endpoint cannot be opened.
    pub fn card(&self) -> Result<Card> {
        Ok(self.parts(None)?.endpoint.lock().card().clone())
    }

    /// Takes a link to a peer that was made by other means than the endpoint; groups made later use it.
    ///
    /// # Errors
    /// `Exhausted` when its descriptors cannot be watched.
    pub fn adopt_link(&self, card: Card, link: Box<dyn Link>) -> Result<()> {
        let parts = self.parts(None)?;
        self.with_core(|core| core.add_link(card, link, &parts.poller)).map(drop)
    }

    /// What ends a wait of this engine: for links made by other means than the endpoint.
    ///
    /// # Errors
    /// As [`Engine::card`].
    pub fn waker(&self) -> Result<Arc<Waker>> {
        Ok(self.parts(None)?.waker.clone())
    }

    // ---- access to the core

    /// Runs `f` under the lock.
    pub(crate) fn with_core<R>(&self, f: impl FnOnce(&mut Core) -> R) -> R {
        f(&mut self.core.lock())
    }

    /// One pass, waiting for the lock.
    pub(crate) fn pass_now(&self) {
        let mut core = self.core.lock();
        core.pass(Instant::now());
        let wake = core.must_wake_driver(None);
        drop(core);
        self.wake_driver_if(wake);
    }

    /// One pass unless somebody else is at it.
    pub(crate) fn try_pass(&self) {
        let Some(mut core) = self.core.try_lock() else { return };
        let moved = core.pass(Instant::now());
        let wake = core.must_wake_driver(None);
        drop(core);
        if moved || wake {
            self.wake_driver_if(wake);
        }
    }

    pub(crate) fn completions(&self) -> &CompletionPool {
        &self.pool
    }

    /// Runs `body` on a thread that may block on calls.
    pub fn spawn_blocking(&self, body: Box<dyn FnOnce() + Send>) {
        self.pool.post(body);
    }

    /// After a submission: one pass for an asynchronous call, and a driver if there is none.
    pub(crate) fn submitted(&self, call: &Arc<Call>, mode: Mode) {
        if mode == Mode::Async && !call.is_done() {
            self.try_pass();
        }
        // A waiter drives for its own call; nobody does for an asynchronous one, or for bytes that the kernel did not
        // take and whose call is done.
        if call.is_done() == (mode == Mode::Blocking) && self.with_core(|core| core.has_work()) {
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
        if let Some(parts) = self.parts.get() {
            parts.waker.wake();
        }
    }

    // ---- waiting

    pub(crate) fn wait(
        self: &Arc<Self>,
        call: &Call,
        timeout: Option<Duration>,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Waited {
        if let Some(outcome) = call.outcome() {
            return outcome;
        }
        if accl_transport::forked() {
            return Waited::Failed(call.placed(Error::aborted("the call was made before this process was forked")));
        }
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        if let Some(outcome) = self.spin(call, until) {
            return outcome;
        }
        let outcome = self.wait_slowly(call, timeout, until, interrupt);
        self.leave_turn(call);
        outcome
    }

    /// Looks again and again for a short while.
    fn spin(&self, call: &Call, until: Option<Instant>) -> Option<Waited> {
        let shared = self.ranks_per_host.load(Ordering::Relaxed) > self.cores;
        let budget = match self.config.spin_us {
            Some(us) => Duration::from_micros(us),
            None if shared => SPIN_SHARED_CORE,
            None => SPIN_OWN_CORE,
        };
        let start = Instant::now();
        let mut looks = 0_u32;
        loop {
            let now = Instant::now();
            if let Some(mut core) = self.core.try_lock() {
                let moved = core.pass(now);
                let wake = core.must_wake_driver(None);
                drop(core);
                if moved {
                    looks = 0;
                }
                if moved || wake {
                    self.wake_driver_if(wake);
                }
            }
            if let Some(outcome) = call.outcome() {
                return Some(outcome);
            }
            if now.duration_since(start) >= budget || until.is_some_and(|until| now >= until) {
                return None;
            }
            looks += 1;
            if shared && looks > LOOKS_BEFORE_YIELD {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
    }

    fn wait_slowly(
        &self,
        call: &Call,
        timeout: Option<Duration>,
        until: Option<Instant>,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Waited {
        loop {
            if let Some(outcome) = call.outcome() {
                return outcome;
            }
            let now = Instant::now();
            if until.is_some_and(|until| now >= until) {
                return Waited::TimedOut(self.wait_timed_out(call, timeout.unwrap_or_default(), now));
            }
            if interrupt() {
                return Waited::Interrupted;
            }
            let tick = match self.tick_ms.load(Ordering::Relaxed) {
                0 => None,
                ms => Some(now + Duration::from_millis(ms)),
            };
            let slice = [until, tick].into_iter().flatten().min();
            if self.take_turn(call) {
                self.drive(Some(call), slice);
            } else {
                call.sleep_until(slice);
            }
        }
    }

    fn wait_timed_out(&self, call: &Call, timeout: Duration, now: Instant) -> Error {
        let text = self.with_core(|core| {
            core.with_group(call.group_id, now, |group, hands| {
                let awaited = group.awaited(call);
                group.timeout_text(call, &awaited, timeout, hands.net)
            })
        });
        call.placed(Error::timeout(text.unwrap_or_else(|| format!("Timed out waiting {}ms", timeout.as_millis()))))
    }

    /// Parks in the poller once, with a pass before and after. Only the driver calls this.
    fn drive(&self, call: Option<&Call>, until: Option<Instant>) {
        let Some(parts) = self.parts.get() else { return };
        let now = Instant::now();
        let until = {
            let mut core = self.core.lock();
            if core.pass(now) {
                return;
            }
            core.check(now);
            if call.is_some_and(Call::is_done) || (call.is_none() && !core.has_work()) {
                return;
            }
            // Everything that could be done without the peers has been: what is left waits for frames or for room.
            if core.net.prepare_park() {
                core.net.unpark();
                return;
            }
            let until = match (until, core.next_deadline()) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
            core.parked = Some(until.unwrap_or_else(far));
            until
        };
        // A failure to wait shows as a loop that does not sleep; deadlines still end it.
        let _ = parts.poller.wait(until.map(|until| until.saturating_duration_since(now)));
        let mut core = self.core.lock();
        core.parked = None;
        core.net.unpark();
        let now = Instant::now();
        core.pass(now);
        core.check(now);
    }

    // ---- the election

    /// Makes the calling thread the driver, or puts it on the list of sleepers.
    fn take_turn(&self, call: &Call) -> bool {
        let mut turn = self.turn.lock();
        let me: *const Call = call;
        if turn.driver && turn.driver_call != Some(me) {
            if !turn.waiters.iter().any(|sleeper| sleeper.call == me) {
                turn.waiters.push(Arc::new(Sleeper { call: me }));
            }
            return false;
        }
        turn.driver = true;
        turn.driver_call = Some(me);
        turn.waiters.retain(|sleeper| sleeper.call != me);
        true
    }

    /// Ends a thread's part in the election; somebody else drives if there is need.
    fn leave_turn(&self, call: &Call) {
        let me: *const Call = call;
        let mut turn = self.turn.lock();
        turn.waiters.retain(|sleeper| sleeper.call != me);
        if turn.driver && turn.driver_call != Some(me) {
            return;
        }
        turn.driver = false;
        turn.driver_call = None;
        self.appoint(&mut turn);
        drop(turn);
        if self.with_core(|core| core.has_work()) {
            self.ensure_driver();
        }
    }

    /// Wakes the oldest sleeper to drive.
    fn appoint(&self, turn: &mut Turn) {
        if let Some(sleeper) = turn.waiters.first() {
            // SAFETY: see `Sleeper`: the entry is there, so its thread still borrows the call.
            unsafe { &*sleeper.call }.nudge();
        }
    }

    /// Sees to it that somebody makes progress while nobody waits.
    fn ensure_driver(&self) {
        let mut turn = self.turn.lock();
        if turn.driver {
            return;
        }
        if !turn.waiters.is_empty() {
            self.appoint(&mut turn);
            return;
        }
        if turn.stopping {
            return;
        }
        turn.background_wanted = true;
        if turn.background_started {
            self.background.notify_all();
            return;
        }
        turn.background_started = true;
        drop(turn);
        self.start_background();
    }

    fn start_background(&self) {
        let me = self.me.clone();
        let spawned = std::thread::Builder::new().name("accl-progress".into()).spawn(move || {
            signals::block_all();
            if let Some(engine) = me.upgrade() {
                engine.background();
            }
        });
        if spawned.is_err() {
            self.turn.lock().background_started = false;
        }
    }

    fn background(&self) {
        loop {
            {
                let mut turn = self.turn.lock();
                while !turn.stopping && (turn.driver || !turn.background_wanted) {
                    self.background.wait(&mut turn);
                }
                if turn.stopping {
                    turn.background_stopped = true;
                    self.background.notify_all();
                    return;
                }
                turn.driver = true;
                turn.driver_call = None;
            }
            loop {
                self.drive(None, None);
                let has_work = self.with_core(|core| core.has_work());
                let mut turn = self.turn.lock();
                if !has_work || turn.stopping || !turn.waiters.is_empty() {
                    turn.driver = false;
                    turn.background_wanted = false;
                    self.appoint(&mut turn);
                    break;
                }
            }
            // A call that came in between found a driver and relied on it.
            if self.with_core(|core| core.has_work()) {
                let mut turn = self.turn.lock();
                if !turn.driver && turn.waiters.is_empty() {
                    turn.background_wanted = true;
                }
            }
        }
    }

    /// After another thread's pass: the driver must not sleep on when its call may have ended, or when it `must` look.
    fn wake_driver_if(&self, must: bool) {
        // A driver that is not parked yet looks once more before it parks, and at least once a tick.
        let turn = if must { Some(self.turn.lock()) } else { self.turn.try_lock() };
        let Some(turn) = turn else { return };
        if turn.driver && (must || turn.driver_call.is_some()) {
            drop(turn);
            self.kick();
        }
    }

    /// Ends everything in bounded time: groups fail, peers are told, threads stop. For the end of the process.
    pub fn shutdown(&self) {
        if accl_transport::forked() {
            return;
        }
        {
            let mut turn = self.turn.lock();
            turn.stopping = true;
            self.background.notify_all();
        }
        self.kick();
        let now = Instant::now();
        if let Some(mut core) = self.core.try_lock_for(Duration::from_secs(1)) {
            let ids: Vec<u64> = core.groups.keys().copied().collect();
            for id in ids {
                core.with_group(id, now, |group, hands| group.leave(hands));
                core.remove_group(id);
            }
            core.say_goodbye();
        }
        self.pool.stop(Duration::from_secs(1));
        let mut turn = self.turn.lock();
        if turn.background_started {
            let stopped = |turn: &mut Turn| !turn.background_stopped;
            self.background.wait_while_for(&mut turn, stopped, Duration::from_secs(1));
        }
    }
}

/// Identity of the group, the same on all ranks: no two groups have the same processes with the same counters.
fn group_id(cards: &[GroupCard]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut add = |bytes: &[u8]| {
        for &byte in bytes {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    };
    for card in cards {
        add(&card.card.uuid);
        add(&card.counter.to_le_bytes());
    }
    // 0 means the process as a whole.
    hash.max(1)
}

/// For each rank the number of its host, hosts numbered by first appearance.
fn host_indices(cards: &[GroupCard]) -> Vec<u32> {
    let mut hosts: Vec<&str> = Vec::new();
    cards
        .iter()
        .map(|card| {
            let id = card.card.host_id.as_str();
            let known = hosts.iter().position(|host| *host == id).unwrap_or_else(|| {
                hosts.push(id);
                hosts.len() - 1
            });
            known as u32
        })
        .collect()
}

fn far() -> Instant {
    Instant::now() + Duration::from_secs(365 * 24 * 3600)
}
