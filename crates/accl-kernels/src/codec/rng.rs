//! Random numbers without a state: a hash of a key and a counter; and how ranks share random numbers.
//!
//! # Random bits among ranks
//! Several ranks may encode values that are added up. Their random bits can then be spread evenly over their range. The
//! draws of one element fall into as many strata as there are ranks, each into another stratum.
//! With `p` the stratum of a rank and `u` its own number from 0 to 255, its draw is floor((256 p + u) / ranks). Each
//! draw alone is as uniform as `u`. All ranks compute the same assignment of strata.
//!
//! Every [`BLOCK`] elements of a tensor have [`TABLE`] permutations of the ranks, which are shuffled for the block.
//! Each element uses one of them, so every two ranks have every two strata equally often.
//! In addition, the strata of each element are rotated by one of [`TABLE`] amounts. Otherwise a rank with low strata in
//! most of the permutations would round too much of a block down.

use accl_types::Rank;

use super::settings::Rounding;

/// The key of one encoding's random numbers.
///
/// Random bits of different keys are independent, and so are random bits of different elements. The caller names what
/// makes an encoding unique: a seed, the step, the tensor, the round of the algorithm and the rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RngKey {
    own: Stream,
    among: Option<Among>,
}

/// A rank among the ranks whose encodings are added up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Among {
    /// The same on all of these ranks.
    shared: u64,
    rank: u32,
    world: u32,
}

/// Random bytes of one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Stream {
    /// The first is added to the counter, the second is mixed in between the two multiplications.
    key: [u32; 2],
}

/// Elements that share a hash, 8 bits each.
pub(crate) const SHARE: usize = 4;
/// Factors of the hash (constants: Mueller, Wellons, "Prospecting for hash functions").
pub(crate) const FACTORS: [u32; 2] = [0x7feb_352d, 0x846c_a68b];

/// Elements that choose from the same permutations, counted from a tensor's first element. Enough that shuffling takes
/// little time compared with encoding them.
const BLOCK: u64 = 1 << 14;
/// Permutations of a block.
pub(crate) const TABLE: usize = 16;
/// Maximum number of ranks: random bits are calculated in 64 bits, 56 of them after the point.
const MOST_RANKS: u32 = 1 << 24;
/// Maximum number of ranks whose random bits are quotients of 16 bits, see [`Narrow`].
const MOST_NARROW: u32 = 128;

