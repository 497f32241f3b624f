//! Packs strided tensors into dense row-major buffers and unpacks them, and applies conjugate and negative bits on the
//! way.
//!
//! Owns the order of the walk. Dimensions that continue each other are merged. If the dense side and the view are
//! contiguous along different dimensions, both are walked in tiles.
//! Works by element size; only the conj and neg bits depend on the dtype. Read [`StridedView`] first.

use std::mem::MaybeUninit;

use accl_types::Dtype;
use smallvec::SmallVec;

/// Elements of a row that are copied before the next row, if neighbouring rows share cache lines.
const PIECE: usize = 64;

/// Number of rows from which on a transposition uses tiles.
const MIN_TILED: usize = 6;

/// A tensor in the caller's memory, as torch describes it.
///
/// `sizes` and `strides` are in elements and have one entry per dimension, outermost first. Without entries the tensor
/// has one element. Strides may be 0 (expanded) or negative. `ptr` points to the element whose indices are all 0.
/// If `conj` or `neg` is set, the tensor's values are the conjugate or the negative of the values in memory.
#[derive(Clone, Copy, Debug)]
pub struct StridedView<'a> {
    /// Address of the first element; need not be aligned.
    pub ptr: *mut u8,
    /// Element type.
    pub dtype: Dtype,
    /// Number of elements along each dimension.
    pub sizes: &'a [i64],
    /// Distance in elements between neighbours along each dimension.
    pub strides: &'a [i64],
    /// torch's conjugate bit; has no effect on real dtypes.
    pub conj: bool,
    /// torch's negative bit; has no effect on bool and on floats without a sign.
    pub neg: bool,
}

impl StridedView<'_> {
    /// Returns the number of elements in the view.
    pub fn count(&self) -> usize {
        self.sizes.iter().map(|&size| usize::try_from(size).unwrap_or(0)).product()
    }

    /// Whether the view's memory equals what [`pack`] would write, so that no packing is needed.
    pub fn is_dense(&self) -> bool {
        let plain = matches!(Change::of(self), Change::Keep);
        let mut expected = 1;
        let row_major = self.sizes.iter().zip(self.strides).rev().all(|(&size, &stride)| {
            let fits = size == 1 || stride == expected;
            expected *= size.max(1);
            fits
        });
        plain && row_major || self.count() == 0
    }
}

/// Copies the elements of `view`, in row-major order of their indices, to `dst` without gaps.
///
/// # Safety
/// Every element of the view may be read, and `dst` has room for [`StridedView::count`] elements. The two do not
/// overlap, and no other thread writes the view or accesses `dst` meanwhile.
pub unsafe fn pack(dst: *mut u8, view: &StridedView<'_>) {
    // SAFETY: the view may be read and `dst` written, without overlap, by this function's contract.
    unsafe { copy(view, Side { ptr: view.ptr, of: |dim| dim.view }, Side { ptr: dst, of: |dim| dim.dense }) };
}

/// Copies elements from `src`, where they lie in row-major order without gaps, into `view`: the inverse of [`pack`]. If
/// several indices share an element, it is not specified which value remains.
///
/// # Safety
/// Every element of the view may be written, and `src` holds [`StridedView::count`] elements. The two do not overlap,
/// and no other thread writes `src` or accesses the view meanwhile.
pub unsafe fn unpack(view: &StridedView<'_>, src: *const u8) {
    // SAFETY: `src` may be read and the view written, without overlap, by this function's contract.
    unsafe {
        copy(view, Side { ptr: src.cast_mut(), of: |dim| dim.dense }, Side { ptr: view.ptr, of: |dim| dim.view })
    };
}

/// Change of an element's value during the copy. Each change is its own inverse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Keep,
    /// Flips the given bits of the element, which is read as a little-endian integer. They are sign bits.
    Flip(u128),
    /// Two's complement negation.
    Negate,
    /// Flips the sign bit of a one-byte float, except of zero: the type has no negative zero, and its bits mean NaN.
    FlipNonzero,
}

