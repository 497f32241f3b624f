//! Addresses of this machine that may be offered to peers, and the one listening port of this process.
//!
//! Owns the choice and order of addresses and the search for a free port; connects nothing.

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;

use accl_types::config::IfnameFilter;
use accl_types::{Error, Result};
use rustix::io::Errno;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::descriptors::above_standard_streams;
use crate::fork::Fd;

/// Connections that may wait while this process is busy elsewhere; the kernel caps the number.
const BACKLOG: i32 = 4096;
/// Name prefixes of interfaces of containers and virtual machines. Other hosts cannot reach their addresses, so they
/// are offered last.
const VIRTUAL: &[&str] = &["docker", "br-", "veth", "virbr", "cni", "flannel", "lxc", "lxd", "podman"];

/// An address of an interface that is up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Interface {
    pub(crate) name: String,
    pub(crate) address: IpAddr,
}

/// Returns every usable address of this machine.
pub(crate) fn interfaces() -> Result<Vec<Interface>> {
    let mut first = std::ptr::null_mut();
    // SAFETY: `getifaddrs` stores a list into the pointer or fails.
    if unsafe { libc::getifaddrs(&mut first) } != 0 {
        return Err(Error::network(format!("cannot list the network interfaces: {}", std::io::Error::last_os_error())));
    }
    let mut all = Vec::new();
    let mut at = first;
    // SAFETY: the list was made by `getifaddrs`, ends with null, and is freed only below.
    while let Some(entry) = unsafe { at.as_ref() } {
        at = entry.ifa_next;
        let up = entry.ifa_flags & libc::IFF_UP as u32 != 0;
        // SAFETY: an entry without address has a null pointer; other pointers refer to an address of the length that
        // its family implies.
        if let Some(address) = unsafe { ip_of(entry.ifa_addr) }.filter(|_| up) {
            // SAFETY: the name is a string that lives as long as the list.
            let name = unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy().into_owned();
            all.push(Interface { name, address });
        }
    }
    // SAFETY: nothing refers to the list any more.
    unsafe { libc::freeifaddrs(first) };
    Ok(all)
}

/// Returns the IP address. `None` for another family, and for a link-local IPv6 address, which means nothing without a
/// scope.
///
/// # Safety
/// `address` is null or points to a socket address as long as its family implies.
unsafe fn ip_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: `address` is null or points to a socket address, by this function's contract.
    match i32::from(unsafe { address.as_ref() }?.sa_family) {
        libc::AF_INET => {
            // SAFETY: the family is `AF_INET`, so a `sockaddr_in` is there by this function's contract; `getifaddrs`
            // aligns its addresses for every family.
            let v4 = unsafe { &*address.cast::<libc::sockaddr_in>() };
            Some(IpAddr::V4(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr))))
        }
        libc::AF_INET6 => {
            // SAFETY: the family is `AF_INET6`, so a `sockaddr_in6` is there by this function's contract; `getifaddrs`
            // aligns its addresses for every family.
            let v6 = unsafe { &*address.cast::<libc::sockaddr_in6>() };
            let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            (ip.segments()[0] & 0xffc0 != 0xfe80).then_some(IpAddr::V6(ip))
        }
        _ => None,
    }
}

/// Returns the addresses to offer, best first. The address with the route to the master comes first, virtual interfaces
/// come after others, and loopback comes last.
///
/// # Errors
/// `Configuration` if a filter matches none. A machine without network has no addresses and gets no error: shared
/// memory may suffice.
pub(crate) fn choose(all: &[Interface], filter: &IfnameFilter, route: Option<IpAddr>) -> Result<Vec<IpAddr>> {
    let mut accepted: Vec<_> = all.iter().filter(|interface| filter.accepts(&interface.name)).collect();
    if accepted.is_empty() && !filter.names.is_empty() {
        let mut names: Vec<_> = all.iter().map(|interface| interface.name.as_str()).collect();
        names.dedup();
        let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        return Err(Error::configuration(format!(
            "ACCL_SOCKET_IFNAME: {} matches no interface that is up; there are {names}",
            describe(filter)
        )));
    }
    accepted.sort_by_key(|interface| {
        (
            interface.address.is_loopback(),
            Some(interface.address) != route,
            VIRTUAL.iter().any(|prefix| interface.name.starts_with(prefix)),
            interface.address.is_ipv6(),
        )
    });
    let mut addresses: Vec<_> = accepted.into_iter().map(|interface| interface.address).collect();
    addresses.dedup();
    Ok(addresses)
}

fn describe(filter: &IfnameFilter) -> String {
    let marks = [(filter.exclude, "^"), (filter.exact, "=")];
    let marks: String = marks.iter().filter(|(set, _)| *set).map(|(_, mark)| *mark).collect();
    format!("`{marks}{}`", filter.names.join(","))
}

/// Returns the address from which this machine would talk to `master`. Sends nothing.
pub(crate) fn route_to(master: IpAddr) -> Option<IpAddr> {
    let any: IpAddr = if master.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::from(above_standard_streams(UdpSocket::bind((any, 0)).ok()?.into()).ok()?);
    socket.connect((master, 9)).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// Address families that a listener accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Families {
    Both,
    V4Only,
}

