//! One group inside the engine: its calls in flight, unexpected frames and signatures.
//!
//! Everything here runs under the driver's lock. This module starts calls, dispatches frames to them and advances them.
//! `fast_calls` runs small calls, `report` answers what a call waits for, `failure` fails the group, `departure` leaves
//! it. The caller's side is the `api::group` module of accl-engine, and `pass` takes frames off links. Read
//! [`GroupState`] first.
//!
//! This file is long because frames, calls and failures of one group change the same fields; each function is short.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use accl_types::{Collective, Error, Moment, Rank, Result};
use accl_wire::frame::{CHECKS_SIGNATURES, Cause, Header, Kind, Signature};
use smallvec::SmallVec;

use super::admission::Admission;
use super::completed::Notify;
use super::context::Context;
use super::fast_shapes::FastShapes;
use super::first_cause::FirstCause;
use super::history::History;
use super::inbox::{Inbox, Unexpected};
use super::lanes::LaneNumbers;
use super::packets::PacketSink;
use super::sequence::Sequence;
use crate::call::{CallState, Waits};
use crate::exec::{Message, OFFLOAD_GRACE, P2p, PROBE, Run};
use crate::memory::{BufferPool, Storage};
use crate::peers::{Members, Net, PeerId};
use crate::plan::signature::disagreement;

/// One group on one of its ranks: its calls in flight, frames of calls that are not issued yet, and its failure.
pub struct GroupState {
    pub(super) id: u64,
    pub(super) name: Arc<str>,
    pub(super) rank: Rank,
    /// Timeout of calls issued from now on.
    pub(super) timeout: Duration,
    /// Whether calls issued from now on record their duration.
    pub(super) is_timed: bool,
    pub(super) members: Members,
    pub(super) p2p: P2p,
    /// Shapes and memory of calls on the fast path.
    pub(super) fast: FastShapes,
    pub(super) runs: BTreeMap<u64, Run>,
    /// Highest sequence number of a call that has begun.
    newest_begun: u64,
    admission: Admission,
    pub(super) inbox: Inbox,
    pub(super) history: History,
    pub(super) sequence: Sequence,
    /// Number of the next point-to-point call, used on this rank only.
    pub(super) next_message: u64,
    /// Number of the latest monitored barrier.
    latest_monitored: u32,
    pub(super) failure: FirstCause,
    /// Cached result of `all_poll_without_syscall`.
    are_polled_without_syscall: Option<bool>,
    code_pool: BufferPool,
    /// Whether the group is in the list of groups that a pass advances.
    is_listed: bool,
    /// Whether any rank has left or is lost.
    pub(super) has_absentees: bool,
    pub(super) calls_failed: u64,
    /// Receiver of packets for the device of this rank, if it has one.
    packets: Option<Arc<dyn PacketSink>>,
    /// Wait counters of the group's callers.
    waits: Arc<Waits>,
}

impl GroupState {
    /// Creates the state of a new group. Its calls have `timeout` unless they specify their own.
    pub fn new(id: u64, name: Arc<str>, rank: Rank, timeout: Duration, members: Members) -> Self {
        let world = members.world();
        Self {
            id,
            name,
            rank,
            is_timed: false,
            timeout,
            members,
            p2p: P2p::new(world),
            fast: FastShapes::default(),
            runs: BTreeMap::new(),
            newest_begun: 0,
            admission: Admission::default(),
            inbox: Inbox::default(),
            history: History::default(),
            sequence: Sequence::default(),
            next_message: 0,
            latest_monitored: 0,
            failure: FirstCause::default(),
            are_polled_without_syscall: None,
            code_pool: BufferPool::default(),
            is_listed: false,
            packets: None,
            has_absentees: false,
            calls_failed: 0,
            waits: Arc::default(),
        }
    }

    /// Returns the number of the group, which is the same on all ranks.
    #[inline]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Returns the name of the group, for messages.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Returns the rank of this process.
    #[inline]
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Returns the ranks of the group.
    #[inline]
    pub fn members(&self) -> &Members {
        &self.members
    }

    /// Returns the timeout of calls issued from now on, counted from their submission.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Sets the timeout of calls issued from now on.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Makes calls issued from now on record their duration.
    pub fn enable_timing(&mut self) {
        self.is_timed = true;
    }

