//! What processes say to each other, and the interface of what carries it: frames, and [`Link`].
//!
//! Owns the layout of frames and the contract of links; knows no transport, thread, clock, socket or environment. A protocol needs
//! nothing else to speak, and a transport nothing else to be spoken over. Read [`frame::Header`] and [`Link`] first.
#![deny(unsafe_code)]

pub mod frame;
mod link;

pub use link::{Answers, Frame, HEAD_BYTES, Link, Place, look_until};

/// Version of all that processes say to each other: handshake, rings, frames, signatures, tiles, rank cards, the numbers of
/// algorithms and codecs. Processes of different versions refuse each other, and each error has both versions.
pub const PROTOCOL_VERSION: u32 = 7;
