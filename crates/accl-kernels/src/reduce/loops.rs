//! The loops of all kernels, each written once and inlined into a function per instruction set (`arch/<isa>.rs`).
//!
//! Types that are handled in groups are processed operand by operand.
//! Types that are handled one by one, in portable code only, are vectorised by the compiler. It does so if it knows
//! that buffers do not overlap: as parameters of a function, or next to a buffer of the function itself.

use std::mem::MaybeUninit;
use std::slice;

use super::lanes::{BLOCK, FloatLanes, FloatReg, Lanes, Last, LastOn, Op, OpOn, SLOTS};

/// Sources that are read at the same time: memory is read in few long streams, and accumulators stay in registers.
const AT_ONCE: usize = 4;

/// Whether elements are handled as vectors, and not one or two at a time for the compiler to vectorise.
const fn is_group<V: Lanes>() -> bool {
    V::COUNT * V::SIZE_BYTES >= 32
}

/// Calls `$step::<V, ..>` for every group and `$step::<V::Tail, ..>` for every element after the last group. `$i` is
/// the element's index. `$slot` is the index of its accumulator, if the count is at most `BLOCK`.
macro_rules! steps {
    ($V:ident, $count:expr, $i:ident => $step:ident::$with:tt $args:tt) => {
        steps!($V, $count, $i, _slot => $step::$with $args)
    };
    ($V:ident, $count:expr, $i:ident, $slot:ident => $step:ident::[$($with:tt),*]($($arg:expr),*)) => {{
        let count: usize = $count;
        let grouped = count - count % $V::COUNT;
        let mut $i = 0;
        while $i < grouped {
            let $slot = $i;
            // SAFETY: `i + COUNT <= count` here. The function that uses this macro ensures that each argument has
            // `count` elements, by its contract or from the lengths of its slices.
            unsafe { $step::<$V $(, $with)*>($($arg),*) };
            $i += $V::COUNT;
        }
        while $i < count {
            let $slot = BLOCK + ($i - grouped);
            // SAFETY: `i < count` here. The function that uses this macro ensures that each argument has `count`
            // elements, by its contract or from the lengths of its slices.
            unsafe { $step::<$V::Tail $(, $with)*>($($arg),*) };
            $i += 1;
        }
    }};
}

/// Computes dst = a op b, elementwise.
///
/// # Safety
/// `count` elements can be read at `a` and `b` and written at `dst`. `dst` does not overlap `a` or `b`, or is equal to
/// it.
#[inline(always)]
pub(crate) unsafe fn pair<V: Lanes, O: OpOn<V>, F: LastOn<V>>(
    dst: *mut u8,
    [a, b]: [*const u8; 2],
    count: usize,
    world: f64,
) {
    if is_group::<V>() {
        return steps!(V, count, i => combine::[O, F, 2](dst, [a, b], i, world));
    }
    // The operation commutes, see the crate's rules.
    let other = if dst.cast_const() == a { b } else { a };
    let len_bytes = count * V::SIZE_BYTES;
    // SAFETY: by this function's contract the buffers have `len_bytes` bytes. Where slices are made, `dst` overlaps no
    // other slice.
    unsafe {
        if other == dst.cast_const() {
            in_blocks::<V, O, F>(dst, &[a, b], count, world);
        } else if dst.cast_const() == a || dst.cast_const() == b {
            pair_in_place::<V, O, F>(
                slice::from_raw_parts_mut(dst, len_bytes),
                slice::from_raw_parts(other, len_bytes),
                world,
            );
        } else {
            let dst = slice::from_raw_parts_mut(dst.cast::<MaybeUninit<u8>>(), len_bytes);
            pair_apart::<V, O, F>(dst, slice::from_raw_parts(a, len_bytes), slice::from_raw_parts(b, len_bytes), world);
        }
    }
}

/// Does what [`pair`] does, for types that are handled one by one and buffers that do not overlap.
#[inline(never)]
fn pair_apart<V: Lanes, O: OpOn<V>, F: LastOn<V>>(dst: &mut [MaybeUninit<u8>], a: &[u8], b: &[u8], world: f64) {
    let count = dst.len().min(a.len()).min(b.len()) / V::SIZE_BYTES;
    let (dst, a, b) = (dst.as_mut_ptr().cast::<u8>(), a.as_ptr(), b.as_ptr());
    steps!(V, count, i => combine::[O, F, 2](dst, [a, b], i, world));
}