/// Hashes `parts` by the steps of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
/// 2014).
fn hashed(parts: &[u64]) -> u64 {
    parts.iter().fold(0, |state: u64, &part| {
        let mut z = (state ^ part).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

impl RngKey {
    /// Creates a key from everything that distinguishes an encoding; the order matters.
    pub fn keyed(parts: &[u64]) -> Self {
        Self { own: Stream::new(hashed(parts)), among: None }
    }

    /// Returns the key with its place among the `world` encodings of values that are added up. Correlated rounding
    /// needs this; without it, correlated rounding is stochastic.
    /// `shared` distinguishes these encodings from others and is the same for all of them; `rank` distinguishes one
    /// from another. The key itself must differ between ranks.
    ///
    /// # Panics
    /// Panics unless `rank` is below `world`, and `world` at most 2^24.
    pub fn among(self, shared: &[u64], rank: Rank, world: u32) -> Self {
        assert!(rank.0 < world && world <= MOST_RANKS, "rank {rank} of {world}, at most {MOST_RANKS}");
        let among = Among { shared: hashed(shared), rank: rank.0, world };
        Self { among: (world > 1).then_some(among), ..self }
    }

    /// Returns the key as a number that looks random.
    pub fn word(self) -> u64 {
        u64::from(self.own.key[1]) << 32 | u64::from(self.own.key[0])
    }

    /// Returns what [`RngKey::among`] gave the key: a hash of `shared`, the rank, and the number of ranks. `None` if the
    /// key names no other ranks.
    pub fn among_ranks(self) -> Option<(u64, u32, u32)> {
        self.among.map(|among| (among.shared, among.rank, among.world))
    }
}

impl Stream {
    fn new(key: u64) -> Self {
        Self { key: [key as u32, (key >> 32) as u32] }
    }

    /// Fills in the random bits from 0 to 255 of a tensor's elements from `first` on. `first` and the number of
    /// elements are multiples of 8.
    #[inline(always)]
    fn fill(self, random_bits: &mut [u8], first: u64) {
        let counter = first / SHARE as u64;
        // A tensor of more elements than the counter has values gets another key for each further part.
        let until_next = (1 << 32) - (counter & 0xffff_ffff);
        let here = random_bits.len().min(usize::try_from(until_next).unwrap_or(usize::MAX).saturating_mul(SHARE));
        let (here, further) = random_bits.split_at_mut(here);
        self.fill_part(here, counter);
        if !further.is_empty() {
            self.fill_part(further, counter + until_next);
        }
    }

    /// Returns the number that is added to the index of a group of four elements from `counter` on, and the number that
    /// is mixed in. `None` if `fours` groups leave the part of the counter's values that has this key.
    #[inline(always)]
    pub(crate) fn start(self, counter: u64, fours: usize) -> Option<(u32, u32)> {
        let within = (counter & 0xffff_ffff) + fours as u64 <= 1 << 32;
        let mixed_in = self.key[1] ^ ((counter >> 32) as u32).wrapping_mul(0x9e37_79b9);
        within.then_some(((counter as u32).wrapping_add(self.key[0]), mixed_in))
    }

    #[inline(always)]
    fn fill_part(self, random_bits: &mut [u8], counter: u64) {
        let Some((start, k1)) = self.start(counter, random_bits.len() / SHARE) else { return };
        for (index, four) in random_bits.chunks_exact_mut(SHARE).enumerate() {
            four.copy_from_slice(&mixed(start.wrapping_add(index as u32), k1).to_le_bytes());
        }
    }
}

/// Returns the hash of a counter, with `k1` mixed in.
#[inline(always)]
pub(super) fn mixed(counter: u32, k1: u32) -> u32 {
    let x = (counter ^ counter >> 16).wrapping_mul(FACTORS[0]);
    let x = (x ^ x >> 15 ^ k1).wrapping_mul(FACTORS[1]);
    x ^ x >> 16
}

/// The random bits of one encoding.
#[derive(Debug)]
pub(crate) struct RandomBits {
    pub(crate) own: Stream,
    among: Option<Among>,
    /// Strata of the current block; `None` without correlated rounding.
    pub(crate) strata: Option<Strata>,
}

impl RandomBits {
    pub(crate) fn new(rng_key: RngKey, rounding: Rounding) -> Self {
        let among = rng_key.among.filter(|_| rounding == Rounding::Correlated);
        Self { own: rng_key.own, among, strata: None }
    }

    /// Moves to the element at `first`, and returns the number of elements from there on for which random bits are
    /// available.
    #[inline]
    pub(crate) fn seek(&mut self, first: u64) -> usize {
        let Some(among) = self.among else { return usize::MAX };
        let block = first / BLOCK;
        if self.strata.as_ref().is_none_or(|strata| strata.block != block) {
            self.strata = Some(Strata::new(among, block));
        }
        (BLOCK - first % BLOCK) as usize
    }

    /// Does what [`Stream::fill`] does, for elements that were turned to.
    #[inline(always)]
    pub(crate) fn fill(&self, random_bits: &mut [u8], first: u64) {
        self.own.fill(random_bits, first);
        if let Some(strata) = &self.strata {
            strata.spread(random_bits, first);
        }
    }
}

/// The strata of a rank in a block of elements.
#[derive(Debug)]
pub(crate) struct Strata {
    world: u32,
    block: u64,
    /// Random bytes for each element: the lower half picks one of the permutations, the upper half one of the
    /// rotations.
    pub(crate) picks: Stream,
    /// The rank's stratum in each permutation.
    of_rank: [u32; TABLE],
    /// 2^56 / world, rounded up. The excess is so small that the highest byte of a product is the quotient.
    step: u64,
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "scalar kernels take the wide way"))]
    pub(crate) narrow: Option<Narrow>,
}

/// The same strata for vectors, in a world of 2 to [`MOST_NARROW`] ranks. `(n * factor) >> 16 >> shift` is n / world
/// for every n less than 256 world.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "as above"))]
pub(crate) struct Narrow {
    pub(crate) of_rank: [u8; TABLE],
    pub(crate) rotations: [u8; TABLE],
    pub(crate) world: u8,
    pub(crate) factor: u16,
    pub(crate) shift: u8,
}

