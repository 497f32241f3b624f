//! Frames between processes: shared memory, TCP, and loopback for tests.
//!
//! Owns connecting ([`Endpoint`]), carrying ([`Link`]) and sleeping ([`Poller`]); knows nothing of calls, groups or
//! ranks, and never blocks except in [`Endpoint::sleep`], [`Endpoint::connect`] and [`Poller::wait`]. [`frame`] is the codec of what the
//! engine sends; links treat it as opaque bytes.

mod card;
mod descriptors;
mod endpoint;
mod faulty;
mod fork;
pub mod frame;
mod host;
mod link;
pub mod loopback;
mod net;
mod poller;
mod ring;
mod settings;
mod shm;
mod sync;
mod tcp;
mod traced;

pub use card::Card;
pub use endpoint::{
    ConnectError, Endpoint, Host, MAX_NOTE_BYTES, Missing, Stance, Unreachable, Wanted, check_peers, shares_memory,
};
pub use faulty::{Faults, Faulty};
pub use fork::{fork_generation, forked};
pub use link::{Answers, Frame, HEAD_BYTES, Link, Place};
pub use poller::{News, Poller, Waker, Watched};
pub use settings::Settings;
pub use traced::{Tell, Traced, Way};

/// Version of all that processes say to each other: handshake, rings, frames, signatures, tiles, rank cards, the numbers of
/// algorithms and codecs. Processes of different versions refuse each other, and each error has both versions.
pub const PROTOCOL_VERSION: u32 = 7;

/// A row of [`TRANSPORTS`].
#[derive(Debug)]
pub struct Transport {
    /// Name in `ACCL_TRANSPORTS` and in [`Link::transport`].
    pub name: &'static str,
    /// One sentence for the documentation.
    pub about: &'static str,
}

/// Every transport that can be configured, in the order of preference.
pub const TRANSPORTS: &[Transport] = &[
    Transport { name: "shm", about: "rings in shared memory between processes of one host and user" },
    Transport { name: "tcp", about: "one connection a peer, IPv4 or IPv6" },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_tries_every_transport_in_the_order_of_the_table() {
        let names: Vec<_> = TRANSPORTS.iter().map(|t| t.name).collect();
        assert_eq!(Settings::default().transports, names);
    }
}
