//! What must hold in every history, while it runs and when it is over.
//!
//! Owns the judgement alone: nothing here makes anything happen. `docs/simulated-world.md` lists what must hold. Read
//! [`World::note_ends`] and [`World::check_rest`] first.

use std::sync::atomic::Ordering;
use std::time::Duration;

use accl_types::{Collective, Error, ErrorKind, Rank};

use super::clock;
use super::scenario::Fault;
use super::world::{TIMEOUT, Violation, World};
use crate::group::{Core, GroupState};

/// A call may end so much later than its deadline: somebody is in the middle of something.
const SLACK: Duration = Duration::from_millis(3);

impl World<'_> {
    /// Whether anything but time has gone wrong, or could have.
    fn is_well(&self) -> bool {
        self.faults.is_empty()
    }

    fn has_flips(&self) -> bool {
        self.faults.iter().any(|fault| matches!(fault, Fault::Flip { .. }))
    }

    /// In a world that is well, calls do not wait for time to pass: somebody was not told of something.
    pub(super) fn check_progress(&self, process: usize) -> Result<(), Violation> {
        if !self.is_well() || !self.agenda.lock().is_quiet() {
            return Ok(());
        }
        // Calls that are held back begin after a while in any case.
        let begins =
            |core: &Core| core.groups.values().any(|group| group.begin_by().is_some_and(|at| at <= clock::now()));
        let is_over = self.living().all(|(by, _)| self.calls_of(by).all(|(_, made)| made.outcome().is_some()));
        match &self.processes[process].core {
            Some(core) if !begins(core) && !is_over => {
                Err(format!("only a timer makes the world go on: {}", self.unfinished()))
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Looks at the calls of a process that have just ended.
    pub(super) fn note_ends(&mut self, process: usize) -> Result<(), Violation> {
        let (is_well, has_flips) = (self.is_well(), self.has_flips());
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
                let took = clock::now().since(call.started);
                if took > TIMEOUT + SLACK {
                    return Err(format!("{} ended after {took:?}: {outcome:?}", place()));
                }
            }
            if outcome.is_ok() && self.scenario.items[item].collective == Collective::Barrier {
                barriers.push(item);
            }
            let words = [item as u64, process as u64, clock::nanos(), u64::from(outcome.is_ok()), self.seen.hash];
            self.seen.hash = crate::hash::hash_words(words);
        }
        barriers.into_iter().try_for_each(|item| self.check_barrier(item))
    }

    /// What any rank has begun before a barrier is over when the barrier is, on every rank.
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

    /// When all have ended: nothing is left over, and a failure has reached everybody.
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

    /// What one may send ahead and what the other has yet to give back make up the window.
    fn check_credits(&self) -> Result<(), Violation> {
        for (index, group) in self.scenario.groups.iter().enumerate() {
            for (a, &mine) in group.members.iter().enumerate() {
                for (b, &theirs) in group.members.iter().enumerate() {
                    let (Some(mine), Some(theirs)) = (self.state(mine, index), self.state(theirs, index)) else {
                        continue;
                    };
                    let (left, _, window) = mine.members.credit(Rank(b as u32));
                    let (_, owed, _) = theirs.members.credit(Rank(a as u32));
                    if a != b && left + owed != window {
                        return Err(format!(
                            "in group {index} rank {a} may send {left} bytes ahead to {b}, which owes {owed} of {window}"
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// A group that has failed has failed on all ranks that are still in it, for a reason that has come to pass.
    fn check_causes(&self) -> Result<(), Violation> {
        if self.has_flips() {
            return Ok(());
        }
        for (index, group) in self.scenario.groups.iter().enumerate() {
            let states: Vec<(usize, &GroupState)> =
                group.members.iter().filter_map(|&member| Some((member, self.state(member, index)?))).collect();
            let failed: Vec<(usize, &Error)> =
                states.iter().filter_map(|(member, state)| Some((*member, state.poison()?))).collect();
            let Some((_, first)) = failed.first() else { continue };
            let (may, is_alone) = self.may_fail_of(index);
            if let Some((member, error)) = failed.iter().find(|(_, error)| !may.contains(&error.kind)) {
                return Err(format!("group {index} failed on process {member} of what did not happen: {error}"));
            }
            // A rank that is cut off hears of nothing.
            let is_cut = self.faults.iter().any(|fault| matches!(fault, Fault::Cut { .. } | Fault::Stall { .. }));
            if let Some((member, _)) = states.iter().find(|(_, state)| state.poison().is_none() && !is_cut) {
                return Err(format!("group {index} has failed, and process {member} does not know: {first}"));
            }
            if let Some((member, other)) = failed.iter().find(|(_, error)| is_alone && error.kind != first.kind) {
                return Err(format!(
                    "process {member} says that group {index} failed of another cause: {first}; {other}"
                ));
            }
        }
        Ok(())
    }

    /// The kinds of errors that a group may have failed of, and whether one fault alone concerns it.
    fn may_fail_of(&self, group: usize) -> (Vec<ErrorKind>, bool) {
        let spec = &self.scenario.groups[group];
        let mut kinds: Vec<ErrorKind> = Vec::new();
        let mut count = 0;
        for (index, fault) in self.faults.iter().enumerate() {
            let may: &[ErrorKind] = match fault {
                Fault::Kill { process, .. } if spec.members.contains(process) => &[ErrorKind::PeerLost],
                Fault::Vanish { process, .. } if spec.members.contains(process) => {
                    &[ErrorKind::PeerLost, ErrorKind::Timeout]
                }
                Fault::Cut { wire, .. }
                    if self.scenario.wires[*wire].0.iter().all(|end| spec.members.contains(end)) =>
                {
                    &[ErrorKind::PeerLost]
                }
                // A rank that needs nothing from the one that disagrees may have left the group meanwhile.
                Fault::Disagree { item, .. } if self.scenario.items[*item].group == group => &[
                    ErrorKind::Mismatch,
                    ErrorKind::Protocol,
                    ErrorKind::Timeout,
                    ErrorKind::PeerLost,
                    ErrorKind::Aborted,
                ],
                Fault::Abort { item, .. } if self.scenario.items[*item].group == group => &[ErrorKind::Aborted],
                // A message from any rank may still come from another one.
                Fault::Leave { item, .. } if self.scenario.items[*item].group == group => {
                    &[ErrorKind::Aborted, ErrorKind::PeerLost, ErrorKind::Timeout]
                }
                // Whoever waits in another group until its deadline is late in this one.
                Fault::Stall { .. }
                | Fault::Late { .. }
                | Fault::Vanish { .. }
                | Fault::Disagree { .. }
                | Fault::Leave { .. } => &[ErrorKind::Timeout],
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

    /// Nobody has written where nobody may.
    pub(super) fn check_calls(&mut self) -> Result<(), Violation> {
        for (&(item, process), made) in &mut self.made {
            // Those of calls that were in flight when their process died are dropped with it.
            let callbacks = made.callbacks.load(Ordering::Relaxed);
            let wanted = usize::from(made.call.is_some() && made.is_ended);
            if callbacks != wanted {
                return Err(format!(
                    "item {item} on process {process} has told of its end {callbacks} times, not {wanted}"
                ));
            }
            if let Some(trespass) = made.tensors.trespass() {
                return Err(format!("item {item} on process {process}: {trespass}"));
            }
        }
        Ok(())
    }
}
