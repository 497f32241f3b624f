//! External operations of one run: which are in flight, how far they are, and whether one has failed.
//!
//! An operation begins when its dependencies allow it. A copy into host memory writes no memory of the caller, so it
//! begins with the call. A copy out begins when bytes are final. Messages of the ranks that made these bytes have
//! arrived by then, and their signatures agree with this call. An operation that needs the agreement of all ranks must
//! depend on messages that lead from each rank to each. Once an operation has begun, a pass only checks its numbers.
//!
//! This module owns the handles; the worker of each operation does the work. Read [`Externals::begin`] first.

use std::sync::Arc;

use accl_types::Error;
use smallvec::SmallVec;

use crate::call::{ExternalCombination, ExternalHandle, ExternalState, Wake};
use crate::plan::ExternalStep;

/// State of a run's external operations. Most runs have none.
#[derive(Default)]
pub(super) struct Externals {
    under_way: SmallVec<[UnderWay; 2]>,
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

impl Externals {
    pub(super) fn set_wake(&mut self, wake: Wake) {
        self.wake = Some(wake);
    }

    /// Returns the function that wakes the driver.
    pub(super) fn wake(&self) -> Option<&Wake> {
        self.wake.as_ref()
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

    /// Returns how many copies of an operation in flight have been made.
    #[inline]
    pub(super) fn made(&self, op: u32) -> u32 {
        self.of(op).map_or(0, |under_way| under_way.handle.made())
    }

    /// Returns the combination that an operation in flight computes.
    pub(super) fn combination(&self, op: u32) -> Option<&Arc<ExternalCombination>> {
        self.of(op)?.handle.combination()
    }

    /// Returns whether a combination in flight has made more tiles than `taken` returns for it.
    #[inline]
    pub(super) fn has_tiles(&self, taken: impl Fn(u32) -> u64) -> bool {
        self.combines().any(|(op, made)| u64::from(made) > taken(op))
    }

    /// Returns the combinations in flight that have made more tiles than `taken` returns for them.
    pub(super) fn with_tiles(&self, taken: impl Fn(u32) -> u64) -> SmallVec<[u32; 4]> {
        self.combines().filter(|&(op, made)| u64::from(made) > taken(op)).map(|(op, _)| op).collect()
    }

    /// Returns the combinations in flight, and how many tiles each has made.
    fn combines(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        let combines = self.under_way.iter().filter(|under_way| under_way.step == ExternalStep::Combine);
        combines.map(|under_way| (under_way.op, under_way.handle.made()))
    }

    /// Lets the first `count` copies of an operation in flight be made, or tiles. A number that does not rise changes nothing.
    pub(super) fn set_ready(&mut self, op: u32, count: u32) {
        let Some(UnderWay { step, handle, .. }) = self.of(op).filter(|of| of.handle.ready() < count) else { return };
        let failure = handle.set_ready(count).map_err(|why| step.failure(handle.name(), why));
        self.failure = self.failure.take().or(failure.err());
    }

    fn of(&self, op: u32) -> Option<&UnderWay> {
        self.under_way.iter().find(|under_way| under_way.op == op)
    }

    /// Returns whether an operation that was in flight has ended.
    #[inline]
    pub(super) fn has_ended(&self) -> bool {
        self.under_way.iter().any(|under_way| under_way.handle.has_ended())
    }

    /// Returns whether an operation in flight has ended.
    pub(super) fn has_ended_one(&self, op: u32) -> bool {
        self.of(op).is_some_and(|under_way| under_way.handle.has_ended())
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
                let error = step.failure(handle.name(), why);
                // The first failure is reported, whichever of them has abandoned memory.
                let leaks = error.context.must_leak_memory;
                self.failure.get_or_insert(error).context.must_leak_memory |= leaks;
                false
            }
        };
        self.under_way.remove(index);
        is_done
    }

    /// Returns whether an operation of such a step has begun whose end was not yet checked.
    #[inline]
    pub(super) fn has(&self, step: ExternalStep) -> bool {
        self.under_way.iter().any(|under_way| under_way.step == step)
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

    /// Returns whether an operation of such a step has not ended.
    pub(super) fn is_under_way(&self, step: ExternalStep) -> bool {
        self.under_way.iter().any(|under_way| under_way.step == step && !under_way.handle.has_ended())
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
    /// do. `awaits_peers` leaves out copies that have been made as far as they can be.
    pub(super) fn under_way(&self, without_parts: bool, awaits_peers: bool) -> Option<String> {
        let is_left_out = |of: &UnderWay| {
            of.handle.has_ended()
                || match of.step {
                    ExternalStep::CopyIn | ExternalStep::CopyOut | ExternalStep::Combine => {
                        awaits_peers && !of.handle.owes_copies()
                    }
                    ExternalStep::Join => without_parts,
                    ExternalStep::Offload => false,
                }
        };
        let UnderWay { step, handle, .. } = self.under_way.iter().find(|of| !is_left_out(of))?;
        Some(step.describe(handle.name()))
    }
}

#[cfg(test)]
mod tests {
    use accl_types::ErrorKind;

    use super::*;
    use crate::call::{External, ExternalCopies, ExternalTask, ExternalWork};

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
        let work = ExternalWork::CopyIn(ExternalCopies::default());
        assert!(externals.begin(3, ExternalStep::Offload, |wake| {
            Some(ExternalHandle::begin(&by, work, Arc::new(()), wake.clone()))
        }));
        assert!(externals.has(ExternalStep::Offload) && externals.is_under_way(ExternalStep::Offload));
        let task = shelf.0.lock().unwrap().take();
        task.unwrap().fail_as(ErrorKind::Timeout, "in vain");
        // Until the failure is read, the call must not time out by itself: the worker's own error comes first.
        assert!(
            externals.has(ExternalStep::Offload)
                && !externals.is_under_way(ExternalStep::Offload)
                && externals.has_ended()
        );
        assert!(!externals.settle(3) && !externals.has(ExternalStep::Offload) && !externals.has_ended());
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
        let work = ExternalWork::CopyIn(ExternalCopies::default());
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
    fn of_two_that_fail_the_one_that_was_abandoned_is_not_forgotten() {
        let mut externals = Externals::default();
        externals.set_wake(Arc::new(|| {}));
        let tasks: Vec<ExternalTask> = (0..2)
            .map(|op| {
                let shelf: Arc<Shelf> = Arc::default();
                let by: Arc<dyn External> = shelf.clone();
                let work = ExternalWork::CopyIn(ExternalCopies::default());
                externals.begin(op, ExternalStep::CopyIn, |wake| {
                    Some(ExternalHandle::begin(&by, work, Arc::new(()), wake.clone()))
                });
                shelf.0.lock().unwrap().take().unwrap()
            })
            .collect();
        let [first, second] = <[ExternalTask; 2]>::try_from(tasks).unwrap();
        first.fail("no power");
        second.abandon(Error::device("it goes on for ever"));
        assert!(!externals.settle(0) && !externals.settle(1));
        assert!(externals.abandoned().is_some(), "memory is still in use");
        let failure = externals.take_failure().unwrap();
        assert!(failure.message.contains("no power") && failure.context.must_leak_memory, "{failure}");
    }

    #[test]
    fn what_has_nothing_to_do_does_not_begin() {
        let mut externals = Externals::default();
        externals.set_wake(Arc::new(|| {}));
        assert!(!externals.begin(0, ExternalStep::CopyIn, |_| None));
        assert!(!externals.has_begun(0) && externals.under_way(false, false).is_none());
    }
}