/// Does what [`pair_apart`] does, with the first operand in `dst`.
#[inline(never)]
fn pair_in_place<V: Lanes, O: OpOn<V>, F: LastOn<V>>(dst: &mut [u8], other: &[u8], world: f64) {
    let count = dst.len().min(other.len()) / V::SIZE_BYTES;
    let (dst, other) = (dst.as_mut_ptr(), other.as_ptr());
    steps!(V, count, i => combine::[O, F, 2](dst, [dst, other], i, world));
}

/// Combines the sources in their order into `dst`, accumulated in `V::Acc` and rounded once.
///
/// # Safety
/// `count` elements can be read at each source and written at `dst`. `dst` does not overlap any source, or is equal to
/// it.
#[inline(always)]
pub(crate) unsafe fn many<V: Lanes, O: OpOn<V>, F: LastOn<V>>(
    dst: *mut u8,
    srcs: &[*const u8],
    count: usize,
    world: f64,
) {
    match *srcs {
        // SAFETY: the contract of `in_blocks` is the contract of this function.
        _ if !is_group::<V>() || srcs.len() > AT_ONCE => unsafe { in_blocks::<V, O, F>(dst, srcs, count, world) },
        [a] => steps!(V, count, i => combine::[O, F, 1](dst, [a], i, world)),
        [a, b] => steps!(V, count, i => combine::[O, F, 2](dst, [a, b], i, world)),
        [a, b, c] => steps!(V, count, i => combine::[O, F, 3](dst, [a, b, c], i, world)),
        [a, b, c, d] => steps!(V, count, i => combine::[O, F, 4](dst, [a, b, c, d], i, world)),
        _ => {}
    }
}

/// Does what [`many`] does, for more than [`AT_ONCE`] sources, or any number of a type that has no groups. The elements
/// of a block are combined in the L1 cache.
///
/// # Safety
/// The contract of [`many`].
#[inline(always)]
unsafe fn in_blocks<V: Lanes, O: OpOn<V>, F: LastOn<V>>(dst: *mut u8, srcs: &[*const u8], count: usize, world: f64) {
    let mut block = [const { MaybeUninit::<V::Acc>::uninit() }; SLOTS];
    let acc = block.as_mut_ptr().cast::<V::Acc>();
    let mut start = 0;
    while start < count {
        let len = BLOCK.min(count - start);
        let at = start * V::SIZE_BYTES;
        // The first operands initialise the accumulators, so that no neutral element is needed (there is none for -0).
        let (first, further) = srcs.split_at(AT_ONCE.min(srcs.len()));
        match *first {
            [a, b, c, d] => steps!(V, len, i, slot => begin::[O, 4](acc, [a, b, c, d], at, i, slot)),
            // `many` handles so few sources of grouped types without blocks.
            _ if is_group::<V>() => return,
            [a, b, c] => steps!(V, len, i, slot => begin::[O, 3](acc, [a, b, c], at, i, slot)),
            [a, b] => steps!(V, len, i, slot => begin::[O, 2](acc, [a, b], at, i, slot)),
            [a] => steps!(V, len, i, slot => begin::[O, 1](acc, [a], at, i, slot)),
            _ => return,
        }
        for some in further.chunks(2) {
            match *some {
                [a, b] => steps!(V, len, i, slot => add::[O, 2](acc, [a, b], at, i, slot)),
                [a] => steps!(V, len, i, slot => add::[O, 1](acc, [a], at, i, slot)),
                _ => {}
            }
        }
        // SAFETY: `start + len <= count`, and `dst` has `count` elements by this function's contract.
        let out = unsafe { dst.add(at) };
        // The block is stored last because `dst` may be one of the sources.
        steps!(V, len, i, slot => store_block::[F](out, acc, i, slot, world));
        start += len;
    }
}

#[inline(always)]
unsafe fn combine<V: Lanes, O: Op<V::Reg>, F: Last<V::Reg>, const N: usize>(
    dst: *mut u8,
    srcs: [*const u8; N],
    i: usize,
    world: f64,
) {
    let at = i * V::SIZE_BYTES;
    // SAFETY: the group at `i` lies within `dst` and all sources, by the check in `steps!`.
    unsafe { V::store(dst.add(at), F::finish(combined::<V, O, N>(srcs, at), world)) };
}

