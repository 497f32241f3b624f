//! The key-value store interface that rendezvous needs, and a store in memory for ranks of one process. torch's stores
//! reach it through `accl-py`. Read [`Store`] first.

use std::collections::HashMap;
use std::sync::Arc;

use accl_types::{Error, Result};
use parking_lot::Mutex;

/// A store shared by all ranks of a group. Keys are already private to the group's name.
///
/// A store is used only while a group is created, on the thread that creates it. Each request returns at once: a caller
/// that waits for a value asks again. Errors are of kind `Rendezvous`.
pub trait Store {
    /// Writes a value.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;
    /// Reads a value; `None` when there is none.
    fn get(&self, key: &str) -> Result<Option<Vec<u8>>>;
    /// Adds to a counter that starts at 0 and returns its new value, which [`Store::get`] reads as decimal text.
    fn add(&self, key: &str, delta: i64) -> Result<i64>;
    /// Deletes a value, if there is one. `false` when nothing was deleted, as by a store that cannot delete.
    fn delete(&self, key: &str) -> Result<bool>;
    /// Returns the number of the store beneath all prefixes, in this process. The number is the same for all groups of
    /// a job, and differs between stores that are open at the same time. If the number is an address, the caller must
    /// keep the store for as long as its groups exist, as torch does.
    fn identity(&self) -> u64;
}

/// Returns the error of a failed store from the text that it reports: the first line, and a remedy if one is known.
pub fn store_failed(what: &str) -> Error {
    let first = what.lines().next().unwrap_or(what);
    // The C library's text for EMFILE, which a store quotes; the store gives no code.
    let remedy = if what.contains("Too many open files") { "; raise the limit with `ulimit -n`" } else { "" };
    Error::rendezvous(format!("the store failed: {first}{remedy}"))
}

/// A store for ranks of one process, used for calibration and tests. Clones share their contents.
#[derive(Clone, Default)]
pub struct MemoryStore {
    shared: Arc<Mutex<HashMap<String, Vec<u8>>>>,
    prefix: String,
}

impl MemoryStore {
    /// Returns the same store seen under a prefix, as torch gives each group a prefix.
    pub fn prefixed(&self, prefix: &str) -> Self {
        Self { shared: self.shared.clone(), prefix: format!("{}{prefix}/", self.prefix) }
    }

    /// Returns all keys in the store, under any prefix, in ascending order.
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
        let old: i64 = String::from_utf8_lossy(entry)
            .parse()
            .map_err(|_| Error::rendezvous(format!("{key} does not hold a number")))?;
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
