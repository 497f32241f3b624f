//! References for kernels, by instruction set: loops over words that compute almost nothing (bitwise or), and a plain
//! sum. They show the rate of memory, and share no code with the kernels.

use accl_kernels::Isa;

/// The loops of one instruction set. Slices of a call have the same length.
#[derive(Clone, Copy, Debug)]
pub struct PlainLoops {
    in_place: unsafe fn(&mut [u64], &[u64]),
    pair: unsafe fn(&mut [u64], &[u64], &[u64]),
    many: unsafe fn(&mut [u64], [&[u64]; 4]),
    add: unsafe fn(&mut [f32], &[f32]),
}

impl PlainLoops {
    /// Returns the loops with the vectors of `isa`; AVX-512 uses 32-byte vectors too.
    ///
    /// # Panics
    /// Panics if this machine lacks the instruction set.
    pub fn of(isa: Isa) -> Self {
        match isa {
            Isa::Scalar => portable::LOOPS,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::Avx512 => {
                assert!(is_x86_feature_detected!("avx2"), "this machine has no AVX2");
                avx2::LOOPS
            }
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 => panic!("this machine has no {isa}"),
        }
    }

    /// y |= x
    pub fn in_place(&self, y: &mut [u64], x: &[u64]) {
        // SAFETY: `of` has checked that this machine has the instructions of `in_place`.
        unsafe { (self.in_place)(y, x) }
    }

    /// z = x | y
    pub fn pair(&self, z: &mut [u64], x: &[u64], y: &[u64]) {
        // SAFETY: `of` has checked that this machine has the instructions of `pair`.
        unsafe { (self.pair)(z, x, y) }
    }

    /// z = a | b | c | d
    pub fn many(&self, z: &mut [u64], sources: [&[u64]; 4]) {
        // SAFETY: `of` has checked that this machine has the instructions of `many`.
        unsafe { (self.many)(z, sources) }
    }

    /// y += x
    pub fn add(&self, y: &mut [f32], x: &[f32]) {
        // SAFETY: `of` has checked that this machine has the instructions of `add`.
        unsafe { (self.add)(y, x) }
    }
}

macro_rules! loops {
    ($name:ident, $(#[$feature:meta])*) => {
        mod $name {
            pub(super) const LOOPS: super::PlainLoops = super::PlainLoops { in_place, pair, many, add };

            $(#[$feature])*
            fn in_place(y: &mut [u64], x: &[u64]) {
                y.iter_mut().zip(x).for_each(|(y, x)| *y |= x);
            }

            $(#[$feature])*
            fn add(y: &mut [f32], x: &[f32]) {
                y.iter_mut().zip(x).for_each(|(y, x)| *y += x);
            }

            $(#[$feature])*
            fn pair(z: &mut [u64], x: &[u64], y: &[u64]) {
                z.iter_mut().zip(x).zip(y).for_each(|((z, x), y)| *z = x | y);
            }

            $(#[$feature])*
            fn many(z: &mut [u64], [a, b, c, d]: [&[u64]; 4]) {
                let sources = a.iter().zip(b).zip(c.iter().zip(d));
                z.iter_mut().zip(sources).for_each(|(z, ((a, b), (c, d)))| *z = a | b | c | d);
            }
        }
    };
}

loops!(portable,);
#[cfg(target_arch = "x86_64")]
loops!(avx2, #[target_feature(enable = "avx2")]);
