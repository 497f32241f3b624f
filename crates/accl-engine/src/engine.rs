//! The engine of one process: its endpoint, its links, its groups, its start and shutdown.
//!
//! Owns the settings and the endpoint of the process. `driver` decides which thread makes progress and when; `session`
//! creates groups. Read [`Engine`] first.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use accl_schedule::cost::Machine;
use accl_transport::{Endpoint, Poller, Settings, Waker, Watched};
use accl_types::config::{Config, WorkerCount};
use accl_types::{Error, Moment, Result};
use accl_wire::EndpointInfo;

use crate::attempts::Attempts;
use crate::connector::Connector;
use crate::cores::HostLoad;
use crate::driver::waiting::{Delivery, lasting};
use crate::driver::{Driver, Polling};
use crate::offload::OffloadKind;
use crate::sync::Mutex;
use crate::time;
use accl_executor::group::GroupState;
use accl_executor::peers::Mark;

/// Maximum number of lanes of a process with `ACCL_WORKER_COUNT=auto`.
const MOST_AUTO_LANES: usize = 16;

/// Maximum time that the end of a group or process waits for delivery: the peers' hosts must have the data that
/// completed calls sent. The second value applies if calls have failed.
pub(crate) const LAST_BYTES: Duration = Duration::from_secs(30);
pub(crate) const LAST_BYTES_FAILED: Duration = Duration::from_secs(2);
/// Maximum time that the end of a group or process waits for asynchronous collectives.
pub(crate) const LAST_CALLS: Duration = Duration::from_secs(30);
/// Maximum time that the end of the process waits for room for its disconnect messages.
const LAST_DISCONNECTS: Duration = Duration::from_secs(2);
/// Pause between two checks for that room.
const PAUSE_AT_END: Duration = Duration::from_millis(1);
/// Maximum time that the end of the process waits for a thread that holds the driver's lock.
const LOCK_AT_END: Duration = Duration::from_secs(1);
/// Maximum time that the end of the process waits for the thread that makes links.
const LAST_CONNECTIONS: Duration = Duration::from_secs(1);
/// Maximum time that the end of the process waits for offloads, which may still be busy with a failed call.
const LAST_OFFLOADS: Duration = Duration::from_millis(900);
/// Maximum time that the end of the process waits for running callbacks.
const LAST_CALLBACKS: Duration = Duration::from_secs(30);

/// The engine: one per process in production; tests create several in one process.
pub struct Engine {
    pub(crate) driver: Arc<Driver>,
    /// Drivers of all lanes except the first; set when the first group is created.
    other_lanes: OnceLock<Vec<Arc<Driver>>>,
    /// See [`Engine::set_least_part_bytes`]; 0 means not set.
    least_part_bytes: AtomicU64,
    /// This process's endpoint address and the connector that makes links; set when the first group is created.
    connecting: OnceLock<(EndpointInfo, Connector)>,
    opening: Mutex<()>,
    /// Settings of process scope, fixed by the first group.
    pub(crate) config: Config,
    pub(crate) groups_made: AtomicU64,
    /// Number of ranks and cores on this host, from the group with the most ranks here.
    pub(crate) host_load: Mutex<HostLoad>,
    pub(crate) attempts: Attempts,
    /// The jobs that this process belongs to, each with a store of its own.
    pub(crate) jobs: Mutex<Vec<Job>>,
    /// The machine's constants, computed on first use.
    pub(crate) machine: OnceLock<Machine>,
    /// Function that computes the machine's constants.
    pub(crate) find_machine: fn(&Config) -> Machine,
    /// Kinds of components that execute whole calls, in the order of registration.
    offload_kinds: Mutex<Vec<Arc<dyn OffloadKind>>>,
}

/// Parts of the engine that exist once the first group is created.
#[derive(Clone, Copy)]
pub(crate) struct Parts<'a> {
    pub(crate) poller: &'a Poller,
    pub(crate) waker: &'a Arc<Waker>,
    pub(crate) info: &'a EndpointInfo,
    pub(crate) connector: &'a Connector,
}

/// The processes of a job. The ranks of the job's sub-groups are numbered by it.
pub(crate) struct Job {
    /// Identity of the store in which the job's ranks meet; the ranks of its sub-groups meet in the same store.
    pub(crate) store: u64,
    /// Number of the job's group.
    pub(crate) group: u64,
    /// The processes' identities, by rank in the job.
    pub(crate) processes: Vec<[u8; 16]>,
}

/// Returns the maximum bytes of a message in one frame: a multiple of 64, so that it holds whole elements of every
/// dtype.
fn segment(config: &Config) -> u64 {
    (config.segment_bytes / 64 * 64).max(64)
}

/// Returns what wakes a driver, after giving the driver a poller if it has none.
fn waker_of(driver: &Driver) -> Result<Arc<Waker>> {
    // If an earlier attempt failed, its poller is kept: waiting threads may sleep in it.
    if let Some(polling) = driver.polling() {
        return Ok(polling.waker.clone());
    }
    let poller = Poller::new()?;
    let waker = poller.waker();
    driver.set_polling(Polling { poller, waker: waker.clone() });
    Ok(waker)
}

