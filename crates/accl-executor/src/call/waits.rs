//! How long callers of a group have waited for its calls.
//!
//! Owns the counters, which any thread may add to. Read [`Waits`] first.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Waits that did not end at once, and what they took together.
#[derive(Debug, Default)]
pub struct Waits {
    count: AtomicU64,
    nanos: AtomicU64,
}

impl Waits {
    pub fn add(&self, took: Duration) {
        // Relaxed: mere figures.
        self.count.fetch_add(1, Ordering::Relaxed);
        self.nanos.fetch_add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Their number and their time.
    pub fn total(&self) -> (u64, Duration) {
        (self.count.load(Ordering::Relaxed), Duration::from_nanos(self.nanos.load(Ordering::Relaxed)))
    }
}
