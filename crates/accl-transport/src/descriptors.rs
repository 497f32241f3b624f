//! The limit on descriptors of this process.
//!
//! Owns reading and raising it. It is raised only when it is in the way: a higher one can break programs that use
//! `select`, and children inherit it.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit to the hard one. `true`: more descriptors can be made now.
pub(crate) fn raise_limit() -> bool {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let is_lower = match (current, maximum) {
        (Some(current), Some(maximum)) => current < maximum,
        (Some(_), None) => true,
        (None, _) => false,
    };
    is_lower && setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).is_ok()
}

/// Sees to it that so many more descriptors can be made.
///
/// # Errors
/// A sentence with the remedy when the hard limit does not allow them.
pub(crate) fn make_room(wanted: usize) -> Result<(), String> {
    // Without `/proc` the limit is found when it is reached.
    let Ok(open) = std::fs::read_dir("/proc/self/fd") else { return Ok(()) };
    let needed = (open.count() + wanted) as u64;
    let suffices = || getrlimit(Resource::Nofile).current.is_none_or(|limit| needed <= limit);
    if suffices() || (raise_limit() && suffices()) {
        return Ok(());
    }
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    Err(format!("about {needed} descriptors are needed and {limit} are allowed"))
}
