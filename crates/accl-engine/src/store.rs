//! What rendezvous needs of a key-value store, and one in memory for ranks of one process. torch's stores reach it
//! through `accl-py`. Read [`Store`] first.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use accl_types::{Error, Result};
use parking_lot::{Condvar, Mutex};

/// A store shared by all ranks of a group. Keys are already private to the group's name.
///
/// Used only while a group is made, on the thread that makes it. Errors are of kind `Rendezvous`.
pub trait Store {
    /// Writes a value.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;
    /// Reads a value that is known to be there.
    fn get(&self, key: &str) -> Result<Vec<u8>>;
    /// Waits until all keys are there; `false` when `timeout` passed first.
    fn wait(&self, keys: &[String], timeout: Duration) -> Result<bool>;
    /// Adds to a counter that starts at 0 and returns its new value.
    fn add(&self, key: &str, delta: i64) -> Result<i64>;
    /// Whether all keys are there, without waiting.
    fn check(&self, keys: &[String]) -> Result<bool>;
}

/// A store of the ranks of one process: calibration and tests. Clones share their contents.
#[derive(Clone, Default)]
pub struct MemoryStore {
    shared: Arc<(Mutex<Entries>, Condvar)>,
    prefix: String,
}

type Entries = HashMap<String, Vec<u8>>;

impl MemoryStore {
    /// The same store seen under a prefix, as torch gives each group one.
    pub fn prefixed(&self, prefix: &str) -> Self {
        Self { shared: self.shared.clone(), prefix: format!("{}{prefix}/", self.prefix) }
    }

    fn key(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }
}

impl Store for MemoryStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.shared.0.lock().insert(self.key(key), value.to_vec());
        self.shared.1.notify_all();
        Ok(())
    }

    fn get(&self, key: &str) -> Result<Vec<u8>> {
        let map = self.shared.0.lock();
        map.get(&self.key(key)).cloned().ok_or_else(|| Error::rendezvous(format!("no key {key}")))
    }

    fn wait(&self, keys: &[String], timeout: Duration) -> Result<bool> {
        let deadline = Instant::now() + timeout;
        let mut map = self.shared.0.lock();
        while !keys.iter().all(|key| map.contains_key(&self.key(key))) {
            if self.shared.1.wait_until(&mut map, deadline).timed_out() {
                return Ok(keys.iter().all(|key| map.contains_key(&self.key(key))));
            }
        }
        Ok(true)
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        let mut map = self.shared.0.lock();
        let entry = map.entry(self.key(key)).or_insert_with(|| b"0".to_vec());
        let value = String::from_utf8_lossy(entry).parse::<i64>().unwrap_or(0) + delta;
        *entry = value.to_string().into_bytes();
        self.shared.1.notify_all();
        Ok(value)
    }

    fn check(&self, keys: &[String]) -> Result<bool> {
        let map = self.shared.0.lock();
        Ok(keys.iter().all(|key| map.contains_key(&self.key(key))))
    }
}
