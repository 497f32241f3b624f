//! Payloads as byte ranges of a call's buffers.
//!
//! This module knows no addresses. Read [`Region`] first.

use accl_schedule::{Buf, Extent, Extents, Layout, Span};
use smallvec::SmallVec;

/// A payload as byte ranges, with the position of each in the payload.
#[derive(Clone, Debug, Default)]
pub(crate) struct Region {
    extents: Extents,
    /// Position of each extent in the payload.
    starts: SmallVec<[u64; 1]>,
    /// Length of the payload.
    pub(crate) len: u64,
}

impl Region {
    pub(super) fn new(layout: &Layout, span: &Span) -> Self {
        let mut region = Region { extents: layout.extents(span), ..Region::default() };
        for extent in &region.extents {
            region.starts.push(region.len);
            region.len += extent.len;
        }
        region
    }

    /// Returns the contiguous range that contains payload position `at`, cut to begin at `at`.
    #[inline]
    pub(crate) fn at(&self, at: u64) -> Extent {
        let index = if self.extents.len() == 1 { 0 } else { self.starts.partition_point(|&start| start <= at) - 1 };
        let extent = self.extents[index];
        let skip = at - self.starts[index];
        Extent { offset: extent.offset + skip, len: extent.len - skip, ..extent }
    }

    /// Returns the byte ranges in order, each with its position in the payload.
    pub(super) fn parts(&self) -> impl Iterator<Item = (u64, Extent)> {
        self.starts.iter().copied().zip(self.extents.iter().copied())
    }

    /// Returns whether bytes of the payload lie in this buffer.
    pub(crate) fn is_in(&self, buf: Buf) -> bool {
        self.extents.iter().any(|extent| extent.buf == buf)
    }

    /// Returns whether both payloads are the same bytes of the same buffer.
    pub(super) fn is_same(&self, other: &Region) -> bool {
        self.extents == other.extents
    }
}
