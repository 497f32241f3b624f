//! Monitored barrier: rank 0 hears from every rank, and says which did not come.
//!
//! Runs over point-to-point messages without payload on tags that no user can give. A failure leaves the group usable.

use std::time::{Duration, Instant};

use accl_types::{Collective, Dtype, Error, Rank, Result};

use crate::call::{Call, Waited};
use crate::desc::{CallDesc, TensorDesc};
use crate::group::Group;

/// Users' tags are below; the lower bits number the barrier.
const TAG_ARRIVED: u32 = 0x8000_0000;
const TAG_RELEASED: u32 = 0xC000_0000;
const TAG_NUMBER: u32 = 0x3FFF_FFFF;
/// Room above the caller's own deadline for messages that carry it: the wait ends first.
const SLACK: Duration = Duration::from_secs(3600);

impl Group {
    /// Waits until all ranks have entered. Rank 0 finds out who is missing: the first in rank order, or all of them
    /// with `wait_all`.
    ///
    /// # Errors
    /// `Timeout` naming the missing ranks on rank 0, and rank 0 elsewhere; `Aborted` when interrupted.
    pub fn monitored_barrier(
        &self,
        timeout: Duration,
        wait_all: bool,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        let number = self.with_state(|group, _| {
            group.next_monitored = group.next_monitored.wrapping_add(1) & TAG_NUMBER;
            let current = group.next_monitored;
            // Ranks that came too late for an earlier barrier have left messages behind.
            group.p2p.forget_unexpected(|tag| tag >= TAG_ARRIVED && tag & TAG_NUMBER < current);
            current
        })?;
        let deadline = Instant::now() + timeout;
        if self.rank != Rank(0) {
            return self.arrive(number, timeout, deadline, interrupt);
        }
        let missing = self.await_ranks(number, timeout, deadline, wait_all, interrupt)?;
        if !missing.is_empty() {
            let names: Vec<String> = missing.iter().map(u32::to_string).collect();
            let ranks = if wait_all && names.len() > 1 { "Ranks" } else { "Rank" };
            let text = if timeout.is_zero() {
                "Rank 0 timed out in monitoredBarrier after 0ms: it allows no time for the others to arrive".to_owned()
            } else {
                format!("{ranks} {} failed to pass monitoredBarrier in {} ms", names.join(", "), timeout.as_millis())
            };
            return Err(self.failed(Error::timeout(text)));
        }
        for rank in 1..self.world {
            self.note(Collective::Send, Rank(rank), TAG_RELEASED | number)?;
        }
        Ok(())
    }

    fn await_ranks(
        &self,
        number: u32,
        timeout: Duration,
        deadline: Instant,
        wait_all: bool,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<u32>> {
        let mut missing = Vec::new();
        for rank in 1..self.world {
            let call = self.note(Collective::Recv, Rank(rank), TAG_ARRIVED | number)?;
            let left = deadline.saturating_duration_since(Instant::now());
            let arrived = !timeout.is_zero() && self.settle(&call, left, interrupt)?;
            if !arrived {
                self.cancel(&call);
                missing.push(rank);
                if !wait_all {
                    break;
                }
            }
        }
        Ok(missing)
    }

    fn arrive(
        &self,
        number: u32,
        timeout: Duration,
        deadline: Instant,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        self.note(Collective::Send, Rank(0), TAG_ARRIVED | number)?;
        let call = self.note(Collective::Recv, Rank(0), TAG_RELEASED | number)?;
        let left = deadline.saturating_duration_since(Instant::now());
        if self.settle(&call, left, interrupt)? {
            return Ok(());
        }
        self.cancel(&call);
        Err(self.failed(Error::timeout(format!(
            "Rank {} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. \
             Please check rank 0 logs for faulty rank. It did not answer within {} ms",
            self.rank,
            timeout.as_millis()
        ))))
    }

    /// A message without payload.
    fn note(&self, collective: Collective, peer: Rank, tag: u32) -> Result<std::sync::Arc<Call>> {
        let mut desc = CallDesc::new(collective, Dtype::U8);
        desc.peer = Some(peer);
        desc.tag = tag;
        desc.timeout = Some(SLACK);
        let empty = vec![vec![TensorDesc::dense(std::ptr::null_mut(), Dtype::U8, 0)]];
        if collective == Collective::Send {
            desc.inputs = empty;
        } else {
            desc.outputs = empty;
        }
        self.submit(desc)
    }

    /// Waits for a note; `false` when the time is up.
    fn settle(&self, call: &Call, left: Duration, interrupt: &mut dyn FnMut() -> bool) -> Result<bool> {
        match call.wait(Some(left), interrupt) {
            Waited::Done => Ok(true),
            Waited::TimedOut(_) => Ok(false),
            Waited::Failed(error) => Err(error),
            Waited::Interrupted => Err(self.failed(Error::aborted("interrupted in monitored_barrier"))),
        }
    }

    fn cancel(&self, call: &Call) {
        let _ = self.with_state(|group, hands| {
            if let Some(message) = group.p2p.cancel(call) {
                let error = call.placed(Error::timeout("given up"));
                drop(message.call.finish(hands.now, Some(error)));
            }
        });
    }

    fn failed(&self, error: Error) -> Error {
        self.placed(error, None)
    }
}
