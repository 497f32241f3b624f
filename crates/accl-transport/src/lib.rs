//! Frames between processes: shared memory, TCP, and loopback for tests.
//!
//! Owns connecting ([`Endpoint`]), moving frames (`Link` of accl-wire) and sleeping ([`Poller`]).
//! This crate does not know calls, groups or ranks. It blocks only in [`Endpoint::sleep`], [`Endpoint::connect`] and
//! [`Poller::wait`].
//! The content of frames belongs to `accl-wire`; here a frame is opaque bytes.

mod bitmap;
pub mod collectives;
mod credentials;
mod descriptors;
mod endpoint;
mod faulty;
mod fork;
mod host;
pub mod loopback;
mod mapping;
mod net;
mod plugin;
mod poller;
mod refusal;
mod ring;
mod rows;
mod settings;
mod shm;
mod stream_link;
mod sync;
mod table_collectives;
mod tcp;
mod traced;
pub mod transport;

pub use accl_wire::table::{CollectiveV1, TRANSPORT_ABI, TransportV1};
pub use endpoint::{
    ConnectError, Endpoint, Host, MAX_ANSWER_BYTES, MAX_NOTE_BYTES, Missing, Unreachable, Wanted, check_peers,
    likely_transport,
};
pub use faulty::{Faults, Faulty};
pub use fork::{Fd, fork_generation, forked};
pub use host::process_info;
pub use plugin::register_table;
pub use poller::{LinkEvents, Poller, Waker, Watched};
pub use rows::{TRANSPORTS, announce, check, find, named, register, transports};
pub use settings::Settings;
pub use stream_link::{ByteStream, StreamLink};
pub use traced::{FrameDirection, FrameObserver, Traced};
pub use transport::Transport;
