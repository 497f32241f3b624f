//! The engine's view of a c10d store.

use std::cell::Cell;

use accl_engine::Store;
use accl_types::{Error, Result};

use crate::bridge::ffi;

/// A value that no key has. Comparing any key with it returns the key's value, or shows that the key does not exist.
const NOTHING: &[u8] = b"accl: nothing";

/// A c10d store that the shim holds. Used on the thread that creates the group, and only until the group is created.
pub(crate) struct TorchStore<'a> {
    store: &'a ffi::StoreRef,
    /// Whether the store has no `compare_set`, as stores that users write in Python may.
    lacks_compare_set: Cell<bool>,
}

impl<'a> TorchStore<'a> {
    pub(crate) fn new(store: &'a ffi::StoreRef) -> Self {
        Self { store, lacks_compare_set: Cell::new(false) }
    }
}

impl Store for TorchStore<'_> {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        ffi::store_set(self.store, key, value).map_err(rendezvous)
    }

    /// c10d's own `get` waits for a missing key and blocks the store's only connection meanwhile. Comparing with a
    /// value that no key has changes nothing and returns at once. It is also a single operation, so no deletion can
    /// come between a check and a read.
    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        if !self.lacks_compare_set.get() {
            match ffi::store_compare_set(self.store, key, NOTHING, NOTHING) {
                Ok(value) => return Ok(Some(value).filter(|value| !value.is_empty() && value != NOTHING)),
                Err(error) if is_not_implemented(error.what()) => self.lacks_compare_set.set(true),
                Err(error) => return Err(rendezvous(error)),
            }
        }
        match ffi::store_check(self.store, key).map_err(rendezvous)? {
            true => ffi::store_get(self.store, key).map(Some).map_err(rendezvous),
            false => Ok(None),
        }
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        ffi::store_add(self.store, key, delta).map_err(rendezvous)
    }

    /// Returns false also for stores that cannot delete.
    fn delete(&self, key: &str) -> Result<bool> {
        Ok(ffi::store_delete(self.store, key).unwrap_or(false))
    }

    /// torch keeps the store while a group uses it, and gives sub-groups the same store.
    fn identity(&self) -> u64 {
        ffi::store_identity(self.store)
    }
}

fn rendezvous(error: cxx::Exception) -> Error {
    accl_engine::store_failed(error.what())
}

/// Whether a store lacks an operation. Only the texts of such errors cross the bridge, not their classes. The texts are
/// those in torch's own stores and in stores that Python code derives or wraps.
fn is_not_implemented(what: &str) -> bool {
    let what = what.to_lowercase();
    ["not implemented", "notimplementederror", "not supported", "attributeerror", "pure virtual"]
        .iter()
        .any(|text| what.contains(text))
}
