//! The engine of one process: its endpoint, its links, its groups, its beginning and end.
//!
//! Owns the settings and the endpoint of the process. Who makes progress, and when, is in `driver`; how groups are made, in
//! `session`. Read [`Engine`] first.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use accl_schedule::cost::Machine;
use accl_transport::{Endpoint, Poller, Settings, Waker, Watched};
use accl_types::config::{Config, WorkerCount};
use accl_types::{Error, Moment, Result};
use accl_wire::EndpointInfo;

use crate::device::{Attended, OpenBus};
use crate::driver::waiting::{Delivery, lasting};
use crate::driver::{Driver, Polling};
use crate::session::connector::Connector;
use crate::session::cores::Crowd;
use crate::session::rendezvous::Makings;
use crate::sidestep::Workers;
use crate::sync::Mutex;
use crate::time;
use accl_executor::group::GroupState;
use accl_executor::peers::Mark;

/// Lanes that a process offers which finds out how many it has use for.
const MOST_AUTO_LANES: usize = 16;

/// How long the end of a group or of the process waits until the peers' hosts have what calls that are done have sent, and
/// how long when calls have failed anyway.
pub(crate) const LAST_BYTES: Duration = Duration::from_secs(30);
pub(crate) const LAST_BYTES_FAILED: Duration = Duration::from_secs(2);
/// How long the end of a group or of the process waits for collectives that were made asynchronously.
pub(crate) const LAST_CALLS: Duration = Duration::from_secs(30);
/// How long the end of the process waits for room for its goodbyes.
const LAST_GOODBYES: Duration = Duration::from_secs(2);
/// Between looks for that room.
const PAUSE_AT_END: Duration = Duration::from_millis(1);
/// How long it waits for a thread that holds the driver's lock.
const LOCK_AT_END: Duration = Duration::from_secs(1);
/// How long it waits for the thread that makes links.
const LAST_CONNECTIONS: Duration = Duration::from_secs(1);
/// How long it waits for devices whose last call has failed.
const LAST_DEVICES: Duration = Duration::from_millis(900);
/// How long it waits for callbacks that run.
const LAST_CALLBACKS: Duration = Duration::from_secs(30);

/// One per process in production; several in one process in tests.
pub struct Engine {
    pub(crate) driver: Arc<Driver>,
    /// Those of the lanes beside the first, from the first group on.
    other_lanes: OnceLock<Vec<Arc<Driver>>>,
    /// See [`Engine::set_least_part_bytes`]; 0: not set.
    least_part_bytes: AtomicU64,
    /// How peers reach this process, and what makes links; from the first group on.
    connecting: OnceLock<(EndpointInfo, Connector)>,
    opening: Mutex<()>,
    /// Settings of process scope, fixed by the first group.
    pub(crate) config: Config,
    pub(crate) groups_made: AtomicU64,
    /// Of this host, in the group that has most ranks here.
    pub(crate) crowd: Mutex<Crowd>,
    pub(crate) makings: Makings,
    /// The jobs that this process is in, each over a store of its own.
    pub(crate) jobs: Mutex<Vec<Job>>,
    /// The machine's constants, found when they are first needed.
    pub(crate) machine: OnceLock<Machine>,
    /// Finds them.
    pub(crate) find_machine: fn(&Config) -> Machine,
    /// Opens devices.
    opener: OnceLock<Arc<dyn OpenBus>>,
    pub(crate) devices: Attended,
    /// What has libraries do collectives.
    pub(crate) sidestep: Workers,
}

/// What exists from the first group on.
#[derive(Clone, Copy)]
pub(crate) struct Parts<'a> {
    pub(crate) poller: &'a Poller,
    pub(crate) waker: &'a Arc<Waker>,
    pub(crate) info: &'a EndpointInfo,
    pub(crate) connector: &'a Connector,
}

/// The processes of a job: those that the ranks of its sub-groups are numbered by.
pub(crate) struct Job {
    /// Identity of the store in which its ranks have met, and those of its sub-groups meet.
    pub(crate) store: u64,
    /// Number of its group.
    pub(crate) group: u64,
    /// The processes by rank.
    pub(crate) processes: Vec<[u8; 16]>,
}

/// Most bytes of a frame, which holds whole elements of every dtype.
fn segment(config: &Config) -> u64 {
    (config.segment_bytes / 64 * 64).max(64)
}

