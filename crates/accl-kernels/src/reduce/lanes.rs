//! What a kernel computes with: `Lanes` moves elements between memory and registers, the `*Reg` traits calculate, `Op`
//! and `Last` name the operation. Loops over buffers are in `loops.rs`, 16-bit conversions in `float16.rs`.
//!
//! Most types are handled one element at a time: the loops are simple enough for the compiler to vectorise for the
//! instruction set of the function that they are inlined into. A type for which it cannot (float16 wants conversion
//! instructions) has a `Lanes` of several elements in `arch/<isa>.rs`.

use super::float16;

/// Elements that are accumulated at a time. Accumulators and their part of two sources stay in the L1 cache.
pub(crate) const BLOCK: usize = 512;

/// Accumulators of a block: the elements behind the last group have theirs behind the others.
pub(crate) const SLOTS: usize = BLOCK + 16;

/// A group of `COUNT` elements of one type: how they lie in memory and which registers hold them.
pub(crate) trait Lanes {
    /// Elements in a group; divides `BLOCK`, and is at most `SLOTS - BLOCK`.
    const COUNT: usize;
    /// Bytes of one element in a buffer.
    const SIZE_BYTES: usize;
    /// One element as it is accumulated, in memory of ours.
    type Acc: Copy;
    /// `COUNT` elements as they are accumulated.
    type Reg: Copy;
    /// The same arithmetic one element at a time, for what is left of a buffer.
    type Tail: Lanes<Acc = Self::Acc>;

    /// # Safety
    /// `COUNT * SIZE_BYTES` bytes can be read at `src`, at any alignment.
    unsafe fn load(src: *const u8) -> Self::Reg;
    /// Rounds and makes NaN canonical.
    ///
    /// # Safety
    /// `COUNT * SIZE_BYTES` bytes can be written at `dst`, at any alignment.
    unsafe fn store(dst: *mut u8, value: Self::Reg);
    /// Reads the group whose first element is accumulated at `slot`.
    ///
    /// # Safety
    /// `slots` are `SLOTS` accumulators, and this group was written by [`Lanes::store_acc`].
    unsafe fn load_acc(slots: *const Self::Acc, slot: usize) -> Self::Reg;
    /// Keeps a group. Which slots below `BLOCK` serve which elements is the implementation's own affair.
    ///
    /// # Safety
    /// `slots` has room for `SLOTS` accumulators; `slot` is a multiple of `COUNT` below `BLOCK`, or, if `COUNT` is 1,
    /// any below `SLOTS`.
    unsafe fn store_acc(slots: *mut Self::Acc, slot: usize, value: Self::Reg);
}