    pub(super) fn is_timed(&self) -> bool {
        self.is_timed
    }

    /// Returns the wait counters of the group's callers.
    pub fn waits(&self) -> &Arc<Waits> {
        &self.waits
    }

    /// Takes a number for a point-to-point call. The number is used on this rank only, for example in error messages.
    pub(super) fn take_message_number(&mut self) -> u64 {
        let number = self.next_message;
        self.next_message += 1;
        number
    }

    /// Takes a number for a monitored barrier, within the bits of `mask`.
    pub fn take_monitored_number(&mut self, mask: u32) -> u32 {
        self.latest_monitored = self.latest_monitored.wrapping_add(1) & mask;
        self.latest_monitored
    }

    /// Takes memory for encoded chunks of a call. The call gives it back when it completes.
    pub(super) fn take_codes(&mut self, len_bytes: usize) -> Result<Storage> {
        self.code_pool.take(len_bytes)
    }

    /// Returns whether a message with this tag waits for a receive.
    pub fn has_unexpected_message(&self, from: Rank, tag: u32) -> bool {
        self.p2p.has_unexpected(from, tag)
    }

    /// Returns how often a point-to-point message was examined so far, for tests.
    pub fn message_steps(&self) -> u64 {
        self.p2p.steps()
    }

    /// Takes back a private receive that has not been matched, and completes it with `error` without running its
    /// callback. Returns `false` if it was matched.
    pub fn take_back(&mut self, call: &CallState, error: Error, now: Moment) -> bool {
        let Some(message) = self.p2p.cancel(call) else { return false };
        drop(message.call.finish(now, Some(error)));
        true
    }

    /// Returns the reason why the group accepts no more calls; `None` if it accepts calls.
    pub fn failure(&self) -> Option<&Error> {
        self.failure.cause()
    }

    /// Adds this group and rank to an error.
    pub(crate) fn in_context(&self, error: Error) -> Error {
        error.in_group(&self.name).on_rank(self.rank)
    }

    /// Makes this state a lane of the group. The first lane numbers the calls of all lanes.
    pub fn set_lane(&mut self, lane: u32, numbers: Arc<dyn LaneNumbers>) {
        self.sequence = Sequence::of_lane(lane, numbers);
    }

    /// Sets the receiver of packets for the device of this rank.
    pub fn take_packets_with(&mut self, sink: Arc<dyn PacketSink>) {
        self.packets = Some(sink);
    }

    /// Sends packets to the device of another rank. `taken` is the total number of bytes of that device's packets that
    /// this rank has taken.
    pub fn send_packets(&self, to: Rank, taken: u64, packets: &[u8], context: &mut Context<'_>) {
        if !self.failure.has_come() {
            let header = Header { group: self.id, value: taken, ..Header::new(Kind::Packets) };
            context.net.send_control(self.members.peer(to), header, packets);
        }
    }

    /// Returns whether no call is in flight.
    pub fn is_idle(&self) -> bool {
        self.runs.is_empty() && self.p2p.is_idle()
    }

    /// Sets whether the group is in the list of groups that a pass advances. Returns the previous value.
    pub(super) fn set_listed(&mut self, is_listed: bool) -> bool {
        std::mem::replace(&mut self.is_listed, is_listed)
    }

    /// Returns the earliest deadline of a call in flight.
    pub(crate) fn next_deadline(&self) -> Option<Moment> {
        let due = self.due();
        let runs = self.runs.values().filter_map(|run| [due(run), run.probe_at].into_iter().flatten().min());
        runs.chain(self.p2p.next_deadline()).chain(self.begin_by()).chain(self.failure.due()).min()
    }

    /// Returns a function that computes when a call is late. An external worker enforces its own deadline. A call with
    /// such an operation, and later calls that may wait for it, therefore get extra time.
    pub(super) fn due(&self) -> impl Fn(&Run) -> Option<Moment> + use<> {
        let external = self.runs.values().filter(|run| run.has_external_deadline());
        let first = external.filter_map(|run| run.deadline).min();
        move |run| {
            let deadline = run.deadline?;
            let waits_longer = first.is_some_and(|first| first <= deadline);
            Some(if waits_longer { deadline + OFFLOAD_GRACE } else { deadline })
        }
    }

