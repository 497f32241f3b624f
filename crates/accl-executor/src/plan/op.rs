//! The operations of a plan.
//!
//! Read [`PlanOp`] first.

use accl_schedule::{Finish, Order};
use accl_types::Rank;
use smallvec::SmallVec;

use super::encoded::{Coded, Combination};
use super::region::Region;

/// An operation with its bytes.
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
    /// Done elsewhere, as one step: it has no bytes that others could stream behind.
    External(ExternalStep),
}

/// What an external operation of a plan is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExternalStep {
    /// Brings the call's tensors into memory that the executor can touch.
    CopyIn,
    /// Brings results to where they belong.
    CopyOut,
    /// Does the whole collective.
    Offload,
    /// Awaits the parts of the call that other lanes do.
    Join,
}

impl std::fmt::Display for ExternalStep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            ExternalStep::CopyIn => "copy-in",
            ExternalStep::CopyOut => "copy-out",
            ExternalStep::Offload => "offload",
            ExternalStep::Join => "join",
        })
    }
}

#[derive(Debug)]
pub(crate) struct PlanOp {
    pub(crate) kind: PlanOpKind,
    /// Payload length in bytes; number of tiles of a combination.
    pub(crate) total: u64,
    /// Of a message that is an encoded chunk: its tiles.
    pub(crate) coded: Option<Box<Coded>>,
    /// The one other operation that has to do with an encoded chunk, so that its tiles need never lie in the call's memory: of a
    /// combination, the send of what it makes, and the reverse; of a receive, the combination of what comes.
    pub(crate) partner: Option<u32>,
    pub(crate) edge: u32,
    /// (operation, whether byte k may follow byte k)
    pub(crate) deps: SmallVec<[(u32, bool); 4]>,
    /// Operations that wait for this one.
    pub(crate) dependents: SmallVec<[u32; 4]>,
}

impl PlanOp {
    /// Most bytes of the message in a frame that begins at byte `at` of it: a segment, but up to the end of a tile if one lies in it
    /// from its beginning.
    #[inline]
    pub(crate) fn frame_bytes(&self, at: u64, segment: u64) -> u64 {
        let Some(coded) = &self.coded else { return segment };
        let tiles = coded.tiles_in(at + segment);
        if tiles > coded.tiles_to(at) { coded.bytes_of(tiles) - at } else { segment }
    }

    /// How far `later`, which streams behind this one, may go when this one has done so much: a combination goes by tiles,
    /// a message by bytes.
    pub(crate) fn reach(&self, done: u64, later: &PlanOp) -> u64 {
        match (&self.coded, &later.coded) {
            (Some(message), None) => message.tiles_in(done),
            (None, Some(message)) => message.bytes_of(done),
            (Some(_), Some(_)) | (None, None) => done,
        }
    }
}