impl Strata {
    fn new(Among { shared, rank, world }: Among, block: u64) -> Self {
        let Stream { key: [k0, k1] } = Stream::new(hashed(&[shared, block]));
        // Follows where the swaps of a shuffle move the rank, for all permutations at the same time. A place is final
        // once it was swapped, since later swaps are below it.
        let mut of_rank = [rank; TABLE];
        for place in (1..world).rev() {
            for (at, stratum) in of_rank.iter_mut().enumerate() {
                let random = mixed(k0.wrapping_add(place * TABLE as u32 + at as u32), k1);
                let other = ((u64::from(random) * u64::from(place + 1)) >> 32) as u32;
                let is_other = if *stratum == other { place } else { *stratum };
                *stratum = if *stratum == place { other } else { is_other };
            }
        }
        let narrow = (world <= MOST_NARROW).then(|| Narrow::new(of_rank, world));
        let step = (1u64 << 56).div_ceil(u64::from(world));
        Self { world, block, picks: Stream::new(shared), of_rank, step, narrow }
    }

    /// Moves random bits into the rank's strata.
    #[inline(always)]
    fn spread(&self, random_bits: &mut [u8], first: u64) {
        const PART: usize = 64;
        for (random_bits, first) in random_bits.chunks_mut(PART).zip((first..).step_by(PART)) {
            let mut picks = [0; PART];
            self.picks.fill(&mut picks[..random_bits.len()], first);
            for (draw, pick) in random_bits.iter_mut().zip(picks) {
                let n = u64::from(self.stratum(pick)) << 8 | u64::from(*draw);
                *draw = (n.wrapping_mul(self.step) >> 56) as u8;
            }
        }
    }

    #[inline(always)]
    fn stratum(&self, pick: u8) -> u32 {
        let stratum = self.of_rank[usize::from(pick) % TABLE] + rotation(self.world, usize::from(pick) / TABLE);
        if stratum < self.world { stratum } else { stratum - self.world }
    }
}

/// Returns one of [`TABLE`] rotations of `world` strata.
#[inline(always)]
fn rotation(world: u32, index: usize) -> u32 {
    world * index as u32 / TABLE as u32
}

impl Narrow {
    fn new(of_rank: [u32; TABLE], world: u32) -> Self {
        // The greatest shift with which the factor has 16 bits. Relative to 2^(16 + shift) / world, the factor is too
        // great by less than world / 2^(16 + shift). For n less than 256 world, the quotient is therefore too great by
        // less than 1 / world.
        let shift = world.next_power_of_two().ilog2() - 1;
        let factor = (1u32 << (16 + shift)).div_ceil(world) as u16;
        let rotations = std::array::from_fn(|index| rotation(world, index) as u8);
        let of_rank = of_rank.map(|stratum| stratum as u8);
        Self { of_rank, rotations, world: world as u8, factor, shift: shift as u8 }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn draws_depend_on_the_element_and_not_on_where_a_slice_begins() {
        let rng_key = Stream::new(hashed(&[1, 2, 3]));
        // Within a part of the counter, and across its end.
        for first in [1 << 40, (1 << 34) - 64] {
            let mut all = [0; 256];
            rng_key.fill(&mut all, first);
            for start in (0..128).step_by(8) {
                for len in [8, 16, 40, 128] {
                    let mut part = vec![0; len];
                    rng_key.fill(&mut part, first + start as u64);
                    assert_eq!(part, all[start..start + len], "{len} from {start}");
                }
            }
            assert_ne!(all[..64], all[64..128]);
        }
    }

    #[test]
    fn draws_are_uniform_and_keys_are_independent() {
        const COUNT: usize = 1 << 20;
        let random_bits = |parts: &[u64]| {
            let mut random_bits = vec![0u8; COUNT];
            RngKey::keyed(parts).own.fill(&mut random_bits, 0);
            random_bits
        };
        let (a, b) = (random_bits(&[7, 0]), random_bits(&[7, 1]));
        let mut found = [0usize; 256];
        a.iter().for_each(|&draw| found[usize::from(draw)] += 1);
        let expected = COUNT as f64 / 256.0;
        // Chi squared of 255 degrees of freedom: mean 255, deviation 22.6; five deviations are allowed.
        let chi2: f64 = found.iter().map(|&count| (count as f64 - expected).powi(2) / expected).sum();
        assert!((chi2 - 255.0).abs() < 113.0, "{chi2}");
        for shift in [0, 1, 8, 32, 4096] {
            let centred = |draw: u8| f64::from(draw) - 127.5;
            for (other, from) in [(&b, 0), (&a, 1)] {
                let pairs = a.iter().zip(other.iter().skip(shift.max(from)));
                let covariance: f64 = pairs.map(|(&x, &y)| centred(x) * centred(y)).sum();
                let correlation = covariance / (COUNT as f64 * (65536.0 - 1.0) / 12.0);
                assert!(correlation.abs() < 5.0 / (COUNT as f64).sqrt(), "shift {shift}: {correlation}");
            }
        }
    }

    const WORLDS: [u32; 22] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 64, 127, 128, 129, 300];

