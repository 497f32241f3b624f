//! Building blocks of a kernel: `Lanes` moves elements between memory and registers, the `*Reg` traits calculate, `Op`
//! and `Last` name the operation. Loops over buffers are in `loops.rs`, 16-bit conversions in `float16.rs`.
//!
//! Elements are handled in groups of a cache line. All operands of a group are in registers before its result is
//! stored. Therefore a result may replace an operand. The compiler vectorises a group for the instruction set of the
//! function that the group is inlined into.
//! If it cannot vectorise a type (float16 needs conversion instructions), `arch/<isa>.rs` has a `Lanes` of several
//! elements.

use std::marker::PhantomData;

use super::float16;

/// Elements that are accumulated at a time. Accumulators and the matching parts of two sources stay in the L1 cache.
pub(crate) const BLOCK: usize = 512;

/// Accumulators of a block, and 64 more for the elements after the last group.
pub(crate) const SLOTS: usize = BLOCK + 64;

/// A group of `COUNT` elements of one type: their layout in memory and the registers that hold them.
pub(crate) trait Lanes {
    /// Elements in a group; divides `BLOCK`, and is at most `SLOTS - BLOCK`.
    const COUNT: usize;
    /// Bytes of one element in a buffer.
    const SIZE_BYTES: usize;
    /// One element as it is accumulated, in memory of this crate.
    type Acc: Copy;
    /// `COUNT` elements as they are accumulated.
    type Reg: Copy;
    /// The same arithmetic one element at a time, for the rest of a buffer.
    type Tail: Lanes<Acc = Self::Acc>;

    /// Prefetches memory that will be loaded soon. For types whose arithmetic leaves the processor no room to look
    /// ahead far enough by itself. Any address is allowed.
    #[inline(always)]
    fn prefetch(_src: *const u8) {}
    /// # Safety
    /// `COUNT * SIZE_BYTES` bytes can be read at `src`, at any alignment.
    unsafe fn load(src: *const u8) -> Self::Reg;
    /// Rounds, makes NaN canonical, and writes the group.
    ///
    /// # Safety
    /// `COUNT * SIZE_BYTES` bytes can be written at `dst`, at any alignment.
    unsafe fn store(dst: *mut u8, value: Self::Reg);
    /// Reads the group whose first element is accumulated at `slot`.
    ///
    /// # Safety
    /// `slots` are `SLOTS` accumulators, and this group was written by [`Lanes::store_acc`].
    unsafe fn load_acc(slots: *const Self::Acc, slot: usize) -> Self::Reg;
    /// Stores a group of accumulators. The implementation decides which slots below `BLOCK` hold which elements.
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

/// BAND, BOR and BXOR. Only one type has them, because they work on bytes whatever the element is.
pub(crate) trait BitReg: Copy {
    fn and(self, other: Self) -> Self;
    fn or(self, other: Self) -> Self;
    fn xor(self, other: Self) -> Self;
}

/// Additional operations of floats: division by the world size, multiplication by a factor.
pub(crate) trait FloatReg: ArithReg + OrderReg {
    fn div_scalar(self, divisor: f64) -> Self;
    fn mul_scalar(self, factor: f64) -> Self;
}

/// Additional operation of integers: division by the world size.
pub(crate) trait IntegerReg: ArithReg + OrderReg {
    /// Divides and rounds towards zero.
    fn div_whole(self, divisor: f64) -> Self;
}

/// Elements that are added and multiplied.
pub(crate) trait ArithLanes: Lanes<Reg: ArithReg, Tail: Lanes<Reg: ArithReg>> {}
impl<V: Lanes<Reg: ArithReg, Tail: Lanes<Reg: ArithReg>>> ArithLanes for V {}

/// Elements that are added, ordered and divided as integers.
pub(crate) trait IntegerLanes: Lanes<Reg: IntegerReg, Tail: Lanes<Reg: IntegerReg>> {}
impl<V: Lanes<Reg: IntegerReg, Tail: Lanes<Reg: IntegerReg>>> IntegerLanes for V {}

/// Elements that are added, ordered and divided as floats.
pub(crate) trait FloatLanes: Lanes<Reg: FloatReg, Tail: Lanes<Reg: FloatReg>> {}
impl<V: Lanes<Reg: FloatReg, Tail: Lanes<Reg: FloatReg>>> FloatLanes for V {}

/// An operation on two operands.
pub(crate) trait Op<R> {
    fn apply(a: R, b: R) -> R;
}

/// An operation that both the groups and the tail of `V` have.
pub(crate) trait OpOn<V: Lanes>: Op<V::Reg> + Op<<V::Tail as Lanes>::Reg> {}
impl<V: Lanes, O: Op<V::Reg> + Op<<V::Tail as Lanes>::Reg>> OpOn<V> for O {}

/// The step that follows an element's last operation.
pub(crate) trait Last<R> {
    fn finish(value: R, world: f64) -> R;
}

/// A [`Last`] step that both the groups and the tail of `V` have.
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
    And: BitReg, a b => a.and(b);
    Or: BitReg, a b => a.or(b);
    Xor: BitReg, a b => a.xor(b);
}

