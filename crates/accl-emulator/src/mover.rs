//! The data mover: takes elements from memories, rx buffers and kernel streams, reduces them, and puts them into memories or packets.
//!
//! Owns the progress of a move, which continues with each message that arrives. Read [`Moving::advance`] first.

use std::collections::{BTreeMap, VecDeque};

use accl_cclo::call::ANY_TAG;
use accl_cclo::memory_map::{Network, RankEntry};
use accl_cclo::return_code::ReturnCode;
use accl_cclo::wire::{Cutter, Header, MessageKind, Packet, STREAM_OFFSET, WORD_BYTES};

use crate::arithmetic;
use crate::exchange::{Elements, Exchange};
use crate::fabric::Fabric;
use crate::program::{ElementLocation, Move, Sink, Source};
use crate::receiver::{MOST_FOR_KERNELS, Memories, Receiver};
use crate::time::Counted;

/// Return code for an address outside of memory.
pub(crate) const NO_ADDRESS: ReturnCode = ReturnCode(1 << 2);
/// Return code for an unknown reduction function.
pub(crate) const NO_FUNCTION: ReturnCode = ReturnCode(1 << 19);
/// Return code for more bytes than a message can hold.
const TOO_LARGE: ReturnCode = ReturnCode(1 << 18);
/// Maximum bytes moved in one step if the move waits for no peer.
const STEP_BYTES: usize = 1 << 20;

/// Parts of the engine that a move uses.
pub(crate) struct EngineParts<'a, F> {
    pub(crate) exchange: &'a mut Exchange,
    pub(crate) memories: Memories<'a>,
    pub(crate) kernel_in: &'a mut VecDeque<u8>,
    pub(crate) kernel_out: &'a mut VecDeque<(u32, Vec<u8>)>,
    pub(crate) fabric: &'a mut F,
    pub(crate) network: Network,
    pub(crate) communicator: u32,
    pub(crate) rank: u32,
    pub(crate) elements: Elements,
    /// Whether all data is compressed on the wire.
    pub(crate) compresses_wire: bool,
    /// Whether a receiver with the tag `any` accepts every tag.
    pub(crate) any_takes_all: bool,
    /// Identifier of the communicator in headers; `None` if headers name none, as in the original.
    pub(crate) communicator_id: Option<u32>,
    /// Number of the next packet to each session.
    pub(crate) next_packet: &'a mut BTreeMap<u32, u32>,
    /// Received messages and notices that no call has taken yet.
    pub(crate) receiver: &'a mut Receiver,
    pub(crate) counted: &'a mut Counted,
}

/// A move in progress.
#[derive(Debug)]
pub(crate) struct Moving {
    what: Move,
    done: u32,
}

/// Data being written to an address of a peer, which is notified at the end.
#[derive(Debug)]
pub(crate) struct Writing {
    to: u32,
    header: Header,
    cutter: Cutter,
    from: ElementLocation,
    elements: u32,
}

/// Result of advancing a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Done,
    /// The step waits for a peer. If `has_moved`, it has moved data, which may have made room.
    Waits {
        has_moved: bool,
    },
}

/// Some of the elements, in compressed or uncompressed form.
struct Part {
    bytes: Vec<u8>,
    is_compressed: bool,
}

impl Moving {
    pub(crate) fn new(what: Move) -> Self {
        Self { what, done: 0 }
    }

