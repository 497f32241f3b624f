//! The mapping from chunks to bytes: the locations of a program's chunks in the tensors of one call.
//!
//! Owns remainders, uneven blocks, coalesced pieces, and the placement of scratch and encoded chunks. Also owns the
//! division of encoded chunks into tiles, and of all chunks into parts. Knows pieces by index, not by address, and
//! codecs by the sizes they state. Read [`Layout`] first.
//!
//! This file is long because a third of it are tests.

use std::fmt;

use accl_types::{Elems, round_up};
use smallvec::SmallVec;

use crate::ir::{Buf, ChunkRange, Code, Division, Role, Span};
use crate::program::Program;

/// The sizes of one call on one rank. A buffer is a list of blocks, and a block is a list of pieces (the tensors of a
/// coalesced call).
#[derive(Clone, Copy, Debug)]
pub struct CallShape<'a> {
    /// Bytes per element; 1 if the dtype does not matter.
    pub elem_bytes: u64,
    /// The pieces of each block of `In`.
    pub in_blocks: &'a [Vec<Elems>],
    /// The pieces of each block of `Out`.
    pub out_blocks: &'a [Vec<Elems>],
    /// The encoding of an encoded program; `None` for any other program.
    pub coding: Option<&'a dyn Coding>,
    /// The part of the call.
    pub part: Part,
}

/// A share of a call: each chunk is divided into `of` parts, and this is one of them. The parts of one call touch
/// different elements. Each part treats its elements exactly as the whole call would.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Part {
    /// Index of the part, from 0.
    pub index: u32,
    /// Number of parts.
    pub of: u32,
}

impl Part {
    /// The whole of each chunk.
    pub const WHOLE: Part = Part { index: 0, of: 1 };

    /// The range of this part among `things` things: its first, and the first after it.
    fn range(self, things: u64) -> (u64, u64) {
        (even_start(things, self.of, self.index), even_start(things, self.of, self.index + 1))
    }
}

impl Default for Part {
    fn default() -> Self {
        Self::WHOLE
    }
}

/// Parts of chunks begin at multiples of this many elements of the chunk: whole cache lines for every dtype.
const PART_GRAIN: u64 = 64;

/// The facts that the layout needs about a call's codecs. They depend on a piece's position in its block and are the
/// same in all blocks.
pub trait Coding: fmt::Debug {
    /// Number of elements that are encoded together. Chunks are cut at multiples of it, counted from the piece's first
    /// element.
    fn grain(&self, piece: u32) -> u64;
    /// Whether chunks are cut at multiples of the grain only, into parts with about as many bytes on the wire. If not, a plain
    /// call has the same chunks.
    fn has_grains(&self) -> bool {
        true
    }

    /// Maximum number of elements in a tile, a multiple of the grain.
    fn tile(&self, piece: u32) -> u64;
    /// Bytes of a tile of `elems` elements; 0 for 0 elements.
    fn tile_bytes(&self, role: Role, piece: u32, elems: u64) -> u64;

    /// Bytes of `elems` elements, divided into tiles from the first element on.
    fn piece_bytes(&self, role: Role, piece: u32, elems: u64) -> u64 {
        let tile = self.tile(piece);
        elems / tile * self.tile_bytes(role, piece, tile) + self.tile_bytes(role, piece, elems % tile)
    }
}

/// The unit of encoding and sending: consecutive elements of one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// The block that the tile belongs to.
    pub block: u32,
    /// Index of the piece in its block, which determines the codec's settings.
    pub piece: u32,
    /// First element in its piece, a multiple of the grain.
    pub first: u64,
    /// Number of elements, never 0.
    pub elems: u64,
}

/// Consecutive bytes of one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The buffer.
    pub buf: Buf,
    /// Index of the piece, counted through all blocks of the buffer; 0 for scratch.
    pub piece: u32,
    /// First byte within the piece.
    pub offset: u64,
    /// Length in bytes, never 0.
    pub len: u64,
}

/// The byte ranges of a payload, usually one.
pub type Extents = SmallVec<[Extent; 1]>;

/// Alignment of scratch chunks in bytes: a cache line.
pub const SCRATCH_ALIGN: u64 = 64;

