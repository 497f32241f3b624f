//! The clock that the engine hands to its protocol, and what the rest of it waits until.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use accl_types::Moment;

/// Now, of a clock that never goes back.
pub(crate) fn now() -> Moment {
    static ORIGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
    Moment::default() + ORIGIN.elapsed()
}

/// As [`Moment::FAR`], for what waits by the system's clock.
pub(crate) fn far() -> Instant {
    Instant::now() + Duration::from_secs(365 * 24 * 3600)
}
