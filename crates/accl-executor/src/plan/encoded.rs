//! Additions to a plan for encoded calls: chunks of tiles, and their combinations.
//!
//! This module knows which tiles are complete once a number of bytes has arrived. `memory::coder` knows the contents of
//! a tile. Read [`Coded`] first.

use std::sync::Arc;

use accl_schedule::{Finish, Role, Tile};
use smallvec::SmallVec;

use super::region::Region;

/// The tiles of an encoded chunk, and the location of its bytes.
#[derive(Clone, Debug)]
pub(crate) struct Coded {
    pub(crate) role: Role,
    pub(crate) region: Region,
    pub(crate) tiles: Arc<[Tile]>,
    /// End offset of each tile among the chunk's bytes.
    pub(crate) ends: Arc<[u64]>,
}

impl Coded {
    pub(crate) fn range(&self, tile: usize) -> (u64, usize) {
        let start = if tile == 0 { 0 } else { self.ends[tile - 1] };
        (start, (self.ends[tile] - start) as usize)
    }

    /// Returns how many tiles are complete in the first `bytes` bytes.
    pub(crate) fn tiles_in(&self, bytes: u64) -> u64 {
        self.ends.partition_point(|&end| end <= bytes) as u64
    }

    /// Returns how many tiles are needed to have the first `bytes` bytes.
    pub(crate) fn tiles_to(&self, bytes: u64) -> u64 {
        self.ends.partition_point(|&end| end < bytes) as u64 + u64::from(bytes > 0)
    }

    /// Returns the bytes of the first `tiles` tiles.
    pub(crate) fn bytes_of(&self, tiles: u64) -> u64 {
        if tiles == 0 { 0 } else { self.ends[tiles as usize - 1] }
    }
}

/// Operand of a combination.
#[derive(Debug)]
pub(crate) enum Operand {
    Values(Region),
    Code(Coded),
}

/// A combination with its byte ranges: see [`accl_schedule::OpKind::Combine`].
#[derive(Debug)]
pub(crate) struct Combination {
    pub(crate) code: Option<Coded>,
    pub(crate) out: Option<Region>,
    pub(crate) srcs: SmallVec<[Operand; 2]>,
    pub(crate) tiles: Arc<[Tile]>,
    /// Start of each tile in the chunk, in elements.
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

    /// Returns the number of elements.
    pub(crate) fn elems(&self) -> u64 {
        self.tiles.iter().map(|tile| tile.elems).sum()
    }
}