/// The locations of one program's chunks in one call.
#[derive(Clone, Debug)]
pub struct Layout {
    input: Tensors,
    output: Tensors,
    scratch: Scratch,
    codes: Scratch,
}

impl Layout {
    /// Places the chunks of `program` for a call of this shape.
    ///
    /// # Panics
    /// Panics if a buffer has 2^64 bytes or more; such calls are refused earlier.
    pub fn new(program: &Program, shape: &CallShape) -> Layout {
        let mut input = Tensors::new(program.in_division, shape.in_blocks, shape);
        let mut output = Tensors::new(program.out_division, shape.out_blocks, shape);
        if shape.part != Part::WHOLE {
            let coding = shape.coding.filter(|coding| coding.has_grains());
            input.keep(shape.part, Buf::In, coding);
            output.keep(shape.part, Buf::Out, coding);
        }
        let scratch = Scratch::new(program.scratch.iter().map(|&(like, chunk)| match like {
            Buf::In => input.chunk_bytes(chunk),
            Buf::Out => output.chunk_bytes(chunk),
            Buf::Scratch | Buf::Code => 0,
        }));
        let mut layout = Layout { input, output, scratch, codes: Scratch::default() };
        if let Some(coding) = shape.coding {
            let bytes = |code: &Code| layout.tile_bytes(code, coding).sum();
            layout.codes = Scratch::new(program.codes.iter().map(bytes));
        }
        layout
    }

    /// The tiles of a chunk of `In` or `Out`, in order.
    ///
    /// # Panics
    /// Same as [`Layout::extents`].
    pub fn tiles(&self, (buf, chunk): (Buf, u32), coding: &dyn Coding) -> impl Iterator<Item = Tile> {
        let tensors = if buf == Buf::In { &self.input } else { &self.output };
        tensors.tiles((buf, chunk), coding).into_iter()
    }

    /// The bytes of each tile of an encoded chunk.
    ///
    /// # Panics
    /// Same as [`Layout::extents`].
    pub fn tile_bytes(&self, code: &Code, coding: &dyn Coding) -> impl Iterator<Item = u64> {
        let role = code.role;
        self.tiles(code.like, coding).map(move |tile| coding.tile_bytes(role, tile.piece, tile.elems))
    }

    /// The byte ranges of a payload in order. Extents are not empty; neighbours in one piece are merged.
    ///
    /// # Panics
    /// Panics if the span names a chunk that the program's buffers do not have. The checker proves that schedules do
    /// not.
    pub fn extents(&self, span: &Span) -> Extents {
        let mut extents = Extents::new();
        for range in span.ranges() {
            match range.buf {
                Buf::In => self.input.extents(range, &mut extents),
                Buf::Out => self.output.extents(range, &mut extents),
                Buf::Scratch => self.scratch.extents(range, &mut extents),
                Buf::Code => self.codes.extents(range, &mut extents),
            }
        }
        extents
    }

    /// Length of a payload in bytes.
    ///
    /// # Panics
    /// Same as [`Layout::extents`].
    pub fn bytes(&self, span: &Span) -> u64 {
        let of_range = |range: &ChunkRange| match range.buf {
            Buf::In => self.input.range_bytes(range),
            Buf::Out => self.output.range_bytes(range),
            Buf::Scratch => self.scratch.range_bytes(range),
            Buf::Code => self.codes.range_bytes(range),
        };
        span.ranges().iter().map(of_range).sum()
    }

    /// Size of the scratch buffer in bytes (one piece, chunks aligned to [`SCRATCH_ALIGN`]).
    pub fn scratch_bytes(&self) -> u64 {
        self.scratch.total
    }

    /// Size of the buffer of encoded chunks in bytes, with the same alignment as [`Layout::scratch_bytes`].
    pub fn code_bytes(&self) -> u64 {
        self.codes.total
    }
}

/// One buffer of the call: its pieces, one after the other, counted in elements.
#[derive(Clone, Debug)]
struct Tensors {
    division: Division,
    elem_bytes: u64,
    /// First element of each piece, and the end.
    piece_starts: Vec<u64>,
    /// First element of each block, and the end.
    block_starts: Vec<u64>,
    /// First piece of each block, and the end.
    block_pieces: Vec<u32>,
    /// The possible cuts of an encoded call; `None` for other calls.
    grid: Option<Grid>,
    /// For a part of a call: the range of elements in each chunk that the part has. `None` for a whole call.
    kept: Option<Vec<(u64, u64)>>,
}

