//! What the driver's lock protects: the net, the groups, and one pass of progress over them.
//!
//! Owns taking frames off links and finding their group. Who may run a pass is decided in `driver`; nothing here blocks
//! or sleeps. Read [`Core::pass`] first.

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
use super::ended::Ended;
use super::inbox::{Early, Lobby, MAX_LOBBY_BYTES};
use super::state::{CallInFlight, Departure, FastPathEnd, GroupState, cause_bytes};
use super::stopping::Stopping;
use crate::call::{CallDesc, CallState, Wake};
use crate::exec::SpinLimit;
use crate::peers::{FrameEnd, Gone, Net, PeerId, handle_frame};
use accl_types::hash::hash_words;

/// Frames taken off one link before the others have their turn.
const FRAMES_PER_TURN: usize = 32;
/// A frame of a call that has yet to be made here stays on its link for this many passes in which nothing moves, when it
/// has this many bytes: the call is likely to come soon, and takes it from there without a copy.
const PASSES_HELD: u32 = 32;
const MIN_HELD_BYTES: usize = 2 << 10;
/// Looks at all links before the end of a group is heeded: peers that go on sending must not put it off for ever.
const MAX_ROUNDS: usize = 1000;
/// Calls that may end one after the other without a look at the links.
const MAX_CALLS_WITHOUT_LOOK: u32 = 16;
/// Looks at the links before a sleeping driver is woken to look itself.
const ROUNDS_OF_RELIEF: u32 = 4;
/// A host that has not answered for so long has vanished, as long as nobody's deadline is shorter: what keep-alive allows
/// a link on which nothing is under way.
pub const VANISHED: Duration = Duration::from_secs(30);
/// How often silent hosts are looked for.
pub const LOOK_FOR_SILENCE: Duration = Duration::from_secs(1);
/// So many are asked what has become of a peer.
const MAX_WITNESSES: usize = 4;

/// Group numbers are hashes already.
type ById = BuildHasherDefault<IdHasher>;

/// Takes a number for its own hash.
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

/// What the driver's lock protects: the peers of this process, its groups, and what is under way.
pub struct Core {
    /// The peers and the links to them.
    pub net: Net,
    groups: HashMap<u64, GroupState, ById>,
    /// Groups with calls in flight.
    active: Vec<u64>,
    /// Frames of groups that do not exist here yet.
    lobby: Lobby,
    /// Groups that are being made here, with their peers.
    expected: HashMap<u64, Vec<PeerId>, ById>,
    /// Groups that were destroyed here: what still comes for them is dropped.
    ended: Ended,
    /// Calls that have ended, for the driver.
    completed: Completed,
    /// Calls that have failed and not ended.
    stopping: Stopping,
    /// Wakes whoever sleeps in the poller.
    wake: Wake,
    /// Most bytes of a fragment.
    segment: u64,
    /// For what happens without a moment at hand.
    clock: fn() -> Moment,
    /// Announcements that a group has failed, to be handled at the end of a pass.
    causes: Vec<(PeerId, Header, Vec<u8>)>,
    /// Groups that a rank has left since the last look for absentees.
    left: Vec<u64>,
    /// Calls in a row that ended when they were made: nobody has looked at the links meanwhile.
    calls_without_look: u32,
    /// See [`Core::take_owed_look`].
    owes_look: bool,
    /// Passes in a row in which nothing moved.
    idle: u32,
    /// Until when the driver is parked in the poller, if it is.
    parked: Option<Moment>,
    /// A pass has moved something while the driver slept, and nobody has told it.
    owes_driver: bool,
    /// Threads that look at the links again and again while it is.
    watchers: u32,
    /// When silent hosts are looked for again.
    silence_at: Option<Moment>,
    passes: u64,
}

/// What progress has cost so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Passes over the links.
    pub passes: u64,
    /// How often these, and whoever was about to sleep, have looked at a link.
    pub links_looked_at: u64,
}

/// What has become of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It said goodbye, and went.
    Left,
    /// It went without a word.
    Lost,
    /// It is linked here.
    Here,
    /// It never was, or nothing was asked.
    Unknown,
}

