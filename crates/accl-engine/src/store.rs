//! What rendezvous needs of a key-value store. torch's stores reach it through `accl-py`; tests use one in memory.

use std::time::Duration;

use accl_types::Result;

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
