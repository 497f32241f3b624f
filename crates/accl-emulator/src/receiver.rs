//! Handling of received packets. Eager messages go to rx buffers, address and completion notices are stored, and data for an address is written
//! there.
//!
//! Owns the packet streams of all senders, and the notices that no call has taken. Rx buffers lie in exchange memory, where the host sees them as
//! well. Their entries have no room for the communicator of a message, which is therefore kept here. Read [`Receiver::take`] first.

use std::collections::{BTreeMap, VecDeque};

use accl_cclo::memory_map::{Network, RX_BUFFER_BYTES, RX_BUFFER_COUNT, RxBuffer, RxStatus};
use accl_cclo::wire::{Header, Joined, Joiner, MessageKind, STREAM_OFFSET};

use crate::exchange::Exchange;
use crate::memory::Memory;

/// Number of queued messages for kernels above which nothing more is moved to kernels.
pub(crate) const MOST_FOR_KERNELS: usize = 1024;
/// Number of waiting packets of a sender above which no more should be taken from the sender.
const MOST_HELD: usize = 256;
/// Bytes of a sender's waiting packets above which the sender is treated as ignoring flow control.
const MOST_HELD_BYTES: usize = 64 << 20;
/// Maximum number of stored notices. A call uses a few for each rank.
const MOST_NOTICES: usize = 1 << 14;

/// Message of a peer other than data: an address, or the report that all data was sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Notice {
    pub(crate) kind: MessageKind,
    pub(crate) from: u32,
    pub(crate) tag: u32,
    pub(crate) address: u64,
    pub(crate) is_host: bool,
    /// Bytes that were sent, or elements that are wanted.
    pub(crate) count: u32,
    /// Identifier of the communicator; zero if the sender names none.
    communicator: u32,
}

/// Packets of one sender.
struct Stream {
    joiner: Joiner,
    /// Destination of the payload of the message that is arriving.
    target: Target,
    /// Packets that wait for a free place.
    held: VecDeque<Vec<u8>>,
    held_bytes: usize,
    /// Number of the next packet, if the sender numbers its packets.
    next_packet: Option<u32>,
    /// Why no further packets of the sender can be parsed; `None` if they can.
    broken: Option<&'static str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Rx(usize),
    /// Kernel stream with this number.
    Kernel(u32),
    Nowhere,
}

/// Received messages and notices that no call has taken yet.
pub(crate) struct Receiver {
    network: Network,
    streams: BTreeMap<u32, Stream>,
    notices: VecDeque<Notice>,
    /// Bytes for kernel streams, with the number of each stream.
    pub(crate) kernel: VecDeque<(u32, Vec<u8>)>,
    /// Communicator of the message in each rx buffer, if known.
    communicators: BTreeMap<usize, u32>,
}

/// Memories that packets are written to.
pub(crate) struct Memories<'a> {
    pub(crate) device: &'a mut Memory,
    pub(crate) host: &'a mut Memory,
}

impl Memories<'_> {
    pub(crate) fn of(&mut self, is_host: bool) -> &mut Memory {
        if is_host { self.host } else { self.device }
    }
}

/// Returns whether a message may belong to the wanted communicator. If either end names no communicator, the message may.
fn is_of(message: u32, wanted: Option<u32>) -> bool {
    message == 0 || wanted.is_none_or(|wanted| wanted == message)
}

impl Receiver {
    pub(crate) fn new(network: Network) -> Self {
        Self {
            network,
            streams: BTreeMap::new(),
            notices: VecDeque::new(),
            kernel: VecDeque::new(),
            communicators: BTreeMap::new(),
        }
    }

    /// Takes a packet of a sender. If there is no free place for the packet, it waits, and all later packets of the sender wait behind it.
    pub(crate) fn take(&mut self, sender: u32, packet: &[u8], exchange: &mut Exchange, memories: &mut Memories<'_>) {
        let stream = self.streams.entry(sender).or_insert_with(|| Stream::new(self.network));
        if stream.broken.is_some() {
            return;
        }
        if stream.held_bytes + packet.len() > MOST_HELD_BYTES {
            stream.fail("it sent more packets than this engine can hold");
            return;
        }
        stream.held_bytes += packet.len();
        stream.held.push_back(packet.to_vec());
        self.take_held(sender, exchange, memories);
    }

