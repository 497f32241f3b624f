//! A connected socket during the handshake. It reads exactly as many bytes as requested, so that the frames after them
//! stay in the socket. It passes descriptors over Unix sockets.
//!
//! Owns the system calls of the handshake; decides nothing.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

use crate::fork::{Fd, without_forks};
use crate::transport::MAX_ADDRESS_DESCRIPTORS;

/// Maximum number of descriptors that come with a message; the kernel closes more.
const MAX_FDS: usize = MAX_ADDRESS_DESCRIPTORS;

/// A socket with the received part of the next message.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) socket: Fd,
    received: Vec<u8>,
    pub(super) fds: Vec<Fd>,
}

impl Stream {
    pub(super) fn new(socket: Fd) -> Stream {
        Stream { socket, received: Vec::new(), fds: Vec::new() }
    }

    /// Returns the received bytes of the message that is being read.
    pub(super) fn prefix(&self) -> &[u8] {
        &self.received
    }

    /// Returns the next `N` bytes once all of them have arrived.
    pub(super) fn read<const N: usize>(&mut self) -> Result<Option<[u8; N]>, String> {
        while self.received.len() < N {
            let mut bytes = [0; N];
            let room = &mut bytes[self.received.len()..];
            match receive(&self.socket, room, &mut self.fds) {
                Ok(0) => return Err("the connection was closed during the handshake".to_owned()),
                Ok(count) => self.received.extend_from_slice(&room[..count]),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(why) => return Err(format!("cannot receive the handshake: {why}")),
            }
        }
        let mut message = [0; N];
        message.copy_from_slice(&self.received);
        self.received.clear();
        Ok(Some(message))
    }

    /// Sends a whole message. The messages of a handshake always fit into an empty socket buffer.
    pub(super) fn write(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), String> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(format!("{} descriptors are too many for a message", fds.len()));
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let sent = rustix::io::retry_on_intr(|| {
            rustix::net::sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, flags)
        });
        match sent {
            Ok(count) if count == bytes.len() => Ok(()),
            Ok(count) => Err(format!("the system accepted only {count} of {} bytes of the handshake", bytes.len())),
            Err(why) => Err(format!("cannot send the handshake: {why}")),
        }
    }
}

fn receive(socket: &Fd, room: &mut [u8], fds: &mut Vec<Fd>) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    // New descriptors appear here. A fork must not copy them to a child before they are registered.
    without_forks(|registry| {
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let count = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(room)], &mut control, flags)?.bytes;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                // Surplus descriptors are closed at once.
                let room = MAX_FDS.saturating_sub(fds.len());
                for fd in rights.take(room) {
                    fds.push(registry.adopt(fd)?);
                }
            }
        }
        Ok(count)
    })
}
