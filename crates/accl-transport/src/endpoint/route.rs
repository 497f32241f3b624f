//! The routes from one process to another: a transport and the destination of its bootstrap connection. Also connects
//! to a destination.
//!
//! Owns the list of routes and the system calls of a connection that is being made. The caller decides when each route
//! is tried.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use crate::credentials::peer_uid;
use crate::fork::Fd;
use crate::rows;
use crate::transport::{Bootstrap, Transport};
use accl_wire::EndpointInfo;

/// A transport, and the destination of its bootstrap connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Route {
    pub(super) row: &'static Transport,
    pub(super) to: Destination,
}

/// Destination of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Destination {
    /// The Unix socket of the peer, whose name is in the peer's info.
    Unix,
    Tcp(SocketAddr),
}

/// Reason why an attempt has failed.
pub(super) enum Failed {
    /// The peer has a link to this process, or is making one.
    Crossing,
    /// The peer considers this process gone.
    GivenUp(String),
    /// No process, or another process, listens there.
    Refused(String),
    /// This process has no descriptor or memory for the attempt.
    Exhausted(String),
    /// A failure that may pass.
    Other(String),
}

impl From<String> for Failed {
    fn from(why: String) -> Self {
        Self::Other(why)
    }
}

impl Failed {
    /// Returns the reason as a clause.
    pub(super) fn text(self) -> String {
        match self {
            Self::Crossing => "it already has a link to this process, or is making one".to_owned(),
            Self::GivenUp(why) | Self::Refused(why) | Self::Exhausted(why) | Self::Other(why) => why,
        }
    }

    /// Classifies an error of a system call that connects.
    fn of_connecting(why: Errno) -> Self {
        let text = format!("cannot connect: {why}");
        if why == Errno::CONNREFUSED { Self::Refused(text) } else { Self::Other(text) }
    }
}

/// Returns the routes from one process to another, in the order in which `from` tries them.
pub(super) fn routes(from: &EndpointInfo, to: &EndpointInfo) -> Vec<Route> {
    let same_host = to.host_id == from.host_id;
    let mut routes = Vec::new();
    for row in from.transports.iter().filter(|name| to.transports.contains(name)).filter_map(|name| rows::find(name)) {
        match row.bootstrap {
            Bootstrap::Unix if same_host && to.uid == from.uid && !to.unix_name.is_empty() => {
                routes.push(Route { row, to: Destination::Unix });
            }
            Bootstrap::Unix => {}
            Bootstrap::Tcp => {
                // On the same host loopback is always up. From another host a loopback address would lead to another
                // process.
                let loopback = to.addresses.iter().filter(|a| same_host && a.ip().is_loopback());
                let outside = to.addresses.iter().filter(|a| !a.ip().is_loopback());
                routes.extend(loopback.chain(outside).map(|&address| Route { row, to: Destination::Tcp(address) }));
            }
        }
    }
    routes
}

impl Destination {
    /// Begins to connect; see [`is_connected`].
    pub(super) fn connect(self, peer: &EndpointInfo) -> Result<Fd, Failed> {
        match self {
            Destination::Unix => connect_unix(&peer.unix_name),
            Destination::Tcp(address) => connect_tcp(address),
        }
    }

    /// Checks the peer's user before anything is sent or read: reading from a Unix socket can bring descriptors.
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
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())
        .map_err(|why| format!("the name of its socket is invalid: {why}"))?;
    let socket = new_socket(AddressFamily::UNIX)?;
    rustix::net::connect(&socket, &address).map_err(|why| match why {
        Errno::AGAIN => Failed::Other("its connection queue is full".to_owned()),
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

/// Whether a connecting socket is connected.
pub(super) fn is_connected(socket: &Fd) -> Result<bool, Failed> {
    match sockopt::socket_error(socket) {
        Ok(Ok(())) => Ok(rustix::net::getpeername(socket).is_ok()),
        Ok(Err(why)) | Err(why) => Err(Failed::of_connecting(why)),
    }
}

/// Switches keep-alive on. It detects within half a minute that the host of an idle connection has vanished, also
/// during the handshake.
/// While data is in flight, the system instead repeats the data for a quarter of an hour and sends no keep-alive
/// probes: see `Link::answers`.
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
        Errno::MFILE | Errno::NFILE => Failed::Exhausted(format!(
            "cannot create a socket: {why}; raise the limit of this process with `ulimit -n`"
        )),
        Errno::NOMEM | Errno::NOBUFS => Failed::Exhausted(format!("cannot create a socket: {why}")),
        why => Failed::Other(format!("cannot create a socket: {why}")),
    })
}
