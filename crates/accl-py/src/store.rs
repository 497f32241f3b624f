//! The engine's view of a c10d store.

use std::cell::Cell;

use accl_engine::Store;
use accl_types::{Error, Result};

use crate::bridge::ffi;

/// What no key holds: compared with whatever is there, it reads that or says that nothing is.
const NOTHING: &[u8] = b"accl: nothing";

/// A c10d store that the shim holds; used on the thread that makes the group and only until the group is made.
pub(crate) struct TorchStore<'a> {
    store: &'a ffi::StoreRef,
    /// Stores that users write in Python may lack it.
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

    /// c10d's own `get` waits for a key that is not there, with the store's only connection. A comparison with what is
    /// certainly not there changes nothing, returns at once, and cannot come between a question and a deletion.
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

    /// Some stores cannot.
    fn delete(&self, key: &str) -> Result<bool> {
        Ok(ffi::store_delete(self.store, key).unwrap_or(false))
    }

    /// torch keeps the store while it has a group over it, and gives sub-groups the same one.
    fn identity(&self) -> u64 {
        ffi::store_identity(self.store)
    }
}

fn rendezvous(error: cxx::Exception) -> Error {
    accl_engine::store_failed(error.what())
}

/// Whether a store lacks an operation. The classes of such errors do not cross the bridge, their texts do: torch's own stores, and those that
/// Python code derives or wraps.
fn is_not_implemented(what: &str) -> bool {
    let what = what.to_lowercase();
    ["not implemented", "notimplementederror", "not supported", "attributeerror", "pure virtual"]
        .iter()
        .any(|text| what.contains(text))
}