/// Combines the operands that begin at byte `at`, from the first source to the last.
#[inline(always)]
unsafe fn combined<V: Lanes, O: Op<V::Reg>, const N: usize>(srcs: [*const u8; N], at: usize) -> V::Reg {
    // SAFETY: the group at byte `at` lies within all sources, by the check in `steps!`.
    unsafe {
        for src in &srcs {
            V::prefetch(src.wrapping_add(at));
        }
        let mut sum = V::load(srcs[0].add(at));
        for src in &srcs[1..] {
            sum = O::apply(sum, V::load(src.add(at)));
        }
        sum
    }
}

/// Initialises accumulators with the first operands of a block that begins at byte `at`.
#[inline(always)]
unsafe fn begin<V: Lanes, O: Op<V::Reg>, const N: usize>(
    acc: *mut V::Acc,
    srcs: [*const u8; N],
    at: usize,
    i: usize,
    slot: usize,
) {
    // SAFETY: the group at `i` lies within all sources, by the check in `steps!`; `slot` is a valid slot for it.
    unsafe { V::store_acc(acc, slot, combined::<V, O, N>(srcs, at + i * V::SIZE_BYTES)) };
}

/// Combines further operands into the accumulators.
#[inline(always)]
unsafe fn add<V: Lanes, O: Op<V::Reg>, const N: usize>(
    acc: *mut V::Acc,
    srcs: [*const u8; N],
    at: usize,
    i: usize,
    slot: usize,
) {
    let at = at + i * V::SIZE_BYTES;
    // SAFETY: the group lies within all sources, by the check in `steps!`; `begin` has filled the accumulators.
    unsafe {
        let mut sum = V::load_acc(acc, slot);
        for src in &srcs {
            sum = O::apply(sum, V::load(src.add(at)));
        }
        V::store_acc(acc, slot, sum);
    }
}

#[inline(always)]
unsafe fn store_block<V: Lanes, F: Last<V::Reg>>(dst: *mut u8, acc: *const V::Acc, i: usize, slot: usize, world: f64) {
    // SAFETY: the group at `i` lies within `dst`, by the check in `steps!`; `begin` has filled the accumulators.
    unsafe { V::store(dst.add(i * V::SIZE_BYTES), F::finish(V::load_acc(acc, slot), world)) };
}

/// Computes dst = src * factor, elementwise.
///
/// # Safety
/// `count` elements can be read at `src` and written at `dst`, which is equal to `src` or does not overlap it.
#[inline(always)]
pub(crate) unsafe fn scale<V: FloatLanes>(dst: *mut u8, src: *const u8, count: usize, factor: f64) {
    if is_group::<V>() {
        return steps!(V, count, i => scale_step::[](dst, src, i, factor));
    }
    let len_bytes = count * V::SIZE_BYTES;
    // SAFETY: by this function's contract both have `len_bytes` bytes, and do not overlap where both become slices.
    unsafe {
        if dst.cast_const() == src {
            scale_in_place::<V>(slice::from_raw_parts_mut(dst, len_bytes), factor);
        } else {
            let dst = slice::from_raw_parts_mut(dst.cast::<MaybeUninit<u8>>(), len_bytes);
            scale_apart::<V>(dst, slice::from_raw_parts(src, len_bytes), factor);
        }
    }
}

/// Does what [`scale`] does, for types that are handled one by one and buffers that do not overlap.
#[inline(never)]
fn scale_apart<V: FloatLanes>(dst: &mut [MaybeUninit<u8>], src: &[u8], factor: f64) {
    let count = dst.len().min(src.len()) / V::SIZE_BYTES;
    let (dst, src) = (dst.as_mut_ptr().cast::<u8>(), src.as_ptr());
    steps!(V, count, i => scale_step::[](dst, src, i, factor));
}

/// Does what [`scale_apart`] does, in place.
#[inline(never)]
fn scale_in_place<V: FloatLanes>(dst: &mut [u8], factor: f64) {
    let count = dst.len() / V::SIZE_BYTES;
    let dst = dst.as_mut_ptr();
    steps!(V, count, i => scale_step::[](dst, dst, i, factor));
}

#[inline(always)]
unsafe fn scale_step<V: Lanes<Reg: FloatReg>>(dst: *mut u8, src: *const u8, i: usize, factor: f64) {
    let at = i * V::SIZE_BYTES;
    // SAFETY: the group at `i` lies within `dst` and `src`, by the check in `steps!`.
    unsafe { V::store(dst.add(at), V::load(src.add(at)).mul_scalar(factor)) };
}