    /// Returns the number of packets of a sender that wait for a place.
    pub(crate) fn held(&self, sender: u32) -> usize {
        self.streams.get(&sender).map_or(0, |stream| stream.held.len())
    }

    /// Returns whether more packets should be taken from a sender now.
    pub(crate) fn has_room(&self, sender: u32) -> bool {
        self.held(sender) < MOST_HELD
    }

    /// Returns the senders whose packets can no longer be parsed, with the reason.
    pub(crate) fn broken(&self) -> impl Iterator<Item = (u32, &'static str)> {
        self.streams.iter().filter_map(|(&sender, stream)| Some((sender, stream.broken?)))
    }

    /// Forgets the incomplete message and the waiting packets of a sender, which starts a new stream if it returns. Complete messages stay.
    pub(crate) fn forget(&mut self, sender: u32, exchange: &mut Exchange) {
        let Some(stream) = self.streams.remove(&sender) else { return };
        if let (Target::Rx(index), true) = (stream.target, stream.joiner.is_under_way())
            && let Some(buffer) = exchange.rx_buffer(index)
        {
            self.release(exchange, index, &buffer);
        }
    }

    /// Retries the packets that wait for a place. Returns whether any was taken.
    pub(crate) fn take_all_held(&mut self, exchange: &mut Exchange, memories: &mut Memories<'_>) -> bool {
        let waiting: Vec<u32> =
            self.streams.iter().filter(|(_, stream)| !stream.held.is_empty()).map(|(&sender, _)| sender).collect();
        let mut moved = false;
        for sender in waiting {
            moved |= self.take_held(sender, exchange, memories);
        }
        moved
    }

    fn take_held(&mut self, sender: u32, exchange: &mut Exchange, memories: &mut Memories<'_>) -> bool {
        let Self { streams, notices, kernel, communicators, .. } = self;
        let Some(stream) = streams.get_mut(&sender) else { return false };
        let mut moved = false;
        while let Some(packet) = stream.held.front() {
            // A message may begin only if there is a place for it.
            let before = stream.joiner.clone();
            let joined = match stream.joiner.join(packet) {
                Ok(joined) => joined,
                Err(bad) => {
                    stream.fail(bad.why);
                    return moved;
                }
            };
            let mut number = stream.next_packet;
            match joined {
                Joined::Write { address, is_host, data } => match memories.of(is_host).read_mut(address, data.len()) {
                    Some(place) => place.copy_from_slice(data),
                    None => {
                        stream.fail("it wrote to an address that this engine does not have");
                        return moved;
                    }
                },
                Joined::Message { header, begins_at, data, is_last } => {
                    if begins_at == 0 {
                        let said = Some(header.packet_number).filter(|&said| said != 0);
                        if let (Some(expected), Some(said)) = (number, said)
                            && expected != said
                        {
                            stream.fail("packets from it were lost");
                            return moved;
                        }
                        let place = if notices.len() < MOST_NOTICES { begin(&header, exchange) } else { None };
                        let Some(target) = place else {
                            stream.joiner = before;
                            return moved;
                        };
                        stream.target = target;
                        number = said;
                        if let Target::Rx(index) = stream.target {
                            communicators.insert(index, header.communicator);
                        }
                    }
                    match stream.target {
                        Target::Kernel(_) if kernel.len() >= MOST_FOR_KERNELS => {
                            stream.joiner = before;
                            return moved;
                        }
                        Target::Rx(index) => {
                            if !fill(index, begins_at, data, is_last, exchange, memories) {
                                stream.fail("an rx buffer lies outside the memory of the device");
                                return moved;
                            }
                        }
                        Target::Kernel(number) => kernel.push_back((number, data.to_vec())),
                        Target::Nowhere => notices.push_back(Notice {
                            kind: header.kind,
                            from: header.source,
                            tag: header.tag,
                            address: header.address,
                            is_host: header.is_host,
                            count: header.count,
                            communicator: header.communicator,
                        }),
                    }
                }
            }
            stream.next_packet = number.map(Header::packet_number_after);
            let taken = stream.held.pop_front();
            stream.held_bytes -= taken.map_or(0, |packet| packet.len());
            moved = true;
        }
        moved
    }