impl Fate {
    const ALL: [Fate; 4] = [Fate::Left, Fate::Lost, Fate::Here, Fate::Unknown];

    /// As it goes into an answer.
    pub fn name(self) -> &'static str {
        match self {
            Fate::Left => "left",
            Fate::Lost => "lost",
            Fate::Here => "here",
            Fate::Unknown => "unknown",
        }
    }

    /// What an answer says.
    pub fn of(name: &str) -> Self {
        Self::ALL.into_iter().find(|fate| fate.name() == name).unwrap_or(Fate::Unknown)
    }
}

/// What becomes of a parked driver when the last thread that looked at the links in its place looks no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relief {
    /// It sleeps on, and peers wake it.
    SleepsOn,
    /// Calls may have ended meanwhile: a driver that waits for one must look.
    MayBeOver,
    /// It must look again.
    Wake,
}

impl Core {
    /// Without peers and groups. Messages go in fragments of at most `segment` bytes; `clock` is asked where no moment is at hand.
    pub fn new(segment: u64, clock: fn() -> Moment) -> Self {
        Self {
            net: Net::default(),
            groups: HashMap::default(),
            active: Vec::new(),
            lobby: Lobby::default(),
            expected: HashMap::default(),
            causes: Vec::new(),
            left: Vec::new(),
            calls_without_look: 0,
            owes_look: false,
            idle: 0,
            ended: Ended::default(),
            completed: Completed::default(),
            stopping: Stopping::default(),
            wake: Arc::new(|| {}),
            clock,
            segment,
            parked: None,
            owes_driver: false,
            watchers: 0,
            silence_at: None,
            passes: 0,
        }
    }

    /// What wakes whoever sleeps in the poller, from any thread.
    pub fn set_wake(&mut self, wake: Wake) {
        self.wake = wake;
    }

    /// As it was set.
    pub(super) fn wake(&self) -> &Wake {
        &self.wake
    }

    /// For what happens without a moment at hand.
    pub(crate) fn clock(&self) -> fn() -> Moment {
        self.clock
    }

    /// Runs `f` on a group with what it needs.
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

    /// Runs a call on the fast path, as far as that goes. `None`: not at all. All of the path is compiled here, in one piece.
    pub fn run_fast_path(&mut self, id: u64, desc: &CallDesc, spin_limit: SpinLimit) -> Option<FastPathEnd> {
        let ran = self.guarded(|core| core.go_fast_path(id, desc, spin_limit));
        ran.unwrap_or_else(|error| Some(FastPathEnd::Failed(Box::new(error))))
    }

    #[inline]
    fn go_fast_path(&mut self, id: u64, desc: &CallDesc, spin_limit: SpinLimit) -> Option<FastPathEnd> {
        let group = self.groups.get_mut(&id)?;
        let ran = group.run_fast_path(desc, spin_limit, &mut self.net, self.segment);
        if let Some(FastPathEnd::Done { heard: false, .. }) = ran {
            self.ended_at_once();
        }
        ran
    }

    /// A group of these peers will be added, or removed. To be said before any rank can have made it: a peer that leaves it when
    /// there is no link yet is asked about it when there is one.
    pub fn expect_group(&mut self, id: u64, peers: Vec<PeerId>) {
        for &peer in &peers {
            // Its end of the link may not be there yet, and what it says until then goes nowhere. Who has greeted has its end.
            if self.net.awaits_greeting_of(peer) {
                self.ask_about(peer, &[id], 0);
            }
        }
        self.expected.insert(id, peers);
        self.net.flush_all();
    }

    /// Asks a peer with a link what has become of groups; `last` goes with the last frame.
    fn ask_about(&mut self, id: PeerId, groups: &[u64], last: u8) {
        let mut payloads = Groups::payloads(groups, self.segment as usize + OVERHEAD_BYTES).peekable();
        while let Some(payload) = payloads.next() {
            let flags = if payloads.peek().is_none() { last } else { 0 };
            self.net.send_control(id, Header { flags, ..Header::new(Kind::Groups) }, &payload);
        }
    }

