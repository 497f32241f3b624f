//! Point-to-point messages of one group: matching by peer and tag in issue order, and their progress.
//!
//! Messages have edges of their own, so a receive that waits never blocks a send or a collective. This module owns
//! posted receives, unexpected messages (which arrived before their receive), and the order in which sends begin.
//! `transfer` owns the protocol of one message. Read [`P2p`] first.

mod mismatch;
mod private;
mod staged;

use std::cell::Cell;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use accl_types::{Error, Moment, Rank, Result};
use accl_wire::frame::{Header, Kind, Signature, WANTS_GRANT};
use smallvec::SmallVec;

use self::mismatch::disagreement;
use super::context::{RunContext, flags};
use super::transfer::{Ahead, Arrival, Excess, Fragment, Incoming, Outgoing, Part, Window};
use crate::call::CallState;
use crate::memory::MessageMemory;

/// A send or receive in flight.
pub struct Message {
    pub call: Arc<CallState>,
    pub(crate) deadline: Option<Moment>,
    /// Peer rank; `None` while a receive from any source is unmatched.
    pub(crate) peer: Option<Rank>,
    pub(crate) tag: u32,
    pub(crate) signature: Signature,
    pub(crate) memory: MessageMemory,
    /// Whether the message is an internal one of the engine. If its peer is lost, it fails alone, without its group.
    pub(crate) is_private: bool,
}

/// First tag of internal messages. Tags of users are below.
pub const PRIVATE_TAGS: u32 = 0x8000_0000;

impl Message {
    fn window(&self) -> Window {
        if self.is_private { Window::Exempt } else { Window::Counted }
    }
}

struct Sending {
    message: Message,
    id: u64,
    outgoing: Outgoing,
}

struct Receiving {
    message: Message,
    incoming: Incoming,
}

/// A message for which no receive is posted yet.
struct Unexpected {
    /// Order of arrival over all peers.
    order: u64,
    header: Header,
    signature: Signature,
    data: Vec<u8>,
}

/// A receive that has not been matched yet.
struct Posted {
    /// Order of posting.
    order: u64,
    message: Message,
}

#[derive(Default)]
struct Peer {
    next_id: u64,
    /// Sends that have not begun, in issue order. Only the first is ever tried.
    unbegun: VecDeque<Sending>,
    /// Sends that have begun, by message number.
    begun: BTreeMap<u64, Sending>,
    /// Numbers of those sends that were granted more than they have sent.
    ready: BTreeSet<u64>,
    /// Number of the first message that the peer has not begun.
    next_begin: u64,
    /// Unexpected messages by tag, in order of arrival.
    unexpected: BTreeMap<u32, VecDeque<Unexpected>>,
    /// Matched receives by the sender's message number.
    receiving: BTreeMap<u64, Receiving>,
    /// Number of messages in flight to and from the peer, without private ones.
    in_flight: usize,
}

impl Peer {
    fn sending(&self, id: u64) -> Option<&Sending> {
        let unbegun = || Some(&self.unbegun[self.unbegun.binary_search_by_key(&id, |sending| sending.id).ok()?]);
        self.begun.get(&id).or_else(unbegun)
    }
}

/// The point-to-point state of one group.
///
/// The cost of a pass does not grow with the number of waiting messages. Each is found by the event for which it waits.
/// Only a report of copies costs a look at all staged messages, and pinned memory limits how many there are.
pub struct P2p {
    peers: Vec<Peer>,
    /// Peers to which something could be sent.
    sendable: BTreeSet<Rank>,
    /// Posted receives by tag and source, in order of posting.
    posted: BTreeMap<(u32, Option<Rank>), VecDeque<Posted>>,
    /// Peer of every message in flight, by the sequence number of its call.
    calls: BTreeMap<u64, Option<Rank>>,
    /// Deadlines of messages that are not private, with their sequence numbers.
    deadlines: BTreeSet<(Moment, u64)>,
    /// Number of unmatched receives from any source.
    from_any: usize,
    /// Number of arrivals so far, which orders unexpected messages.
    arrivals: u64,
    /// Number of receives posted so far, which orders them.
    posts: u64,
    /// Sends that are complete and have yet to be [`P2p::end`]ed. A panic in a later send must not lose them.
    over: Vec<Message>,
    done: Vec<Message>,
    /// Staged messages that have begun and still move bytes: sends, and receives, each by peer and message number.
    staged_sends: BTreeSet<(Rank, u64)>,
    staged_receives: BTreeSet<(Rank, u64)>,
    /// Staged messages that have moved all bytes and wait for their copies.
    copying: Vec<Message>,
    /// Set when the copies of a staged message have gone on.
    has_news: Arc<AtomicBool>,
    /// Why the copies of a message have failed.
    failure: Option<(Arc<CallState>, Error)>,
    /// Number of private messages in flight.
    private: usize,
    /// Number of messages examined so far.
    steps: Cell<u64>,
}

