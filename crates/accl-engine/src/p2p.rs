//! Point-to-point messages of one group: matching by peer and tag in issue order, and their progress.
//!
//! Messages have edges of their own: a receive that waits never blocks a send or a collective. Owns posted receives,
//! messages that came before their receive, and sends in flight. Read [`P2p`] first.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use accl_transport::frame::{Header, Kind, SIGNATURE_BYTES, Signature, WANTS_GRANT};
use accl_types::{Dtype, Error, Rank, Result};

use crate::buffers::Buffers;
use crate::call::Call;
use crate::run::RunEnv;

/// A send or receive in flight.
pub(crate) struct Message {
    pub(crate) call: Arc<Call>,
    pub(crate) deadline: Option<Instant>,
    /// The other side; `None` while a receive from any source is not matched.
    pub(crate) peer: Option<Rank>,
    pub(crate) tag: u32,
    pub(crate) signature: Signature,
    pub(crate) buffers: Buffers,
    /// Length of the payload in bytes.
    pub(crate) total: u64,
    /// It serves a call of our own: when its peer goes, it fails alone and not its group.
    pub(crate) is_private: bool,
}

/// Tags from here on are ours; users' are below.
pub(crate) const PRIVATE_TAGS: u32 = 0x8000_0000;

struct Sending {
    message: Message,
    to: Rank,
    id: u64,
    begun: bool,
    sent: u64,
    granted: u64,
}

struct Receiving {
    message: Message,
    arrived: u64,
    /// The next payload is that of the first frame: the eager bytes, if any.
    with_begin: bool,
}

/// A message that no receive was posted for yet.
struct Unexpected {
    /// Order of arrival over all peers.
    order: u64,
    id: u64,
    header: Header,
    signature: Signature,
    data: Vec<u8>,
}

#[derive(Default)]
struct Peer {
    next_id: u64,
    unexpected: VecDeque<Unexpected>,
    /// Matched receives by the sender's message number.
    receiving: BTreeMap<u64, Receiving>,
}

/// The point-to-point state of one group.
pub(crate) struct P2p {
    peers: Vec<Peer>,
    sending: VecDeque<Sending>,
    posted: VecDeque<Message>,
    arrivals: u64,
    done: Vec<Message>,
}

