//! Calls as data: tensors, encodings, descriptions, and what is counted of them.

pub(crate) mod desc;
pub(crate) mod encoding;
pub(crate) mod error_stats;
pub(crate) mod external;
pub(crate) mod state;
pub(crate) mod tensor;
mod waits;

pub use desc::{CallDesc, Mode};
pub use encoding::{Codecs, Encoded, Encoding, Residuals, TILE_ELEMS, TILE_HEADER_BYTES, TensorCodecs};
pub use error_stats::{ErrorStats, Measured, Probe};
pub use external::{External, ExternalCopy, ExternalTask};
pub use state::Waited;
pub use tensor::{Blocks, MemoryKind, TensorDesc};

pub(crate) use encoding::{TypedCodecs, is_encoded};
pub(crate) use external::{ExternalHandle, ExternalState, Wake};
pub(crate) use state::{CallPlace, CallState, Callback, Notifier};
pub(crate) use waits::Waits;
