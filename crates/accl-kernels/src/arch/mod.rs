//! The instruction sets: which there are, which this machine has, and their kernels. One file and one row each.
//!
//! The files hold no algorithms: they compile the loops of `reduce` with their target features, and add what the
//! compiler cannot find by itself (conversion of float16). All of them give the same bits.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(all(target_arch = "x86_64", accl_avx512))]
mod avx512;
mod scalar;

use std::fmt;
use std::sync::OnceLock;

use accl_types::{Dtype, Error, ReduceOp, Result};

use crate::codec::loops::Loops;
use crate::reduce::lanes::{ArithLanes, FloatLanes, Lanes, LastOn, OpOn};
use crate::reduce::select::Selected;

/// An instruction set that has kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// What every processor of the target has (SSE2 on x86-64).
    Scalar,
    /// AVX2 with the float16 conversions of F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
}

/// One instruction set of the table.
struct Row {
    isa: Isa,
    description: &'static str,
    available: fn() -> bool,
    select: fn(ReduceOp, Dtype) -> Option<Selected>,
    select_scale: fn(Dtype) -> Option<ScaleKernel>,
    copy: CopyFn,
    loops: Loops,
}

/// From the plainest to the best.
const ROWS: &[Row] = &[
    scalar::ROW,
    #[cfg(target_arch = "x86_64")]
    avx2::ROW,
    #[cfg(all(target_arch = "x86_64", accl_avx512))]
    avx512::ROW,
];

impl Isa {
    /// The name in bench ids and test messages.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        }
    }

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

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
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
    isa.row().map_or(scalar::ROW.copy, |row| row.copy)
}

/// The loops of codecs of `isa`, which the caller has checked to be available.
pub(crate) fn loops(isa: Isa) -> &'static Loops {
    isa.row().map_or(&scalar::ROW.loops, |row| &row.loops)
}

type CopyFn = unsafe fn(*mut u8, *const u8, usize);

/// The functions of one operation on one type. Lengths are in bytes, multiples of the element's size.
///
/// To be called on a machine that has their instruction set, within the rules of `loops.rs`.
#[derive(Clone, Copy)]
pub(crate) struct ReduceKernels {
    /// (dst, a and b, bytes of each, world)
    pub(crate) pair: unsafe fn(*mut u8, [*const u8; 2], usize, f64),
    /// (dst, srcs, bytes of each, world)
    pub(crate) many: unsafe fn(*mut u8, &[*const u8], usize, f64),
}

/// The multiplication of one type by a factor: (dst, src, bytes, factor).
pub(crate) type ScaleKernel = unsafe fn(*mut u8, *const u8, usize, f64);

/// An instruction set, to the functions that compose kernels: how it handles the types of which the compiler does not
/// make vectors by itself.
pub(crate) trait Arch {
    type F16: FloatLanes;
    type Bf16: FloatLanes;
    type F32: FloatLanes;
    type F64: FloatLanes;
    type C64: ArithLanes;
    type C128: ArithLanes;

    fn reduce_kernels<V: Lanes, O: OpOn<V>, F: LastOn<V>>() -> ReduceKernels;
    fn scale_kernel<V: FloatLanes>() -> ScaleKernel;
}

/// Implements [`Arch`] for `$arch` by functions with the given attributes around the loops, and defines its `ROW`.
macro_rules! arch {
    (
        $arch:ident,
        $f16:ty,
        $bf16:ty,
        $f32:ty,
        $f64:ty,
        $c64:ty,
        $c128:ty,
        $loops:expr,
        $description:literal, $available:expr, $(#[$feature:meta])*) => {
        pub(super) const ROW: Row = Row {
            isa: Isa::$arch,
            description: $description,
            available: $available,
            select: select::select::<$arch>,
            select_scale: select::select_scale::<$arch>,
            copy,
            loops: $loops,
        };

        codec_loops!($(#[$feature])*);

        pub(super) struct $arch;

        impl Arch for $arch {
            type F16 = $f16;
            type Bf16 = $bf16;
            type F32 = $f32;
            type F64 = $f64;
            type C64 = $c64;
            type C128 = $c128;

            fn reduce_kernels<V: Lanes, O: OpOn<V>, F: LastOn<V>>() -> ReduceKernels {
                ReduceKernels { pair: pair::<V, O, F>, many: many::<V, O, F> }
            }

            fn scale_kernel<V: FloatLanes>() -> ScaleKernel {
                scale::<V>
            }
        }

        $(#[$feature])*
        unsafe fn pair<V: Lanes, O: OpOn<V>, F: LastOn<V>>(
            dst: *mut u8,
            operands: [*const u8; 2],
            len_bytes: usize,
            world: f64,
        ) {
            // SAFETY: the caller's promise, see `ReduceKernels`.
            unsafe { loops::pair::<V, O, F>(dst, operands, len_bytes / V::SIZE_BYTES, world) };
        }

        $(#[$feature])*
        unsafe fn many<V: Lanes, O: OpOn<V>, F: LastOn<V>>(
            dst: *mut u8,
            srcs: &[*const u8],
            len_bytes: usize,
            world: f64,
        ) {
            // SAFETY: as above.
            unsafe { loops::many::<V, O, F>(dst, srcs, len_bytes / V::SIZE_BYTES, world) };
        }

        $(#[$feature])*
        unsafe fn copy(dst: *mut u8, src: *const u8, len_bytes: usize) {
            // SAFETY: the caller's promise.
            unsafe { crate::copy::blocks(dst, src, len_bytes) };
        }

        $(#[$feature])*
        unsafe fn scale<V: FloatLanes>(dst: *mut u8, src: *const u8, len_bytes: usize, factor: f64) {
            // SAFETY: as above.
            unsafe { loops::scale::<V>(dst, src, len_bytes / V::SIZE_BYTES, factor) };
        }
    };
}
use arch;

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(all(target_arch = "x86_64", accl_avx512, not(miri)))]
    #[test]
    fn every_file_of_an_instruction_set_has_its_row() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/arch");
        let mut files: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned())
            .filter(|stem| stem != "mod")
            .collect();
        let mut rows: Vec<String> = ROWS.iter().map(|row| row.isa.name().to_owned()).collect();
        files.sort();
        rows.sort();
        assert_eq!(files, rows);
    }

    #[test]
    fn the_plainest_isa_is_always_there_and_comes_first() {
        assert_eq!(available_isas().first(), Some(&Isa::Scalar));
        assert!(available_isas().contains(&Isa::best()));
    }

    #[test]
    fn an_isa_that_is_not_there_is_refused_by_name() {
        for isa in [Isa::Scalar, Isa::Avx2, Isa::Avx512] {
            match isa.check_available() {
                Ok(()) => assert!(available_isas().contains(&isa)),
                Err(error) => assert!(error.message.contains(isa.name()), "{error}"),
            }
        }
    }
}