impl P2p {
    pub(crate) fn new(world: u32) -> Self {
        Self {
            peers: (0..world).map(|_| Peer::default()).collect(),
            sending: VecDeque::new(),
            posted: VecDeque::new(),
            arrivals: 0,
            done: Vec::new(),
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.sending.is_empty() && self.posted.is_empty() && self.peers.iter().all(|peer| peer.receiving.is_empty())
    }

    /// Whether a send waits for room.
    pub(crate) fn is_busy(&self) -> bool {
        self.sending.iter().any(|sending| !sending.begun || sending.granted > sending.sent)
    }

    pub(crate) fn post_send(&mut self, message: Message, to: Rank) {
        let id = self.peers[to.index()].next_id;
        self.peers[to.index()].next_id += 1;
        self.sending.push_back(Sending { message, to, id, begun: false, sent: 0, granted: 0 });
    }

    /// # Errors
    /// `Mismatch` when the message that fits has another size or dtype.
    pub(crate) fn post_receive(&mut self, message: Message, env: &mut RunEnv<'_>) -> Result<()> {
        let candidates = match message.peer {
            Some(peer) => peer.index()..peer.index() + 1,
            None => 0..self.peers.len(),
        };
        let found = candidates
            .filter_map(|rank| {
                let index = self.peers[rank].unexpected.iter().position(|u| u.header.tag == message.tag)?;
                Some((self.peers[rank].unexpected[index].order, rank, index))
            })
            .min();
        let Some((_, rank, index)) = found else {
            self.posted.push_back(message);
            return Ok(());
        };
        let Some(unexpected) = self.peers[rank].unexpected.remove(index) else { return Ok(()) };
        let from = Rank(rank as u32);
        self.matched(message, from, &unexpected.header, unexpected.signature, unexpected.id, env)?;
        self.on_data(from, unexpected.id, &unexpected.data, env)
    }

    /// The first frame of a message arrived.
    ///
    /// # Errors
    /// `Mismatch` when the receive it matches has another size or dtype.
    pub(crate) fn on_begin(
        &mut self,
        from: Rank,
        header: &Header,
        signature: Signature,
        data: &[u8],
        env: &mut RunEnv<'_>,
    ) -> Result<()> {
        let peer = &self.peers[from.index()];
        if peer.receiving.contains_key(&header.seq) || peer.unexpected.iter().any(|u| u.id == header.seq) {
            return Err(Error::protocol(format!("rank {from} began message {} twice", header.seq)));
        }
        let fits = |m: &Message| m.tag == header.tag && m.peer.is_none_or(|peer| peer == from);
        if let Some(message) = self.posted.iter().position(fits).and_then(|index| self.posted.remove(index)) {
            self.matched(message, from, header, signature, header.seq, env)?;
            return self.on_data(from, header.seq, data, env);
        }
        let order = self.arrivals;
        self.arrivals += 1;
        let unexpected = Unexpected { order, id: header.seq, header: *header, signature, data: data.to_vec() };
        self.peers[from.index()].unexpected.push_back(unexpected);
        Ok(())
    }

    fn matched(
        &mut self,
        mut message: Message,
        from: Rank,
        header: &Header,
        signature: Signature,
        id: u64,
        env: &mut RunEnv<'_>,
    ) -> Result<()> {
        message.call.set_source(from, signature.reserved);
        let (sent, wanted) = (signature, message.signature);
        if header.value != message.total || sent.dtype != wanted.dtype {
            let show = |signature: Signature, bytes: u64| {
                let dtype = Dtype::from_code(signature.dtype).map_or("unknown", Dtype::name);
                format!("{} elements of {dtype}, {bytes} bytes", signature.count)
            };
            let error = Error::mismatch(format!(
                "rank {from} sent {} with tag {}, but rank {} receives {}; make size and dtype agree",
                show(sent, header.value),
                header.tag,
                message.call.rank,
                show(wanted, message.total)
            ));
            // Put back, so that it fails together with everything else of the group.
            self.posted.push_front(message);
            return Err(error.with_peer(from));
        }
        message.peer = Some(from);
        if header.flags & WANTS_GRANT != 0 {
            let mut grant = Header::new(Kind::P2pGrant);
            grant.group = message.call.group_id;
            grant.seq = id;
            grant.value = message.total;
            env.net.send_control(env.members.peer(from), grant, &[]);
        }
        self.peers[from.index()].receiving.insert(id, Receiving { message, arrived: 0, with_begin: true });
        Ok(())
    }

    /// Payload of a matched message arrived, or lay aside until now.
    ///
    /// # Errors
    /// `Protocol` when nothing matches or it is too much.
    pub(crate) fn on_data(&mut self, from: Rank, id: u64, data: &[u8], env: &mut RunEnv<'_>) -> Result<()> {
        let peer = &mut self.peers[from.index()];
        let Some(receiving) = peer.receiving.get_mut(&id) else {
            return Err(Error::protocol(format!("rank {from} sent data of message {id}, which has not begun")));
        };
        let end = receiving.arrived + data.len() as u64;
        if end > receiving.message.total {
            return Err(Error::protocol(format!("rank {from} sent too much of message {id}")));
        }
        if std::mem::take(&mut receiving.with_begin) {
            env.members.give_eager_back(from, data.len() as u64, receiving.message.call.group_id, env.net);
        }
        if !data.is_empty() {
            let at = receiving.message.buffers.output(0).wrapping_add(receiving.arrived as usize);
            // SAFETY: the output holds `total` bytes that stay writable until the call ends; `end` is within.
            unsafe { accl_kernels::copy(at, data.as_ptr(), data.len()) };
        }
        receiving.arrived = end;
        if end == receiving.message.total
            && let Some(mut receiving) = peer.receiving.remove(&id)
        {
            receiving.message.buffers.unpack();
            self.done.push(receiving.message);
        }
        Ok(())
    }

    pub(crate) fn on_grant(&mut self, to: Rank, id: u64, value: u64) {
        if let Some(sending) = self.sending.iter_mut().find(|sending| sending.to == to && sending.id == id) {
            sending.granted = sending.granted.max(value.min(sending.message.total));
        }
    }

    /// Sends what can be sent. Returns whether anything was.
    pub(crate) fn advance(&mut self, env: &mut RunEnv<'_>) -> bool {
        let mut progressed = false;
        let mut blocked: Vec<Rank> = Vec::new();
        let mut index = 0;
        while let Some(sending) = self.sending.get_mut(index) {
            // Messages begin in issue order; data of several may interleave.
            if !blocked.contains(&sending.to) {
                progressed |= advance_send(sending, env);
                if !sending.begun {
                    blocked.push(sending.to);
                }
            }
            if sending.begun && sending.sent == sending.message.total {
                if let Some(sending) = self.sending.remove(index) {
                    self.done.push(sending.message);
                }
            } else {
                index += 1;
            }
        }
        progressed
    }

    /// Messages that are complete since the last call.
    pub(crate) fn take_done(&mut self) -> Vec<Message> {
        std::mem::take(&mut self.done)
    }

    /// Everything in flight, taken out; unexpected messages are forgotten.
    pub(crate) fn take_all(&mut self) -> Vec<Message> {
        let mut all = std::mem::take(&mut self.done);
        all.extend(self.sending.drain(..).map(|sending| sending.message));
        all.extend(self.posted.drain(..));
        for peer in &mut self.peers {
            peer.unexpected.clear();
            all.extend(std::mem::take(&mut peer.receiving).into_values().map(|receiving| receiving.message));
        }
        all
    }

    /// Takes back a message that has not begun.
    pub(crate) fn cancel(&mut self, call: &Call) -> Option<Message> {
        self.take_unbegun(|message| std::ptr::eq(&*message.call, call)).pop()
    }

    /// Takes back receives that nothing matched yet and sends that have not begun, those that `choose` picks.
    pub(crate) fn take_unbegun(&mut self, choose: impl Fn(&Message) -> bool) -> Vec<Message> {
        let mut taken = Vec::new();
        for message in std::mem::take(&mut self.posted) {
            if choose(&message) {
                taken.push(message);
            } else {
                self.posted.push_back(message);
            }
        }
        for sending in std::mem::take(&mut self.sending) {
            if !sending.begun && choose(&sending.message) {
                taken.push(sending.message);
            } else {
                self.sending.push_back(sending);
            }
        }
        taken
    }

    /// Whether a message with this tag waits for a receive.
    pub(crate) fn has_unexpected(&self, from: Rank, tag: u32) -> bool {
        self.peers[from.index()].unexpected.iter().any(|unexpected| unexpected.header.tag == tag)
    }

    /// The calls in flight.
    pub(crate) fn messages(&self) -> impl Iterator<Item = &Message> {
        let receiving = self.peers.iter().flat_map(|peer| peer.receiving.values()).map(|receiving| &receiving.message);
        self.sending.iter().map(|sending| &sending.message).chain(&self.posted).chain(receiving)
    }
}

fn advance_send(sending: &mut Sending, env: &mut RunEnv<'_>) -> bool {
    let total = sending.message.total;
    let mut progressed = false;
    loop {
        let (kind, n) = if !sending.begun {
            let first = total.min(env.segment);
            (Kind::P2pBegin, if env.members.eager_left(sending.to) >= first { first } else { 0 })
        } else {
            let n = env.segment.min(sending.granted.saturating_sub(sending.sent));
            if n == 0 {
                return progressed;
            }
            (Kind::P2pData, n)
        };
        if !send_frame(sending, kind, n, env) {
            return progressed;
        }
        progressed = true;
        if kind == Kind::P2pBegin {
            env.members.take_eager(sending.to, n);
            sending.begun = true;
        }
    }
}

fn send_frame(sending: &mut Sending, kind: Kind, n: u64, env: &mut RunEnv<'_>) -> bool {
    let peer = env.members.peer(sending.to);
    let signature_len = if kind == Kind::P2pBegin { SIGNATURE_BYTES } else { 0 };
    let Some(place) = env.net.reserve(peer, signature_len + n as usize) else { return false };
    let message = &sending.message;
    let mut header = Header::new(kind);
    header.flags = if sending.sent + n < message.total { WANTS_GRANT } else { 0 };
    header.group = message.call.group_id;
    header.seq = sending.id;
    header.tag = message.tag;
    header.value = message.total;
    header.emit(place.head);
    let mut payload = place.payload;
    if kind == Kind::P2pBegin {
        message.signature.emit(payload);
        payload = &mut payload[SIGNATURE_BYTES..];
    }
    if n > 0 {
        let from = message.buffers.input(0).wrapping_add(sending.sent as usize);
        // SAFETY: the input holds `total` bytes that stay readable until the call ends, `sent + n` is within, and
        // `payload` is frame memory of `n` bytes.
        unsafe { accl_kernels::copy(payload.as_mut_ptr(), from, n as usize) };
    }
    env.net.commit(peer);
    sending.sent += n;
    true
}
