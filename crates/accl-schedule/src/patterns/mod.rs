//! Index arithmetic shared by algorithms: which ranks exchange which blocks.
//!
//! Owns teams and strips and the exchanges built from them, each usable for the whole world or for a part of it. An
//! algorithm file decides which buffers and divisions they work on. Read [`Team`] first.

pub mod binary_tree;
pub mod binomial;
pub mod bruck;
pub mod circulant;
pub mod direct;
pub mod flat;
pub mod fold;
pub mod halving;
pub mod hosts;
mod numbers;
pub mod ring;

use accl_types::Rank;

use crate::ir::{Buf, Order, Request, Span};

pub use numbers::{ceil_log2, floor_log2, floor_power_of_two};

/// An ordered set of ranks as one of its members sees it. Members are in ascending order of rank, or of the lowest rank
/// whose contribution they hold. So the order of indices is the order of operands.
#[derive(Clone, Debug)]
pub struct Team<'a> {
    /// The members; `None` is the whole world.
    ranks: Option<&'a [u32]>,
    /// The first `2 * paired` ranks are paired; the first of each pair represents it.
    paired: u32,
    size: u32,
    index: u32,
}

impl<'a> Team<'a> {
    /// All ranks.
    pub fn world(request: &Request) -> Team<'static> {
        Team { ranks: None, paired: 0, size: request.world, index: request.rank.0 }
    }

    /// Some ranks, seen by the member at `index`.
    pub fn of(ranks: &'a [u32], index: u32) -> Team<'a> {
        Team { ranks: Some(ranks), paired: 0, size: ranks.len() as u32, index }
    }

    /// Number of members.
    pub fn size(&self) -> u32 {
        self.size
    }

    /// The position of the member whose view this is.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The rank at a position.
    pub fn rank(&self, index: u32) -> Rank {
        let position = self.start(index);
        Rank(self.ranks.map_or(position, |ranks| ranks[position as usize]))
    }

    /// Position of a member's representative before folding; `start(size)` is the size before folding.
    fn start(&self, index: u32) -> u32 {
        index + index.min(self.paired)
    }

    /// The position `steps` after this member, cyclically; `steps` is at most the size.
    pub fn after(&self, steps: u32) -> u32 {
        (self.index + steps) % self.size
    }

    /// The position `steps` before this member, cyclically; `steps` is at most the size.
    pub fn before(&self, steps: u32) -> u32 {
        (self.index + self.size - steps) % self.size
    }
}

/// Consecutive blocks of `width` chunks in a buffer.
#[derive(Clone, Copy, Debug)]
pub struct Strip {
    /// The buffer.
    pub buf: Buf,
    /// First chunk of block 0.
    pub first: u32,
    /// Chunks per block.
    pub width: u32,
}

impl Strip {
    /// A strip in which block i is chunk i.
    pub fn chunks(buf: Buf) -> Strip {
        Strip { buf, first: 0, width: 1 }
    }

    /// One block.
    pub fn block(self, block: u32) -> Span {
        self.blocks(block, 1)
    }

    /// `len` blocks from `first` on.
    pub fn blocks(self, first: u32, len: u32) -> Span {
        Span::range(self.buf, self.first + first * self.width, len * self.width)
    }
}

/// The order of operands that puts the lowest rank's contribution first; `incoming` and `local` are the lowest rank (or
/// index) on each side.
pub fn by_rank(incoming: u32, local: u32) -> Order {
    if incoming < local { Order::IncomingFirst } else { Order::LocalFirst }
}
