//! Packets between an engine in software and the engines of other ranks, over the links that the ranks already have.
//!
//! Owns the packets that have arrived for the device's thread, the packets that are collected before they are sent, and
//! the credits that bound both. Lock order: the engine's lock comes first, so this module never sends while it
//! holds its own lock. Read [`Port`] first.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use accl_cclo::packets::Packets;
use accl_cclo::wire::MAX_PACKET_BYTES;
use accl_engine::PacketSink;
use accl_engine::offload::{PacketFrame, PacketLinks};
use accl_engine::sync::{Mutex, Thread, current_thread, park_timeout};
use accl_types::{Error, Rank, Result};

/// Maximum bytes sent to a rank that it has not taken yet; beyond that an engine should send it no more.
pub(super) const WINDOW: u64 = 1 << 20;
/// Bytes taken from a sender before it is notified.
const REPORT_AFTER: u64 = WINDOW / 4;
/// Each packet is preceded by its length.
const LENGTH_BYTES: usize = size_of::<u32>();
/// Maximum bytes of a packet with its headers and padding; no engine sends so much.
const MOST_PACKET_BYTES: usize = 2 * MAX_PACKET_BYTES;

/// Sends and receives the packets of the device of this rank.
pub(super) struct Port {
    rank: u32,
    /// Maximum bytes of packets in one frame.
    frame_bytes: usize,
    /// Maximum bytes that a rank may have sent and this rank has not taken yet.
    most_kept: u64,
    inner: Mutex<Inner>,
    /// The thread that runs the engine.
    thread: OnceLock<Thread>,
    /// Set when the group is created.
    links: Mutex<Option<Arc<dyn PacketLinks>>>,
}

struct Inner {
    /// Ranks with packets that have arrived.
    ready: VecDeque<u32>,
    /// Ranks to which something may have to be sent, each once.
    owed: Vec<u32>,
    peers: Vec<Flow>,
}

/// Traffic between this rank and another, in bytes including the lengths.
#[derive(Default)]
struct Flow {
    /// Packets that are collected and not sent yet.
    batch: Vec<u8>,
    /// Packets that have arrived.
    arrived: VecDeque<Vec<u8>>,
    /// The received part of an incomplete packet, with its length.
    begun: Vec<u8>,
    come: u64,
    sent: u64,
    /// Bytes of `sent` that the other rank's engine has taken.
    taken_there: u64,
    taken_here: u64,
    reported: u64,
    /// Whether the rank is listed in [`Inner::owed`].
    is_owed: bool,
}

impl Port {
    /// Creates a port. An engine checks for room before each message; the longest message has `message_bytes` bytes.
    pub(super) fn new(rank: u32, world: u32, frame_bytes: usize, message_bytes: u64) -> Arc<Self> {
        let peers = (0..world).map(|_| Flow::default()).collect();
        let inner = Mutex::new(Inner { ready: VecDeque::new(), owed: Vec::new(), peers });
        // Twice the limit: packets also have headers, lengths and padding, and engines send messages of their own.
        let most_kept = 2 * (WINDOW + message_bytes);
        Arc::new(Self { rank, frame_bytes, most_kept, inner, thread: OnceLock::new(), links: Mutex::default() })
    }

    /// Registers the calling thread as the one that runs the engine and is woken for it.
    pub(super) fn belongs_to_this_thread(&self) {
        let _ = self.thread.set(current_thread());
    }

    /// Sets the links on which packets are sent, once the group is created.
    pub(super) fn connect(&self, links: Arc<dyn PacketLinks>) {
        *self.links.lock() = Some(links);
    }

    /// Sends frames over the links of the group, if it was created.
    fn send_frames(&self, frames: &[PacketFrame]) {
        let links = self.links.lock().clone();
        if let Some(links) = links {
            links.send(frames);
        }
    }
}

impl Inner {
    /// Accepts a rank's packets, and its report of how many bytes it has taken in total.
    ///
    /// # Errors
    /// `Protocol` for data that no engine sends; invalid packets are not kept.
    fn arrive(&mut self, from: u32, taken: u64, packets: &[u8], most_kept: u64) -> Result<()> {
        let Some(flow) = self.peers.get_mut(from as usize) else {
            return Err(Error::protocol(format!(
                "received packets for a device from rank {from}, which is not in this group"
            )));
        };
        if !(flow.taken_there..=flow.sent).contains(&taken) {
            return Err(Error::protocol(format!(
                "rank {from} reported that its device took {taken} bytes of packets; expected {} to {} bytes",
                flow.taken_there, flow.sent
            )));
        }
        let kept = flow.come - flow.taken_here + packets.len() as u64;
        if kept > most_kept {
            return Err(Error::protocol(format!(
                "rank {from} sent {kept} bytes of packets that the device of this rank has not taken; at most \
                 {most_kept} may be in flight"
            )));
        }
        flow.taken_there = taken;
        flow.come += packets.len() as u64;
        let had_none = flow.arrived.is_empty();
        let result = flow.put_together(packets);
        if had_none && !flow.arrived.is_empty() {
            self.ready.push_back(from);
        }
        result.map_err(|length| {
            Error::protocol(format!(
                "rank {from} sent a packet of {length} bytes for a device; expected at most {MOST_PACKET_BYTES}"
            ))
        })
    }
}

