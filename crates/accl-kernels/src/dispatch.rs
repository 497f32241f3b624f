//! Which instruction set a process uses, and the kernels of it.
//!
//! Owns the look at the processor; the table is in `arch`. Read [`Isa::best`] first.

use std::sync::OnceLock;

use accl_types::{Dtype, Error, ReduceOp, Result};

use crate::arch::{CopyFn, PLAINEST, ROWS, Row};
use crate::codec::loops::Loops;
use crate::isa::{Isa, ScaleKernel};
use crate::reduce::select::Selected;

impl Isa {
    /// The best one that this machine has. It is looked up once in a process.
    pub fn best() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| available_isas().last().copied().unwrap_or(Isa::Scalar))
    }

    /// # Errors
    /// `Unsupported` if this machine, or the compiler that built this, has not got the instruction set.
    pub(crate) fn check_available(self) -> Result<()> {
        match self.row() {
            Some(row) if (row.available)() => Ok(()),
            Some(_) | None => {
                Err(Error::unsupported(format!("instruction set {self} is not available on this machine")))
            }
        }
    }

    fn row(self) -> Option<&'static Row> {
        ROWS.iter().find(|row| row.isa == self)
    }
}

/// The instruction sets of this machine that have kernels, from the plainest to the best.
pub fn available_isas() -> Vec<Isa> {
    ROWS.iter().filter(|row| (row.available)()).map(|row| row.isa).collect()
}

/// What the kernels of this process use, for the log.
pub fn describe_isa() -> &'static str {
    Isa::best().row().map_or(Isa::Scalar.name(), |row| row.description)
}

/// The kernels of `isa`, which the caller has checked to be available before it calls one.
pub(crate) fn select(isa: Isa, op: ReduceOp, dtype: Dtype) -> Option<Selected> {
    isa.row().and_then(|row| (row.select)(op, dtype))
}

/// As [`select`], for the multiplication by a factor.
pub(crate) fn select_scale(isa: Isa, dtype: Dtype) -> Option<ScaleKernel> {
    isa.row().and_then(|row| (row.select_scale)(dtype))
}

/// The copy of `isa`, which the caller has checked to be available; see `crate::copy::blocks`.
#[inline]
pub(crate) fn copy(isa: Isa) -> CopyFn {
    isa.row().map_or(PLAINEST.copy, |row| row.copy)
}

/// The loops of codecs of `isa`, which the caller has checked to be available.
pub(crate) fn loops(isa: Isa) -> &'static Loops {
    isa.row().map_or(&PLAINEST.loops, |row| &row.loops)
}