impl Change {
    fn of(view: &StridedView<'_>) -> Change {
        let bits = 8 * view.dtype.size_bytes() as u32;
        let top = 1u128 << (bits - 1);
        let flips = match view.dtype {
            Dtype::Bool | Dtype::F8E8M0Fnu | Dtype::Bits8 | Dtype::Bits16 => return Change::Keep,
            Dtype::U8 | Dtype::I8 | Dtype::U16 | Dtype::I16 | Dtype::U32 | Dtype::I32 | Dtype::U64 | Dtype::I64 => {
                return if view.neg { Change::Negate } else { Change::Keep };
            }
            Dtype::F8E4M3FnUz | Dtype::F8E5M2FnUz => {
                return if view.neg { Change::FlipNonzero } else { Change::Keep };
            }
            Dtype::F16 | Dtype::BF16 | Dtype::F32 | Dtype::F64 | Dtype::F8E4M3Fn | Dtype::F8E5M2 => {
                if view.neg {
                    top
                } else {
                    0
                }
            }
            Dtype::F4E2M1FnX2 => {
                if view.neg {
                    0x88
                } else {
                    0
                }
            }
            // The imaginary part comes second.
            Dtype::C32 | Dtype::BC32 | Dtype::C64 | Dtype::C128 => {
                let conj = if view.conj { top } else { 0 };
                let neg = if view.neg { top | top >> (bits / 2) } else { 0 };
                conj ^ neg
            }
        };
        if flips == 0 { Change::Keep } else { Change::Flip(flips) }
    }
}

/// One dimension: number of elements along it, and bytes between neighbours in the view and in the dense buffer.
#[derive(Clone, Copy, Debug)]
struct Dim {
    size: usize,
    view: isize,
    dense: isize,
}

type Dims = SmallVec<[Dim; 6]>;

/// The loops of a copy.
struct Walk {
    /// Outer loops, outermost first.
    outer: Dims,
    /// The two inner loops: `across`, and inside it `along`, which has no gaps in the dense buffer.
    across: Dim,
    along: Dim,
    inner: InnerLoops,
}

/// Order of the two inner loops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InnerLoops {
    /// Row after row.
    Rows,
    /// A piece of each row, then the next piece of each row.
    Pieces,
    /// In square tiles by way of a buffer. Without tiles one of the two sides would be walked with a large step. If
    /// that step is a power of two, all its cache lines compete for one set of the cache.
    Tiles,
}

impl Walk {
    fn new(view: &StridedView<'_>) -> Walk {
        let mut dims = merged_dims(view);
        let single = Dim { size: 1, view: 0, dense: 0 };
        let along = dims.pop().unwrap_or(single);
        // Steps along the view's densest dimension share cache lines. If that dimension is not `along`, it becomes
        // `across`.
        let densest = dims.iter().enumerate().min_by_key(|(_, dim)| dim.view.unsigned_abs());
        let (across, inner) = match densest {
            Some((at, dim)) if dim.view.unsigned_abs() < along.view.unsigned_abs() => {
                let across = dims.remove(at);
                (across, if across.size.min(along.size) < MIN_TILED { InnerLoops::Pieces } else { InnerLoops::Tiles })
            }
            Some(_) | None => (dims.pop().unwrap_or(single), InnerLoops::Rows),
        };
        Walk { outer: dims, across, along, inner }
    }
}

/// Returns the dimensions without dimensions of size 1. Neighbours are merged if one continues the other in the view.
/// On the dense side each dimension continues the next anyway.
fn merged_dims(view: &StridedView<'_>) -> Dims {
    let size_bytes = view.dtype.size_bytes() as isize;
    let mut dims = Dims::new();
    let mut dense = size_bytes;
    for (&size, &stride) in view.sizes.iter().zip(view.strides).rev().filter(|&(&size, _)| size != 1) {
        let (size, stride) = (size as usize, stride as isize * size_bytes);
        match dims.last_mut() {
            Some(inner) if stride == inner.view * inner.size as isize => inner.size *= size,
            Some(_) | None => dims.push(Dim { size, view: stride, dense }),
        }
        dense *= size as isize;
    }
    dims.reverse();
    dims
}

/// One side of a copy: its start address, and its step in bytes along a dimension.
#[derive(Clone, Copy)]
struct Side {
    ptr: *mut u8,
    of: fn(&Dim) -> isize,
}

/// # Safety
/// `from` may be read and `to` written at every element of `view`, and they do not overlap.
unsafe fn copy(view: &StridedView<'_>, from: Side, to: Side) {
    if view.count() == 0 {
        return;
    }
    let walk = Walk::new(view);
    let change = Change::of(view);
    // SAFETY: this function's contract, and each cell type has the dtype's element size.
    unsafe {
        match view.dtype.size_bytes() {
            1 => copy_cells::<u8>(&walk, from, to, change),
            2 => copy_cells::<u16>(&walk, from, to, change),
            4 => copy_cells::<u32>(&walk, from, to, change),
            8 => copy_cells::<u64>(&walk, from, to, change),
            16 => copy_cells::<u128>(&walk, from, to, change),
            other => unreachable!("no dtype has {other} bytes"),
        }
    }
}

