//! What vectors of every instruction set have in common: the way through buckets, a group of elements at a time.

use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

use super::loops::Range;

/// How far ahead memory is asked for, in bytes: three buckets of the usual size, since ranges are found without a pause, one
/// bucket before levels are. Sums that are added to want it no nearer.
const AHEAD: usize = 6144;

/// Asks for memory that is needed soon, while there is something to calculate: so many cache lines behind the group.
#[inline(always)]
pub(super) fn ask_ahead<const LINES: usize>(group: &[f32]) {
    for line in 0..LINES {
        // SAFETY: an address is only a hint to a prefetch.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(group.as_ptr().wrapping_byte_add(AHEAD + 64 * line).cast()) };
    }
}

/// The greatest of the bits of a bucket's values, as signed and as unsigned numbers.
///
/// Of floats of one sign the greater bits are the greater magnitude. Signed, those that are not negative come last, so
/// that the greatest bits are the greatest value's; unsigned, the negative ones do, and they are the least value's. Bits
/// of NaN and infinities are beyond those of all others of their sign. So two comparisons find all of a range.
pub(super) struct Greatest {
    pub(super) signed: i32,
    pub(super) unsigned: u32,
}

impl Greatest {
    /// The range, for values of one sign by means of the `least` of their bits.
    #[inline(always)]
    pub(super) fn range(self, least: impl FnOnce() -> u32) -> Range {
        let (max, min) = (self.signed as u32, self.unsigned);
        let finite = f32::from_bits(max).is_finite() && f32::from_bits(min).is_finite();
        let (are_negative, have_negative) = (self.signed < 0, (min as i32) < 0);
        let (min, max) = if have_negative && !are_negative {
            (min, max)
        } else {
            let least = least();
            if are_negative { (min, least) } else { (least, max) }
        };
        Range { min: f32::from_bits(min), max: f32::from_bits(max), finite }
    }
}

/// Draws for a group after the other.
pub(super) trait Source {
    type Vector;

    /// In words of 16 bits, in the order in which packing leaves the values.
    ///
    /// # Safety
    /// The instruction set is there.
    unsafe fn next(&mut self) -> [Self::Vector; 2];
}

/// Calls `$function::<BITS>` with the number of bits that is only known now.
macro_rules! by_bits {
    ($function:ident($($argument:expr),*), $bits:expr) => {
        match $bits {
            1 => $function::<1>($($argument),*),
            2 => $function::<2>($($argument),*),
            3 => $function::<3>($($argument),*),
            4 => $function::<4>($($argument),*),
            5 => $function::<5>($($argument),*),
            6 => $function::<6>($($argument),*),
            7 => $function::<7>($($argument),*),
            _ => $function::<8>($($argument),*),
        }
    };
}
pub(super) use by_bits;

