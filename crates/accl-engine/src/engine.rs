//! The engine of one process: its endpoint, its links, its groups, its beginning and end.
//!
//! Owns the making of groups. Who makes progress, and when, is in `drive`; what a pass does is in `core`. Read [`Engine`]
//! first.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use accl_schedule::cost::{Machine, Near, Placement};
use accl_schedule::{Basis, Chooser, Topology};
use accl_transport::{Card, Endpoint, Link, Poller, Settings, Waker};
use accl_types::config::Config;
use accl_types::{Error, ErrorKind, Rank, Result};

use crate::completion::CompletionPool;
use crate::core::Core;
use crate::cores::Cores;
use crate::drive::{Delivery, Drive, lasting};
use crate::encoding::Usual;
use crate::env::launch_label;
use crate::group::{Group, GroupSpec};
use crate::hash::hash_words;
use crate::machine;
use crate::members::Members;
use crate::net::{Mark, PeerId};
use crate::plan::Plans;
use crate::rendezvous::{GroupCard, Makings, Meeting, Outcome};
use crate::state::GroupState;
use crate::store::Store;
use crate::sync::Mutex;

/// How long connecting holds the endpoint before other threads that make groups have a turn.
const CONNECT_SLICE: Duration = Duration::from_millis(200);
/// How long the end of a group or of the process waits until the peers' hosts have what calls that are done have sent, and
/// how long when calls have failed anyway.
pub(crate) const LAST_BYTES: Duration = Duration::from_secs(30);
pub(crate) const LAST_BYTES_FAILED: Duration = Duration::from_secs(2);
/// How long the end of a group or of the process waits for collectives that were made asynchronously.
pub(crate) const LAST_CALLS: Duration = Duration::from_secs(30);
/// How long the end of the process waits for room for its goodbyes.
const LAST_GOODBYES: Duration = Duration::from_secs(2);
/// How long it waits for callbacks that run.
const LAST_CALLBACKS: Duration = Duration::from_secs(30);

/// One per process in production; several in one process in tests.
pub struct Engine {
    pub(crate) core: Mutex<Core>,
    pub(crate) parts: OnceLock<Parts>,
    opening: Mutex<()>,
    /// Settings of process scope, fixed by the first group.
    config: Config,
    pub(crate) pool: CompletionPool,
    pub(crate) drive: Drive,
    /// In some group the ranks of this host are more than their cores.
    pub(crate) shares_cores: AtomicBool,
    groups_made: AtomicU64,
    makings: Makings,
    /// The group of the whole job, whose ranks the others are numbered by.
    job: Mutex<Option<Job>>,
    /// The machine's constants, found when they are first needed.
    machine: OnceLock<Machine>,
    /// How often this process had been forked when the engine was made: in a later child it is dead.
    born: u64,
    /// For the background thread.
    pub(crate) me: Weak<Engine>,
}

/// What exists from the first group on.
pub(crate) struct Parts {
    pub(crate) poller: Poller,
    pub(crate) waker: Arc<Waker>,
    endpoint: Mutex<Endpoint>,
}

/// Who is who in the job.
struct Job {
    group: u64,
    /// The processes by rank.
    processes: Vec<[u8; 16]>,
}