    /// Adds a group and hands it the frames that came before it.
    pub fn add_group(&mut self, group: GroupState, now: Moment) {
        let id = group.id();
        self.expected.remove(&id);
        self.groups.insert(id, group);
        let (early, is_complete) = self.lobby.take(id);
        for Early { peer, header, payload } in early {
            self.with_group(id, now, |group, context| {
                if let Some(from) = group.members().rank_of(peer) {
                    group.on_frame(from, &header, &payload, context);
                }
            });
        }
        // A rank may have gone while the group was being made.
        self.with_group(id, now, |group, context| group.note_absentees(context.net));
        if !is_complete {
            let error = Error::exhausted(format!(
                "more than {} MiB came for groups that were being made here; let all ranks make a group before they use it",
                MAX_LOBBY_BYTES >> 20
            ));
            self.with_group(id, now, |group, context| group.fail(group.in_context(error), context, Notify::Peers));
        }
        self.net.flush_all();
    }

    /// The links of a group's ranks are asked for news by the next pass.
    pub fn look_again_at(&mut self, group: u64) {
        let Some(group) = self.groups.get(&group) else { return };
        for rank in group.members().ranks() {
            self.net.look_again(group.members().peer(rank));
        }
    }

    /// Forgets a group, or one whose making failed: what still comes for it is dropped.
    pub fn remove_group(&mut self, id: u64) {
        let group = self.groups.remove(&id);
        self.expected.remove(&id);
        self.active.retain(|active| *active != id);
        self.lobby.take(id);
        if let Some(members) = group.as_ref().map(GroupState::members) {
            members.ranks().for_each(|rank| self.net.add_traffic(members.peer(rank), members.traffic(rank)));
        }
        let most = cause_bytes(self.segment);
        self.ended.add(id, group.and_then(|group| Some(group.announced_cause(most)?.1)));
    }

    /// A group of this lane fails that has failed on another one, once it has taken what had come for it before. The first lane notifies the peers,
    /// whatever the lane has sent that failed first. So do the others over the links that they have: the first lane's link to a peer may have
    /// broken, while that peer waits for a part on another lane. `false`: the group is not there, or has failed already.
    pub fn fail_with_lane(&mut self, failed: &FailedGroup, is_first: bool, now: Moment) -> bool {
        if self.groups.get(&failed.group).is_none_or(|state| state.poison().is_some()) {
            return false;
        }
        self.look_again_at(failed.group);
        self.pass_whole(now);
        let notes = if is_first { Notes::Sent } else { Notes::LeftToFirstLane };
        let fails = |state: &mut GroupState, context: &mut Context<'_>| state.fail_on_lane(failed, notes, context);
        matches!(self.guarded(|core| core.with_group(failed.group, now, fails)), Ok(Some(())))
    }

    /// Leaves a group, and forgets it: nobody can make a call in between. `None`: there is none, or it is lost to a panic.
    pub fn leave_group(&mut self, id: u64, now: Moment) -> Option<Departure> {
        let departure = self.guarded(|core| core.with_group(id, now, GroupState::depart));
        self.remove_group(id);
        departure.ok().flatten()
    }

    /// Whether ended calls wait for [`Core::take_completed`], or links for whoever makes them.
    #[inline]
    pub fn has_errands(&self) -> bool {
        !self.completed.is_empty() || self.net.has_wanted()
    }

    /// What is to be told of calls that have ended since this was asked last.
    pub fn take_completed(&mut self) -> Completed {
        self.completed.take()
    }

    /// Somebody follows calls: see [`Completed::calls`].
    pub fn follow_calls(&mut self) {
        self.completed.follow();
    }

    // ---- links

    /// Gives a peer the link that was made to it: see [`Net::attach`]. The driver, if it sleeps, must look again: it has said so on no such link.
    pub fn attach(&mut self, id: PeerId, link: Box<dyn Link>, slot: Option<Slot>, now: Moment) {
        let _ = self.guarded(|core| {
            core.net.attach(id, link, slot);
            core.net.await_greeting(id);
            let expected = core.expected.iter().filter(|(_, peers)| peers.contains(&id)).map(|(group, _)| *group);
            let made = core.groups.values_mut().filter_map(|group| group.note_link(id));
            let shared: Vec<u64> = made.chain(expected).collect();
            // Each side may have left groups, or seen them fail, when there was no link to say so.
            core.ask_about(id, &shared, LAST);
            core.pass_whole(now);
        });
    }

