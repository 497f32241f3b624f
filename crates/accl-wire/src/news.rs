//! How a process learns which of its links have news, without looking at all of them. Owns no implementation: a board of a process and
//! its peers is a transport's, one of a simulated process the simulation's. Read [`NewsBoard`] first.

/// The number of a link on its process's board.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(pub u32);

/// Where news of a process's armed links are posted ([`crate::Link::arm`]): by its peers, when they share memory, and by whoever asks the
/// system for events. Whoever makes progress takes them, and looks at those links.
///
/// While nobody listens a post is a word in memory. Who is about to sleep listens: the first post then wakes it.
pub trait NewsBoard: Send + Sync {
    /// Hands over the links of which news were posted since they were taken last. A link may come although there is nothing to find.
    fn take(&self, found: &mut dyn FnMut(Slot));

    /// From now on the first post wakes who sleeps. `true`: something was posted since the last [`NewsBoard::take`], so do not sleep.
    fn listen(&self) -> bool;

    /// Nobody needs to be woken from now on.
    fn mute(&self);
}