/// The positions at which a buffer of an encoded call may be cut.
#[derive(Clone, Debug)]
struct Grid {
    /// Elements between possible cuts, for each piece.
    grains: Vec<u64>,
    /// Bytes on the wire before each piece, and the end.
    bytes_before: Vec<u64>,
}

impl Grid {
    fn new(blocks: &[Vec<Elems>], coding: &dyn Coding) -> Grid {
        let mut grid = Grid { grains: Vec::new(), bytes_before: vec![0] };
        let mut end = 0;
        for (index, elems) in blocks.iter().flat_map(|block| (0..).zip(block)) {
            end += coding.piece_bytes(Role::Reduce, index, elems.0) + coding.piece_bytes(Role::Result, index, elems.0);
            grid.grains.push(coding.grain(index));
            grid.bytes_before.push(end);
        }
        grid
    }

    /// The element at which part `part` of `parts` of the pieces `first..end` starts. The cuts give all parts about the
    /// same number of bytes on the wire.
    fn start(&self, piece_starts: &[u64], (first, end): (u32, u32), parts: u32, part: u32) -> u64 {
        let (from, to) = (self.bytes_before[first as usize], self.bytes_before[end as usize]);
        let wanted = u128::from(to - from) * u128::from(part) / u128::from(parts) + u128::from(from);
        let inside = &self.bytes_before[first as usize..=end as usize];
        let piece = first as usize + inside.partition_point(|&before| u128::from(before) <= wanted);
        if piece > end as usize {
            return piece_starts[end as usize];
        }
        let piece = piece - 1;
        let (start, elems) = (piece_starts[piece], piece_starts[piece + 1] - piece_starts[piece]);
        let grains = u128::from(elems.div_ceil(self.grains[piece]));
        let bytes = u128::from(self.bytes_before[piece + 1] - self.bytes_before[piece]);
        let skipped = wanted - u128::from(self.bytes_before[piece]);
        let cut = (skipped * grains + bytes / 2) / bytes.max(1);
        start + (cut as u64 * self.grains[piece]).min(elems)
    }
}

impl Tensors {
    fn new(division: Division, blocks: &[Vec<Elems>], shape: &CallShape) -> Tensors {
        let elem_bytes = shape.elem_bytes;
        let mut end = 0u64;
        let mut piece_starts = vec![0];
        let mut block_starts = vec![0];
        let mut block_pieces = vec![0];
        for block in blocks {
            for piece in block {
                end = end.checked_add(piece.0).expect("sizes of a call were checked to fit 64 bits");
                piece_starts.push(end);
            }
            block_starts.push(end);
            block_pieces.push(piece_starts.len() as u32 - 1);
        }
        end.checked_mul(elem_bytes).expect("sizes of a call were checked to fit 64 bits");
        let grid = shape.coding.filter(|coding| coding.has_grains()).map(|coding| Grid::new(blocks, coding));
        Tensors { division, elem_bytes, piece_starts, block_starts, block_pieces, grid, kept: None }
    }

    /// Restricts every chunk to its part `part`.
    fn keep(&mut self, part: Part, buf: Buf, coding: Option<&dyn Coding>) {
        let chunks = self.division.chunks(self.block_starts.len() as u32 - 1);
        let kept = (0..chunks).map(|chunk| {
            let (start, end) = self.bounds(chunk);
            let Some(coding) = coding else {
                let (first, last) = part.range((end - start).div_ceil(PART_GRAIN));
                return ((start + first * PART_GRAIN).min(end), (start + last * PART_GRAIN).min(end));
            };
            // The whole call has the same tiles, with the same bits.
            let tiles = self.tiles((buf, chunk), coding);
            let (first, last) = part.range(tiles.len() as u64);
            let before = |tile: u64| start + tiles[..tile as usize].iter().map(|tile| tile.elems).sum::<u64>();
            (before(first), before(last))
        });
        self.kept = Some(kept.collect());
    }

