//! Moments of a clock that the caller reads.

use std::ops::{Add, Sub};
use std::time::Duration;

/// A moment, in nanoseconds since an origin that all moments of one clock share.
///
/// Functions that take moments do not read a clock. They work with any clock, also with one that a test sets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(u64);

impl Moment {
    /// The last moment, later than any deadline.
    pub const FAR: Moment = Moment(u64::MAX);

    /// The moment `nanos` nanoseconds after the origin.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since the origin.
    pub const fn nanos(self) -> u64 {
        self.0
    }

    /// The moment `wait` later, or [`Moment::FAR`] if it would overflow.
    #[must_use]
    pub fn after(self, wait: Duration) -> Self {
        let nanos = u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanos))
    }

    /// The time since `earlier`, or zero if `earlier` is later than `self`.
    pub fn since(self, earlier: Moment) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// Same as [`Moment::after`].
impl Add<Duration> for Moment {
    type Output = Moment;

    fn add(self, wait: Duration) -> Moment {
        self.after(wait)
    }
}

/// Same as [`Moment::since`].
impl Sub for Moment {
    type Output = Duration;

    fn sub(self, earlier: Moment) -> Duration {
        self.since(earlier)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_wait_leads_beyond_the_last_moment() {
        let now = Moment::from_nanos(5);
        assert_eq!(now + Duration::from_nanos(3), Moment::from_nanos(8));
        assert_eq!(now + Duration::MAX, Moment::FAR);
        assert_eq!(Moment::FAR + Duration::from_secs(1), Moment::FAR);
    }

    #[test]
    fn no_time_has_passed_since_a_later_moment() {
        let (early, late) = (Moment::from_nanos(2), Moment::from_nanos(9));
        assert_eq!(late - early, Duration::from_nanos(7));
        assert_eq!(early - late, Duration::ZERO);
    }
}