    /// Returns the shortest timeout of a call in flight, if `peer` is in this group.
    pub(crate) fn least_allowance(&self, peer: PeerId) -> Option<Duration> {
        self.members.rank_of(peer)?;
        let runs = self.runs.values().map(|run| (&run.call, run.deadline));
        let calls = runs.chain(self.p2p.messages().map(|message| (&message.call, message.deadline)));
        calls.filter_map(|(call, deadline)| Some(deadline?.since(call.started()))).min()
    }

    /// Returns the time by which calls that are held back begin at the latest.
    pub fn begin_by(&self) -> Option<Moment> {
        self.admission.begin_by()
    }

    /// Reserves `count` sequence numbers for calls to be issued later, each with `take_seq(Some(..))`. Returns the
    /// first number. Later barriers wait until these numbers are concluded.
    pub fn reserve_seqs(&mut self, count: u64) -> u64 {
        self.sequence.reserve(count)
    }

    /// Returns the sequence number of the next collective.
    pub fn next_seq(&self) -> u64 {
        self.sequence.next()
    }

    /// Concludes reserved sequence numbers, as `Group::conclude_seqs` in accl-engine describes. If the operation has
    /// failed and left numbers unused, the group fails.
    pub fn conclude_seqs(&mut self, seqs: Range<u64>, failed: Option<&Error>, context: &mut Context<'_>) {
        let unused = self.sequence.conclude(seqs, failed.is_some());
        let (Some(why), Some(first)) = (failed, unused) else { return };
        let error = Error::new(why.kind, format!("call {first} could not be issued on this rank: {}", why.message));
        self.fail(self.in_context(error), context, Notify::Peers);
    }

    /// Takes the sequence number of a collective that is being issued in `parts` parts.
    pub(crate) fn take_seq(&mut self, reserved: Option<u64>, parts: u32) -> Result<u64> {
        match reserved {
            Some(seq) => self.sequence.take_reserved(seq, parts),
            None => Ok(self.sequence.take(parts)),
        }
    }

    /// Returns whether all ranks' links can be polled without a system call, as far as they are known. The result is
    /// cached until there is a new link.
    pub(super) fn all_poll_without_syscall(&mut self, net: &Net) -> bool {
        *self
            .are_polled_without_syscall
            .get_or_insert_with(|| self.members.ranks().all(|rank| net.polls_without_syscall(self.members.peer(rank))))
    }

    /// Returns whether tiles are sent with checksums: unless all ranks share memory.
    pub(crate) fn has_checksums(&mut self, net: &Net) -> bool {
        !self.all_poll_without_syscall(net)
    }

    /// Starts a collective: passes it the frames that arrived before it, and adds it to the calls in flight.
    pub(crate) fn start_collective(&mut self, mut run: Run, context: &mut Context<'_>) {
        let seq = run.call.seq;
        self.history.add(seq, &run.signature);
        let unexpected = self.inbox.take(seq);
        let mut failure = None;
        for frame in unexpected {
            if let Some(theirs) = frame.signature.filter(|theirs| *theirs != run.signature) {
                failure = Some(disagreement(seq, (self.rank, &run.signature), (frame.from, &theirs)));
                break;
            }
            let result = if frame.header.edge == PROBE {
                run.on_probe();
                Ok(())
            } else if frame.header.kind == Kind::Grant {
                run.on_grant(frame.from, frame.header.edge, frame.header.value);
                Ok(())
            } else {
                run.on_data(frame.from, &frame.header, &frame.data, &mut context.of_run(&mut self.members))
            };
            if let Err(error) = result {
                failure = Some(error.with_peer(frame.from));
                break;
            }
        }
        let call = run.call.clone();
        if context.net.has_unlinked() {
            run.plan.peers.iter().for_each(|&rank| context.net.want(self.members.peer(rank)));
        }
        if self.runs.is_empty() {
            self.admission.note_move(context.now);
        }
        self.runs.insert(seq, run);
        if let Some(error) = failure {
            self.fail(call.in_context(error), context, Notify::Peers);
        }
    }

