//! Frames between processes: shared memory, TCP, and loopback for tests.
//!
//! Owns connecting ([`Endpoint`]), carrying ([`Link`]) and sleeping ([`Poller`]); knows nothing of calls, groups or
//! ranks, and never blocks except in [`Endpoint::sleep`], [`Endpoint::connect`] and [`Poller::wait`]. [`frame`] is the codec of what the
//! engine sends; links treat it as opaque bytes.

mod card;
mod credentials;
mod descriptors;
mod endpoint;
mod faulty;
mod fork;
pub mod frame;
mod host;
mod link;
pub mod loopback;
mod net;
mod plugin;
mod poller;
mod ring;
mod rows;
mod settings;
mod shm;
mod stream_link;
mod sync;
mod tcp;
mod traced;
pub mod transport;

pub use card::Card;
pub use endpoint::{
    ConnectError, Endpoint, Host, MAX_ANSWER_BYTES, MAX_NOTE_BYTES, Missing, Stance, Unreachable, Wanted, check_peers,
    likely_transport,
};
pub use faulty::{Faults, Faulty};
pub use fork::{Fd, fork_generation, forked};
pub use link::{Answers, Frame, HEAD_BYTES, Link, Place};
pub use plugin::{TRANSPORT_ABI, TransportV1, register_table};
pub use poller::{News, Poller, Waker, Watched};
pub use rows::{TRANSPORTS, find, named, register, transports};
pub use settings::Settings;
pub use stream_link::{ByteStream, StreamLink};
pub use traced::{Tell, Traced, Way};
pub use transport::Transport;

/// Version of all that processes say to each other: handshake, rings, frames, signatures, tiles, rank cards, the numbers of
/// algorithms and codecs. Processes of different versions refuse each other, and each error has both versions.
pub const PROTOCOL_VERSION: u32 = 7;
