//! The state under the driver's lock: the net, the groups, and one progress pass over them.
//!
//! This module takes frames off links and finds their group. `driver` decides which thread runs a pass; nothing here
//! blocks or sleeps. Read [`Core::pass`] first.

use std::any::Any;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use accl_types::{Error, Moment, Result};
use accl_wire::frame::{Groups, Header, Kind, LAST, OVERHEAD_BYTES};
use accl_wire::{EndpointInfo, Link, Slot, Stance};
use smallvec::SmallVec;

use super::completed::{Completed, FailedGroup, Notes, Notify};
use super::context::Context;
use super::departure::Departure;
use super::ended::Ended;
use super::failure::cause_bytes;
use super::fast_calls::FastPathEnd;
use super::inbox::{Early, EarlyFrames, MAX_EARLY_BYTES};
use super::report::CallInFlight;
use super::state::GroupState;
use super::stopping::Stopping;
use crate::call::{CallDesc, CallState, Wake};
use crate::exec::SpinLimit;
use crate::peers::{FrameEnd, Gone, Net, PeerId, handle_frame};
use accl_types::hash::hash_words;

/// Maximum number of frames taken off one link before the other links get their turn.
const FRAMES_PER_TURN: usize = 32;
/// A frame of at least `MIN_HELD_BYTES` may belong to a call that was not issued here yet. It then stays on its link
/// for up to this many consecutive passes without progress. The call is likely to be issued soon, and then takes the
/// frame from the link without a copy.
const PASSES_HELD: u32 = 32;
const MIN_HELD_BYTES: usize = 2 << 10;
/// Maximum number of polls of all links before a reported failure of a group takes effect. Peers that keep sending must
/// not delay it forever.
const MAX_ROUNDS: usize = 1000;
/// Maximum number of consecutive calls that complete at once without a poll of the links.
const MAX_CALLS_WITHOUT_POLL: u32 = 16;
/// Maximum number of polls of the links before a sleeping driver is woken to poll by itself.
const ROUNDS_BEFORE_WAKE: u32 = 4;
/// Unresponsive time after which a host counts as vanished, if no call has a shorter timeout. Keep-alive allows an idle
/// link the same time.
pub const VANISHED: Duration = Duration::from_secs(30);
/// Interval between checks for unresponsive hosts.
pub const SILENCE_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of processes asked what happened to a peer.
const MAX_ASKED_NEIGHBOURS: usize = 4;

/// Hasher for group numbers, which are hashes already.
type ById = BuildHasherDefault<IdHasher>;

/// Uses a number as its own hash.
#[derive(Default)]
struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = hash_words([self.0].into_iter().chain(bytes.iter().map(|&byte| u64::from(byte))));
    }

    fn write_u64(&mut self, id: u64) {
        self.0 = id;
    }
}

/// The state under the driver's lock: the peers of this process, its groups, and the calls in flight.
pub struct Core {
    /// The peers and the links to them.
    pub net: Net,
    groups: HashMap<u64, GroupState, ById>,
    /// Groups with calls in flight.
    active: Vec<u64>,
    /// Frames of groups that do not exist here yet.
    early_frames: EarlyFrames,
    /// Groups that are being created here, with their peers.
    expected: HashMap<u64, Vec<PeerId>, ById>,
    /// Groups that were destroyed here. Frames that still arrive for them are dropped.
    ended: Ended,
    /// Calls that have completed, to be reported by the driver.
    completed: Completed,
    /// Calls that have failed but cannot complete yet.
    stopping: Stopping,
    /// Wakes the thread that sleeps in the poller.
    wake: Wake,
    /// Maximum bytes of a fragment.
    segment: u64,
    /// Clock for code to which no time was passed.
    clock: fn() -> Moment,
    /// Reports that a group has failed, to be handled at the end of a pass.
    causes: Vec<(PeerId, Header, Vec<u8>)>,
    /// Groups that a rank has left since absent ranks were last looked for.
    left: Vec<u64>,
    /// Number of consecutive calls that completed when they were issued. No thread has polled the links meanwhile.
    calls_without_poll: u32,
    /// Whether a poll that asks the system is due: see [`Core::take_poll_due`].
    poll_due: bool,
    /// Number of consecutive passes without progress.
    idle: u32,
    /// Time until which the driver sleeps in the poller; `None` if it does not sleep.
    parked: Option<Moment>,
    /// Whether a pass made progress while the driver slept, and the driver was not notified.
    driver_unnotified: bool,
    /// Number of threads that poll the links in a loop while the driver sleeps.
    watchers: u32,
    /// Time of the next check for unresponsive hosts.
    silence_at: Option<Moment>,
    passes: u64,
}

/// Counters of the work done for progress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Number of passes over the links.
    pub passes: u64,
    /// Number of polls of a link, by passes and by threads that were about to sleep.
    pub links_polled: u64,
}

/// Fate of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerFate {
    /// The process sent a disconnect message, and exited.
    Left,
    /// The process was lost without a disconnect message.
    Lost,
    /// The process has a link to this process.
    Here,
    /// Nothing certain is known about the process, or the question was invalid.
    Unknown,
}