/// Defines `with_vectors` and the loops that it puts in place of others, each compiled with `$feature`. Where there is no
/// whole group, `$narrower` does it. The module has
/// * `GROUP`, the elements of a group, and `LANES`, those of a vector;
/// * `range` of the elements of a bucket;
/// * `levels` of a group, the vector of `codes` that they are, by themselves or `with_draws`, and `pack`, which writes it;
/// * `Counters` and the [`Source`]s of draws, `Alone` and `Among`;
/// * `Values`, those of the levels of a bucket.
macro_rules! groups {
    ($narrower:ident, $vector:ty, #[$feature:meta]) => {
        /// The loops of this instruction set, with these in place of its own.
        pub(crate) const fn with_vectors(loops: Loops) -> Loops {
            Loops { range, ranges, encode, encode_drawn, decode, decode_add, ..loops }
        }

        /// Cache lines of a group.
        const LINES: usize = GROUP / 16;

        #[$feature]
        pub(super) fn ranges(ranges: &mut [Range], values: &[f32], bucket: usize) {
            for (index, to) in ranges.iter_mut().enumerate() {
                *to = range(&values[index * bucket..values.len().min((index + 1) * bucket)]);
            }
        }

        #[$feature]
        pub(super) fn encode(dst: &mut [u8], values: &[f32], grids: Buckets<Grid>) {
            if grids.bucket < GROUP {
                return $narrower::encode(dst, values, grids);
            }
            by_bits!(encode_by(dst, values, grids), grids.bits);
        }

        #[inline(never)]
        #[$feature]
        fn encode_by<const BITS: usize>(dst: &mut [u8], values: &[f32], grids: Buckets<Grid>) {
            for (&grid, elements, bytes) in grids.each(values.len()) {
                let (dst, values) = (&mut dst[bytes], &values[elements]);
                let mut groups = values.chunks_exact(GROUP);
                let whole = groups.len();
                for (values, at) in groups.by_ref().zip((0..).step_by(GROUP / 8 * BITS)) {
                    ask_ahead::<LINES>(values);
                    pack::<BITS>(&mut dst[at..], codes(levels(values, &grid)));
                }
                let left = groups.remainder();
                if !left.is_empty() {
                    encode_left(&mut dst[whole * GROUP / 8 * BITS..], left, Buckets { of: &[grid], ..grids });
                }
            }
        }

        /// What is less than a group. Compiled alone, it takes no registers from the loop.
        #[inline(never)]
        #[$feature]
        fn encode_left(dst: &mut [u8], values: &[f32], grids: Buckets<Grid>) {
            $narrower::encode(dst, values, grids);
        }

        /// In words of 16 bits, which hold 256 times a level and a draw together.
        #[$feature]
        pub(super) fn encode_drawn(dst: &mut [u8], values: &[f32], grids: Buckets<Grid>, draws: &Draws, first: u64) {
            let bits = grids.bits;
            // Groups of one bucket follow those of another.
            let follow = grids.bucket.is_multiple_of(GROUP) || grids.of.len() == 1;
            // 256 times the inverse is as good as a multiplication of the result, except where it leaves the range of float32.
            let is_plain = follow && grids.of.iter().all(|grid| (256.0 * grid.inverse).is_finite());
            let Some(own) = Counters::new(draws.own, first, values.len()).filter(|_| is_plain) else {
                return $narrower::encode_drawn(dst, values, grids, draws, first);
            };
            match &draws.strata {
                None => by_bits!(encode_from(Alone(own), dst, values, grids), bits),
                Some(strata) => match (strata.narrow, Counters::new(strata.picks, first, values.len())) {
                    (Some(narrow), Some(picks)) => {
                        by_bits!(encode_from(Among { own, picks, narrow }, dst, values, grids), bits)
                    }
                    _ => return $narrower::encode_drawn(dst, values, grids, draws, first),
                },
            }
            let whole = values.len() / GROUP * GROUP;
            if let (true, Some(grid)) = (whole < values.len(), grids.of.last()) {
                let (dst, values) = (&mut dst[whole / 8 * usize::from(bits)..], &values[whole..]);
                let grids = Buckets { of: slice::from_ref(grid), ..grids };
                $narrower::encode_drawn(dst, values, grids, draws, first + whole as u64);
            }
        }

        /// Encodes whole groups.
        #[inline]
        #[$feature]
        fn encode_from<const BITS: usize>(
            mut source: impl Source<Vector = $vector>,
            dst: &mut [u8],
            values: &[f32],
            grids: Buckets<Grid>,
        ) {
            // SAFETY: this function has the instruction set.
            let mut draws = unsafe { source.next() };
            for (grid, elements, bytes) in grids.each(values.len()) {
                let (dst, values) = (&mut dst[bytes], &values[elements]);
                let fine = Grid { inverse: 256.0 * grid.inverse, ..*grid };
                for (values, at) in values.chunks_exact(GROUP).zip((0..).step_by(GROUP / 8 * BITS)) {
                    ask_ahead::<LINES>(values);
                    let levels = levels(values, &fine);
                    // Those of the next group are begun: a hash takes as long as the rest, and nothing of this group waits for
                    // it.
                    // SAFETY: this function has the instruction set.
                    let drawn = mem::replace(&mut draws, unsafe { source.next() });
                    pack::<BITS>(&mut dst[at..], with_draws(levels, drawn));
                }
            }
        }

        #[$feature]
        pub(super) fn decode_add(sums: &mut [f32], src: &[u8], scales: Buckets<Scale>) {
            if scales.bucket < GROUP {
                return $narrower::decode_add(sums, src, scales);
            }
            by_bits!(decode_add_by(sums, src, scales), scales.bits);
        }

        #[inline]
        #[$feature]
        fn decode_add_by<const BITS: usize>(sums: &mut [f32], src: &[u8], scales: Buckets<Scale>) {
            for (scale, elements, bytes) in scales.each(sums.len()) {
                let (sums, src) = (&mut sums[elements], &src[bytes]);
                let values = Values::<BITS>::new(*scale);
                let mut groups = sums.chunks_exact_mut(GROUP);
                let (packed, packed_left) = src.split_at(groups.len() * GROUP / 8 * BITS);
                for (sums, at) in groups.by_ref().zip((0..).step_by(GROUP / 8 * BITS)) {
                    ask_ahead::<LINES>(sums);
                    let mut room = [0; GROUP];
                    let packed = readable::<BITS>(packed, at, &mut room);
                    for (sums, at) in sums.chunks_exact_mut(LANES).zip((0..).step_by(LANES / 8 * BITS)) {
                        values.add_to(sums, &packed[at..]);
                    }
                }
                let left = groups.into_remainder();
                if !left.is_empty() {
                    $narrower::decode_add(left, packed_left, Buckets { of: slice::from_ref(scale), ..scales });
                }
            }
        }

        #[$feature]
        pub(super) fn decode(dst: &mut [MaybeUninit<f32>], src: &[u8], scales: Buckets<Scale>) {
            if scales.bucket < GROUP {
                return $narrower::decode(dst, src, scales);
            }
            by_bits!(decode_by(dst, src, scales), scales.bits);
        }

        #[inline]
        #[$feature]
        fn decode_by<const BITS: usize>(dst: &mut [MaybeUninit<f32>], src: &[u8], scales: Buckets<Scale>) {
            for (scale, elements, bytes) in scales.each(dst.len()) {
                let (dst, src) = (&mut dst[elements], &src[bytes]);
                let values = Values::<BITS>::new(*scale);
                let mut groups = dst.chunks_exact_mut(GROUP);
                let (packed, packed_left) = src.split_at(groups.len() * GROUP / 8 * BITS);
                for (dst, at) in groups.by_ref().zip((0..).step_by(GROUP / 8 * BITS)) {
                    let mut room = [0; GROUP];
                    let packed = readable::<BITS>(packed, at, &mut room);
                    for (dst, at) in dst.chunks_exact_mut(LANES).zip((0..).step_by(LANES / 8 * BITS)) {
                        values.write_to(dst, &packed[at..]);
                    }
                }
                let left = groups.into_remainder();
                if !left.is_empty() {
                    $narrower::decode(left, packed_left, Buckets { of: slice::from_ref(scale), ..scales });
                }
            }
        }

        /// The codes of the group at `at`, with as many bytes as a vector's from where its last codes begin: where they are,
        /// or in `room`.
        #[inline(always)]
        fn readable<'a, const BITS: usize>(packed: &'a [u8], at: usize, room: &'a mut [u8; GROUP]) -> &'a [u8] {
            if let Some(bytes) = packed.get(at..at + (GROUP - LANES) / 8 * BITS + LANES) {
                return bytes;
            }
            room[..GROUP / 8 * BITS].copy_from_slice(&packed[at..at + GROUP / 8 * BITS]);
            room
        }
    };
}
pub(super) use groups;

/// For each number of bits, where the lowest bytes of two words of 64 bits are, as many of each; and zeros.
pub(super) const fn bytes_of_words() -> [[i8; 16]; 9] {
    let mut all = [[-1; 16]; 9];
    let mut bits = 1;
    while bits <= 8 {
        let mut byte = 0;
        while byte < 2 * bits {
            all[bits][byte] = (byte / bits * 8 + byte % bits) as i8;
            byte += 1;
        }
        bits += 1;
    }
    all
}

/// For each number of bits, at which bit of its first byte each of so many codes begins.
pub(super) const fn bits_of_codes<const CODES: usize>() -> [[u32; CODES]; 8] {
    let mut all = [[0; CODES]; 8];
    let mut bits = 1;
    while bits < 8 {
        let mut code = 0;
        while code < CODES {
            all[bits][code] = (code * bits % 8) as u32;
            code += 1;
        }
        bits += 1;
    }
    all
}
