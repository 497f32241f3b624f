//! Conversion of messages to packets and of packets to messages.

use super::{Header, RequestWord, Verb, WORD_BYTES};
use crate::memory_map::Network;

/// Maximum bytes of a packet. Over UDP and TCP that includes the header; over RDMA it excludes the request word.
pub const MAX_PACKET_BYTES: usize = 4096;

/// A packet to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// Request word and header, if the packet has them.
    head: [u8; 2 * WORD_BYTES],
    head_bytes: usize,
    data: &'a [u8],
    /// Padding over UDP, which sends whole words. It holds the bytes at the same position of the previous word, or zeros.
    padding: &'a [u8],
}

/// Contents of a received packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Joined<'a> {
    /// Part of the payload of a message.
    Message {
        /// Header of the message, which came with its first packet.
        header: Header,
        /// Offset of this part in the payload, in bytes.
        begins_at: usize,
        /// The data of this part.
        data: &'a [u8],
        /// Whether this is the last part of the message.
        is_last: bool,
    },
    /// Data for an address that this end has announced.
    Write {
        /// Destination address.
        address: u64,
        /// Whether `address` is in host memory.
        is_host: bool,
        /// The data.
        data: &'a [u8],
    },
}

/// Error for a malformed packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadPacket {
    /// Description of what is wrong with the packet.
    pub why: &'static str,
    /// Length of the packet in bytes.
    pub bytes: usize,
}

/// Joins the packets of one sender into messages.
#[derive(Clone, Debug)]
pub struct Joiner {
    network: Network,
    /// Header of the incomplete message, and how many payload bytes have arrived.
    under_way: Option<(Header, usize)>,
}

/// Splits a message into packets, one at a time.
#[derive(Clone, Debug)]
pub struct Cutter {
    network: Network,
    header: Header,
    queue_pair: u16,
    /// Payload bytes that earlier packets took; `is_first` is true until the first packet is cut.
    sent: usize,
    is_first: bool,
}

/// Returns the packets of a message; see [`Cutter::new`].
pub fn packets<'a>(
    network: Network,
    header: &Header,
    payload: &'a [u8],
    queue_pair: u16,
) -> impl Iterator<Item = Packet<'a>> {
    let mut cutter = Cutter::new(network, header, queue_pair);
    std::iter::from_fn(move || cutter.cut(payload))
}

impl Cutter {
    /// Creates a cutter for a message with this header. `queue_pair` is the peer's queue pair, which only RDMA uses. Over RDMA, data for an address
    /// that the peer has announced is sent without a header.
    pub fn new(network: Network, header: &Header, queue_pair: u16) -> Self {
        Self { network, header: *header, queue_pair, sent: 0, is_first: true }
    }

    /// Returns the next packet of the message, or `None` if there are no more. `payload` must be the same in each call.
    pub fn cut<'a>(&mut self, payload: &'a [u8]) -> Option<Packet<'a>> {
        if !self.is_first && self.sent >= payload.len() {
            return None;
        }
        let (header, sent) = (&self.header, self.sent);
        let is_write = self.network == Network::Rdma && header.kind == super::MessageKind::Rendezvous;
        let head_bytes = if is_write { 0 } else { WORD_BYTES };
        let own_head = if self.is_first { head_bytes } else { 0 };
        let room = MAX_PACKET_BYTES - own_head;
        let data = &payload[sent..payload.len().min(sent + room)];
        let mut packet = Packet { head: [0; 2 * WORD_BYTES], head_bytes: 0, data, padding: &[] };
        if self.network == Network::Rdma {
            // The header counts as the first bytes of the data that is sent.
            let before = if self.is_first { 0 } else { head_bytes + sent };
            let begins_at = if is_write { header.address } else { 0 };
            packet.push(
                &RequestWord {
                    address: begins_at.wrapping_add(before as u64),
                    bytes: (head_bytes + payload.len() - before) as u32,
                    is_host: is_write && header.is_host,
                    queue_pair: self.queue_pair,
                    verb: if is_write { Verb::Write } else { Verb::Send },
                }
                .to_bytes(),
            );
        }
        if own_head > 0 {
            packet.push(&header.to_bytes());
        }
        if self.network == Network::Udp {
            packet.padding = padding(&payload[..sent + data.len()], data.len());
        }
        self.sent += data.len();
        self.is_first = false;
        Some(packet)
    }
}

/// Returns the padding of the last word of a packet with `data_bytes` bytes of data. `sent` ends with that data.
fn padding(sent: &[u8], data_bytes: usize) -> &[u8] {
    const ZEROS: [u8; WORD_BYTES] = [0; WORD_BYTES];
    let used = data_bytes % WORD_BYTES;
    let missing = if used == 0 { 0 } else { WORD_BYTES - used };
    match sent.len().checked_sub(used + missing) {
        Some(at) if missing > 0 => &sent[at..at + missing],
        _ => &ZEROS[..missing],
    }
}

