//! Creation of groups: meeting the other ranks, connecting to them, and choosing the rules that all ranks share.
//!
//! Owns the order of these steps, and the clean-up if creation fails. Read [`Engine::create_group`] first.
//!
//! This file is long because creation is one sequence of steps, each of which the later ones undo if they fail.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use accl_schedule::cost::{Machine, Placement};
use accl_schedule::{Basis, Chooser, Topology};
use accl_types::config::{Config, WorkerCount};
use accl_types::{Error, Rank, Result};
use accl_wire::EndpointInfo;

use super::lanes::{LaneStates, Lanes, warn_if_bound, warn_of_unused_lanes};
use super::rendezvous::{Meeting, Outcome, RankInfo};
use super::store::Store;
use crate::api::default_codec::DefaultCodec;
use crate::api::group::{Group, Rules};
use crate::attempts::Attempts;
use crate::cores::{Cores, HostLoad};
use crate::driver::Driver;
use crate::driver::packets::GroupLinks;
use crate::engine::{Engine, Job, Parts};
use crate::env::launch_label;
use crate::events;
use crate::lanes::Least;
use crate::offload::{self, OffloadGroup, OffloadKind, OpenOffloads, Opening};
use crate::settings::intra_node_of;
use crate::spec::{GroupRole, GroupSpec};
use crate::time::{self, far};
use accl_executor::peers::{Gone, PeerId, missing, neighbours};
use accl_executor::plan::Planner;
use accl_types::hash::hash_words;

/// Intervals at which a rank that waits for links checks for interrupts, and whether the other ranks go on.
const CONNECT_TICK: Duration = Duration::from_millis(50);
const CONNECT_SLICE: Duration = Duration::from_millis(200);
/// Time after which a rank that waits for links logs which ranks it waits for.
const LOG_AFTER: Duration = Duration::from_secs(5);

/// Maximum time that a rank that cannot create a group waits for the other ranks, which should learn the reason.
const REFUSAL: Duration = Duration::from_secs(10);

/// While an offload opens, the store is asked at intervals of the elapsed time divided by `ASKED_PART`, at most
/// `LONGEST_UNASKED`.
const ASKED_PART: u32 = 4;
const LONGEST_UNASKED: Duration = Duration::from_millis(400);

/// Runs `act`, which takes long, and checks meanwhile whether the other ranks go on. The error of a rank that gives up
/// is thus reported at once. Returns `None` if the session has ended.
fn while_it_goes_on<T>(
    meeting: &mut Meeting<'_>,
    poll: &mut dyn FnMut() -> Result<()>,
    act: impl FnOnce(&mut dyn FnMut() -> Result<()>) -> Result<T>,
) -> Result<Option<T>> {
    let (begin, mut asked, mut is_over) = (Instant::now(), Instant::now(), false);
    let mut poll = || {
        poll()?;
        // The longer it takes, the less often the store is asked.
        if asked.elapsed() >= (begin.elapsed() / ASKED_PART).min(LONGEST_UNASKED) {
            asked = Instant::now();
            is_over = !meeting.goes_on()?;
        }
        if is_over { Err(Error::aborted("another process has replaced a rank")) } else { Ok(()) }
    };
    let done = act(&mut poll);
    if is_over { Ok(None) } else { done.map(Some) }
}

/// Returns everything that ranks must agree on.
///
/// # Errors
/// `Configuration` for settings with which no group can be created.
fn agreed_text(spec: &GroupSpec, kinds: &[Arc<dyn OffloadKind>]) -> Result<String> {
    offload::check(&spec.config, kinds)?;
    let mut text = spec.config.agreed_text();
    for kind in kinds {
        // Kinds that have nothing to agree on are listed too: all ranks must open the same kinds in the same order.
        let (name, agreed) = (kind.name(), kind.agreed(spec)?.unwrap_or_default());
        if agreed.contains(char::is_whitespace) {
            return Err(Error::internal(format!(
                "the offload {name} asks ranks to agree on `{agreed}`, which has white space"
            )));
        }
        text += &format!(" {name}={agreed}");
    }
    Ok(text)
}

/// Makes the other ranks of a group fail with the error for which this rank cannot create it, once all ranks have
/// arrived. Waits for them for a limited time, at most until the group's deadline.
pub fn refuse_group(spec: &GroupSpec, store: &dyn Store, error: &Error, interrupt: &mut dyn FnMut() -> bool) {
    refuse_among(&Attempts::default(), spec, store, error, interrupt);
}

