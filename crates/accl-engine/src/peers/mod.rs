//! The peers of this process, and the ranks of a group among them.

pub(crate) mod members;
pub(crate) mod net;

pub(crate) use members::Members;
pub(crate) use net::{Gone, Mark, Net, PeerId};
