//! Identity of the process at the other end of a Unix socket, as the kernel recorded it.
//!
//! Owns these questions to the system; decides nothing.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};

use crate::fork::Fd;

/// Returns the effective user id of the process at the other end of a Unix socket, as the kernel recorded it.
pub(crate) fn peer_uid(socket: &Fd) -> Result<u32, String> {
    credentials(socket).map(|c| c.uid).map_err(|why| format!("cannot read its credentials: {why}"))
}

/// Returns a descriptor of the process at the other end of a Unix socket, readable once that process has died. `None`
/// if the kernel or the container refuses.
pub(crate) fn peer_process(socket: &Fd) -> Option<Fd> {
    Fd::adopt(|| peer_pidfd(socket).or_else(|_| pidfd_of_peer_pid(socket))).ok()
}

/// Asks the socket, so that the descriptor cannot mean a later process with the same number. Needs Linux 6.5.
fn peer_pidfd(socket: &Fd) -> Result<OwnedFd, Errno> {
    const SO_PEERPIDFD: libc::c_int = 77;
    let fd: libc::c_int = option(socket, SO_PEERPIDFD, -1)?;
    // SAFETY: the kernel has just made this descriptor for us; a negative number was refused before.
    if fd < 0 { Err(Errno::BADF) } else { Ok(unsafe { OwnedFd::from_raw_fd(fd) }) }
}

/// Opens the process by its number. A peer in another process namespace has number 0 here, and so no descriptor.
fn pidfd_of_peer_pid(socket: &Fd) -> Result<OwnedFd, Errno> {
    let pid = Pid::from_raw(credentials(socket)?.pid).ok_or(Errno::SRCH)?;
    rustix::process::pidfd_open(pid, PidfdFlags::empty())
}

/// Reads the credentials without rustix, whose process numbers cannot be 0.
fn credentials(socket: &Fd) -> Result<libc::ucred, Errno> {
    option(socket, libc::SO_PEERCRED, libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX })
}

/// Reads a socket option that is a plain integer or a struct of plain integers.
fn option<T: Copy>(socket: &Fd, name: libc::c_int, initial: T) -> Result<T, Errno> {
    let mut value = initial;
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel stores at most `len` bytes into `value`, which has that size, and every bit pattern is valid
    // there.
    let result = unsafe {
        libc::getsockopt(socket.as_fd().as_raw_fd(), libc::SOL_SOCKET, name, (&raw mut value).cast(), &mut len)
    };
    if result == 0 && len as usize == size_of::<T>() { Ok(value) } else { Err(Errno::NOPROTOOPT) }
}
