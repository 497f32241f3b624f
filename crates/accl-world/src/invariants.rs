//! The invariants of every history, checked while it runs and at its end.
//!
//! Owns the checks only: nothing here causes an event. `docs/simulated-world.md` lists the invariants. Read
//! [`World::note_ends`] and [`World::check_rest`] first.

use std::sync::atomic::Ordering;
use std::time::Duration;

use accl_types::{Collective, Error, ErrorKind, Rank};

use super::clock;
use super::scenario::{Breaks, Fault, Item, Linking};
use super::world::{Asked, Made, Violation, World, info};
use accl_engine::internals::NOTE_DELAY;
use accl_engine::internals::{Found, ROUND};
use accl_executor::call::CallState;
use accl_executor::exec::OFFLOAD_GRACE;
use accl_executor::group::{Core, GRACE, GroupState, SILENCE_CHECK_INTERVAL, STOP_WITHIN, VANISHED};
use accl_executor::peers::{Gone, neighbours};

/// Maximum time by which a call may end after its deadline, because a thread is busy.
const SLACK: Duration = Duration::from_millis(3);
/// Maximum nanoseconds from the failure of a group on one rank until its neighbours know of it: see
/// [`World::note_failures`].
const FAILURE_REPORT_DELAY: u64 = (NOTE_DELAY.as_nanos() + GRACE.as_nanos() + SLACK.as_nanos()) as u64;

