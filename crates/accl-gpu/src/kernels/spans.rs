//! The arguments of kernels, and the blocks of threads that a launch needs for them.
//!
//! Owns the layout that `spans.cuh` declares again. Does not know which kernel reads which field: [`super::Kernel`]
//! says that.

use accl_kernels::codec::RngKey;

/// Maximum number of spans of one launch.
pub const CAPACITY: usize = 42;

/// Maximum bytes of a kernel's parameters, on every GPU.
const MOST_BYTES: usize = 4096;

const DIVIDES: u32 = 1;
const KEEPS_ZEROS: u32 = 2;

/// A run of equal tiles of one piece of a tensor. Only the last tile may be shorter.
///
/// Addresses are in device memory. Values have the alignment of their type, codes of 8 bytes.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Span {
    /// Address of the first element.
    pub values: u64,
    /// Address of the first tile's code, after its header.
    pub code: u64,
    /// Address of the first float32 sum, of the first residual, or of the first result.
    pub sums: u64,
    /// Address of the code of the first tile of an operand, after its header. Its tiles are as far apart as the tiles at
    /// `code`. With error feedback: address of a byte, and if that is 0, the residual is not used and stays; 0 for none.
    pub other: u64,
    /// Number of elements.
    pub elements: u64,
    /// Index of the first element in its tensor.
    pub first: u64,
    /// Key of the random numbers.
    pub key: Key,
    /// Number of elements of a tile.
    pub tile: u32,
    /// Bytes from a tile to the next one, the header included.
    pub stride: u32,
}

/// A span as kernels read it.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Placed {
    span: Span,
    /// Number of the span's first block.
    first_block: u32,
    reserved: u32,
}

/// An [`RngKey`] as kernels read it. The default serves kernels that round to nearest.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Key {
    own: u64,
    shared: u64,
    /// 2^56 / world, rounded up.
    step: u64,
    rank: u32,
    /// 0 if the key names no other ranks.
    world: u32,
}

impl From<RngKey> for Key {
    fn from(key: RngKey) -> Self {
        let Some((shared, rank, world)) = key.among_ranks() else { return Self { own: key.word(), ..Self::default() } };
        Self { own: key.word(), shared, step: (1u64 << 56).div_ceil(u64::from(world)), rank, world }
    }
}

/// Settings of a launch that all of its spans share.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Address of two 64-bit counters that the launch increases: buckets that are not finite, and buckets that are too
    /// large. 0 does not count.
    pub counters: u64,
    /// Divisor of finished sums; `None` does not divide.
    pub divisor: Option<f32>,
    /// Whether a tile whose values are all zeros is encoded without its residual, which then stays.
    pub keeps_zeros: bool,
}

/// The parameter of every kernel, passed by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Args {
    counters: u64,
    count: u32,
    divisor: f32,
    flags: u32,
    reserved: u32,
    spans: [Placed; CAPACITY],
}

const _: () = assert!(size_of::<Args>() <= MOST_BYTES, "the arguments exceed the parameters of a kernel");

impl Args {
    /// Bytes of a span as kernels read it.
    pub(super) const SPAN_BYTES: u32 = size_of::<Placed>() as u32;

    /// Creates the arguments, and returns them with the number of blocks. A block handles `part` elements of a tile, or
    /// of a span if tiles mean nothing to the kernel.
    ///
    /// # Panics
    /// Panics if there are more spans than [`CAPACITY`], if a tile has no elements, or if the blocks exceed a grid.
    pub(super) fn new(spans: &[Span], options: &Options, part: u32, has_tiles: bool) -> (Self, u32) {
        assert!(spans.len() <= CAPACITY, "{} spans, at most {CAPACITY}", spans.len());
        let flags = if options.divisor.is_some() { DIVIDES } else { 0 };
        let flags = flags | if options.keeps_zeros { KEEPS_ZEROS } else { 0 };
        let mut args = Self {
            counters: options.counters,
            count: 0,
            divisor: options.divisor.unwrap_or(1.0),
            flags,
            reserved: 0,
            spans: [Placed::default(); CAPACITY],
        };
        let mut blocks = 0u64;
        for span in spans.iter().filter(|span| span.elements > 0) {
            assert!(span.tile > 0 || !has_tiles, "a tile has elements");
            args.spans[args.count as usize] = Placed { span: *span, first_block: blocks as u32, reserved: 0 };
            args.count += 1;
            let tile = if has_tiles { u64::from(span.tile) } else { span.elements };
            let (whole, last) = (span.elements / tile, span.elements % tile);
            blocks += whole * tile.div_ceil(u64::from(part)) + last.div_ceil(u64::from(part));
            assert!(blocks <= i32::MAX as u64, "{blocks} blocks exceed a grid");
        }
        (args, blocks as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(elements: u64, tile: u32) -> Span {
        Span { elements, tile, ..Span::default() }
    }

    #[test]
    fn blocks_cover_every_tile() {
        // Tiles of 1,000 elements have three parts of 400, and the last tile has one.
        let (args, blocks) =
            Args::new(&[span(2001, 1000), span(0, 1000), span(400, 1000)], &Options::default(), 400, true);
        assert_eq!((blocks, args.count), (8, 2), "a span without elements has no block");
        assert_eq!([args.spans[0].first_block, args.spans[1].first_block], [0, 7]);
        assert_eq!(Args::new(&[], &Options::default(), 400, true).1, 0);
    }

    #[test]
    fn without_tiles_blocks_cover_the_span() {
        let spans = [span((1 << 33) + 1, 0), span(1, 0)];
        let (args, blocks) = Args::new(&spans, &Options::default(), 4096, false);
        assert_eq!(blocks, (1 << 21) + 2);
        assert_eq!(args.spans[1].first_block, (1 << 21) + 1);
    }

    #[test]
    #[should_panic(expected = "43 spans, at most 42")]
    fn more_spans_than_fit_are_refused() {
        Args::new(&[span(1, 1); CAPACITY + 1], &Options::default(), 8, true);
    }
}
