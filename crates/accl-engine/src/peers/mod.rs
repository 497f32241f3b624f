//! The peers of this process, and the ranks of a group among them.

pub(crate) mod members;
pub(crate) mod missing;
pub(crate) mod net;
mod traffic;

pub(crate) use members::{Members, neighbours};
pub(crate) use net::{Gone, Mark, Net, Note, PeerId};
pub use traffic::Traffic;