impl Flow {
    fn owes(&mut self, to: u32, owed: &mut Vec<u32>) {
        if !std::mem::replace(&mut self.is_owed, true) {
            owed.push(to);
        }
    }

    /// Returns the frame to send now: collected packets, at most `most_bytes`, and the number of bytes taken from the
    /// other rank.
    fn frame(&mut self, to: u32, most_bytes: usize) -> PacketFrame {
        self.reported = self.taken_here;
        let rest = self.batch.split_off(self.batch.len().min(most_bytes));
        PacketFrame { to: Rank(to), taken: self.taken_here, packets: std::mem::replace(&mut self.batch, rest) }
    }

    /// Keeps the packets that have arrived completely; a frame may begin and end within a packet. The error is the
    /// length of a packet that is too long.
    fn put_together(&mut self, mut rest: &[u8]) -> std::result::Result<(), u32> {
        loop {
            let mut end = LENGTH_BYTES;
            if let Some(length) = self.begun.first_chunk() {
                let length = u32::from_le_bytes(*length);
                let bytes = usize::try_from(length).ok().filter(|bytes| *bytes <= MOST_PACKET_BYTES).ok_or(length)?;
                end += bytes;
                if self.begun.len() == end {
                    self.arrived.push_back(self.begun.split_off(LENGTH_BYTES));
                    self.begun.clear();
                    continue;
                }
            }
            if rest.is_empty() {
                return Ok(());
            }
            let (head, behind) = rest.split_at(rest.len().min(end - self.begun.len()));
            self.begun.extend(head);
            rest = behind;
        }
    }
}

impl Packets for Port {
    fn send(&self, to: u32, packet: &[u8]) {
        let mut inner = self.inner.lock();
        let Inner { ready, owed, peers } = &mut *inner;
        if to == self.rank {
            let Some(flow) = peers.get_mut(to as usize) else { return };
            if flow.arrived.is_empty() {
                ready.push_back(to);
            }
            flow.arrived.push_back(packet.to_vec());
            return;
        }
        let Some(flow) = peers.get_mut(to as usize) else { return };
        flow.owes(to, owed);
        flow.batch.extend((packet.len() as u32).to_le_bytes());
        flow.batch.extend(packet);
        flow.sent += (LENGTH_BYTES + packet.len()) as u64;
        let mut full = Vec::new();
        while flow.batch.len() >= self.frame_bytes {
            full.push(flow.frame(to, self.frame_bytes));
        }
        drop(inner);
        if !full.is_empty() {
            self.send_frames(&full);
        }
    }

    fn has_room(&self, to: u32) -> bool {
        let inner = self.inner.lock();
        inner.peers.get(to as usize).is_none_or(|flow| flow.sent - flow.taken_there < WINDOW)
    }

    fn flush(&self) {
        let mut frames = Vec::new();
        let mut inner = self.inner.lock();
        let Inner { owed, peers, .. } = &mut *inner;
        for to in owed.drain(..) {
            let flow = &mut peers[to as usize];
            flow.is_owed = false;
            if !flow.batch.is_empty() || flow.taken_here - flow.reported >= REPORT_AFTER {
                frames.push(flow.frame(to, self.frame_bytes));
            }
        }
        drop(inner);
        if !frames.is_empty() {
            self.send_frames(&frames);
        }
    }

    fn receive(&self, is_wanted: &dyn Fn(u32) -> bool) -> Option<(u32, Vec<u8>)> {
        let mut inner = self.inner.lock();
        let Inner { ready, owed, peers } = &mut *inner;
        let at = ready.iter().position(|&from| is_wanted(from))?;
        let from = ready[at];
        let flow = peers.get_mut(from as usize)?;
        let packet = flow.arrived.pop_front()?;
        if from != self.rank {
            flow.taken_here += (LENGTH_BYTES + packet.len()) as u64;
            if flow.taken_here - flow.reported >= REPORT_AFTER {
                flow.owes(from, owed);
            }
        }
        // Moves this rank to the end of the queue, so that the others have their turn.
        ready.remove(at);
        if !flow.arrived.is_empty() {
            ready.push_back(from);
        }
        Some((from, packet))
    }

    fn wait(&self, at_most: Duration) {
        // Events that came meanwhile have left a permit for `park`.
        park_timeout(at_most);
    }
}

impl PacketSink for Port {
    fn arrive(&self, from: Rank, taken: u64, packets: &[u8]) -> Result<()> {
        self.inner.lock().arrive(from.0, taken, packets, self.most_kept)?;
        // A report of taken bytes also wakes the thread, which may wait for room.
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
        Ok(())
    }
}

