//! The peers of this process, and the ranks of a group among them.

pub(crate) mod members;
pub(crate) mod net;

pub(crate) use members::{Members, neighbours};
pub use net::Traffic;
pub(crate) use net::{Gone, Mark, Net, PeerId};
