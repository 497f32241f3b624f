//! Descriptors of this process: the limit on their count, and the numbers of the standard streams.
//!
//! Owns reading and raising the limit. The limit is raised only if more descriptors are needed than it allows: a higher
//! one can break programs that use `select`, and children inherit it.

use std::os::fd::{AsRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The first number that is not a standard stream's.
const FIRST: i32 = 3;

/// Moves a descriptor away from the numbers of the standard streams. A process that was started without these streams
/// would assign their numbers to its first descriptors. Its output would then be written to shared memory or
/// connections.
///
/// # Errors
/// The errors of `fcntl`; the descriptor is closed then.
pub(crate) fn above_standard_streams(made: OwnedFd) -> Result<OwnedFd, Errno> {
    if made.as_raw_fd() >= FIRST { Ok(made) } else { rustix::io::fcntl_dupfd_cloexec(&made, FIRST) }
}

/// Raises the soft limit to the hard limit. Returns `true` if more descriptors can be made now.
pub(crate) fn raise_limit() -> bool {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let is_lower = match (current, maximum) {
        (Some(current), Some(maximum)) => current < maximum,
        (Some(_), None) => true,
        (None, _) => false,
    };
    is_lower && setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).is_ok()
}

/// Ensures that `wanted` more descriptors can be made.
///
/// # Errors
/// A sentence with the number needed and the limit, if the hard limit does not allow them.
pub(crate) fn make_room(wanted: usize) -> Result<(), String> {
    // Without `/proc` the limit is detected when it is reached.
    let Ok(open) = std::fs::read_dir("/proc/self/fd") else { return Ok(()) };
    let needed = (open.count() + wanted) as u64;
    let suffices = || getrlimit(Resource::Nofile).current.is_none_or(|limit| needed <= limit);
    if suffices() || (raise_limit() && suffices()) {
        return Ok(());
    }
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    Err(format!("about {needed} descriptors are needed and {limit} are allowed"))
}
