//! Common part of the vector loops of all instruction sets: the way through buckets, one group of elements at a time.

use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

use super::loops::Range;

/// Distance of prefetches in bytes: three buckets of the usual size. Ranges are found without a pause, one bucket
/// before levels are. Sums that are added to need the same distance.
const AHEAD: usize = 6144;

/// Prefetches `LINES` cache lines, as many as a group has, that lie [`AHEAD`] bytes after this group. They may lie
/// beyond the end of the slice.
#[inline(always)]
pub(super) fn prefetch<const LINES: usize>(group: &[f32]) {
    for line in 0..LINES {
        // SAFETY: a prefetch takes any address as a hint, reads nothing from it and never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(group.as_ptr().wrapping_byte_add(AHEAD + 64 * line).cast()) };
    }
}

/// The greatest bits of a bucket's values, compared as signed and as unsigned numbers.
///
/// Among floats of one sign, greater bits mean a greater magnitude. Compared as signed, values that are not negative
/// come last, so the greatest bits belong to the greatest value. Compared as unsigned, negative values come last, so
/// the greatest bits belong to the least value.
/// Bits of NaN and infinities are beyond the bits of all other values of their sign. Therefore two comparisons find the
/// whole range.
pub(super) struct Greatest {
    pub(super) signed: i32,
    pub(super) unsigned: u32,
}

impl Greatest {
    /// Returns the range. For values of one sign it needs the `least` of their bits.
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

/// Random bits for one group after the other.
pub(super) trait Source {
    type Vector;