impl PeerFate {
    const ALL: [PeerFate; 4] = [PeerFate::Left, PeerFate::Lost, PeerFate::Here, PeerFate::Unknown];

    /// Returns the name that an answer contains.
    pub fn name(self) -> &'static str {
        match self {
            PeerFate::Left => "left",
            PeerFate::Lost => "lost",
            PeerFate::Here => "here",
            PeerFate::Unknown => "unknown",
        }
    }

    /// Returns the fate that an answer contains.
    pub fn of(name: &str) -> Self {
        Self::ALL.into_iter().find(|fate| fate.name() == name).unwrap_or(PeerFate::Unknown)
    }
}

/// Action for a sleeping driver when the last thread that polled the links in its place stops polling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WakeDecision {
    /// The driver keeps sleeping, and peers wake it.
    KeepAsleep,
    /// Calls may have completed meanwhile. A driver that waits for one must check it.
    CheckCall,
    /// The driver must be woken to poll again.
    Wake,
}

impl Core {
    /// Creates a core without peers and groups. Messages are sent in fragments of at most `segment` bytes. `clock` is
    /// read where no time was passed.
    pub fn new(segment: u64, clock: fn() -> Moment) -> Self {
        Self {
            net: Net::default(),
            groups: HashMap::default(),
            active: Vec::new(),
            early_frames: EarlyFrames::default(),
            expected: HashMap::default(),
            causes: Vec::new(),
            left: Vec::new(),
            calls_without_poll: 0,
            poll_due: false,
            idle: 0,
            ended: Ended::default(),
            completed: Completed::default(),
            stopping: Stopping::default(),
            wake: Arc::new(|| {}),
            clock,
            segment,
            parked: None,
            driver_unnotified: false,
            watchers: 0,
            silence_at: None,
            passes: 0,
        }
    }

    /// Sets the function that wakes the thread that sleeps in the poller. It may be called from any thread.
    pub fn set_wake(&mut self, wake: Wake) {
        self.wake = wake;
    }

    /// Returns the function set by [`Core::set_wake`].
    pub(super) fn wake(&self) -> &Wake {
        &self.wake
    }

    /// Returns the clock for code to which no time was passed.
    pub(crate) fn clock(&self) -> fn() -> Moment {
        self.clock
    }