/// Leaves the element unchanged.
pub(crate) struct Keep;
impl<R> Last<R> for Keep {
    #[inline(always)]
    fn finish(value: R, _world: f64) -> R {
        value
    }
}

/// AVG: divides the element by the world size.
pub(crate) struct Divide;
impl<R: FloatReg> Last<R> for Divide {
    #[inline(always)]
    fn finish(value: R, world: f64) -> R {
        value.div_scalar(world)
    }
}

/// AVG of integers: divides the sum by the world size and drops the fraction, as NCCL does.
pub(crate) struct DivideWhole;
impl<R: IntegerReg> Last<R> for DivideWhole {
    #[inline(always)]
    fn finish(value: R, world: f64) -> R {
        value.div_whole(world)
    }
}

/// Implements `Lanes` of one element that is accumulated as `$acc` and lies in memory as `$elem`.
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
                // SAFETY: one element can be read at `src`, by the contract of `Lanes::load`; any bits are a value of
                // these types.
                let $value = unsafe { src.cast::<$elem>().read_unaligned() };
                $load
            }

            #[inline(always)]
            unsafe fn store(dst: *mut u8, $result: $acc) {
                // SAFETY: one element can be written at `dst`, by the contract of `Lanes::store`.
                unsafe { dst.cast::<$elem>().write_unaligned($store) };
            }

            #[inline(always)]
            unsafe fn load_acc(slots: *const $acc, slot: usize) -> $acc {
                // SAFETY: the accumulator at `slot` was written, by the contract of `Lanes::load_acc`.
                unsafe { slots.add(slot).read() }
            }

            #[inline(always)]
            unsafe fn store_acc(slots: *mut $acc, slot: usize, value: $acc) {
                // SAFETY: `slot` is below `SLOTS`, by the contract of `Lanes::store_acc`.
                unsafe { slots.add(slot).write(value) };
            }
        }
    };
}

/// `N` times the elements of `T` at once.
pub(crate) struct Unrolled<T, const N: usize>(PhantomData<T>);

/// Registers that go through the same operations.
#[derive(Clone, Copy)]
pub(crate) struct Regs<R, const N: usize>(pub(crate) [R; N]);

// The methods use loops and not closures: a closure is a function without the instruction set of the kernel.

impl<T: Lanes, const N: usize> Lanes for Unrolled<T, N> {
    const COUNT: usize = N * T::COUNT;
    const SIZE_BYTES: usize = T::SIZE_BYTES;
    type Acc = T::Acc;
    type Reg = Regs<T::Reg, N>;
    type Tail = T::Tail;

    #[inline(always)]
    fn prefetch(src: *const u8) {
        T::prefetch(src);
    }

    #[inline(always)]
    unsafe fn load(src: *const u8) -> Self::Reg {
        // SAFETY: the bytes of `N` groups of `T` can be read at `src`, by the contract of `Lanes::load`.
        unsafe {
            let mut parts = [T::load(src); N];
            for (at, part) in parts.iter_mut().enumerate() {
                *part = T::load(src.add(at * T::COUNT * T::SIZE_BYTES));
            }
            Regs(parts)
        }
    }

    #[inline(always)]
    unsafe fn store(dst: *mut u8, value: Self::Reg) {
        for (at, &part) in value.0.iter().enumerate() {
            // SAFETY: the bytes of `N` groups of `T` can be written at `dst`, by the contract of `Lanes::store`.
            unsafe { T::store(dst.add(at * T::COUNT * T::SIZE_BYTES), part) };
        }
    }

    #[inline(always)]
    unsafe fn load_acc(slots: *const T::Acc, slot: usize) -> Self::Reg {
        // SAFETY: the `N` groups of `T` from `slot` on were written, by the contract of `Lanes::load_acc`.
        unsafe {
            let mut parts = [T::load_acc(slots, slot); N];
            for (at, part) in parts.iter_mut().enumerate() {
                *part = T::load_acc(slots, slot + at * T::COUNT);
            }
            Regs(parts)
        }
    }

    #[inline(always)]
    unsafe fn store_acc(slots: *mut T::Acc, slot: usize, value: Self::Reg) {
        for (at, &part) in value.0.iter().enumerate() {
            // SAFETY: the `N` groups of `T` from `slot` on lie within the slots, by the contract of `Lanes::store_acc`.
            unsafe { T::store_acc(slots, slot + at * T::COUNT, part) };
        }
    }
}

macro_rules! by_register {
    ($($bound:ident: $($method:ident)*;)*) => {
        $(
            impl<R: $bound, const N: usize> $bound for Regs<R, N> {
                $(
                    #[inline(always)]
                    fn $method(mut self, other: Self) -> Self {
                        for (one, other) in self.0.iter_mut().zip(other.0) {
                            *one = $bound::$method(*one, other);
                        }
                        self
                    }
                )*
            }
        )*
    };
}

by_register! {
    ArithReg: add mul;
    OrderReg: min max;
    BitReg: and or xor;
}

