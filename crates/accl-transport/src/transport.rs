//! Interface between an endpoint and a transport: the rows of the transport table, and the steps that turn a handshake
//! into a link.
//!
//! Owns the types of the transport table and no transport.
//! An endpoint opens a [`Provider`] for each transport that it uses. When two processes meet over a [`Bootstrap`], each
//! creates a [`HalfLink`] and sends the other its [`Address`]. Then each half becomes a link.
//! Read [`Transport`] first; docs/adding-a-transport.md describes the steps one by one.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::collectives::Collectives;
use crate::fork::Fd;
use crate::{Settings, Waker, Watched};

/// Maximum bytes of a transport's name.
pub const MAX_NAME_BYTES: usize = 31;
/// Maximum bytes of an [`Address`].
pub const MAX_ADDRESS_BYTES: usize = 1024;
/// Maximum number of descriptors in an [`Address`].
pub const MAX_ADDRESS_DESCRIPTORS: usize = 4;

/// Opens a transport for one endpoint.
pub type Open = dyn Fn(&Local<'_>) -> Box<dyn Provider> + Send + Sync;

/// A row of the table of transports.
#[derive(Clone)]
pub struct Transport {
    /// Name in `ACCL_TRANSPORTS`, in the handshake and in [`accl_wire::Link::transport`]. At most [`MAX_NAME_BYTES`]
    /// lower-case letters, digits and `_`.
    pub name: &'static str,
    /// One sentence for the documentation.
    pub about: &'static str,
    /// Kind of bootstrap connection over which two processes meet before there is a link.
    pub bootstrap: Bootstrap,
    /// Number of descriptors that a link keeps open, including the bootstrap socket.
    pub descriptors: usize,
    /// Whether frames lie in memory that both processes share, so that neither polling nor sending needs a system call.
    /// Calls poll such links often, send encoded data without checksums, and are planned with the costs of shared
    /// memory. Calls over other links are planned with the costs of tcp.
    /// [`accl_wire::Link::polls_without_syscall`] returns the same value.
    pub polls_without_syscall: bool,
    /// Called once for each endpoint that uses the transport.
    pub open: &'static Open,
    /// Runs whole collectives, if the transport's library can; else `None`.
    pub collectives: Option<&'static dyn Collectives>,
}

impl fmt::Debug for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transport")
            .field("name", &self.name)
            .field("bootstrap", &self.bootstrap)
            .finish_non_exhaustive()
    }
}

/// Bootstrap connection over which two processes meet. The link receives its socket. The link may send over the socket,
/// or keep it to detect the end of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bootstrap {
    /// Unix socket, between processes of one host and user. It can pass descriptors.
    Unix,
    /// TCP connection, within a host or between hosts.
    Tcp,
}

/// The process that opens a transport.
#[derive(Clone, Copy, Debug)]
pub struct Local<'a> {
    /// Settings of the endpoint that opens the transport.
    pub settings: &'a Settings,
    /// Ends the endpoint's sleep. Over [`Bootstrap::Unix`] its descriptor may be sent to peers.
    pub waker: &'a Arc<Waker>,
}

/// A transport that an endpoint has opened. Its methods must not block.
pub trait Provider: Send {
    /// Creates this side's half of a link to a process that this process has connected to.
    ///
    /// # Errors
    /// A clause with the reason why there is no half link. The caller then tries the next transport.
    fn offer(&self) -> Result<Box<dyn HalfLink>, String>;

    /// Creates this side's half of a link to a process that has connected to this one and has sent its address. No
    /// payload of the link will be longer than `max_payload_bytes`.
    ///
    /// # Errors
    /// A clause with the reason why there is no half link. The reason is sent to the peer.
    fn accept(&self, peer: PeerAddress, max_payload_bytes: usize) -> Result<Box<dyn HalfLink>, String>;

    /// Returns the same transport for another lane of the process, whose sleep `waker` ends. Limits of the transport
    /// apply to both together.
    fn sibling(&self, waker: &Arc<Waker>) -> Box<dyn Provider>;
}

/// This process's half of a link that is being created.
pub trait HalfLink: Send {
    /// Returns the data that the peer needs to know about this half.
    fn address(&self) -> Address<'_>;

    /// Called once the address has been sent: resources that were kept only for the peer may be released.
    fn forget_address(&mut self) {}

    /// Takes the accepting process's answer. Called only on a half from [`Provider::offer`]. Payloads will have at most
    /// `max_payload_bytes`.
    ///
    /// # Errors
    /// A clause that names the part of the answer that does not fit.
    fn take_answer(&mut self, peer: PeerAddress, max_payload_bytes: usize) -> Result<(), String>;

    /// Returns what differs from the configuration, such as `shm uses rings of 256 KiB instead of ACCL_RING_BYTES`, and
    /// the reason. The endpoint logs it once for all links of the transport.
    fn compromise(&self) -> Option<(String, String)> {
        None
    }

    /// Turns the half into a link. Both sides are ready.
    ///
    /// # Errors
    /// A clause with the reason why the link cannot be created after all. The peer already has a link and loses it.
    /// Therefore check what can fail in [`Provider::accept`] and [`HalfLink::take_answer`].
    fn finish(self: Box<Self>, agreed: Agreed) -> Result<Box<dyn Watched>, String>;
}

/// Provider, and half link, of a transport whose links need only the bootstrap socket. The function makes a link from
/// the agreed values.
#[derive(Clone, Copy, Debug)]
pub struct OverBootstrap(pub fn(Agreed) -> Box<dyn Watched>);

impl Provider for OverBootstrap {
    fn offer(&self) -> Result<Box<dyn HalfLink>, String> {
        Ok(Box::new(*self))
    }

    fn accept(&self, _peer: PeerAddress, _max_payload_bytes: usize) -> Result<Box<dyn HalfLink>, String> {
        Ok(Box::new(*self))
    }

    fn sibling(&self, _waker: &Arc<Waker>) -> Box<dyn Provider> {
        Box::new(*self)
    }
}

impl HalfLink for OverBootstrap {
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

/// Data that one half of a link sends to the other.
#[derive(Debug, Default)]
pub struct Address<'a> {
    /// At most [`MAX_ADDRESS_BYTES`] bytes.
    pub bytes: Vec<u8>,
    /// At most [`MAX_ADDRESS_DESCRIPTORS`] descriptors; only over [`Bootstrap::Unix`].
    pub descriptors: Vec<BorrowedFd<'a>>,
}

/// [`Address`] as the other side receives it.
#[derive(Debug, Default)]
pub struct PeerAddress {
    /// The bytes of [`Address::bytes`].
    pub bytes: Vec<u8>,
    /// The descriptors of [`Address::descriptors`], owned by this process.
    pub descriptors: Vec<Fd>,
}

/// Values that both sides know when a link begins.
#[derive(Debug)]
pub struct Agreed {
    /// The bootstrap socket: connected, non-blocking, and read up to the end of the handshake.
    pub socket: Fd,
    /// Maximum bytes of one payload, the same on both sides.
    pub max_payload_bytes: usize,
    /// Host and process of the peer, for messages.
    pub peer: String,
}