/// Like [`refuse_group`], in a process that creates the groups in `attempts`.
fn refuse_among(
    attempts: &Attempts,
    spec: &GroupSpec,
    store: &dyn Store,
    error: &Error,
    interrupt: &mut dyn FnMut() -> bool,
) {
    if spec.world < 2 || spec.rank.0 >= spec.world {
        return;
    }
    // Without an identity there is no session to lead or to answer.
    let Ok(mine) = RankInfo::of_no_endpoint() else { return };
    let (label, wait) = (launch_label(), spec.timeout.min(REFUSAL));
    tracing::warn!(
        group = spec.name,
        "rank {} cannot create the group: {}; it waits at most {} s for the other ranks, which fail with the same \
         error",
        spec.rank,
        error.message,
        wait.as_secs()
    );
    let mut meeting = Meeting::new(spec, store, &mine, &label, attempts, Instant::now() + wait).refusing(error);
    // The result is known: the meeting ends with this rank's own error, or the other ranks have not arrived.
    let _ = meeting.gather(&mut || match interrupt() {
        true => Err(Error::aborted("interrupted while notifying the other ranks")),
        false => Ok(()),
    });
    meeting.leave_hint();
    meeting.give_up(error);
}

/// Results of the rendezvous, once all ranks are ready to create the group.
struct Prepared {
    states: LaneStates,
    infos: Vec<RankInfo>,
    rules: Rules,
}

