//! What a transport is to an endpoint: a row of a table, and what makes links out of a handshake.
//!
//! Owns the types of that table and no transport. An endpoint opens a [`Provider`] for each transport that it uses. When two processes
//! meet over a [`Carrier`], each makes a [`HalfLink`] and tells the other its [`Address`]; then either half becomes a link. Read
//! [`Transport`] first; docs/adding-a-transport.md goes through one step by step.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::collectives::Collectives;
use crate::fork::Fd;
use crate::{Settings, Waker, Watched};

/// Most bytes of a transport's name.
pub const MAX_NAME_BYTES: usize = 31;
/// Most bytes of an [`Address`].
pub const MAX_ADDRESS_BYTES: usize = 1024;
/// Most descriptors of an [`Address`].
pub const MAX_ADDRESS_DESCRIPTORS: usize = 4;

/// Opens a transport for one endpoint.
pub type Open = dyn Fn(&Local<'_>) -> Box<dyn Provider> + Send + Sync;

/// A row of the table of transports.
#[derive(Clone)]
pub struct Transport {
    /// Name in `ACCL_TRANSPORTS`, in the handshake and in [`accl_wire::Link::transport`]: at most [`MAX_NAME_BYTES`] small letters,
    /// digits and `_`.
    pub name: &'static str,
    /// One sentence for the documentation.
    pub about: &'static str,
    /// What two processes meet over before there is a link.
    pub carrier: Carrier,
    /// Descriptors that a link keeps open, the carrier's socket among them.
    pub descriptors: usize,
    /// Frames lie in memory that both processes share: no look and no send needs the system. Calls look at such links often, send encoded
    /// data without checksums, and are planned with the costs of shared memory, those over other links with the costs of tcp.
    /// [`accl_wire::Link::is_cheap_to_look_at`] answers the same.
    pub is_cheap_to_look_at: bool,
    /// Called once for each endpoint that uses the transport.
    pub open: &'static Open,
    /// Does whole collectives, if the transport's library can.
    pub collectives: Option<&'static dyn Collectives>,
}

impl fmt::Debug for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transport").field("name", &self.name).field("carrier", &self.carrier).finish_non_exhaustive()
    }
}

/// A connection over which two processes meet. Its socket goes to the link, which may use it, or keep it as what tells of the
/// peer's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Carrier {
    /// A Unix socket: between processes of one host and user. It passes descriptors.
    Unix,
    /// A TCP connection, also between hosts.
    Tcp,
}

/// The process that opens a transport.
#[derive(Clone, Copy, Debug)]
pub struct Local<'a> {
    /// Of its endpoint.
    pub settings: &'a Settings,
    /// Ends its sleep. Over [`Carrier::Unix`] its descriptor may go to peers.
    pub waker: &'a Arc<Waker>,
}

/// A transport that an endpoint has opened. Its methods must not block.
pub trait Provider: Send {
    /// A half of a link to a process that this one has connected to.
    ///
    /// # Errors
    /// A clause that says why there is none: the next transport is tried.
    fn offer(&self) -> Result<Box<dyn HalfLink>, String>;

    /// A half of a link to a process that has connected to this one and has sent its address. Of the links' payloads none will be
    /// longer than `max_payload_bytes`.
    ///
    /// # Errors
    /// A clause that says why there is none: the peer is told.
    fn accept(&self, peer: PeerAddress, max_payload_bytes: usize) -> Result<Box<dyn HalfLink>, String>;

    /// The same transport for another lane of the process, whose sleep `waker` ends. What is limited is limited for both together.
    fn beside(&self, waker: &Arc<Waker>) -> Box<dyn Provider>;
}

/// A link that is being made, as far as this process is concerned.
pub trait HalfLink: Send {
    /// What the peer must know of this half.
    fn address(&self) -> Address<'_>;

    /// The address has been sent: what was kept for the peer alone may go.
    fn forget_address(&mut self) {}

    /// What the accepting process has answered; called on a half that was offered, and on no other. Payloads will have at most
    /// `max_payload_bytes`.
    ///
    /// # Errors
    /// A clause that says what does not fit.
    fn take_answer(&mut self, peer: PeerAddress, max_payload_bytes: usize) -> Result<(), String>;

    /// What is not as configured, as `rings of 256 KiB instead of ACCL_RING_BYTES are used`, and why. It is told once for all links of the
    /// transport.
    fn compromise(&self) -> Option<(String, String)> {
        None
    }

    /// Both sides are ready.
    ///
    /// # Errors
    /// A clause that says why it cannot be after all. The peer has a link by then and loses it, so what can fail belongs into
    /// [`Provider::accept`] and [`HalfLink::take_answer`].
    fn finish(self: Box<Self>, agreed: Agreed) -> Result<Box<dyn Watched>, String>;
}

/// The provider of a transport whose links need the carrier's socket and nothing else, and a half of them: this makes a link of what is
/// agreed.
#[derive(Clone, Copy, Debug)]
pub struct OverCarrier(pub fn(Agreed) -> Box<dyn Watched>);

impl Provider for OverCarrier {
    fn offer(&self) -> Result<Box<dyn HalfLink>, String> {
        Ok(Box::new(*self))
    }

    fn accept(&self, _peer: PeerAddress, _max_payload_bytes: usize) -> Result<Box<dyn HalfLink>, String> {
        Ok(Box::new(*self))
    }

    fn beside(&self, _waker: &Arc<Waker>) -> Box<dyn Provider> {
        Box::new(*self)
    }
}

impl HalfLink for OverCarrier {
    fn address(&self) -> Address<'_> {
        Address::default()
    }

    fn take_answer(&mut self, _peer: PeerAddress, _max_payload_bytes: usize) -> Result<(), String> {
        Ok(())
    }

    fn finish(self: Box<Self>, agreed: Agreed) -> Result<Box<dyn Watched>, String> {
        Ok((self.0)(agreed))
    }
}

/// What one half of a link tells the other.
#[derive(Debug, Default)]
pub struct Address<'a> {
    /// At most [`MAX_ADDRESS_BYTES`].
    pub bytes: Vec<u8>,
    /// At most [`MAX_ADDRESS_DESCRIPTORS`], over [`Carrier::Unix`] alone.
    pub descriptors: Vec<BorrowedFd<'a>>,
}

/// As [`Address`], on the other side.
#[derive(Debug, Default)]
pub struct PeerAddress {
    /// As in [`Address`].
    pub bytes: Vec<u8>,
    /// As in [`Address`].
    pub descriptors: Vec<Fd>,
}

/// What both sides know when a link begins.
#[derive(Debug)]
pub struct Agreed {
    /// The carrier's: connected, non-blocking, and read up to the end of the handshake.
    pub socket: Fd,
    /// Most bytes of one payload, the same on both sides.
    pub max_payload_bytes: usize,
    /// Host and process of the peer, for messages.
    pub peer: String,
}
