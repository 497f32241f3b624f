//! Moments.

use std::time::{Duration, Instant};

/// So late that nobody waits for it.
pub(crate) fn far() -> Instant {
    Instant::now() + Duration::from_secs(365 * 24 * 3600)
}