    fn random_bits(rank: u32, world: u32, shared: u64) -> RandomBits {
        RandomBits::new(RngKey::keyed(&[shared, rank.into()]).among(&[shared], Rank(rank), world), Rounding::Correlated)
    }

    /// Returns the stratum of each rank for each of `count` elements.
    fn strata(world: u32, shared: u64, first: u64, count: usize) -> Vec<Vec<u32>> {
        let of_rank = |rank| {
            let mut random_bits = random_bits(rank, world, shared);
            assert!(random_bits.seek(first) >= count);
            let Some(strata) = random_bits.strata else { return vec![0; count] };
            let mut picks = vec![0; count];
            strata.picks.fill(&mut picks, first);
            picks.into_iter().map(|pick| strata.stratum(pick)).collect()
        };
        (0..world).map(of_rank).collect()
    }

    #[test]
    fn a_draw_in_a_random_stratum_is_exactly_uniform() {
        for world in WORLDS.into_iter().skip(1) {
            let Some(mut strata) = ({
                let mut random_bits = random_bits(0, world, 1);
                random_bits.seek(0);
                random_bits.strata
            }) else {
                panic!("{world} ranks have strata");
            };
            let mut found = [0; 256];
            for stratum in 0..world {
                strata.of_rank = [stratum; TABLE];
                let (mut random_bits, mut picks) = (Vec::from_iter(0..=255), [0; 256]);
                strata.spread(&mut random_bits, 0);
                strata.picks.fill(&mut picks, 0);
                for (u, (&draw, pick)) in (0..).zip(random_bits.iter().zip(picks)) {
                    let n = 256 * strata.stratum(pick) + u;
                    assert_eq!(u32::from(draw), n / world, "{n} by {world}");
                    if let Some(Narrow { factor, shift, .. }) = strata.narrow {
                        assert_eq!((n * u32::from(factor)) >> 16 >> shift, n / world, "{n} by {world}, narrow");
                    }
                    found[usize::from(draw)] += 1;
                }
            }
            // Every stratum occurred with every u, since rotations only exchange strata.
            assert_eq!(found, [world; 256], "{world} ranks");
            assert_eq!(strata.narrow.is_some(), world <= MOST_NARROW);
        }
        // The maximum number of ranks, with which the product has its most bits.
        let among = Among { shared: 0, rank: MOST_RANKS - 1, world: MOST_RANKS };
        let step = (1u64 << 56).div_ceil(u64::from(among.world));
        for n in [0, 1, (1 << 24) - 1, 1 << 24, (1 << 32) - 1] {
            assert_eq!((n * step) >> 56, n / u64::from(among.world));
        }
    }

    #[test]
    fn ranks_have_different_strata_at_every_element() {
        for world in WORLDS {
            for first in [0, 5 * BLOCK + 512] {
                let strata = strata(world, 7, first, 512);
                for element in 0..512 {
                    let mut of_element: Vec<u32> = strata.iter().map(|of_rank| of_rank[element]).collect();
                    of_element.sort_unstable();
                    assert!(of_element.into_iter().eq(0..world), "{world} ranks, element {element}");
                }
            }
        }
    }

