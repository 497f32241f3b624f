//! Which host this is, as far as sharing memory is concerned.

use std::io::Read;

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

/// A random identity.
pub(crate) fn random_uuid() -> Result<[u8; 16], String> {
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
