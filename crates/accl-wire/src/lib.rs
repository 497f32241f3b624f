//! What processes say to each other, and the interface of what carries it: frames, [`Link`], and who an [`EndpointInfo`] describes.
//!
//! Owns the layout of frames and the contract of links; knows no transport, thread, clock, socket or environment. A protocol needs
//! nothing else to speak, and a transport nothing else to be spoken over. Read [`frame::Header`] and [`Link`] first.
#![deny(unsafe_code)]

mod endpoint;
pub mod frame;
mod link;
mod news;
pub mod table;

pub use endpoint::{EndpointInfo, Stance, hex, lane_uuid};
pub use link::{Answers, Frame, HEAD_BYTES, Link, Place, look_until};
pub use news::{NewsBoard, Slot};

/// Version of all that processes say to each other: handshake, rings, frames, signatures, tiles, what ranks tell of themselves, the numbers of
/// algorithms and codecs. Processes of different versions refuse each other, and each error has both versions.
pub const PROTOCOL_VERSION: u32 = 13;