impl Engine {
    /// Creates an engine without threads, descriptors or memory; the first group adds them. `find_machine` computes the
    /// constants for choosing algorithms. It is called once, when this process first creates a group of several ranks
    /// as rank 0.
    pub fn new(config: Config, find_machine: fn(&Config) -> Machine) -> Arc<Self> {
        Arc::new(Self {
            driver: Driver::new(segment(&config), config.spin_us),
            other_lanes: OnceLock::new(),
            least_part_bytes: AtomicU64::new(0),
            connecting: OnceLock::new(),
            opening: Mutex::new(()),
            config,
            groups_made: AtomicU64::new(0),
            host_load: Mutex::default(),
            attempts: Attempts::default(),
            jobs: Mutex::default(),
            machine: OnceLock::new(),
            find_machine,
            offload_kinds: Mutex::default(),
        })
    }

    /// Registers a kind of component that executes whole calls of the groups created later. All ranks must register the
    /// same kinds in the same order.
    ///
    /// # Errors
    /// `InvalidArgument` if the kind's name is taken, or is `host`.
    pub fn add_offload(&self, kind: Arc<dyn OffloadKind>) -> Result<()> {
        let (mut kinds, name) = (self.offload_kinds.lock(), kind.name());
        if name == "host" || kinds.iter().any(|known| known.name() == name) {
            return Err(Error::invalid_argument(format!("the name {name} of an offload is taken; choose another")));
        }
        kinds.push(kind);
        Ok(())
    }

    pub(crate) fn offload_kinds(&self) -> Vec<Arc<dyn OffloadKind>> {
        self.offload_kinds.lock().clone()
    }

    /// Returns the settings that the engine was created with.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns whether this process is a forked child of the process that created the engine. A child may create an
    /// engine of its own.
    pub(crate) fn is_forked(&self) -> bool {
        self.driver.is_forked()
    }

    /// Cuts calls into parts of at least `bytes` bytes wherever there are lanes for the parts, whatever their predicted
    /// time. All ranks must set the same value. For tests.
    pub fn set_least_part_bytes(&self, bytes: u64) {
        self.least_part_bytes.store(bytes.max(1), Ordering::Relaxed);
    }

    pub(crate) fn least_part_bytes(&self) -> Option<u64> {
        Some(self.least_part_bytes.load(Ordering::Relaxed)).filter(|&bytes| bytes > 0)
    }

    /// Switches off periodic checks: a waiter's checks for signals and the driver's checks for unresponsive hosts.
    /// Without them a lost wake-up hangs instead of causing a delay. For tests.
    pub fn without_tick(&self) {
        self.lanes().for_each(|lane| lane.without_tick());
    }

