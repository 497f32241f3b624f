//! Who is at the other end of a Unix socket, as the kernel saw it.
//!
//! Owns these questions to the system; decides nothing.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};

use crate::fork::Fd;

/// The effective user id of the process at the other end of a Unix socket, as the kernel saw it.
pub(crate) fn peer_uid(socket: &Fd) -> Result<u32, String> {
    credentials(socket).map(|c| c.uid).map_err(|why| format!("its credentials are hidden: {why}"))
}

/// A descriptor of the process at the other end of a Unix socket, which is readable when it has died. `None` where
/// the kernel or the container refuses.
pub(crate) fn peer_process(socket: &Fd) -> Option<Fd> {
    Fd::adopt(|| peer_pidfd(socket).or_else(|_| pidfd_of_peer_pid(socket))).ok()
}

/// Asks the socket, which cannot mean another process that has got the number since. Needs Linux 6.5.
fn peer_pidfd(socket: &Fd) -> Result<OwnedFd, Errno> {
    const SO_PEERPIDFD: libc::c_int = 77;
    let fd: libc::c_int = option(socket, SO_PEERPIDFD, -1)?;
    // SAFETY: the kernel has just made this descriptor for us; a negative one is an error.
    if fd < 0 { Err(Errno::BADF) } else { Ok(unsafe { OwnedFd::from_raw_fd(fd) }) }
}

/// A peer in another process namespace has the number 0 here and no descriptor.
fn pidfd_of_peer_pid(socket: &Fd) -> Result<OwnedFd, Errno> {
    let pid = Pid::from_raw(credentials(socket)?.pid).ok_or(Errno::SRCH)?;
    rustix::process::pidfd_open(pid, PidfdFlags::empty())
}

/// Not by rustix, whose process numbers cannot be 0.
fn credentials(socket: &Fd) -> Result<libc::ucred, Errno> {
    option(socket, libc::SO_PEERCRED, libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX })
}

/// Reads a socket option that is a plain integer or a struct of such.
fn option<T: Copy>(socket: &Fd, name: libc::c_int, initial: T) -> Result<T, Errno> {
    let mut value = initial;
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel stores at most `len` bytes into `value`, every bit pattern of which is valid.
    let result = unsafe {
        libc::getsockopt(socket.as_fd().as_raw_fd(), libc::SOL_SOCKET, name, (&raw mut value).cast(), &mut len)
    };
    if result == 0 && len as usize == size_of::<T>() { Ok(value) } else { Err(Errno::NOPROTOOPT) }
}
