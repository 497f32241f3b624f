//! The wire protocol between processes and the interface that transports implement: frames, [`Link`] and
//! [`EndpointInfo`].
//!
//! This crate owns the layout of frames and the contract of links. It knows no transport, thread, clock, socket or
//! environment. The executor and every transport depend on it and not on each other. Read [`frame::Header`] and
//! [`Link`] first.
#![deny(unsafe_code)]

mod endpoint;
mod event_bitmap;
pub mod frame;
mod link;
pub mod table;

pub use endpoint::{EndpointInfo, Stance, hex, lane_uuid};
pub use event_bitmap::{EventBitmap, Slot};
pub use link::{Answers, Frame, FrameSlot, HEAD_BYTES, Link, poll_until};

/// Version of the whole protocol: handshake, rings, frames, signatures, tiles, the texts that ranks publish in the
/// store, and the numbers of algorithms and codecs. Processes of different versions refuse each other, and the error
/// names both versions.
pub const PROTOCOL_VERSION: u32 = 14;