    /// A peer without a link cannot be reached: whatever needs it fails.
    pub fn lose(&mut self, id: PeerId, error: Error, now: Moment) {
        if self.net.is_unlinked(id) {
            self.net.mark_gone(id, error);
            let _ = self.guarded(|core| core.look_for_absentees(now));
        }
    }

    /// What is thought of a peer that greets: whether it has a link that lives, as far as the system knows.
    pub fn stance_to(&mut self, uuid: &[u8; 16], now: Moment) -> Stance {
        let Some(id) = self.net.find(uuid) else {
            // What it says of the groups of before would be dropped, and it would wait for answers.
            return if self.net.gone(uuid).is_some() { Stance::GivenUp } else { Stance::Unlinked };
        };
        if !self.net.is_linked(id) {
            return Stance::Unlinked;
        }
        self.look_at(id, now);
        match self.net.is_linked(id) {
            true => Stance::Linked,
            false => Stance::GivenUp,
        }
    }

    /// Sees to it that everything a peer has sent is handled, its end included.
    fn look_at(&mut self, id: PeerId, now: Moment) {
        self.net.look_again(id);
        let checked = self.guarded(|core| {
            // Its end is seen after all that came before.
            core.pass_whole(now);
            core.net.check(id)
        });
        if let Ok(Err(error)) = checked {
            self.net.mark_gone(id, error);
            let _ = self.guarded(|core| core.look_for_absentees(now));
        }
    }

    /// A group, if it is there.
    pub fn group(&self, id: u64) -> Option<&GroupState> {
        self.groups.get(&id)
    }

    /// All groups that are there.
    pub fn groups(&self) -> impl Iterator<Item = &GroupState> {
        self.groups.values()
    }

    /// Most bytes of a fragment.
    pub fn segment(&self) -> u64 {
        self.segment
    }

    /// What progress has cost so far.
    pub fn work(&self) -> Work {
        Work { passes: self.passes, links_looked_at: self.net.looks() }
    }

    /// A process without a link has ended, and had said goodbye to others before; or that is only assumed, and then it is said to nobody.
    pub fn depart(&mut self, id: PeerId, is_assumed: bool, now: Moment) {
        if self.net.is_unlinked(id) {
            self.net.note_goodbye(id, is_assumed);
            self.lose(id, Error::peer_lost("it has left"), now);
        }
    }

