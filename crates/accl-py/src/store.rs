//! The engine's view of a c10d store.

use std::time::{Duration, Instant};

use accl_engine::Store;
use accl_types::{Error, Result};

use crate::bridge::ffi;

/// Between two questions to the store.
const SHORTEST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// A c10d store that the shim holds; used on the thread that makes the group and only until the group is made.
pub(crate) struct TorchStore<'a>(pub(crate) &'a ffi::StoreRef);

impl Store for TorchStore<'_> {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        ffi::store_set(self.0, key, value).map_err(rendezvous)
    }

    fn get(&self, key: &str) -> Result<Vec<u8>> {
        ffi::store_get(self.0, key).map_err(rendezvous)
    }

    /// Asks again and again: a TCPStore that waits in vain for the short time the engine allows (it looks for signals in
    /// between) prints two warnings each time.
    fn wait(&self, keys: &[String], timeout: Duration) -> Result<bool> {
        let start = Instant::now();
        let mut pause = SHORTEST_PAUSE;
        loop {
            if self.check(keys)? {
                return Ok(true);
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Ok(false);
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        ffi::store_add(self.0, key, delta).map_err(rendezvous)
    }

    fn check(&self, keys: &[String]) -> Result<bool> {
        ffi::store_check(self.0, keys).map_err(rendezvous)
    }
}

fn rendezvous(error: cxx::Exception) -> Error {
    let what = error.what();
    Error::rendezvous(format!("the store failed: {}", what.lines().next().unwrap_or(what)))
}