impl P2p {
    pub(crate) fn new(world: u32) -> Self {
        Self {
            peers: (0..world).map(|_| Peer::default()).collect(),
            sendable: BTreeSet::new(),
            posted: BTreeMap::new(),
            calls: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            from_any: 0,
            arrivals: 0,
            posts: 0,
            over: Vec::new(),
            done: Vec::new(),
            staged_sends: BTreeSet::new(),
            staged_receives: BTreeSet::new(),
            copying: Vec::new(),
            has_news: Arc::default(),
            failure: None,
            private: 0,
            steps: Cell::new(0),
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.calls.is_empty()
    }

    /// Returns how often a message was examined so far.
    pub fn steps(&self) -> u64 {
        self.steps.get()
    }

    fn step(&self) {
        self.steps.set(self.steps.get() + 1);
    }

    // ---- records of messages in flight

    fn enter(&mut self, message: &Message) {
        self.calls.insert(message.call.seq, message.peer);
        if message.is_private {
            self.private += 1;
            return;
        }
        self.deadlines.extend(message.deadline.map(|deadline| (deadline, message.call.seq)));
        *self.count_of(message.peer) += 1;
    }

    fn leave(&mut self, message: &Message) {
        self.calls.remove(&message.call.seq);
        if message.is_private {
            self.private -= 1;
            return;
        }
        if let Some(deadline) = message.deadline {
            self.deadlines.remove(&(deadline, message.call.seq));
        }
        *self.count_of(message.peer) -= 1;
    }

    fn count_of(&mut self, peer: Option<Rank>) -> &mut usize {
        match peer {
            Some(rank) => &mut self.peers[rank.index()].in_flight,
            None => &mut self.from_any,
        }
    }

    fn end(&mut self, message: Message) {
        self.leave(&message);
        self.done.push(message);
    }

    /// Returns the earliest deadline. Private messages have none: the engine stops waiting for them by itself.
    pub(crate) fn next_deadline(&self) -> Option<Moment> {
        self.deadlines.first().map(|&(deadline, _)| deadline)
    }

    /// Returns a message whose deadline has passed.
    pub(crate) fn overdue(&self, now: Moment) -> Option<&Message> {
        let &(_, seq) = self.deadlines.first().filter(|(deadline, _)| *deadline <= now)?;
        self.messages().find(|message| message.call.seq == seq)
    }

    /// Returns a message that needs this rank, or that could come from it.
    pub(crate) fn needs(&self, rank: Rank, from_any: FromAny) -> Option<&Message> {
        let counts_any = from_any == FromAny::Counts && self.from_any > 0;
        if self.peers[rank.index()].in_flight == 0 && !counts_any {
            return None;
        }
        let needs = |m: &&Message| !m.is_private && (m.peer == Some(rank) || (m.peer.is_none() && counts_any));
        self.waiting().find(needs)
    }

    /// Returns the peer of a point-to-point call in flight. The inner `None` means that the peer is not known yet.
    pub(crate) fn peer_of(&self, call: &CallState) -> Option<Option<Rank>> {
        self.calls.get(&call.seq).copied().filter(|_| call.collective.is_point_to_point())
    }

    // ---- posting

    pub(crate) fn post_send(&mut self, message: Message, to: Rank) {
        self.enter(&message);
        let peer = &mut self.peers[to.index()];
        let id = peer.next_id;
        peer.next_id += 1;
        if message.memory.is_staged() {
            self.staged_sends.insert((to, id));
        }
        let outgoing = Outgoing::new(message.memory.total(), message.window()).withholding(message.memory.withheld());
        peer.unbegun.push_back(Sending { message, id, outgoing });
        self.sendable.insert(to);
    }

    /// Posts a receive.
    ///
    /// # Errors
    /// `Mismatch` if the matching message has another size or dtype.
    pub(crate) fn post_receive(&mut self, message: Message, env: &mut RunContext<'_>) -> Result<()> {
        self.enter(&message);
        let Some(from) = self.first_unexpected(&message) else {
            self.posts += 1;
            let key = (message.tag, message.peer);
            self.posted.entry(key).or_default().push_back(Posted { order: self.posts, message });
            return Ok(());
        };
        let Some(unexpected) = take_first(&mut self.peers[from.index()].unexpected, message.tag) else { return Ok(()) };
        self.matched(message, from, &unexpected.header, unexpected.signature)?;
        self.on_first(from, &unexpected.header, &unexpected.data, env)
    }

    /// Returns the rank whose unexpected message the receive matches first.
    fn first_unexpected(&self, message: &Message) -> Option<Rank> {
        let ranks = match message.peer {
            Some(peer) => peer.0..peer.0 + 1,
            None => 0..self.peers.len() as u32,
        };
        let order_of = |rank: Rank| {
            self.step();
            Some((self.peers[rank.index()].unexpected.get(&message.tag)?.front()?.order, rank))
        };
        ranks.map(Rank).filter_map(order_of).min().map(|(_, rank)| rank)
    }

    /// Handles the first frame of a message.
    ///
    /// # Errors
    /// `Mismatch` if the receive that it matches has another size or dtype.
    pub(crate) fn on_begin(
        &mut self,
        from: Rank,
        header: &Header,
        signature: Signature,
        data: &[u8],
        env: &mut RunContext<'_>,
    ) -> Result<()> {
        let peer = &mut self.peers[from.index()];
        // Messages begin in issue order.
        if header.seq < peer.next_begin {
            return Err(Error::protocol(format!("rank {from} began message {} twice", header.seq)));
        }
        peer.next_begin = header.seq.saturating_add(1);
        if let Some(message) = self.take_posted(from, header.tag) {
            self.matched(message, from, header, signature)?;
            return self.on_first(from, header, data, env);
        }
        let order = self.arrivals;
        self.arrivals += 1;
        let unexpected = Unexpected { order, header: *header, signature, data: data.to_vec() };
        self.peers[from.index()].unexpected.entry(header.tag).or_default().push_back(unexpected);
        Ok(())
    }

    /// Takes the receive that was posted first among those that match a message.
    fn take_posted(&mut self, from: Rank, tag: u32) -> Option<Message> {
        let keys = [(tag, Some(from)), (tag, None)];
        let order_of = |key| {
            self.step();
            Some((self.posted.get(&key)?.front()?.order, key))
        };
        let (_, key) = keys.into_iter().filter_map(order_of).min()?;
        take_first(&mut self.posted, key).map(|posted| posted.message)
    }

    fn matched(&mut self, mut message: Message, from: Rank, header: &Header, signature: Signature) -> Result<()> {
        message.call.set_source(from, signature.reserved);
        let (sent, wanted) = (signature, message.signature);
        if let Some(error) = disagreement(from, header, (sent, wanted), (message.memory.total(), message.call.rank)) {
            // Put back, so that it fails together with everything else in the group.
            self.posted.entry((message.tag, message.peer)).or_default().push_front(Posted { order: 0, message });
            return Err(error.with_peer(from));
        }
        self.leave(&message);
        message.peer = Some(from);
        self.enter(&message);
        if message.memory.is_staged() {
            self.staged_receives.insert((from, header.seq));
        }
        let incoming = Incoming::new(message.memory.total(), message.window(), Ahead::Refused)
            .withholding(message.memory.withheld());
        self.peers[from.index()].receiving.insert(header.seq, Receiving { message, incoming });
        Ok(())
    }

    /// Handles the first bytes of a message that has just been matched.
    fn on_first(&mut self, from: Rank, header: &Header, data: &[u8], env: &mut RunContext<'_>) -> Result<()> {
        let wants_grant = header.flags & WANTS_GRANT != 0;
        self.on_part(from, header.seq, Part::First { wants_grant }, data, env)
    }

    /// Handles more payload of a matched message.
    ///
    /// # Errors
    /// `Protocol` if there is no matched message, or the payload is too long.
    pub(crate) fn on_data(&mut self, from: Rank, id: u64, data: &[u8], env: &mut RunContext<'_>) -> Result<()> {
        self.on_part(from, id, Part::Next, data, env)
    }

    fn on_part(&mut self, from: Rank, id: u64, part: Part, data: &[u8], env: &mut RunContext<'_>) -> Result<()> {
        self.step();
        let peer = &mut self.peers[from.index()];
        let Some(Receiving { message, incoming }) = peer.receiving.get_mut(&id) else {
            return Err(Error::protocol(format!("rank {from} sent data of message {id}, which has not begun")));
        };
        // Once a message is matched, the receiver's memory is available; of a staged message, its ring.
        let limit = Some(message.memory.limit());
        let at = match incoming.arrive(part, data, limit) {
            Ok(Arrival::Place { at }) => at,
            Ok(Arrival::Kept | Arrival::Refused) => {
                return Err(Error::protocol(format!(
                    "rank {from} sent bytes of message {id} that it was not granted; check that both ranks run the same version"
                )));
            }
            Err(Excess) => return Err(Error::protocol(format!("rank {from} sent too many bytes of message {id}"))),
        };
        let group = message.call.group_id;
        // The grant is sent first, so that the rest is in flight while these bytes are copied.
        grant(from, id, message, incoming, env);
        message.memory.write(at, data);
        message.memory.note_done(incoming.placed());
        if let Some(credit) = incoming.due_credit() {
            env.members.return_credit(from, credit, group, env.net);
        }
        if incoming.is_complete() {
            // Unpacked while the message is still recorded, because a panic fails the recorded messages.
            message.memory.unpack();
            if let Some(receiving) = peer.receiving.remove(&id) {
                self.staged_receives.remove(&(from, id));
                self.moved(receiving.message);
            }
        }
        Ok(())
    }

    pub(crate) fn on_grant(&mut self, to: Rank, id: u64, value: u64) {
        self.step();
        let peer = &mut self.peers[to.index()];
        if let Some(sending) = peer.begun.get_mut(&id) {
            sending.outgoing.on_grant(value);
            peer.ready.insert(id);
            self.sendable.insert(to);
        }
    }

    // ---- sending

    /// Sends everything that can be sent. Returns whether anything was sent.
    pub(crate) fn advance(&mut self, env: &mut RunContext<'_>) -> bool {
        let mut progressed = self.follow_copies(env);
        for to in self.sendable.iter().copied().collect::<SmallVec<[Rank; 16]>>() {
            let peer = &mut self.peers[to.index()];
            // Messages begin in issue order; data of several messages may interleave.
            while let Some(has_next) = peer.unbegun.len().checked_sub(1).map(|behind| behind > 0)
                && let Some(sending) = peer.unbegun.front_mut()
            {
                self.steps.set(self.steps.get() + 1);
                // A message whose bytes have not arrived yet must not hold up the messages behind it.
                if !(send_next(sending, to, env) || has_next && announce(sending, to, env)) {
                    break;
                }
                progressed = true;
                let Some(sending) = peer.unbegun.pop_front() else { break };
                if sending.outgoing.is_complete() {
                    self.staged_sends.remove(&(to, sending.id));
                    self.over.push(sending.message);
                } else {
                    peer.begun.insert(sending.id, sending);
                }
            }
            while let Some(&id) = peer.ready.first() {
                self.steps.set(self.steps.get() + 1);
                let Some(sending) = peer.begun.get_mut(&id) else {
                    peer.ready.remove(&id);
                    continue;
                };
                while send_next(sending, to, env) {
                    progressed = true;
                }
                // If bytes have yet to arrive, their arrival makes the message ready again.
                let awaits_copies = sending.outgoing.sent() + env.segment > sending.message.memory.limit()
                    && sending.message.memory.limit() < sending.message.memory.total();
                if sending.outgoing.is_granted() && !awaits_copies {
                    break;
                }
                peer.ready.remove(&id);
                if sending.outgoing.is_complete() {
                    progressed = true;
                    self.staged_sends.remove(&(to, id));
                    self.over.extend(peer.begun.remove(&id).map(|sending| sending.message));
                }
            }
            if peer.unbegun.is_empty() && peer.ready.is_empty() {
                self.sendable.remove(&to);
            }
            let mut over = std::mem::take(&mut self.over);
            over.drain(..).for_each(|message| self.moved(message));
            self.over = over;
        }
        // Copies of messages that have just moved their last byte may have ended before.
        progressed |= self.follow_copies(env);
        progressed
    }

    /// Takes the messages that have completed since the last call.
    pub(crate) fn take_done(&mut self) -> Vec<Message> {
        std::mem::take(&mut self.done)
    }

    /// Takes out everything in flight, and drops unexpected messages.
    pub(crate) fn take_all(&mut self) -> Vec<Message> {
        let mut all = std::mem::take(&mut self.done);
        all.append(&mut self.over);
        all.append(&mut self.copying);
        self.staged_sends.clear();
        self.staged_receives.clear();
        all.extend(std::mem::take(&mut self.posted).into_values().flatten().map(|posted| posted.message));
        for peer in &mut self.peers {
            all.extend(peer.unbegun.drain(..).map(|sending| sending.message));
            all.extend(std::mem::take(&mut peer.begun).into_values().map(|sending| sending.message));
            all.extend(std::mem::take(&mut peer.receiving).into_values().map(|receiving| receiving.message));
            peer.ready.clear();
            peer.unexpected.clear();
            peer.in_flight = 0;
        }
        self.sendable.clear();
        self.calls.clear();
        self.deadlines.clear();
        (self.from_any, self.private) = (0, 0);
        all
    }

    /// Returns whether a message with this tag waits for a receive.
    pub fn has_unexpected(&self, from: Rank, tag: u32) -> bool {
        self.peers[from.index()].unexpected.contains_key(&tag)
    }

    /// Returns whether there is a send that has not begun, to a rank that `is_meant` picks.
    pub(crate) fn has_sends_to(&self, is_meant: impl Fn(Rank) -> bool) -> bool {
        let mut ranks = (0..).map(Rank).zip(&self.peers);
        ranks.any(|(rank, peer)| !peer.unbegun.is_empty() && is_meant(rank))
    }

    /// Returns the messages in flight.
    pub(crate) fn messages(&self) -> impl Iterator<Item = &Message> {
        self.waiting().chain(&self.copying)
    }

    /// Returns the messages that have yet to move bytes.
    fn waiting(&self) -> impl Iterator<Item = &Message> {
        let of_peers = self.peers.iter().flat_map(|peer| {
            let sending = peer.unbegun.iter().chain(peer.begun.values()).map(|sending| &sending.message);
            sending.chain(peer.receiving.values().map(|receiving| &receiving.message))
        });
        let posted = self.posted.values().flatten().map(|posted| &posted.message);
        of_peers.chain(posted).inspect(|_| self.step())
    }
}

/// Whether receives from any source count as needing a rank.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum FromAny {
    Counts,
    DoesNot,
}

