//! One error type with a closed set of kinds. `accl-py` maps each kind to one of torch's exception classes.

use std::fmt;

use crate::{Collective, Rank, Seq};

/// Result with the crate-wide [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// The cause of an error. The set is closed: to add a kind, choose its exception class in Python.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ErrorKind {
    /// Shape, dtype, root, list length or split sizes do not fit. Python: `ValueError`.
    InvalidArgument = 0,
    /// Sparse, wrong device, not a tensor. Python: `TypeError`.
    InvalidType = 1,
    /// An operator or dtype that is not offered. Python: `NotImplementedError`.
    Unsupported = 2,
    /// Bad or unknown `ACCL_*` variable or option. Python: `ValueError`.
    Configuration = 3,
    /// Peers disagree on the call. Python: `DistBackendError`.
    Mismatch = 4,
    /// A deadline passed. Python: `DistBackendError`.
    Timeout = 5,
    /// A peer process is gone. Python: `DistNetworkError`.
    PeerLost = 6,
    /// A connection broke or could not be established. Python: `DistNetworkError`.
    Network = 7,
    /// The store could not be read or written. Python: `DistStoreError`.
    Rendezvous = 8,
    /// A malformed or unexpected frame. Python: `DistBackendError`.
    Protocol = 9,
    /// A device reported an error. Python: `DistBackendError`.
    Device = 10,
    /// Out of memory or descriptors. Python: `MemoryError`.
    Exhausted = 11,
    /// The group was shut down or aborted earlier; the message quotes the first cause. Python: `DistBackendError`.
    Aborted = 12,
    /// A caught panic or a broken invariant. Python: `DistBackendError`.
    Internal = 13,
}

impl ErrorKind {
    /// Every kind, in code order.
    pub const ALL: &'static [ErrorKind] = &[
        ErrorKind::InvalidArgument,
        ErrorKind::InvalidType,
        ErrorKind::Unsupported,
        ErrorKind::Configuration,
        ErrorKind::Mismatch,
        ErrorKind::Timeout,
        ErrorKind::PeerLost,
        ErrorKind::Network,
        ErrorKind::Rendezvous,
        ErrorKind::Protocol,
        ErrorKind::Device,
        ErrorKind::Exhausted,
        ErrorKind::Aborted,
        ErrorKind::Internal,
    ];

    /// The kind with this code, or `None`.
    pub fn from_code(code: u8) -> Option<ErrorKind> {
        Self::ALL.get(code as usize).copied()
    }
}

/// Where an error happened. Every known fact is filled in; the others are `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Context {
    /// Name of the group.
    pub group: Option<String>,
    /// The call's kind.
    pub collective: Option<Collective>,
    /// The call's sequence number in its group.
    pub seq: Option<Seq>,
    /// The rank that reports.
    pub rank: Option<Rank>,
    /// The rank that is to blame or was waited for.
    pub peer: Option<Rank>,
    /// Whether a library (such as MPI) or a device that cannot be stopped may still write to the call's tensors. If so,
    /// their memory is not freed while the process lives.
    pub must_leak_memory: bool,
}

/// An error with its kind, a message, and its location.
///
/// The message is lower case without a full stop: cause, numbers, remedy. [`fmt::Display`] puts the location before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The cause of the error.
    pub kind: ErrorKind,
    /// Cause, numbers and remedy.
    pub message: String,
    /// Where it happened. Boxed so that a `Result` stays small.
    pub context: Box<Context>,
}

