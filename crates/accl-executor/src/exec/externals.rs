//! The external operations of one call: when they may begin, which are in flight, and how they end.
//!
//! An operation may begin when its dependencies are done, which `run` knows, and the ranks have agreed to the call. A
//! rank agrees when a frame with this call's signature has arrived from it; the first frame of any message has a
//! signature. All ranks with which this rank exchanges messages in the call must agree.
//!
//! Other ranks may be waiting for something that this rank has yet to send. Therefore this rank probes them when its
//! first external operation is due, and requests an answer. A rank answers even if its part in the call is done. So no
//! external operation accesses memory for ranks that issued different calls.
//!
//! Ranks that exchange nothing agree if a chain of messages leads from one to the other. An operation that needs the
//! agreement of all ranks must depend on such messages. Once an operation has begun, a pass only checks its flag.
//!
//! This module owns the agreement and the handles; the worker of each operation does the work. Read
//! [`Externals::begin`] first.

use accl_types::{Error, Rank};
use smallvec::SmallVec;

use crate::call::{ExternalHandle, ExternalState, Wake};
use crate::plan::ExternalStep;

/// State of a run's external operations. Most runs have none.
#[derive(Default)]
pub(super) struct Externals {
    /// Ranks that have not shown yet that they agree.
    unagreed: SmallVec<[Rank; 4]>,
    /// Whether these ranks were asked.
    asked: bool,
    /// Operations that wait for the agreement.
    waiting: SmallVec<[u32; 2]>,
    under_way: SmallVec<[UnderWay; 1]>,
    /// Wakes the driver when an operation ends.
    wake: Option<Wake>,
    /// Why an operation failed.
    failure: Option<Error>,
}

struct UnderWay {
    op: u32,
    step: ExternalStep,
    handle: ExternalHandle,
}

/// Whether ranks agree to a call, as far as its external operations need it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Agreement {
    Reached,
    /// The ranks were asked, and have not all answered.
    Awaited,
    /// The caller must ask these ranks.
    Asks(SmallVec<[Rank; 4]>),
}

impl Externals {
    /// Creates the state of a run. The ranks `peers` must agree before an operation begins.
    pub(super) fn new(peers: &[Rank]) -> Self {
        Self { unagreed: peers.into(), ..Self::default() }
    }

    pub(super) fn set_wake(&mut self, wake: Wake) {
        self.wake = Some(wake);
    }

    /// Returns whether an operation may begin. If it must wait, [`Externals::note_agreement`] returns it later.
    pub(super) fn agreement(&mut self, op: u32) -> Agreement {
        if self.unagreed.is_empty() {
            return Agreement::Reached;
        }
        if !self.waiting.contains(&op) {
            self.waiting.push(op);
        }
        match std::mem::replace(&mut self.asked, true) {
            true => Agreement::Awaited,
            false => Agreement::Asks(self.unagreed.clone()),
        }
    }

    /// Records that a frame with this call's signature has arrived from a rank. Returns the operations that may begin
    /// now.
    #[inline]
    pub(super) fn note_agreement(&mut self, from: Rank) -> SmallVec<[u32; 2]> {
        if self.unagreed.is_empty() {
            return SmallVec::new();
        }
        self.unagreed.retain(|rank| *rank != from);
        if self.unagreed.is_empty() { std::mem::take(&mut self.waiting) } else { SmallVec::new() }
    }

    /// Begins an operation. Returns `false` if there is nothing for it to do.
    pub(super) fn begin(
        &mut self,
        op: u32,
        step: ExternalStep,
        begin: impl FnOnce(&Wake) -> Option<ExternalHandle>,
    ) -> bool {
        let Some(wake) = &self.wake else {
            self.failure = Some(Error::internal(format!("{step} has no wake callback")));
            return true;
        };
        let Some(handle) = begin(wake) else { return false };
        self.under_way.push(UnderWay { op, step, handle });
        true
    }

    pub(super) fn has_begun(&self, op: u32) -> bool {
        self.under_way.iter().any(|under_way| under_way.op == op)
    }

    /// Returns whether an operation that was in flight has ended.
    #[inline]
    pub(super) fn has_ended(&self) -> bool {
        self.under_way.iter().any(|under_way| under_way.handle.has_ended())
    }

    /// Returns the operations that were in flight and have ended.
    pub(super) fn ended(&self) -> SmallVec<[u32; 2]> {
        self.under_way.iter().filter(|under_way| under_way.handle.has_ended()).map(|under_way| under_way.op).collect()
    }

    /// Checks an operation that has begun. Returns whether it is done. If it has failed, [`Externals::take_failure`]
    /// returns why.
    pub(super) fn settle(&mut self, op: u32) -> bool {
        let Some(index) = self.under_way.iter().position(|under_way| under_way.op == op) else { return false };
        let UnderWay { step, handle, .. } = &self.under_way[index];
        let is_done = match handle.state() {
            ExternalState::UnderWay => return false,
            ExternalState::Done => true,
            ExternalState::Failed(why) => {
                let name = handle.name();
                let error = match step {
                    // The worker of a whole call reports a complete error.
                    ExternalStep::Offload | ExternalStep::Join => why,
                    ExternalStep::CopyIn | ExternalStep::CopyOut => {
                        let Error { kind, message, context } = why;
                        let text =
                            format!("{step} by `{name}` failed: {message}; check the output of `{name}` on this rank");
                        Error { context, ..Error::new(kind, text) }
                    }
                };
                self.failure.get_or_insert(error);
                false
            }
        };
        self.under_way.remove(index);
        is_done
    }

    /// Returns whether an operation has begun whose end was not yet checked.
    #[inline]
    pub(super) fn has_any(&self) -> bool {
        !self.under_way.is_empty()
    }

