//! State that the attempts of one process to create groups share.
//!
//! Owns no rule; `session::rendezvous` uses it. Read [`Attempts`] first.

use std::collections::HashSet;
use std::sync::atomic::AtomicU64;

use crate::sync::Mutex;

/// State that the rendezvous attempts of one process share.
#[derive(Default)]
pub(crate) struct Attempts {
    /// Number of groups that this process has confirmed.
    pub(crate) confirmed: AtomicU64,
    /// Names and keys of the groups that a thread is leading.
    pub(crate) led: Mutex<HashSet<String>>,
}
