//! Monitored barrier: rank 0 receives a message from every rank, and reports the ranks that did not arrive.
//!
//! Runs over empty point-to-point messages on tags that users cannot choose. Such messages need no grant, and no memory
//! that a rank would have to keep after it gives up. A rank announces its arrival with a number of its own, and rank 0
//! releases the rank by that number. A rank that gives up withdraws, so that its announcement is not taken for an
//! arrival at a later barrier. A rank whose process is gone is missing, even if it had arrived, unless it gave up
//! before. A failure leaves the group usable.

use std::time::Duration;

use accl_types::{Collective, Dtype, Elems, Error, ErrorKind, Moment, Rank, Result};

use super::call::Call;
use super::group::Group;
use crate::time;
use accl_executor::call::{Blocks, CallDesc, Mode, TensorDesc, Waited};
use accl_executor::exec::PRIVATE_TAGS;

const TAG_NOTE: u32 = PRIVATE_TAGS;
const TAG_RELEASED: u32 = 0xC000_0000;
const TAG_NUMBER: u32 = 0x3FFF_FFFF;

/// Flags of the word that a rank sends to rank 0 with a message, above its number: it arrived, or it withdraws.
const ARRIVED: u64 = 1 << 32;
const WITHDRAWN: u64 = 2 << 32;

/// State of a rank as rank 0 knows it.
#[derive(Clone, PartialEq, Eq)]
enum Presence {
    /// The rank has sent nothing in this barrier.
    NotArrived,
    /// The rank waits under this number.
    Waiting(u32),
    /// The rank arrived and has given up since: too late for a release, but not missing.
    GaveUp,
    /// The rank sends nothing more, for this reason.
    Gone(String),
}

impl Group {
    /// Waits until all ranks have entered. Rank 0 determines which ranks are missing: the first in rank order, or all
    /// of them with `wait_all`.
    ///
    /// # Errors
    /// * `Timeout` names the missing ranks on rank 0, and names rank 0 on the other ranks.
    /// * `PeerLost` on the other ranks if rank 0 is gone.
    /// * `Aborted` when interrupted.
    pub fn monitored_barrier(
        &self,
        timeout: Duration,
        wait_all: bool,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        let deadline = time::now() + timeout;
        if self.caller.rank != Rank(0) {
            return self.arrive(timeout, deadline, interrupt);
        }
        let present = self.call_roll(timeout, deadline, wait_all, interrupt)?;
        let ranks_that = |wanted: fn(&Presence) -> bool| -> Vec<u32> {
            (1..).zip(&present).filter(|(_, presence)| wanted(presence)).map(|(rank, _)| rank).collect()
        };
        let mut missing = ranks_that(|presence| matches!(presence, Presence::NotArrived | Presence::Gone(_)));
        if missing.is_empty() {
            missing = ranks_that(|presence| *presence == Presence::GaveUp);
        }
        if !wait_all {
            missing.truncate(1);
        }
        if !missing.is_empty() {
            let names: Vec<String> = missing.iter().map(u32::to_string).collect();
            let ranks = if wait_all && names.len() > 1 { "Ranks" } else { "Rank" };
            let mut text = if timeout.is_zero() {
                "Rank 0 timed out in monitoredBarrier after 0ms: it allows no time for the others to arrive".to_owned()
            } else {
                format!("{ranks} {} failed to pass monitoredBarrier in {} ms", names.join(", "), timeout.as_millis())
            };
            for rank in missing {
                if let Some(Presence::Gone(why)) = present.get(rank as usize - 1) {
                    text += &format!("; {why}");
                }
            }
            return Err(self.in_context(Error::timeout(text)));
        }
        for (rank, presence) in (1..).map(Rank).zip(present) {
            if let Presence::Waiting(number) = presence {
                self.message(Collective::Send, rank, TAG_RELEASED | number, 0)?;
            }
        }
        Ok(())
    }