/// What all ranks have before a group is made.
struct Prepared {
    state: GroupState,
    cards: Vec<GroupCard>,
    usual: Option<Usual>,
}

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
            drive: Drive::default(),
            shares_cores: AtomicBool::new(false),
            groups_made: AtomicU64::new(0),
            makings: Makings::default(),
            job: Mutex::new(None),
            machine: OnceLock::new(),
            born: accl_transport::fork_generation(),
            me: me.clone(),
        })
    }

    /// The settings that the engine was made with.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Whether this process is a forked child of the one that made the engine. A child may make an engine of its own.
    pub(crate) fn is_forked(&self) -> bool {
        self.born != accl_transport::fork_generation()
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
        let machine = (spec.rank == Rank(0)).then(|| self.machine(spec));
        let (agreed, cores) = (spec.config.agreed_text(), Cores::of_this_process());
        let mine = GroupCard { counter, agreed, cores, machine, card };
        let label = launch_label();
        let mut meeting = Meeting::new(spec, store, &mine, &label, &self.makings, deadline);
        let members = self.known_members(spec);
        let mut look = || {
            if interrupt() {
                return Err(Error::aborted("interrupted while the group was being made"));
            }
            self.look_for_lost(&members)
        };
        let Prepared { state, cards, usual } = match self.meet(parts, spec, &mut meeting, deadline, &mut look) {
            Ok(prepared) => prepared,
            Err(error) => {
                meeting.give_up(&error);
                return Err(error);
            }
        };
        drop(meeting);

        let here = &cards[spec.rank.index()].card.host_id;
        let neighbours = cards.iter().filter(|card| card.card.host_id == *here).map(|card| &card.cores);
        if Cores::are_shared(neighbours) {
            self.shares_cores.store(true, Ordering::Relaxed);
        }
        let (id, name) = (state.id, state.name.clone());
        if spec.global_ranks.is_empty() {
            *self.job.lock() = Some(Job { group: id, processes: cards.iter().map(|card| card.card.uuid).collect() });
        }
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
        Ok(Group::new(self.clone(), id, name, spec, usual))
    }

    /// Meets the others until all ranks, in one session, have what the group needs.
    fn meet(
        &self,
        parts: &Parts,
        spec: &GroupSpec,
        meeting: &mut Meeting<'_>,
        deadline: Instant,
        look: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Prepared> {
        loop {
            let cards = meeting.gather(look)?;
            let id = group_id(meeting.session(), &cards);
            let made = self.prepare(parts, spec, meeting, id, &cards, deadline, look).and_then(|prepared| {
                let Some((state, usual)) = prepared else { return Ok(None) };
                match meeting.confirm(look)? {
                    Outcome::Made => Ok(Some((state, usual))),
                    Outcome::Moved => Ok(None),
                }
            });
            match made {
                Ok(Some((state, usual))) => return Ok(Prepared { state, cards, usual }),
                Ok(None) => {}
                Err(error) => {
                    self.with_core(|core| core.remove_group(id));
                    return Err(error);
                }
            }
        }
    }

    /// Connects, and makes all that may fail on one rank alone. `None` when the session is over.
    #[expect(clippy::too_many_arguments, reason = "all of a group that is being made")]
    fn prepare(
        &self,
        parts: &Parts,
        spec: &GroupSpec,
        meeting: &mut Meeting<'_>,
        id: u64,
        cards: &[GroupCard],
        deadline: Instant,
        look: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Option<(GroupState, Option<Usual>)>> {
        let topology = Topology::new(host_indices(cards));
        // The same on all ranks, since they agreed on the rules.
        accl_schedule::check_rules(&topology, &spec.config.algorithm)?;
        let usual = Usual::of(&spec.config)?;
        let Some(peers) = self.connect(parts, spec, meeting, cards, deadline, look)? else { return Ok(None) };
        let members = Members::new(peers, spec.config.eager_bytes);
        let chooser = chooser(topology, spec, cards, self.core.lock().segment);
        let plans = Plans::new(chooser, spec.rank);
        let mut state = GroupState::new(id, spec.name.as_str().into(), spec.rank, spec.timeout, members, plans);
        state.timing = spec.config.timing;
        Ok(Some((state, usual)))
    }

    /// The processes of a sub-group's ranks, as the group of the job knows them; empty for other groups.
    fn known_members(&self, spec: &GroupSpec) -> Vec<(Rank, [u8; 16])> {
        let job = self.job.lock();
        let Some(job) = job.as_ref().filter(|job| self.with_core(|core| core.groups.contains_key(&job.group))) else {
            return Vec::new();
        };
        let process = |&global: &u64| job.processes.get(usize::try_from(global).ok()?).copied();
        let known = spec.global_ranks.iter().enumerate();
        known.filter_map(|(rank, global)| Some((Rank(rank as u32), process(global)?))).collect()
    }

    /// A member of the job that has gone does not come to make a sub-group.
    fn look_for_lost(&self, members: &[(Rank, [u8; 16])]) -> Result<()> {
        if members.is_empty() {
            return Ok(());
        }
        self.with_core(|core| {
            let now = Instant::now();
            core.pass_whole(now);
            core.check(now);
            let lost = members.iter().find_map(|(rank, uuid)| Some((*rank, core.net.gone(uuid)?)));
            let Some((rank, peer)) = lost else { return Ok(()) };
            let text = format!("rank {rank} ({}) has left while the group was being made", core.net.place(peer));
            Err(Error::peer_lost(text).with_peer(rank))
        })
    }

    /// The constants by which a group chooses whose first rank this is.
    fn machine(&self, spec: &GroupSpec) -> Machine {
        if spec.world == 1 || spec.config.deterministic {
            return Machine::default();
        }
        *self.machine.get_or_init(|| machine::find(&self.config).machine)
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
        if self.is_forked() {
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

    /// Links to all ranks; `None` when the session is over.
    fn connect(
        &self,
        parts: &Parts,
        spec: &GroupSpec,
        meeting: &mut Meeting<'_>,
        cards: &[GroupCard],
        deadline: Instant,
        look: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Option<Vec<PeerId>>> {
        let mine = &cards[spec.rank.index()].card;
        loop {
            // Another thread may connect to the same peers: what is missing is asked anew each time, and under the lock
            // that is held until the new links are in place.
            let mut endpoint = parts.endpoint.lock();
            let found: Vec<Option<PeerId>> = self.with_core(|core| {
                // A peer that went and came back has a link that is dead and does not know it yet.
                core.pass_whole(Instant::now());
                core.check(Instant::now());
                cards.iter().map(|card| core.net.find(&card.card)).collect()
            });
            let missing: Vec<usize> = (0..cards.len()).filter(|&rank| found[rank].is_none()).collect();
            if missing.is_empty() {
                return Ok(Some(found.into_iter().flatten().collect()));
            }
            if let Some(own) = missing.iter().copied().find(|&rank| cards[rank].card.uuid == mine.uuid) {
                if own != spec.rank.index() {
                    return Err(Error::rendezvous(format!("ranks {own} and {} are the same process", spec.rank)));
                }
                let payload = self.config.segment_bytes as usize + accl_transport::frame::OVERHEAD_BYTES;
                let link = accl_transport::loopback::self_link(payload, parts.waker.clone());
                self.with_core(|core| core.add_link(mine.clone(), Box::new(link), &parts.poller))?;
                continue;
            }
            let wanted: Vec<_> = missing.iter().map(|&rank| cards[rank].card.clone()).collect();
            let slice = deadline.min(Instant::now() + CONNECT_SLICE);
            let mut seen = None;
            let result = endpoint.connect(&wanted, slice, &mut || {
                seen = look().err();
                seen.is_some()
            });
            for warning in endpoint.take_warnings() {
                tracing::warn!("{warning}");
            }
            match result {
                Ok(links) => {
                    for (card, link) in wanted.into_iter().zip(links) {
                        self.with_core(|core| match core.net.find(&card) {
                            Some(id) => Ok(id),
                            None => core.add_link(card, link, &parts.poller),
                        })?;
                    }
                }
                Err(failed) => {
                    // Other threads that make groups have a turn.
                    parking_lot::MutexGuard::unlock_fair(endpoint);
                    if let Some(error) = seen {
                        return Err(error);
                    }
                    if failed.error.kind == ErrorKind::Timeout && Instant::now() < deadline {
                        // A rank may have been replaced or given up.
                        if !meeting.goes_on()? {
                            return Ok(None);
                        }
                        continue;
                    }
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

    pub(crate) fn completions(&self) -> &CompletionPool {
        &self.pool
    }

    /// Runs `body` on a thread that may block on calls.
    ///
    /// # Errors
    /// `Exhausted` when the system has no thread for it; `Aborted` when the engine has ended.
    pub fn spawn_blocking(&self, body: Box<dyn FnOnce() + Send>) -> Result<()> {
        self.pool.expect()?;
        self.pool.post(body);
        Ok(())
    }

    /// Waits until everything has left this process: calls that were done relied on it.
    fn send_the_rest(&self, deadline: Instant) {
        let Some(parts) = self.parts.get() else { return };
        while Instant::now() < deadline {
            let Some(mut core) = self.core.try_lock_until(deadline) else { return };
            let unsent = core.guarded(|core| {
                core.net.flush_all();
                core.net.has_unsent()
            });
            drop(core);
            if unsent != Ok(true) {
                return;
            }
            let _ = parts.poller.wait(Some(Duration::from_millis(10)));
        }
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
            let groups =
                self.core.try_lock_for(Duration::from_secs(1)).map(|core| core.groups.keys().copied().collect());
            let groups: Vec<u64> = groups.unwrap_or_default();
            self.await_calls(&groups, Instant::now() + LAST_CALLS, interrupt);
        }
        self.stop_background();
        let now = Instant::now();
        if let Some(mut core) = self.core.try_lock_for(Duration::from_secs(1)) {
            let ids: Vec<u64> = core.groups.keys().copied().collect();
            let has_failed = core.groups.values().any(|group| group.poison().is_some());
            let sent: Vec<Mark> = core.net.ids().map(|id| core.net.mark(id)).collect();
            let _ = core.guarded(|core| {
                for id in ids {
                    core.with_group(id, now, |group, hands| group.leave(hands));
                    core.remove_group(id);
                }
                core.say_goodbye();
            });
            drop(core);
            let patience = if has_failed { LAST_BYTES_FAILED } else { LAST_BYTES };
            if self.await_delivery(sent, now + patience, interrupt) == Delivery::Late {
                tracing::warn!(
                    "the process ends, and {} ms later a peer has not yet taken what calls that are done have sent to it",
                    patience.as_millis()
                );
            }
        }
        self.send_the_rest(Instant::now() + LAST_GOODBYES);
        if let Some(mut core) = self.core.try_lock_for(Duration::from_secs(1)) {
            let _ = core.guarded(|core| core.net.close_all());
        }
        // What runs there may be code of the caller, which must not go on in an interpreter that ends.
        let left = self.pool.drain(Instant::now() + LAST_CALLBACKS, interrupt);
        if left > 0 {
            tracing::warn!(
                "the process ends while {left} callbacks of calls have not ended; wait for their futures before the end, since \
                 a callback that still runs when Python ends can abort the process"
            );
        }
        self.pool.stop(Duration::from_secs(1));
        self.await_background(Duration::from_secs(1));
    }
}

/// The choice of algorithms, from what all ranks know alike: the cards and the settings that they agreed on.
fn chooser(topology: Topology, spec: &GroupSpec, cards: &[GroupCard], segment_bytes: u64) -> Chooser {
    // The host that is worst off for cores stands for all.
    let cores_of = |host: u32| {
        let here = topology.ranks_of(host).iter().map(|&rank| &cards[rank as usize].cores);
        Cores::in_all(here).max(1) as u32
    };
    let largest = topology.largest_host();
    let full = (0..topology.host_count()).filter(|&host| topology.ranks_of(host).len() as u32 == largest);
    let cores = full.map(cores_of).min().unwrap_or(1);
    let near = Near::of(&spec.config);
    let machine = cards.first().and_then(|card| card.machine).unwrap_or_default();
    let basis = Basis {
        machine,
        placement: Placement { near, cores, segment_bytes },
        deterministic: spec.config.deterministic,
    };
    Chooser::new(topology, spec.config.algorithm.clone(), &basis)
}

/// Identity of the group, the same on all ranks: no two groups have the same session, processes and counters.
fn group_id(session: &str, cards: &[GroupCard]) -> u64 {
    let words = cards.iter().flat_map(|card| {
        let (high, low) = card.card.uuid.split_at(8);
        let word = |bytes: &[u8]| bytes.iter().fold(0, |word, &byte| word << 8 | u64::from(byte));
        [word(high), word(low), card.counter]
    });
    let words = session.bytes().map(u64::from).chain(words);
    // 0 means the process as a whole.
    hash_words(words).max(1)
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

pub(crate) fn far() -> Instant {
    Instant::now() + Duration::from_secs(365 * 24 * 3600)
}
