//! Time that callers of a group spent waiting for its calls.
//!
//! This module owns the counters, to which any thread may add. Read [`Waits`] first.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Number and total time of waits that could not return at once.
#[derive(Debug, Default)]
pub struct Waits {
    count: AtomicU64,
    nanos: AtomicU64,
}

impl Waits {
    pub fn add(&self, took: Duration) {
        // Relaxed: the counters are statistics and order nothing.
        self.count.fetch_add(1, Ordering::Relaxed);
        self.nanos.fetch_add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Returns the number of waits and their total time.
    pub fn total(&self) -> (u64, Duration) {
        (self.count.load(Ordering::Relaxed), Duration::from_nanos(self.nanos.load(Ordering::Relaxed)))
    }
}
