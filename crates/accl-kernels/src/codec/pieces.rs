//! Conversion of a slice's elements to float32, one piece at a time, and back, for any type and alignment.

use std::mem::MaybeUninit;
use std::slice;

use accl_types::Dtype;

use super::loops::Loops;
use super::traits::Slice;
use crate::reduce::float16;

/// Elements that are processed at a time. Their values and codes stay in the L1 cache.
pub(super) const PIECE: usize = 512;

impl Slice {
    /// Returns the elements at their own address, if they are float32 and aligned.
    ///
    /// # Safety
    /// The contract of [`Slice::piece`].
    #[inline]
    pub(super) unsafe fn in_place<'a>(&self) -> Option<&'a [f32]> {
        let is_float32 = !matches!(self.dtype, Dtype::F16 | Dtype::BF16) && self.src.cast::<f32>().is_aligned();
        // SAFETY: the pointer is aligned, and the `count` elements may be read by this function's contract.
        is_float32.then(|| unsafe { slice::from_raw_parts(self.src.cast(), self.count) })
    }

    /// Returns the elements from `start` on, as many as there is room for, in float32: at their own address, or in
    /// `room`.
    ///
    /// # Safety
    /// The elements may be read, and nothing writes them while they or the result are in use. `loops` belong to an
    /// instruction set of this machine.
    #[inline]
    pub(super) unsafe fn piece<'a>(&self, room: &'a mut [f32], start: usize, loops: &Loops) -> &'a [f32] {
        let part = self.part(start, room.len().min(self.count - start));
        let room = &mut room[..part.count];
        // SAFETY: the elements may be read by this function's contract. The memory of `room` is only written, with
        // floats.
        unsafe {
            if let Some(values) = part.in_place() {
                return values;
            }
            part.widen(slice::from_raw_parts_mut(room.as_mut_ptr().cast(), room.len()), loops);
        }
        room
    }

    /// Writes the elements as float32.
    ///
    /// # Safety
    /// The contract of [`Slice::piece`]. `dst` has room for exactly as many elements as there are: all of it is
    /// written, and no more elements are read.
    #[inline]
    unsafe fn widen(&self, dst: &mut [MaybeUninit<f32>], loops: &Loops) {
        debug_assert_eq!(dst.len(), self.count);
        // SAFETY: the `count` elements may be read by this function's contract; pairs of bytes need no alignment.
        unsafe {
            match self.dtype {
                Dtype::F16 => (loops.widen_f16)(dst, slice::from_raw_parts(self.src.cast(), self.count)),
                Dtype::BF16 => (loops.widen_bf16)(dst, slice::from_raw_parts(self.src.cast(), self.count)),
                _ => self.src.copy_to_nonoverlapping(dst.as_mut_ptr().cast(), size_of_val(dst)),
            }
        }
    }
}

/// Result for a finite value beyond the range of the type that it is rounded to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Overflow {
    /// The largest finite value.
    Largest,
    /// An infinity.
    Infinite,
}

impl Overflow {
    fn most(self, largest: f32) -> f32 {
        if self == Overflow::Largest { largest } else { f32::INFINITY }
    }
}

/// Writes elements of `dtype` to `dst` from the float32 that `make` writes.
///
/// # Safety
/// `dst` has room for `count` elements, at most as many as `room` has, and nothing else accesses it meanwhile.
/// `make` fills all of the slice that it gets. `loops` belong to an instruction set of this machine.
pub(super) unsafe fn place(
    dst: *mut u8,
    (dtype, overflow): (Dtype, Overflow),
    count: usize,
    room: &mut [MaybeUninit<f32>],
    loops: &Loops,
    make: impl FnOnce(&mut [MaybeUninit<f32>]),
) {
    // SAFETY: `dst` has room for `count` elements by this function's contract, and is aligned where it is used as
    // float32. `make` has filled `room` before it is read.
    unsafe {
        if dtype == Dtype::F32 && dst.cast::<f32>().is_aligned() {
            return make(slice::from_raw_parts_mut(dst.cast(), count));
        }
        let room = &mut room[..count];
        make(room);
        write_values(dst, (dtype, overflow), slice::from_raw_parts(room.as_ptr().cast(), count), loops);
    }
}

