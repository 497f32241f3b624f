//! A whole world in one process, with the code that runs in production: one engine per rank, threads as ranks.
//!
//! Owns the store in a directory, the worlds over loopback, shared memory and tcp, links that fail when a test wants it,
//! and short forms of the calls. For tests and benches only. Read [`World`] first.

pub mod calls;
pub mod devices;
mod dir_store;
mod rigged;
mod transports;
mod world;

pub use accl_engine::MemoryStore;
pub use calls::{Element, Member, finish, finish_ran};
pub use dir_store::DirStore;
pub use rigged::{EXPLODES, Rig, Rigged, Step};
pub use transports::{Library, THRIFTY, every_transport, library};
pub use world::{Fabric, World, WorldOptions};

/// A small generator of reproducible numbers (xorshift64*); the seed belongs into failure messages.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator; equal seeds give equal numbers.
    pub fn new(seed: u64) -> Self {
        // A zero state would stay zero.
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next_u64() % bound
    }
}