impl Engine {
    /// Creates a group: meets the other ranks in the store, and connects to its neighbours among them. Links to the
    /// other ranks are created when a call first needs them.
    ///
    /// # Errors
    /// `Timeout` listing the missing ranks, `Configuration`, `Rendezvous`, `Network`; `Aborted` when interrupted or in
    /// a forked child.
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
            return Err(Error::invalid_argument(format!(
                "rank {} is out of range for world size {}",
                spec.rank, spec.world
            )));
        }
        let deadline = Instant::now().checked_add(spec.timeout).unwrap_or_else(far);
        // In a forked child, another thread of the parent may have held the lock.
        let kinds = if self.is_forked() { Vec::new() } else { self.offload_kinds() };
        let (parts, mine) = match self.introduction(spec, &kinds) {
            Ok(introduction) => introduction,
            Err(error) => {
                // In a forked child, the parent's rank meets the other ranks.
                if !self.is_forked() {
                    refuse_among(&self.attempts, spec, store, &error, interrupt);
                }
                return Err(error);
            }
        };
        let label = launch_label();
        let mut meeting = Meeting::new(spec, store, &mine, &label, &self.attempts, deadline);
        let members = self.known_members(spec, store);
        self.want_neighbours(&members, spec);
        let mut poll = || {
            if interrupt() {
                return Err(Error::aborted("interrupted while creating the group"));
            }
            self.check_lost(&members)
        };
        let Prepared { states, infos, rules } = match self.meet(parts, spec, &mut meeting, deadline, &kinds, &mut poll)
        {
            Ok(prepared) => prepared,
            Err(error) => {
                meeting.give_up(&error);
                return Err(error);
            }
        };
        drop(meeting);

        let here = &infos[spec.rank.index()].info.host_id;
        let neighbours = infos.iter().filter(|info| info.info.host_id == *here).map(|info| &info.cores);
        {
            let mut host_load = self.host_load.lock();
            *host_load = host_load.or(HostLoad::of(neighbours.clone()));
        }
        if Cores::are_shared(neighbours) {
            self.lanes().for_each(|lane| lane.share_cores());
        }
        let lanes = states.len() as u32;
        let mut states = states.into_iter();
        let state = states.next().ok_or_else(|| Error::internal("a group has no lane"))?;
        let (id, name) = (state.id(), state.name().clone());
        let now = time::now();
        self.driver.with_core(|core| {
            for (rank, info) in infos.iter().enumerate() {
                if !core.net.is_linked(state.members().peer(Rank(rank as u32))) {
                    continue;
                }
                tracing::info!(
                    group = spec.name,
                    rank,
                    host = info.info.hostname,
                    pid = info.info.pid,
                    link = core.net.describe(state.members().peer(Rank(rank as u32))),
                    "connected"
                );
            }
            if events::follows_calls() {
                core.follow_calls();
            }
            core.add_group(state, now);
        });
        // The first lane exists by now and learns of failures on the others, and no thread issues calls yet.
        for (lane, state) in self.other_lanes().iter().zip(states) {
            lane.with_core(|core| core.add_group(state, now));
        }
        if self.is_first_job(spec, store, id, &infos) {
            warn_if_bound(spec, &infos);
            self.place_threads(&infos, spec.rank.index(), lanes);
        }
        Ok(Group::new(self.clone(), id, name, spec, rules))
    }

    /// Returns what the other ranks learn of this rank before they meet it.
    fn introduction(&self, spec: &GroupSpec, kinds: &[Arc<dyn OffloadKind>]) -> Result<(Parts<'_>, RankInfo)> {
        self.check_process_settings(&spec.config)?;
        let parts = self.parts(spec.master)?;
        let info = parts.info.clone();
        if spec.world > 1 {
            // Peers may connect from now on: they know this process by its info.
            parts.connector.start()?;
        }
        let counter = self.groups_made.fetch_add(1, Ordering::Relaxed);
        let machine = (spec.rank == Rank(0)).then(|| self.machine(spec));
        let (agreed, cores) = (agreed_text(spec, kinds)?, Cores::of_this_process());
        let has_auto_lanes = self.config.worker_count == WorkerCount::Auto;
        let host_load = *self.host_load.lock();
        Ok((parts, RankInfo { counter, agreed, cores, has_auto_lanes, host_load, machine, info }))
    }

    /// Records a job if the new group is the job's own: the first group over its store that lists no ranks, or the
    /// default process group. Returns whether the threads of this process are bound to CPUs for that job. They are for
    /// the default process group, and for a job that is the only one.
    fn is_first_job(&self, spec: &GroupSpec, store: &dyn Store, id: u64, infos: &[RankInfo]) -> bool {
        let mut jobs = self.jobs.lock();
        jobs.retain(|job| self.driver.with_core(|core| core.group(job.group).is_some()));
        let is_default = spec.role == GroupRole::Default;
        let (is_only, store) = (jobs.is_empty(), store.identity());
        if !spec.global_ranks.is_empty() || !is_default && jobs.iter().any(|job| job.store == store) {
            return false;
        }
        jobs.retain(|job| job.store != store);
        jobs.push(Job { store, group: id, processes: infos.iter().map(|info| info.info.uuid).collect() });
        is_default || is_only
    }

    /// Meets the other ranks until all ranks, in one session, have what the group needs.
    fn meet(
        &self,
        parts: Parts<'_>,
        spec: &GroupSpec,
        meeting: &mut Meeting<'_>,
        deadline: Instant,
        kinds: &[Arc<dyn OffloadKind>],
        poll: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Prepared> {
        loop {
            let infos = meeting.gather(poll)?;
            let id = group_id(meeting.session(), &infos);
            let made = self.prepare(parts, spec, meeting, id, &infos, deadline, kinds, poll).and_then(|prepared| {
                let Some((states, rules)) = prepared else { return Ok(None) };
                match meeting.confirm(poll)? {
                    Outcome::Made => Ok(Some((states, rules))),
                    Outcome::Moved => Ok(None),
                }
            });
            match made {
                Ok(Some((states, rules))) => return Ok(Prepared { states, infos, rules }),
                Ok(None) => self.forget_group(id),
                Err(error) => {
                    self.forget_group(id);
                    return Err(error);
                }
            }
        }
    }

    /// Removes a group whose creation failed.
    fn forget_group(&self, id: u64) {
        self.lanes().for_each(|lane| lane.with_core(|core| core.remove_group(id)));
    }

    /// Connects, and does everything that may fail on one rank alone. Returns `None` if the session has ended.
    #[expect(clippy::too_many_arguments, reason = "all of a group under creation")]
    fn prepare(
        &self,
        parts: Parts<'_>,
        spec: &GroupSpec,
        meeting: &mut Meeting<'_>,
        id: u64,
        infos: &[RankInfo],
        deadline: Instant,
        kinds: &[Arc<dyn OffloadKind>],
        poll: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Option<(LaneStates, Rules)>> {
        let topology = Topology::new(host_indices(infos));
        // The result is the same on all ranks, because they agreed on the rules.
        accl_schedule::check_rules(&topology, &spec.config.algorithm)?;
        let default_codec = DefaultCodec::of(&spec.config)?;
        let Some(peers) = self.connect(parts, spec, meeting, infos, deadline, poll)? else { return Ok(None) };
        let deadline = time::now() + deadline.saturating_duration_since(Instant::now());
        let group = OffloadGroup { spec, id, deadline };
        let Some(offloads) = open_offloads(group, kinds, meeting, poll)? else { return Ok(None) };
        let has_use_for_lanes = spec.world > 1 && !offloads.iter().any(|offload| offload.takes_large_calls());
        let lanes = if has_use_for_lanes { Lanes::of(infos, &topology) } else { Lanes::ONE };
        let mut states = self.on_lanes(parts, spec, id, infos, peers, lanes)?;
        if has_use_for_lanes {
            warn_of_unused_lanes(spec, infos, lanes);
        }
        let chooser = chooser(topology, spec, infos, self.driver.with_core(|core| core.segment()));
        let planner = Planner::new(chooser, spec.rank);
        let first = states.first_mut().ok_or_else(|| Error::internal("a group has no lane"))?;
        let mut receiver = None;
        for offload in offloads.iter() {
            let Some(sink) = offload.connect(GroupLinks::new(&self.driver, id)) else { continue };
            first.take_packets_with(sink);
            if let Some(other) = receiver.replace(offload.name()) {
                let both = format!("the offloads {other} and {} both exchange packets in one group", offload.name());
                return Err(Error::internal(both));
            }
        }
        let least = Least::of(lanes.have_own_cores);
        let lanes = self.other_lanes().iter().take(states.len() - 1).cloned().collect();
        Ok(Some((states, Rules { default_codec, offloads, planner, lanes, least })))
    }

    /// Returns the processes of a sub-group's ranks, as known from the job's group that met in the same store. Empty
    /// for other groups.
    fn known_members(&self, spec: &GroupSpec, store: &dyn Store) -> Vec<(Rank, [u8; 16])> {
        let (jobs, store) = (self.jobs.lock(), store.identity());
        let is_there = |job: &&Job| self.driver.with_core(|core| core.group(job.group).is_some());
        let Some(job) = jobs.iter().find(|job| job.store == store).filter(is_there) else {
            return Vec::new();
        };
        let process = |&global: &u64| job.processes.get(usize::try_from(global).ok()?).copied();
        let known = spec.global_ranks.iter().enumerate();
        known.filter_map(|(rank, global)| Some((Rank(rank as u32), process(global)?))).collect()
    }

    /// Begins to link to neighbours that are known from the job. A neighbour that is gone is thus detected although it
    /// cannot answer the rendezvous.
    fn want_neighbours(&self, members: &[(Rank, [u8; 16])], spec: &GroupSpec) {
        let near: HashSet<Rank> = neighbours(spec.rank, spec.world).collect();
        self.driver.with_core(|core| {
            let peers =
                members.iter().filter(|(rank, _)| near.contains(rank)).filter_map(|(_, uuid)| core.net.find(uuid));
            for peer in peers.collect::<Vec<_>>() {
                core.net.want(peer);
            }
        });
    }

    /// Returns an error if a member of the job is gone: it will not take part in a sub-group.
    fn check_lost(&self, members: &[(Rank, [u8; 16])]) -> Result<()> {
        if members.is_empty() {
            return Ok(());
        }
        self.driver.after_poll(|core| {
            let lost = members.iter().find_map(|(rank, uuid)| Some((*rank, core.net.gone(uuid)?)));
            let Some((rank, peer)) = lost else { return Ok(()) };
            let how = match core.net.peer(peer).gone() {
                Some(Gone::Lost(error)) => format!("is lost: {}", error.message),
                Some(Gone::Left) | None => "has left".to_owned(),
            };
            let text = format!("while creating the group: rank {rank} ({}) {how}", core.net.host_and_pid(peer));
            Err(Error::peer_lost(text).with_peer(rank))
        })
    }

    /// Returns the machine constants for choosing algorithms; called on the first rank of a group.
    fn machine(&self, spec: &GroupSpec) -> Machine {
        if spec.world == 1 || spec.config.deterministic {
            return Machine::default();
        }
        *self.machine.get_or_init(|| (self.find_machine)(&self.config))
    }

    fn check_process_settings(&self, config: &Config) -> Result<()> {
        let Some((row, mine, theirs)) = self.config.process_differences(config).into_iter().next() else {
            return Ok(());
        };
        Err(Error::configuration(format!(
            "{}: this process already runs with `{mine}` and cannot change to `{theirs}`; pass this option to the \
             first group of the process",
            row.option
        )))
    }

    /// Returns the peers of all ranks, after linking this rank to its neighbours. Returns `None` if the session has
    /// ended. Links to the other ranks are created on demand.
    fn connect(
        &self,
        parts: Parts<'_>,
        spec: &GroupSpec,
        meeting: &mut Meeting<'_>,
        infos: &[RankInfo],
        deadline: Instant,
        poll: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Option<Vec<PeerId>>> {
        let own = spec.rank.index();
        if let Some(rank) = (0..infos.len()).find(|&rank| rank != own && infos[rank].info.uuid == parts.info.uuid) {
            return Err(Error::rendezvous(format!(
                "ranks {rank} and {} are the same process; start a separate process for each rank: threads of one \
                 process cannot be ranks of one group",
                spec.rank
            )));
        }
        let others: Vec<EndpointInfo> = infos.iter().map(|info| info.info.clone()).collect();
        accl_transport::check_peers(parts.info, &others).map_err(|failed| failed.error)?;
        let peers = self.introduce(&self.driver, parts.info, &others, own)?;
        let neighbours: Vec<Rank> = neighbours(spec.rank, spec.world).collect();
        let missing = || -> Vec<Rank> {
            self.driver.with_core(|core| {
                neighbours.iter().copied().filter(|rank| !core.net.is_linked(peers[rank.index()])).collect()
            })
        };
        parts.connector.hand_over();
        let first = missing();
        if first.is_empty() {
            return Ok(Some(peers));
        }
        parts.connector.want(0, first.iter().map(|rank| others[rank.index()].clone()).collect());
        let begin = Instant::now();
        let (mut asked, mut is_logged) = (begin, false);
        let outcome = loop {
            parts.connector.await_change(CONNECT_TICK, || missing().is_empty());
            if missing().is_empty() {
                break Ok(Some(()));
            }
            if let Err(error) = poll() {
                break Err(error);
            }
            let now = Instant::now();
            if now >= deadline {
                break Err(self.unlinked(&missing(), &peers));
            }
            // A permanent cause, such as a peer in another job of a transport's library, would otherwise be reported only
            // at the deadline.
            if !is_logged && now.saturating_duration_since(begin) >= LOG_AFTER {
                is_logged = true;
                let missing = missing();
                tracing::warn!(
                    group = spec.name,
                    "rank {}: after {} s, {}; it waits at most {} s more",
                    spec.rank,
                    LOG_AFTER.as_secs(),
                    self.listed(&missing, &peers),
                    deadline.saturating_duration_since(now).as_secs()
                );
            }
            // A rank may have been replaced or have given up.
            if now.saturating_duration_since(asked) >= CONNECT_SLICE {
                asked = now;
                match meeting.goes_on() {
                    Ok(true) => {}
                    Ok(false) => break Ok(None),
                    Err(error) => break Err(error),
                }
            }
        };
        parts.connector.forget(0, first.iter().map(|rank| others[rank.index()].uuid).collect());
        outcome.map(|linked| linked.map(|()| peers))
    }

    /// Makes the processes of all ranks peers of this process on a lane.
    pub(super) fn introduce(
        &self,
        lane: &Driver,
        mine: &EndpointInfo,
        infos: &[EndpointInfo],
        own: usize,
    ) -> Result<Vec<PeerId>> {
        let polling = lane.polling().ok_or_else(|| Error::internal("a lane has no poller"))?;
        // A peer that left and came back may have a dead link that this process has not noticed yet.
        lane.after_poll(|core| {
            let introduce = |info: &EndpointInfo| {
                let likely = accl_transport::likely_transport(mine, info);
                core.net.introduce(info, likely.is_some_and(|row| row.polls_without_syscall))
            };
            let peers: Vec<PeerId> = infos.iter().map(introduce).collect();
            if core.net.is_unlinked(peers[own]) {
                let payload = self.config.segment_bytes as usize + accl_wire::frame::OVERHEAD_BYTES;
                let mut link = accl_transport::loopback::self_link(payload, polling.waker.clone());
                let slot = polling.poller.watch(&mut link)?;
                core.net.attach(peers[own], Box::new(link), slot);
            }
            Ok(peers)
        })
    }

    /// Returns the error for links that are missing at the deadline.
    fn unlinked(&self, missing: &[Rank], peers: &[PeerId]) -> Error {
        Error::timeout(format!("the deadline passed; {}", self.listed(missing, peers)))
    }

    /// Returns a clause that lists the peers without a link, and why.
    fn listed(&self, missing: &[Rank], peers: &[PeerId]) -> String {
        let missing: Vec<_> = missing.iter().map(|&rank| (rank, peers[rank.index()])).collect();
        let listed = self.driver.with_core(|core| missing::unlinked(&missing, &core.net));
        format!("{} of {} peers have no link: {listed}", missing.len(), peers.len() - 1)
    }
}

/// Opens the offloads of a group, in the order of registration. They are opened again when a session moves: a device, for
/// example, is set up for the devices of all ranks, which are new then. Returns `None` if the session has ended.
fn open_offloads(
    group: OffloadGroup<'_>,
    kinds: &[Arc<dyn OffloadKind>],
    meeting: &mut Meeting<'_>,
    poll: &mut dyn FnMut() -> Result<()>,
) -> Result<Option<OpenOffloads>> {
    let mut offloads = OpenOffloads::default();
    for kind in kinds {
        let mut opening = while_it_goes_on(meeting, poll, |poll| kind.open(&group, poll))?;
        loop {
            match opening {
                None => return Ok(None),
                Some(Opening::Unused) => break,
                Some(Opening::Open(offload)) => {
                    offloads.add(offload);
                    break;
                }
                Some(Opening::Exchange(text, next)) => {
                    let Some(texts) = meeting.exchange(&text, poll)? else { return Ok(None) };
                    opening = while_it_goes_on(meeting, poll, |poll| next(texts, poll))?;
                }
            }
        }
    }
    Ok(Some(offloads))
}

/// Returns the chooser of algorithms, built only from values that are the same on all ranks: their infos and the agreed
/// settings.
fn chooser(topology: Topology, spec: &GroupSpec, infos: &[RankInfo], segment_bytes: u64) -> Chooser {
    // Among the hosts with the most ranks, the host with the fewest cores decides for all.
    let cores_of = |host: u32| {
        let here = topology.ranks_of(host).iter().map(|&rank| &infos[rank as usize].cores);
        Cores::in_all(here).max(1) as u32
    };
    let largest = topology.largest_host();
    let full = (0..topology.host_count()).filter(|&host| topology.ranks_of(host).len() as u32 == largest);
    let cores = full.map(cores_of).min().unwrap_or(1);
    let intra_node = intra_node_of(&spec.config);
    let machine = infos.first().and_then(|info| info.machine).unwrap_or_default();
    let basis = Basis {
        machine,
        placement: Placement { intra_node, cores, segment_bytes },
        deterministic: spec.config.deterministic,
    };
    Chooser::new(topology, spec.config.algorithm.clone(), &basis)
}

/// Returns the identity of the group, the same on all ranks. No two groups have the same session, processes and
/// counters.
fn group_id(session: &str, infos: &[RankInfo]) -> u64 {
    let words = infos.iter().flat_map(|info| {
        let (high, low) = info.info.uuid.split_at(8);
        let word = |bytes: &[u8]| bytes.iter().fold(0, |word, &byte| word << 8 | u64::from(byte));
        [word(high), word(low), info.counter]
    });
    let words = session.bytes().map(u64::from).chain(words);
    // 0 stands for the process as a whole.
    hash_words(words).max(1)
}

/// Returns the number of each rank's host; hosts are numbered by first appearance.
fn host_indices(infos: &[RankInfo]) -> Vec<u32> {
    let mut hosts: Vec<&str> = Vec::new();
    infos
        .iter()
        .map(|info| {
            let id = info.info.host_id.as_str();
            let known = hosts.iter().position(|host| *host == id).unwrap_or_else(|| {
                hosts.push(id);
                hosts.len() - 1
            });
            known as u32
        })
        .collect()
}
