//! Packing and unpacking of random views against an index walk over the same memory.

mod common;

use accl_kernels::{StridedView, pack, unpack};
use accl_types::{Dtype, DtypeClass};
use common::{Random, elements};
use proptest::prelude::*;

/// Maximum number of elements of a random view.
const MAX_ELEMENTS: i64 = if cfg!(miri) { 40 } else { 4000 };

/// A view of part of some memory.
#[derive(Clone, Debug)]
struct Case {
    dtype: Dtype,
    sizes: Vec<i64>,
    strides: Vec<i64>,
    /// Index of the first element, in elements.
    first: usize,
    /// Elements of memory, including unreachable ones.
    extent: usize,
    /// Misalignment in bytes.
    misalignment: usize,
    conj: bool,
    neg: bool,
    seed: u64,
}

impl Case {
    /// Returns the offsets of the view's elements in row-major order, in elements.
    fn offsets(&self) -> Vec<usize> {
        let mut offsets = vec![self.first as i64];
        for (&size, &stride) in self.sizes.iter().zip(&self.strides) {
            offsets = offsets.iter().flat_map(|offset| (0..size).map(move |i| offset + i * stride)).collect();
        }
        offsets.into_iter().map(|offset| usize::try_from(offset).unwrap()).collect()
    }

    fn memory(&self) -> Vec<u8> {
        let mut memory = vec![0; self.misalignment];
        memory.extend(elements(self.dtype, self.extent, &mut Random(self.seed)));
        memory
    }