    /// Starts a send or receive.
    pub(crate) fn start_message(&mut self, message: Message, to: Option<Rank>, context: &mut Context<'_>) {
        let call = message.call.clone();
        match message.peer {
            Some(rank) => context.net.want(self.members.peer(rank)),
            // Any rank may send. This rank must learn when all others have left, because then none will send.
            None if context.net.has_unlinked() => {
                self.members.ranks().for_each(|rank| context.net.want(self.members.peer(rank)));
            }
            None => {}
        }
        let result = match to {
            Some(to) => {
                self.p2p.post_send(message, to);
                Ok(())
            }
            None => self.p2p.post_receive(message, &mut context.of_run(&mut self.members)),
        };
        if let Err(error) = result {
            self.fail(call.in_context(error), context, Notify::Peers);
        }
    }

    /// Returns whether a frame belongs to a call that is not issued here yet, so that it would have to be copied.
    pub(crate) fn is_early(&self, header: &Header) -> bool {
        matches!(header.kind, Kind::Begin | Kind::BeginWhole)
            && !self.failure.has_come()
            && self.sequence.is_to_come(header.seq)
    }

    /// Handles a frame of this group.
    pub(crate) fn on_frame(&mut self, from: Rank, header: &Header, payload: &[u8], context: &mut Context<'_>) {
        if header.kind.carries_data() {
            self.members.note_received(from, payload.len() as u64);
        }
        if header.kind == Kind::Cause {
            self.members.set_knows(from);
        }
        if self.failure.has_come() {
            return;
        }
        if let Err(error) = self.dispatch(from, header, payload, context) {
            let error = error.with_peer(from);
            let error = match self.runs.get(&header.seq) {
                Some(run) if matches!(header.kind, Kind::Begin | Kind::BeginWhole | Kind::Data | Kind::Grant) => {
                    run.call.in_context(error)
                }
                _ => self.in_context(error),
            };
            self.fail(error, context, Notify::Peers);
        }
    }

    fn dispatch(&mut self, from: Rank, header: &Header, payload: &[u8], context: &mut Context<'_>) -> Result<()> {
        match header.kind {
            Kind::Begin => {
                let (signature, data) = Signature::parse(payload)?;
                self.members.saw(from, header.seq);
                self.on_run_frame(from, header, CHECKS_SIGNATURES.then_some(signature), data, context)
            }
            Kind::BeginWhole => {
                self.members.saw(from, header.seq);
                let begin = Header { kind: Kind::Begin, value: payload.len() as u64, ..*header };
                self.on_run_frame(from, &begin, CHECKS_SIGNATURES.then(|| header.whole_signature()), payload, context)
            }
            Kind::Data | Kind::Grant => self.on_run_frame(from, header, None, payload, context),
            Kind::Window => {
                self.members.on_window(from, header.value);
                Ok(())
            }
            Kind::Cause => {
                let cause = Cause::parse(payload)?;
                // Frames that arrived before the report may complete calls successfully.
                self.advance(context);
                let report = format!("rank {} reported: ", cause.origin);
                // A rank may forward a report that it has received.
                let text = if cause.text.contains(&report) { cause.text } else { report + &cause.text };
                let error = Error::new(cause.kind, text);
                let error = self.in_context(error.with_peer(cause.origin));
                let is_first_hand = from == cause.origin || cause.origin.0 >= self.members.world();
                // A follower lane without calls ignores a forwarded report. The first lane receives it as well, and may
                // fail the group.
                if !is_first_hand && self.sequence.follows() && self.is_idle() {
                    return Ok(());
                }
                if is_first_hand || self.is_idle() || self.members.is_absent(cause.origin, context.net) {
                    self.fail(error, context, Notify::Neighbours);
                } else {
                    self.failure.learn(error, cause.origin, context.now);
                }
                Ok(())
            }
            Kind::Disconnect => {
                self.members.set_left(from);
                Ok(())
            }
            Kind::P2pBegin => {
                let (signature, data) = Signature::parse(payload)?;
                self.p2p.on_begin(from, header, signature, data, &mut context.of_run(&mut self.members))
            }
            Kind::P2pData => self.p2p.on_data(from, header.seq, payload, &mut context.of_run(&mut self.members)),
            Kind::P2pGrant => {
                self.p2p.on_grant(from, header.seq, header.value);
                Ok(())
            }
            Kind::Packets => match &self.packets {
                Some(sink) => sink.arrive(from, header.value, payload),
                None => {
                    Err(Error::protocol(format!("rank {from} sent packets for a device, but this rank has no device")))
                }
            },
            // These frames never belong to a single group.
            Kind::Hello | Kind::PeerFate => Err(Error::protocol("received a frame of a kind that belongs to no group")),
        }
    }