    /// Advances as far as possible.
    ///
    /// # Errors
    /// The return code of the failure.
    pub(crate) fn advance<F: Fabric>(&mut self, parts: &mut EngineParts<'_, F>) -> Result<Progress, ReturnCode> {
        let begun = self.done;
        while self.done < self.what.count {
            let count = self.next_count(parts).filter(|_| self.has_room(parts));
            let Some(count) = count else {
                return Ok(Progress::Waits { has_moved: self.done > begun });
            };
            let mut first = self.take(&self.what.first, count, parts)?;
            if let Some((second, function)) = &self.what.second {
                let second = self.take(second, count, parts)?;
                let function = parts.elements.functions.get(*function as usize).copied().flatten();
                let function = function.ok_or(NO_FUNCTION)?;
                // Converts both operands to the form in which the arithmetic plugin works.
                let adds_compressed = parts.elements.adds_compressed;
                let second = in_form(second, adds_compressed, &parts.elements);
                first = in_form(first, adds_compressed, &parts.elements);
                if !arithmetic::reduce(function, &mut first.bytes, &second.bytes) {
                    return Err(NO_FUNCTION);
                }
            }
            for to in self.what.to.clone() {
                self.put(to, &first, parts)?;
            }
            self.done += count;
        }
        let takes_message = |source: &Source| matches!(source, Source::Rank { .. });
        let second = self.what.second.as_ref().map(|(second, _)| second);
        parts.counted.hops += u64::from(takes_message(&self.what.first) || second.is_some_and(takes_message));
        parts.counts_move(self.what.count);
        Ok(Progress::Done)
    }

    /// Returns whether all destinations accept more.
    fn has_room<F: Fabric>(&self, parts: &EngineParts<'_, F>) -> bool {
        self.what.to.iter().all(|sink| match sink {
            Sink::Rank { rank, .. } | Sink::RemoteKernel { rank, .. } => {
                let peer = parts.exchange.rank(parts.communicator, *rank);
                peer.is_none_or(|peer| parts.fabric.has_room(peer.session))
            }
            Sink::Kernel(_) => parts.kernel_out.len() < MOST_FOR_KERNELS,
            Sink::Memory(_) => true,
        })
    }

    /// Returns the number of elements that can be moved now, or `None` if the move has to wait.
    fn next_count<F>(&self, parts: &EngineParts<'_, F>) -> Option<u32> {
        let left = self.what.count - self.done;
        let sources = [Some(self.what.first), self.what.second.map(|(second, _)| second)];
        let mut count = (STEP_BYTES / parts.elements.uncompressed.max(1)).max(1) as u32;
        // Data for a peer is sent in messages of the peer's segment size.
        let most = self.what.to.iter().filter_map(|sink| match sink {
            Sink::Rank { rank, .. } | Sink::RemoteKernel { rank, .. } => Some(parts.message_elements(*rank)),
            Sink::Memory(_) | Sink::Kernel(_) => None,
        });
        count = most.fold(count, u32::min);
        for source in sources.into_iter().flatten() {
            match source {
                Source::Memory(_) => {}
                Source::Rank { rank, tag } => {
                    let (_, buffer) = parts.find(rank, tag)?;
                    count = count.min((buffer.bytes as usize / parts.wire_bytes()).max(1) as u32);
                }
                Source::Kernel => {
                    let bytes = parts.elements.uncompressed.max(1);
                    let there = (parts.kernel_in.len() / bytes) as u32;
                    if there < left.min(count) {
                        return None;
                    }
                }
            }
        }
        Some(count.min(left))
    }

    fn take<F>(&self, source: &Source, count: u32, parts: &mut EngineParts<'_, F>) -> Result<Part, ReturnCode> {
        match *source {
            Source::Memory(location) => {
                let bytes = parts.bytes_of(location.is_compressed);
                let at = location.address.checked_add((self.done as usize * bytes) as u64).ok_or(NO_ADDRESS)?;
                let memory = parts.memories.of(location.is_host);
                let bytes = memory.read(at, count as usize * bytes).ok_or(NO_ADDRESS)?.to_vec();
                Ok(Part { bytes, is_compressed: location.is_compressed })
            }
            Source::Rank { rank, tag } => {
                let Some((index, buffer)) = parts.find(rank, tag) else { return Err(ReturnCode::WRONG_SEQUENCE) };
                let bytes = count as usize * parts.wire_bytes();
                if bytes != buffer.bytes as usize {
                    return Err(ReturnCode(1 << 25));
                }
                let bytes = parts.memories.device.read(buffer.address(), bytes).ok_or(NO_ADDRESS)?.to_vec();
                parts.receiver.release(parts.exchange, index, &buffer);
                parts.exchange.count_inbound(parts.communicator, rank);
                parts.counted.received_bytes += (WORD_BYTES + bytes.len()) as u64;
                Ok(Part { bytes, is_compressed: parts.compresses_wire })
            }
            Source::Kernel => {
                let bytes = count as usize * parts.elements.uncompressed;
                Ok(Part { bytes: parts.kernel_in.drain(..bytes).collect(), is_compressed: false })
            }
        }
    }

