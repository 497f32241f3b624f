//! What links of every kind ask of themselves and of the carrier's socket that they keep.
//!
//! Owns the words of these refusals, so that they are the same over every transport.

use accl_types::{Error, Result};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use crate::fork::Fd;

/// Refuses what belongs to the parent of this forked process.
#[inline]
pub(crate) fn guard_fork(is_ours: bool) -> Result<()> {
    if is_ours { Ok(()) } else { Err(Error::internal("the link belongs to the parent process")) }
}

/// A payload that is too long, or comes when the link is closed.
#[cold]
pub(crate) fn unfit_payload(payload_bytes: usize, max_payload_bytes: usize, is_open: bool) -> Error {
    let state = if is_open { "open" } else { "closed" };
    Error::internal(format!(
        "a payload of {payload_bytes} bytes on a link that takes {max_payload_bytes} and is {state}"
    ))
}

/// The end of a peer that cannot be told from the end of its link.
pub(crate) fn ended(peer: &str) -> Error {
    Error::peer_lost(format!("{peer} has closed the link or died"))
}

/// Whether the peer has closed the carrier. Nothing is sent over it after the handshake.
pub(crate) fn is_at_end(socket: &Fd) -> bool {
    receives_end(socket, RecvFlags::DONTWAIT)
}

/// The same where bytes of the carrier are somebody's: whether it is at its end once these are read.
pub(crate) fn is_about_to_end(socket: &Fd) -> bool {
    receives_end(socket, RecvFlags::DONTWAIT | RecvFlags::PEEK)
}

fn receives_end(socket: &Fd, flags: RecvFlags) -> bool {
    let mut byte = [0; 1];
    match recv(socket, &mut byte[..], flags) {
        Ok((0, _)) => true,
        // Bytes that come nevertheless mean nothing.
        Ok(_) => false,
        Err(why) => why != Errno::AGAIN && why != Errno::INTR,
    }
}
