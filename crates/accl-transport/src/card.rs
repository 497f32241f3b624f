//! What an endpoint tells its peers through the store. Stub.

use std::net::SocketAddr;

use accl_types::{Error, Result};

/// Who an endpoint is and how it can be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// [`crate::PROTOCOL_VERSION`] of the process.
    pub version: u32,
    /// Random identity of the endpoint; the smaller one of a pair connects.
    pub uuid: [u8; 16],
    /// Process id in its own namespace.
    pub pid: u32,
    /// Effective user id.
    pub uid: u32,
    /// Name of the machine, for messages.
    pub hostname: String,
    /// Identity of the host: endpoints share memory only when theirs are equal.
    pub host_id: String,
    /// Where it listens, best first; loopback addresses are for endpoints with the same `host_id`.
    pub addresses: Vec<SocketAddr>,
    /// Abstract name of its Unix socket, empty when it has none.
    pub unix_name: String,
    /// Transports it takes, in its order.
    pub transports: Vec<String>,
}

impl Card {
    /// One line of text without blanks at its ends.
    pub fn to_text(&self) -> String {
        String::new()
    }

    /// Reads what [`Card::to_text`] wrote.
    ///
    /// # Errors
    /// `Rendezvous` for anything else; never panics.
    pub fn from_text(_text: &str) -> Result<Card> {
        Err(Error::rendezvous("no card"))
    }

    /// Host and process for messages: `node3 pid 4711`.
    pub fn place(&self) -> String {
        format!("{} pid {}", self.hostname, self.pid)
    }
}
