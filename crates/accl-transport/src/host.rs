//! Which host this is, as far as sharing memory is concerned.

use std::io::Read;

use accl_types::{Error, Result};
use accl_wire::{EndpointInfo, PROTOCOL_VERSION};

/// Name of the machine, for messages.
pub(crate) fn hostname() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    if name.is_empty() { "unnamed".to_owned() } else { name }
}

/// Equal for two processes only if they may share memory: same boot of the same kernel, same network namespace (in
/// which the Unix sockets have their names), same machine name (cloned virtual machines can share the rest). Whether
/// sharing works is left to the handshake.
pub(crate) fn host_id() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    // Of this thread, whose sockets they will be; the path without thread is for sandboxes that lack it.
    let network =
        ["/proc/thread-self/ns/net", "/proc/self/ns/net"].iter().find_map(|path| std::fs::read_link(path).ok());
    let network = network.map(|target| target.to_string_lossy().into_owned()).unwrap_or_default();
    let network: String = network.chars().filter(char::is_ascii_digit).collect();
    format!("{}/{network}/{}", boot.trim(), hostname())
}

/// This process with a random identity, and nothing by which it could be reached.
///
/// # Errors
/// `Network` when the system has no random numbers.
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

/// A random identity.
pub(crate) fn random_uuid() -> std::result::Result<[u8; 16], String> {
    let mut uuid = [0; 16];
    match getrandom::fill(&mut uuid) {
        Ok(()) => Ok(uuid),
        // Old sandboxes refuse the system call and have the device.
        Err(why) => std::fs::File::open("/dev/urandom")
            .and_then(|mut device| device.read_exact(&mut uuid))
            .map(|()| uuid)
            .map_err(|_| format!("no random numbers: {why}")),
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