    /// Receives from ranks 1, 2, ...: from all of them, or up to the first missing rank.
    fn call_roll(
        &self,
        timeout: Duration,
        deadline: Moment,
        wait_all: bool,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<Presence>> {
        let mut present = vec![Presence::NotArrived; self.caller.world.saturating_sub(1) as usize];
        if timeout.is_zero() {
            return Ok(present);
        }
        // Take messages of earlier barriers first: a rank that gave up then has not arrived at this one.
        for (rank, presence) in (1..).map(Rank).zip(&mut present) {
            self.receive_queued(rank, presence)?;
            if *presence == Presence::GaveUp {
                *presence = Presence::NotArrived;
            }
        }
        for (rank, presence) in (1..).map(Rank).zip(&mut present) {
            if *presence == Presence::NotArrived {
                self.receive(rank, presence, deadline, interrupt)?;
            }
            if matches!(presence, Presence::NotArrived | Presence::Gone(_)) && !wait_all {
                break;
            }
        }
        // Ranks that arrived early may have given up or died while others were waited for. A rank that gave up may
        // disconnect.
        for (rank, presence) in (1..).map(Rank).zip(&mut present) {
            // Checked before the queue: a rank that is absent sends nothing after that.
            let absence = self.with_state(|group, context| group.absence(rank, context.net))?;
            self.receive_queued(rank, presence)?;
            if let Some(why) = absence.filter(|_| *presence != Presence::GaveUp) {
                *presence = Presence::Gone(why);
            }
        }
        Ok(present)
    }

    /// Receives the queued messages of a rank.
    fn receive_queued(&self, rank: Rank, presence: &mut Presence) -> Result<()> {
        while self.with_state(|group, _| group.has_unexpected_message(rank, TAG_NOTE))? {
            self.receive(rank, presence, time::now(), &mut || false)?;
        }
        Ok(())
    }

    /// Receives one message of a rank, waiting for it until the deadline.
    fn receive(
        &self,
        rank: Rank,
        presence: &mut Presence,
        deadline: Moment,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        let call = self.message(Collective::Recv, rank, TAG_NOTE, 0)?;
        match self.settle(&call, deadline - time::now(), interrupt) {
            Ok(true) if call.state.note() & ARRIVED != 0 => *presence = Presence::Waiting(call.state.note() as u32),
            Ok(true) => *presence = Presence::GaveUp,
            Ok(false) => {}
            // A rank that is gone is as missing as a rank that is late.
            Err(error) if error.kind == ErrorKind::PeerLost => *presence = Presence::Gone(error.message),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn arrive(&self, timeout: Duration, deadline: Moment, interrupt: &mut dyn FnMut() -> bool) -> Result<()> {
        let number = self.with_state(|group, _| group.take_monitored_number(TAG_NUMBER))?;
        self.message(Collective::Send, Rank(0), TAG_NOTE, ARRIVED | u64::from(number))?;
        let call = self.message(Collective::Recv, Rank(0), TAG_RELEASED | number, 0)?;
        let left = deadline - time::now();
        let settled = self.settle(&call, left, interrupt);
        if settled != Ok(true) {
            // The send has no effect if the group has failed or rank 0 is gone.
            let _ = self.message(Collective::Send, Rank(0), TAG_NOTE, WITHDRAWN | u64::from(number));
        }
        let (kind, why) = match settled {
            Ok(true) => return Ok(()),
            Ok(false) => (ErrorKind::Timeout, format!("rank 0 did not answer within {} ms", timeout.as_millis())),
            Err(error) if error.kind == ErrorKind::PeerLost => (error.kind, error.message),
            Err(error) => return Err(error),
        };
        Err(self.in_context(Error::new(
            kind,
            format!(
                "Rank {} successfully reached monitoredBarrier, but received errors while waiting for send/recv from \
                 rank 0. Please check rank 0 logs for faulty rank: {why}",
                self.caller.rank
            ),
        )))
    }

    /// Starts an empty message without a deadline of its own. A send needs nothing from its receiver, and no thread
    /// waits for it.
    fn message(&self, collective: Collective, peer: Rank, tag: u32, note: u64) -> Result<Call> {
        let mut desc = CallDesc::new(collective, Dtype::U8);
        desc.peer = Some(peer);
        desc.tag = tag;
        desc.note = note;
        let tensor = Blocks::of(TensorDesc::dense(std::ptr::null_mut(), Dtype::U8, Elems(0)));
        if collective == Collective::Send {
            desc.inputs = tensor;
            desc.mode = Mode::Async;
        } else {
            desc.outputs = tensor;
        }
        self.submit(desc)
    }

    /// Waits for a message. When the time is up, gives the message up and returns `false`.
    fn settle(&self, call: &Call, left: Duration, interrupt: &mut dyn FnMut() -> bool) -> Result<bool> {
        let outcome = match call.wait(Some(left), interrupt) {
            // A message that arrived in the last moment counts.
            gave_up @ (Waited::TimedOut(_) | Waited::Interrupted) => self.take_back(call)?.unwrap_or(gave_up),
            ended => ended,
        };
        match outcome {
            Waited::Done => Ok(true),
            Waited::Failed(error) => Err(error),
            Waited::TimedOut(_) => Ok(false),
            Waited::Interrupted => Err(self.in_context(Error::aborted("interrupted in monitored_barrier"))),
        }
    }

    /// Takes a receive back and returns `None`, or returns its outcome if it has already completed.
    fn take_back(&self, call: &Call) -> Result<Option<Waited>> {
        self.with_state(|group, context| {
            let given_up = call.state.in_context(Error::timeout("given up"));
            if group.take_back(&call.state, given_up, context.now) { None } else { call.state.outcome() }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Instant;

    use accl_schedule::cost::Machine;
    use accl_transport::loopback::{self, Capacity};
    use accl_types::config::{Calibration, Config};
    use accl_wire::frame::OVERHEAD_BYTES;

    use super::*;
    use crate::{Engine, GroupRole, GroupSpec, MemoryStore};

    /// Creates a group of two ranks in this process.
    fn pair() -> [(Arc<Engine>, Arc<Group>); 2] {
        let config = Config { calibration: Calibration::Off, ..Config::default() };
        let engines = [(); 2].map(|()| Engine::new(config.clone(), |_| Machine::default()));
        let [a, b] = &engines;
        let frame_bytes = config.segment_bytes as usize + OVERHEAD_BYTES;
        let (left, right) = loopback::pair(frame_bytes, Capacity::Frames(64), a.waker().unwrap(), b.waker().unwrap());
        a.adopt_link(b.info().unwrap(), Box::new(left)).unwrap();
        b.adopt_link(a.info().unwrap(), Box::new(right)).unwrap();
        let store = MemoryStore::default();
        let group = |rank: u32| {
            let spec = GroupSpec {
                name: "g".to_owned(),
                rank: Rank(rank),
                world: 2,
                timeout: Duration::from_secs(30),
                config: config.clone(),
                master: None,
                global_ranks: Vec::new(),
                role: GroupRole::Default,
            };
            engines[rank as usize].create_group(spec, &store, &mut || false).unwrap()
        };
        let [first, second] = std::thread::scope(|scope| {
            [0, 1].map(|rank| scope.spawn(move || group(rank))).map(|thread| thread.join().unwrap())
        });
        let [a, b] = engines;
        [(a, first), (b, second)]
    }

    #[test]
    fn a_rank_that_learns_of_the_exit_of_rank_0_at_its_deadline_has_not_passed() {
        let [(left, _), (_, second)] = pair();
        let call = second.message(Collective::Recv, Rank(0), TAG_RELEASED | 1, 0).unwrap();
        left.shutdown();
        assert!(matches!(call.wait(None, &mut || false), Waited::Failed(_)));
        // Simulates a message that completed between the deadline and this call.
        let outcome = second.take_back(&call).unwrap();
        assert!(matches!(&outcome, Some(Waited::Failed(error)) if error.kind == ErrorKind::PeerLost), "{outcome:?}");
    }

    #[test]
    fn a_barrier_of_many_hours_sets_no_driver_deadline() {
        for timeout in [Duration::from_secs(5 * 3600), Duration::MAX] {
            let ranks = pair();
            let is_enough = AtomicBool::new(false);
            let patience = Instant::now() + Duration::from_secs(20);
            for (engine, group) in &ranks {
                is_enough.store(false, Ordering::SeqCst);
                let mut interrupt = || is_enough.load(Ordering::SeqCst) || Instant::now() > patience;
                std::thread::scope(|scope| {
                    scope.spawn(|| group.monitored_barrier(timeout, false, &mut interrupt).unwrap_err());
                    while group.with_state(|group, _| group.is_idle()).unwrap() {
                        assert!(Instant::now() < patience, "the barrier has begun");
                        std::thread::yield_now();
                    }
                    // A deadline that has passed and stays would keep the driver thread from sleeping.
                    let next_poll = engine.driver.with_core(|core| core.next_deadline());
                    is_enough.store(true, Ordering::SeqCst);
                    assert_eq!(next_poll, None, "with {timeout:?}");
                });
            }
        }
    }
}
