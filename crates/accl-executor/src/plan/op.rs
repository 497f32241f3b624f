//! The operations of a plan.
//!
//! Read [`PlanOp`] first.

use accl_schedule::{Finish, Order};
use accl_types::{Error, Rank};
use smallvec::SmallVec;

use super::encoded::{Coded, Combination};
use super::region::Region;

/// Kind of an operation, with its byte ranges.
#[derive(Debug)]
pub(crate) enum PlanOpKind {
    Send {
        src: Region,
        to: Rank,
    },
    Recv {
        dst: Region,
        from: Rank,
    },
    RecvReduce {
        dst: Region,
        local: Region,
        from: Rank,
        order: Order,
        finish: Finish,
    },
    Copy {
        dst: Region,
        src: Region,
    },
    Reduce {
        dst: Region,
        srcs: Vec<Region>,
        finish: Finish,
    },
    Combine(Box<Combination>),
    /// An external operation, done as one step: no other operation can stream behind it.
    External(ExternalStep),
}

/// Purpose of an external operation of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExternalStep {
    /// Copies the call's tensors into memory that the executor can access.
    CopyIn,
    /// Copies results to their destination.
    CopyOut,
    /// Computes a combination where the tensors lie. Other operations stream behind it, tile by tile.
    Combine,
    /// Does the whole collective.
    Offload,
    /// Waits for the parts of the call that other lanes do.
    Join,
}

impl ExternalStep {
    /// Returns the error of a copy by `worker` that has failed. The worker of a whole call reports a complete error.
    pub(crate) fn failure(self, worker: &str, why: Error) -> Error {
        match self {
            ExternalStep::Offload | ExternalStep::Join => why,
            ExternalStep::CopyIn | ExternalStep::CopyOut | ExternalStep::Combine => {
                let Error { kind, message, context } = why;
                let text =
                    format!("{self} by `{worker}` failed: {message}; check the output of `{worker}` on this rank");
                Error { context, ..Error::new(kind, text) }
            }
        }
    }

    /// Describes an operation in flight, for messages.
    pub(crate) fn describe(self, worker: &str) -> String {
        match self {
            ExternalStep::Join => "the part of the call on other lanes".to_owned(),
            ExternalStep::CopyIn | ExternalStep::CopyOut | ExternalStep::Combine | ExternalStep::Offload => {
                format!("the external operation {self} by `{worker}`")
            }
        }
    }
}

impl std::fmt::Display for ExternalStep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            ExternalStep::CopyIn => "copy-in",
            ExternalStep::CopyOut => "copy-out",
            ExternalStep::Combine => "combine",
            ExternalStep::Offload => "offload",
            ExternalStep::Join => "join",
        })
    }
}

#[derive(Debug)]
pub(crate) struct PlanOp {
    pub(crate) kind: PlanOpKind,
    /// Payload length in bytes; for a combination, the number of tiles.
    pub(crate) total: u64,
    /// Tiles of a message that is an encoded chunk; `None` for other operations.
    pub(crate) coded: Option<Box<Coded>>,
    /// The only other operation that uses an encoded chunk, so that its tiles need not be stored in the call's memory.
    /// A combination and the send of its result are partners of each other. The partner of a receive is the combination
    /// that reads the message.
    pub(crate) partner: Option<u32>,
    pub(crate) edge: u32,
    /// Operations on which this one depends: (index, whether this operation may stream behind the other, byte by byte).
    pub(crate) deps: SmallVec<[(u32, bool); 4]>,
    /// Operations that depend on this one.
    pub(crate) dependents: SmallVec<[u32; 4]>,
}

impl PlanOp {
    /// Returns the maximum bytes of the message in a frame that begins at byte `at`. This is a segment, shortened to
    /// the end of the last whole tile if the segment contains a whole tile.
    #[inline]
    pub(crate) fn frame_bytes(&self, at: u64, segment: u64) -> u64 {
        let Some(coded) = &self.coded else { return segment };
        let tiles = coded.tiles_in(at + segment);
        if tiles > coded.tiles_to(at) { coded.bytes_of(tiles) - at } else { segment }
    }

    /// Returns how far `later`, which streams behind this operation, may go once `done` of this operation is done.
    /// Combinations count tiles, and messages count bytes.
    pub(crate) fn reach(&self, done: u64, later: &PlanOp) -> u64 {
        match (&self.coded, &later.coded) {
            (Some(message), None) => message.tiles_in(done),
            (None, Some(message)) => message.bytes_of(done),
            (Some(_), Some(_)) | (None, None) => done,
        }
    }
}