impl World<'_> {
    /// Whether the scenario has no faults.
    fn is_well(&self) -> bool {
        self.faults.is_empty()
    }

    fn has_flips(&self) -> bool {
        self.faults.iter().any(|fault| matches!(fault, Fault::Flip { .. }))
    }

    /// Checks that no call needs a timer to make progress in a world without faults. If one does, a notification was
    /// lost.
    pub(super) fn check_progress(&self, process: usize) -> Result<(), Violation> {
        if !self.is_well() || !self.agenda.lock().is_quiet() {
            return Ok(());
        }
        // A call that is held back begins at `begin_by` in any case, so a timer for it is no lost notification.
        let begins = |core: &Core| core.groups().any(|group| group.begin_by().is_some_and(|at| at <= clock::now()));
        let is_over = self.living().all(|(by, _)| self.calls_of(by).all(|(_, made)| made.outcome().is_some()));
        match &self.processes[process].core {
            Some(core) if !begins(core) && !is_over => {
                Err(format!("only a timer makes the world go on: {}", self.unfinished()))
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Records the calls of a process that have just ended, and checks how and when they ended.
    pub(super) fn note_ends(&mut self, process: usize) -> Result<(), Violation> {
        let (is_well, has_flips, timeout) = (self.is_well(), self.has_flips(), self.scenario.timeout);
        let mut barriers = Vec::new();
        let group_of = |item: usize| self.scenario.items[item].group;
        for (&(item, by), made) in &mut self.made {
            if by != process || made.is_ended {
                continue;
            }
            let Some(outcome) = made.outcome() else { continue };
            made.is_ended = true;
            made.tensors.end();
            let place = || format!("item {item} on process {process} (group {})", group_of(item));
            let is_sealed = self.scenario.is_sealed(item);
            match &outcome {
                Ok(()) if made.is_odd => self.seen.done += 1,
                Ok(()) if !has_flips || is_sealed => {
                    self.seen.done += 1;
                    if let Some(wrong) = made.tensors.wrong_result() {
                        return Err(format!("{} is done, but {wrong}", place()));
                    }
                    if self.scenario.items[item].codec.is_some() {
                        let bits = made.tensors.bits();
                        if *self.bits.entry(item).or_insert_with(|| bits.clone()) != bits {
                            return Err(format!("{} ended with other bits than on another rank", place()));
                        }
                    }
                }
                Ok(()) => self.seen.done += 1,
                Err(error) => {
                    self.seen.failed += 1;
                    if is_well {
                        return Err(format!("{} failed in a world that is well: {error}", place()));
                    }
                    if error.kind == ErrorKind::Internal {
                        return Err(format!("{} failed of a defect: {error}", place()));
                    }
                }
            }
            if let Some(call) = &made.call {
                let took = clock::now().since(call.started());
                let never_stops = |fault: &Fault| matches!(fault, Fault::Break { breaks: Breaks::NeverStops, .. });
                let given_up = if self.faults.iter().any(never_stops) { STOP_WITHIN } else { Duration::ZERO };
                let hangs =
                    |fault: &Fault| matches!(fault, Fault::Break { breaks: Breaks::Hangs | Breaks::AllHang, .. });
                // Calls that a device does, and calls of their group, which may wait for their turn behind them.
                let items = 0..self.scenario.items.len();
                let is_external = items
                    .into_iter()
                    .any(|other| group_of(other) == group_of(item) && self.scenario.is_offloaded(other));
                // Devices enforce the deadline unless they hang; if they hang, the engine enforces it. A device checks
                // the deadline of one call after the other. Of calls with reserved sequence numbers, the first may have
                // been issued last.
                let checks_deadline = !self.faults.iter().any(hangs) && !self.scenario.has_compositions(group_of(item));
                let grace = if is_external && !checks_deadline { OFFLOAD_GRACE } else { Duration::ZERO };
                if took > timeout + SLACK + given_up + grace {
                    return Err(format!("{} ended after {took:?}: {outcome:?}", place()));
                }
            }
            if outcome.is_ok() && self.scenario.items[item].collective == Collective::Barrier {
                barriers.push(item);
            }
            let words = [item as u64, process as u64, clock::nanos(), u64::from(outcome.is_ok()), self.seen.hash];
            self.seen.hash = accl_types::hash::hash_words(words);
        }
        barriers.into_iter().try_for_each(|item| self.check_barrier(item))?;
        self.note_failures(process)
    }

    /// Records the groups of a process that have just failed, and checks that the process learned of each failure in
    /// time.
    ///
    /// A rank whose group has failed sends a note to each neighbour after `NOTE_DELAY`, unless that neighbour knows by
    /// then. The note arrives whether or not the neighbour polls a link. A note from the rank that failed first counts
    /// at once; a failure that another rank passes on counts after `GRACE`. So each neighbour knows after at most the
    /// sum of both.
    ///
    /// By induction, a rank that is `hops` neighbours away knows after at most `hops` times that sum. This holds over
    /// ranks that are alive and wires that are whole. Neighbours are a power of two away. While all ranks are alive,
    /// there are at most as many hops as the number of ranks has bits.
    fn note_failures(&mut self, process: usize) -> Result<(), Violation> {
        let now = clock::nanos();
        let host = &self.processes[process];
        let made: Vec<(usize, u64)> = host.members.iter().map(|(&group, member)| (group, member.made_at)).collect();
        for (group, made_at) in made {
            let has_failed = self.state(process, group).is_some_and(|state| state.failure().is_some());
            if !has_failed || self.failed_at.contains_key(&(process, group)) {
                continue;
            }
            for (neighbour, failed_at) in self.informants(process, group) {
                let late = now.saturating_sub(failed_at.max(made_at) + FAILURE_REPORT_DELAY);
                if late > 0 {
                    return Err(format!(
                        "process {process} learns of the failure of group {group} {late} ns later than it must from its neighbour \
                         {neighbour}, where it failed at {failed_at}"
                    ));
                }
            }
            for (other, linked_at) in self.links_after_failure(process, group) {
                // A process that waits for nothing polls no link.
                let waits_since =
                    |made: &Made| made.call.as_ref().filter(|call| call.is_done()).map(|call| call.started().nanos());
                let has_failed = |made: &Made| made.outcome().is_some_and(|outcome| outcome.is_err());
                let mut calls = self.calls_of(process).filter(|&(item, _)| self.scenario.items[item].group == group);
                let waited =
                    calls.any(|(_, made)| has_failed(made) && waits_since(made).is_some_and(|at| at <= linked_at));
                let late = now.saturating_sub(linked_at.max(made_at) + (GRACE + SLACK).as_nanos() as u64);
                if late > 0 && waited {
                    return Err(format!(
                        "process {process} learns of the failure of group {group} {late} ns later than it must from process {other}, \
                         where it had failed when they were linked at {linked_at}"
                    ));
                }
            }
            self.failed_at.insert((process, group), now);
        }
        Ok(())
    }

    /// Returns the processes on which the group had failed when `process` was linked to them, with the time of the link
    /// in nanoseconds. A process asks on each new link what it has missed.
    fn links_after_failure(&self, process: usize, group: usize) -> impl Iterator<Item = (usize, u64)> {
        let others = self.scenario.groups[group].members.iter().copied().filter(move |&other| other != process);
        others.filter_map(move |other| {
            let failed_at = *self.failed_at.get(&(other, group))?;
            let wire = self.wire_between(process, other)?;
            let &(first, last) = self.linked_at.get(&wire)?;
            let lives = self.processes[other].core.is_some();
            (failed_at < first && lives && self.is_whole(wire) && !self.is_slow(wire)).then_some((other, last))
        })
    }

    /// Returns the processes of neighbouring ranks on which the group has failed, with the time of the failure in
    /// nanoseconds. Each has lived long enough since to send its note, and the wire to it is whole.
    fn informants(&self, process: usize, group: usize) -> impl Iterator<Item = (usize, u64)> {
        let spec = &self.scenario.groups[group];
        let rank = spec.rank_of(process).map(|rank| Rank(rank as u32));
        let ranks = rank.into_iter().flat_map(|rank| neighbours(rank, spec.members.len() as u32));
        ranks.filter_map(move |rank| {
            let neighbour = spec.members[rank.index()];
            let failed_at = *self.failed_at.get(&(neighbour, group))?;
            let has_lived =
                self.processes[neighbour].died_at.is_none_or(|at| at > failed_at + NOTE_DELAY.as_nanos() as u64);
            let wire = self.wire_between(process, neighbour)?;
            (has_lived && self.is_whole(wire)).then_some((neighbour, failed_at))
        })
    }

    /// Whether no fault of a wire keeps its ends from each other. A process that detects a flipped bit gives its peer
    /// up, so flips count.
    fn is_whole(&self, wire: usize) -> bool {
        let state = self.wires[wire].lock();
        let flips = self.faults.iter().any(|fault| matches!(fault, Fault::Flip { wire: at, .. } if *at == wire));
        !state.is_cut() && !state.is_silent() && !flips
    }

    /// Checks that every process knows of a failure that one of its neighbours knows of. Called when no event but
    /// deadlines is left, before idle links are polled.
    pub(super) fn check_failure_reports(&self) -> Result<(), Violation> {
        for (process, host) in self.living() {
            for &group in host.members.keys() {
                let knows = self.state(process, group).is_none_or(|state| state.failure().is_some());
                if let Some((neighbour, _)) = self.informants(process, group).next().filter(|_| !knows) {
                    return Err(format!(
                        "group {group} has failed on process {neighbour}, and its neighbour {process} was not notified"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Checks, before a process does anything, that none of its calls has waited too long for a process that was
    /// killed.
    ///
    /// The host of the dead process reports the death on existing links, after data in flight, and refuses new links.
    /// Both take less than a millisecond. A process that was refused asks others. If one of them does not know of the
    /// death yet, it asks again after `ROUND`; by then the other process knows.
    pub(super) fn check_waits(&self, process: usize) -> Result<(), Violation> {
        let Some(core) = &self.processes[process].core else { return Ok(()) };
        let dead: Vec<(usize, u64)> = self.faults.iter().filter_map(|fault| self.killed_by(fault)).collect();
        for &(corpse, died_at) in &dead {
            if self.wire_between(process, corpse).is_none_or(|wire| self.is_slow(wire)) {
                continue;
            }
            for (&group, member) in &self.processes[process].members {
                let rank = self.scenario.groups[group].rank_of(corpse).map(|rank| Rank(rank as u32));
                let (Some(rank), Some(state)) = (rank, core.group(member.caller.group)) else { continue };
                // A collective that devices run also needs all ranks, except ranks that had left the group.
                let has_left = self.processes[corpse].members.get(&group).is_none_or(|member| member.left_at.is_some());
                let is_known = !has_left && self.was_linked(process, corpse, died_at);
                let offloaded = state.offloaded_calls().filter(|_| is_known).cloned();
                for call in state.calls_that_need(rank).into_iter().chain(offloaded) {
                    let since = call.started().nanos().max(died_at);
                    let asks = if self.scenario.linking == Linking::AtFirst { Duration::ZERO } else { ROUND };
                    if clock::nanos() > since + (asks + SLACK).as_nanos() as u64 {
                        return Err(format!(
                            "on process {process} call {} of group {group} has needed process {corpse}, which is dead, since {since}",
                            call.seq
                        ));
                    }
                }
            }
        }
        self.check_waits_for_who_left(process, core)?;
        self.check_silence(process)
    }

    /// Whether two processes had a link at time `at`, in nanoseconds.
    fn was_linked(&self, one: usize, other: usize, at: u64) -> bool {
        let linked_at = self.wire_between(one, other).and_then(|wire| self.linked_at.get(&wire));
        self.scenario.linking == Linking::AtFirst || linked_at.is_some_and(|&(_, last)| last <= at)
    }

    /// Makes the check of [`World::check_waits`] for ranks that have left a group. Such a rank reports on every
    /// existing and later link that it has left.
    fn check_waits_for_who_left(&self, process: usize, core: &Core) -> Result<(), Violation> {
        for (&group, member) in &self.processes[process].members {
            let Some(state) = core.group(member.caller.group) else { continue };
            let overdue = |call: &CallState, known: u64| {
                let since = call.started().nanos().max(known);
                (clock::nanos() > since + SLACK.as_nanos() as u64).then_some(since)
            };
            let others = self.scenario.groups[group].members.iter().copied().enumerate();
            let others = others.filter(|&(_, other)| other != process);
            let known: Vec<Option<u64>> =
                others.clone().map(|(_, other)| self.departure_known(process, group, other)).collect();
            for ((rank, other), known) in others.zip(&known).filter_map(|(other, known)| Some((other, (*known)?))) {
                let calls = state.calls_that_need(Rank(rank as u32));
                if let Some((call, since)) = calls.iter().find_map(|call| Some((call, overdue(call, known)?))) {
                    return Err(format!(
                        "on process {process} call {} of group {group} has needed process {other}, which has left, since {since}",
                        call.seq
                    ));
                }
            }
            let all_known =
                known.iter().copied().collect::<Option<Vec<u64>>>().and_then(|known| known.into_iter().max());
            if let Some(since) =
                all_known.and_then(|known| state.receives_from_any().find_map(|call| overdue(call, known)))
            {
                return Err(format!(
                    "on process {process} a message in group {group} may come from any rank, and all have left since {since}"
                ));
            }
        }
        Ok(())
    }

    /// Returns the time, in nanoseconds, since when a process knows that another process has left a group, or would
    /// know if it asked. `None` if it need not know yet.
    fn departure_known(&self, process: usize, group: usize, other: usize) -> Option<u64> {
        let core = self.processes[other].core.as_ref()?;
        let left_at = self.processes[other].members.get(&group)?.left_at?;
        let wire = self.wire_between(process, other).filter(|&wire| self.is_whole(wire) && !self.is_slow(wire))?;
        // Data that the other process sent before it left may still be in flight.
        let end = usize::from(self.scenario.wires[wire].0[1] == process);
        let has_all_since = self.wires[wire].lock().has_all_since(end).filter(|_| !core.net.has_unsent())?;
        Some(left_at.max(has_all_since))
    }

    /// Checks, before a process does anything, that none of its calls has waited too long for an answer of a vanished
    /// host. The time counts from when the process sent something that was not answered.
    fn check_silence(&self, process: usize) -> Result<(), Violation> {
        let in_flight =
            self.calls_of(process).filter_map(|(_, made)| made.call.as_ref().filter(|call| !call.is_done()));
        let Some(first) = in_flight.map(|call| call.started().nanos()).min() else { return Ok(()) };
        for (wire, (ends, _)) in self.wires.iter().zip(&self.scenario.wires) {
            let Some(end) = ends.iter().position(|&at| at == process) else { continue };
            let Some(asked_at) = wire.lock().unanswered_since(end) else { continue };
            let found_by =
                (asked_at + VANISHED.as_nanos() as u64).max(first) + (SILENCE_CHECK_INTERVAL + SLACK).as_nanos() as u64;
            if clock::nanos() > found_by {
                return Err(format!(
                    "process {process} has not found that {}, whose host has vanished, has not answered since {asked_at}",
                    ends[1 - end]
                ));
            }
        }
        Ok(())
    }

    /// Checks what a process found out about a peer. No process of a history disconnects properly before `World::end`.
    /// If a process that was asked knows that the peer is lost, the peer must not count as having left.
    pub(super) fn check_fate(&self, process: usize, peer: usize, found: &Found) -> Result<(), Violation> {
        let uuid = info(peer).uuid;
        let about_it = |asked: &&Asked| asked.from == process && asked.question.bytes.ends_with(&uuid);
        match self.questions.iter().filter(about_it).find(|asked| asked.knows_loss) {
            Some(Asked { to, .. }) if matches!(found, Found::Left { .. }) => Err(format!(
                "process {process} takes {peer} for one that has left, and {to}, which it asked, knows that it is lost"
            )),
            Some(_) | None => Ok(()),
        }
    }

    /// Whether a process considers process `of` lost.
    pub(super) fn knows_loss(&self, process: usize, of: usize) -> bool {
        let net = self.processes[process].core.as_ref().map(|core| &core.net);
        let gone = net.and_then(|net| net.gone(&info(of).uuid).and_then(|id| net.peer(id).gone()));
        matches!(gone, Some(Gone::Lost(_)))
    }

    fn killed_by(&self, fault: &Fault) -> Option<(usize, u64)> {
        match fault {
            Fault::Kill { process, .. } => Some((*process, self.processes[*process].died_at?)),
            _ => None,
        }
    }

    /// Whether the death of a process may be reported late over a wire, because the wire stalls or the host has
    /// vanished.
    fn is_slow(&self, wire: usize) -> bool {
        let stalls = self.faults.iter().any(|fault| matches!(fault, Fault::Stall { wire: at, .. } if *at == wire));
        stalls || self.wires[wire].lock().is_silent()
    }

    /// Checks that every collective issued before a barrier has completed on all living processes when the barrier
    /// completes.
    fn check_barrier(&self, barrier: usize) -> Result<(), Violation> {
        let group = self.scenario.items[barrier].group;
        let is_before = |item: usize| {
            let earlier = &self.scenario.items[item];
            item < barrier && earlier.group == group && !earlier.is_message()
        };
        let open = self.made.iter().find(|((item, process), made)| {
            is_before(*item) && made.outcome().is_none() && self.processes[*process].core.is_some()
        });
        open.map_or(Ok(()), |((item, process), _)| {
            Err(format!("barrier {barrier} is over, and item {item} before it is in flight on process {process}"))
        })
    }

    /// Checks, after all calls, that nothing is left over and that each failure has reached all ranks.
    pub(super) fn check_rest(&self) -> Result<(), Violation> {
        for (process, host) in self.living() {
            let Some(core) = &host.core else { continue };
            if self.is_well() {
                let left = core.residue();
                if !left.is_empty() {
                    return Err(format!("process {process} has left over: {}", left.join(", ")));
                }
            }
        }
        if self.is_well() {
            self.check_credits()?;
        }
        self.check_causes()
    }

    /// Checks that, for each pair of ranks, the remaining credit of the sender and the credit owed by the receiver make
    /// up the window.
    fn check_credits(&self) -> Result<(), Violation> {
        let lanes = 0..self.scenario.lanes;
        let groups = self.scenario.groups.iter().enumerate();
        for ((index, group), lane) in groups.flat_map(|group| lanes.clone().map(move |lane| (group, lane))) {
            let state = |process: usize| self.state(self.scenario.node(process, lane), index);
            for (a, &mine) in group.members.iter().enumerate() {
                for (b, &theirs) in group.members.iter().enumerate() {
                    let (Some(mine), Some(theirs)) = (state(mine), state(theirs)) else { continue };
                    let (left, _, window) = mine.members().credit(Rank(b as u32));
                    let (_, owed, _) = theirs.members().credit(Rank(a as u32));
                    if a != b && left + owed != window {
                        return Err(format!(
                            "in group {index} rank {a} may send {left} bytes ahead to {b} on lane {lane}, which owes {owed} of {window}"
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// Checks that a failed group has failed on all ranks still in it, for a reason that has occurred.
    fn check_causes(&self) -> Result<(), Violation> {
        if self.has_flips() {
            return Ok(());
        }
        for (index, group) in self.scenario.groups.iter().enumerate() {
            let states: Vec<(usize, &GroupState)> =
                group.members.iter().filter_map(|&member| Some((member, self.state(member, index)?))).collect();
            let failed: Vec<(usize, &Error)> =
                states.iter().filter_map(|(member, state)| Some((*member, state.failure()?))).collect();
            let Some((_, first)) = failed.first() else { continue };
            let (may, is_alone) = self.may_fail_of(index);
            if let Some((member, error)) = failed.iter().find(|(_, error)| !may.contains(&error.kind)) {
                return Err(format!("group {index} failed on process {member} of what did not happen: {error}"));
            }
            // A rank that is cut off cannot learn of the failure.
            let is_cut = self.faults.iter().any(|fault| matches!(fault, Fault::Cut { .. }));
            if let Some((member, _)) = states.iter().find(|(_, state)| state.failure().is_none() && !is_cut) {
                return Err(format!("group {index} has failed, and process {member} does not know: {first}"));
            }
            // The other lanes of ranks may find different causes, which are not reported to any caller or peer.
            for &(member, first) in &failed {
                let mut others = self.scenario.nodes(member).skip(1);
                let is_well = |node: &usize| self.state(*node, index).is_some_and(|state| state.failure().is_none());
                if let Some(node) = others.find(is_well) {
                    let lane = node / self.scenario.processes;
                    return Err(format!(
                        "group {index} has failed on the first lane of process {member} and not on its lane {lane}: {first}"
                    ));
                }
            }
            if let Some((member, other)) = failed.iter().find(|(_, error)| is_alone && error.kind != first.kind) {
                return Err(format!(
                    "process {member} says that group {index} failed of another cause: {first}; {other}"
                ));
            }
        }
        Ok(())
    }

    fn takes_from_any(&self, group: usize) -> bool {
        let has_item =
            |(index, item): (usize, &Item)| item.group == group && item.is_from_any && self.scenario.has_item(index);
        self.scenario.items.iter().enumerate().any(has_item)
    }

    fn offloads(&self, group: usize) -> bool {
        (0..self.scenario.items.len()).any(|item| {
            self.scenario.items[item].group == group && self.scenario.has_item(item) && self.scenario.is_offloaded(item)
        })
    }

    /// Whether a group may keep waiting although one of its ranks is dead, because that rank counts as having left.
    fn may_take_for_left(&self, group: usize) -> bool {
        self.scenario.linking != Linking::AtFirst && (self.takes_from_any(group) || self.offloads(group))
    }

    /// Whether [`World::may_take_for_left`] holds for some group of the dead process `process`.
    fn waits_for_one_taken_for_left(&self, process: usize) -> bool {
        let groups = self.scenario.groups.iter().enumerate();
        groups.filter(|(_, spec)| spec.members.contains(&process)).any(|(group, _)| self.may_take_for_left(group))
    }

    /// Returns the kinds of errors with which a group may have failed, and whether only one fault with one kind
    /// concerns the group.
    fn may_fail_of(&self, group: usize) -> (Vec<ErrorKind>, bool) {
        let spec = &self.scenario.groups[group];
        let mut kinds: Vec<ErrorKind> = Vec::new();
        let mut count = 0;
        for (index, fault) in self.faults.iter().enumerate() {
            let may: &[ErrorKind] = match fault {
                // A process that dies before any process has a link to it counts as having left. A message from any
                // rank may still come, and the devices of the other ranks go on.
                Fault::Kill { process, .. } if spec.members.contains(process) => {
                    if self.may_take_for_left(group) {
                        &[ErrorKind::PeerLost, ErrorKind::Timeout]
                    } else {
                        &[ErrorKind::PeerLost]
                    }
                }
                Fault::Kill { process, .. } if self.waits_for_one_taken_for_left(*process) => &[ErrorKind::Timeout],
                Fault::Vanish { process, .. } if spec.members.contains(process) => {
                    &[ErrorKind::PeerLost, ErrorKind::Timeout]
                }
                Fault::Cut { wire, .. }
                    if self.scenario.wires[*wire]
                        .0
                        .iter()
                        .all(|end| spec.members.contains(&(end % self.scenario.processes))) =>
                {
                    &[ErrorKind::PeerLost]
                }
                // A rank that needs nothing from the disagreeing rank may have left the group meanwhile.
                Fault::Disagree { item, .. } if self.scenario.items[*item].group == group => &[
                    ErrorKind::Mismatch,
                    ErrorKind::Protocol,
                    ErrorKind::Timeout,
                    ErrorKind::PeerLost,
                    ErrorKind::Aborted,
                ],
                Fault::Abort { item, .. } if self.scenario.items[*item].group == group => &[ErrorKind::Aborted],
                Fault::Break { item, breaks: Breaks::Fails | Breaks::Drops, .. }
                    if self.scenario.items[*item].group == group =>
                {
                    &[ErrorKind::Device]
                }
                Fault::Break { breaks: Breaks::Fails | Breaks::Drops, .. } => &[],
                // A message from any rank may still come from another rank.
                Fault::Leave { item, .. } if self.scenario.items[*item].group == group => {
                    &[ErrorKind::Aborted, ErrorKind::PeerLost, ErrorKind::Timeout]
                }
                // A rank that waits in another group until its deadline is late in this group.
                Fault::Stall { .. }
                | Fault::Late { .. }
                | Fault::Vanish { .. }
                | Fault::Disagree { .. }
                | Fault::Leave { .. }
                | Fault::Break { .. } => &[ErrorKind::Timeout],
                Fault::Kill { .. } | Fault::Cut { .. } | Fault::Abort { .. } | Fault::Flip { .. } => &[],
            };
            if self.struck.contains(&index) || matches!(fault, Fault::Late { .. } | Fault::Stall { .. }) {
                count += usize::from(!may.is_empty());
                kinds.extend(may);
            }
        }
        let is_alone = count == 1 && kinds.len() == 1;
        (kinds, is_alone)
    }

    /// Checks that each call's completion callback has run exactly once, and that no memory was written outside tensors
    /// or after a call's end.
    pub(super) fn check_calls(&mut self) -> Result<(), Violation> {
        for (&(item, process), made) in &mut self.made {
            // Callbacks of calls in flight when their process died are dropped with the process.
            let callbacks = made.callbacks.load(Ordering::Relaxed);
            let wanted = usize::from(made.call.is_some() && made.is_ended);
            if callbacks != wanted {
                return Err(format!(
                    "item {item} on process {process} has reported its end {callbacks} times, not {wanted}"
                ));
            }
            if let Some(trespass) = made.tensors.trespass() {
                return Err(format!("item {item} on process {process}: {trespass}"));
            }
        }
        Ok(())
    }
}
