//! What rendezvous needs of a key-value store, and one in memory for ranks of one process. torch's stores reach it
//! through `accl-py`. Read [`Store`] first.

use std::collections::HashMap;
use std::sync::Arc;

use accl_types::{Error, Result};
use parking_lot::Mutex;

/// A store shared by all ranks of a group. Keys are already private to the group's name.
///
/// Used only while a group is made, on the thread that makes it. Every question is answered at once: who waits for
/// something asks again. Errors are of kind `Rendezvous`.
pub trait Store {
    /// Writes a value.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;
    /// Reads a value; `None` when there is none.
    fn get(&self, key: &str) -> Result<Option<Vec<u8>>>;
    /// Adds to a counter that starts at 0 and returns its new value, which [`Store::get`] reads as decimal text.
    fn add(&self, key: &str, delta: i64) -> Result<i64>;
    /// Deletes a value, if there is one. `false` when nothing was deleted, as by a store that cannot delete.
    fn delete(&self, key: &str) -> Result<bool>;
    /// Number of the store beneath all prefixes, in this process: the same for all groups of a job, and another one for each store that is open
    /// at the same time. Where it is an address, who makes groups keeps the store for as long as these: torch does so for its groups.
    fn identity(&self) -> u64;
}

/// The error of a store that fails, from what it says: its first line, and a remedy where one is known.
pub fn store_failed(what: &str) -> Error {
    let first = what.lines().next().unwrap_or(what);
    // The C library's words for EMFILE, which a store quotes; it gives no code.
    let remedy = if what.contains("Too many open files") { "; raise the limit with `ulimit -n`" } else { "" };
    Error::rendezvous(format!("the store failed: {first}{remedy}"))
}

/// A store of the ranks of one process: calibration and tests. Clones share their contents.
#[derive(Clone, Default)]
pub struct MemoryStore {
    shared: Arc<Mutex<HashMap<String, Vec<u8>>>>,
    prefix: String,
}

impl MemoryStore {
    /// The same store seen under a prefix, as torch gives each group one.
    pub fn prefixed(&self, prefix: &str) -> Self {
        Self { shared: self.shared.clone(), prefix: format!("{}{prefix}/", self.prefix) }
    }

    /// Everything that is in it, under whatever prefix, in order.
    pub fn keys(&self) -> Vec<String> {
        let mut keys: Vec<String> = self.shared.lock().keys().cloned().collect();
        keys.sort_unstable();
        keys
    }

    fn key(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }
}

impl Store for MemoryStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.shared.lock().insert(self.key(key), value.to_vec());
        Ok(())
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        Ok(self.shared.lock().get(&self.key(key)).cloned())
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        let mut map = self.shared.lock();
        let entry = map.entry(self.key(key)).or_insert_with(|| b"0".to_vec());
        let old: i64 =
            String::from_utf8_lossy(entry).parse().map_err(|_| Error::rendezvous(format!("{key} holds no number")))?;
        let value = old + delta;
        *entry = value.to_string().into_bytes();
        Ok(value)
    }

    fn delete(&self, key: &str) -> Result<bool> {
        Ok(self.shared.lock().remove(&self.key(key)).is_some())
    }

    fn identity(&self) -> u64 {
        Arc::as_ptr(&self.shared).addr() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_that_finds_no_descriptor_names_the_limit() {
        let without = store_failed("accept: Too many open files (errno 24)\nException raised from here").message;
        assert_eq!(
            without,
            "the store failed: accept: Too many open files (errno 24); raise the limit with `ulimit -n`"
        );
        assert_eq!(
            store_failed("Connection reset by peer\nfrom").message,
            "the store failed: Connection reset by peer"
        );
    }
}
