//! The emulator's protocol: requests of a host to an emulated engine and its replies, one at a time, in JSON.
//!
//! Owns the text of requests and replies, in both directions. The requesting and the replying end own the sockets. Read [`Request`] first.

mod about;
mod json;
mod reply;
mod request;

pub use about::{About, difference};
pub use json::{data_from_json, data_to_json};
pub use reply::{Reply, Status};
pub use request::{BadRequest, Request};