    /// First element of a chunk, and the end.
    fn bounds(&self, chunk: u32) -> (u64, u64) {
        match &self.kept {
            Some(kept) => kept[chunk as usize],
            None => (self.start(chunk), self.start(chunk + 1)),
        }
    }

    fn tiles(&self, (buf, chunk): (Buf, u32), coding: &dyn Coding) -> Vec<Tile> {
        let mut extents = Extents::new();
        self.extents(&ChunkRange { buf, first: chunk, len: 1 }, &mut extents);
        let mut tiles = Vec::new();
        for extent in extents {
            let (block, piece) = self.locate(extent.piece);
            let (mut first, mut left) = (extent.offset / self.elem_bytes, extent.len / self.elem_bytes);
            while left > 0 {
                let elems = left.min(coding.tile(piece));
                tiles.push(Tile { block, piece, first, elems });
                (first, left) = (first + elems, left - elems);
            }
        }
        tiles
    }

    /// The block of a piece, and its position in the block.
    fn locate(&self, piece: u32) -> (u32, u32) {
        let block = self.block_pieces.partition_point(|&first| first <= piece) - 1;
        (block as u32, piece - self.block_pieces[block])
    }

    /// The element at which part `part` of the blocks `first..end` starts.
    fn part_start(&self, (first, end): (usize, usize), parts: u32, part: u32) -> u64 {
        match &self.grid {
            Some(grid) => {
                let pieces = (self.block_pieces[first], self.block_pieces[end]);
                grid.start(&self.piece_starts, pieces, parts, part)
            }
            None => {
                let start = self.block_starts[first];
                start + even_start(self.block_starts[end] - start, parts, part)
            }
        }
    }

    fn elems(&self) -> u64 {
        self.piece_starts[self.piece_starts.len() - 1]
    }

    /// The element at which a chunk starts; for the chunk after the last one, the end.
    fn start(&self, chunk: u32) -> u64 {
        match self.division {
            Division::Whole => {
                assert!(chunk <= 1, "a whole buffer has one chunk");
                u64::from(chunk) * self.elems()
            }
            Division::Even { chunks } => {
                assert!(chunk <= chunks, "chunk {chunk} of {chunks}");
                self.part_start((0, self.block_starts.len() - 1), chunks, chunk)
            }
            Division::Blocks => self.block_starts[chunk as usize],
            Division::SplitBlocks { pieces } => {
                let (block, piece) = ((chunk / pieces) as usize, chunk % pieces);
                if piece == 0 { self.block_starts[block] } else { self.part_start((block, block + 1), pieces, piece) }
            }
        }
    }

    fn chunk_bytes(&self, chunk: u32) -> u64 {
        let (start, end) = self.bounds(chunk);
        (end - start) * self.elem_bytes
    }

    fn range_bytes(&self, range: &ChunkRange) -> u64 {
        if self.kept.is_none() {
            return (self.start(range.first + range.len) - self.start(range.first)) * self.elem_bytes;
        }
        (range.first..range.first + range.len).map(|chunk| self.chunk_bytes(chunk)).sum()
    }

    fn extents(&self, range: &ChunkRange, extents: &mut Extents) {
        if self.kept.is_none() {
            return self.extents_between(
                range.buf,
                (self.start(range.first), self.start(range.first + range.len)),
                extents,
            );
        }
        for chunk in range.first..range.first + range.len {
            self.extents_between(range.buf, self.bounds(chunk), extents);
        }
    }

    fn extents_between(&self, buf: Buf, (mut at, end): (u64, u64), extents: &mut Extents) {
        // The last piece that starts at or before `at`; this skips empty pieces before it.
        let mut piece = self.piece_starts.partition_point(|&start| start <= at).saturating_sub(1);
        while at < end {
            let stop = self.piece_starts[piece + 1].min(end);
            if stop > at {
                let offset = (at - self.piece_starts[piece]) * self.elem_bytes;
                append(extents, Extent { buf, piece: piece as u32, offset, len: (stop - at) * self.elem_bytes });
            }
            at = stop;
            piece += 1;
        }
    }
}

/// A temporary buffer: chunks one after the other, each aligned.
#[derive(Clone, Debug, Default)]
struct Scratch {
    /// Offset and length of each chunk in bytes.
    chunks: Vec<(u64, u64)>,
    total: u64,
}

