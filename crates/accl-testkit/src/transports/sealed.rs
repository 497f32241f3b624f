//! The transport `sealed`: records over the TCP bootstrap connection. As with encryption, a record can be read only
//! when it is whole. An exclusive or stands in for a cipher: this tests bytes that are held back on both sides, not
//! secrecy.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use accl_transport::transport::{Agreed, Bootstrap, Local, OverBootstrap, Transport};
use accl_transport::{ByteStream, Fd, StreamLink, Watched};
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};

pub(super) const ROW: Transport = Transport {
    name: "sealed",
    about: "records over TCP, each readable once it is complete, as with encryption",
    bootstrap: Bootstrap::Tcp,
    descriptors: 1,
    polls_without_syscall: false,
    open: &|_: &Local<'_>| Box::new(OverBootstrap(link)),
    collectives: None,
};

/// Maximum bytes of a record, as in TLS.
const RECORD_BYTES: usize = 16 << 10;
/// Bytes of the length before each record.
const PREFIX_BYTES: usize = 2;
const KEY: u8 = 0x5a;

fn link(agreed: Agreed) -> Box<dyn Watched> {
    let stream = Sealed {
        socket: agreed.socket,
        peer: agreed.peer,
        held_back: Vec::new(),
        arrived: Vec::new(),
        opened: Vec::new(),
        read: 0,
    };
    Box::new(StreamLink::new(stream, agreed.max_payload_bytes))
}

/// A connection that carries records.
#[derive(Debug)]
struct Sealed {
    socket: Fd,
    peer: String,
    /// Sealed bytes that the socket has not accepted yet.
    held_back: Vec<u8>,
    /// Bytes of incomplete records.
    arrived: Vec<u8>,
    /// Contents of the last complete records; `read` is the number of bytes that were read.
    opened: Vec<u8>,
    read: usize,
}

impl Sealed {
    /// Opens the complete records.
    fn open(&mut self) {
        let mut at = 0;
        while let Some((prefix, rest)) = self.arrived[at..].split_first_chunk::<PREFIX_BYTES>() {
            let Some(record) = rest.get(..usize::from(u16::from_le_bytes(*prefix))) else { break };
            self.opened.extend(record.iter().map(|byte| byte ^ KEY));
            at += PREFIX_BYTES + record.len();
        }
        self.arrived.drain(..at);
    }
}

impl ByteStream for Sealed {
    fn send(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !self.flush()? {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let record = &bytes[..bytes.len().min(RECORD_BYTES)];
        self.held_back.extend((record.len() as u16).to_le_bytes());
        self.held_back.extend(record.iter().map(|byte| byte ^ KEY));
        Ok(record.len())
    }

    fn flush(&mut self) -> io::Result<bool> {
        while !self.held_back.is_empty() {
            match send(&self.socket, &self.held_back, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => drop(self.held_back.drain(..sent)),
                Err(rustix::io::Errno::AGAIN) => return Ok(false),
                Err(why) => return Err(why.into()),
            }
        }
        Ok(true)
    }

    fn receive(&mut self, room: &mut [u8]) -> io::Result<usize> {
        let mut bytes = [0; RECORD_BYTES];
        while self.opened.len() - self.read < room.len() {
            match recv(&self.socket, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) if !self.arrived.is_empty() => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok((0, _)) => break,
                Ok((count, _)) => {
                    self.arrived.extend_from_slice(&bytes[..count]);
                    self.open();
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(_) if self.read < self.opened.len() => break,
                Err(why) => return Err(why.into()),
            }
        }
        let count = room.len().min(self.opened.len() - self.read);
        room[..count].copy_from_slice(&self.opened[self.read..self.read + count]);
        self.read += count;
        if self.read == self.opened.len() {
            self.opened.clear();
            self.read = 0;
        }
        Ok(count)
    }

    fn shut_down(&mut self) {
        let _ = shutdown(&self.socket, Shutdown::Write);
    }

    fn unacknowledged(&self) -> u64 {
        self.held_back.len() as u64
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.socket.as_fd()]
    }

    fn is_ours(&self) -> bool {
        self.socket.is_ours()
    }

    fn transport(&self) -> &'static str {
        ROW.name
    }

    fn describe(&self) -> &str {
        &self.peer
    }
}
