//! The loops of all kernels, each written once and inlined into a function per instruction set (`arch/<isa>.rs`).
//!
//! Nothing else may inline them: their slices become `noalias` as parameters of those functions, and without that the
//! compiler guards the vectorised loop by an overlap check, which an in-place call would always fail.

use std::mem::MaybeUninit;

use super::lanes::{BLOCK, FloatLanes, FloatReg, Lanes, Last, LastOn, Op, OpOn, SLOTS};

/// Calls `$step::<V, ..>` at every group and `$step::<V::Tail, ..>` at every element behind the last group. `$i` is the
/// element's index, `$slot` the place of its accumulator if the count is at most `BLOCK`.
macro_rules! steps {
    ($V:ident, $count:expr, $i:ident => $step:ident::$ops:tt $args:tt) => {
        steps!($V, $count, $i, _slot => $step::$ops $args)
    };
    ($V:ident, $count:expr, $i:ident, $slot:ident => $step:ident::[$($op:ident),*]($($arg:expr),*)) => {{
        let count: usize = $count;
        let grouped = count - count % $V::COUNT;
        let mut $i = 0;
        while $i < grouped {
            let $slot = $i;
            // SAFETY: `i + COUNT <= count` here; the caller vouches for `count` elements of each argument.
            unsafe { $step::<$V $(, $op)*>($($arg),*) };
            $i += $V::COUNT;
        }
        while $i < count {
            let $slot = BLOCK + ($i - grouped);
            // SAFETY: as above, with one element.
            unsafe { $step::<$V::Tail $(, $op)*>($($arg),*) };
            $i += 1;
        }
    }};
}

/// dst = a op b, elementwise; the three have the same length, a multiple of the element's size.
#[inline(always)]
pub(crate) fn pair<V: Lanes, O: OpOn<V>, F: LastOn<V>>(dst: &mut [MaybeUninit<u8>], a: &[u8], b: &[u8], world: f64) {
    let count = dst.len().min(a.len()).min(b.len()) / V::SIZE_BYTES;
    let (dst, a, b) = (dst.as_mut_ptr().cast::<u8>(), a.as_ptr(), b.as_ptr());
    steps!(V, count, i => pair_step::[O, F](dst, a, b, i, world));
}

/// dst = dst op other, elementwise; both have the same length, a multiple of the element's size.
#[inline(always)]
pub(crate) fn pair_in_place<V: Lanes, O: OpOn<V>, F: LastOn<V>>(dst: &mut [u8], other: &[u8], world: f64) {
    let count = dst.len().min(other.len()) / V::SIZE_BYTES;
    let (dst, other) = (dst.as_mut_ptr(), other.as_ptr());
    steps!(V, count, i => pair_step::[O, F](dst, dst, other, i, world));
}

#[inline(always)]
unsafe fn pair_step<V: Lanes, O: Op<V::Reg>, F: Last<V::Reg>>(
    dst: *mut u8,
    a: *const u8,
    b: *const u8,
    i: usize,
    world: f64,
) {
    let at = i * V::SIZE_BYTES;
    // SAFETY: the caller has seen that this group lies within all three.
    unsafe { V::store(dst.add(at), F::finish(O::apply(V::load(a.add(at)), V::load(b.add(at))), world)) };
}

/// Combines the sources in their order into `dst`, accumulated in `V::Acc` and rounded once.
///
/// # Safety
/// `count` elements can be read at each source and written at `dst`. `dst` is apart from every source, or equal to it.
#[inline(always)]
pub(crate) unsafe fn many<V: Lanes, O: OpOn<V>, F: LastOn<V>>(
    dst: *mut u8,
    srcs: &[*const u8],
    count: usize,
    world: f64,
) {
    let mut block = [const { MaybeUninit::<V::Acc>::uninit() }; SLOTS];
    let acc = block.as_mut_ptr().cast::<V::Acc>();
    let mut start = 0;
    while start < count {
        let len = BLOCK.min(count - start);
        let at = start * V::SIZE_BYTES;
        let mut pairs = srcs.chunks_exact(2);
        // The first operands make the accumulators, so that no neutral element is needed (there is none for -0).
        match pairs.next() {
            Some(first) => {
                // SAFETY: `start + len <= count`, and the caller vouches for `count` elements of each source.
                let (a, b) = unsafe { (first[0].add(at), first[1].add(at)) };
                steps!(V, len, i, slot => start_with_two::[O](acc, a, b, i, slot));
            }
            None => {
                let Some(only) = srcs.first() else { return };
                // SAFETY: as above.
                let src = unsafe { only.add(at) };
                steps!(V, len, i, slot => start_with_one::[](acc, src, i, slot));
            }
        }
        for two in pairs.by_ref() {
            // SAFETY: as above.
            let (a, b) = unsafe { (two[0].add(at), two[1].add(at)) };
            steps!(V, len, i, slot => add_two::[O](acc, a, b, i, slot));
        }
        if let (Some(last), true) = (pairs.remainder().first(), srcs.len() > 1) {
            // SAFETY: as above.
            let src = unsafe { last.add(at) };
            steps!(V, len, i, slot => add_one::[O](acc, src, i, slot));
        }
        // SAFETY: as above, for `dst`.
        let out = unsafe { dst.add(at) };
        // Only now: `dst` may be one of the sources.
        steps!(V, len, i, slot => store_block::[F](out, acc, i, slot, world));
        start += len;
    }
}

