//! The clock that the engine passes to its protocol, and a far deadline for waits on the system clock.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use accl_types::Moment;

/// Returns the current time of a monotonic clock.
pub fn now() -> Moment {
    static ORIGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
    Moment::default() + ORIGIN.elapsed()
}

/// Returns the equivalent of [`Moment::FAR`] for waits on the system clock: one year from now.
pub(crate) fn far() -> Instant {
    Instant::now() + Duration::from_secs(365 * 24 * 3600)
}
