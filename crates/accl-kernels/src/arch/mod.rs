//! The instruction sets: one file and one row each.
//!
//! The files hold no algorithms. They compile the loops of `reduce` with their target features, and add what the
//! compiler cannot find by itself (conversion of float16). All of them return the same bits. `dispatch` chooses the one
//! that a process uses.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(all(target_arch = "x86_64", accl_avx512))]
mod avx512;
mod row;
mod scalar;

pub(crate) use row::{CopyFn, Row};

/// The instruction set that every machine has.
pub(crate) const PLAINEST: &Row = &scalar::ROW;

/// All instruction sets, from the plainest to the best.
pub(crate) const ROWS: &[Row] = &[
    scalar::ROW,
    #[cfg(target_arch = "x86_64")]
    avx2::ROW,
    #[cfg(all(target_arch = "x86_64", accl_avx512))]
    avx512::ROW,
];