impl Error {
    /// Creates an error of `kind` without a location.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), context: Box::default() }
    }

    /// Adds the group's name unless it is already set.
    #[must_use]
    pub fn in_group(mut self, group: &str) -> Self {
        self.context.group.get_or_insert_with(|| group.to_owned());
        self
    }

    /// Adds the call unless it is already set.
    #[must_use]
    pub fn in_call(mut self, collective: Collective, seq: Seq) -> Self {
        self.context.collective.get_or_insert(collective);
        self.context.seq.get_or_insert(seq);
        self
    }

    /// Adds only the kind of call, for arguments refused before the call got a sequence number.
    #[must_use]
    pub fn of(mut self, collective: Collective) -> Self {
        self.context.collective.get_or_insert(collective);
        self
    }

    /// Adds the reporting rank unless it is already set.
    #[must_use]
    pub fn on_rank(mut self, rank: Rank) -> Self {
        self.context.rank.get_or_insert(rank);
        self
    }

    /// Marks the error: the memory of the call's tensors must not be freed.
    #[must_use]
    pub fn leaking_memory(mut self) -> Self {
        self.context.must_leak_memory = true;
        self
    }

    /// Adds the rank to blame unless it is already set.
    #[must_use]
    pub fn with_peer(mut self, peer: Rank) -> Self {
        self.context.peer.get_or_insert(peer);
        self
    }
}

/// Constructors, one per kind: `Error::timeout("...")`.
macro_rules! constructors {
    ($($name:ident = $kind:ident;)*) => {
        impl Error {
            $(
                #[doc = concat!("An [`ErrorKind::", stringify!($kind), "`] error.")]
                pub fn $name(message: impl Into<String>) -> Self {
                    Self::new(ErrorKind::$kind, message)
                }
            )*
        }
    };
}

constructors! {
    invalid_argument = InvalidArgument;
    invalid_type = InvalidType;
    unsupported = Unsupported;
    configuration = Configuration;
    mismatch = Mismatch;
    timeout = Timeout;
    peer_lost = PeerLost;
    network = Network;
    rendezvous = Rendezvous;
    protocol = Protocol;
    device = Device;
    exhausted = Exhausted;
    aborted = Aborted;
    internal = Internal;
}

/// Addition to the message if the call's tensors may still be written to. Only the rank that owns the tensors shows it,
/// not ranks to which the error is forwarded.
pub const HOLDS_MEMORY: &str = "; the tensors of this call may still be written to, and their memory is never freed: do not use them, and end this \
    process when you can";

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("accl: ")?;
        if let Some(rank) = self.context.rank {
            write!(f, "[rank {rank}] ")?;
        }
        if let Some(collective) = self.context.collective {
            write!(f, "{collective}")?;
            if let Some(seq) = self.context.seq {
                write!(f, " seq {seq}")?;
            }
            if let Some(group) = &self.context.group {
                write!(f, " in group {group}")?;
            }
            f.write_str(": ")?;
        } else if let Some(group) = &self.context.group {
            write!(f, "group {group}: ")?;
        }
        f.write_str(&self.message)?;
        if self.context.must_leak_memory {
            f.write_str(HOLDS_MEMORY)?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_starts_with_its_place() {
        let error = Error::timeout("rank 3 sent nothing for 30000 ms")
            .in_group("dp")
            .in_call(Collective::AllReduce, Seq(42))
            .on_rank(Rank(1));
        assert_eq!(error.to_string(), "accl: [rank 1] all_reduce seq 42 in group dp: rank 3 sent nothing for 30000 ms");
    }

    #[test]
    fn an_error_says_that_the_memory_of_the_call_must_stay() {
        let error = Error::timeout("late").leaking_memory();
        assert!(
            error.to_string().starts_with("accl: late; the tensors of this call may still be written to"),
            "{error}"
        );
    }

    #[test]
    fn the_first_place_wins() {
        let error = Error::internal("x").on_rank(Rank(1)).on_rank(Rank(2));
        assert_eq!(error.context.rank, Some(Rank(1)));
    }

    #[test]
    fn every_code_leads_back_to_its_kind() {
        for (code, &kind) in ErrorKind::ALL.iter().enumerate() {
            assert_eq!(ErrorKind::from_code(code as u8), Some(kind));
            assert_eq!(kind as usize, code);
        }
    }
}