    fn on_run_frame(
        &mut self,
        from: Rank,
        header: &Header,
        signature: Option<Signature>,
        data: &[u8],
        context: &mut Context<'_>,
    ) -> Result<()> {
        let seq = header.seq;
        if let Some(run) = self.runs.get_mut(&seq) {
            if let Some(theirs) = signature.filter(|theirs| *theirs != run.signature) {
                let mine = run.signature;
                return Err(disagreement(seq, (self.rank, &mine), (from, &theirs)));
            }
            if header.edge == PROBE {
                run.on_probe();
                return Ok(());
            }
            if header.kind == Kind::Grant {
                run.on_grant(from, header.edge, header.value);
                return Ok(());
            }
            // The call's sends go first, because it may send from the memory in which the data is to be placed. A
            // barrier has no data, and may have to wait for earlier calls.
            if !run.begun && run.call.collective != Collective::Barrier {
                self.newest_begun = self.newest_begun.max(seq);
                run.advance(&mut context.of_run(&mut self.members));
            }
            self.admission.note_move(context.now);
            return run.on_data(from, header, data, &mut context.of_run(&mut self.members));
        }
        if self.sequence.is_to_come(seq) {
            // The rest of a message is sent only after a grant.
            if header.kind == Kind::Data {
                return Err(Error::protocol(format!("rank {from} sent part of call {seq}, which has not begun")));
            }
            self.inbox.push(Unexpected { from, header: *header, signature, data: data.to_vec() });
            return Ok(());
        }
        match signature {
            // A grant for a completed send, or the rest of a message whose beginning already failed the group.
            None => Ok(()),
            // This rank's part is done without a frame from this sender, so the two calls differ.
            Some(theirs) => {
                let mine = self.history.signature(seq);
                // The call has no part on this lane. The first lane, which takes part in all calls, detects the
                // difference.
                if mine.is_none() && self.sequence.follows() {
                    return Ok(());
                }
                if header.edge == PROBE && mine.is_none_or(|mine| mine == theirs) {
                    return Ok(());
                }
                Err(disagreement(seq, (self.rank, &mine.unwrap_or(theirs)), (from, &theirs)))
            }
        }
    }

    /// Advances the calls in flight, early ones first, and completes those that are done. Returns whether there was
    /// progress.
    pub(crate) fn advance(&mut self, context: &mut Context<'_>) -> bool {
        let mut moved = false;
        let mut ended: Vec<u64> = Vec::new();
        let is_intra_node = self.all_poll_without_syscall(context.net);
        let at_once = self.admission.limit(context.now, is_intra_node);
        let mut before = 0;
        let mut withholds = false;
        let mut failure = None;
        // Offloaded calls run in sequence order, which is the same on all ranks. One begins when all ranks have
        // completed the earlier ones. Otherwise the messages of a rank that is ahead could displace what other ranks
        // need for the current call.
        let mut is_in_turn = true;
        for (index, (&seq, run)) in self.runs.iter_mut().enumerate() {
            if run.plan.is_offloaded && is_in_turn && !self.sequence.has_reserved_before(seq) {
                run.offload();
            }
            // A barrier guarantees on every rank that the calls issued before it are done. An operation of several
            // calls counts as in flight from the reservation of its numbers until it is concluded.
            let awaits_earlier = ended.len() < index || self.sequence.has_composed_before(seq);
            if run.call.collective == Collective::Barrier && awaits_earlier {
                continue;
            }
            // A call that another rank has caused to begin is not held back.
            if before > at_once && !run.begun {
                withholds = true;
                is_in_turn &= !run.plan.is_offloaded;
                // If hundreds of calls are outstanding, few have begun. The pass then stops at the first that has not,
                // so that the others cost nothing.
                if seq > self.newest_begun {
                    break;
                }
                continue;
            }
            if run.is_busy() {
                self.newest_begun = self.newest_begun.max(seq);
                moved |= run.advance(&mut context.of_run(&mut self.members));
                if let Some(error) = run.take_failure() {
                    failure.get_or_insert_with(|| run.call.in_context(error));
                }
            }
            is_in_turn &= !run.plan.is_offloaded || run.is_complete();
            if run.is_complete() {
                ended.push(seq);
            } else {
                before += run.plan.work;
            }
        }
        self.admission.set_withholds(withholds);
        if moved {
            self.admission.note_move(context.now);
        }
        for seq in ended {
            // The call is still in `runs`, because a panic fails the calls that are recorded there.
            self.runs.get_mut(&seq).into_iter().for_each(Run::end);
            if let Some(mut run) = self.runs.remove(&seq) {
                self.code_pool.give(run.take_codes());
                context.completed.end(&run.call, None, context.now);
                moved = true;
            }
        }
        if !self.p2p.is_idle() {
            moved |= self.p2p.advance(&mut context.of_run(&mut self.members));
        }
        for message in self.p2p.take_done() {
            context.completed.end(&message.call, None, context.now);
            moved = true;
        }
        if let Some((call, error)) = self.p2p.take_failure() {
            failure.get_or_insert_with(|| call.in_context(error));
        }
        if let Some(error) = failure {
            self.fail(error, context, Notify::Peers);
            moved = true;
        }
        moved
    }

