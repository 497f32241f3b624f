//! Wire format between engines.
//!
//! Owns the header of a message, the request word that precedes it over RDMA, and the split of a message into packets. Over UDP and TCP only the
//! first packet of a message has a header; over RDMA every packet repeats the request word. [`Joiner`] holds the state of a stream of packets. Read
//! [`Header`] and [`packets`] first.

mod header;
mod packet;
mod request_word;

pub use header::{Header, MessageKind, STREAM_OFFSET};
pub use packet::{BadPacket, Cutter, Joined, Joiner, MAX_PACKET_BYTES, Packet, packets};
pub use request_word::{RequestWord, Verb};

/// Size in bytes of a header and of a request word, and the unit to which UDP pads its packets.
pub const WORD_BYTES: usize = 64;