    /// Runs `f` on a group, with the context that it needs. Returns `None` if there is no such group.
    pub fn with_group<R>(
        &mut self,
        id: u64,
        now: Moment,
        f: impl FnOnce(&mut GroupState, &mut Context<'_>) -> R,
    ) -> Option<R> {
        let group = self.groups.get_mut(&id)?;
        let (completed, stopping) = (&mut self.completed, &mut self.stopping);
        let mut context = Context { net: &mut self.net, completed, stopping, segment: self.segment, now };
        let result = f(group, &mut context);
        if !group.is_idle() && !group.set_listed(true) {
            self.active.push(id);
        }
        Some(result)
    }

    /// Runs a call on the fast path as far as possible. Returns `None` if the call cannot take it; then nothing has
    /// changed. The whole path is compiled here, as one unit.
    pub fn run_fast_path(&mut self, id: u64, desc: &CallDesc, spin_limit: SpinLimit) -> Option<FastPathEnd> {
        let ran = self.guarded(|core| core.go_fast_path(id, desc, spin_limit));
        ran.unwrap_or_else(|error| Some(FastPathEnd::Failed(Box::new(error))))
    }

    #[inline]
    fn go_fast_path(&mut self, id: u64, desc: &CallDesc, spin_limit: SpinLimit) -> Option<FastPathEnd> {
        let group = self.groups.get_mut(&id)?;
        let ran = group.run_fast_path(desc, spin_limit, &mut self.net, self.segment);
        if let Some(FastPathEnd::Done { has_received: false, .. }) = ran {
            self.ended_at_once();
        }
        ran
    }

    /// Announces that a group of these peers will be added or removed. The caller must do so before any rank can have
    /// created the group. A peer may leave the group before there is a link to it; it is then asked about the group
    /// when the link is made.
    pub fn expect_group(&mut self, id: u64, peers: Vec<PeerId>) {
        for &peer in &peers {
            // The peer's end of the link may not be up yet, and its earlier messages are lost. Once the peer has sent
            // its hello, its end is up.
            if self.net.awaits_greeting_of(peer) {
                self.ask_about(peer, &[id], 0);
            }
        }
        self.expected.insert(id, peers);
        self.net.flush_all();
    }

    /// Asks a linked peer for the state of groups. `last` is the flag of the last frame.
    fn ask_about(&mut self, id: PeerId, groups: &[u64], last: u8) {
        let mut payloads = Groups::payloads(groups, self.segment as usize + OVERHEAD_BYTES).peekable();
        while let Some(payload) = payloads.next() {
            let flags = if payloads.peek().is_none() { last } else { 0 };
            self.net.send_control(id, Header { flags, ..Header::new(Kind::Hello) }, &payload);
        }
    }

    /// Adds a group, and passes it the frames that arrived before it.
    pub fn add_group(&mut self, group: GroupState, now: Moment) {
        let id = group.id();
        self.expected.remove(&id);
        self.groups.insert(id, group);
        let (early, is_complete) = self.early_frames.take(id);
        for Early { peer, header, payload } in early {
            self.with_group(id, now, |group, context| {
                if let Some(from) = group.members().rank_of(peer) {
                    group.on_frame(from, &header, &payload, context);
                }
            });
        }
        // A rank may have disconnected while the group was being created.
        self.with_group(id, now, |group, context| group.note_absentees(context.net));
        if !is_complete {
            let error = Error::exhausted(format!(
                "received more than {} MiB for groups that this rank is still creating; let all ranks create a group \
                 before its first call",
                MAX_EARLY_BYTES >> 20
            ));
            self.with_group(id, now, |group, context| group.fail(group.in_context(error), context, Notify::Peers));
        }
        self.net.flush_all();
    }

    /// Makes the next pass ask the system for events on the links of a group's ranks.
    pub fn force_poll_of(&mut self, group: u64) {
        let Some(group) = self.groups.get(&group) else { return };
        for rank in group.members().ranks() {
            self.net.force_poll(group.members().peer(rank));
        }
    }

    /// Removes a group, or one whose creation failed. Frames that still arrive for it are dropped.
    pub fn remove_group(&mut self, id: u64) {
        let group = self.groups.remove(&id);
        self.expected.remove(&id);
        self.active.retain(|active| *active != id);
        self.early_frames.take(id);
        if let Some(members) = group.as_ref().map(GroupState::members) {
            members.ranks().for_each(|rank| self.net.add_traffic(members.peer(rank), members.traffic(rank)));
        }
        let most = cause_bytes(self.segment);
        self.ended.add(id, group.and_then(|group| Some(group.announced_cause(most)?.1)));
    }

    /// Fails a group on this lane after it failed on another lane. Frames that have already arrived are handled first.
    /// Returns `false` if the group does not exist, or has already failed.
    ///
    /// Each lane notifies the ranks that `failed.notify` names over its own links, even if the lane that failed first
    /// has done so. The first lane also sends out-of-band notes. The other lanes must notify as well, because a peer
    /// may wait on such a lane while the first lane's link to it is broken.
    pub fn fail_with_lane(&mut self, failed: &FailedGroup, is_first: bool, now: Moment) -> bool {
        if self.groups.get(&failed.group).is_none_or(|state| state.failure().is_some()) {
            return false;
        }
        self.force_poll_of(failed.group);
        self.pass_whole(now);
        let notes = if is_first { Notes::Sent } else { Notes::LeftToFirstLane };
        let fails = |state: &mut GroupState, context: &mut Context<'_>| state.fail_on_lane(failed, notes, context);
        matches!(self.guarded(|core| core.with_group(failed.group, now, fails)), Ok(Some(())))
    }

    /// Leaves a group and removes it, without a chance for calls in between. Returns `None` if the group does not
    /// exist, or a panic has destroyed it.
    pub fn leave_group(&mut self, id: u64, now: Moment) -> Option<Departure> {
        let departure = self.guarded(|core| core.with_group(id, now, GroupState::depart));
        self.remove_group(id);
        departure.ok().flatten()
    }

    /// Returns whether completed calls wait for [`Core::take_completed`], or links or notes are requested.
    #[inline]
    pub fn has_deferred(&self) -> bool {
        !self.completed.is_empty() || self.net.has_wanted()
    }

    /// Takes the calls and failures to report since the last call.
    pub fn take_completed(&mut self) -> Completed {
        self.completed.take()
    }

    /// Requests that completed calls are kept: see [`Completed::calls`].
    pub fn follow_calls(&mut self) {
        self.completed.follow();
    }

    // ---- links

    /// Gives a peer its new link: see [`Net::attach`]. A sleeping driver must be woken to poll again, because it has
    /// not armed this link.
    pub fn attach(&mut self, id: PeerId, link: Box<dyn Link>, slot: Option<Slot>, now: Moment) {
        let _ = self.guarded(|core| {
            core.net.attach(id, link, slot);
            core.net.await_greeting(id);
            let expected = core.expected.iter().filter(|(_, peers)| peers.contains(&id)).map(|(group, _)| *group);
            let made = core.groups.values_mut().filter_map(|group| group.note_link(id));
            let shared: Vec<u64> = made.chain(expected).collect();
            // Each side may have left groups, or seen them fail, when there was no link to report it.
            core.ask_about(id, &shared, LAST);
            core.pass_whole(now);
        });
    }

    /// Records that a peer without a link cannot be reached. The calls that need it fail.
    pub fn lose(&mut self, id: PeerId, error: Error, now: Moment) {
        if self.net.is_unlinked(id) {
            self.net.mark_gone(id, error);
            let _ = self.guarded(|core| core.check_absentees(now));
        }
    }

    /// Returns the stance towards a peer that connects: whether its link works, as far as the system knows.
    pub fn stance_to(&mut self, uuid: &[u8; 16], now: Moment) -> Stance {
        let Some(id) = self.net.find(uuid) else {
            // This process would ignore what the peer reports about its earlier groups, and the peer would wait for
            // answers.
            return if self.net.gone(uuid).is_some() { Stance::GivenUp } else { Stance::Unlinked };
        };
        if !self.net.is_linked(id) {
            return Stance::Unlinked;
        }
        self.poll_peer(id, now);
        match self.net.is_linked(id) {
            true => Stance::Linked,
            false => Stance::GivenUp,
        }
    }

    /// Handles everything that a peer has sent, and detects whether it has disconnected.
    fn poll_peer(&mut self, id: PeerId, now: Moment) {
        self.net.force_poll(id);
        let checked = self.guarded(|core| {
            // The end of the peer is detected only after all its frames were handled.
            core.pass_whole(now);
            core.net.check(id)
        });
        if let Ok(Err(error)) = checked {
            self.net.mark_gone(id, error);
            let _ = self.guarded(|core| core.check_absentees(now));
        }
    }

    /// Returns a group, if it exists.
    pub fn group(&self, id: u64) -> Option<&GroupState> {
        self.groups.get(&id)
    }

    /// Returns all groups.
    pub fn groups(&self) -> impl Iterator<Item = &GroupState> {
        self.groups.values()
    }

    /// Returns the maximum bytes of a fragment.
    pub fn segment(&self) -> u64 {
        self.segment
    }

    /// Returns the counters of the work done for progress.
    pub fn work(&self) -> Work {
        Work { passes: self.passes, links_polled: self.net.polls() }
    }

    /// Records that a process without a link has exited after it sent disconnect messages to others. With `is_assumed`
    /// this is only assumed. If other processes ask, this process then answers [`PeerFate::Unknown`].
    pub fn depart(&mut self, id: PeerId, is_assumed: bool, now: Moment) {
        if self.net.is_unlinked(id) {
            self.net.note_disconnect(id, is_assumed);
            self.lose(id, Error::peer_lost("it has left"), now);
        }
    }

    /// Returns processes that may know better what happened to a peer: its neighbours in shared groups, which linked to
    /// it when the group was created.
    pub fn neighbours_of(&self, uuid: &[u8; 16]) -> Vec<EndpointInfo> {
        let Some(id) = self.net.find(uuid) else { return Vec::new() };
        let mut found: Vec<PeerId> = Vec::new();
        for group in self.groups.values() {
            let Some(rank) = group.members().rank_of(id) else { continue };
            let near = group.members().neighbours(rank).filter(|&rank| rank != group.rank());
            let there = near.filter(|&rank| !group.members().is_absent(rank, &self.net));
            for peer in there.map(|rank| group.members().peer(rank)) {
                if !found.contains(&peer) {
                    found.push(peer);
                }
            }
            if found.len() >= MAX_ASKED_NEIGHBOURS {
                break;
            }
        }
        found.into_iter().take(MAX_ASKED_NEIGHBOURS).map(|id| self.net.peer(id).info().clone()).collect()
    }

    /// Returns whether a process should still get a note that a group has failed.
    pub fn is_note_needed(&self, uuid: &[u8; 16], group: u64) -> bool {
        let Some(id) = self.net.find(uuid) else { return false };
        self.groups.get(&group).is_none_or(|group| group.may_not_know(id, &self.net))
    }

    /// Handles an out-of-band frame, and returns the answer.
    pub fn on_note(&mut self, from: &[u8; 16], note: &[u8], now: Moment) -> PeerFate {
        let Some((head, payload)) = note.split_first_chunk() else { return PeerFate::Unknown };
        let Ok(header) = Header::parse(head) else { return PeerFate::Unknown };
        match (header.kind, self.net.find(from)) {
            (Kind::Cause, Some(id)) => {
                let _ = self.guarded(|core| {
                    core.on_frame(id, &header, payload, now);
                    core.pass_whole(now);
                });
                PeerFate::Unknown
            }
            (Kind::PeerFate, _) => payload.try_into().map_or(PeerFate::Unknown, |uuid: &[u8; 16]| self.fate(uuid, now)),
            _ => PeerFate::Unknown,
        }
    }

    /// Returns what happened to a process, as far as it is known here.
    fn fate(&mut self, uuid: &[u8; 16], now: Moment) -> PeerFate {
        let linked = self.net.find(uuid).filter(|&id| self.net.is_linked(id));
        if let Some(id) = linked {
            self.poll_peer(id, now);
            if self.net.is_linked(id) {
                return PeerFate::Here;
            }
        }
        let Some(peer) = self.net.gone(uuid).map(|id| self.net.peer(id)) else { return PeerFate::Unknown };
        match peer.gone() {
            // Others may know better, so an assumption is not reported.
            Some(Gone::Left) if peer.is_disconnect_assumed() => PeerFate::Unknown,
            Some(Gone::Left) => PeerFate::Left,
            Some(Gone::Lost(_)) => PeerFate::Lost,
            None => PeerFate::Unknown,
        }
    }

    /// Reports to a newly linked peer which of its groups have failed, or were left, here.
    fn answer_groups(&mut self, id: PeerId, payload: &[u8], now: Moment) -> Result<()> {
        for group in Groups::parse(payload)?.iter() {
            let header = |kind| Header { group, ..Header::new(kind) };
            if let Some(cause) = self.ended.cause(group) {
                if let Some(cause) = cause {
                    self.net.send_control(id, header(Kind::Cause), cause);
                }
                self.net.send_control(id, header(Kind::Disconnect), &[]);
            } else if self.groups.get(&group).is_some_and(|group| group.members().rank_of(id).is_none()) {
                // This process has left the group, and the peer is again a peer in another group.
                self.net.send_control(id, header(Kind::Disconnect), &[]);
            } else {
                self.with_group(group, now, |group, context| group.notify_of_failure(id, context));
            }
        }
        Ok(())
    }

    /// Returns whether there is work for a driver: a call in flight or stopping, or unsent bytes of a completed call.
    /// A link that needs a listener, or a hello that is awaited, is work as well.
    pub fn has_work(&self) -> bool {
        !self.active.is_empty() || self.net.wants_driver() || self.net.awaits_greeting() || self.has_stopping()
    }

    /// Returns the earliest deadline of any call in flight.
    pub fn next_deadline(&self) -> Option<Moment> {
        let calls = self.active.iter().filter_map(|id| self.groups.get(id)?.next_deadline());
        calls.chain(self.stopping.next_deadline()).min()
    }

    /// Returns the calls of a group that are in flight, including failed calls that wait for external operations to
    /// stop.
    pub fn in_flight(&self, group: u64) -> Vec<CallInFlight> {
        let state = self.groups.get(&group).map(GroupState::in_flight).unwrap_or_default();
        // Such a call no longer needs any rank.
        let stopping = self.stopping.runs_of(group).map(|run| CallInFlight::of(run, Vec::new()));
        state.into_iter().chain(stopping).collect()
    }

    /// Returns whether failed calls wait for external operations to stop.
    pub fn has_stopping(&self) -> bool {
        !self.stopping.is_empty()
    }

    /// Returns when a driver that goes to sleep now must check for unresponsive hosts, if any link needs it. While the
    /// driver sleeps, other threads may send, and do not wake it for this.
    fn next_silence_check(&self, now: Moment) -> Option<Moment> {
        let asked = self.silence_at.filter(|_| self.net.awaits_answers());
        asked.or_else(|| self.net.has_streams().then(|| now + VANISHED))
    }

    /// Gives up peers whose host has vanished. The system would keep retransmitting for a quarter of an hour, and no
    /// call on the link waits that long.
    fn check_silence(&mut self, now: Moment) {
        let is_late = || self.next_deadline().is_some_and(|deadline| deadline <= now);
        if self.silence_at.is_some_and(|at| now < at) && !is_late() {
            return;
        }
        self.silence_at = Some(now + SILENCE_CHECK_INTERVAL);
        for (id, silence) in self.net.take_unresponsive() {
            let allowed = self.active.iter().filter_map(|group| self.groups.get(group)?.least_allowance(id)).min();
            if silence >= allowed.unwrap_or(VANISHED).min(VANISHED) {
                let error = Error::peer_lost(format!(
                    "{}: its host has not answered for {} ms, despite retransmissions; check the network \
                     between the hosts",
                    self.net.describe(id),
                    silence.as_millis()
                ));
                self.net.abandon(id);
                self.net.mark_gone(id, error);
            }
        }
    }

    /// Returns, and clears, whether progress was made while the driver sleeps, of which it was not notified. Its call
    /// may be done, so the caller must wake it.
    #[inline]
    pub fn take_driver_unnotified(&mut self) -> bool {
        std::mem::take(&mut self.driver_unnotified)
    }

    /// Returns whether the sleeping driver must poll again: a call has an earlier deadline, or something may happen
    /// that wakes no thread. Links polled by a watching thread are armed when that thread stops.
    pub fn must_wake_driver(&self, deadline: Option<Moment>) -> bool {
        let is_unarmed = || self.watchers == 0 && self.net.is_unarmed();
        self.parked.is_some_and(|until| is_unarmed() || deadline.is_some_and(|deadline| deadline < until))
    }

    /// Announces that a thread starts to poll the links in a loop. Returns `true` if a driver sleeps meanwhile. Peers
    /// then need not wake the driver, and [`Core::unwatch`] must follow.
    #[inline]
    pub fn watch(&mut self) -> bool {
        let is_parked = self.parked.is_some();
        if is_parked {
            self.watch_for_the_driver();
        }
        is_parked
    }

    #[cold]
    fn watch_for_the_driver(&mut self) {
        if self.watchers == 0 {
            self.net.mute();
        }
        self.watchers += 1;
    }

    /// Ends a [`Core::watch`]. All calls that have taken their sequence number must have started, because frames are
    /// handled here.
    pub fn unwatch(&mut self, now: Moment) -> WakeDecision {
        let decision = match self.parked {
            Some(_) if self.watchers == 1 => self.guarded(|core| core.resume_parked(now)).unwrap_or(WakeDecision::Wake),
            Some(_) | None => WakeDecision::KeepAsleep,
        };
        self.watchers -= 1;
        match decision {
            // The progress may have completed the driver's call, or brought an earlier deadline.
            WakeDecision::KeepAsleep | WakeDecision::CheckCall if self.take_driver_unnotified() => {
                if self.must_wake_driver(self.next_deadline()) { WakeDecision::Wake } else { WakeDecision::CheckCall }
            }
            decision => decision,
        }
    }

    /// Lets peers wake a sleeping driver again.
    fn resume_parked(&mut self, now: Moment) -> WakeDecision {
        let mut decision = WakeDecision::KeepAsleep;
        for _ in 0..ROUNDS_BEFORE_WAKE {
            if !self.net.prepare_park() {
                return decision;
            }
            // Usually, a fast peer has begun the next call.
            self.net.mute();
            let departures = self.net.departures();
            self.pass_whole(now);
            if self.net.departures() != departures {
                return WakeDecision::Wake;
            }
            decision = WakeDecision::CheckCall;
        }
        WakeDecision::Wake
    }

    /// Runs one progress pass: takes frames off the links, advances calls, and sends what can be sent. Returns whether
    /// there was progress.
    ///
    /// A panic in a pass is a defect of this library. The driving thread must survive it, and other threads must not
    /// wait for work that the panic left undone. Therefore all groups fail.
    pub fn pass(&mut self, now: Moment) -> bool {
        self.guarded(|core| core.pass_unguarded(now)).unwrap_or(true)
    }

    /// Runs `work`. If it panics, all groups fail.
    #[inline]
    pub fn guarded<R>(&mut self, work: impl FnOnce(&mut Self) -> R) -> Result<R> {
        catch_unwind(AssertUnwindSafe(|| work(self))).map_err(|panic| self.fail_all(&*panic))
    }

    /// Fails all groups after a panic. The same code may panic again; such a panic is caught, and does not repeat
    /// forever.
    pub fn fail_all(&mut self, panic: &(dyn Any + Send)) -> Error {
        let said = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let said = said.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        let error = Error::internal(format!("panic while making progress: {said}; please report it"));
        let now = (self.clock)();
        for id in self.groups.keys().copied().collect::<Vec<_>>() {
            let mut fail = |notify| {
                let failing = || self.with_group(id, now, |group, context| group.fail(error.clone(), context, notify));
                catch_unwind(AssertUnwindSafe(failing)).is_ok()
            };
            let _ = fail(Notify::Peers) || fail(Notify::NoRank);
        }
        for id in std::mem::take(&mut self.active) {
            if let Some(group) = self.groups.get_mut(&id) {
                group.set_listed(false);
            }
        }
        // The interrupted pass would have sent the notifications to the peers.
        while let Err(id) = self.net.flush_guarded() {
            self.net.mark_gone(id, error.clone());
        }
        error
    }

    /// Follows a call that completed when it was issued. Polls the links now and then, because otherwise a rank that
    /// only sends would never receive events.
    pub(crate) fn ended_at_once(&mut self) {
        self.calls_without_poll += 1;
        if self.calls_without_poll >= MAX_CALLS_WITHOUT_POLL {
            self.calls_without_poll = 0;
            self.poll_due = self.net.has_streams();
            self.pass_whole((self.clock)());
        }
    }

    /// Returns, and clears, whether a thread should ask the system for events. Otherwise no thread would, as long as
    /// calls complete when they are issued and no thread waits.
    #[inline]
    pub fn take_poll_due(&mut self) -> bool {
        std::mem::take(&mut self.poll_due)
    }

    /// Returns whether a driver sleeps in the poller.
    pub fn is_parked(&self) -> bool {
        self.parked.is_some()
    }

    /// Returns the peers of a call in flight whose links need a system call to be polled. A thread that waits for the
    /// call without sleeping must poll them.
    pub fn streams_of(&self, call: &CallState) -> SmallVec<[PeerId; 4]> {
        if !self.net.has_streams() {
            return SmallVec::new();
        }
        self.streams_among(&self.peers_of(call))
    }

    /// Returns the peers that a call in flight sends to or receives from, as far as they are known.
    pub fn peers_of(&self, call: &CallState) -> SmallVec<[PeerId; 4]> {
        self.groups.get(&call.group_id).map(|group| group.peers_of(call)).unwrap_or_default()
    }

    /// Returns the peers among these whose links need a system call to be polled.
    pub fn streams_among(&self, peers: &[PeerId]) -> SmallVec<[PeerId; 4]> {
        peers.iter().copied().filter(|&peer| !self.net.polls_without_syscall(peer)).collect()
    }

    /// Returns whether frames from one of these peers must be polled for repeatedly.
    pub fn polls_among(&self, peers: &[PeerId]) -> bool {
        peers.iter().any(|&peer| self.net.is_polled(peer))
    }

    /// Prepares the sleep of a driver until news arrive, at most until `until`. `call` is the call for which the driver
    /// waits, if any. Does everything that can be done before the sleep. Returns until when to sleep ([`Moment::FAR`]:
    /// until an event); then [`Core::unpark`] must follow. Returns `None` if there was progress, or nothing is left to
    /// wait for. Without `ticks`, unresponsive hosts are not checked.
    ///
    /// # Errors
    /// Returns the error of [`Core::guarded`] after a panic: every call has failed.
    pub fn park(
        &mut self,
        call: Option<&CallState>,
        until: Option<Moment>,
        ticks: bool,
        now: Moment,
    ) -> Result<Option<Moment>> {
        self.guarded(|core| {
            // While a large message arrives, more of it is usually available. Asking for it costs less than sleeping
            // until the system announces it.
            if core.idle == 0
                && let Some(call) = call
            {
                core.streams_of(call).into_iter().for_each(|peer| core.net.force_poll_if_flowing(peer));
            }
            if core.pass(now) || core.pass_whole(now) {
                return None;
            }
            core.check(now);
            if call.is_some_and(CallState::is_done) || (call.is_none() && !core.has_work()) {
                return None;
            }
            // All work that needs no peer is done. What remains waits for frames or for room.
            if core.net.prepare_park() {
                core.net.unpark();
                return None;
            }
            let silence = core.next_silence_check(now).filter(|_| ticks);
            let poll = core.net.poll_interval().map(|interval| now + interval);
            let deadline = core.next_deadline();
            let until = until.into_iter().chain(deadline).chain(silence).chain(poll).min().unwrap_or(Moment::FAR);
            core.parked = Some(until);
            Some(until)
        })
    }

    /// Ends the sleep of the driver.
    pub fn unpark(&mut self, now: Moment) {
        (self.parked, self.driver_unnotified) = (None, false);
        // After a panic every call has failed, and each waiting thread finds its own call failed.
        let _ = self.guarded(|core| {
            core.net.unpark();
            core.pass(now);
            core.check(now);
        });
    }

    /// Runs [`Core::pass`] and leaves no frame on a link, for callers that will not poll again soon.
    pub fn pass_whole(&mut self, now: Moment) -> bool {
        self.idle = PASSES_HELD;
        self.pass(now)
    }

    fn pass_unguarded(&mut self, now: Moment) -> bool {
        self.passes += 1;
        let moved = self.drain_all(now);
        self.end_pass(moved, now)
    }

    /// Finishes a pass after frames were taken off links.
    fn end_pass(&mut self, mut moved: bool, now: Moment) -> bool {
        if !self.causes.is_empty() {
            self.handle_causes(now);
            moved = true;
        }
        moved |= self.advance(now);
        moved |= self.net.flush_all();
        // No other pass may detect the departure. The event was lost with the link, and a polling thread checks nothing
        // else.
        moved |= self.check_absentees(now);
        self.net.end_pass();
        self.driver_unnotified |= moved && self.parked.is_some();
        // A sleeping driver has armed all links, and only events on them wake it.
        if self.parked.is_some() && self.watchers == 0 && self.net.arm_again() {
            (self.wake)();
        }
        self.idle = if moved { 0 } else { self.idle.saturating_add(1) };
        moved
    }

    /// Fails groups whose failure was reported, after everything that had arrived earlier is handled. A rank reports
    /// the failure on its own link, and a frame that completes a call may lie on another link.
    fn handle_causes(&mut self, now: Moment) {
        self.idle = PASSES_HELD;
        self.net.force_poll_all();
        for _ in 0..MAX_ROUNDS {
            if !self.drain_all(now) {
                break;
            }
        }
        for (peer, header, payload) in std::mem::take(&mut self.causes) {
            self.with_group(header.group, now, |group, context| {
                if let Some(from) = group.members().rank_of(peer) {
                    group.on_frame(from, &header, &payload, context);
                }
            });
        }
    }

    /// Advances the calls of active groups, without polling links.
    pub(crate) fn advance(&mut self, now: Moment) -> bool {
        let mut moved = false;
        let groups = &mut self.groups;
        let (net, completed, stopping) = (&mut self.net, &mut self.completed, &mut self.stopping);
        let segment = self.segment;
        self.active.retain(|id| {
            let Some(group) = groups.get_mut(id) else { return false };
            let mut context =
                Context { net: &mut *net, completed: &mut *completed, stopping: &mut *stopping, segment, now };
            moved |= group.advance(&mut context);
            group.set_listed(!group.is_idle());
            !group.is_idle()
        });
        if !self.stopping.is_empty() {
            moved |= self.stopping.advance(&mut self.completed, now);
        }
        moved
    }

    /// Fails calls whose deadline has passed or whose peers are gone. Runs now and then, and before sleeping.
    pub fn check(&mut self, now: Moment) {
        let mut index = 0;
        // If a peer on an armed link is gone, an event is posted to the board, and the link is polled again.
        while let Some(id) = self.net.polled(index) {
            match self.net.check(id) {
                Ok(()) => index += 1,
                Err(error) => self.net.mark_gone(id, error),
            }
        }
        self.check_silence(now);
        self.check_absentees(now);
        for id in self.active.clone() {
            self.with_group(id, now, GroupState::check);
        }
    }

    /// If a peer or rank has left, fails the calls that need it. Returns whether any has left.
    fn check_absentees(&mut self, now: Moment) -> bool {
        let left = std::mem::take(&mut self.left);
        let concerned = if self.net.take_departures() { self.groups.keys().copied().collect() } else { left };
        for &id in &concerned {
            self.with_group(id, now, |group, context| {
                group.note_absentees(context.net);
                group.check(context);
            });
        }
        if !concerned.is_empty() {
            self.net.flush_all();
        }
        !concerned.is_empty()
    }

    fn drain_all(&mut self, now: Moment) -> bool {
        self.net.take_events();
        let mut moved = false;
        let mut index = 0;
        while let Some(id) = self.net.polled(index) {
            let has_found = self.drain(id, now);
            moved |= has_found;
            self.net.note_poll(id, has_found);
            // If the peer is gone or no longer polled, another peer may have taken its index.
            index += usize::from(self.net.polled(index) == Some(id));
        }
        moved
    }

    fn drain(&mut self, id: PeerId, now: Moment) -> bool {
        let mut moved = false;
        for _ in 0..FRAMES_PER_TURN {
            let handled = handle_frame(
                self,
                |core| &mut core.net,
                id,
                |core, frame| {
                    let payload_bytes = frame.payload.len();
                    match Header::parse(frame.head) {
                        Ok(header) if core.is_held(&header, frame.payload) => return FrameEnd::Held,
                        Ok(header) => {
                            core.on_frame(id, &header, frame.payload, now);
                            // Groups count the frames of their own calls.
                            if !header.kind.carries_data() {
                                core.net.count_received(id, payload_bytes);
                            }
                        }
                        Err(error) => core.net.mark_gone(id, error),
                    }
                    FrameEnd::Released
                },
            );
            match handled {
                Ok(Some(FrameEnd::Released)) => moved = true,
                Ok(Some(FrameEnd::Held) | None) => break,
                Err(error) => {
                    self.net.mark_gone(id, error);
                    return true;
                }
            }
        }
        moved
    }

    /// Returns whether a frame stays on its link for now.
    fn is_held(&self, header: &Header, payload: &[u8]) -> bool {
        payload.len() >= MIN_HELD_BYTES
            && self.idle < PASSES_HELD
            && self.groups.get(&header.group).is_some_and(|group| group.is_early(header))
    }

    fn on_frame(&mut self, peer: PeerId, header: &Header, payload: &[u8], now: Moment) {
        if header.group == 0 {
            match header.kind {
                Kind::Disconnect => self.net.note_disconnect(peer, false),
                Kind::Hello => {
                    if header.flags & LAST != 0 {
                        self.net.end_greeting(peer);
                    }
                    if let Err(error) = self.answer_groups(peer, payload, now) {
                        self.net.mark_gone(peer, error);
                    }
                }
                _ => {}
            }
            return;
        }
        if header.kind == Kind::Cause && self.groups.contains_key(&header.group) {
            self.causes.push((peer, *header, payload.to_vec()));
            return;
        }
        let known = self.with_group(header.group, now, |group, context| {
            if let Some(from) = group.members().rank_of(peer) {
                group.on_frame(from, header, payload, context);
            }
        });
        if known.is_some() && header.kind == Kind::Disconnect {
            self.left.push(header.group);
        }
        if known.is_none() && !self.ended.contains(header.group) {
            self.early_frames.push(header.group, Early { peer, header: *header, payload: payload.to_vec() });
        }
    }

    /// Sends a disconnect message to every linked peer.
    pub fn send_disconnect(&mut self) {
        for id in self.net.linked().to_vec() {
            self.net.send_control(id, Header::new(Kind::Disconnect), &[]);
        }
        self.net.flush_all();
    }

    /// Describes everything that still exists although no call is in flight.
    pub fn residue(&self) -> Vec<String> {
        let counts = [
            ("active groups", self.active.len()),
            ("frames of unknown groups", self.early_frames.kept().0),
            ("bytes of these frames", self.early_frames.kept().1),
            ("groups being created", self.expected.len()),
            ("announcements", self.causes.len()),
            ("callbacks", self.completed.callbacks.len()),
            ("calls with external operations that have not stopped", self.stopping.len()),
            ("control frames", self.net.queued()),
            ("peers with unsent bytes", usize::from(self.net.has_unsent())),
            ("peers that have not sent their hello", usize::from(self.net.awaits_greeting())),
            ("threads that poll", self.watchers as usize),
        ];
        let own = counts.into_iter().filter(|(_, count)| *count > 0).map(|(what, count)| format!("{count} {what}"));
        own.chain(self.groups.values().flat_map(GroupState::residue)).collect()
    }
}