    /// Returns how often a thread of this engine has slept in the poller. For tests.
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
        self.opened().ok_or_else(|| Error::internal("the endpoint was not stored"))
    }

    /// Opens the drivers of the lanes after the first: fewer than requested if the system lacks resources.
    fn open_lanes(&self) -> Vec<Arc<Driver>> {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let (wanted, is_auto) = match self.config.worker_count {
            WorkerCount::Exactly(count) => (count as usize, false),
            WorkerCount::Auto => (cores.min(MOST_AUTO_LANES) - 1, true),
        };
        let named = self.config.worker_affinity.len();
        if wanted >= cores && wanted > named && !is_auto {
            tracing::warn!(
                "ACCL_WORKER_COUNT requests {wanted} worker threads in addition to the caller's, but this process may \
                 use only {cores} cores: threads that share a core gain nothing"
            );
        }
        if named > 0 && wanted == 0 && !is_auto {
            tracing::warn!(
                "ACCL_WORKER_AFFINITY has no effect, because ACCL_WORKER_COUNT is 0 (its default) and adds no threads"
            );
        }
        let open = || {
            let lane = Driver::new(segment(&self.config), self.config.spin_us);
            waker_of(&lane)?;
            // With `auto`, the first group that uses the lane starts its thread.
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
                    tracing::warn!(
                        "ACCL_WORKER_COUNT requests {wanted} worker threads, but only {got} could be started: {error}"
                    );
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

    /// Iterates over the drivers of all lanes, the first lane first.
    pub(crate) fn lanes(&self) -> impl Iterator<Item = &Arc<Driver>> {
        std::iter::once(&self.driver).chain(self.other_lanes.get().into_iter().flatten())
    }

    /// Returns the drivers of all lanes except the first.
    pub(crate) fn other_lanes(&self) -> &[Arc<Driver>] {
        self.other_lanes.get().map_or(&[], Vec::as_slice)
    }

    fn opened(&self) -> Option<Parts<'_>> {
        let ((info, connector), Polling { poller, waker }) = (self.connecting.get()?, self.driver.polling()?);
        Some(Parts { poller, waker, info, connector })
    }

    /// Returns this process's endpoint address, as its peers see it.
    ///
    /// # Errors
    /// The errors of [`Engine::create_group`] for an endpoint that cannot be opened.
    pub fn info(&self) -> Result<EndpointInfo> {
        Ok(self.parts(None)?.info.clone())
    }

    /// Adds a link to a peer that was made without the endpoint; groups created later use it.
    ///
    /// # Errors
    /// `Exhausted` when its descriptors cannot be watched.
    pub fn adopt_link(&self, info: EndpointInfo, mut link: Box<dyn Watched>) -> Result<()> {
        let parts = self.parts(None)?;
        // Under the lock: the first event may wake a driver, which must find the link.
        self.driver.with_core(|core| {
            let slot = parts.poller.watch(&mut link)?;
            core.net.add(&info, link, slot);
            Ok(())
        })
    }

    /// Returns the waker that ends a wait of this engine, for links made without the endpoint.
    ///
    /// # Errors
    /// The errors of [`Engine::info`].
    pub fn waker(&self) -> Result<Arc<Waker>> {
        Ok(self.parts(None)?.waker.clone())
    }

    /// Drops all links without disconnecting and accepts no more, as the system does when a process dies. For tests.
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

    /// Marks a peer without a link as lost, as if it had been unresponsive for 30 s. For tests.
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

    /// Shuts the engine down in bounded time: groups fail, peers are notified and receive what was sent to them,
    /// threads stop. For the end of the process.
    pub fn shutdown(&self) {
        self.shutdown_unless(false, &mut || false);
    }

    /// Like [`Engine::shutdown`], but each wait ends when `interrupt` returns true. With `await_calls`, asynchronous
    /// collectives get up to half a minute to complete.
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
                "exiting: after {} ms a peer has not received data sent by completed calls",
                patience.as_millis()
            );
        }
        let until = time::now() + LAST_OFFLOADS;
        for busy in self.offload_kinds().iter().flat_map(|kind| kind.shutdown(until)) {
            tracing::warn!("exiting while {busy} is still busy: its current call cannot be stopped");
        }
        let until = time::now() + LAST_DISCONNECTS;
        self.lanes().for_each(|lane| send_the_rest(lane, until));
        let until = time::now() + LOCK_AT_END;
        for lane in self.lanes() {
            if let Some(mut core) = lane.try_lock_until(until) {
                let _ = core.guarded(|core| core.net.close_all());
            }
        }
        // Callbacks may run code of the caller, which must not go on while the interpreter ends.
        let left = self.driver.completions().drain(Instant::now() + LAST_CALLBACKS, interrupt);
        if left > 0 {
            tracing::warn!(
                "exiting while {left} callbacks of calls have not completed; wait for their futures before exiting, \
                 because a callback that still runs when Python exits can abort the process"
            );
        }
        self.driver.completions().stop(Duration::from_secs(1));
        self.lanes().for_each(|lane| lane.await_background(Duration::from_secs(1)));
    }
}

/// Work that remains after the groups of a lane were left.
struct Left {
    sent: Vec<Mark>,
    has_failed: bool,
}

/// Leaves all groups of a lane and notifies its peers. Returns `None` if another thread keeps the lock.
fn leave_all(lane: &Driver, now: Moment) -> Option<Left> {
    let mut core = lane.try_lock_until(time::now() + LOCK_AT_END)?;
    let ids: Vec<u64> = core.groups().map(GroupState::id).collect();
    let has_failed = core.groups().any(|group| group.failure().is_some());
    let sent: Vec<Mark> = core.net.linked().iter().map(|&id| core.net.mark(id)).collect();
    let _ = core.guarded(|core| {
        for id in ids {
            core.with_group(id, now, |group, context| group.leave(context));
            core.remove_group(id);
        }
        core.send_disconnect();
    });
    Some(Left { sent, has_failed })
}

/// Waits until this lane has sent everything that is buffered: peers of completed calls rely on it.
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
        // Not in the poller: another thread may sleep there, and this thread would take its events.
        std::thread::sleep(PAUSE_AT_END);
    }
}

/// Waits, at most until `until`, for links to peers that completed calls have sent something to.
fn link_to_send(lane: &Driver, until: Moment, interrupt: &mut dyn FnMut() -> bool) {
    let Some(core) = lane.try_lock_until(until) else { return };
    let has_failed = core.groups().any(|group| group.failure().is_some());
    let marks = core.net.unlinked_with_queue().into_iter().map(|peer| core.net.mark(peer)).collect();
    drop(core);
    if !has_failed {
        let _ = lane.await_delivery(marks, until, interrupt);
    }
}

impl Drop for Engine {
    /// Stops the background threads. Without groups no call can be issued, and a thread that drives only for peers
    /// would never stop.
    fn drop(&mut self) {
        if !self.is_forked() {
            self.lanes().for_each(|lane| lane.stop_background());
        }
    }
}