/// Writes the elements of a slice as `into`: unchanged, rounded, or widened.
///
/// # Safety
/// The contract of [`Slice::piece`]. `dst` has room for the elements, and nothing else accesses it meanwhile.
pub(super) unsafe fn convert(dst: *mut u8, into: Dtype, slice: Slice, loops: &Loops) {
    // An empty slice may have the address 0, which other code below does not allow.
    if slice.count == 0 {
        return;
    }
    if into == slice.dtype {
        // SAFETY: by this function's contract the elements may be read, and `dst` has room for them. Nothing else
        // accesses `dst`, so the two do not overlap.
        return unsafe { slice.src.copy_to_nonoverlapping(dst, slice.count * into.size_bytes()) };
    }
    // SAFETY: the elements may be read, and `dst` has room for them, by this function's contract. It is used as float32
    // only if it is aligned.
    unsafe {
        if into == Dtype::F32 && dst.cast::<f32>().is_aligned() {
            return slice.widen(slice::from_raw_parts_mut(dst.cast(), slice.count), loops);
        }
        let mut room = [0.0; PIECE];
        for start in (0..slice.count).step_by(PIECE) {
            let dst = dst.wrapping_add(start * into.size_bytes());
            write_values(dst, (into, Overflow::Infinite), slice.piece(&mut room, start, loops), loops);
        }
    }
}

/// Writes `values` to `dst` as elements of `dtype`.
///
/// # Safety
/// `dst` has room for as many elements, and nothing else accesses it meanwhile. `loops` belong to an instruction set of
/// this machine.
pub(super) unsafe fn write_values(dst: *mut u8, (dtype, overflow): (Dtype, Overflow), values: &[f32], loops: &Loops) {
    // SAFETY: `dst` has room for as many elements by this function's contract; pairs of bytes need no alignment.
    unsafe {
        match dtype {
            Dtype::F16 => {
                let most = overflow.most(float16::F16_MAX);
                (loops.narrow_f16)(slice::from_raw_parts_mut(dst.cast(), values.len()), values, most);
            }
            Dtype::BF16 => {
                let most = overflow.most(float16::BF16_MAX);
                (loops.narrow_bf16)(slice::from_raw_parts_mut(dst.cast(), values.len()), values, most);
            }
            _ => values.as_ptr().cast::<u8>().copy_to_nonoverlapping(dst, size_of_val(values)),
        }
    }
}

/// Adds the elements of `src` to as many sums.
pub(super) fn add(sums: &mut [f32], src: &[u8], dtype: Dtype, loops: &Loops) {
    assert_eq!(src.len(), sums.len() * dtype.size_bytes(), "an element for each sum");
    let slice = Slice { src: src.as_ptr(), dtype, tensor: dtype, count: sums.len(), first: 0 };
    // SAFETY: the slice refers to `src`, which has an element for each sum; the instruction set was checked when the
    // loops were chosen.
    unsafe { add_slice(sums, slice, loops) };
}

/// Adds the elements of a slice to as many sums.
///
/// # Safety
/// The contract of [`Slice::piece`]. There are as many elements as sums.
pub(super) unsafe fn add_slice(sums: &mut [f32], slice: Slice, loops: &Loops) {
    let mut room = [0.0; PIECE];
    for (start, sums) in (0..).step_by(PIECE).zip(sums.chunks_mut(PIECE)) {
        // SAFETY: the elements may be read, and this machine has the instruction set of `loops`, by this function's
        // contract.
        unsafe { (loops.add_values)(sums, slice.piece(&mut room, start, loops)) };
    }
}

/// Reads an element of a slice's or the metadata's type.
#[inline]
pub(super) fn read(dtype: Dtype, bytes: &[u8]) -> f32 {
    match (dtype, bytes) {
        (Dtype::F16, &[a, b]) => float16::widen_f16(u16::from_le_bytes([a, b])),
        (Dtype::BF16, &[a, b]) => float16::widen_bf16(u16::from_le_bytes([a, b])),
        (_, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        _ => f32::NAN,
    }
}

/// The reverse of [`read`], for values that the type can represent.
#[inline]
pub(super) fn write(meta: Dtype, bytes: &mut [u8], value: f32) {
    match meta {
        Dtype::F16 => bytes.copy_from_slice(&float16::narrow_f16(value).to_le_bytes()),
        Dtype::BF16 => bytes.copy_from_slice(&float16::narrow_bf16(value).to_le_bytes()),
        _ => bytes.copy_from_slice(&value.to_le_bytes()),
    }
}