/// What wakes a driver, which has something to sleep in from now on.
fn waker_of(driver: &Driver) -> Result<Arc<Waker>> {
    // The poller of an attempt that failed is the one that waits sleep in.
    if let Some(polling) = driver.polling() {
        return Ok(polling.waker.clone());
    }
    let poller = Poller::new()?;
    let waker = poller.waker();
    driver.set_polling(Polling { poller, waker: waker.clone() });
    Ok(waker)
}

impl Engine {
    /// An engine without threads, descriptors or memory; they come with the first group. `find_machine` finds the constants that
    /// algorithms are chosen by, once, when the first group of several ranks is made here as rank 0.
    pub fn new(config: Config, find_machine: fn(&Config) -> Machine) -> Arc<Self> {
        Arc::new(Self {
            driver: Driver::new(segment(&config), config.spin_us),
            other_lanes: OnceLock::new(),
            least_part_bytes: AtomicU64::new(0),
            connecting: OnceLock::new(),
            opening: Mutex::new(()),
            config,
            groups_made: AtomicU64::new(0),
            crowd: Mutex::default(),
            makings: Makings::default(),
            jobs: Mutex::default(),
            machine: OnceLock::new(),
            find_machine,
            opener: OnceLock::new(),
            devices: Attended::default(),
            sidestep: Workers::default(),
        })
    }

    /// Groups that are made later open their devices so. It is said once.
    pub fn open_devices_with(&self, opener: Arc<dyn OpenBus>) {
        let _ = self.opener.set(opener);
    }

    pub(crate) fn opener(&self) -> Option<Arc<dyn OpenBus>> {
        self.opener.get().cloned()
    }

    /// The settings that the engine was made with.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Whether this process is a forked child of the one that made the engine. A child may make an engine of its own.
    pub(crate) fn is_forked(&self) -> bool {
        self.driver.is_forked()
    }

    /// Calls are cut into parts of so many bytes and more, where there are lanes for them, whatever they are predicted to take; the same on all
    /// ranks. For tests.
    pub fn set_least_part_bytes(&self, bytes: u64) {
        self.least_part_bytes.store(bytes.max(1), Ordering::Relaxed);
    }

    pub(crate) fn least_part_bytes(&self) -> Option<u64> {
        Some(self.least_part_bytes.load(Ordering::Relaxed)).filter(|&bytes| bytes > 0)
    }

    /// Switches the periodic looks off, a waiter's at signals and the driver's at silent hosts: without them a lost wake-up
    /// is a hang and not a delay. For tests.
    pub fn without_tick(&self) {
        self.lanes().for_each(|lane| lane.without_tick());
    }

    /// How often a thread of this engine has slept in the poller. For tests.
    pub fn parks(&self) -> u64 {
        self.driver.parks()
    }

