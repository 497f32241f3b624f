//! Packets between an engine in software and those of other ranks, over the links that the ranks have anyway.
//!
//! Owns what has come and waits for the device's thread, what is put together before it leaves, and the credits that bound both. Lock order:
//! the driver's lock comes first, so nothing here calls the driver with its own lock held. Read [`Port`] first.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock, Weak};
use std::thread::Thread;
use std::time::Duration;

use accl_cclo::packets::Packets;
use accl_executor::group::PacketSink;
use accl_types::Rank;

use crate::driver::Driver;
use crate::sync::Mutex;
use crate::time;

/// Bytes to a rank that it has yet to take, before an engine should send it no more.
const WINDOW: u64 = 1 << 20;
/// Bytes that are taken before their sender is told of it.
const TELL_AFTER: u64 = WINDOW / 4;
/// Before each packet stands its length.
const LENGTH_BYTES: usize = size_of::<u32>();

/// The way of packets to and from the device of this rank.
pub(super) struct Port {
    rank: u32,
    /// Most bytes of packets in one frame.
    frame_bytes: usize,
    inner: Mutex<Inner>,
    /// The thread that runs the engine.
    thread: OnceLock<Thread>,
    /// Set when the group is made; another when its making begins anew.
    way: Mutex<Option<Way>>,
}

#[derive(Clone)]
struct Way {
    driver: Weak<Driver>,
    group: u64,
}

struct Inner {
    /// Ranks of which packets have come.
    ready: VecDeque<u32>,
    peers: Vec<Flow>,
}

/// What is between this rank and another; in bytes with the lengths.
#[derive(Default)]
struct Flow {
    /// Put together, and not sent yet.
    batch: Vec<u8>,
    /// Packets that have come.
    arrived: VecDeque<Vec<u8>>,
    /// Of the last packet that has come, what there is of it.
    begun: Vec<u8>,
    sent: u64,
    /// Of those, taken by the other rank's engine.
    taken_there: u64,
    taken_here: u64,
    told: u64,
}

impl Port {
    pub(super) fn new(rank: u32, world: u32, frame_bytes: usize) -> Arc<Self> {
        let peers = (0..world).map(|_| Flow::default()).collect();
        let inner = Mutex::new(Inner { ready: VecDeque::new(), peers });
        Arc::new(Self { rank, frame_bytes, inner, thread: OnceLock::new(), way: Mutex::default() })
    }

    /// The calling thread runs the engine, and is woken for it.
    pub(super) fn belongs_to_this_thread(&self) {
        let _ = self.thread.set(std::thread::current());
    }

    /// The group is made: packets can leave.
    pub(super) fn connect(&self, driver: &Arc<Driver>, group: u64) {
        *self.way.lock() = Some(Way { driver: Arc::downgrade(driver), group });
    }

    /// Hands frames to the driver.
    fn send_frames(&self, frames: Vec<(u32, u64, Vec<u8>)>) {
        let Some(Way { driver, group }) = self.way.lock().clone() else { return };
        let Some(driver) = driver.upgrade() else { return };
        let now = time::now();
        let is_unsent = driver.with_core(|core| {
            core.with_group(group, now, |group, context| {
                for (to, taken, packets) in &frames {
                    group.send_packets(Rank(*to), *taken, packets, context);
                }
            });
            core.net.flush_all();
            core.net.has_unsent()
        });
        if is_unsent {
            driver.kick();
        }
    }
}

impl Inner {
    /// A packet has come.
    fn keep(&mut self, from: u32, packet: &[u8]) {
        let Some(flow) = self.peers.get_mut(from as usize) else { return };
        if flow.arrived.is_empty() {
            self.ready.push_back(from);
        }
        flow.arrived.push_back(packet.to_vec());
    }
}

impl Flow {
    /// A frame that leaves now: what is put together, as far as there is room for it, and how far the other rank's packets are taken.
    fn frame(&mut self, to: u32, most_bytes: usize) -> (u32, u64, Vec<u8>) {
        self.told = self.taken_here;
        let rest = self.batch.split_off(self.batch.len().min(most_bytes));
        (to, self.taken_here, std::mem::replace(&mut self.batch, rest))
    }
}

impl Packets for Port {
    fn send(&self, to: u32, packet: &[u8]) {
        let mut inner = self.inner.lock();
        if to == self.rank {
            inner.keep(to, packet);
            return;
        }
        let Some(flow) = inner.peers.get_mut(to as usize) else { return };
        flow.batch.extend((packet.len() as u32).to_le_bytes());
        flow.batch.extend(packet);
        flow.sent += (LENGTH_BYTES + packet.len()) as u64;
        let mut full = Vec::new();
        while flow.batch.len() >= self.frame_bytes {
            full.push(flow.frame(to, self.frame_bytes));
        }
        drop(inner);
        if !full.is_empty() {
            self.send_frames(full);
        }
    }