/// Listens on one port for both families, or only for IPv4 if IPv6 is switched off. `salt` spreads processes over the
/// range.
///
/// # Errors
/// `Configuration` if no port of the range is free, `Network` if the system refuses otherwise.
pub(crate) fn listen(range: Option<(u16, u16)>, salt: u32) -> Result<(Fd, u16, Families)> {
    let (first, last) = range.unwrap_or((0, 0));
    let count = u32::from(last - first) + 1;
    let mut refused = String::new();
    for i in 0..count {
        let port = first + ((salt % count + i) % count) as u16;
        for families in [Families::Both, Families::V4Only] {
            let listen = || listener(port, families).map_err(|why| Errno::from_io_error(&why).unwrap_or(Errno::IO));
            match Fd::adopt(listen) {
                Ok(fd) => {
                    let bound = local_port(&fd)?;
                    return Ok((fd, bound, families));
                }
                // A port that is taken for one family counts as taken.
                Err(Errno::ADDRINUSE) => {
                    refused = Errno::ADDRINUSE.to_string();
                    break;
                }
                Err(why) => refused = why.to_string(),
            }
        }
    }
    Err(match range {
        Some((first, last)) => Error::configuration(format!(
            "ACCL_PORT_RANGE: none of the ports {first}-{last} can be listened on ({refused}); give a wider range"
        )),
        None => Error::network(format!("no port can be listened on: {refused}")),
    })
}

fn listener(port: u16, families: Families) -> std::io::Result<OwnedFd> {
    let (domain, any): (_, IpAddr) = match families {
        Families::Both => (Domain::IPV6, Ipv6Addr::UNSPECIFIED.into()),
        Families::V4Only => (Domain::IPV4, Ipv4Addr::UNSPECIFIED.into()),
    };
    let socket = Socket::new(domain, Type::STREAM.cloexec().nonblocking(), Some(Protocol::TCP))?;
    if families == Families::Both {
        socket.set_only_v6(false)?;
    }
    // A port that the previous process of a restarted job has just left counts as free.
    socket.set_reuse_address(true)?;
    socket.bind(&SockAddr::from(SocketAddr::new(any, port)))?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

fn local_port(fd: &Fd) -> Result<u16> {
    let address = rustix::net::getsockname(fd).map_err(|why| Error::network(format!("getsockname: {why}")))?;
    SocketAddr::try_from(address).map(|a| a.port()).map_err(|why| Error::network(format!("getsockname: {why}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use accl_types::ErrorKind;
    use std::net::TcpListener;

    fn interface(name: &str, address: &str) -> Interface {
        Interface { name: name.to_owned(), address: address.parse().unwrap() }
    }

    fn filter(names: &[&str]) -> IfnameFilter {
        IfnameFilter { names: names.iter().map(|&n| n.to_owned()).collect(), ..IfnameFilter::default() }
    }

    #[test]
    fn the_route_to_the_master_comes_first_and_loopback_last() {
        let all = [
            interface("lo", "127.0.0.1"),
            interface("docker0", "172.17.0.1"),
            interface("eth0", "2001:db8::1"),
            interface("eth0", "10.0.0.1"),
            interface("eth1", "10.1.0.1"),
        ];
        let order = |route: Option<&str>| {
            let chosen = choose(&all, &IfnameFilter::default(), route.map(|r| r.parse().unwrap())).unwrap();
            chosen.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(order(None), ["10.0.0.1", "10.1.0.1", "2001:db8::1", "172.17.0.1", "127.0.0.1"]);
        assert_eq!(order(Some("10.1.0.1"))[0], "10.1.0.1");
        assert_eq!(order(Some("127.0.0.1"))[4], "127.0.0.1");
    }

    #[test]
    fn a_filter_that_matches_nothing_lists_what_there_is() {
        let all = [interface("lo", "127.0.0.1"), interface("lo", "::1"), interface("eth0", "10.0.0.1")];
        let error = choose(&all, &filter(&["ib"]), None).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Configuration);
        assert!(error.message.contains("`ib` matches no interface that is up; there are lo, eth0"), "{error}");
        assert_eq!(choose(&all, &filter(&["eth"]), None).unwrap(), ["10.0.0.1".parse::<IpAddr>().unwrap()]);
        assert!(choose(&[], &IfnameFilter::default(), None).unwrap().is_empty());
    }

    #[test]
    fn this_machine_has_addresses_and_none_is_link_local() {
        let all = interfaces().unwrap();
        assert!(!all.is_empty());
        assert!(all.iter().all(|i| !i.address.to_string().starts_with("fe80")));
    }

    #[test]
    fn a_port_of_the_range_is_taken_and_a_full_range_is_an_error() {
        // The system picks a free port; the listener on that port makes the range of one port full.
        let taken = TcpListener::bind("0.0.0.0:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let error = listen(Some((port, port)), 0).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Configuration);
        assert!(error.message.contains(&format!("{port}-{port}")), "{error}");
        drop(taken);
        let (_fd, bound, _) = listen(Some((port, port)), 5).unwrap();
        assert_eq!(bound, port);
    }
}