/// SUM and PRODUCT.
pub(crate) trait ArithReg: Copy {
    fn add(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
}

/// MIN and MAX.
pub(crate) trait OrderReg: Copy {
    fn min(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
}

/// What floats have besides: division by the world size, multiplication by a factor.
pub(crate) trait FloatReg: ArithReg + OrderReg {
    fn div_scalar(self, divisor: f64) -> Self;
    fn mul_scalar(self, factor: f64) -> Self;
}

/// Elements that are added, ordered and divided as floats.
pub(crate) trait FloatLanes: Lanes<Reg: FloatReg, Tail: Lanes<Reg: FloatReg>> {}
impl<V: Lanes<Reg: FloatReg, Tail: Lanes<Reg: FloatReg>>> FloatLanes for V {}

/// An operation of two operands.
pub(crate) trait Op<R> {
    fn apply(a: R, b: R) -> R;
}

/// An operation that both the groups and the tail of `V` have.
pub(crate) trait OpOn<V: Lanes>: Op<V::Reg> + Op<<V::Tail as Lanes>::Reg> {}
impl<V: Lanes, O: Op<V::Reg> + Op<<V::Tail as Lanes>::Reg>> OpOn<V> for O {}

/// What happens to an element after its last operation.
pub(crate) trait Last<R> {
    fn finish(value: R, world: f64) -> R;
}

/// As [`OpOn`], for [`Last`].
pub(crate) trait LastOn<V: Lanes>: Last<V::Reg> + Last<<V::Tail as Lanes>::Reg> {}
impl<V: Lanes, F: Last<V::Reg> + Last<<V::Tail as Lanes>::Reg>> LastOn<V> for F {}

macro_rules! ops {
    ($($name:ident: $bound:path, $a:ident $b:ident => $result:expr;)*) => {
        $(
            pub(crate) struct $name;
            impl<R: $bound> Op<R> for $name {
                #[inline(always)]
                fn apply($a: R, $b: R) -> R {
                    $result
                }
            }
        )*
    };
}

ops! {
    Sum: ArithReg, a b => a.add(b);
    Product: ArithReg, a b => a.mul(b);
    Min: OrderReg, a b => a.min(b);
    Max: OrderReg, a b => a.max(b);
}

// Bit operations need one type only: they work on bytes whatever the element is.
macro_rules! bit_ops {
    ($($name:ident: $a:ident $b:ident => $result:expr;)*) => {
        $(
            pub(crate) struct $name;
            impl Op<u8> for $name {
                #[inline(always)]
                fn apply($a: u8, $b: u8) -> u8 {
                    $result
                }
            }
        )*
    };
}

bit_ops! {
    And: a b => a & b;
    Or: a b => a | b;
    Xor: a b => a ^ b;
}

/// The element stays as it is.
pub(crate) struct Keep;
impl<R> Last<R> for Keep {
    #[inline(always)]
    fn finish(value: R, _world: f64) -> R {
        value
    }
}

/// AVG: the element is divided by the world size.
pub(crate) struct Divide;
impl<R: FloatReg> Last<R> for Divide {
    #[inline(always)]
    fn finish(value: R, world: f64) -> R {
        value.div_scalar(world)
    }
}

/// `Lanes` of one element that is accumulated as `$acc` and lies in memory as `$elem`.
macro_rules! single {
    ($lanes:ty, $elem:ty, $acc:ty, $value:ident => $load:expr, $result:ident => $store:expr) => {
        impl Lanes for $lanes {
            const COUNT: usize = 1;
            const SIZE_BYTES: usize = size_of::<$elem>();
            type Acc = $acc;
            type Reg = $acc;
            type Tail = $lanes;

            #[inline(always)]
            unsafe fn load(src: *const u8) -> $acc {
                // SAFETY: the caller's promise; any bits are a value of these types.
                let $value = unsafe { src.cast::<$elem>().read_unaligned() };
                $load
            }

            #[inline(always)]
            unsafe fn store(dst: *mut u8, $result: $acc) {
                // SAFETY: the caller's promise.
                unsafe { dst.cast::<$elem>().write_unaligned($store) };
            }

            #[inline(always)]
            unsafe fn load_acc(slots: *const $acc, slot: usize) -> $acc {
                // SAFETY: the caller's promise.
                unsafe { slots.add(slot).read() }
            }

            #[inline(always)]
            unsafe fn store_acc(slots: *mut $acc, slot: usize, value: $acc) {
                // SAFETY: the caller's promise.
                unsafe { slots.add(slot).write(value) };
            }
        }
    };
}

macro_rules! integers {
    ($($int:ty)*) => {
        $(
            single!($int, $int, $int, value => value, result => result);

            impl ArithReg for $int {
                #[inline(always)]
                fn add(self, other: Self) -> Self {
                    self.wrapping_add(other)
                }

                #[inline(always)]
                fn mul(self, other: Self) -> Self {
                    self.wrapping_mul(other)
                }
            }

            impl OrderReg for $int {
                #[inline(always)]
                fn min(self, other: Self) -> Self {
                    if self < other { self } else { other }
                }

                #[inline(always)]
                fn max(self, other: Self) -> Self {
                    if self > other { self } else { other }
                }
            }
        )*
    };
}

integers!(u8 u16 u32 u64 i8 i16 i32 i64);

/// `bool`: true is any byte but zero, and is written as 1. Its operations are the bit operations.
pub(crate) struct Bool;
single!(Bool, u8, u8, value => u8::from(value != 0), result => result);

macro_rules! floats {
    ($($float:ident)*) => {
        $(
            single!($float, $float, $float, value => value, result => if result.is_nan() { $float::NAN } else { result });

            impl ArithReg for $float {
                #[inline(always)]
                fn add(self, other: Self) -> Self {
                    self + other
                }

                #[inline(always)]
                fn mul(self, other: Self) -> Self {
                    self * other
                }
            }

            impl OrderReg for $float {
                // Equal operands leave one in each of `x` and `y`, and so do unordered ones: joining their bits
                // chooses -0 of two zeros, and a NaN of two operands of which one is NaN.
                #[inline(always)]
                fn min(self, other: Self) -> Self {
                    let x = if self < other { self } else { other };
                    let y = if other < self { other } else { self };
                    $float::from_bits(x.to_bits() | y.to_bits())
                }

                #[inline(always)]
                fn max(self, other: Self) -> Self {
                    let x = if self > other { self } else { other };
                    let y = if other > self { other } else { self };
                    let ordered = $float::from_bits(x.to_bits() & y.to_bits());
                    if self.is_nan() | other.is_nan() { $float::NAN } else { ordered }
                }
            }

            impl FloatReg for $float {
                #[inline(always)]
                fn div_scalar(self, divisor: f64) -> Self {
                    self / divisor as $float
                }

                #[inline(always)]
                fn mul_scalar(self, factor: f64) -> Self {
                    self * factor as $float
                }
            }
        )*
    };
}

floats!(f32 f64);

/// bfloat16, accumulated in float32.
pub(crate) struct Bf16;
single!(Bf16, u16, f32, value => float16::widen_bf16(value), result => float16::narrow_bf16(result));

/// Two bfloat16 at a time. As parts of one 32-bit word they are widened and narrowed in place, by shifts and masks: a
/// vectorised loop needs no shuffles for them.
pub(crate) struct Bf16x2;

/// Two registers that go through the same operations.
#[derive(Clone, Copy)]
pub(crate) struct Twice<R>(pub(crate) R, pub(crate) R);

impl Lanes for Bf16x2 {
    const COUNT: usize = 2;
    const SIZE_BYTES: usize = 2;
    type Acc = f32;
    type Reg = Twice<f32>;
    type Tail = Bf16;