impl<R: IntegerReg, const N: usize> IntegerReg for Regs<R, N> {
    #[inline(always)]
    fn div_whole(mut self, divisor: f64) -> Self {
        for one in &mut self.0 {
            *one = one.div_whole(divisor);
        }
        self
    }
}

impl<R: FloatReg, const N: usize> FloatReg for Regs<R, N> {
    #[inline(always)]
    fn div_scalar(mut self, divisor: f64) -> Self {
        for one in &mut self.0 {
            *one = one.div_scalar(divisor);
        }
        self
    }

    #[inline(always)]
    fn mul_scalar(mut self, factor: f64) -> Self {
        for one in &mut self.0 {
            *one = one.mul_scalar(factor);
        }
        self
    }
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

macro_rules! divide_whole {
    ($($int:ty)*, $value:ident / $divisor:ident => $result:expr) => {
        $(
            impl IntegerReg for $int {
                #[inline(always)]
                fn div_whole(self, $divisor: f64) -> Self {
                    let $value = self;
                    $result as $int
                }
            }
        )*
    };
}

// The quotient is computed in float64, because vectors can divide floats. A quotient that is not whole differs from the
// next whole number by at least one part in the dividend. A float64 rounds a 32-bit dividend by far less, so the
// truncated quotient is exact.
divide_whole!(u8 u16 u32 i8 i16 i32, value / divisor => (f64::from(value) / divisor));
// The world size is 32 bits wide and at least 1, so the conversion is exact and the division cannot fail.
divide_whole!(u64, value / divisor => (value / (divisor as u64)));
divide_whole!(i64, value / divisor => (value / (divisor as i64)));

impl BitReg for u8 {
    #[inline(always)]
    fn and(self, other: Self) -> Self {
        self & other
    }

    #[inline(always)]
    fn or(self, other: Self) -> Self {
        self | other
    }

    #[inline(always)]
    fn xor(self, other: Self) -> Self {
        self ^ other
    }
}

/// `bool`: any byte but zero is true, and true is written as 1. Its operations are the bit operations.
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
                // If the operands are equal or unordered, `x` and `y` are one operand each. Joining their bits yields
                // -0 from two different zeros, and NaN if one operand is NaN.
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

/// Two bfloat16 at a time. As parts of one 32-bit word they are widened and narrowed in place, by shifts and masks. A
/// vectorised loop needs no shuffles for them.
pub(crate) struct Bf16x2;

impl Lanes for Bf16x2 {
    const COUNT: usize = 2;
    const SIZE_BYTES: usize = 2;
    type Acc = f32;
    type Reg = Regs<f32, 2>;
    type Tail = Bf16;

    #[inline(always)]
    unsafe fn load(src: *const u8) -> Regs<f32, 2> {
        // SAFETY: two elements can be read at `src`, by the contract of `Lanes::load`.
        let word = unsafe { src.cast::<u32>().read_unaligned() };
        Regs([f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000)])
    }

    #[inline(always)]
    unsafe fn store(dst: *mut u8, value: Regs<f32, 2>) {
        let low = u32::from(float16::narrow_bf16(value.0[0]));
        let high = float16::round_bf16(value.0[1]) & 0xffff_0000;
        // SAFETY: two elements can be written at `dst`, by the contract of `Lanes::store`.
        unsafe { dst.cast::<u32>().write_unaligned(high | low) };
    }

    // The first elements of all words are in one half of the block, the second elements in the other half.
    #[inline(always)]
    unsafe fn load_acc(slots: *const f32, slot: usize) -> Regs<f32, 2> {
        // SAFETY: `slot < BLOCK` and both accumulators were written, by the contract of `Lanes::load_acc`.
        unsafe { Regs([slots.add(slot / 2).read(), slots.add((BLOCK + slot) / 2).read()]) }
    }

    #[inline(always)]
    unsafe fn store_acc(slots: *mut f32, slot: usize, value: Regs<f32, 2>) {
        // SAFETY: `slot < BLOCK`, by the contract of `Lanes::store_acc`, so both indices are below `BLOCK`.
        unsafe {
            slots.add(slot / 2).write(value.0[0]);
            slots.add((BLOCK + slot) / 2).write(value.0[1]);
        }
    }
}

/// float16, accumulated in float32, converted with integer instructions.
pub(crate) struct F16;
single!(F16, u16, f32, value => float16::widen_f16(value), result => float16::narrow_f16(result));

/// A complex number with parts of type `T`, for PRODUCT. SUM and AVG treat the parts as separate elements.
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

            impl ArithReg for Complex<$float> {
                #[inline(always)]
                fn add(self, other: Self) -> Self {
                    Complex { re: self.re + other.re, im: self.im + other.im }
                }

                /// Computes (a + bi)(c + di) = (ac - bd) + (ad + bc)i, each product and sum rounded; infinities are not
                /// recovered.
                #[inline(always)]
                fn mul(self, other: Self) -> Self {
                    Complex {
                        re: self.re * other.re - self.im * other.im,
                        im: self.re * other.im + self.im * other.re,
                    }
                }
            }
        )*
    };
}

complex!(f32 f64);