    fn has_room(&self, to: u32) -> bool {
        let inner = self.inner.lock();
        inner.peers.get(to as usize).is_none_or(|flow| flow.sent - flow.taken_there < WINDOW)
    }

    fn flush(&self) {
        let mut frames = Vec::new();
        for (to, flow) in (0..).zip(&mut self.inner.lock().peers) {
            if !flow.batch.is_empty() || flow.taken_here - flow.told >= TELL_AFTER {
                frames.push(flow.frame(to, self.frame_bytes));
            }
        }
        if !frames.is_empty() {
            self.send_frames(frames);
        }
    }

    fn receive(&self, is_wanted: &dyn Fn(u32) -> bool) -> Option<(u32, Vec<u8>)> {
        let mut inner = self.inner.lock();
        let Inner { ready, peers } = &mut *inner;
        let at = ready.iter().position(|&from| is_wanted(from))?;
        let from = ready[at];
        let flow = peers.get_mut(from as usize)?;
        let packet = flow.arrived.pop_front()?;
        if from != self.rank {
            flow.taken_here += (LENGTH_BYTES + packet.len()) as u64;
        }
        // The others have their turn.
        ready.remove(at);
        if !flow.arrived.is_empty() {
            ready.push_back(from);
        }
        Some((from, packet))
    }

    fn wait(&self, at_most: Duration) {
        // What has come meanwhile has left a permit.
        std::thread::park_timeout(at_most);
    }
}

impl PacketSink for Port {
    fn arrive(&self, from: Rank, taken: u64, packets: &[u8]) {
        {
            let mut inner = self.inner.lock();
            let Some(flow) = inner.peers.get_mut(from.index()) else { return };
            flow.taken_there = taken.min(flow.sent);
            // A frame may end within a packet.
            flow.begun.extend(packets);
            let bytes = std::mem::take(&mut flow.begun);
            let mut rest = &bytes[..];
            while let Some((length, behind)) = rest.split_first_chunk()
                && let Some((packet, behind)) = behind.split_at_checked(u32::from_le_bytes(*length) as usize)
            {
                inner.keep(from.0, packet);
                rest = behind;
            }
            inner.peers[from.index()].begun = rest.to_vec();
        }
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a port sends to another, without a driver between them.
    fn carry(from: &Port, to: &Port) {
        let mut inner = from.inner.lock();
        let flow = &mut inner.peers[to.rank as usize];
        loop {
            let (_, taken, packets) = flow.frame(to.rank, 1000);
            to.arrive(Rank(from.rank), taken, &packets);
            if packets.is_empty() {
                return;
            }
        }
    }

    #[test]
    fn packets_arrive_whole_and_in_order_and_a_rank_that_takes_none_is_sent_no_more() {
        let [a, b] = [0, 1].map(|rank| Port::new(rank, 2, 1 << 16));
        let packet = |number: usize| vec![number as u8; number % 4097];
        let mut sent = 0;
        while a.has_room(1) {
            a.send(1, &packet(sent));
            sent += 1;
            carry(&a, &b);
        }
        assert!(sent > 256, "{sent}");
        for number in 0..sent {
            assert_eq!(b.receive(&|_| true), Some((0, packet(number))));
        }
        assert_eq!(b.receive(&|_| true), None);
        assert!(!a.has_room(1));
        carry(&b, &a);
        assert!(a.has_room(1));
        assert_eq!(a.receive(&|_| true), None, "a word of what was taken is no packet");
    }

    #[test]
    fn packets_of_a_rank_of_which_none_are_wanted_wait_and_those_of_others_do_not() {
        let [a, b, c] = [0, 1, 2].map(|rank| Port::new(rank, 3, 1 << 16));
        a.send(2, b"a");
        carry(&a, &c);
        b.send(2, b"b");
        carry(&b, &c);
        assert_eq!(c.receive(&|from| from != 0), Some((1, b"b".to_vec())));
        assert_eq!(c.receive(&|from| from != 0), None);
        assert_eq!(c.receive(&|_| true), Some((0, b"a".to_vec())));
    }

    #[test]
    fn a_packet_to_oneself_needs_no_link() {
        let port = Port::new(3, 4, 1 << 16);
        port.send(3, b"hello");
        assert_eq!(port.receive(&|_| true), Some((3, b"hello".to_vec())));
    }
}