    #[inline(always)]
    unsafe fn load(src: *const u8) -> Twice<f32> {
        // SAFETY: the caller's promise of two elements.
        let word = unsafe { src.cast::<u32>().read_unaligned() };
        Twice(f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000))
    }

    #[inline(always)]
    unsafe fn store(dst: *mut u8, value: Twice<f32>) {
        let low = u32::from(float16::narrow_bf16(value.0));
        let high = float16::round_bf16(value.1) & 0xffff_0000;
        // SAFETY: the caller's promise of two elements.
        unsafe { dst.cast::<u32>().write_unaligned(high | low) };
    }

    // The first elements of the words in one half of the block, the second ones in the other.
    #[inline(always)]
    unsafe fn load_acc(slots: *const f32, slot: usize) -> Twice<f32> {
        // SAFETY: the caller's promise: `slot < BLOCK`.
        unsafe { Twice(slots.add(slot / 2).read(), slots.add((BLOCK + slot) / 2).read()) }
    }

    #[inline(always)]
    unsafe fn store_acc(slots: *mut f32, slot: usize, value: Twice<f32>) {
        // SAFETY: the caller's promise: `slot < BLOCK`.
        unsafe {
            slots.add(slot / 2).write(value.0);
            slots.add((BLOCK + slot) / 2).write(value.1);
        }
    }
}

impl<R: ArithReg> ArithReg for Twice<R> {
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Twice(self.0.add(other.0), self.1.add(other.1))
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        Twice(self.0.mul(other.0), self.1.mul(other.1))
    }
}

impl<R: OrderReg> OrderReg for Twice<R> {
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        Twice(OrderReg::min(self.0, other.0), OrderReg::min(self.1, other.1))
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        Twice(OrderReg::max(self.0, other.0), OrderReg::max(self.1, other.1))
    }
}

impl<R: FloatReg> FloatReg for Twice<R> {
    #[inline(always)]
    fn div_scalar(self, divisor: f64) -> Self {
        Twice(self.0.div_scalar(divisor), self.1.div_scalar(divisor))
    }

    #[inline(always)]
    fn mul_scalar(self, factor: f64) -> Self {
        Twice(self.0.mul_scalar(factor), self.1.mul_scalar(factor))
    }
}

/// float16, accumulated in float32, converted with integer instructions.
pub(crate) struct F16;
single!(F16, u16, f32, value => float16::widen_f16(value), result => float16::narrow_f16(result));

/// A complex number of two `T`, for PRODUCT. SUM and AVG treat the parts as elements of their own.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Complex<T> {
    re: T,
    im: T,
}

macro_rules! complex {
    ($($float:ident)*) => {
        $(
            single!(Complex<$float>, Complex<$float>, Complex<$float>, value => value, result => Complex {
                re: if result.re.is_nan() { $float::NAN } else { result.re },
                im: if result.im.is_nan() { $float::NAN } else { result.im },
            });

            /// (a + bi)(c + di) = (ac - bd) + (ad + bc)i, each product and sum rounded; no rescue of infinities.
            impl Op<Complex<$float>> for Product {
                #[inline(always)]
                fn apply(a: Complex<$float>, b: Complex<$float>) -> Complex<$float> {
                    Complex { re: a.re * b.re - a.im * b.im, im: a.re * b.im + a.im * b.re }
                }
            }
        )*
    };
}

complex!(f32 f64);
