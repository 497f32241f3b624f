//! Seeded data and misaligned buffers for the kernel tests.
#![allow(dead_code)] // each test binary uses its part

pub mod codecs;

use accl_types::Dtype;

/// A generator of splitmix64: the same seed gives the same data.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// Creates elements of `dtype`: random bits, small numbers, and every special value of floats.
pub fn elements(dtype: Dtype, count: usize, random: &mut Random) -> Vec<u8> {
    (0..count).flat_map(|_| element(dtype, random)).collect()
}

fn element(dtype: Dtype, random: &mut Random) -> Vec<u8> {
    let specials =
        [0.0, -0.0, 1.0, -1.0, f64::INFINITY, f64::NEG_INFINITY, f64::MAX, 5e-324, 1e-40, -6e-8, 65504.0, 3.3e38];
    let special = specials[random.below(specials.len() as u64) as usize];
    let small = (random.below(2001) as f64 - 1000.0) / 8.0;
    let bits = random.next();
    // A third are raw bits (including NaN with payloads), a third are numbers that can be added, a third are special
    // values.
    let kind = random.below(3);
    let value = if kind == 1 { small } else { special };
    match dtype {
        Dtype::F16 if kind > 0 => half::f16::from_f64(value).to_le_bytes().to_vec(),
        Dtype::BF16 if kind > 0 => half::bf16::from_f64(value).to_le_bytes().to_vec(),
        Dtype::F32 if kind > 0 => (value as f32).to_le_bytes().to_vec(),
        Dtype::F64 if kind > 0 => value.to_le_bytes().to_vec(),
        // A NaN is rare among random bits of wide types, so some are made on purpose.
        Dtype::F16 if bits & 7 == 0 => ((bits >> 8) as u16 | 0x7c00).to_le_bytes().to_vec(),
        Dtype::BF16 if bits & 7 == 0 => ((bits >> 8) as u16 | 0x7f80).to_le_bytes().to_vec(),
        Dtype::F32 if bits & 3 == 0 => ((bits >> 8) as u32 | 0x7f80_0000).to_le_bytes().to_vec(),
        Dtype::F64 if bits & 3 == 0 => (bits.rotate_left(32) | 0x7ff0_0000_0000_0000).to_le_bytes().to_vec(),
        Dtype::C64 => [element(Dtype::F32, random), element(Dtype::F32, random)].concat(),
        Dtype::C128 => [element(Dtype::F64, random), element(Dtype::F64, random)].concat(),
        Dtype::Bool => vec![if bits & 1 == 0 { 0 } else { (bits >> 8) as u8 }],
        _ => bits.to_le_bytes()[..dtype.size_bytes()].to_vec(),
    }
}

/// Calls `call` in the mode of a thread that called `torch.set_flush_denormal(True)`. `call` must leave the mode
/// unchanged.
#[cfg(all(target_arch = "x86_64", not(miri)))]
pub fn with_flushed_denormals<T>(call: impl FnOnce() -> T) -> T {
    use std::arch::asm;
    let (mut before, mut after) = (0u32, 0u32);
    let flush = 0x9fc0u32;
    // SAFETY: stores the mode, and sets one with valid bits; it is restored below.
    unsafe { asm!("stmxcsr [{}]", "ldmxcsr [{}]", in(reg) &mut before, in(reg) &flush) };
    let result = call();
    // SAFETY: stores the mode, and restores the one that was stored before.
    unsafe { asm!("stmxcsr [{}]", "ldmxcsr [{}]", in(reg) &mut after, in(reg) &before) };
    assert_eq!(after & 0xffc0, flush, "the thread's mode was not restored");
    result
}

/// Calls `call`: this target has no such mode.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
pub fn with_flushed_denormals<T>(call: impl FnOnce() -> T) -> T {
    call()
}

/// Bytes at a chosen distance from a 64-byte boundary, with guard bytes on both sides. All access goes through one
/// pointer, so that the pointers returned to tests stay valid.
pub struct Buffer {
    memory: *mut [u8],
    start: usize,
    len_bytes: usize,
}

const GUARD: usize = 64;
const FILL: u8 = 0xa5;

impl Buffer {
    pub fn new(content: &[u8], misalignment: usize) -> Buffer {
        let mut memory = vec![FILL; content.len() + 3 * GUARD + misalignment].into_boxed_slice();
        let start = GUARD + memory.as_ptr().align_offset(64) % 64 + misalignment;
        memory[start..start + content.len()].copy_from_slice(content);
        Buffer { memory: Box::into_raw(memory), start, len_bytes: content.len() }
    }

    pub fn ptr(&self) -> *mut u8 {
        self.memory.cast::<u8>().wrapping_add(self.start)
    }

    pub fn bytes(&self) -> &[u8] {
        &self.all()[self.start..self.start + self.len_bytes]
    }

    /// Panics if a byte outside of the content was written.
    pub fn check_guards(&self) {
        if cfg!(miri) {
            return; // slow there, and Miri detects such writes itself
        }
        let (before, rest) = self.all().split_at(self.start);
        let after = &rest[self.len_bytes..];
        assert!(before.iter().chain(after).all(|&byte| byte == FILL), "a byte outside of the buffer was written");
    }

    fn all(&self) -> &[u8] {
        // SAFETY: the pointer is from `Box::into_raw`; the tests write through `ptr` only between uses of this slice.
        unsafe { &*self.memory }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the pointer is from `Box::into_raw`, and is not used any more.
        drop(unsafe { Box::from_raw(self.memory) });
    }
}
