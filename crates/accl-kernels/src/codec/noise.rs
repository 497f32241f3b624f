//! Random numbers without a state: a hash of a key and a counter.

/// The key of one encoding's random numbers.
///
/// Draws of different keys are independent, and so are draws for different elements. Whoever encodes names what makes an
/// encoding unlike all others: a seed, the step, the tensor, the round of the algorithm and the rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Noise {
    /// Added to the counter, and mixed in between the two multiplications.
    key: [u32; 2],
}

/// Elements that share a hash, 8 bits each.
pub(crate) const SHARE: usize = 4;
/// Of the hash (constants: Mueller, Wellons, "Prospecting for hash functions").
pub(crate) const FACTORS: [u32; 2] = [0x7feb_352d, 0x846c_a68b];

impl Noise {
    /// A key from whatever distinguishes an encoding; the order matters.
    pub fn keyed(parts: &[u64]) -> Self {
        // The steps of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
        let key = parts.iter().fold(0, |state: u64, &part| {
            let mut z = (state ^ part).wrapping_add(0x9e37_79b9_7f4a_7c15);
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        });
        Self { key: [key as u32, (key >> 32) as u32] }
    }

    /// The key as a number, as good as drawn.
    pub fn word(self) -> u64 {
        u64::from(self.key[1]) << 32 | u64::from(self.key[0])
    }

    /// The draws from 0 to 255 for the elements of a tensor from `first` on, which is a multiple of 8, as is their number.
    #[inline(always)]
    pub(crate) fn fill(self, draws: &mut [u8], first: u64) {
        let counter = first / SHARE as u64;
        // Tensors of more elements than the counter has values have another key for each further part.
        let until_next = (1 << 32) - (counter & 0xffff_ffff);
        let here = draws.len().min(usize::try_from(until_next).unwrap_or(usize::MAX).saturating_mul(SHARE));
        let (here, further) = draws.split_at_mut(here);
        self.fill_part(here, counter);
        if !further.is_empty() {
            self.fill_part(further, counter + until_next);
        }
    }

    /// What is added to the index of a four of elements from `counter` on, and what is mixed in, unless so many leave the
    /// part of the counter's values that has this key.
    #[inline(always)]
    pub(crate) fn start(self, counter: u64, fours: usize) -> Option<(u32, u32)> {
        let within = (counter & 0xffff_ffff) + fours as u64 <= 1 << 32;
        let mixed_in = self.key[1] ^ ((counter >> 32) as u32).wrapping_mul(0x9e37_79b9);
        within.then_some(((counter as u32).wrapping_add(self.key[0]), mixed_in))
    }

    #[inline(always)]
    fn fill_part(self, draws: &mut [u8], counter: u64) {
        let Some((start, k1)) = self.start(counter, draws.len() / SHARE) else { return };
        for (index, four) in draws.chunks_exact_mut(SHARE).enumerate() {
            let mut x = start.wrapping_add(index as u32);
            x = (x ^ x >> 16).wrapping_mul(FACTORS[0]);
            x = (x ^ x >> 15 ^ k1).wrapping_mul(FACTORS[1]);
            four.copy_from_slice(&(x ^ x >> 16).to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_depend_on_the_element_and_not_on_where_a_slice_begins() {
        let noise = Noise::keyed(&[1, 2, 3]);
        // Within a part of the counter, and over its end.
        for first in [1 << 40, (1 << 34) - 64] {
            let mut all = [0; 256];
            noise.fill(&mut all, first);
            for start in (0..128).step_by(8) {
                for len in [8, 16, 40, 128] {
                    let mut part = vec![0; len];
                    noise.fill(&mut part, first + start as u64);
                    assert_eq!(part, all[start..start + len], "{len} from {start}");
                }
            }
            assert_ne!(all[..64], all[64..128]);
        }
    }

    #[test]
    fn draws_are_uniform_and_keys_are_independent() {
        const COUNT: usize = 1 << 20;
        let draws = |parts: &[u64]| {
            let mut draws = vec![0u8; COUNT];
            Noise::keyed(parts).fill(&mut draws, 0);
            draws
        };
        let (a, b) = (draws(&[7, 0]), draws(&[7, 1]));
        let mut found = [0usize; 256];
        a.iter().for_each(|&draw| found[usize::from(draw)] += 1);
        let expected = COUNT as f64 / 256.0;
        // Chi squared of 255 degrees of freedom: mean 255, deviation 22.6; five deviations.
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
}