    fn put<F: Fabric>(&self, to: Sink, part: &Part, parts: &mut EngineParts<'_, F>) -> Result<(), ReturnCode> {
        match to {
            Sink::Memory(location) => {
                let done = (self.done as usize * parts.bytes_of(location.is_compressed)) as u64;
                let at = location.address.checked_add(done).ok_or(NO_ADDRESS)?;
                let part = as_form(part, location.is_compressed, &parts.elements);
                let there = parts.memories.of(location.is_host).read_mut(at, part.len()).ok_or(NO_ADDRESS)?;
                there.copy_from_slice(&part);
            }
            Sink::Kernel(stream) => {
                let part = as_form(part, false, &parts.elements);
                parts.kernel_out.push_back((stream, part.into_owned()));
            }
            Sink::Rank { rank, tag, address } => {
                let part = as_form(part, parts.compresses_wire, &parts.elements);
                let Some(peer) = parts.exchange.rank(parts.communicator, rank) else { return Err(NO_ADDRESS) };
                let header = Header { tag, address, sequence: peer.outbound, ..parts.header(&peer, part.len()) };
                parts.send(&peer, &header, &part);
                parts.exchange.count_outbound(parts.communicator, rank);
            }
            Sink::RemoteKernel { rank, stream } => {
                let part = as_form(part, parts.compresses_wire, &parts.elements);
                let Some(peer) = parts.exchange.rank(parts.communicator, rank) else { return Err(NO_ADDRESS) };
                let number = stream.checked_add(STREAM_OFFSET).ok_or(NO_ADDRESS)?;
                let header = Header { tag: stream, stream: number, ..parts.header(&peer, part.len()) };
                parts.send(&peer, &header, &part);
            }
        }
        Ok(())
    }
}

impl<F> EngineParts<'_, F> {
    /// Returns the size of an element in a memory, in bytes.
    fn bytes_of(&self, is_compressed: bool) -> usize {
        if is_compressed { self.elements.compressed } else { self.elements.uncompressed }
    }

    /// Counts a completed command of the data mover.
    fn counts_move(&mut self, elements: u32) {
        self.counted.moves += 1;
        self.counted.bytes += u64::from(elements) * self.elements.uncompressed as u64;
    }

    /// Returns the size of an element on the wire, in bytes.
    fn wire_bytes(&self) -> usize {
        self.bytes_of(self.compresses_wire).max(1)
    }

    /// Returns the number of elements in a message to a rank.
    fn message_elements(&self, rank: u32) -> u32 {
        let segment = self.exchange.rank(self.communicator, rank).map_or(0, |peer| peer.segment_bytes as usize);
        (segment / self.wire_bytes()).max(1) as u32
    }

    /// Returns the rx buffer with the next message of a rank, if it has arrived.
    fn find(&self, rank: u32, tag: u32) -> Option<(usize, accl_cclo::memory_map::RxBuffer)> {
        let sequence = self.exchange.rank(self.communicator, rank)?.inbound;
        // A message sent with the tag `any` matches every receive.
        let takes = |theirs: u32| theirs == tag || theirs == ANY_TAG || (tag == ANY_TAG && self.any_takes_all);
        self.receiver.find(self.exchange, rank, sequence, self.communicator_id, takes)
    }

    /// Returns the header of a message to a rank, with default values.
    pub(crate) fn header(&self, peer: &RankEntry, bytes: usize) -> Header {
        Header {
            count: bytes as u32,
            tag: ANY_TAG,
            source: self.rank,
            sequence: 0,
            stream: 0,
            destination: peer.session as u16,
            kind: MessageKind::Eager,
            is_host: false,
            address: 0,
            communicator: self.communicator_id.unwrap_or_default(),
            packet_number: 0,
        }
    }
}

