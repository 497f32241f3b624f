//! Fallbacks that cost speed, each reported once: a fallback with one peer of this host usually holds for all.

use std::collections::HashSet;

use accl_wire::EndpointInfo;

/// A fallback that costs speed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    /// A link that is not as configured: name of the transport, the difference, and the reason.
    Compromise(&'static str, String, String),
    /// A link over the second transport, because the first one failed for this reason.
    Fallback(&'static str, String, &'static str),
}

/// Warnings that no caller has taken yet, and what was warned about before.
#[derive(Debug, Default)]
pub(super) struct Warnings {
    pending: Vec<String>,
    compromises: HashSet<&'static str>,
    fallbacks: HashSet<&'static str>,
    no_descriptors: bool,
}

impl Warnings {
    pub(super) fn take(&mut self) -> Vec<String> {
        std::mem::take(&mut self.pending)
    }

    /// Warns that the transports in `lost` cannot be used, and that the transports in `left` are used instead.
    pub(super) fn no_unix_socket(&mut self, lost: &[&'static str], left: &[&'static str], why: &str) {
        self.fallbacks.extend(lost);
        let (lost, left) = (lost.join(","), left.join(","));
        self.pending.push(format!(
            "{left} is used instead of {lost}, which costs speed: cannot create a Unix socket: {why}; set \
             ACCL_TRANSPORTS={left} to silence this warning"
        ));
    }

    pub(super) fn no_descriptors(&mut self, why: &str) {
        if !std::mem::replace(&mut self.no_descriptors, true) {
            self.pending.push(format!(
                "connections to peers wait for descriptors: {why}; raise the hard limit of descriptors (`ulimit -Hn`) \
                 before the job starts, or set ACCL_TRANSPORTS=tcp: tcp takes one descriptor per peer, shared memory \
                 three"
            ));
        }
    }

    pub(super) fn no_files_on_host(&mut self) {
        if !std::mem::replace(&mut self.no_descriptors, true) {
            self.pending.push(
                "connections to peers wait: this host has reached its limit of open files; raise its sysctl fs.file-max"
                    .to_owned(),
            );
        }
    }

    pub(super) fn add(&mut self, trouble: &Trouble, peer: &EndpointInfo) {
        let peer = peer.host_and_pid();
        match trouble {
            Trouble::Compromise(transport, what, why) => {
                if self.compromises.insert(transport) {
                    self.pending
                        .push(format!("{what} with {peer} (and maybe other peers), which costs bandwidth: {why}"));
                }
            }
            Trouble::Fallback(wanted, why, used) => {
                if self.fallbacks.insert(wanted) {
                    self.pending.push(format!(
                        "{used} is used instead of {wanted} with {peer} (and maybe other peers), which costs speed: {why}; \
                         set ACCL_TRANSPORTS={used} to silence this warning"
                    ));
                }
            }
        }
    }
}