/// An element as an unsigned integer of its size.
trait Cell: Copy {
    /// Elements along each side of a tile: two cache lines, if the tile fits into its buffer.
    const TILE: usize = if size_of::<Self>() == 1 { 64 } else { 128 / size_of::<Self>() };

    fn truncate(mask: u128) -> Self;
    fn xor(self, mask: Self) -> Self;
    fn negate(self) -> Self;
    fn flip_nonzero(self) -> Self;
}

macro_rules! cells {
    ($($cell:ty)*) => {
        $(
            impl Cell for $cell {
                #[inline(always)]
                fn truncate(mask: u128) -> Self {
                    mask as $cell
                }

                #[inline(always)]
                fn xor(self, mask: Self) -> Self {
                    self ^ mask
                }

                #[inline(always)]
                fn negate(self) -> Self {
                    self.wrapping_neg()
                }

                #[inline(always)]
                fn flip_nonzero(self) -> Self {
                    const SIGN: $cell = 1 << (<$cell>::BITS - 1);
                    if self & !SIGN == 0 { self } else { self ^ SIGN }
                }
            }
        )*
    };
}

cells!(u8 u16 u32 u64 u128);

/// # Safety
/// The contract of [`copy`], with elements of the size of `T`.
unsafe fn copy_cells<T: Cell>(walk: &Walk, from: Side, to: Side, change: Change) {
    // SAFETY: the contract of `copy_planes` is the contract of this function.
    unsafe {
        match change {
            Change::Keep => copy_planes(walk, from, to, |cell: T| cell),
            Change::Flip(mask) => {
                let mask = T::truncate(mask);
                copy_planes(walk, from, to, |cell: T| cell.xor(mask));
            }
            Change::Negate => copy_planes(walk, from, to, T::negate),
            Change::FlipNonzero => copy_planes(walk, from, to, T::flip_nonzero),
        }
    }
}

/// One dimension of a copy: number of elements along it, and bytes between neighbours on either side.
#[derive(Clone, Copy)]
struct Run {
    count: usize,
    from: isize,
    to: isize,
}

/// Copies the plane of the two inner loops for every combination of the outer indices.
///
/// # Safety
/// The contract of [`copy`], with elements of the size of `T`.
unsafe fn copy_planes<T: Cell>(walk: &Walk, from: Side, to: Side, change: impl Fn(T) -> T) {
    let run = |dim: &Dim| Run { count: dim.size, from: (from.of)(dim), to: (to.of)(dim) };
    let (across, along) = (run(&walk.across), run(&walk.along));
    let mut index: SmallVec<[usize; 6]> = SmallVec::from_elem(0, walk.outer.len());
    let (mut src, mut dst) = (from.ptr.cast_const(), to.ptr);
    loop {
        // SAFETY: `src` and `dst` are elements of the same index within the buffers of this function's contract.
        unsafe {
            match walk.inner {
                InnerLoops::Rows => copy_rows(src, dst, across, along, along.count, &change),
                InnerLoops::Pieces => copy_rows(src, dst, across, along, PIECE, &change),
                // The first of the two arguments is the dimension with the smaller step in `src`.
                InnerLoops::Tiles if across.from.abs() < along.from.abs() => {
                    copy_tiles(src, dst, across, along, &change)
                }
                InnerLoops::Tiles => copy_tiles(src, dst, along, across, &change),
            }
        }
        // Advances to the next combination of outer indices; the last index runs fastest.
        let advanced = walk.outer.iter().map(run).zip(&mut index).rev().any(|(run, at)| {
            let last = *at + 1 == run.count;
            let steps = if last { -(*at as isize) } else { 1 };
            src = src.wrapping_offset(steps * run.from);
            dst = dst.wrapping_offset(steps * run.to);
            *at = at.wrapping_add_signed(steps);
            !last
        });
        if !advanced {
            return;
        }
    }
}

