//! A whole world in one process, with production code: one engine per rank, threads as ranks.
//!
//! Owns a store in a directory, worlds over loopback, shared memory and TCP, links that fail on request, and short
//! forms of the calls. For tests and benches only. Read [`World`] first.

pub mod calls;
pub mod devices;
mod dir_store;
pub mod pages;
pub mod publisher;
mod rigged;
pub mod tile_coder;
mod transports;
mod world;

pub use accl_engine::MemoryStore;
pub use calls::{Element, Member, finish, finish_submitted};
pub use dir_store::DirStore;
pub use rigged::{EXPLODES, LinkFunction, Rig, Rigged};
pub use transports::{Library, THRIFTY, every_transport, library};
pub use world::{Fabric, World, WorldOptions};

/// A small generator of reproducible numbers (xorshift64*). State the seed in failure messages.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Creates a generator; equal seeds give equal numbers.
    pub fn new(seed: u64) -> Self {
        // A zero state would stay zero.
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Returns the next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Returns a number below `bound`, which must not be 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next_u64() % bound
    }
}