    #[test]
    #[cfg(not(miri))]
    fn every_two_ranks_have_every_two_strata_equally_often() {
        // One element for each permutation, since elements of one permutation do not differ.
        const BLOCKS: u64 = 4000;
        for world in [2, 3, 5, 8, 17] {
            let tables: Vec<Vec<[u32; TABLE]>> = (0..world)
                .map(|rank| {
                    let mut random_bits = random_bits(rank, world, 3);
                    let table = |block| {
                        random_bits.seek(block * BLOCK);
                        random_bits.strata.as_ref().map_or([0; TABLE], |strata| strata.of_rank)
                    };
                    (0..BLOCKS).map(table).collect()
                })
                .collect();
            for (a, b) in [(0, 1), (1, 0), (0, world - 1), (world / 2, world - 1)].into_iter().filter(|(a, b)| a != b) {
                let mut found = vec![0.0; (world * world) as usize];
                let pairs = tables[a as usize].iter().flatten().zip(tables[b as usize].iter().flatten());
                pairs.for_each(|(a, b)| found[(a * world + b) as usize] += 1.0);
                let pairs = f64::from(world * (world - 1));
                let expected = (BLOCKS * TABLE as u64) as f64 / pairs;
                let of_two = |(at, count): (usize, &f64)| {
                    let is_one = at as u32 / world == at as u32 % world;
                    assert!(!is_one || *count == 0.0);
                    if is_one { 0.0 } else { (count - expected).powi(2) / expected }
                };
                let chi2: f64 = found.iter().enumerate().map(of_two).sum();
                // Chi squared of one degree of freedom less than there are pairs; five deviations are allowed.
                let limit = 5.0 * (2.0 * (pairs - 1.0)).sqrt();
                assert!((chi2 - (pairs - 1.0)).abs() < limit, "ranks {a} and {b} of {world}: {chi2} of {pairs}");
            }
        }
    }

    #[test]
    fn elements_of_a_block_have_all_of_its_permutations_and_blocks_have_others() {
        // The distances of three ranks distinguish permutations; their strata also distinguish rotations.
        let of_block = |block| {
            let strata = strata(300, 9, block * BLOCK, 4096);
            let pairs = |rank: usize| strata[0].iter().zip(&strata[rank]);
            let distances = |rank| -> Vec<u32> { pairs(rank).map(|(a, b)| (a + 300 - b) % 300).collect() };
            let permutations: HashSet<_> = distances(1).into_iter().zip(distances(2)).collect();
            let picks: HashSet<_> = pairs(1).zip(&strata[2]).collect();
            (permutations, picks.len())
        };
        let (of_first, _) = of_block(0);
        for block in 0..8 {
            let (permutations, picks) = of_block(block);
            assert_eq!((permutations.len(), picks), (TABLE, TABLE * TABLE), "block {block}");
            assert!(block == 0 || permutations.is_disjoint(&of_first), "block {block}");
        }
    }

    /// Over a block the strata of each rank have nearly the mean of all strata, whatever the permutations.
    #[test]
    #[cfg(not(miri))]
    fn no_rank_has_mostly_low_strata_in_a_block() {
        for world in [2, 3, 5, 8, 17, 300] {
            for block in 0..8 {
                for (rank, strata) in strata(world, 13, block * BLOCK, BLOCK as usize).iter().enumerate() {
                    let sum: u64 = strata.iter().copied().map(u64::from).sum();
                    let mean = (sum as f64 / strata.len() as f64 + 0.5) / f64::from(world);
                    // 1/32 of a stratum's distance from an even rotation, over 16 permutations, and the spread of the
                    // elements. Allowed are five deviations of 0.29 / 128, and as much again.
                    assert!((mean - 0.5).abs() < 0.025, "rank {rank} of {world}, block {block}: {mean}");
                }
            }
        }
    }

    #[test]
    fn spread_draws_depend_on_the_element_and_not_on_where_a_slice_begins() {
        for world in [3, 300] {
            let mut random_bits = random_bits(2, world, 5);
            let mut all = [0; 512];
            assert_eq!(random_bits.seek(BLOCK + 1024), BLOCK as usize - 1024);
            random_bits.fill(&mut all, BLOCK + 1024);
            for (start, len) in [(0, 8), (8, 200), (72, 64), (504, 8)] {
                let mut part = vec![0; len];
                random_bits.fill(&mut part, BLOCK + 1024 + start as u64);
                assert_eq!(part, all[start..start + len]);
            }
        }
    }
}
