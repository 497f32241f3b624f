//! What engines send each other.
//!
//! Owns the header of a message, the request word that stands before it over RDMA, and how a message becomes packets: over UDP and TCP
//! only the first packet of a message has a header, and over RDMA each repeats the request word. Whoever cuts and joins messages keeps the
//! state of a stream in [`Joiner`]. Read [`Header`] and [`packets`] first.

mod header;
mod packet;
mod request_word;

pub use header::{Header, MessageKind, STREAM_OFFSET};
pub use packet::{BadPacket, Cutter, Joined, Joiner, MAX_PACKET_BYTES, Packet, packets};
pub use request_word::{RequestWord, Verb};

/// A header, a request word, and what UDP pads its packets to.
pub const WORD_BYTES: usize = 64;
