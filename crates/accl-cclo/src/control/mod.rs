//! The emulator's protocol: what a host asks of an emulated engine, one request and one reply at a time, in JSON.
//!
//! Owns the text of requests and replies, both ways. Sockets are those of whoever asks or answers. Read [`Request`] first.

mod about;
mod json;
mod reply;
mod request;

pub use about::{About, difference};
pub use json::{data_from_json, data_to_json};
pub use reply::{Reply, Status};
pub use request::{BadRequest, Request};