impl Packet<'_> {
    fn push(&mut self, word: &[u8; WORD_BYTES]) {
        self.head[self.head_bytes..self.head_bytes + WORD_BYTES].copy_from_slice(word);
        self.head_bytes += WORD_BYTES;
    }

    /// Returns the packet's bytes as three consecutive parts.
    pub fn parts(&self) -> [&[u8]; 3] {
        [&self.head[..self.head_bytes], self.data, self.padding]
    }

    /// Returns the length of the packet in bytes.
    pub fn len_bytes(&self) -> usize {
        self.parts().iter().map(|part| part.len()).sum()
    }

    /// Returns the packet's bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.parts().concat()
    }
}

impl Joiner {
    /// Creates a joiner for packets that arrive over this network.
    pub fn new(network: Network) -> Self {
        Self { network, under_way: None }
    }

    /// Returns whether a message is incomplete, so that more of it must come.
    pub fn is_under_way(&self) -> bool {
        self.under_way.is_some()
    }

    /// Takes the next packet of the sender.
    ///
    /// # Errors
    /// [`BadPacket`]; after that, no later packet of the sender can be parsed.
    pub fn join<'a>(&mut self, packet: &'a [u8]) -> Result<Joined<'a>, BadPacket> {
        let bad = |why| BadPacket { why, bytes: packet.len() };
        let mut rest = packet;
        if self.network == Network::Rdma {
            let (word, behind) =
                rest.split_first_chunk::<WORD_BYTES>().ok_or(bad("a packet ends within its request word"))?;
            let word = RequestWord::from_bytes(word).ok_or(bad("a packet has an invalid request word"))?;
            rest = behind;
            if rest.len() > MAX_PACKET_BYTES || rest.len() > word.bytes as usize {
                return Err(bad("a packet is longer than its request word states"));
            }
            if word.verb == Verb::Write {
                return Ok(Joined::Write { address: word.address, is_host: word.is_host, data: rest });
            }
        } else if rest.len() > MAX_PACKET_BYTES {
            return Err(bad("a packet is longer than the maximum"));
        }
        let (header, begins_at) = match self.under_way.take() {
            Some(begun) => begun,
            None => {
                let (head, behind) =
                    rest.split_first_chunk::<WORD_BYTES>().ok_or(bad("a packet ends within its header"))?;
                rest = behind;
                (Header::from_bytes(head).ok_or(bad("a header has an unknown kind of message"))?, 0)
            }
        };
        let left = header.payload_bytes() - begins_at;
        let is_last = rest.len() >= left;
        // UDP sends whole words.
        let may_be_longer = self.network == Network::Udp && rest.len() == left.next_multiple_of(WORD_BYTES);
        if rest.len() > left && !may_be_longer {
            return Err(bad("a packet is longer than the rest of its message"));
        }
        if rest.is_empty() && left > 0 && begins_at > 0 {
            return Err(bad("a packet is empty in the middle of a message"));
        }
        let data = &rest[..rest.len().min(left)];
        if !is_last {
            self.under_way = Some((header, begins_at + data.len()));
        }
        Ok(Joined::Message { header, begins_at, data, is_last })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::MessageKind;
    use super::*;

    fn header(kind: MessageKind, count: usize) -> Header {
        Header {
            count: count as u32,
            tag: 7,
            source: 1,
            sequence: 3,
            stream: 0,
            destination: 2,
            kind,
            is_host: false,
            address: if kind == MessageKind::Eager { 0 } else { 0x2000 },
            communicator: 0xC0FF_EE00,
            packet_number: 17,
        }
    }

    proptest! {
        #[test]
        fn what_is_cut_is_joined_again(
            network in prop::sample::select(vec![Network::Udp, Network::Tcp, Network::Rdma]),
            payload in prop::collection::vec(any::<u8>(), 0..20_000),
            is_eager in any::<bool>(),
        ) {
            let kind = if is_eager { MessageKind::Eager } else { MessageKind::Rendezvous };
            let header = header(kind, payload.len());
            let mut joiner = Joiner::new(network);
            let mut joined = vec![0; payload.len()];
            let mut ended = 0;
            for packet in packets(network, &header, &payload, 5) {
                let bytes = packet.to_bytes();
                prop_assert!(network != Network::Udp || bytes.len() % WORD_BYTES == 0);
                match joiner.join(&bytes) {
                    Ok(Joined::Message { header: got, begins_at, data, is_last }) => {
                        prop_assert_eq!(got, header);
                        joined[begins_at..begins_at + data.len()].copy_from_slice(data);
                        ended += usize::from(is_last);
                    }
                    Ok(Joined::Write { address, data, .. }) => {
                        let at = (address - header.address) as usize;
                        joined[at..at + data.len()].copy_from_slice(data);
                        ended = 1;
                    }
                    Err(bad) => prop_assert!(false, "{:?}", bad),
                }
            }
            prop_assert_eq!(joined, payload);
            prop_assert!(ended == 1 && !joiner.is_under_way());
        }

        #[test]
        fn anything_may_come(
            network in prop::sample::select(vec![Network::Udp, Network::Tcp, Network::Rdma]),
            all in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..400), 1..8),
        ) {
            let mut joiner = Joiner::new(network);
            for packet in &all {
                if let Ok(Joined::Message { header, begins_at, data, is_last }) = joiner.join(packet) {
                    prop_assert!(begins_at + data.len() <= header.payload_bytes());
                    prop_assert_eq!(is_last, begins_at + data.len() == header.payload_bytes());
                }
            }
        }
    }
}