    /// Returns the rx buffer with the next message of a rank, if it has arrived.
    pub(crate) fn find(
        &self,
        exchange: &Exchange,
        from: u32,
        sequence: u32,
        communicator: Option<u32>,
        takes: impl Fn(u32) -> bool,
    ) -> Option<(usize, RxBuffer)> {
        let buffers =
            (0..exchange.get(RX_BUFFER_COUNT) as usize).map_while(|index| Some((index, exchange.rx_buffer(index)?)));
        let mut full = buffers.filter(|(_, buffer)| buffer.status() == Some(RxStatus::Full));
        full.find(|(index, buffer)| {
            let of = self.communicators.get(index).copied().unwrap_or_default();
            buffer.source == from && buffer.sequence == sequence && takes(buffer.tag) && is_of(of, communicator)
        })
    }

    /// Releases an rx buffer.
    pub(crate) fn release(&mut self, exchange: &mut Exchange, index: usize, buffer: &RxBuffer) {
        self.communicators.remove(&index);
        exchange.set_rx_buffer(index, &RxBuffer::idle(buffer.address()));
    }

    /// Removes and returns the first notice of a communicator for which `is_it` is true.
    pub(crate) fn take_notice(&mut self, of: Option<u32>, is_it: impl Fn(&Notice) -> bool) -> Option<Notice> {
        let at = self.notices.iter().position(|notice| is_of(notice.communicator, of) && is_it(notice))?;
        self.notices.remove(at)
    }

    /// Forgets everything.
    pub(crate) fn reset(&mut self) {
        *self = Self::new(self.network);
    }
}

impl Stream {
    fn new(network: Network) -> Self {
        Self {
            joiner: Joiner::new(network),
            target: Target::Nowhere,
            held: VecDeque::new(),
            held_bytes: 0,
            next_packet: None,
            broken: None,
        }
    }

    /// Stops taking packets of this sender, for the given reason.
    fn fail(&mut self, why: &'static str) {
        self.broken.get_or_insert(why);
        self.held = VecDeque::new();
        self.held_bytes = 0;
    }
}

/// Returns the destination of a message that begins, or `None` if there is no suitable idle rx buffer.
fn begin(header: &Header, exchange: &mut Exchange) -> Option<Target> {
    if header.kind != MessageKind::Eager {
        return Some(Target::Nowhere);
    }
    if let Some(number) = header.stream.checked_sub(STREAM_OFFSET) {
        return Some(Target::Kernel(number));
    }
    if header.count > exchange.get(RX_BUFFER_BYTES) {
        return None;
    }
    let mut buffers =
        (0..exchange.get(RX_BUFFER_COUNT) as usize).map_while(|index| Some((index, exchange.rx_buffer(index)?)));
    let (index, idle) = buffers.find(|(_, buffer)| buffer.status() == Some(RxStatus::Idle))?;
    let filling = RxBuffer {
        status: RxStatus::Filling.word(),
        tag: header.tag,
        bytes: header.count,
        source: header.source,
        sequence: header.sequence,
        ..idle
    };
    exchange.set_rx_buffer(index, &filling);
    Some(Target::Rx(index))
}

/// Writes data into an rx buffer. Returns `false` if the buffer lies outside of memory.
fn fill(
    index: usize,
    begins_at: usize,
    data: &[u8],
    is_last: bool,
    exchange: &mut Exchange,
    memories: &mut Memories<'_>,
) -> bool {
    let Some(buffer) = exchange.rx_buffer(index) else { return false };
    let Some(at) = buffer.address().checked_add(begins_at as u64) else { return false };
    let Some(place) = memories.device.read_mut(at, data.len()) else { return false };
    place.copy_from_slice(data);
    if is_last {
        exchange.set_rx_buffer(index, &RxBuffer { status: RxStatus::Full.word(), ..buffer });
    }
    true
}