    /// Returns whether an operation has failed: see [`Externals::take_failure`].
    #[inline]
    pub(super) fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Takes the reason why the call cannot continue, if an operation has failed.
    pub(super) fn take_failure(&mut self) -> Option<Error> {
        self.failure.take()
    }

    /// Asks the operations in flight to stop.
    pub(super) fn cancel(&self) {
        self.under_way.iter().for_each(|under_way| under_way.handle.cancel());
    }

    /// Returns whether an operation that began has not ended.
    #[inline]
    pub(super) fn are_under_way(&self) -> bool {
        self.under_way.iter().any(|under_way| !under_way.handle.has_ended())
    }

    /// Returns whether an operation that began may access memory of the call, now or later. After
    /// [`Externals::cancel`], few can.
    pub(super) fn may_touch(&self) -> bool {
        self.under_way.iter().any(|under_way| !under_way.handle.is_away())
    }

    /// Returns why an operation was abandoned, if one was. The memory of the call must then stay.
    pub(super) fn abandoned(&self) -> Option<&Error> {
        let unpolled = self.under_way.iter().find_map(|under_way| under_way.handle.abandoned());
        unpolled.or_else(|| self.failure.as_ref().filter(|failure| failure.context.must_leak_memory))
    }

    /// Describes an operation that has not ended, for messages. `without_parts` leaves out the parts that other lanes
    /// do.
    pub(super) fn under_way(&self, without_parts: bool) -> Option<String> {
        let is_left_out = |of: &UnderWay| of.handle.has_ended() || without_parts && of.step == ExternalStep::Join;
        let UnderWay { step, handle, .. } = self.under_way.iter().find(|of| !is_left_out(of))?;
        Some(match step {
            ExternalStep::Join => "the part of the call on other lanes".to_owned(),
            ExternalStep::CopyIn | ExternalStep::CopyOut | ExternalStep::Offload => {
                format!("the external operation {step} by `{}`", handle.name())
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use accl_types::ErrorKind;

    use super::*;
    use crate::call::{External, ExternalTask, ExternalWork};

    #[test]
    fn the_agreement_of_all_ranks_is_asked_for_once_and_then_holds() {
        let mut externals = Externals::new(&[Rank(1), Rank(3)]);
        assert!(externals.note_agreement(Rank(3)).is_empty());
        assert_eq!(externals.agreement(7), Agreement::Asks([Rank(1)].as_slice().into()));
        assert_eq!(externals.agreement(7), Agreement::Awaited);
        assert_eq!(externals.agreement(9), Agreement::Awaited);
        assert!(externals.note_agreement(Rank(3)).is_empty());
        assert_eq!(externals.note_agreement(Rank(1))[..], [7, 9], "those that waited may begin, each once");
        assert_eq!(externals.agreement(7), Agreement::Reached);
        assert!(externals.note_agreement(Rank(1)).is_empty());
        assert_eq!(Externals::new(&[]).agreement(0), Agreement::Reached, "a rank alone agrees with itself");
    }

    #[derive(Debug, Default)]
    struct Shelf(std::sync::Mutex<Option<ExternalTask>>);

    impl External for Shelf {
        fn name(&self) -> &str {
            "shelf"
        }

        fn begin(&self, task: ExternalTask) {
            *self.0.lock().unwrap() = Some(task);
        }
    }

    #[test]
    fn the_result_of_an_operation_is_polled_until_it_is_taken() {
        let shelf: Arc<Shelf> = Arc::default();
        let by: Arc<dyn External> = shelf.clone();
        let mut externals = Externals::default();
        externals.set_wake(Arc::new(|| {}));
        let work = ExternalWork::Copies(Vec::new());
        assert!(externals.begin(3, ExternalStep::Offload, |wake| {
            Some(ExternalHandle::begin(&by, work, Arc::new(()), wake.clone()))
        }));
        assert!(externals.has_any() && externals.are_under_way());
        let task = shelf.0.lock().unwrap().take();
        task.unwrap().fail_as(ErrorKind::Timeout, "in vain");
        // Until the failure is read, the call must not time out by itself: the worker's own error comes first.
        assert!(externals.has_any() && !externals.are_under_way() && externals.has_ended());
        assert!(!externals.settle(3) && !externals.has_any() && !externals.has_ended());
        assert!(externals.has_failed(), "a pass has yet to take it");
        assert_eq!(externals.take_failure().map(|error| error.kind), Some(ErrorKind::Timeout));
        assert!(!externals.has_failed());
    }

    #[test]
    fn an_abandoned_operation_is_known_before_and_after_it_is_settled() {
        let shelf: Arc<Shelf> = Arc::default();
        let by: Arc<dyn External> = shelf.clone();
        let mut externals = Externals::default();
        externals.set_wake(Arc::new(|| {}));
        let work = ExternalWork::Copies(Vec::new());
        externals
            .begin(3, ExternalStep::Offload, |wake| Some(ExternalHandle::begin(&by, work, Arc::new(()), wake.clone())));
        let task = shelf.0.lock().unwrap().take().unwrap();
        task.abandon(Error::timeout("in vain"));
        assert!(!externals.may_touch() && externals.abandoned().is_some());
        externals.settle(3);
        assert!(externals.abandoned().is_some(), "a pass has yet to take it");
        assert!(externals.take_failure().unwrap().context.must_leak_memory && externals.abandoned().is_none());
    }

    #[test]
    fn what_has_nothing_to_do_does_not_begin() {
        let mut externals = Externals::default();
        externals.set_wake(Arc::new(|| {}));
        assert!(!externals.begin(0, ExternalStep::CopyIn, |_| None));
        assert!(!externals.has_begun(0) && externals.under_way(false).is_none());
    }
}
