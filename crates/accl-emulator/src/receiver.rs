//! What becomes of packets that come: eager messages go to rx buffers, what is said of addresses is kept, and data for an address are
//! written there.
//!
//! Owns the streams of packets of all senders, and what has been said and not asked for yet. Rx buffers lie in exchange memory, where the
//! host sees them too. Read [`Receiver::take`] first.

use std::collections::{BTreeMap, VecDeque};

use accl_cclo::memory_map::{Network, RX_BUFFER_BYTES, RX_BUFFER_COUNT, RxBuffer, RxStatus};
use accl_cclo::wire::{Header, Joined, Joiner, MessageKind, STREAM_OFFSET};

use crate::exchange::Exchange;
use crate::memory::Memory;

/// Something that a peer has said besides data: an address, or that all data are there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Notice {
    pub(crate) kind: MessageKind,
    pub(crate) from: u32,
    pub(crate) tag: u32,
    pub(crate) address: u64,
    pub(crate) is_host: bool,
    /// Bytes that have come, or elements that are wanted.
    pub(crate) count: u32,
}

/// The packets of one sender.
struct Stream {
    joiner: Joiner,
    /// Where the payload of the message goes whose packets come.
    target: Target,
    /// Those that have found no idle rx buffer.
    held: VecDeque<Vec<u8>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Rx(usize),
    /// A kernel stream.
    Kernel(u32),
    Nowhere,
}

/// What an engine has been sent and has not asked for yet.
pub(crate) struct Receiver {
    network: Network,
    streams: BTreeMap<u32, Stream>,
    notices: VecDeque<Notice>,
    /// Bytes for kernel streams, with the number of each.
    pub(crate) kernel: VecDeque<(u32, Vec<u8>)>,
    /// Why nothing more can be understood of a sender.
    pub(crate) broken: Option<(u32, &'static str)>,
}

/// The memories that packets are written to.
pub(crate) struct Memories<'a> {
    pub(crate) device: &'a mut Memory,
    pub(crate) host: &'a mut Memory,
}

impl Memories<'_> {
    pub(crate) fn of(&mut self, is_host: bool) -> &mut Memory {
        if is_host { self.host } else { self.device }
    }
}

impl Receiver {
    pub(crate) fn new(network: Network) -> Self {
        Self { network, streams: BTreeMap::new(), notices: VecDeque::new(), kernel: VecDeque::new(), broken: None }
    }

    /// Takes a packet of a sender. One that finds no idle rx buffer waits, and those after it behind it.
    pub(crate) fn take(&mut self, sender: u32, packet: &[u8], exchange: &mut Exchange, memories: &mut Memories<'_>) {
        let network = self.network;
        let stream = self.streams.entry(sender).or_insert_with(|| Stream {
            joiner: Joiner::new(network),
            target: Target::Nowhere,
            held: VecDeque::new(),
        });
        stream.held.push_back(packet.to_vec());
        self.take_held(sender, exchange, memories);
    }

    /// Tries again what has waited for an rx buffer.
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
        let Some(stream) = self.streams.get_mut(&sender) else { return false };
        let mut moved = false;
        while let Some(packet) = stream.held.front() {
            // A message may begin only if there is a place for it.
            let before = stream.joiner.clone();
            let joined = match stream.joiner.join(packet) {
                Ok(joined) => joined,
                Err(bad) => {
                    self.broken.get_or_insert((sender, bad.why));
                    stream.held.clear();
                    return moved;
                }
            };
            match joined {
                Joined::Write { address, is_host, data } => {
                    if let Some(place) = memories.of(is_host).read_mut(address, data.len()) {
                        place.copy_from_slice(data);
                    } else {
                        self.broken.get_or_insert((sender, "it writes to an address that this engine does not have"));
                    }
                }
                Joined::Message { header, begins_at, data, is_last } => {
                    if begins_at == 0 {
                        match begin(&header, exchange) {
                            Some(target) => stream.target = target,
                            None => {
                                stream.joiner = before;
                                return moved;
                            }
                        }
                    }
                    match stream.target {
                        Target::Rx(index) => {
                            if !fill(index, begins_at, data, is_last, exchange, memories) {
                                self.broken
                                    .get_or_insert((sender, "an rx buffer lies outside the memory of the device"));
                            }
                        }
                        Target::Kernel(number) => self.kernel.push_back((number, data.to_vec())),
                        Target::Nowhere => self.notices.push_back(Notice {
                            kind: header.kind,
                            from: header.source,
                            tag: header.tag,
                            address: header.address,
                            is_host: header.is_host,
                            count: header.count,
                        }),
                    }
                }
            }
            stream.held.pop_front();
            moved = true;
        }
        moved
    }

    /// The rx buffer with the next message of a rank, if it has come.
    pub(crate) fn find(
        exchange: &Exchange,
        from: u32,
        sequence: u32,
        takes: impl Fn(u32) -> bool,
    ) -> Option<(usize, RxBuffer)> {
        let buffers =
            (0..exchange.get(RX_BUFFER_COUNT) as usize).filter_map(|index| Some((index, exchange.rx_buffer(index)?)));
        let mut full = buffers.filter(|(_, buffer)| buffer.status() == Some(RxStatus::Full));
        full.find(|(_, buffer)| buffer.source == from && buffer.sequence == sequence && takes(buffer.tag))
    }

    /// Gives an rx buffer back.
    pub(crate) fn release(exchange: &mut Exchange, index: usize, buffer: &RxBuffer) {
        exchange.set_rx_buffer(index, &RxBuffer::idle(buffer.address()));
    }

    /// The first notice that is this.
    pub(crate) fn take_notice(&mut self, is_it: impl Fn(&Notice) -> bool) -> Option<Notice> {
        let at = self.notices.iter().position(is_it)?;
        self.notices.remove(at)
    }

    /// Forgets everything.
    pub(crate) fn reset(&mut self) {
        *self = Self::new(self.network);
    }
}

/// Where a message that begins goes; `None`: there is no idle rx buffer.
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
        (0..exchange.get(RX_BUFFER_COUNT) as usize).filter_map(|index| Some((index, exchange.rx_buffer(index)?)));
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

/// `false`: the buffer lies outside memory.
fn fill(
    index: usize,
    begins_at: usize,
    data: &[u8],
    is_last: bool,
    exchange: &mut Exchange,
    memories: &mut Memories<'_>,
) -> bool {
    let Some(buffer) = exchange.rx_buffer(index) else { return false };
    let Some(place) = memories.device.read_mut(buffer.address() + begins_at as u64, data.len()) else { return false };
    place.copy_from_slice(data);
    if is_last {
        exchange.set_rx_buffer(index, &RxBuffer { status: RxStatus::Full.word(), ..buffer });
    }
    true
}
