//! The transport `pipe`: one pipe in each direction between processes of one host. The connecting process creates both
//! pipes and sends their far ends over the bootstrap socket, which is not used afterwards.
//!
//! A process that does not ignore SIGPIPE would die when it writes to a dead peer. Rust and Python ignore SIGPIPE.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use accl_transport::transport::{Address, Agreed, Bootstrap, HalfLink, Local, PeerAddress, Provider, Transport};
use accl_transport::{ByteStream, Fd, StreamLink, Waker, Watched};
use rustix::io::{Errno, read, write};
use rustix::pipe::{PipeFlags, pipe_with};

pub(super) const ROW: Transport = Transport {
    name: "pipe",
    about: "a pipe in each direction between processes of one host",
    bootstrap: Bootstrap::Unix,
    descriptors: 2,
    polls_without_syscall: false,
    open: &|_: &Local<'_>| Box::new(Pipes),
    collectives: None,
};

struct Pipes;

impl Provider for Pipes {
    fn offer(&self) -> Result<Box<dyn HalfLink>, String> {
        let (inbound, peers_outbound) = pipe()?;
        let (peers_inbound, outbound) = pipe()?;
        Ok(Box::new(Half { inbound, outbound, for_peer: vec![peers_inbound, peers_outbound] }))
    }

    fn accept(&self, peer: PeerAddress, _max_payload_bytes: usize) -> Result<Box<dyn HalfLink>, String> {
        let Ok([inbound, outbound]) = <[Fd; 2]>::try_from(peer.descriptors) else {
            return Err("the pipes did not arrive".to_owned());
        };
        Ok(Box::new(Half { inbound, outbound, for_peer: Vec::new() }))
    }

    fn sibling(&self, _waker: &Arc<Waker>) -> Box<dyn Provider> {
        Box::new(Pipes)
    }
}

/// Returns both ends of a new pipe: first the end to read, then the end to write.
fn pipe() -> Result<(Fd, Fd), String> {
    // A child that is forked in between must not inherit an end, or the pipe would not end with this process.
    Fd::adopt_pair(|| pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)).map_err(|why| format!("no pipe: {why}"))
}

struct Half {
    inbound: Fd,
    outbound: Fd,
    for_peer: Vec<Fd>,
}

impl HalfLink for Half {
    fn address(&self) -> Address<'_> {
        Address { bytes: Vec::new(), descriptors: self.for_peer.iter().map(AsFd::as_fd).collect() }
    }

    /// Closes the far ends: while this process keeps them open, no pipe ends with the peer.
    fn forget_address(&mut self) {
        self.for_peer.clear();
    }

    fn take_answer(&mut self, _peer: PeerAddress, _max_payload_bytes: usize) -> Result<(), String> {
        Ok(())
    }

    fn finish(self: Box<Self>, agreed: Agreed) -> Result<Box<dyn Watched>, String> {
        let Half { inbound, outbound, .. } = *self;
        let stream = Pipe { inbound, outbound: Some(outbound), peer: agreed.peer };
        Ok(Box::new(StreamLink::new(stream, agreed.max_payload_bytes)))
    }
}

/// A pipe in each direction.
#[derive(Debug)]
struct Pipe {
    inbound: Fd,
    outbound: Option<Fd>,
    peer: String,
}

impl ByteStream for Pipe {
    fn send(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let outbound = self.outbound.as_ref().ok_or(io::ErrorKind::BrokenPipe)?;
        Ok(write(outbound, bytes)?)
    }

    fn receive(&mut self, room: &mut [u8]) -> io::Result<usize> {
        let mut received = 0;
        // One read may return less than a pipe holds, because a pipe returns its pages one by one.
        while received < room.len() {
            match read(&self.inbound, &mut room[received..]) {
                Ok(0) if received > 0 => break,
                Ok(0) => return Ok(0),
                Ok(count) => received += count,
                Err(Errno::INTR) => {}
                Err(_) if received > 0 => break,
                Err(why) => return Err(why.into()),
            }
        }
        Ok(received)
    }

    fn shut_down(&mut self) {
        self.outbound = None;
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        std::iter::once(self.inbound.as_fd()).chain(self.outbound.as_ref().map(AsFd::as_fd)).collect()
    }

    fn is_ours(&self) -> bool {
        self.inbound.is_ours()
    }

    fn transport(&self) -> &'static str {
        ROW.name
    }

    fn describe(&self) -> &str {
        &self.peer
    }
}
