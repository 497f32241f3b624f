//! Choice of the instruction set that a process uses, and the kernels of an instruction set.
//!
//! Owns the check of the processor; the table is in `arch`. Read [`Isa::best`] first.

use std::sync::OnceLock;

use accl_types::{Dtype, Error, ReduceOp, Result};

use crate::arch::{CopyFn, PLAINEST, ROWS, Row};
use crate::codec::loops::Loops;
use crate::isa::{Isa, ScaleKernel};
use crate::reduce::select::Selected;

impl Isa {
    /// Returns the best instruction set of this machine. It is determined once per process.
    pub fn best() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| available_isas().last().copied().unwrap_or(Isa::Scalar))
    }

    /// # Errors
    /// `Unsupported` if this machine, or the compiler that built this crate, lacks the instruction set.
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

/// Returns the instruction sets of this machine that have kernels, from the plainest to the best.
pub fn available_isas() -> Vec<Isa> {
    ROWS.iter().filter(|row| (row.available)()).map(|row| row.isa).collect()
}

/// Returns a description of the instruction set that this process uses, for the log.
pub fn describe_isa() -> &'static str {
    Isa::best().row().map_or(Isa::Scalar.name(), |row| row.description)
}

/// Returns the kernels of `isa`. Before calling one, the caller checks that `isa` is available.
pub(crate) fn select(isa: Isa, op: ReduceOp, dtype: Dtype) -> Option<Selected> {
    isa.row().and_then(|row| (row.select)(op, dtype))
}

/// Returns the kernel of `isa` that multiplies by a factor. Before calling it, the caller checks that `isa` is
/// available.
pub(crate) fn select_scale(isa: Isa, dtype: Dtype) -> Option<ScaleKernel> {
    isa.row().and_then(|row| (row.select_scale)(dtype))
}

/// Returns the copy function of `isa`, whose availability the caller has checked; see `crate::copy::blocks`.
#[inline]
pub(crate) fn copy(isa: Isa) -> CopyFn {
    isa.row().map_or(PLAINEST.copy, |row| row.copy)
}

/// Returns the codec loops of `isa`, whose availability the caller has checked.
pub(crate) fn loops(isa: Isa) -> &'static Loops {
    isa.row().map_or(&PLAINEST.loops, |row| &row.loops)
}
