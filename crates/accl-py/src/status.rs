//! Errors as data, which cross the bridge instead of a string.

use std::time::Duration;

use accl_engine::{PhaseTimes, Phases};
use accl_types::{Error, ErrorKind};

use crate::bridge::ffi::{Described, ErrorType, Kind, Numbered, Outcome, PhaseNanos, Profiled, Status, Waited};
use crate::guard::FromError;

/// The reason for leaving a call that has not failed. Added as a note to the exception that the handler raised, and
/// sent to peers.
pub(crate) const INTERRUPTED: &str = "interrupted by a Python signal handler (such as for Ctrl-C) inside a blocking \
    call, which aborts its group on all ranks; create a new group, or wait for a call issued with async_op=True, which \
    may be interrupted";

impl Status {
    /// Success.
    pub(crate) fn ok() -> Self {
        Self { kind: Kind::Ok, message: String::new(), rank: -1, peer: -1, must_leak_memory: false }
    }

    /// Whether this is success.
    pub(crate) fn is_ok(&self) -> bool {
        self.kind == Kind::Ok
    }

    /// The error that this status represents, or `None` for success.
    pub(crate) fn to_error(&self) -> Option<Error> {
        if self.is_ok() {
            return None;
        }
        let kind = ErrorKind::from_code(self.kind.repr).unwrap_or(ErrorKind::Internal);
        Some(Error::new(kind, self.message.strip_prefix("accl: ").unwrap_or(&self.message)))
    }
}

impl FromError for Status {
    fn from_error(error: Error) -> Self {
        let number = |rank: Option<accl_types::Rank>| rank.map_or(-1, |rank| i64::from(rank.0));
        Self {
            kind: Kind { repr: error.kind as u8 },
            rank: number(error.context.rank),
            peer: number(error.context.peer),
            must_leak_memory: error.context.must_leak_memory,
            message: error.to_string(),
        }
    }
}

impl Waited {
    /// An outcome without an error.
    pub(crate) fn plain(how: Outcome) -> Self {
        Self { how, status: Status::ok() }
    }

    /// A Python signal handler raised during a wait.
    pub(crate) fn interrupted() -> Self {
        Self::interrupted_with(false)
    }

    /// A Python signal handler raised during a call whose memory may have to be kept.
    pub(crate) fn interrupted_with(must_leak_memory: bool) -> Self {
        let status = Status { must_leak_memory, ..Status::from_error(Error::aborted(INTERRUPTED)) };
        Self { how: Outcome::Interrupted, status }
    }
}

impl FromError for Waited {
    fn from_error(error: Error) -> Self {
        Self { how: Outcome::Failed, status: Status::from_error(error) }
    }
}

impl Numbered {
    /// A number.
    pub(crate) fn of(value: i64) -> Self {
        Self { value, status: Status::ok() }
    }
}

impl FromError for Numbered {
    fn from_error(error: Error) -> Self {
        Self { value: -1, status: Status::from_error(error) }
    }
}

impl PhaseNanos {
    /// The times of a call that has ended, if they were recorded.
    pub(crate) fn of(phases: Option<&Phases>) -> Self {
        let nanos = |time: Duration| i64::try_from(time.as_nanos()).unwrap_or(i64::MAX);
        let times = phases.and_then(Phases::times);
        let PhaseTimes { queue, bus, peers, transfer, reduce } = times.unwrap_or_default();
        let [queue, bus, peers, transfer, reduce] = [queue, bus, peers, transfer, reduce].map(nanos);
        Self { is_known: times.is_some(), queue, bus, peers, transfer, reduce }
    }
}

impl FromError for PhaseNanos {
    fn from_error(_: Error) -> Self {
        Self::of(None)
    }
}

impl FromError for Profiled {
    fn from_error(error: Error) -> Self {
        Self { waited: Waited::from_error(error), phases: PhaseNanos::of(None) }
    }
}

impl FromError for Described {
    fn from_error(error: Error) -> Self {
        Self { text: String::new(), status: Status::from_error(error) }
    }
}

impl FromError for ErrorType {
    fn from_error(_: Error) -> Self {
        Self::CommError
    }
}
