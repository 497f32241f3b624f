//! Calls as data: tensors, encodings, descriptions, and statistics.

mod access;
mod combination;
mod desc;
mod encoding;
mod error_stats;
mod external;
mod external_copy;
mod phases;
mod published;
mod staging;
mod state;
mod tensor;
mod waits;

pub(crate) use combination::Measurement;
pub use combination::{
    ExternalCombination, SampleCopies, SampleCopy, SampledResult, Squares, TileCode, TileOperand, TileResidual, TileRun,
};
pub use desc::{CallDesc, Mode, TRIAL};
pub use encoding::{Codecs, Encoded, Encoding, ResidualOwner, Residuals, TILE_ELEMS, TILE_HEADER_BYTES, TensorCodecs};
pub use error_stats::{AllFigures, Figures, Gather, Measured, Probe, Statistics};
pub(crate) use error_stats::{CodedSample, Keeps};
pub use external::{External, ExternalCollective, ExternalTask};
pub use external_copy::ExternalCopy;
pub(crate) use phases::Stopwatch;
pub use phases::{PhaseTimes, Phases};
pub(crate) use published::Referencing;
pub use published::{
    ExternalReduction, PUBLISHED_ALIGN, PublishedOperand, PublishedResult, PublishingNeeds, REFERENCE_BYTES,
    ReducedTile,
};
pub use staging::{CoderNeeds, Enqueued, LentMemory, Meeting, Publisher, Staging};
pub use state::Waited;
pub use tensor::{Blocks, MemoryKind, TensorDesc};

pub(crate) use encoding::TypedCodecs;
pub use encoding::is_encoded;
pub use external::Wake;
pub(crate) use external::{AfterCopy, ExternalCopies, ExternalHandle, ExternalState, ExternalWork};
pub use state::CallInfo;
pub use state::CallObserver;
pub use state::CallState;
pub use state::{Callback, Callbacks};
pub(crate) use waits::Waits;
