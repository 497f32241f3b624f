//! Links out of what a finished handshake leaves, the same on both sides.

use std::net::SocketAddr;
use std::time::Duration;

use rustix::net::{SocketAddrAny, getpeername, getsockname, sockopt};

use super::stream::peer_process;
use crate::Watched;
use crate::fork::Fd;
use crate::shm::region::Region;
use crate::shm::{Parts, ShmLink};
use crate::tcp::TcpLink;

/// `side` is 0 for the process that created the region.
pub(super) fn shm_link(
    region: Region,
    side: usize,
    socket: Fd,
    peer_event: Fd,
    max_payload_bytes: usize,
    peer: String,
) -> Box<dyn Watched> {
    let peer_process = peer_process(&socket);
    Box::new(ShmLink::new(Parts { region, side, socket, peer_event, peer_process, max_payload_bytes, peer }))
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

pub(super) fn tcp_link(socket: Fd, max_payload_bytes: usize, peer: &str) -> Box<dyn Watched> {
    let _ = sockopt::set_tcp_nodelay(&socket, true);
    keep_alive(&socket);
    let remote = getpeername(&socket).ok().flatten();
    let place = format!("{} -> {} ({peer})", show(getsockname(&socket).ok()), show(remote));
    Box::new(TcpLink::new(socket, max_payload_bytes, place))
}

/// A listener for both families sees IPv4 as IPv6; people do not.
fn show(address: Option<SocketAddrAny>) -> String {
    match address.and_then(|a| SocketAddr::try_from(a).ok()) {
        Some(a) => SocketAddr::new(a.ip().to_canonical(), a.port()).to_string(),
        None => "?".to_owned(),
    }
}
