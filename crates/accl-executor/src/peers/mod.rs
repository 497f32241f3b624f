//! The peer processes of this process, and the ranks of groups among them.

mod members;
pub mod missing;
mod net;
mod traffic;

pub use members::Members;
pub use members::neighbours;
pub use net::Gone;
pub use net::Mark;
pub use net::Note;
pub use net::PeerId;
pub(crate) use net::{FrameEnd, Net, handle_frame};
pub use traffic::Traffic;
