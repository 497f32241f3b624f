//! Fallbacks that cost speed, told once each: what holds for one peer of this host holds for all.

use crate::Card;

/// A fallback that costs speed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    /// Rings of fewer bytes than configured.
    SmallerRings(usize, String),
    /// No shared memory at all.
    NoSharedMemory(String),
}

/// What has been told and what is still to be told.
#[derive(Debug, Default)]
pub(super) struct Warnings {
    untold: Vec<String>,
    smaller_rings: bool,
    no_shared_memory: bool,
    no_descriptors: bool,
}

impl Warnings {
    pub(super) fn take(&mut self) -> Vec<String> {
        std::mem::take(&mut self.untold)
    }

    pub(super) fn no_unix_socket(&mut self, why: &str) {
        if !std::mem::replace(&mut self.no_shared_memory, true) {
            self.untold.push(format!(
                "tcp is used instead of shared memory, which costs speed: no Unix socket: {why}; \
                 ACCL_TRANSPORTS=tcp silences this"
            ));
        }
    }

    pub(super) fn no_descriptors(&mut self, why: &str) {
        if !std::mem::replace(&mut self.no_descriptors, true) {
            self.untold.push(format!(
                "connections to peers wait for descriptors: {why}; raise the hard limit of descriptors (`ulimit -Hn`) \
                 before the job starts, or use ACCL_TRANSPORTS=tcp, which takes one for each peer where shared memory \
                 takes three"
            ));
        }
    }

    pub(super) fn no_files_on_host(&mut self) {
        if !std::mem::replace(&mut self.no_descriptors, true) {
            self.untold.push(
                "connections to peers wait, because this host has no file left to open; raise its sysctl fs.file-max"
                    .to_owned(),
            );
        }
    }

    pub(super) fn add(&mut self, trouble: &Trouble, peer: &Card) {
        let peer = peer.place();
        match trouble {
            Trouble::SmallerRings(bytes, why) => {
                if !std::mem::replace(&mut self.smaller_rings, true) {
                    self.untold.push(format!(
                        "rings of {} KiB instead of ACCL_RING_BYTES are used with {peer} (and maybe others), which \
                         costs bandwidth: {why}",
                        bytes / 1024
                    ));
                }
            }
            Trouble::NoSharedMemory(why) => {
                if !std::mem::replace(&mut self.no_shared_memory, true) {
                    self.untold.push(format!(
                        "tcp is used instead of shared memory with {peer} (and maybe others), which costs speed: {why}; \
                         ACCL_TRANSPORTS=tcp silences this"
                    ));
                }
            }
        }
    }
}