#[inline(always)]
unsafe fn start_with_one<V: Lanes>(acc: *mut V::Acc, src: *const u8, i: usize, slot: usize) {
    // SAFETY: the caller has seen that this group lies within both.
    unsafe { V::store_acc(acc, slot, V::load(src.add(i * V::SIZE_BYTES))) };
}

#[inline(always)]
unsafe fn start_with_two<V: Lanes, O: Op<V::Reg>>(acc: *mut V::Acc, a: *const u8, b: *const u8, i: usize, slot: usize) {
    let at = i * V::SIZE_BYTES;
    // SAFETY: the caller has seen that this group lies within all three.
    unsafe { V::store_acc(acc, slot, O::apply(V::load(a.add(at)), V::load(b.add(at)))) };
}

#[inline(always)]
unsafe fn add_two<V: Lanes, O: Op<V::Reg>>(acc: *mut V::Acc, a: *const u8, b: *const u8, i: usize, slot: usize) {
    let at = i * V::SIZE_BYTES;
    // SAFETY: the caller has seen that this group lies within all three.
    unsafe {
        let sum = O::apply(V::load_acc(acc, slot), V::load(a.add(at)));
        V::store_acc(acc, slot, O::apply(sum, V::load(b.add(at))));
    }
}

#[inline(always)]
unsafe fn add_one<V: Lanes, O: Op<V::Reg>>(acc: *mut V::Acc, src: *const u8, i: usize, slot: usize) {
    // SAFETY: the caller has seen that this group lies within both.
    unsafe { V::store_acc(acc, slot, O::apply(V::load_acc(acc, slot), V::load(src.add(i * V::SIZE_BYTES)))) };
}

#[inline(always)]
unsafe fn store_block<V: Lanes, F: Last<V::Reg>>(dst: *mut u8, acc: *const V::Acc, i: usize, slot: usize, world: f64) {
    // SAFETY: as above, and the accumulators are filled.
    unsafe { V::store(dst.add(i * V::SIZE_BYTES), F::finish(V::load_acc(acc, slot), world)) };
}

/// dst = src * factor, elementwise; both have the same length, a multiple of the element's size.
#[inline(always)]
pub(crate) fn scale<V: FloatLanes>(dst: &mut [MaybeUninit<u8>], src: &[u8], factor: f64) {
    let count = dst.len().min(src.len()) / V::SIZE_BYTES;
    let (dst, src) = (dst.as_mut_ptr().cast::<u8>(), src.as_ptr());
    steps!(V, count, i => scale_step::[](dst, src, i, factor));
}

/// dst = dst * factor, elementwise.
#[inline(always)]
pub(crate) fn scale_in_place<V: FloatLanes>(dst: &mut [u8], factor: f64) {
    let count = dst.len() / V::SIZE_BYTES;
    let dst = dst.as_mut_ptr();
    steps!(V, count, i => scale_step::[](dst, dst, i, factor));
}

#[inline(always)]
unsafe fn scale_step<V: Lanes<Reg: FloatReg>>(dst: *mut u8, src: *const u8, i: usize, factor: f64) {
    let at = i * V::SIZE_BYTES;
    // SAFETY: the caller has seen that this group lies within both.
    unsafe { V::store(dst.add(at), V::load(src.add(at)).mul_scalar(factor)) };
}
