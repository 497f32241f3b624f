//! What encoded calls add to a plan: chunks of tiles, and their combinations.
//!
//! Owns which tiles are whole when so many bytes are there. What a tile is made of is the coder's matter. Read [`Coded`]
//! first.

use std::sync::Arc;

use accl_schedule::{Finish, Role, Tile};
use smallvec::SmallVec;

use super::region::Region;

/// The tiles of an encoded chunk, and where its bytes lie.
#[derive(Clone, Debug)]
pub(crate) struct Coded {
    pub(crate) role: Role,
    pub(crate) region: Region,
    pub(crate) tiles: Arc<[Tile]>,
    /// Where each tile ends among the chunk's bytes.
    pub(crate) ends: Arc<[u64]>,
}

impl Coded {
    pub(crate) fn range(&self, tile: usize) -> (u64, usize) {
        let start = if tile == 0 { 0 } else { self.ends[tile - 1] };
        (start, (self.ends[tile] - start) as usize)
    }

    /// How many tiles are whole when so many bytes are there.
    pub(crate) fn tiles_in(&self, bytes: u64) -> u64 {
        self.ends.partition_point(|&end| end <= bytes) as u64
    }

    /// How many tiles there must be for so many bytes.
    pub(crate) fn tiles_to(&self, bytes: u64) -> u64 {
        self.ends.partition_point(|&end| end < bytes) as u64 + u64::from(bytes > 0)
    }

    /// Bytes of so many tiles.
    pub(crate) fn bytes_of(&self, tiles: u64) -> u64 {
        if tiles == 0 { 0 } else { self.ends[tiles as usize - 1] }
    }
}

/// An operand of a combination.
#[derive(Debug)]
pub(crate) enum Operand {
    Values(Region),
    Code(Coded),
}

/// A combination with its bytes: see [`accl_schedule::OpKind::Combine`].
#[derive(Debug)]
pub(crate) struct Combination {
    pub(crate) code: Option<Coded>,
    pub(crate) out: Option<Region>,
    pub(crate) srcs: SmallVec<[Operand; 2]>,
    pub(crate) tiles: Arc<[Tile]>,
    /// Where each tile begins in the chunk, in elements.
    pub(crate) starts: Box<[u64]>,
    pub(crate) finish: Finish,
    pub(crate) pass: u32,
}

impl Combination {
    pub(crate) fn new(finish: Finish, pass: u32) -> Self {
        Self { code: None, out: None, srcs: SmallVec::new(), tiles: Arc::new([]), starts: Box::new([]), finish, pass }
    }

    pub(crate) fn set_tiles(&mut self, tiles: Arc<[Tile]>) {
        let starts = tiles.iter().scan(0, |next, tile| Some(std::mem::replace(next, *next + tile.elems)));
        self.starts = starts.collect();
        self.tiles = tiles;
    }

    /// Number of elements.
    pub(crate) fn elems(&self) -> u64 {
        self.tiles.iter().map(|tile| tile.elems).sum()
    }
}
