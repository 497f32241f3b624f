//! Reductions of two and of many buffers. [`Reducer`] is the whole interface. `lanes.rs` has the arithmetic, `loops.rs`
//! the loops, `select.rs` the table of supported pairs, and `crate::arch` the instruction sets.

pub(crate) mod float16;
pub(crate) mod lanes;
pub(crate) mod loops;
pub(crate) mod select;

use std::fmt;

use accl_types::{Dtype, DtypeClass, Error, ReduceOp, Result};

use crate::dispatch;
use crate::float_env::DefaultFloatEnv;
use crate::isa::{Isa, ReduceKernels};
use select::Selected;

/// Whether this is the last operation on the elements: AVG divides there, before it rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Finish {
    /// Further contributions follow.
    No,
    /// The result is final.
    Yes,
}

/// Whether `op` can be applied to `dtype`: [`Reducer::new`] succeeds for exactly these pairs.
pub fn supports(op: ReduceOp, dtype: Dtype) -> bool {
    dispatch::select(Isa::Scalar, op, dtype).is_some()
}

/// An operator for one dtype and world size, with kernels chosen for this processor. Cheap to copy and to keep.
///
/// The crate's numeric rules apply. PREMUL_SUM adds: the contributions were multiplied by [`scale`](crate::scale())
/// before. Bool treats SUM, MAX and BOR as or, PRODUCT, MIN and BAND as and.
#[derive(Clone, Copy)]
pub struct Reducer {
    op: ReduceOp,
    dtype: Dtype,
    isa: Isa,
    world: f64,
    kernels: Selected,
}

impl Reducer {
    /// Creates a reducer for the best instruction set of this machine. AVG divides by `world`.
    ///
    /// # Errors
    /// `Unsupported` if the operator does not support the dtype; the message lists the supported dtypes.
    pub fn new(op: ReduceOp, dtype: Dtype, world: u32) -> Result<Reducer> {
        Self::with_isa(op, dtype, world, Isa::best())
    }

    /// Creates a reducer like [`Reducer::new`], with a given instruction set: for tests and measurements.
    ///
    /// # Errors
    /// `Unsupported` as for [`Reducer::new`], or if this machine lacks the instruction set.
    pub fn with_isa(op: ReduceOp, dtype: Dtype, world: u32, isa: Isa) -> Result<Reducer> {
        isa.check_available()?;
        let kernels = dispatch::select(isa, op, dtype).ok_or_else(|| unsupported(op, dtype))?;
        Ok(Reducer { op, dtype, isa, world: f64::from(world), kernels })
    }

    /// Returns the operator.
    pub fn op(&self) -> ReduceOp {
        self.op
    }

    /// Returns the element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Returns the instruction set whose kernels are used.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Computes dst\[i\] = a\[i\] op b\[i\] for `count` elements. With [`Finish::Yes`], AVG divides by the world size.
    ///
    /// # Safety
    /// `a` and `b` hold `count` readable elements that no other thread writes meanwhile. `dst` has room for `count`
    /// elements, and no other thread accesses it meanwhile. No alignment is required. `dst` may be equal to `a`, to `b`
    /// or to both; otherwise it does not overlap them.
    #[inline]
    pub unsafe fn pair(&self, dst: *mut u8, a: *const u8, b: *const u8, count: usize, finish: Finish) {
        if count == 0 {
            return;
        }
        let _env = self.float_env();
        let kernels = self.kernels(finish);
        let len_bytes = count * self.dtype.size_bytes();
        // SAFETY: the buffers hold `len_bytes` bytes by this function's contract; `with_isa` checked the instruction
        // set.
        unsafe { (kernels.pair)(dst, [a, b], len_bytes, self.world) };
    }

    /// Computes dst\[i\] = srcs\[0\]\[i\] op srcs\[1\]\[i\] op ..., in this order, for `count` elements. 16-bit floats
    /// are accumulated in float32 and rounded once. With one source the elements are only finished; with none nothing
    /// happens.
    ///
    /// # Safety
    /// The contract of [`Reducer::pair`], for each source. `dst` may be equal to any sources, and does not overlap the
    /// others.
    #[inline]
    pub unsafe fn many(&self, dst: *mut u8, srcs: &[*const u8], count: usize, finish: Finish) {
        if let [a, b] = *srcs {
            // SAFETY: the two sources and `dst` fulfil the contract of `pair`, by this function's contract.
            return unsafe { self.pair(dst, a, b, count, finish) };
        }
        let _env = self.float_env();
        let len_bytes = count * self.dtype.size_bytes();
        // SAFETY: the buffers hold `len_bytes` bytes by this function's contract; `with_isa` checked the instruction
        // set.
        unsafe { (self.kernels(finish).many)(dst, srcs, len_bytes, self.world) };
    }

    fn kernels(&self, finish: Finish) -> &ReduceKernels {
        match finish {
            Finish::No => &self.kernels.keep,
            Finish::Yes => &self.kernels.last,
        }
    }

    #[inline]
    fn float_env(&self) -> Option<DefaultFloatEnv> {
        match self.dtype.class() {
            DtypeClass::Bool | DtypeClass::Integer | DtypeClass::Opaque => None,
            DtypeClass::Float16 | DtypeClass::Float | DtypeClass::Complex => Some(DefaultFloatEnv::enter()),
        }
    }
}

impl fmt::Debug for Reducer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reducer")
            .field("op", &self.op)
            .field("dtype", &self.dtype)
            .field("isa", &self.isa)
            .field("world", &self.world)
            .finish_non_exhaustive()
    }
}

fn unsupported(op: ReduceOp, dtype: Dtype) -> Error {
    let accepted: Vec<&str> =
        Dtype::ALL.iter().filter(|&&other| supports(op, other)).map(|other| other.name()).collect();
    Error::unsupported(format!("reduce operator {op} is not supported for {dtype}; it takes {}", accepted.join(", ")))
}