/// Copies the plane in rows along `along`, `piece` elements of each row at a time.
///
/// # Safety
/// The contract of [`copy`], for the plane that begins at `from` and `to`.
#[inline(always)]
unsafe fn copy_rows<T: Cell>(
    from: *const u8,
    to: *mut u8,
    across: Run,
    along: Run,
    piece: usize,
    change: impl Fn(T) -> T,
) {
    let unit = size_of::<T>() as isize;
    let mut done = 0;
    while done < along.count {
        let count = piece.min(along.count - done);
        let at = done as isize;
        for i in 0..across.count as isize {
            let from = from.wrapping_offset(at * along.from + i * across.from);
            let to = to.wrapping_offset(at * along.to + i * across.to);
            // Steps known at compile time let the compiler use vectors (or memcpy), or at least simple addressing.
            // SAFETY: the `count` elements of the row lie within the plane of this function's contract.
            unsafe {
                match (along.from == unit, along.to == unit) {
                    (true, true) => copy_row(from, to, Run { count, from: unit, to: unit }, &change),
                    (true, false) => copy_row(from, to, Run { count, from: unit, to: along.to }, &change),
                    (false, true) => copy_row(from, to, Run { count, from: along.from, to: unit }, &change),
                    (false, false) => copy_row(from, to, Run { count, ..along }, &change),
                }
            }
        }
        done += count;
    }
}

/// # Safety
/// The contract of [`copy`], for the row that begins at `from` and `to`.
#[inline(always)]
unsafe fn copy_row<T: Cell>(mut from: *const u8, mut to: *mut u8, run: Run, change: impl Fn(T) -> T) {
    for _ in 0..run.count {
        // SAFETY: the element lies within the row of this function's contract; the access is unaligned on purpose.
        unsafe { to.cast::<T>().write_unaligned(change(from.cast::<T>().read_unaligned())) };
        (from, to) = (from.wrapping_offset(run.from), to.wrapping_offset(run.to));
    }
}

/// Room for a tile of any cell type, aligned for it.
type TileBuffer = [MaybeUninit<u128>; 512];

/// Copies the plane in tiles. `reading` is the dimension with the smaller step in `from`, `writing` the one with the
/// smaller step in `to`.
///
/// # Safety
/// The contract of [`copy`], for the plane that begins at `from` and `to`.
#[inline(always)]
unsafe fn copy_tiles<T: Cell>(from: *const u8, to: *mut u8, reading: Run, writing: Run, change: impl Fn(T) -> T) {
    const { assert!(T::TILE * T::TILE * size_of::<T>() <= size_of::<TileBuffer>()) };
    let unit = size_of::<T>() as isize;
    let mut buffer: TileBuffer = [const { MaybeUninit::uninit() }; 512];
    for r in (0..reading.count).step_by(T::TILE) {
        for w in (0..writing.count).step_by(T::TILE) {
            let (i, j) = (r as isize, w as isize);
            let from = from.wrapping_offset(i * reading.from + j * writing.from);
            let to = to.wrapping_offset(i * reading.to + j * writing.to);
            let read = Run { count: T::TILE.min(reading.count - r), ..reading };
            let write = Run { count: T::TILE.min(writing.count - w), ..writing };
            let gapless = read.from == unit && write.to == unit;
            // SAFETY: the tile lies within the plane of this function's contract, and its sides have at most `TILE`
            // elements.
            unsafe {
                if gapless && read.count == T::TILE && write.count == T::TILE {
                    // The common case again, with all steps and counts known at compile time.
                    let read = Run { count: T::TILE, from: unit, ..read };
                    let write = Run { count: T::TILE, to: unit, ..write };
                    copy_tile(from, to, read, write, &mut buffer, &change);
                } else {
                    copy_tile(from, to, read, write, &mut buffer, &change);
                }
            }
        }
    }
}

/// # Safety
/// The contract of [`copy`], for the tile that begins at `from` and `to`. Its sides are at most `T::TILE` long.
#[inline(always)]
unsafe fn copy_tile<T: Cell>(
    from: *const u8,
    to: *mut u8,
    read: Run,
    write: Run,
    buffer: &mut TileBuffer,
    change: impl Fn(T) -> T,
) {
    let unit = size_of::<T>() as isize;
    let line = T::TILE as isize * unit;
    let buffer = buffer.as_mut_ptr().cast::<u8>();
    for j in 0..write.count as isize {
        let filled = Run { count: read.count, from: read.from, to: unit };
        // SAFETY: the row lies within the tile of this function's contract. `copy_tiles` has checked that the buffer
        // holds `TILE` lines.
        unsafe {
            copy_row(from.wrapping_offset(j * write.from), buffer.wrapping_offset(j * line), filled, |cell: T| cell)
        };
    }
    for i in 0..read.count as isize {
        let emptied = Run { count: write.count, from: line, to: write.to };
        // SAFETY: the column lies within the tile of this function's contract, and the loop before has filled these
        // cells of the buffer.
        unsafe { copy_row(buffer.wrapping_offset(i * unit), to.wrapping_offset(i * read.to), emptied, &change) };
    }
}