/// Takes the first entry of a key's queue. Empty queues are removed.
fn take_first<K: Ord, T>(queues: &mut BTreeMap<K, VecDeque<T>>, key: K) -> Option<T> {
    let Entry::Occupied(mut queue) = queues.entry(key) else { return None };
    let first = queue.get_mut().pop_front();
    if queue.get().is_empty() {
        queue.remove();
    }
    first
}

/// Sends the next bytes in one frame. Returns `false` if there is nothing to send now, or the link has no room.
fn send_next(sending: &mut Sending, to: Rank, env: &mut RunContext<'_>) -> bool {
    let Sending { message, outgoing, .. } = sending;
    let next = outgoing.next(message.memory.limit(), env.segment, |bytes| env.members.has_eager_room(to, bytes));
    next.is_some_and(|fragment| send(sending, &fragment, to, env))
}

/// Announces a message whose bytes cannot be sent yet. Returns `false` if it was announced before, or the link has no
/// room.
fn announce(sending: &mut Sending, to: Rank, env: &mut RunContext<'_>) -> bool {
    let awaits_copies = sending.message.memory.limit() < sending.message.memory.total().min(env.segment);
    let announcement = sending.outgoing.announcement().filter(|_| awaits_copies);
    announcement.is_some_and(|fragment| send(sending, &fragment, to, env))
}

