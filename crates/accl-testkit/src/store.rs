//! A store in memory, shared by the ranks of one process.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use accl_engine::Store;
use accl_types::{Error, Result};
use parking_lot::{Condvar, Mutex};

/// Clones share their contents.
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