    pub(crate) fn parts(&self, master: Option<IpAddr>) -> Result<Parts<'_>> {
        if self.is_forked() {
            return Err(Error::aborted(
                "this process was forked from one that uses accl, and its connections do not survive a fork; start the \
                 child with spawn",
            ));
        }
        if let Some(parts) = self.opened() {
            return Ok(parts);
        }
        let _one = self.opening.lock();
        if self.opened().is_none() {
            let waker = waker_of(&self.driver)?;
            let mut settings = Settings::from_config(&self.config);
            settings.master = master;
            let mut endpoint = Endpoint::new(settings, waker)?;
            let others = self.other_lanes.get_or_init(|| self.open_lanes());
            for lane in others {
                endpoint.add_lane(&waker_of(lane)?);
            }
            let info = endpoint.info().clone();
            let _ = self.connecting.set((info, Connector::new(endpoint, self.lanes())?));
        }
        self.opened().ok_or_else(|| Error::internal("the endpoint was not kept"))
    }

    /// Drivers of the lanes beside the first: fewer than were asked for if the system has no room for more.
    fn open_lanes(&self) -> Vec<Arc<Driver>> {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let (wanted, is_auto) = match self.config.worker_count {
            WorkerCount::Exactly(count) => (count as usize, false),
            WorkerCount::Auto => (cores.min(MOST_AUTO_LANES) - 1, true),
        };
        let named = self.config.worker_affinity.len();
        if wanted >= cores && wanted > named && !is_auto {
            tracing::warn!(
                "ACCL_WORKER_COUNT asks for {wanted} threads besides the caller's, and this process may use {cores} cores: those that share a core \
                 gain nothing"
            );
        }
        if named > 0 && wanted == 0 && !is_auto {
            tracing::warn!(
                "ACCL_WORKER_AFFINITY has no effect, since ACCL_WORKER_COUNT adds no threads: it is 0, which is its default"
            );
        }
        let open = || {
            let lane = Driver::new(segment(&self.config), self.config.spin_us);
            waker_of(&lane)?;
            // The first group that has use for it starts it.
            if !is_auto {
                lane.start_thread()?;
            }
            Ok::<_, Error>(lane)
        };
        let mut lanes = Vec::new();
        while lanes.len() < wanted {
            match open() {
                Ok(lane) => lanes.push(lane),
                Err(_) if is_auto => break,
                Err(error) => {
                    let got = lanes.len();
                    tracing::warn!("ACCL_WORKER_COUNT asks for {wanted} threads, and there are {got}: {error}");
                    break;
                }
            }
        }
        let all: Vec<_> = std::iter::once(&self.driver).chain(&lanes).map(Arc::downgrade).collect();
        if !lanes.is_empty() {
            all.iter().filter_map(Weak::upgrade).for_each(|lane| lane.set_lanes(all.clone()));
        }
        lanes
    }

    /// The drivers of all lanes, the first one first.
    pub(crate) fn lanes(&self) -> impl Iterator<Item = &Arc<Driver>> {
        std::iter::once(&self.driver).chain(self.other_lanes.get().into_iter().flatten())
    }

    /// The lanes beside the first.
    pub(crate) fn other_lanes(&self) -> &[Arc<Driver>] {
        self.other_lanes.get().map_or(&[], Vec::as_slice)
    }

    fn opened(&self) -> Option<Parts<'_>> {
        let ((info, connector), Polling { poller, waker }) = (self.connecting.get()?, self.driver.polling()?);
        Some(Parts { poller, waker, info, connector })
    }

    /// This process as its peers see it.
    ///
    /// # Errors
    /// As [`Engine::create_group`], when the endpoint cannot be opened.
    pub fn info(&self) -> Result<EndpointInfo> {
        Ok(self.parts(None)?.info.clone())
    }

    /// Takes a link to a peer that was made by other means than the endpoint; groups made later use it.
    ///
    /// # Errors
    /// `Exhausted` when its descriptors cannot be watched.
    pub fn adopt_link(&self, info: EndpointInfo, mut link: Box<dyn Watched>) -> Result<()> {
        let parts = self.parts(None)?;
        // Under the lock: a driver that the first event wakes must find the link.
        self.driver.with_core(|core| {
            let slot = parts.poller.watch(&mut link)?;
            core.net.add(&info, link, slot);
            Ok(())
        })
    }

    /// What ends a wait of this engine: for links made by other means than the endpoint.
    ///
    /// # Errors
    /// As [`Engine::info`].
    pub fn waker(&self) -> Result<Arc<Waker>> {
        Ok(self.parts(None)?.waker.clone())
    }

    /// Ends all links and takes no more, without a word to anybody, as the system does when a process dies. For tests.
    pub fn vanish(&self) {
        if let Some((_, connector)) = self.connecting.get() {
            connector.stop(LAST_CONNECTIONS);
        }
        let dead = Error::internal("this engine has vanished");
        for lane in self.lanes() {
            lane.with_core(|core| {
                core.net.linked().to_vec().into_iter().for_each(|id| core.net.mark_gone(id, dead.clone()));
            });
        }
    }

    /// Takes a peer without a link for gone, as when nothing has been heard of it for long. For tests.
    pub fn give_up(&self, peer: &EndpointInfo) {
        self.driver.lose(&peer.uuid, Error::peer_lost("no link to it within 30 s"));
    }

    /// Runs `body` on a thread that may block on calls.
    ///
    /// # Errors
    /// `Exhausted` when the system has no thread for it; `Aborted` when the engine has ended.
    pub fn spawn_blocking(&self, body: Box<dyn FnOnce() + Send>) -> Result<()> {
        self.driver.refuse_if_forked()?;
        self.driver.completions().expect()?;
        self.driver.completions().post(body);
        Ok(())
    }

    /// Ends everything in bounded time: groups fail, peers are told and get what was sent to them, threads stop. For the end of
    /// the process.
    pub fn shutdown(&self) {
        self.shutdown_unless(false, &mut || false);
    }

    /// As [`Engine::shutdown`]; each wait ends when `interrupt` returns true. With `await_calls` collectives that were made
    /// asynchronously have half a minute to end well.
    pub fn shutdown_unless(&self, await_calls: bool, interrupt: &mut dyn FnMut() -> bool) {
        if self.is_forked() {
            return;
        }
        let interrupt = &mut lasting(interrupt);
        if await_calls {
            let groups = self
                .driver
                .try_lock_until(time::now() + LOCK_AT_END)
                .map(|core| core.groups().map(GroupState::id).collect());
            let groups: Vec<u64> = groups.unwrap_or_default();
            self.driver.await_calls(&groups, time::now() + LAST_CALLS, interrupt);
        }
        self.lanes().for_each(|lane| lane.stop_background());
        let until = time::now() + LAST_CONNECTIONS;
        self.lanes().for_each(|lane| link_to_send(lane, until, interrupt));
        if let Some((_, connector)) = self.connecting.get() {
            connector.stop(LAST_CONNECTIONS);
        }
        let now = time::now();
        let left: Vec<(&Arc<Driver>, Left)> =
            self.lanes().filter_map(|lane| Some((lane, leave_all(lane, now)?))).collect();
        let has_failed = left.iter().any(|(_, left)| left.has_failed);
        let patience = if has_failed { LAST_BYTES_FAILED } else { LAST_BYTES };
        let deliveries = left.into_iter().map(|(lane, left)| lane.await_delivery(left.sent, now + patience, interrupt));
        if deliveries.fold(false, |is_late, delivery| is_late | (delivery == Delivery::Late)) {
            tracing::warn!(
                "the process ends, and {} ms later a peer has not yet taken what calls that are done have sent to it",
                patience.as_millis()
            );
        }
        for device in self.devices.leave_all(time::now() + LAST_DEVICES) {
            tracing::warn!("the process ends while device `{device}` is still busy: what it does now nobody can end");
        }
        let until = time::now() + LAST_GOODBYES;
        self.lanes().for_each(|lane| send_the_rest(lane, until));
        let until = time::now() + LOCK_AT_END;
        for lane in self.lanes() {
            if let Some(mut core) = lane.try_lock_until(until) {
                let _ = core.guarded(|core| core.net.close_all());
            }
        }
        // What runs there may be code of the caller, which must not go on in an interpreter that ends.
        let left = self.driver.completions().drain(Instant::now() + LAST_CALLBACKS, interrupt);
        if left > 0 {
            tracing::warn!(
                "the process ends while {left} callbacks of calls have not ended; wait for their futures before the end, since \
                 a callback that still runs when Python ends can abort the process"
            );
        }
        self.driver.completions().stop(Duration::from_secs(1));
        self.lanes().for_each(|lane| lane.await_background(Duration::from_secs(1)));
    }
}