impl Scratch {
    fn new(lens: impl Iterator<Item = u64>) -> Scratch {
        let mut total = 0;
        let chunks = lens
            .map(|len| {
                let offset = total;
                total = round_up(offset + len, SCRATCH_ALIGN).expect("scratch of a call fits 64 bits");
                (offset, len)
            })
            .collect();
        Scratch { chunks, total }
    }

    fn range(&self, range: &ChunkRange) -> &[(u64, u64)] {
        &self.chunks[range.first as usize..(range.first + range.len) as usize]
    }

    fn range_bytes(&self, range: &ChunkRange) -> u64 {
        self.range(range).iter().map(|&(_, len)| len).sum()
    }

    fn extents(&self, range: &ChunkRange, extents: &mut Extents) {
        for &(offset, len) in self.range(range).iter().filter(|&&(_, len)| len > 0) {
            append(extents, Extent { buf: range.buf, piece: 0, offset, len });
        }
    }
}

/// Adds an extent, merged with the last one if it continues it.
fn append(extents: &mut Extents, next: Extent) {
    match extents.last_mut() {
        Some(last) if last.buf == next.buf && last.piece == next.piece && last.offset + last.len == next.offset => {
            last.len += next.len;
        }
        Some(_) | None => extents.push(next),
    }
}

