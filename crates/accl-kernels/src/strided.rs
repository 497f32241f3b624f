//! Strided tensors to dense row-major buffers and back, with conjugate and negative views resolved on the way.
//!
//! Owns the order of the walk: dimensions that lie behind one another are merged, and where the dense side and the
//! view run along different dimensions both are walked in tiles. Works by element size; only the conj and neg bits
//! look at the dtype. Read [`StridedView`] first.

use accl_types::Dtype;
use smallvec::SmallVec;

/// Elements along each side of a tile: a tile touches one cache line in each of this many rows of the view.
const TILE: usize = 16;

/// A tensor in memory of the caller, as torch describes it.
///
/// `sizes` and `strides` are in elements and have one entry for each dimension, outermost first; none stand for a tensor
/// of one element. Strides may be 0 (expanded) or negative. `ptr` is the element whose indices are all 0.
/// `conj` and `neg` say that the tensor's values are the conjugate, the negative, of what lies in memory.
#[derive(Clone, Copy, Debug)]
pub struct StridedView<'a> {
    /// The first element; need not be aligned.
    pub ptr: *mut u8,
    /// The element type.
    pub dtype: Dtype,
    /// Elements along each dimension.
    pub sizes: &'a [i64],
    /// Elements between neighbours along each dimension.
    pub strides: &'a [i64],
    /// torch's conjugate bit; has no effect on real dtypes.
    pub conj: bool,
    /// torch's negative bit; has no effect on bool and on floats without a sign.
    pub neg: bool,
}

impl StridedView<'_> {
    /// Elements in the view.
    pub fn count(&self) -> usize {
        self.sizes.iter().map(|&size| usize::try_from(size).unwrap_or(0)).product()
    }

    /// Whether the view's memory is what [`pack`] would write, so that no packing is needed.
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
/// Every element of the view may be read, `dst` has room for [`StridedView::count`] elements, the two do not overlap,
/// and nobody else writes or uses them meanwhile.
pub unsafe fn pack(dst: *mut u8, view: &StridedView<'_>) {
    // SAFETY: the caller's promise.
    unsafe { copy(view, Side { ptr: view.ptr, of: |dim| dim.view }, Side { ptr: dst, of: |dim| dim.dense }) };
}

/// Copies elements from `src`, where they lie in row-major order without gaps, into `view`: the inverse of [`pack`].
/// Which value remains in an element that the view has more than once is not specified.
///
/// # Safety
/// Every element of the view may be written, `src` holds [`StridedView::count`] elements, the two do not overlap, and
/// nobody else writes or uses them meanwhile.
pub unsafe fn unpack(view: &StridedView<'_>, src: *const u8) {
    // SAFETY: the caller's promise.
    unsafe {
        copy(view, Side { ptr: src.cast_mut(), of: |dim| dim.dense }, Side { ptr: view.ptr, of: |dim| dim.view })
    };
}

/// What happens to an element on the way. Each is its own inverse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Keep,
    /// Flips the sign bits given in little-endian order of the element's bytes.
    Flip(u128),
    /// Two's complement negation.
    Negate,
    /// Flips the sign bit of a one-byte float that has no negative zero: its bits stand for NaN.
    FlipNonzero,
}

impl Change {
    fn of(view: &StridedView<'_>) -> Change {
        let bits = 8 * view.dtype.size_bytes() as u32;
        let top = 1u128 << (bits - 1);
        let flips = match view.dtype {
            Dtype::Bool | Dtype::F8E8M0Fnu => return Change::Keep,
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
            Dtype::C32 | Dtype::C64 | Dtype::C128 => {
                let conj = if view.conj { top } else { 0 };
                let neg = if view.neg { top | top >> (bits / 2) } else { 0 };
                conj ^ neg
            }
        };
        if flips == 0 { Change::Keep } else { Change::Flip(flips) }
    }
}

/// One dimension: elements along it, and bytes from one to the next in the view and in the dense buffer.
#[derive(Clone, Copy, Debug)]
struct Dim {
    size: usize,
    view: isize,
    dense: isize,
}

type Dims = SmallVec<[Dim; 6]>;

/// The loops of a copy.
struct Walk {
    /// Outermost first.
    outer: Dims,
    /// The two inner loops: `across`, in it `along`.
    across: Dim,
    along: Dim,
    /// Elements of `along` that are copied for each step across before the next ones are begun.
    tile: usize,
}

impl Walk {
    fn new(view: &StridedView<'_>) -> Walk {
        let mut dims = merged_dims(view);
        let single = Dim { size: 1, view: 0, dense: 0 };
        let along = dims.pop().unwrap_or(single);
        // Steps along the view's densest dimension share cache lines: if that is not `along`, it comes next to it.
        let densest = dims.iter().enumerate().min_by_key(|(_, dim)| dim.view.unsigned_abs());
        let (across, tile) = match densest {
            Some((at, dim)) if dim.view.unsigned_abs() < along.view.unsigned_abs() => (dims.remove(at), TILE),
            Some(_) | None => (dims.pop().unwrap_or(single), usize::MAX),
        };
        Walk { outer: dims, across, along, tile }
    }
}