/// What remains of the groups of a lane.
struct Left {
    sent: Vec<Mark>,
    has_failed: bool,
}

/// Leaves all groups of a lane, and tells its peers; `None`: a thread keeps the lock.
fn leave_all(lane: &Driver, now: Moment) -> Option<Left> {
    let mut core = lane.try_lock_until(time::now() + LOCK_AT_END)?;
    let ids: Vec<u64> = core.groups().map(GroupState::id).collect();
    let has_failed = core.groups().any(|group| group.poison().is_some());
    let sent: Vec<Mark> = core.net.linked().iter().map(|&id| core.net.mark(id)).collect();
    let _ = core.guarded(|core| {
        for id in ids {
            core.with_group(id, now, |group, context| group.leave(context));
            core.remove_group(id);
        }
        core.say_goodbye();
    });
    Some(Left { sent, has_failed })
}

/// Waits until everything has left a lane of this process: calls that were done relied on it.
fn send_the_rest(lane: &Driver, deadline: Moment) {
    while time::now() < deadline {
        let Some(mut core) = lane.try_lock_until(deadline) else { return };
        let unsent = core.guarded(|core| {
            core.net.flush_all();
            core.net.has_unsent()
        });
        drop(core);
        if unsent != Ok(true) {
            return;
        }
        // Not in the poller: another thread may sleep there, and the news are its own.
        std::thread::sleep(PAUSE_AT_END);
    }
}

/// Calls of a lane that are done may have sent something to peers to which there is no link yet: waits for that, at most until then.
fn link_to_send(lane: &Driver, until: Moment, interrupt: &mut dyn FnMut() -> bool) {
    let Some(core) = lane.try_lock_until(until) else { return };
    let has_failed = core.groups().any(|group| group.poison().is_some());
    let marks = core.net.unlinked_with_queue().into_iter().map(|peer| core.net.mark(peer)).collect();
    drop(core);
    if !has_failed {
        let _ = lane.await_delivery(marks, until, interrupt);
    }
}

impl Drop for Engine {
    /// Without its groups nobody can make a call, and whoever drives for peers alone would do so for ever.
    fn drop(&mut self) {
        if !self.is_forked() {
            self.lanes().for_each(|lane| lane.stop_background());
        }
    }
}
