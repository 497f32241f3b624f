//! The engines of one process, which reach each other without a socket.
//!
//! Owns which of them can go on, and what they have for engines elsewhere. Read [`Cluster::settle`] first.

use std::collections::VecDeque;

use accl_cclo::call::{ConfigFunction, Operation};
use accl_cclo::control::{Reply, Request};
use accl_cclo::memory_map::Network;

use crate::engine::Engine;
use crate::program::Faithful;
use crate::time::Speed;

/// A packet for an engine of another process.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) packet: Vec<u8>,
}

/// Engines with successive ranks.
pub(crate) struct Cluster {
    first: u32,
    engines: Vec<Engine>,
    /// Those that may be able to go on.
    awake: VecDeque<usize>,
    is_awake: Vec<bool>,
    outgoing: Vec<Outgoing>,
}

impl Cluster {
    pub(crate) fn new(ranks: std::ops::Range<u32>, network: Network, faithful: Faithful, speed: Speed) -> Self {
        let engines: Vec<Engine> = ranks.clone().map(|_| Engine::new(network, faithful).with_speed(speed)).collect();
        let is_awake = vec![false; engines.len()];
        Self { first: ranks.start, engines, awake: VecDeque::new(), is_awake, outgoing: Vec::new() }
    }

    fn index(&self, rank: u32) -> Option<usize> {
        let index = rank.checked_sub(self.first)? as usize;
        (index < self.engines.len()).then_some(index)
    }

    /// The engine of a rank of this process.
    pub(crate) fn engine(&mut self, rank: u32) -> Option<&mut Engine> {
        let index = self.index(rank)?;
        self.engines.get_mut(index)
    }

    /// An engine has been given something to do.
    pub(crate) fn go_on(&mut self, rank: u32) {
        if let Some(index) = self.index(rank) {
            self.wake(index);
            self.settle();
        }
    }

    fn wake(&mut self, index: usize) {
        if !std::mem::replace(&mut self.is_awake[index], true) {
            self.awake.push_back(index);
        }
    }

    /// Answers the host of a rank of this process.
    pub(crate) fn answer(&mut self, rank: u32, request: &Request) -> Option<Reply> {
        let index = self.index(rank)?;
        let reply = self.engines[index].answer(request);
        if matches!(request, Request::Call { .. }) {
            self.wake(index);
            self.settle();
        }
        Some(reply)
    }

    /// Hands a packet of another process to its engine.
    pub(crate) fn take(&mut self, rank: u32, sender: u32, packet: &[u8]) {
        if let Some(index) = self.index(rank) {
            self.engines[index].take(sender, packet);
            self.wake(index);
        }
    }

    /// Until none of the engines can go on without another process.
    pub(crate) fn settle(&mut self) {
        while let Some(index) = self.awake.pop_front() {
            self.is_awake[index] = false;
            let mut sent = Vec::new();
            self.engines[index].advance(&mut sent);
            let from = self.first + index as u32;
            for (to, packet) in sent {
                match self.index(to) {
                    Some(peer) => {
                        self.engines[peer].take(from, &packet);
                        self.wake(peer);
                    }
                    None => self.outgoing.push(Outgoing { from, to, packet }),
                }
            }
        }
    }

    /// What has been sent to other processes.
    pub(crate) fn take_outgoing(&mut self) -> Vec<Outgoing> {
        std::mem::take(&mut self.outgoing)
    }

    /// What an engine has for kernels, with the number of the stream of each.
    pub(crate) fn take_fed(&mut self, rank: u32) -> Option<(u32, Vec<u8>)> {
        let index = self.index(rank)?;
        self.engines[index].take_fed()
    }

    /// Gives an engine bytes of a kernel.
    pub(crate) fn feed(&mut self, rank: u32, bytes: &[u8]) {
        if let Some(index) = self.index(rank) {
            self.engines[index].feed(bytes);
            self.wake(index);
            self.settle();
        }
    }
}

/// Whether a request lets packets in, which must not be before all peers listen.
pub(crate) fn enables_packets(request: &Request) -> bool {
    let Request::Call { call, .. } = request else { return false };
    call.operation == Operation::Config && call.function == ConfigFunction::EnablePackets.number()
}