impl<F: Fabric> EngineParts<'_, F> {
    /// Returns the header of the next message to a session, with the number of its first packet.
    fn numbered(&self, session: u32, header: &Header) -> Header {
        let next = self.next_packet.get(&session).copied().unwrap_or(1);
        Header { packet_number: if self.communicator_id.is_some() { next } else { 0 }, ..*header }
    }

    pub(crate) fn send(&mut self, peer: &RankEntry, header: &Header, payload: &[u8]) {
        let header = self.numbered(peer.session, header);
        let mut cutter = Cutter::new(self.network, &header, peer.session as u16);
        while let Some(packet) = cutter.cut(payload) {
            count_packet(self.next_packet, self.counted, peer.session, &packet);
            self.fabric.send(peer.session, packet.parts());
        }
    }
}

impl Writing {
    /// Creates a write of `elements` elements to an address that rank `to` has announced.
    pub(crate) fn new<F: Fabric>(
        parts: &EngineParts<'_, F>,
        to: u32,
        (address, is_host): (u64, bool),
        tag: u32,
        from: ElementLocation,
        elements: u32,
    ) -> Result<Self, ReturnCode> {
        let peer = parts.exchange.rank(parts.communicator, to).ok_or(NO_ADDRESS)?;
        let bytes = elements as usize * parts.elements.uncompressed;
        let header = Header {
            tag,
            sequence: peer.outbound,
            kind: MessageKind::Rendezvous,
            is_host,
            address,
            ..parts.header(&peer, u32::try_from(bytes).map_err(|_| TOO_LARGE)? as usize)
        };
        let header = parts.numbered(peer.session, &header);
        Ok(Self { to, header, cutter: Cutter::new(parts.network, &header, peer.session as u16), from, elements })
    }

    /// Advances as far as possible.
    ///
    /// # Errors
    /// Same as [`Moving::advance`].
    pub(crate) fn advance<F: Fabric>(&mut self, parts: &mut EngineParts<'_, F>) -> Result<Progress, ReturnCode> {
        let peer = parts.exchange.rank(parts.communicator, self.to).ok_or(NO_ADDRESS)?;
        let bytes = self.header.count as usize;
        let mut has_moved = false;
        loop {
            if !parts.fabric.has_room(peer.session) {
                return Ok(Progress::Waits { has_moved });
            }
            let payload = parts.memories.of(self.from.is_host).read(self.from.address, bytes).ok_or(NO_ADDRESS)?;
            let Some(packet) = self.cutter.cut(payload) else { break };
            count_packet(parts.next_packet, parts.counted, peer.session, &packet);
            parts.fabric.send(peer.session, packet.parts());
            has_moved = true;
        }
        parts.counts_move(self.elements);
        parts.send(&peer, &Header { kind: MessageKind::Done, ..self.header }, &[]);
        Ok(Progress::Done)
    }
}

fn count_packet(next: &mut BTreeMap<u32, u32>, counted: &mut Counted, session: u32, packet: &Packet<'_>) {
    let next = next.entry(session).or_insert(1);
    *next = Header::packet_number_after(*next);
    counted.sent_bytes += packet.len_bytes() as u64;
}

/// Returns the elements in the form in which a memory or the wire holds them.
fn as_form<'a>(part: &'a Part, is_compressed: bool, elements: &Elements) -> std::borrow::Cow<'a, [u8]> {
    let is_same = part.is_compressed == is_compressed || elements.compressed == elements.uncompressed;
    match (is_same, is_compressed) {
        (true, _) => (&part.bytes).into(),
        (false, true) => arithmetic::compress(&part.bytes).into(),
        (false, false) => arithmetic::decompress(&part.bytes).into(),
    }
}

fn in_form(part: Part, is_compressed: bool, elements: &Elements) -> Part {
    match as_form(&part, is_compressed, elements) {
        std::borrow::Cow::Borrowed(_) => Part { is_compressed, ..part },
        std::borrow::Cow::Owned(bytes) => Part { bytes, is_compressed },
    }
}