/// The dimensions without those of size 1, and with neighbours merged where one continues the other in the view. The
/// dense side never stands in the way: there each dimension continues the next.
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

/// One side of a copy: where it begins, and its step along a dimension.
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
    // SAFETY: the caller's promise, for each.
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
/// As [`copy`], with elements of the size of `T`.
unsafe fn copy_cells<T: Cell>(walk: &Walk, from: Side, to: Side, change: Change) {
    match change {
        Change::Keep => copy_blocks(walk, from, to, |row| {
            if row.from_step == size_of::<T>() as isize && row.to_step == row.from_step {
                // SAFETY: the caller's promise; the row has no gaps on either side.
                unsafe { row.from.copy_to_nonoverlapping(row.to, row.count * size_of::<T>()) };
            } else {
                // SAFETY: the caller's promise.
                unsafe { map_row(row, |cell: T| cell) };
            }
        }),
        Change::Flip(mask) => {
            let mask = T::truncate(mask);
            // SAFETY: the caller's promise.
            copy_blocks(walk, from, to, |row| unsafe { map_row(row, |cell: T| cell.xor(mask)) });
        }
        // SAFETY: the caller's promise.
        Change::Negate => copy_blocks(walk, from, to, |row| unsafe { map_row(row, T::negate) }),
        // SAFETY: the caller's promise.
        Change::FlipNonzero => copy_blocks(walk, from, to, |row| unsafe { map_row(row, T::flip_nonzero) }),
    }
}

/// `count` elements on either side, steps in bytes.
#[derive(Clone, Copy)]
struct Row {
    from: *const u8,
    to: *mut u8,
    count: usize,
    from_step: isize,
    to_step: isize,
}

/// Copies a row, changing each element.
///
/// # Safety
/// The elements may be read and written, and the sides do not overlap.
#[inline(always)]
unsafe fn map_row<T: Cell>(row: Row, change: impl Fn(T) -> T) {
    let unit = size_of::<T>() as isize;
    let Row { from, to, count, from_step, to_step } = row;
    // Known steps let the compiler use vectors, or at least simple addressing.
    // SAFETY: the caller's promise.
    unsafe {
        match (from_step == unit, to_step == unit) {
            (true, true) => map_steps(from, to, count, unit, unit, change),
            (true, false) => map_steps(from, to, count, unit, to_step, change),
            (false, true) => map_steps(from, to, count, from_step, unit, change),
            (false, false) => map_steps(from, to, count, from_step, to_step, change),
        }
    }
}

/// # Safety
/// As [`map_row`].
#[inline(always)]
unsafe fn map_steps<T: Cell>(
    mut from: *const u8,
    mut to: *mut u8,
    count: usize,
    from_step: isize,
    to_step: isize,
    change: impl Fn(T) -> T,
) {
    for _ in 0..count {
        // SAFETY: the caller's promise; unaligned access is meant.
        unsafe { to.cast::<T>().write_unaligned(change(from.cast::<T>().read_unaligned())) };
        (from, to) = (from.wrapping_offset(from_step), to.wrapping_offset(to_step));
    }
}

/// Calls `copy` with pieces of rows that make up the whole.
#[inline(always)]
fn copy_blocks(walk: &Walk, from: Side, to: Side, copy: impl Fn(Row)) {
    let Walk { outer, across, along, tile } = walk;
    let (from_step, to_step) = ((from.of)(along), (to.of)(along));
    let (from_across, to_across) = ((from.of)(across), (to.of)(across));
    let mut index: SmallVec<[usize; 6]> = SmallVec::from_elem(0, outer.len());
    let (mut src, mut dst) = (from.ptr.cast_const(), to.ptr);
    loop {
        let mut done = 0;
        while done < along.size {
            let count = (along.size - done).min(*tile);
            let at = done as isize;
            for i in 0..across.size as isize {
                copy(Row {
                    from: src.wrapping_offset(at * from_step + i * from_across),
                    to: dst.wrapping_offset(at * to_step + i * to_across),
                    count,
                    from_step,
                    to_step,
                });
            }
            done += count;
        }
        // The next combination of outer indices, the last one running fastest.
        let advanced = outer.iter().zip(&mut index).rev().any(|(dim, at)| {
            let last = *at + 1 == dim.size;
            let steps = if last { -(*at as isize) } else { 1 };
            src = src.wrapping_offset(steps * (from.of)(dim));
            dst = dst.wrapping_offset(steps * (to.of)(dim));
            *at = at.wrapping_add_signed(steps);
            !last
        });
        if !advanced {
            return;
        }
    }
}