    /// Returns random bits in words of 16 bits, in the order in which packing leaves the values.
    ///
    /// # Safety
    /// The machine has the instruction set of the implementation.
    unsafe fn next(&mut self) -> [Self::Vector; 2];
}

/// Defines `with_vectors` and the loops that it puts in place of others, each compiled with `$feature`. Elements that
/// do not fill a group are left to `$narrower`. `$floats` and `$vector` are vectors of floats and of integers. The
/// module provides:
/// * `GROUP`, the elements of a group, and `LANES`, the elements of a vector;
/// * instructions, named without their width;
/// * `pack`, which writes the codes of a group, and `ordered`, which restores the order after packing within quarters
///   of 16 bytes;
/// * `Values`, the values of the levels of a bucket.
macro_rules! groups {
    ($narrower:ident, $floats:ty, $vector:ty, #[$feature:meta]) => {
        /// Returns the loops of this instruction set, with the vector loops in place of some of them.
        pub(crate) const fn with_vectors(loops: Loops) -> Loops {
            Loops { range, ranges, encode, encode_drawn, decode, decode_add, ..loops }
        }

        /// Cache lines of a group.
        const LINES: usize = GROUP / 16;

        /// Does what [`loops::range`](super::loops::range) does, except for the sign of a zero, which nothing depends
        /// on.
        #[$feature]
        pub(super) fn range(values: &[f32]) -> Range {
            let mut groups = values.chunks_exact(GROUP);
            let rest = groups.remainder();
            if groups.len() == 0 {
                return $narrower::range(values);
            }
            let (mut signed, mut unsigned) = ([set1_epi32(i32::MIN); 4], [set1_epi32(0); 4]);
            for group in groups.by_ref() {
                for (part, values) in group.chunks_exact(LANES).enumerate() {
                    let bits = castps_si(load(values));
                    signed[part] = max_epi32(signed[part], bits);
                    unsigned[part] = max_epu32(unsigned[part], bits);
                }
            }
            let [a, b, c, d] = signed;
            let signed = reduce_max_epi32(max_epi32(max_epi32(a, b), max_epi32(c, d)));
            let [a, b, c, d] = unsigned;
            let unsigned = reduce_max_epu32(max_epu32(max_epu32(a, b), max_epu32(c, d)));
            let all = Greatest { signed, unsigned }.range(|| least_bits(&values[..values.len() - rest.len()]));
            if rest.is_empty() { all } else { all.joined($narrower::range(rest)) }
        }

        /// Returns the least of the values' bits.
        #[inline(never)]
        #[$feature]
        fn least_bits(values: &[f32]) -> u32 {
            let mut least = set1_epi32(-1);
            for values in values.chunks_exact(LANES) {
                least = min_epu32(least, castps_si(load(values)));
            }
            reduce_min_epu32(least)
        }

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
                    prefetch::<LINES>(values);
                    pack::<BITS>(&mut dst[at..], codes(levels(values, &grid)));
                }
                let left = groups.remainder();
                if !left.is_empty() {
                    encode_left(&mut dst[whole * GROUP / 8 * BITS..], left, Buckets { of: &[grid], ..grids });
                }
            }
        }

        /// Encodes the rest of less than a group. As a function of its own it takes no registers from the loop.
        #[inline(never)]
        #[$feature]
        fn encode_left(dst: &mut [u8], values: &[f32], grids: Buckets<Grid>) {
            $narrower::encode(dst, values, grids);
        }

        /// Encodes with draws. Codes are computed in 16-bit words, which hold 256 times a level plus a draw.
        #[$feature]
        pub(super) fn encode_drawn(
            dst: &mut [u8],
            values: &[f32],
            grids: Buckets<Grid>,
            random_bits: &RandomBits,
            first: u64,
        ) {
            let bits = grids.bits;
            // Whether a group of one bucket directly follows a group of another.
            let follow = grids.bucket.is_multiple_of(GROUP) || grids.of.len() == 1;
            // Multiplying by 256 times the inverse gives the same result as multiplying the result by 256, except
            // outside the range of float32.
            let is_plain = follow && grids.of.iter().all(|grid| (256.0 * grid.inverse).is_finite());
            let Some(own) = Counters::new(random_bits.own, first, values.len()).filter(|_| is_plain) else {
                return $narrower::encode_drawn(dst, values, grids, random_bits, first);
            };
            match &random_bits.strata {
                None => by_bits!(encode_from(Alone(own), dst, values, grids), bits),
                Some(strata) => match (strata.narrow, Counters::new(strata.picks, first, values.len())) {
                    (Some(narrow), Some(picks)) => {
                        by_bits!(encode_from(Among { own, picks, narrow }, dst, values, grids), bits)
                    }
                    _ => return $narrower::encode_drawn(dst, values, grids, random_bits, first),
                },
            }
            let whole = values.len() / GROUP * GROUP;
            if let (true, Some(grid)) = (whole < values.len(), grids.of.last()) {
                let (dst, values) = (&mut dst[whole / 8 * usize::from(bits)..], &values[whole..]);
                let grids = Buckets { of: slice::from_ref(grid), ..grids };
                $narrower::encode_drawn(dst, values, grids, random_bits, first + whole as u64);
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
            // SAFETY: this function is compiled for, and called only with, the instruction set of `source`.
            let mut random_bits = unsafe { source.next() };
            for (grid, elements, bytes) in grids.each(values.len()) {
                let (dst, values) = (&mut dst[bytes], &values[elements]);
                let fine = Grid { inverse: 256.0 * grid.inverse, ..*grid };
                for (values, at) in values.chunks_exact(GROUP).zip((0..).step_by(GROUP / 8 * BITS)) {
                    prefetch::<LINES>(values);
                    let levels = levels(values, &fine);
                    // Begins to compute the draws of the next group now. A hash takes as long as the rest, and nothing
                    // of this group waits for it.
                    // SAFETY: this function is compiled for, and called only with, the instruction set of `source`.
                    let drawn = mem::replace(&mut random_bits, unsafe { source.next() });
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
                    prefetch::<LINES>(sums);
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

        /// Returns the levels of a group, rounded to nearest even, which is the mode that the callers have set. None
        /// exceeds the top: the three roundings before this one add far less than half a level.
        #[inline]
        #[$feature]
        fn levels(values: &[f32], grid: &Grid) -> [$vector; 4] {
            let mut parts = [set1_epi32(0); 4];
            for (part, values) in parts.iter_mut().zip(values.chunks_exact(LANES)) {
                let above = sub_ps(load(values), set1_ps(grid.min));
                *part = cvtps_epi32(mul_ps(above, set1_ps(grid.inverse)));
            }
            parts
        }

        /// Returns the codes of levels.
        #[inline]
        #[$feature]
        fn codes([a, b, c, d]: [$vector; 4]) -> $vector {
            ordered(packus_epi16(packus_epi32(a, b), packus_epi32(c, d)))
        }

        /// Returns the codes of 256 times levels plus random bits.
        #[inline]
        #[$feature]
        fn with_draws([a, b, c, d]: [$vector; 4], [lower, upper]: [$vector; 2]) -> $vector {
            let (lower, upper) = (add_epi16(packus_epi32(a, b), lower), add_epi16(packus_epi32(c, d), upper));
            ordered(packus_epi16(srli_epi16::<8>(lower), srli_epi16::<8>(upper)))
        }

        /// Packs two codes into each 16-bit word. For 7 bits a factor is not used, since 2^7 would be negative.
        #[inline]
        #[$feature]
        fn pairs<const BITS: usize>(codes: $vector) -> $vector {
            if BITS < 7 {
                return maddubs_epi16(codes, set1_epi16(1 | 1 << (8 + BITS)));
            }
            let upper = srli_epi16::<1>(and_si(codes, set1_epi16(0x7f00)));
            or_si(and_si(codes, set1_epi16(0xff)), upper)
        }

        /// Packs four codes into each 32-bit word.
        #[inline]
        #[$feature]
        fn fours<const BITS: usize>(pairs: $vector) -> $vector {
            madd_epi16(pairs, set1_epi32(1 | 1 << (16 + 2 * BITS)))
        }

        /// Packs eight codes into each 64-bit word.
        #[inline]
        #[$feature]
        fn eights<const BITS: usize>(fours: $vector) -> $vector {
            let free = 32 - 4 * BITS as i32;
            srl_epi64(sllv_epi32(fours, set1_epi64(free.into())), _mm_cvtsi32_si128(free))
        }

        /// The random bits of a stream, unchanged.
        struct Alone(Counters);

        impl Source for Alone {
            type Vector = $vector;

            #[inline]
            #[$feature]
            unsafe fn next(&mut self) -> [$vector; 2] {
                let (random_bits, zero) = (self.0.next(), set1_epi32(0));
                [unpacklo_epi8(random_bits, zero), unpackhi_epi8(random_bits, zero)]
            }
        }

        /// The random bits of a stream, placed into the strata of a rank.
        struct Among {
            own: Counters,
            picks: Counters,
            narrow: Narrow,
        }

        impl Source for Among {
            type Vector = $vector;

            #[inline]
            #[$feature]
            unsafe fn next(&mut self) -> [$vector; 2] {
                let Narrow { of_rank, rotations, world, factor, shift } = self.narrow;
                let (picks, half) = (self.picks.next(), set1_epi8(0xf));
                let [strata, rotations] = [of_rank, rotations].map(|table| {
                    // SAFETY: each table has 16 bytes.
                    broadcast_128(unsafe { _mm_loadu_si128(table.as_ptr().cast()) })
                });
                let strata = shuffle_epi8(strata, and_si(picks, half));
                let rotations = shuffle_epi8(rotations, and_si(srli_epi16::<4>(picks), half));
                let strata = add_epi8(strata, rotations);
                // A difference below zero wraps around, so the minimum is the sum modulo `world`.
                let strata = min_epu8(strata, sub_epi8(strata, set1_epi8(world as i8)));
                let random_bits = self.own.next();
                // `black_box` hides that the factor is always the same: the compiler would otherwise widen it and
                // multiply in 32 bits.
                let factor = black_box(set1_epi16(factor as i16));
                [unpacklo_epi8(random_bits, strata), unpackhi_epi8(random_bits, strata)]
                    .map(|words| srl_epi16(mulhi_epu16(words, factor), _mm_cvtsi32_si128(shift.into())))
            }
        }

        /// Random bytes of a stream, for one group of elements after the other.
        struct Counters {
            counters: $vector,
            mixed_in: u32,
        }

        impl Counters {
            #[inline]
            #[$feature]
            fn new(stream: Stream, first: u64, elements: usize) -> Option<Self> {
                let (start, mixed_in) = stream.start(first / SHARE as u64, elements / SHARE)?;
                // Counters in the order in which packing leaves the values.
                const ORDER: [i32; LANES] = fours_in_quarters();
                // SAFETY: the table is as long as a vector.
                let order = unsafe { loadu_si(ORDER.as_ptr().cast()) };
                Some(Self { counters: add_epi32(set1_epi32(start as i32), order), mixed_in })
            }

            #[inline]
            #[$feature]
            fn next(&mut self) -> $vector {
                let counters = self.counters;
                self.counters = add_epi32(counters, set1_epi32(LANES as i32));
                hash(counters, self.mixed_in)
            }
        }

        /// Hashes a vector of counters like `rng.rs` does.
        #[inline]
        #[$feature]
        fn hash(counters: $vector, mixed_in: u32) -> $vector {
            let [first, second] = FACTORS.map(|factor| factor as i32);
            let x = xor_si(counters, srli_epi32::<16>(counters));
            let x = mullo_epi32(x, set1_epi32(first));
            let x = xor_si(x, srli_epi32::<15>(x));
            let x = mullo_epi32(xor_si(x, set1_epi32(mixed_in as i32)), set1_epi32(second));
            xor_si(x, srli_epi32::<16>(x))
        }

        impl<const BITS: usize> Values<BITS> {
            /// Adds the values of the first codes, as many as a vector has, to `sums`.
            #[inline]
            #[$feature]
            fn add_to(self, sums: &mut [f32], src: &[u8]) {
                let sums = &mut sums[..LANES];
                // SAFETY: `sums` has `LANES` elements, checked by the slicing.
                unsafe { storeu_ps(sums.as_mut_ptr(), add_ps(load(sums), self.of(src))) };
            }

            /// Writes the values of the first codes, as many as a vector has.
            #[inline]
            #[$feature]
            fn write_to(self, dst: &mut [MaybeUninit<f32>], src: &[u8]) {
                // SAFETY: `dst` has room for a vector, checked by the slicing.
                unsafe { storeu_ps(dst[..LANES].as_mut_ptr().cast(), self.of(src)) };
            }
        }

        /// Loads the first values.
        #[inline]
        #[$feature]
        fn load(values: &[f32]) -> $floats {
            // SAFETY: the slice has a vector of values, checked by the slicing.
            unsafe { loadu_ps(values[..LANES].as_ptr()) }
        }

        /// Returns the codes of the group at `at`, followed by enough bytes that a whole vector can be read from where
        /// the last codes begin. The bytes are in `packed`, or copied to `room`.
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

/// Returns, for each number of bits, the positions of that many lowest bytes of two 64-bit words. -1 fills the rest and
/// selects zeros.
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

/// Returns, for each number of bits, the bit in its first byte at which each of `CODES` codes begins.
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

/// Returns, for each number of bits, the bytes that hold each code, as 32-bit words: four bytes per code.
pub(super) const fn bytes_of_codes<const BYTES: usize>() -> [[i8; BYTES]; 8] {
    let mut all = [[-1; BYTES]; 8];
    let mut bits = 1;
    while bits < 8 {
        let mut code = 0;
        while 4 * code < BYTES {
            let byte = code * bits / 8;
            all[bits][4 * code] = byte as i8;
            all[bits][4 * code + 1] = byte as i8 + 1;
            code += 1;
        }
        bits += 1;
    }
    all
}

/// Returns the order in which packing four vectors leaves groups of four: one of each vector in each 16 bytes.
pub(super) const fn fours_in_quarters<const LANES: usize>() -> [i32; LANES] {
    let mut order = [0; LANES];
    let mut at = 0;
    while at < LANES {
        order[at] = (at % 4 * (LANES / 4) + at / 4) as i32;
        at += 1;
    }
    order
}
