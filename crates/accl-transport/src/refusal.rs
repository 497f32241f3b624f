//! Checks that links of every kind make of themselves and of the bootstrap socket that they keep.
//!
//! Owns the texts of these refusals, so that they are the same over every transport.

use accl_types::{Error, Result};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use crate::fork::Fd;

/// Refuses to use a link that belongs to the parent of this forked process.
#[inline]
pub(crate) fn guard_fork(is_ours: bool) -> Result<()> {
    if is_ours { Ok(()) } else { Err(Error::internal("the link belongs to the parent process")) }
}

/// Error for a payload that is too long, or that is sent on a closed link.
#[cold]
pub(crate) fn unfit_payload(payload_bytes: usize, max_payload_bytes: usize, is_open: bool) -> Error {
    let state = if is_open { "open" } else { "closed" };
    Error::internal(format!(
        "cannot send a payload of {payload_bytes} bytes: the link is {state} and takes at most {max_payload_bytes} bytes"
    ))
}

/// Error for a peer that has closed its link or died; the two cannot be distinguished.
pub(crate) fn ended(peer: &str) -> Error {
    Error::peer_lost(format!("{peer} has closed the link or died"))
}

/// Whether the peer has closed the bootstrap connection. Nothing is sent over it after the handshake.
pub(crate) fn is_at_end(socket: &Fd) -> bool {
    receives_end(socket, RecvFlags::DONTWAIT)
}

/// Whether the bootstrap connection will be at its end once its unread bytes are read. Unlike [`is_at_end`], this
/// leaves the bytes for their reader.
pub(crate) fn is_about_to_end(socket: &Fd) -> bool {
    receives_end(socket, RecvFlags::DONTWAIT | RecvFlags::PEEK)
}

fn receives_end(socket: &Fd, flags: RecvFlags) -> bool {
    let mut byte = [0; 1];
    match recv(socket, &mut byte[..], flags) {
        Ok((0, _)) => true,
        // Bytes that arrive nevertheless mean nothing.
        Ok(_) => false,
        Err(why) => why != Errno::AGAIN && why != Errno::INTR,
    }
}
