//! The ways from one process to another: a transport, and where its carrier leads; and connecting there.
//!
//! Owns which ways there are and the system calls of a connection that is being made. In which order they are tried is for who
//! tries.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use crate::credentials::peer_uid;
use crate::fork::Fd;
use crate::rows;
use crate::transport::{Carrier, Transport};
use accl_wire::EndpointInfo;

/// A transport, and where its carrier leads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way {
    pub(super) row: &'static Transport,
    pub(super) to: Destination,
}

/// Where a connection leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Destination {
    /// To the Unix socket of the peer, whose name is in its info.
    Unix,
    Tcp(SocketAddr),
}

/// Why an attempt has failed.
pub(super) enum Failed {
    /// The peer has a link to us, or makes one.
    Crossing,
    /// The peer takes this process for gone.
    GivenUp(String),
    /// Nobody, or somebody else, listens there.
    Refused(String),
    /// This process has no descriptor or memory for it.
    Exhausted(String),
    /// What may pass.
    Other(String),
}

impl From<String> for Failed {
    fn from(why: String) -> Self {
        Self::Other(why)
    }
}

impl Failed {
    /// As a clause.
    pub(super) fn text(self) -> String {
        match self {
            Self::Crossing => "it connects itself".to_owned(),
            Self::GivenUp(why) | Self::Refused(why) | Self::Exhausted(why) | Self::Other(why) => why,
        }
    }

    /// Of a system call that connects.
    fn of_connecting(why: Errno) -> Self {
        let text = format!("no connection: {why}");
        if why == Errno::CONNREFUSED { Self::Refused(text) } else { Self::Other(text) }
    }
}

/// The ways from one process to another, in the order in which the first is to try them.
pub(super) fn ways(from: &EndpointInfo, to: &EndpointInfo) -> Vec<Way> {
    let same_host = to.host_id == from.host_id;
    let mut ways = Vec::new();
    for row in from.transports.iter().filter(|name| to.transports.contains(name)).filter_map(|name| rows::find(name)) {
        match row.carrier {
            Carrier::Unix if same_host && to.uid == from.uid && !to.unix_name.is_empty() => {
                ways.push(Way { row, to: Destination::Unix });
            }
            Carrier::Unix => {}
            Carrier::Tcp => {
                // On one host loopback is always up; for another host it would be somebody else.
                let loopback = to.addresses.iter().filter(|a| same_host && a.ip().is_loopback());
                let outside = to.addresses.iter().filter(|a| !a.ip().is_loopback());
                ways.extend(loopback.chain(outside).map(|&address| Way { row, to: Destination::Tcp(address) }));
            }
        }
    }
    ways
}

impl Destination {
    /// Begins to connect; see [`is_connected`].
    pub(super) fn connect(self, peer: &EndpointInfo) -> Result<Fd, Failed> {
        match self {
            Destination::Unix => connect_unix(&peer.unix_name),
            Destination::Tcp(address) => connect_tcp(address),
        }
    }

    /// Makes sure that the peer is who may be there, before anything is sent or read: over a Unix socket reading can bring descriptors.
    pub(super) fn check_peer(self, socket: &Fd, uid: u32) -> Result<(), Failed> {
        match self {
            Destination::Unix => {
                let theirs = peer_uid(socket)?;
                let why = || Failed::Other(format!("it belongs to user {theirs}, this process to user {uid}"));
                if theirs == uid { Ok(()) } else { Err(why()) }
            }
            Destination::Tcp(_) => Ok(()),
        }
    }
}

fn connect_unix(name: &str) -> Result<Fd, Failed> {
    let address =
        SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(|why| format!("its socket's name: {why}"))?;
    let socket = new_socket(AddressFamily::UNIX)?;
    rustix::net::connect(&socket, &address).map_err(|why| match why {
        Errno::AGAIN => Failed::Other("its queue of connections is full".to_owned()),
        why => Failed::of_connecting(why),
    })?;
    Ok(socket)
}

fn connect_tcp(address: SocketAddr) -> Result<Fd, Failed> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = new_socket(family)?;
    keep_alive(&socket);
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => {}
        Err(why) => return Err(Failed::of_connecting(why)),
    }
    Ok(socket)
}

/// Whether a socket that connects has done so.
pub(super) fn is_connected(socket: &Fd) -> Result<bool, Failed> {
    match sockopt::socket_error(socket) {
        Ok(Ok(())) => Ok(rustix::net::getpeername(socket).is_ok()),
        Ok(Err(why)) | Err(why) => Err(Failed::of_connecting(why)),
    }
}

/// Keep-alive finds within half a minute that a host vanished while nothing was under way to it, also during the handshake.
/// Otherwise the system repeats what is under way for a quarter of an hour and sends no probes of keep-alive: see `Link::answers`.
pub(super) fn keep_alive(socket: &Fd) {
    // These options make the link better but are not needed for it to work.
    let _ = sockopt::set_socket_keepalive(socket, true);
    let _ = sockopt::set_tcp_keepidle(socket, Duration::from_secs(10));
    let _ = sockopt::set_tcp_keepintvl(socket, Duration::from_secs(5));
    let _ = sockopt::set_tcp_keepcnt(socket, 4);
}

fn new_socket(family: AddressFamily) -> Result<Fd, Failed> {
    let make = || -> Result<OwnedFd, Errno> {
        rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC, None)
    };
    Fd::adopt(make).map_err(|why| match why {
        Errno::MFILE | Errno::NFILE => {
            Failed::Exhausted(format!("no socket: {why}; raise the limit of this process with `ulimit -n`"))
        }
        Errno::NOMEM | Errno::NOBUFS => Failed::Exhausted(format!("no socket: {why}")),
        why => Failed::Other(format!("no socket: {why}")),
    })
}
