//! The state under the driver's lock: the net, the groups, and the calls in flight.
//!
//! Owns that state, and how groups come and go. The steps that use it have files of their own: `pass` makes progress,
//! `parking` prepares a driver's sleep, `peer_fates` answers what happened to a process, `silence` finds hosts that
//! vanished. The engine decides which thread does so; nothing here blocks or sleeps. Read [`Core`] first.

use std::any::Any;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use accl_types::{Error, Moment, Result};
use accl_wire::frame::{Header, Kind};
use smallvec::SmallVec;

use super::completed::{Completed, FailedGroup, Notes, Notify};
use super::context::Context;
use super::departure::Departure;
use super::driver_sleep::DriverSleep;
use super::ended::Ended;
use super::failure::cause_bytes;
use super::fast_calls::FastStart;
use super::inbox::{Early, EarlyFrames, MAX_EARLY_BYTES};
use super::report::CallInFlight;
use super::state::GroupState;
use super::stopping::Stopping;
use crate::call::{CallDesc, CallState, Wake};
use crate::exec::SpinLimit;
use crate::peers::{Net, PeerId};
use accl_types::hash::hash_words;

/// Hasher for group numbers, which are hashes already.
pub(super) type ById = BuildHasherDefault<IdHasher>;

/// Uses a number as its own hash.
#[derive(Default)]
pub(super) struct IdHasher(u64);

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
    pub(super) groups: HashMap<u64, GroupState, ById>,
    /// Groups with calls in flight.
    pub(super) active: Vec<u64>,
    /// Frames of groups that do not exist here yet.
    pub(super) early_frames: EarlyFrames,
    /// Groups that are being created here, with their peers.
    pub(super) expected: HashMap<u64, Vec<PeerId>, ById>,
    /// Groups that were destroyed here. Frames that still arrive for them are dropped.
    pub(super) ended: Ended,
    /// Calls that have completed, to be reported by the driver.
    pub(super) completed: Completed,
    /// Calls that have failed but cannot complete yet.
    pub(super) stopping: Stopping,
    /// Wakes the thread that sleeps in the poller.
    wake: Wake,
    /// Maximum bytes of a fragment.
    pub(super) segment: u64,
    /// Clock for code to which no time was passed.
    pub(super) clock: fn() -> Moment,
    /// Reports that a group has failed, to be handled at the end of a pass.
    pub(super) causes: Vec<(PeerId, Header, Vec<u8>)>,
    /// Groups that a rank has left since absent ranks were last looked for.
    pub(super) left: Vec<u64>,
    /// Number of consecutive calls that completed when they were issued. No thread has polled the links meanwhile.
    pub(super) calls_without_poll: u32,
    /// Whether a poll that asks the system is due: see [`Core::take_poll_due`].
    pub(super) poll_due: bool,
    /// Number of consecutive passes without progress.
    pub(super) idle: u32,
    /// Whether a driver sleeps, and which threads poll in its place.
    pub(super) driver_sleep: DriverSleep,
    /// Time of the next check for unresponsive hosts.
    pub(super) silence_at: Option<Moment>,
    pub(super) passes: u64,
}

/// Counters of the work done for progress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Number of passes over the links.
    pub passes: u64,
    /// Number of polls of a link, by passes and by threads that were about to sleep.
    pub links_polled: u64,
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
            driver_sleep: DriverSleep::default(),
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

    /// Starts a call on the fast path, and runs it as far as possible. Returns `None` if the call cannot take it; then
    /// nothing has changed. The whole path is compiled here, as one unit.
    pub fn start_fast(&mut self, id: u64, desc: &CallDesc, spin_limit: SpinLimit) -> Option<FastStart> {
        let started = self.guarded(|core| {
            let started = core.groups.get_mut(&id)?.start_fast(desc, spin_limit, &mut core.net, core.segment);
            if let Some(FastStart::Done { has_received: false, .. }) = started {
                core.ended_at_once();
            }
            started
        });
        started.unwrap_or_else(|error| Some(FastStart::Failed(Box::new(error))))
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
        let stopping = self.stopping.of_group(group).map(|(call, external)| CallInFlight {
            call: call.clone(),
            awaits: Vec::new(),
            external,
        });
        state.into_iter().chain(stopping).collect()
    }

    /// Returns whether failed calls wait for external operations to stop.
    pub fn has_stopping(&self) -> bool {
        !self.stopping.is_empty()
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
    pub(super) fn check_absentees(&mut self, now: Moment) -> bool {
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
            ("threads that poll", self.driver_sleep.watchers() as usize),
        ];
        let own = counts.into_iter().filter(|(_, count)| *count > 0).map(|(what, count)| format!("{count} {what}"));
        own.chain(self.groups.values().flat_map(GroupState::residue)).collect()
    }
}