fn send(sending: &mut Sending, fragment: &Fragment, to: Rank, env: &mut RunContext<'_>) -> bool {
    let Sending { message, id, outgoing } = sending;
    let has_left = env.send_fragment(
        to,
        fragment,
        &header(message, *id, fragment),
        fragment.is_first.then_some(&message.signature),
        |data| message.memory.read(outgoing.sent(), data),
    );
    if has_left {
        outgoing.note_sent(fragment);
        message.memory.note_done(outgoing.sent());
    }
    has_left
}

/// Grants the sender of a receive more bytes, if it may send more now.
fn grant(from: Rank, id: u64, message: &Message, incoming: &mut Incoming, env: &mut RunContext<'_>) {
    if let Some(value) = incoming.due_grant(Some(message.memory.limit()), env.segment, || 0) {
        let header = Header { group: message.call.group_id, seq: id, value, ..Header::new(Kind::P2pGrant) };
        env.net.send_control(env.members.peer(from), header, &[]);
    }
}

fn header(message: &Message, id: u64, fragment: &Fragment) -> Header {
    let mut header = Header::new(if fragment.is_first { Kind::P2pBegin } else { Kind::P2pData });
    header.flags = flags(fragment);
    header.group = message.call.group_id;
    header.seq = id;
    header.tag = message.tag;
    header.value = message.memory.total();
    header
}