    fn view<'a>(&'a self, memory: &mut [u8]) -> StridedView<'a> {
        let at = self.misalignment + self.first * self.dtype.size_bytes();
        StridedView {
            ptr: memory.as_mut_ptr().wrapping_add(at),
            dtype: self.dtype,
            sizes: &self.sizes,
            strides: &self.strides,
            conj: self.conj,
            neg: self.neg,
        }
    }

    /// Returns the element's value, given its bytes in memory, or the bytes, given the value.
    fn resolve(&self, bytes: &[u8]) -> Vec<u8> {
        let mut bytes = bytes.to_vec();
        let last = bytes.len() - 1;
        let middle = bytes.len() / 2;
        match self.dtype {
            Dtype::C32 | Dtype::BC32 | Dtype::C64 | Dtype::C128 => {
                bytes[last] ^= if self.conj != self.neg { 0x80 } else { 0 };
                bytes[middle - 1] ^= if self.neg { 0x80 } else { 0 };
            }
            Dtype::Bool | Dtype::F8E8M0Fnu | Dtype::Bits8 | Dtype::Bits16 => {}
            Dtype::F8E4M3FnUz | Dtype::F8E5M2FnUz => {
                // 0x00 is zero, and 0x80 is NaN and not a zero.
                let has_sign = bytes[0] != 0 && bytes[0] != 0x80;
                bytes[0] ^= if self.neg && has_sign { 0x80 } else { 0 };
            }
            Dtype::F4E2M1FnX2 => bytes[0] ^= if self.neg { 0x88 } else { 0 },
            dtype if dtype.class() == DtypeClass::Integer => {
                if self.neg {
                    let mut wide = [0; 16];
                    wide[..bytes.len()].copy_from_slice(&bytes);
                    bytes = u128::from_le_bytes(wide).wrapping_neg().to_le_bytes()[..bytes.len()].to_vec();
                }
            }
            _ => bytes[last] ^= if self.neg { 0x80 } else { 0 },
        }
        bytes
    }

    fn packed(&self, memory: &[u8]) -> Vec<u8> {
        let size = self.dtype.size_bytes();
        let element = |offset| &memory[self.misalignment + offset * size..][..size];
        self.offsets().into_iter().flat_map(|offset| self.resolve(element(offset))).collect()
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Overlap {
    Allowed,
    Never,
}

/// Generates views as torch makes them: a dense tensor that was permuted, sliced with a step, and (if overlap is
/// allowed) expanded.
fn cases(overlap: Overlap) -> impl Strategy<Value = Case> {
    let dim = (prop_oneof![8 => 1..7i64, 1 => Just(0i64), 2 => 7..40i64], 1..4i64, 0..8u8);
    let dims = prop::collection::vec(dim, 0..6);
    (dims, 0..Dtype::ALL.len(), any::<(bool, bool, u64)>(), 0..16usize).prop_map(
        move |(mut dims, dtype, (conj, neg, seed), misalignment)| {
            // Few elements keep the walk fast.
            while dims.iter().map(|dim| dim.0.max(1)).product::<i64>() > MAX_ELEMENTS {
                dims.pop();
            }
            let mut order: Vec<usize> = (0..dims.len()).collect();
            let mut random = Random(seed);
            for i in (1..order.len()).rev() {
                order.swap(i, random.below(i as u64 + 1) as usize);
            }
            let mut strides = vec![0; dims.len()];
            let (mut extent, mut first) = (1, 0);
            for &at in &order {
                let (size, step, kind) = dims[at];
                match kind {
                    0 if overlap == Overlap::Allowed => strides[at] = 0,
                    1 => {
                        strides[at] = -extent * step;
                        first += (size - 1).max(0) * extent * step;
                        extent *= size.max(1) * step;
                    }
                    _ => {
                        strides[at] = extent * step;
                        extent *= size.max(1) * step;
                    }
                }
            }
            Case {
                dtype: Dtype::ALL[dtype],
                sizes: dims.iter().map(|dim| dim.0).collect(),
                strides,
                first: first as usize,
                extent: extent as usize,
                misalignment,
                conj,
                neg,
                seed,
            }
        },
    )
}

fn config() -> ProptestConfig {
    let cases = if cfg!(miri) { 20 } else { 2000 };
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn pack_visits_the_elements_in_row_major_order(case in cases(Overlap::Allowed)) {
        let mut memory = case.memory();
        let want = case.packed(&memory);
        let view = case.view(&mut memory);
        prop_assert_eq!(view.count() * case.dtype.size_bytes(), want.len());
        let mut got = vec![0x5a; want.len() + 16];
        // SAFETY: the offsets lie within the memory, as `packed` has checked, and `got` is large enough.
        unsafe { pack(got.as_mut_ptr().wrapping_add(1), &view) };
        prop_assert_eq!(&got[1..=want.len()], &want[..]);
        prop_assert!(got[want.len() + 1..].iter().all(|&byte| byte == 0x5a), "written behind the end");
        if view.is_dense() {
            let start = case.misalignment + case.first * case.dtype.size_bytes();
            prop_assert_eq!(&memory[start.min(memory.len())..][..want.len()], &want[..], "is_dense is wrong");
        }
    }

    #[test]
    fn unpack_is_the_inverse_of_pack_and_touches_nothing_else(case in cases(Overlap::Never)) {
        let original = case.memory();
        let packed = case.packed(&original);
        let mut memory = vec![0x5a; original.len()];
        let view = case.view(&mut memory);
        // SAFETY: the offsets lie within the memory, and `packed` has an element for each.
        unsafe { unpack(&view, packed.as_ptr()) };
        let size = case.dtype.size_bytes();
        let mut want = vec![0x5a; original.len()];
        for offset in case.offsets() {
            let bytes = case.misalignment + offset * size..case.misalignment + (offset + 1) * size;
            want[bytes.clone()].copy_from_slice(&original[bytes]);
        }
        prop_assert_eq!(memory, want);
    }
}

fn dense(dtype: Dtype, sizes: &[i64], strides: &[i64], conj: bool, neg: bool) -> bool {
    StridedView { ptr: std::ptr::null_mut(), dtype, sizes, strides, conj, neg }.is_dense()
}

#[test]
fn dense_views_are_recognised() {
    assert!(dense(Dtype::F32, &[], &[], false, false));
    assert!(dense(Dtype::F32, &[2, 3, 4], &[12, 4, 1], false, false));
    assert!(dense(Dtype::F32, &[2, 1, 4], &[4, 77, 1], false, false), "the stride of a size of 1 means nothing");
    assert!(dense(Dtype::F32, &[5, 0], &[9, 9], false, true), "without elements there is nothing to resolve");
    assert!(dense(Dtype::F32, &[4], &[1], true, false), "a real tensor is its own conjugate");
    assert!(dense(Dtype::C64, &[4], &[1], false, false));
}

#[test]
fn other_views_are_not_taken_for_dense() {
    assert!(!dense(Dtype::F32, &[2, 3], &[1, 2], false, false));
    assert!(!dense(Dtype::F32, &[4], &[2], false, false));
    assert!(!dense(Dtype::F32, &[4], &[0], false, false));
    assert!(!dense(Dtype::C64, &[4], &[1], true, false));
    assert!(!dense(Dtype::F32, &[4], &[1], false, true));
}

/// One dtype of each size.
const DTYPES: &[Dtype] =
    if cfg!(miri) { &[Dtype::C128] } else { &[Dtype::U8, Dtype::BF16, Dtype::F32, Dtype::C64, Dtype::C128] };

/// Sizes above a tile in both inner dimensions, in every order of three dimensions.
#[test]
fn every_permutation_of_a_large_tensor_packs() {
    let (a, b, c) = if cfg!(miri) { (1, 17, 9) } else { (19, 67, 33) };
    let sizes = [a, b, c];
    let strides = [b * c, c, 1];
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        for &dtype in DTYPES {
            let case = Case {
                dtype,
                sizes: order.map(|at| sizes[at]).to_vec(),
                strides: order.map(|at| strides[at]).to_vec(),
                first: 0,
                extent: (a * b * c) as usize,
                misalignment: 0,
                conj: false,
                neg: true,
                seed: 3,
            };
            let mut memory = case.memory();
            let want = case.packed(&memory);
            let mut got = vec![0; want.len()];
            // SAFETY: the view is a permutation of the whole memory, and `got` has its size.
            unsafe { pack(got.as_mut_ptr(), &case.view(&mut memory)) };
            assert!(got == want, "pack {dtype} {order:?}");
            let mut back = vec![0; memory.len()];
            // SAFETY: the view is a permutation of all of `back`, and `got` has an element for each of its elements.
            unsafe { unpack(&case.view(&mut back), got.as_ptr()) };
            assert!(back == memory, "unpack {dtype} {order:?}");
        }
    }
}