#[cfg(all(test, not(accl_loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MESSAGE: u64 = 1 << 20;

    /// Carries what a port sends to another, without a driver between them.
    fn carry(from: &Port, to: &Port) {
        let mut inner = from.inner.lock();
        let flow = &mut inner.peers[to.rank as usize];
        loop {
            let PacketFrame { taken, packets, .. } = flow.frame(to.rank, 1000);
            to.arrive(Rank(from.rank), taken, &packets).unwrap();
            if packets.is_empty() {
                return;
            }
        }
    }

    #[test]
    fn packets_arrive_whole_and_in_order_and_a_rank_that_takes_none_is_sent_no_more() {
        let [a, b] = [0, 1].map(|rank| Port::new(rank, 2, 1 << 16, MESSAGE));
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
        let [a, b, c] = [0, 1, 2].map(|rank| Port::new(rank, 3, 1 << 16, MESSAGE));
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
        let port = Port::new(3, 4, 1 << 16, MESSAGE);
        port.send(3, b"hello");
        assert_eq!(port.receive(&|_| true), Some((3, b"hello".to_vec())));
    }

    /// Returns the number of bytes that a port keeps for a rank.
    fn kept(port: &Port, from: usize) -> usize {
        let inner = port.inner.lock();
        let flow = &inner.peers[from];
        flow.begun.capacity() + flow.arrived.iter().map(|packet| LENGTH_BYTES + packet.len()).sum::<usize>()
    }

    proptest! {
        #[test]
        fn packets_are_those_that_were_sent_however_they_are_cut_into_frames(
            lengths in prop::collection::vec(prop_oneof![Just(0), 1_usize..9, 4000..MOST_PACKET_BYTES], 1..12),
            cuts in prop::collection::vec(1_usize..9000, 1..12),
        ) {
            let port = Port::new(0, 2, 1 << 16, MESSAGE);
            let packets: Vec<Vec<u8>> = (0..).zip(&lengths).map(|(number, &length)| vec![number; length]).collect();
            let framed = |packet: &Vec<u8>| [&(packet.len() as u32).to_le_bytes()[..], packet].concat();
            let bytes: Vec<u8> = packets.iter().flat_map(framed).collect();
            let (mut rest, mut cuts) = (&bytes[..], cuts.iter().cycle());
            while !rest.is_empty() {
                let (frame, behind) = rest.split_at((*cuts.next().unwrap()).min(rest.len()));
                port.arrive(Rank(1), 0, frame).unwrap();
                rest = behind;
            }
            let got: Vec<_> = std::iter::from_fn(|| port.receive(&|_| true)).map(|(_, packet)| packet).collect();
            prop_assert_eq!(got, packets);
            prop_assert_eq!(port.inner.lock().peers[1].taken_here as usize, bytes.len());
        }

        #[test]
        fn whatever_a_defective_rank_sends_is_refused_or_bounded(
            frames in prop::collection::vec(
                (0_u32..4, prop_oneof![4 => Just(0), 1 => any::<u64>()], prop::collection::vec(prop_oneof![Just(0), any::<u8>()], 0..600)),
                1..60,
            ),
            times in 1_usize..200,
        ) {
            let port = Port::new(0, 3, 1 << 16, 1000);
            for (from, taken, bytes) in frames {
                let frame = bytes.repeat(times);
                let said = port.arrive(Rank(from), taken, &frame);
                prop_assert!(from < 3 || said.is_err());
                for from in 0..3 {
                    prop_assert!(kept(&port, from) <= port.most_kept as usize + 2 * (LENGTH_BYTES + MOST_PACKET_BYTES));
                }
            }
            while port.receive(&|_| true).is_some() {}
        }
    }

    #[test]
    fn a_packet_of_a_length_that_none_has_is_refused_before_there_is_room_for_it() {
        let port = Port::new(0, 2, 1 << 16, MESSAGE);
        let error = port.arrive(Rank(1), 0, &u32::MAX.to_le_bytes()).unwrap_err();
        assert!(error.message.contains("a packet of 4294967295 bytes"), "{error}");
        assert!(kept(&port, 1) < 100);
    }

    #[test]
    fn a_rank_that_takes_back_what_it_has_taken_is_refused() {
        let port = Port::new(0, 2, 1 << 16, MESSAGE);
        port.send(1, &[1; 96]);
        port.arrive(Rank(1), 100, &[]).unwrap();
        for taken in [99, 101] {
            assert!(port.arrive(Rank(1), taken, &[]).is_err());
        }
        assert!(port.has_room(1));
    }

    #[test]
    fn a_rank_that_sends_although_nothing_is_taken_is_stopped() {
        let port = Port::new(0, 2, 1 << 16, MESSAGE);
        let frame = [&4096_u32.to_le_bytes()[..], &[7; 4096]].concat();
        let sent = (0..).take_while(|_| port.arrive(Rank(1), 0, &frame).is_ok()).count();
        assert!((sent as u64 * 4100).abs_diff(2 * (WINDOW + MESSAGE)) < 4100, "{sent}");
    }
}