    /// Processes that know better than this one what has become of a peer: its neighbours in groups of both, which have been linked
    /// to it from the beginning.
    pub fn witnesses(&self, uuid: &[u8; 16]) -> Vec<EndpointInfo> {
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
            if found.len() >= MAX_WITNESSES {
                break;
            }
        }
        found.into_iter().take(MAX_WITNESSES).map(|id| self.net.peer(id).info().clone()).collect()
    }

    /// Whether a process should still be sent a note that a group has failed.
    pub fn is_note_needed(&self, uuid: &[u8; 16], group: u64) -> bool {
        let Some(id) = self.net.find(uuid) else { return false };
        self.groups.get(&group).is_none_or(|group| group.may_not_know(id, &self.net))
    }

    /// Handles a frame that has come besides the links, and answers it.
    pub fn on_note(&mut self, from: &[u8; 16], note: &[u8], now: Moment) -> Fate {
        let Some((head, payload)) = note.split_first_chunk() else { return Fate::Unknown };
        let Ok(header) = Header::parse(head) else { return Fate::Unknown };
        match (header.kind, self.net.find(from)) {
            (Kind::Cause, Some(id)) => {
                let _ = self.guarded(|core| {
                    core.on_frame(id, &header, payload, now);
                    core.pass_whole(now);
                });
                Fate::Unknown
            }
            (Kind::Fate, _) => payload.try_into().map_or(Fate::Unknown, |uuid: &[u8; 16]| self.fate(uuid, now)),
            _ => Fate::Unknown,
        }
    }

    /// What has become of a process, as far as is known here.
    fn fate(&mut self, uuid: &[u8; 16], now: Moment) -> Fate {
        let linked = self.net.find(uuid).filter(|&id| self.net.is_linked(id));
        if let Some(id) = linked {
            self.look_at(id, now);
            if self.net.is_linked(id) {
                return Fate::Here;
            }
        }
        let Some(peer) = self.net.gone(uuid).map(|id| self.net.peer(id)) else { return Fate::Unknown };
        match peer.gone() {
            // Others may know better, and whoever asks is not to be misled.
            Some(Gone::Left) if peer.is_goodbye_assumed() => Fate::Unknown,
            Some(Gone::Left) => Fate::Left,
            Some(Gone::Lost(_)) => Fate::Lost,
            None => Fate::Unknown,
        }
    }

    /// Tells a rank that has just linked to this one what it has missed.
    fn answer_groups(&mut self, id: PeerId, payload: &[u8], now: Moment) -> Result<()> {
        for group in Groups::parse(payload)?.iter() {
            let header = |kind| Header { group, ..Header::new(kind) };
            if let Some(cause) = self.ended.cause(group) {
                if let Some(cause) = cause {
                    self.net.send_control(id, header(Kind::Cause), cause);
                }
                self.net.send_control(id, header(Kind::Goodbye), &[]);
            } else if self.groups.get(&group).is_some_and(|group| group.members().rank_of(id).is_none()) {
                // It was given up here, and is a peer again in another group.
                self.net.send_control(id, header(Kind::Goodbye), &[]);
            } else {
                self.with_group(group, now, |group, context| group.notify_of_failure(id, context));
            }
        }
        Ok(())
    }

    /// Whether any call is in flight, bytes of an ended one have yet to leave, a link has to be listened to, or a new link's peer has yet to greet.
    pub fn has_work(&self) -> bool {
        !self.active.is_empty() || self.net.wants_driver() || self.net.awaits_greeting() || self.has_stopping()
    }

    /// The earliest deadline of any call in flight.
    pub fn next_deadline(&self) -> Option<Moment> {
        let calls = self.active.iter().filter_map(|id| self.groups.get(id)?.next_deadline());
        calls.chain(self.stopping.next_deadline()).min()
    }

    /// The calls of a group that are in flight, those that have failed and wait for external operations to stop among them.
    pub fn in_flight(&self, group: u64) -> Vec<CallInFlight> {
        let state = self.groups.get(&group).map(GroupState::in_flight).unwrap_or_default();
        // Whose ranks it needs no more.
        let stopping = self.stopping.runs_of(group).map(|run| CallInFlight::of(run, Vec::new()));
        state.into_iter().chain(stopping).collect()
    }

    /// Whether calls that have failed wait for external operations that have yet to stop.
    pub fn has_stopping(&self) -> bool {
        !self.stopping.is_empty()
    }

    /// When a driver that sleeps from now on has to look for silent hosts, if there are any that may be. While it sleeps other threads may
    /// send, and do not wake it for this.
    fn next_look_for_silence(&self, now: Moment) -> Option<Moment> {
        let asked = self.silence_at.filter(|_| self.net.awaits_answers());
        asked.or_else(|| self.net.has_streams().then(|| now + VANISHED))
    }

    /// Gives up peers whose host has vanished. The system would go on repeating what is under way for a quarter of an hour;
    /// no call on the link waits for so long.
    fn look_for_silence(&mut self, now: Moment) {
        let is_late = || self.next_deadline().is_some_and(|deadline| deadline <= now);
        if self.silence_at.is_some_and(|at| now < at) && !is_late() {
            return;
        }
        self.silence_at = Some(now + LOOK_FOR_SILENCE);
        for (id, silence) in self.net.look_for_answers() {
            let allowed = self.active.iter().filter_map(|group| self.groups.get(group)?.least_allowance(id)).min();
            if silence >= allowed.unwrap_or(VANISHED).min(VANISHED) {
                let error = Error::peer_lost(format!(
                    "{}: its host has not answered for {} ms, although what it was sent was repeated; look at the network \
                     between the hosts",
                    self.net.describe(id),
                    silence.as_millis()
                ));
                self.net.abandon(id);
                self.net.mark_gone(id, error);
            }
        }
    }

    /// Whether something has moved while the driver sleeps that it was not told of: its call may be over. Who asks tells it.
    #[inline]
    pub fn take_owed_to_driver(&mut self) -> bool {
        std::mem::take(&mut self.owes_driver)
    }

    /// Whether the parked driver must look again: a call has an earlier deadline, or nobody would tell it of something. What a thread that
    /// watches has looked at is armed when it looks no more.
    pub fn must_wake_driver(&self, deadline: Option<Moment>) -> bool {
        let is_unarmed = || self.watchers == 0 && self.net.is_unarmed();
        self.parked.is_some_and(|until| is_unarmed() || deadline.is_some_and(|deadline| deadline < until))
    }

    /// A thread begins to look at the links in a loop. If a driver sleeps meanwhile, peers need not wake it, and
    /// [`Core::unwatch`] must follow: `true`.
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

    /// The end of a [`Core::watch`]. Every call whose number was taken has been started by now: frames are handled here.
    pub fn unwatch(&mut self, now: Moment) -> Relief {
        let relief = match self.parked {
            Some(_) if self.watchers == 1 => self.guarded(|core| core.resume_parked(now)).unwrap_or(Relief::Wake),
            Some(_) | None => Relief::SleepsOn,
        };
        self.watchers -= 1;
        match relief {
            // What has moved may have ended the driver's call, or brought a deadline before which it must look.
            Relief::SleepsOn | Relief::MayBeOver if self.take_owed_to_driver() => {
                if self.must_wake_driver(self.next_deadline()) { Relief::Wake } else { Relief::MayBeOver }
            }
            relief => relief,
        }
    }

    /// Lets a parked driver be woken by its peers again.
    fn resume_parked(&mut self, now: Moment) -> Relief {
        let mut relief = Relief::SleepsOn;
        for _ in 0..ROUNDS_OF_RELIEF {
            if !self.net.prepare_park() {
                return relief;
            }
            // As a rule a fast peer has begun the next call.
            self.net.mute();
            let departures = self.net.departures();
            self.pass_whole(now);
            if self.net.departures() != departures {
                return Relief::Wake;
            }
            relief = Relief::MayBeOver;
        }
        Relief::Wake
    }

    /// One pass: takes frames off the links that have any, advances calls, sends what can be sent. Returns whether anything moved.
    ///
    /// A panic in it is a defect of ours. Whoever happens to drive must not die of it, and others must not wait for what
    /// it left undone: all groups fail.
    pub fn pass(&mut self, now: Moment) -> bool {
        self.guarded(|core| core.pass_unguarded(now)).unwrap_or(true)
    }

    /// Runs `work`; when it panics, all groups fail.
    #[inline]
    pub fn guarded<R>(&mut self, work: impl FnOnce(&mut Self) -> R) -> Result<R> {
        catch_unwind(AssertUnwindSafe(|| work(self))).map_err(|panic| self.fail_all(&*panic))
    }

    /// Fails all groups after a panic. What panicked may do so again: that neither leaves here nor keeps anybody busy.
    pub fn fail_all(&mut self, panic: &(dyn Any + Send)) -> Error {
        let said = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let said = said.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        let error = Error::internal(format!("panic while making progress: {said}; please report it"));
        let now = (self.clock)();
        for id in self.groups.keys().copied().collect::<Vec<_>>() {
            let mut fail = |tell| {
                let failing = || self.with_group(id, now, |group, context| group.fail(error.clone(), context, tell));
                catch_unwind(AssertUnwindSafe(failing)).is_ok()
            };
            let _ = fail(Notify::Peers) || fail(Notify::Nobody);
        }
        for id in std::mem::take(&mut self.active) {
            if let Some(group) = self.groups.get_mut(&id) {
                group.set_listed(false);
            }
        }
        // The pass that ended here would have sent what the peers are told.
        while let Err(id) = self.net.flush_guarded() {
            self.net.mark_gone(id, error.clone());
        }
        error
    }

    /// After a call that was over when it was made: now and then looks at the links, or a rank that only sends would
    /// learn of nothing.
    pub(crate) fn ended_at_once(&mut self) {
        self.calls_without_look += 1;
        if self.calls_without_look >= MAX_CALLS_WITHOUT_LOOK {
            self.calls_without_look = 0;
            self.owes_look = self.net.has_streams();
            self.pass_whole((self.clock)());
        }
    }

    /// Whether somebody should ask the system for news: calls end one after the other when they are made, and nobody waits.
    #[inline]
    pub fn take_owed_look(&mut self) -> bool {
        std::mem::take(&mut self.owes_look)
    }

    /// Whether a driver sleeps in the poller.
    pub fn is_parked(&self) -> bool {
        self.parked.is_some()
    }

    /// The peers of a call in flight whose links must be asked for news by whoever waits for it and does not sleep.
    pub fn streams_of(&self, call: &CallState) -> SmallVec<[PeerId; 4]> {
        if !self.net.has_streams() {
            return SmallVec::new();
        }
        self.streams_among(&self.peers_of(call))
    }

    /// The peers that a call in flight sends to or receives from, as far as they are known.
    pub fn peers_of(&self, call: &CallState) -> SmallVec<[PeerId; 4]> {
        self.groups.get(&call.group_id).map(|group| group.peers_of(call)).unwrap_or_default()
    }

    /// Those of these peers whose links are asked for news by a system call.
    pub fn streams_among(&self, peers: &[PeerId]) -> SmallVec<[PeerId; 4]> {
        peers.iter().copied().filter(|&peer| !self.net.is_cheap_to_look_at(peer)).collect()
    }

    /// Whether what comes from one of these peers has to be looked for again and again.
    pub fn polls_among(&self, peers: &[PeerId]) -> bool {
        peers.iter().any(|&peer| self.net.is_polled(peer))
    }

    /// A driver is about to sleep until news come, at most until then; with what it waits for, if that is a call. Does what can be
    /// done before, and says until when to sleep ([`Moment::FAR`]: until something comes): [`Core::unpark`] must follow. `None`:
    /// something has moved, or nothing is left to sleep for. Without `ticks` silent hosts are not looked for.
    ///
    /// # Errors
    /// As [`Core::guarded`]: every call has failed.
    pub fn park(
        &mut self,
        call: Option<&CallState>,
        until: Option<Moment>,
        ticks: bool,
        now: Moment,
    ) -> Result<Option<Moment>> {
        self.guarded(|core| {
            // While a large message comes, more of it is there as a rule: to ask for it costs less than to sleep until the system tells of it.
            if core.idle == 0
                && let Some(call) = call
            {
                core.streams_of(call).into_iter().for_each(|peer| core.net.look_again_if_flowing(peer));
            }
            if core.pass(now) || core.pass_whole(now) {
                return None;
            }
            core.check(now);
            if call.is_some_and(CallState::is_done) || (call.is_none() && !core.has_work()) {
                return None;
            }
            // Everything that could be done without the peers has been: what is left waits for frames or for room.
            if core.net.prepare_park() {
                core.net.unpark();
                return None;
            }
            let silence = core.next_look_for_silence(now).filter(|_| ticks);
            let look = core.net.poll_interval().map(|interval| now + interval);
            let deadline = core.next_deadline();
            let until = until.into_iter().chain(deadline).chain(silence).chain(look).min().unwrap_or(Moment::FAR);
            core.parked = Some(until);
            Some(until)
        })
    }

    /// The driver sleeps no more.
    pub fn unpark(&mut self, now: Moment) {
        (self.parked, self.owes_driver) = (None, false);
        // After a panic every call has failed, and whoever waits looks for what became of its own.
        let _ = self.guarded(|core| {
            core.net.unpark();
            core.pass(now);
            core.check(now);
        });
    }

    /// As [`Core::pass`], and leaves no frame on a link: for whoever will not look again soon.
    pub fn pass_whole(&mut self, now: Moment) -> bool {
        self.idle = PASSES_HELD;
        self.pass(now)
    }

    fn pass_unguarded(&mut self, now: Moment) -> bool {
        self.passes += 1;
        let moved = self.drain_all(now);
        self.end_pass(moved, now)
    }

    /// What follows when frames were taken off links.
    fn end_pass(&mut self, mut moved: bool, now: Moment) -> bool {
        if !self.causes.is_empty() {
            self.handle_causes(now);
            moved = true;
        }
        moved |= self.advance(now);
        moved |= self.net.flush_all();
        // Nobody else may learn of it: what woke who is parked is gone with the link, and who polls looks at nothing else.
        moved |= self.look_for_absentees(now);
        self.net.end_pass();
        self.owes_driver |= moved && self.parked.is_some();
        // Who sleeps has armed all links, and is told of what comes on them alone.
        if self.parked.is_some() && self.watchers == 0 && self.net.arm_again() {
            (self.wake)();
        }
        self.idle = if moved { 0 } else { self.idle.saturating_add(1) };
        moved
    }

    /// Fails groups whose end was announced, after everything that had arrived before is handled: a rank tells of the end
    /// on its own link, and what completes a call may lie on another.
    fn handle_causes(&mut self, now: Moment) {
        self.idle = PASSES_HELD;
        self.net.look_again_everywhere();
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

    /// Advances the calls of active groups, without looking at links.
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

    /// Fails calls whose deadline passed or whose peers have gone. Done now and then, and before parking.
    pub fn check(&mut self, now: Moment) {
        let mut index = 0;
        // What has become of the peers of the others is posted.
        while let Some(id) = self.net.polled(index) {
            match self.net.check(id) {
                Ok(()) => index += 1,
                Err(error) => self.net.mark_gone(id, error),
            }
        }
        self.look_for_silence(now);
        self.look_for_absentees(now);
        for id in self.active.clone() {
            self.with_group(id, now, GroupState::check);
        }
    }

    /// When somebody went: fails the calls that need who is not there any more. Returns whether anybody went.
    fn look_for_absentees(&mut self, now: Moment) -> bool {
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
        self.net.take_news();
        let mut moved = false;
        let mut index = 0;
        while let Some(id) = self.net.polled(index) {
            let has_found = self.drain(id, now);
            moved |= has_found;
            self.net.note_look(id, has_found);
            // When it has gone, or is polled no more, another may stand in its place.
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
                            // Groups count what is of their calls.
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

    /// Whether a frame stays on its link for now.
    fn is_held(&self, header: &Header, payload: &[u8]) -> bool {
        payload.len() >= MIN_HELD_BYTES
            && self.idle < PASSES_HELD
            && self.groups.get(&header.group).is_some_and(|group| group.is_early(header))
    }

    fn on_frame(&mut self, peer: PeerId, header: &Header, payload: &[u8], now: Moment) {
        if header.group == 0 {
            match header.kind {
                Kind::Goodbye => self.net.note_goodbye(peer, false),
                Kind::Groups => {
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
        if known.is_some() && header.kind == Kind::Goodbye {
            self.left.push(header.group);
        }
        if known.is_none() && !self.ended.contains(header.group) {
            self.lobby.push(header.group, Early { peer, header: *header, payload: payload.to_vec() });
        }
    }

    /// Says goodbye to every peer.
    pub fn say_goodbye(&mut self) {
        for id in self.net.linked().to_vec() {
            self.net.send_control(id, Header::new(Kind::Goodbye), &[]);
        }
        self.net.flush_all();
    }

    /// What is there although no call is in flight.
    pub fn residue(&self) -> Vec<String> {
        let counts = [
            ("active groups", self.active.len()),
            ("frames of groups that are not there", self.lobby.kept().0),
            ("bytes of such frames", self.lobby.kept().1),
            ("groups that are being made", self.expected.len()),
            ("announcements", self.causes.len()),
            ("callbacks", self.completed.callbacks.len()),
            ("calls whose external operations have yet to stop", self.stopping.len()),
            ("control frames", self.net.queued()),
            ("peers with unsent bytes", usize::from(self.net.has_unsent())),
            ("peers that have yet to greet", usize::from(self.net.awaits_greeting())),
            ("threads that look", self.watchers as usize),
        ];
        let own = counts.into_iter().filter(|(_, count)| *count > 0).map(|(what, count)| format!("{count} {what}"));
        own.chain(self.groups.values().flat_map(GroupState::residue)).collect()
    }
}
