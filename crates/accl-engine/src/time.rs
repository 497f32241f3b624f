//! The clock that the engine hands to its protocol.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use accl_types::Moment;

/// Now, of a clock that never goes back.
pub(crate) fn now() -> Moment {
    static ORIGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
    Moment::default() + ORIGIN.elapsed()
}

/// So late that nobody waits for it.
pub(crate) fn far() -> Instant {
    Instant::now() + Duration::from_secs(365 * 24 * 3600)
}