/// Start of part `part` if `elems` elements are divided into `parts` parts; the first parts have one element more.
fn even_start(elems: u64, parts: u32, part: u32) -> u64 {
    let (parts, part) = (u64::from(parts), u64::from(part));
    elems / parts * part + part.min(elems % parts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn program(division: Division, scratch: Vec<(Buf, u32)>) -> Program {
        Program {
            ops: Vec::new(),
            in_division: division,
            out_division: Division::Whole,
            scratch,
            codes: Vec::new(),
            is_by_reference: false,
        }
    }

    fn blocks() -> impl Strategy<Value = Vec<Vec<Elems>>> {
        let piece = prop_oneof![Just(0u64), 1u64..40, 1u64..5].prop_map(Elems);
        prop::collection::vec(prop::collection::vec(piece, 1..4), 1..7)
    }

    fn division() -> impl Strategy<Value = Division> {
        prop_oneof![
            Just(Division::Whole),
            Just(Division::Blocks),
            (1u32..20).prop_map(|chunks| Division::Even { chunks }),
            (1u32..6).prop_map(|pieces| Division::SplitBlocks { pieces }),
        ]
    }

    /// The bytes of all extents, one by one.
    fn bytes_of(extents: &[Extent]) -> Vec<(Buf, u32, u64)> {
        extents.iter().flat_map(|e| (e.offset..e.offset + e.len).map(|byte| (e.buf, e.piece, byte))).collect()
    }

    proptest! {
        #[test]
        fn chunks_cover_every_element_once_in_order(blocks in blocks(), division in division(), elem in 1u64..9) {
            let shape = CallShape { elem_bytes: elem, in_blocks: &blocks, out_blocks: &[], coding: None, part: Part::WHOLE };
            let layout = Layout::new(&program(division, Vec::new()), &shape);
            let chunks = division.chunks(blocks.len() as u32);
            let mut expected = Vec::new();
            for (piece, elems) in blocks.iter().flatten().enumerate() {
                expected.extend((0..elems.0 * elem).map(|byte| (Buf::In, piece as u32, byte)));
            }
            let mut found = Vec::new();
            for chunk in 0..chunks {
                let span = Span::chunk(Buf::In, chunk);
                let extents = layout.extents(&span);
                prop_assert!(extents.iter().all(|e| e.len > 0 && e.len % elem == 0 && e.offset % elem == 0));
                prop_assert_eq!(extents.iter().map(|e| e.len).sum::<u64>(), layout.bytes(&span));
                found.extend(bytes_of(&extents));
            }
            prop_assert_eq!(&found, &expected);
            let whole = Span::range(Buf::In, 0, chunks);
            prop_assert_eq!(&bytes_of(&layout.extents(&whole)), &expected);
            prop_assert_eq!(layout.bytes(&whole), expected.len() as u64);
            prop_assert!(layout.extents(&whole).len() <= blocks.iter().flatten().filter(|e| e.0 > 0).count());
        }

        #[test]
        fn parts_of_a_chunk_are_disjoint_and_all_of_it_in_order(
            blocks in blocks(),
            scale in 1u64..30,
            division in division(),
            elem in 1u64..9,
            of in 1u32..6,
        ) {
            let blocks: Vec<Vec<Elems>> =
                blocks.iter().map(|block| block.iter().map(|piece| Elems(piece.0 * scale)).collect()).collect();
            let chunks = division.chunks(blocks.len() as u32);
            let program = program(division, (0..chunks).map(|chunk| (Buf::In, chunk)).collect());
            let layout = |part| {
                let shape = CallShape { elem_bytes: elem, in_blocks: &blocks, out_blocks: &[], coding: None, part };
                Layout::new(&program, &shape)
            };
            let whole = layout(Part::WHOLE);
            let parts: Vec<Layout> = (0..of).map(|index| layout(Part { index, of })).collect();
            for chunk in 0..chunks {
                let (span, scratch) = (Span::chunk(Buf::In, chunk), Span::chunk(Buf::Scratch, chunk));
                let mut found = Vec::new();
                for part in &parts {
                    let extents = part.extents(&span);
                    prop_assert_eq!(part.bytes(&span), extents.iter().map(|e| e.len).sum::<u64>());
                    prop_assert_eq!(part.bytes(&span), part.bytes(&scratch), "scratch is as large as what goes there");
                    prop_assert!((found.len() as u64).is_multiple_of(64 * elem) || extents.is_empty(), "a part begins at a cache line");
                    found.extend(bytes_of(&extents));
                }
                prop_assert_eq!(found, bytes_of(&whole.extents(&span)));
                let sizes: Vec<u64> = parts.iter().map(|part| part.bytes(&span)).collect();
                let (least, most) = (sizes.iter().min().unwrap(), sizes.iter().max().unwrap());
                prop_assert!(most - least < 2 * 64 * elem, "{:?}", sizes);
            }
            // If a message has several chunks, each chunk has its part.
            let all = Span::range(Buf::In, 0, chunks);
            for part in &parts {
                let one_by_one: Vec<_> =
                    (0..chunks).flat_map(|chunk| bytes_of(&part.extents(&Span::chunk(Buf::In, chunk)))).collect();
                prop_assert_eq!(bytes_of(&part.extents(&all)), one_by_one);
                prop_assert_eq!(part.bytes(&all), part.extents(&all).iter().map(|e| e.len).sum::<u64>());
            }
        }

        #[test]
        fn even_chunks_differ_by_one_element_at_most_and_never_grow(elems in 0u64..500, chunks in 1u32..40) {
            let blocks = [vec![Elems(elems)]];
            let shape = CallShape { elem_bytes: 1, in_blocks: &blocks, out_blocks: &[], coding: None, part: Part::WHOLE };
            let layout = Layout::new(&program(Division::Even { chunks }, Vec::new()), &shape);
            let sizes: Vec<u64> = (0..chunks).map(|c| layout.bytes(&Span::chunk(Buf::In, c))).collect();
            prop_assert!(sizes.windows(2).all(|w| w[0] == w[1] || w[0] == w[1] + 1));
            prop_assert!(sizes[0] - sizes[sizes.len() - 1] <= 1);
        }

        #[test]
        fn scratch_chunks_are_aligned_and_disjoint(blocks in blocks(), elem in 1u64..9) {
            let shape = CallShape { elem_bytes: elem, in_blocks: &blocks, out_blocks: &[], coding: None, part: Part::WHOLE };
            let like = (0..blocks.len() as u32).rev().map(|block| (Buf::In, block)).collect();
            let layout = Layout::new(&program(Division::Blocks, like), &shape);
            let mut end = 0;
            for chunk in 0..blocks.len() as u32 {
                let span = Span::chunk(Buf::Scratch, chunk);
                let like = Span::chunk(Buf::In, blocks.len() as u32 - 1 - chunk);
                prop_assert_eq!(layout.bytes(&span), layout.bytes(&like));
                for extent in layout.extents(&span) {
                    prop_assert!(extent.offset % SCRATCH_ALIGN == 0 && extent.offset >= end && extent.piece == 0);
                    end = extent.offset + extent.len;
                }
            }
            prop_assert!(end <= layout.scratch_bytes());
        }
    }

    /// A codec with the given elements per grain and grains per tile, for each position in a block.
    #[derive(Debug)]
    struct Grains(Vec<(u64, u64)>);

    impl Coding for Grains {
        fn grain(&self, piece: u32) -> u64 {
            self.0[piece as usize].0
        }

        fn tile(&self, piece: u32) -> u64 {
            let (grain, most) = self.0[piece as usize];
            grain * most
        }

        fn tile_bytes(&self, role: Role, piece: u32, elems: u64) -> u64 {
            if elems == 0 { 0 } else { 16 + 8 * (elems * (1 + u64::from(piece) + role as u64)).div_ceil(8) }
        }
    }

    proptest! {
        #[test]
        fn chunks_of_an_encoded_call_are_cut_at_grains_of_each_piece(
            pieces in prop::collection::vec((0u64..900, 1u64..70, 1u64..9), 1..6),
            chunks in 1u32..20,
            blocks in 1u32..4,
        ) {
            let coding = Grains(pieces.iter().map(|&(_, grain, most)| (grain, most)).collect());
            let block: Vec<Elems> = pieces.iter().map(|&(elems, ..)| Elems(elems)).collect();
            let all = vec![block; blocks as usize];
            let shape = CallShape { elem_bytes: 4, in_blocks: &all, out_blocks: &[], coding: Some(&coding), part: Part::WHOLE };
            let division = if blocks == 1 { Division::Even { chunks } } else { Division::SplitBlocks { pieces: chunks } };
            let layout = Layout::new(&program(division, Vec::new()), &shape);
            let mut found = vec![vec![0; pieces.len()]; blocks as usize];
            for chunk in 0..division.chunks(blocks) {
                for tile in layout.tiles((Buf::In, chunk), &coding) {
                    let of_piece = &mut found[tile.block as usize][tile.piece as usize];
                    prop_assert_eq!(tile.first, *of_piece, "tiles follow each other");
                    prop_assert!(tile.first.is_multiple_of(coding.grain(tile.piece)));
                    prop_assert!(tile.elems > 0 && tile.elems <= coding.tile(tile.piece));
                    *of_piece += tile.elems;
                }
            }
            for block in found {
                prop_assert_eq!(block, pieces.iter().map(|&(elems, ..)| elems).collect::<Vec<_>>());
            }
        }

        #[test]
        fn parts_of_an_encoded_chunk_have_its_tiles_as_they_are(
            pieces in prop::collection::vec((0u64..900, 1u64..70, 1u64..9), 1..6),
            chunks in 1u32..7,
            of in 1u32..6,
        ) {
            let coding = Grains(pieces.iter().map(|&(_, grain, most)| (grain, most)).collect());
            let blocks = [pieces.iter().map(|&(elems, ..)| Elems(elems)).collect::<Vec<_>>()];
            let codes = (0..chunks).map(|chunk| Code { like: (Buf::In, chunk), role: Role::Reduce }).collect();
            let program = Program { codes, ..program(Division::Even { chunks }, Vec::new()) };
            let layout = |part| {
                let coding = Some(&coding as &dyn Coding);
                Layout::new(&program, &CallShape { elem_bytes: 4, in_blocks: &blocks, out_blocks: &[], coding, part })
            };
            let whole = layout(Part::WHOLE);
            let parts: Vec<Layout> = (0..of).map(|index| layout(Part { index, of })).collect();
            for (chunk, code) in (0..chunks).zip(&program.codes) {
                let (tiles, values) = (whole.tiles(code.like, &coding).collect::<Vec<_>>(), Span::chunk(Buf::In, chunk));
                let (mut found, mut bytes) = (Vec::new(), Vec::new());
                for part in &parts {
                    let own: Vec<Tile> = part.tiles(code.like, &coding).collect();
                    prop_assert!(own.len().abs_diff(tiles.len() / of as usize) <= 1);
                    prop_assert_eq!(own.iter().map(|tile| tile.elems * 4).sum::<u64>(), part.bytes(&values));
                    prop_assert_eq!(part.bytes(&Span::chunk(Buf::Code, chunk)), part.tile_bytes(code, &coding).sum::<u64>());
                    found.extend(own);
                    bytes.extend(bytes_of(&part.extents(&values)));
                }
                prop_assert_eq!(found, tiles);
                prop_assert_eq!(bytes, bytes_of(&whole.extents(&values)));
            }
        }

        #[test]
        fn chunks_of_an_encoded_call_have_about_as_many_bytes_each(
            small in 1u64..5000,
            large in 1000u64..100_000,
            chunks in 1u32..9,
        ) {
            // One tensor has four times as many bits per element as the other.
            let coding = Grains(vec![(8, 16), (8, 16), (8, 16), (8, 16)]);
            let blocks = [vec![Elems(large), Elems(0), Elems(0), Elems(small)]];
            let shape = CallShape { elem_bytes: 4, in_blocks: &blocks, out_blocks: &[], coding: Some(&coding), part: Part::WHOLE };
            let layout = Layout::new(&program(Division::Even { chunks }, Vec::new()), &shape);
            let bytes_of = |chunk| {
                [Role::Reduce, Role::Result]
                    .map(|role| layout.tile_bytes(&Code { like: (Buf::In, chunk), role }, &coding).sum::<u64>())
                    .iter()
                    .sum::<u64>()
            };
            let sizes: Vec<u64> = (0..chunks).map(bytes_of).collect();
            let mean = sizes.iter().sum::<u64>() / u64::from(chunks);
            // A grain at either end, and one more tile header.
            let slack = 2 * (8 * (5 + 6)) + 2 * 32;
            prop_assert!(sizes.iter().all(|&size| size.abs_diff(mean) <= slack), "{:?}", sizes);
        }

        #[test]
        fn encoded_chunks_are_aligned_and_disjoint(elems in 0u64..3000, chunks in 1u32..9) {
            let coding = Grains(vec![(8, 16)]);
            let blocks = [vec![Elems(elems)]];
            let codes = (0..chunks).map(|chunk| Code { like: (Buf::In, chunk), role: Role::Reduce }).collect();
            let program = Program { codes, ..program(Division::Even { chunks }, Vec::new()) };
            let shape = CallShape { elem_bytes: 4, in_blocks: &blocks, out_blocks: &[], coding: Some(&coding), part: Part::WHOLE };
            let layout = Layout::new(&program, &shape);
            let mut end = 0;
            for (chunk, code) in (0..chunks).zip(&program.codes) {
                let span = Span::chunk(Buf::Code, chunk);
                prop_assert_eq!(layout.bytes(&span), layout.tile_bytes(code, &coding).sum::<u64>());
                for extent in layout.extents(&span) {
                    prop_assert!(extent.offset % SCRATCH_ALIGN == 0 && extent.offset >= end);
                    end = extent.offset + extent.len;
                }
            }
            prop_assert!(end <= layout.code_bytes());
        }
    }

    #[test]
    fn a_span_keeps_its_order_and_joins_neighbours() {
        let blocks = [vec![Elems(10)], vec![Elems(3)]];
        let shape = CallShape { elem_bytes: 4, in_blocks: &blocks, out_blocks: &[], coding: None, part: Part::WHOLE };
        let layout = Layout::new(&program(Division::Even { chunks: 13 }, Vec::new()), &shape);
        let extents = layout.extents(&Span::cyclic(Buf::In, 11, 4, 13));
        let extent = |piece, offset, len| Extent { buf: Buf::In, piece, offset, len };
        assert_eq!(extents.as_slice(), [extent(1, 4, 8), extent(0, 0, 8)]);
    }

    #[test]
    fn buffers_beyond_four_gibibytes_keep_their_offsets() {
        let blocks = [vec![Elems(3 << 32)]];
        let shape = CallShape { elem_bytes: 8, in_blocks: &blocks, out_blocks: &[], coding: None, part: Part::WHOLE };
        let layout = Layout::new(&program(Division::Even { chunks: 3 }, Vec::new()), &shape);
        let extents = layout.extents(&Span::chunk(Buf::In, 2));
        assert_eq!(extents.as_slice(), [Extent { buf: Buf::In, piece: 0, offset: 2 << 35, len: 1 << 35 }]);
    }
}
