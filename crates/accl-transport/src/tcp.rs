//! The transport `tcp`: one connection per peer, IPv4 or IPv6. The link uses the bootstrap socket.
//!
//! Owns what TCP knows of a connection in addition to its bytes: which bytes the peer's host has acknowledged, and for
//! how long that host has been silent.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use rustix::net::{
    RecvFlags, SendFlags, Shutdown, SocketAddrAny, getpeername, getsockname, recv, send, shutdown, sockopt,
};

use crate::Watched;
use crate::fork::Fd;
use crate::stream_link::{ByteStream, StreamLink};
use crate::transport::{Agreed, Bootstrap, Local, OverBootstrap, Transport};

pub(crate) const ROW: Transport = Transport {
    name: "tcp",
    about: "one connection a peer, IPv4 or IPv6",
    bootstrap: Bootstrap::Tcp,
    descriptors: 1,
    polls_without_syscall: false,
    open: &|_: &Local<'_>| Box::new(OverBootstrap(link)),
    collectives: None,
};

fn link(agreed: Agreed) -> Box<dyn Watched> {
    let _ = sockopt::set_tcp_nodelay(&agreed.socket, true);
    let connection = Connection::new(agreed.socket, &agreed.peer);
    Box::new(StreamLink::new(connection, agreed.max_payload_bytes))
}

/// A connected, non-blocking socket.
#[derive(Debug)]
struct Connection {
    socket: Fd,
    /// `local -> remote` and the peer's host and process.
    addresses: String,
    is_shut_down: bool,
}

impl Connection {
    fn new(socket: Fd, peer: &str) -> Connection {
        let remote = getpeername(&socket).ok().flatten();
        let addresses = format!("{} -> {} ({peer})", show(getsockname(&socket).ok()), show(remote));
        Connection { socket, addresses, is_shut_down: false }
    }
}

/// Formats an address. A listener for both families reports IPv4 addresses as IPv6; the text shows IPv4.
fn show(address: Option<SocketAddrAny>) -> String {
    match address.and_then(|a| SocketAddr::try_from(a).ok()) {
        Some(a) => SocketAddr::new(a.ip().to_canonical(), a.port()).to_string(),
        None => "?".to_owned(),
    }
}

impl ByteStream for Connection {
    fn send(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(send(&self.socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?)
    }

    fn receive(&mut self, room: &mut [u8]) -> io::Result<usize> {
        let (count, _) = recv(&self.socket, room, RecvFlags::DONTWAIT)?;
        Ok(count)
    }

    fn shut_down(&mut self) {
        self.is_shut_down = true;
        let _ = shutdown(&self.socket, Shutdown::Write);
    }

    fn unacknowledged(&self) -> u64 {
        let mut bytes: libc::c_int = 0;
        // SAFETY: the request stores one `int` in `bytes`, and the descriptor is open while `socket` is borrowed.
        let result = unsafe { libc::ioctl(self.socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
        let bytes = if result == 0 { u64::try_from(bytes).unwrap_or(0) } else { 0 };
        // The end of the stream counts as a byte.
        bytes.saturating_sub(u64::from(self.is_shut_down))
    }

    /// Probes of a closed window count as repeats, too.
    fn repeats(&self) -> Option<(u8, Duration)> {
        // SAFETY: the struct consists of plain integers, for which zero is valid.
        let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
        let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
        let fd = self.socket.as_fd().as_raw_fd();
        // SAFETY: the kernel stores at most `len` bytes into `info`, which has that size, and any bytes are valid
        // there.
        let result =
            unsafe { libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut info).cast(), &mut len) };
        let repeats = info.tcpi_retransmits.max(info.tcpi_probes);
        (result == 0).then(|| (repeats, Duration::from_millis(u64::from(info.tcpi_last_ack_recv))))
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
        &self.addresses
    }
}
