//! Identity of this host, as far as sharing memory is concerned, and the random identity of this process.

use std::io::Read;

use accl_types::{Error, Result};
use accl_wire::{EndpointInfo, PROTOCOL_VERSION};

/// Name of the machine, for messages.
pub(crate) fn hostname() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    if name.is_empty() { "unnamed".to_owned() } else { name }
}

/// Identifier that is equal for two processes only if they may share memory. They need the same boot of the same kernel
/// and the same network namespace, in which the Unix sockets have their names. They also need the same machine name,
/// since cloned virtual machines can share the rest.
/// The handshake then finds out whether sharing works.
pub(crate) fn host_id() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    // Namespace of this thread, which will create the sockets. The path without thread is for sandboxes that lack the
    // first.
    let network =
        ["/proc/thread-self/ns/net", "/proc/self/ns/net"].iter().find_map(|path| std::fs::read_link(path).ok());
    let network = network.map(|target| target.to_string_lossy().into_owned()).unwrap_or_default();
    let network: String = network.chars().filter(char::is_ascii_digit).collect();
    format!("{}/{network}/{}", boot.trim(), hostname())
}

/// Describes this process with a random identity, and without addresses at which it could be reached.
///
/// # Errors
/// `Network` if the system has no random numbers.
pub fn process_info() -> Result<EndpointInfo> {
    Ok(EndpointInfo {
        version: PROTOCOL_VERSION,
        uuid: random_uuid().map_err(Error::network)?,
        pid: std::process::id(),
        uid: rustix::process::geteuid().as_raw(),
        hostname: hostname(),
        host_id: host_id(),
        addresses: Vec::new(),
        unix_name: String::new(),
        transports: Vec::new(),
        lanes: 1,
    })
}

/// Returns a random identity.
pub(crate) fn random_uuid() -> std::result::Result<[u8; 16], String> {
    let mut uuid = [0; 16];
    match getrandom::fill(&mut uuid) {
        Ok(()) => Ok(uuid),
        // Old sandboxes refuse the system call but have the device.
        Err(why) => std::fs::File::open("/dev/urandom")
            .and_then(|mut device| device.read_exact(&mut uuid))
            .map(|()| uuid)
            .map_err(|_| format!("cannot get random numbers: {why}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_identity_of_the_host_stays_and_has_its_parts() {
        assert_eq!(host_id(), host_id());
        assert_eq!(host_id().split('/').filter(|part| !part.is_empty()).count(), 3);
    }
}