    /// Fails the group if a call's deadline has passed, or a rank that a call needs is gone.
    pub(crate) fn check(&mut self, context: &mut Context<'_>) {
        if self.failure.has_come() || self.is_idle() {
            return;
        }
        let (members, net) = (&self.members, &*context.net);
        if let Some(error) = self.failure.take_rumour(context.now, |origin| members.is_absent(origin, net)) {
            self.fail(error, context, Notify::Neighbours);
            return;
        }
        self.check_private(context);
        let now = context.now;
        for run in self.runs.values_mut().filter(|run| run.probe_at.is_some_and(|at| at <= now)) {
            run.probe(&mut context.of_run(&mut self.members));
        }
        if let Some(error) = self.overdue(context).or_else(|| self.departed(context)) {
            // The forwarded report came first: a rank may have left because of it.
            match self.failure.take_rumour(context.now, |_| true) {
                Some(first) => self.fail(first, context, Notify::Neighbours),
                None => {
                    // A rank that has left cleanly is not logged: other ranks may have expected it.
                    let is_lost = error.context.peer.is_some_and(|rank| self.is_lost(rank, context.net));
                    if is_lost && self.sequence.claims_loss() {
                        context.completed.note_loss(error.clone());
                    }
                    self.fail(error, context, Notify::Peers);
                }
            }
        }
    }

    /// Records that a peer has a new link. Returns the group's number if the peer is in the group.
    pub(super) fn note_link(&mut self, peer: PeerId) -> Option<u64> {
        self.members.rank_of(peer)?;
        self.are_polled_without_syscall = None;
        Some(self.id)
    }

    /// Checks which ranks are absent.
    pub(crate) fn note_absentees(&mut self, net: &Net) {
        self.has_absentees = self.members.ranks().any(|rank| self.members.is_absent(rank, net));
    }

    /// Runs [`GroupState::check`] for a call that was just issued, because no event announces ranks that left earlier.
    pub(crate) fn check_absentees(&mut self, context: &mut Context<'_>) {
        if self.has_absentees {
            self.check(context);
        }
    }

    /// Fails private messages whose peer is gone. The code that issued them continues without them.
    fn check_private(&mut self, context: &mut Context<'_>) {
        let (members, net) = (&self.members, &*context.net);
        for message in self.p2p.take_private(|rank| members.is_absent(rank, net)) {
            let why = message.peer.and_then(|rank| self.absence(rank, context.net)).unwrap_or_default();
            let error = message.call.in_context(Error::peer_lost(why));
            context.completed.end(&message.call, Some(error), context.now);
        }
    }

    /// Returns the peers that a call in flight sends to or receives from, as far as they are known.
    pub(super) fn peers_of(&self, call: &CallState) -> SmallVec<[PeerId; 4]> {
        if call.collective.is_point_to_point() {
            return self.p2p.peer_of(call).flatten().into_iter().map(|rank| self.members.peer(rank)).collect();
        }
        let run = self.runs.get(&call.seq);
        run.into_iter().flat_map(|run| &run.plan.peers).map(|&rank| self.members.peer(rank)).collect()
    }
}
