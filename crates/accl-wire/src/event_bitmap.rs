//! The interface through which a process learns which of its links have events, without polling all of them.
//! This module owns no implementation: the transport crate has the bitmap that a process shares with its peers, and the
//! simulation has its own. Read [`EventBitmap`] first.

/// Number of a link on the bitmap of its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(pub u32);

/// An event bitmap with one [`Slot`] for each link of a process.
///
/// An event of an armed link ([`crate::Link::arm`]) is posted here by the peer if it shares memory. The thread that
/// polls the system for events posts here, too. The thread that makes progress takes the events and polls those links.
///
/// While no thread listens, a post only writes a word in memory. A thread calls [`EventBitmap::listen`] before it
/// sleeps; the first post after that wakes it.
pub trait EventBitmap: Send + Sync {
    /// Calls `found` for each link with events since the last call. A link may be reported although it has nothing to
    /// read.
    fn take(&self, found: &mut dyn FnMut(Slot));

    /// From now on, the first post wakes the sleeping thread. Returns `true` if something was posted since the last
    /// [`EventBitmap::take`]; the caller must then not sleep.
    fn listen(&self) -> bool;

    /// From now on, posts wake no thread.
    fn mute(&self);
}
