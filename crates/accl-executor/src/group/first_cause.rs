//! Why a group accepts no more calls, on which rank the failure began, and whether the group's caller knows.
//!
//! This module keeps the first cause; later errors do not replace it. `failure` decides which ranks are notified.
//! Read [`FirstCause`] first.

use std::time::Duration;

use accl_types::{Error, ErrorKind, Moment, Rank};

/// State of a group's failure. Without a cause, the group has not failed.
#[derive(Default)]
pub(super) struct FirstCause {
    cause: Option<Error>,
    /// Rank where the failure began; `None` if it began here or all ranks know it.
    announced_by: Option<Rank>,
    /// Whether a call has raised the cause.
    was_raised: bool,
    /// Report forwarded by another rank: the cause, the rank where it began, and a time. From that time on, the report
    /// counts even if that rank has not reported it itself.
    rumour: Option<(Error, Rank, Moment)>,
}

/// Time that the rank where a failure began has to report it itself, after another rank has forwarded the report.
/// Frames that the first rank sent earlier may still complete calls.
pub const GRACE: Duration = Duration::from_millis(50);

impl FirstCause {
    #[inline]
    pub(super) fn cause(&self) -> Option<&Error> {
        self.cause.as_ref()
    }

    #[inline]
    pub(super) fn has_come(&self) -> bool {
        self.cause.is_some()
    }

    /// Records that another rank has forwarded a report of `origin`.
    pub(super) fn learn(&mut self, cause: Error, origin: Rank, now: Moment) {
        self.rumour.get_or_insert((cause, origin, now + GRACE));
    }

    /// Returns when the forwarded report counts.
    pub(super) fn due(&self) -> Option<Moment> {
        self.rumour.as_ref().filter(|_| self.cause.is_none()).map(|(_, _, due)| *due)
    }

    /// Takes the forwarded report if it counts: its time has come, or its origin sends nothing more.
    pub(super) fn take_rumour(&mut self, now: Moment, is_absent: impl FnOnce(Rank) -> bool) -> Option<Error> {
        self.rumour.take_if(|(_, origin, due)| now >= *due || is_absent(*origin)).map(|(cause, _, _)| cause)
    }

    /// Sets the first cause, and the rank where it began (`None` for this one). Later causes are ignored.
    pub(super) fn set(&mut self, cause: Error, announced_by: Option<Rank>) {
        if self.cause.is_none() {
            (self.cause, self.announced_by) = (Some(cause), announced_by);
        }
    }

    /// Returns the rank where the failure began, and the cause; `None` unless it began on another rank.
    pub(super) fn announcement(&self) -> Option<(Rank, &Error)> {
        Some((self.announced_by?, self.cause.as_ref()?))
    }

    /// Records that a call raises the cause, and returns it.
    pub(super) fn raise(&mut self) -> Option<&Error> {
        self.was_raised |= self.cause.is_some();
        self.cause.as_ref()
    }

    /// Returns the kind of the error that refuses a call: the kind of the cause if no call has raised it. Kinds of which
    /// the caller takes the group for usable, such as a refused argument, become `Aborted`.
    ///
    /// The first error that the caller sees has the same kind whether the failure comes during a call or between two.
    pub(super) fn kind_of_refusal(&self) -> ErrorKind {
        match self.cause.as_ref().filter(|_| !self.was_raised).map(|cause| cause.kind) {
            Some(
                kind @ (ErrorKind::Mismatch
                | ErrorKind::Timeout
                | ErrorKind::PeerLost
                | ErrorKind::Network
                | ErrorKind::Protocol
                | ErrorKind::Device),
            ) => kind,
            _ => ErrorKind::Aborted,
        }
    }

    /// Returns the cause if it is a disagreement that no call has raised.
    pub(super) fn unreported_mismatch(&self) -> Option<&Error> {
        self.cause.as_ref().filter(|cause| !self.was_raised && cause.kind == ErrorKind::Mismatch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_cause_stays() {
        let mut failure = FirstCause::default();
        assert!(!failure.has_come() && failure.raise().is_none());
        failure.set(Error::timeout("first"), Some(Rank(3)));
        failure.set(Error::mismatch("second"), None);
        assert_eq!(failure.cause(), Some(&Error::timeout("first")));
        assert_eq!(failure.announcement(), Some((Rank(3), &Error::timeout("first"))));
        assert_eq!(failure.unreported_mismatch(), None);
    }

    #[test]
    fn what_is_passed_on_counts_when_its_origin_is_gone_or_says_nothing() {
        let (origin, start) = (Rank(2), Moment::from_nanos(7));
        let mut failure = FirstCause::default();
        failure.learn(Error::timeout("late"), origin, start);
        failure.learn(Error::timeout("again"), Rank(3), start + GRACE);
        assert_eq!(failure.due(), Some(start + GRACE));
        assert_eq!(failure.take_rumour(start, |rank| rank != origin), None);
        assert_eq!(failure.take_rumour(start, |rank| rank == origin), Some(Error::timeout("late")));
        assert_eq!(failure.due(), None);
        failure.learn(Error::timeout("late"), origin, start);
        assert_eq!(failure.take_rumour(start + GRACE, |_| false), Some(Error::timeout("late")));
        // The origin's own report makes the forwarded one superfluous.
        failure.learn(Error::timeout("late"), origin, start);
        failure.set(Error::timeout("late"), Some(origin));
        assert_eq!(failure.due(), None);
    }

    #[test]
    fn a_disagreement_is_unreported_until_a_call_has_raised_it() {
        let mut failure = FirstCause::default();
        // Raising has no effect on a group that has not failed.
        failure.raise();
        failure.set(Error::mismatch("counts differ"), None);
        assert_eq!(failure.announcement(), None);
        assert_eq!(failure.unreported_mismatch(), Some(&Error::mismatch("counts differ")));
        assert_eq!(failure.kind_of_refusal(), ErrorKind::Mismatch, "no call has raised it");
        assert!(failure.raise().is_some());
        assert_eq!(failure.unreported_mismatch(), None);
        assert_eq!(failure.kind_of_refusal(), ErrorKind::Aborted);
    }
}
