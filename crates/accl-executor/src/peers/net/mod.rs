//! The peers of this process. Each has one link, which all groups share and which is made when it is first needed.
//!
//! This module owns links, the queue of control frames that found no room, and the records of wanted links and of peers
//! that are gone. `polling` decides which links a progress pass polls. This module makes no link and knows no calls.
//! Read [`Net`] first.
//!
//! This file is long because all records of peers have one owner; its functions have a few lines each.

mod polling;

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use accl_types::{Error, Result};
use accl_wire::frame::{Header, Kind};
use accl_wire::{Answers, EndpointInfo, EventBitmap, Frame, FrameSlot, HEAD_BYTES, Link, Slot};

use super::traffic::Traffic;

/// Number of consecutive polls without a frame after which a link is armed. Posting an event costs the peer more than a
/// poll costs here.
const POLLS_BEFORE_ARMING: u32 = 256;

/// Index of a peer process in [`Net`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PeerId(u32);

/// How a peer process disconnected.
#[derive(Clone, Debug)]
pub enum Gone {
    /// The peer sent a disconnect message first.
    Left,
    /// The peer was lost without a disconnect message.
    Lost(Error),
}

/// A peer process and its link.
pub struct Peer {
    /// Link to the peer; `None` before it is made, and after the peer is gone.
    link: Option<Box<dyn Link>>,
    /// Whether the link was requested.
    is_wanted: bool,
    /// Reason why the requested link is not up yet.
    trouble: Option<String>,
    /// Whether the peer has yet to send its hello (the groups that it shares with this process): see
    /// [`Net::await_greeting`].
    is_to_greet: bool,
    /// Whether polling a link to the peer will cost no system call, according to its endpoint info.
    shares_memory: bool,
    /// Control frames that found no room, oldest first.
    outbox: VecDeque<([u8; HEAD_BYTES], Vec<u8>)>,
    /// Number of frames ever put into `outbox`.
    queued: u64,
    /// Value of `queued` after the latest frame that the peer needs even if this rank has left.
    relied_on: u64,
    info: EndpointInfo,
    has_disconnected: bool,
    /// Whether the disconnect message is only assumed, because no remaining process could have received it.
    is_disconnect_assumed: bool,
    gone: Option<Gone>,
    /// Whether a send found no room since the last pass.
    wants_room: bool,
    /// Slot of the event bitmap to which the events of its link are posted. `None` means no slot; the link is then
    /// always polled.
    slot: Option<Slot>,
    /// Whether passes poll its link.
    is_polled: bool,
    /// Number of consecutive polls that found nothing.
    idle_polls: u32,
    /// Whether a send waited for room when the link was last armed.
    is_armed_for_room: bool,
    /// Whether the peer is in `Net::dirty`, which a flush visits.
    is_dirty: bool,
    /// Whether the peer is in `Net::unanswered`.
    is_unanswered: bool,
    /// Time for which the peer's host was unresponsive at the last check; `None` if it was responsive.
    silent_for: Option<Duration>,
    /// Counters of control frames, and of groups that have ended. Existing groups count their own frames.
    traffic: Traffic,
}

impl Peer {
    /// Returns the endpoint info of the peer.
    pub fn info(&self) -> &EndpointInfo {
        &self.info
    }

    /// Returns how the peer disconnected; `None` while it exists.
    #[inline]
    pub fn gone(&self) -> Option<&Gone> {
        self.gone.as_ref()
    }

    /// Returns whether the disconnect message is only assumed, because no remaining process could have received it.
    pub(crate) fn is_disconnect_assumed(&self) -> bool {
        self.is_disconnect_assumed
    }

    /// Returns the time for which the peer's host was unresponsive at the last check; `None` if it was responsive.
    pub(crate) fn silent_for(&self) -> Option<Duration> {
        self.silent_for
    }

    /// Returns the counters of control frames, and of groups that have ended. Existing groups count their own frames.
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }
}

/// Position in the bytes sent to a peer, up to which this process's calls rely on delivery.
#[derive(Clone, Copy, Debug)]
pub struct Mark {
    peer: PeerId,
    /// Position in the committed bytes of the link.
    position: u64,
    /// Number of queued frames that must have left the outbox first; `None` if no frame is relied on.
    queued: Option<u64>,
}

impl Mark {
    /// Returns this mark without the frames that have found no room in a link, or have none.
    pub(crate) fn of_link_alone(self) -> Self {
        Self { queued: None, ..self }
    }
}

/// Head and payload of a frame that lies in a link, without the borrow.
type RawFrame = (NonNull<[u8; HEAD_BYTES]>, NonNull<[u8]>);

/// Fate of a frame after its handler returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameEnd {
    /// The frame was handled, and is released.
    Released,
    /// The frame stays on the link, and is delivered again.
    Held,
}

/// Passes the next frame of a peer to `handle`, which may send to that peer and lose it meanwhile. `net` returns the
/// net inside `state`. Returns `None` if there is no frame.
///
/// # Errors
/// Returns the errors of [`Link::peek`].
#[inline]
pub(crate) fn handle_frame<S>(
    state: &mut S,
    net: impl Fn(&mut S) -> &mut Net,
    id: PeerId,
    handle: impl FnOnce(&mut S, Frame<'_>) -> FrameEnd,
) -> Result<Option<FrameEnd>> {
    let Some((head, payload)) = net(state).begin_frame(id)? else { return Ok(None) };
    // SAFETY: the contract of `Link` keeps a frame unchanged until it is released, which only the end of this function
    // does. Until then the net keeps the link, even if the link is given up.
    let frame = unsafe { Frame { head: head.as_ref(), payload: payload.as_ref() } };
    let end = handle(state, frame);
    match end {
        FrameEnd::Released => net(state).end_frame(id),
        FrameEnd::Held => net(state).handling = None,
    }
    Ok(Some(end))
}

/// An out-of-band frame for a process that may not poll its link.
pub struct Note {
    /// Endpoint of the receiving process.
    pub to: EndpointInfo,
    /// Number of the group that the frame is about.
    pub group: u64,
    /// Head and payload of the frame.
    pub bytes: Vec<u8>,
}

/// All peers of this process.
pub struct Net {
    peers: Vec<Peer>,
    /// Peers with links.
    linked: Vec<PeerId>,
    /// Peers whose links the passes poll.
    polled: Vec<PeerId>,
    /// Event bitmap to which events of the other links are posted.
    bitmap: Option<Arc<dyn EventBitmap>>,
    by_slot: HashMap<Slot, PeerId>,
    /// Number of times that a link was polled so far.
    polls: u64,
    polls_before_arming: u32,
    /// Number of peers that have no link and are not gone.
    unlinked: usize,
    /// Whether links or notes were requested since the last [`Net::take_wanted`].
    has_wanted: bool,
    /// Peers whose links were requested since then.
    wanted: Vec<PeerId>,
    /// Out-of-band frames since then, for peers that may not poll their links.
    notes: Vec<Note>,
    /// Number of peers whose hello is awaited.
    to_greet: usize,
    /// Peers to which something was sent since the last flush, or that have not taken all of it.
    dirty: Vec<PeerId>,
    by_uuid: HashMap<[u8; 16], PeerId>,
    /// Peer whose frame is being handled.
    handling: Option<PeerId>,
    /// Link of that peer if it was given up meanwhile, because the frame lies in it.
    retired: Option<Box<dyn Link>>,
    /// Whether a send found no room since links were last armed.
    room_wanted: bool,
    /// Whether a send that waits for room must try again before links are armed: see [`Net::end_pass`].
    owes_pass: bool,
    /// Peers to which something was sent since their hosts were last seen to have everything.
    unanswered: Vec<PeerId>,
    /// Number of peers that are gone so far.
    departures: u64,
    /// Value of `departures` when absent peers were last looked for.
    departures_seen: u64,
    /// Number of links whose poll asks the system, unless it is known that nothing has arrived.
    streams: usize,
    /// Number of links on which a thread must sleep even while no call is in flight.
    listeners: usize,
    /// Time for which links may be left unpolled, as of their last arming. `None` if events announce everything.
    poll_interval: Option<Duration>,
}

impl Default for Net {
    fn default() -> Self {
        Self {
            peers: Vec::new(),
            linked: Vec::new(),
            polled: Vec::new(),
            bitmap: None,
            by_slot: HashMap::new(),
            polls: 0,
            polls_before_arming: POLLS_BEFORE_ARMING,
            unlinked: 0,
            has_wanted: false,
            wanted: Vec::new(),
            notes: Vec::new(),
            to_greet: 0,
            dirty: Vec::new(),
            by_uuid: HashMap::new(),
            handling: None,
            retired: None,
            room_wanted: false,
            owes_pass: false,
            unanswered: Vec::new(),
            departures: 0,
            departures_seen: 0,
            streams: 0,
            listeners: 0,
            poll_interval: None,
        }
    }
}

/// Adds a link to the polled links like [`Net::poll_link`], after a send found no room on it or it broke. It stays
/// armed, which does no harm: the link remembers what it refused until it is armed again.
fn poll_for_room(is_polled: &mut bool, polled: &mut Vec<PeerId>, id: PeerId) {
    if !std::mem::replace(is_polled, true) {
        polled.push(id);
    }
}

impl Net {
    /// Returns the peer with this identity, unless it is gone.
    pub fn find(&self, uuid: &[u8; 16]) -> Option<PeerId> {
        self.by_uuid.get(uuid).copied()
    }

    /// Adds a peer with this info, which need not have a link yet, or finds it. `shares_memory` says whether a link to
    /// it will use shared memory.
    pub fn introduce(&mut self, info: &EndpointInfo, shares_memory: bool) -> PeerId {
        if let Some(id) = self.find(&info.uuid) {
            return id;
        }
        let id = PeerId(self.peers.len() as u32);
        self.by_uuid.insert(info.uuid, id);
        self.unlinked += 1;
        self.peers.push(Peer {
            link: None,
            is_wanted: false,
            trouble: None,
            is_to_greet: false,
            shares_memory,
            outbox: VecDeque::new(),
            queued: 0,
            relied_on: 0,
            info: info.clone(),
            has_disconnected: false,
            is_disconnect_assumed: false,
            gone: None,
            wants_room: false,
            slot: None,
            is_polled: false,
            idle_polls: 0,
            is_armed_for_room: false,
            is_dirty: false,
            is_unanswered: false,
            silent_for: None,
            traffic: Traffic::default(),
        });
        id
    }

    /// Gives a peer its link, unless it has one or is gone. The poller must already watch the link's descriptors.
    /// Events of the link are posted at `slot` of the event bitmap.
    pub fn attach(&mut self, id: PeerId, link: Box<dyn Link>, slot: Option<Slot>) {
        let peer = &mut self.peers[id.0 as usize];
        if peer.link.is_some() || peer.gone.is_some() {
            return;
        }
        self.streams += usize::from(!link.polls_without_syscall());
        self.listeners += usize::from(link.needs_listener());
        self.unlinked -= 1;
        (peer.link, peer.slot, peer.is_polled) = (Some(link), slot, true);
        self.linked.push(id);
        self.polled.push(id);
        if let Some(slot) = slot {
            self.by_slot.insert(slot, id);
        }
    }

    /// Returns whether a peer has a link.
    pub fn is_linked(&self, id: PeerId) -> bool {
        self.peer(id).link.is_some()
    }

    /// Returns whether a peer may still get a link.
    pub fn is_unlinked(&self, id: PeerId) -> bool {
        let peer = self.peer(id);
        peer.link.is_none() && peer.gone.is_none()
    }

    /// Returns whether there are peers that may still get a link.
    #[inline]
    pub(crate) fn has_unlinked(&self) -> bool {
        self.unlinked > 0
    }

    /// Records that a peer with a new link is about to send its hello. Passes wait for it even if this process has no
    /// other work.
    pub(crate) fn await_greeting(&mut self, id: PeerId) {
        if self.is_linked(id) {
            self.to_greet += usize::from(!std::mem::replace(&mut self.peer_mut(id).is_to_greet, true));
        }
    }

    /// Records that a peer has sent its hello.
    pub(crate) fn end_greeting(&mut self, id: PeerId) {
        self.to_greet -= usize::from(std::mem::take(&mut self.peer_mut(id).is_to_greet));
    }

    /// Returns whether the hello of this peer is awaited.
    pub(crate) fn awaits_greeting_of(&self, id: PeerId) -> bool {
        self.peer(id).is_to_greet
    }

    /// Returns whether the hello of any peer is awaited.
    pub(crate) fn awaits_greeting(&self) -> bool {
        self.to_greet > 0
    }

    /// Records why a wanted peer has no link yet.
    pub fn set_trouble(&mut self, uuid: &[u8; 16], why: &str) {
        if let Some(id) = self.find(uuid) {
            self.peer_mut(id).trouble = Some(why.to_owned());
        }
    }

    /// Returns why a peer that may still get a link has none, if a reason was recorded.
    pub(crate) fn trouble(&self, id: PeerId) -> Option<&str> {
        self.peer(id).trouble.as_deref().filter(|_| self.is_unlinked(id))
    }

    /// Requests a link to a peer, unless there is one. A thread that waits for a peer needs the link to learn that the
    /// peer ended.
    #[cold]
    pub fn want(&mut self, id: PeerId) {
        if self.is_unlinked(id) && !std::mem::replace(&mut self.peer_mut(id).is_wanted, true) {
            self.wanted.push(id);
            self.has_wanted = true;
        }
    }

    /// Returns whether [`Net::take_wanted`] would return anything.
    #[inline]
    pub(crate) fn has_wanted(&self) -> bool {
        self.has_wanted
    }

    /// Queues an out-of-band frame for a peer.
    pub(crate) fn note(&mut self, id: PeerId, header: Header, payload: &[u8]) {
        let peer = self.peer(id);
        if peer.gone.is_none() {
            let bytes = [&header.to_bytes()[..], payload].concat();
            let note = Note { to: peer.info.clone(), group: header.group, bytes };
            self.notes.push(note);
            self.has_wanted = true;
        }
    }

    /// Takes the infos of the peers whose links were requested since the last call, and the out-of-band frames to send.
    pub fn take_wanted(&mut self) -> (Vec<EndpointInfo>, Vec<Note>) {
        self.has_wanted = false;
        let wanted = std::mem::take(&mut self.wanted).into_iter().map(|id| self.peer(id).info.clone()).collect();
        (wanted, std::mem::take(&mut self.notes))
    }

    /// Adds a peer with its link: see [`Net::attach`].
    pub fn add(&mut self, info: &EndpointInfo, link: Box<dyn Link>, slot: Option<Slot>) -> PeerId {
        let shares_memory = link.polls_without_syscall();
        let id = self.introduce(info, shares_memory);
        self.attach(id, link, slot);
        id
    }

    /// Returns the id of a peer that does not exist, for tests.
    #[cfg(test)]
    pub(crate) fn add_stranger(&mut self) -> PeerId {
        PeerId(self.peers.len() as u32)
    }

    /// Returns the peers with links.
    pub fn linked(&self) -> &[PeerId] {
        &self.linked
    }

    /// Returns the record of a peer.
    #[inline]
    pub fn peer(&self, id: PeerId) -> &Peer {
        &self.peers[id.0 as usize]
    }

    fn peer_mut(&mut self, id: PeerId) -> &mut Peer {
        &mut self.peers[id.0 as usize]
    }

    fn note_dirty(&mut self, id: PeerId) {
        if !std::mem::replace(&mut self.peer_mut(id).is_dirty, true) {
            self.dirty.push(id);
        }
    }

    /// Calls `f` for every link.
    fn each_link(&mut self, mut f: impl FnMut(&mut (dyn Link + 'static))) {
        for id in &self.linked {
            if let Some(link) = &mut self.peers[id.0 as usize].link {
                f(&mut **link);
            }
        }
    }

    /// Returns the link to a peer. Outside this module, only the fast path uses it, by functions that change no record
    /// of the net: [`Link::await_frame`], [`Link::commit_quietly`], [`Link::release_quietly`] and [`Link::wake_peer`].
    #[inline]
    pub(crate) fn link(&mut self, id: PeerId) -> Option<&mut (dyn Link + 'static)> {
        self.peers[id.0 as usize].link.as_deref_mut()
    }

    /// Returns the next frame of a peer, without the borrow. The frame stays in place until [`Net::end_frame`], even if
    /// the link is given up meanwhile.
    #[inline]
    fn begin_frame(&mut self, id: PeerId) -> Result<Option<RawFrame>> {
        self.retired = None;
        let Some(link) = self.link(id) else { return Ok(None) };
        let frame = link.peek()?.map(|frame| (frame.head.into(), frame.payload.into()));
        self.handling = frame.and(Some(id));
        Ok(frame)
    }

    /// Ends the handling of a frame.
    #[inline]
    fn end_frame(&mut self, id: PeerId) {
        self.handling = None;
        self.retired = None;
        self.release(id);
    }

    /// Reserves a slot for a frame with a payload of `payload_bytes` bytes. Returns `None` if there is no room now, no
    /// link yet, or the peer is gone.
    #[inline(always)]
    pub(crate) fn reserve(&mut self, id: PeerId, payload_bytes: usize) -> Option<FrameSlot<'_>> {
        if self.has_unlinked() {
            self.want(id);
        }
        let peer = &mut self.peers[id.0 as usize];
        let link = peer.link.as_deref_mut()?;
        // `check` detects a broken link; here it only has no room.
        match link.try_reserve(payload_bytes) {
            Ok(Some(slot)) => Some(slot),
            Ok(None) | Err(_) => {
                peer.wants_room = true;
                self.room_wanted = true;
                poll_for_room(&mut peer.is_polled, &mut self.polled, id);
                None
            }
        }
    }

    #[inline]
    pub(crate) fn commit(&mut self, id: PeerId) {
        if let Some(link) = self.link(id) {
            link.commit();
            self.note_dirty(id);
        }
    }

    /// Records that a peer has sent a disconnect message, or that this is only assumed.
    pub(crate) fn note_disconnect(&mut self, id: PeerId, is_assumed: bool) {
        let peer = self.peer_mut(id);
        (peer.has_disconnected, peer.is_disconnect_assumed) = (true, is_assumed);
    }

    /// Adds the counters of a group that has ended.
    pub(crate) fn add_traffic(&mut self, id: PeerId, traffic: Traffic) {
        let total = &mut self.peer_mut(id).traffic;
        *total = total.plus(traffic);
    }

    /// Counts a frame from a peer that belongs to no group's calls.
    pub(crate) fn count_received(&mut self, id: PeerId, payload_bytes: usize) {
        self.peer_mut(id).traffic.add_received(payload_bytes as u64);
    }

    /// Returns whether no event announces what arrives over this peer's link while a call is in flight.
    pub(crate) fn is_polled(&self, id: PeerId) -> bool {
        self.peer(id).link.as_ref().is_some_and(|link| link.is_polled())
    }

    /// Returns whether polling this peer's link costs no system call, or will cost none.
    pub(crate) fn polls_without_syscall(&self, id: PeerId) -> bool {
        let peer = self.peer(id);
        match &peer.link {
            Some(link) => link.polls_without_syscall(),
            None => peer.shares_memory && peer.gone.is_none(),
        }
    }

    /// Returns whether the system must be asked for events of some links.
    pub fn has_streams(&self) -> bool {
        self.streams > 0
    }

    /// Makes the next pass poll this peer's link, and ask the system even if no event was seen.
    pub fn force_poll(&mut self, id: PeerId) {
        if let Some(link) = self.link(id) {
            link.force_poll();
            self.poll_link(id);
        }
    }

    /// Does the same as [`Net::force_poll`] if the last poll of this peer's link found something.
    pub(crate) fn force_poll_if_flowing(&mut self, id: PeerId) {
        let peer = self.peer(id);
        if peer.is_polled && peer.idle_polls == 0 {
            self.force_poll(id);
        }
    }

    /// Does the same as [`Net::force_poll`] for all peers. A system call for each of them follows.
    pub fn force_poll_all(&mut self) {
        for index in 0..self.linked.len() {
            self.force_poll(self.linked[index]);
        }
    }

    /// Frees the slot of the peeked frame.
    #[inline]
    pub(crate) fn release(&mut self, id: PeerId) {
        if let Some(link) = self.link(id) {
            link.release();
        }
    }

    /// Sends a control frame now, or as soon as there is room. Control frames stay in order.
    pub(crate) fn send_control(&mut self, id: PeerId, header: Header, payload: &[u8]) {
        if self.peer(id).gone.is_some() {
            return;
        }
        self.want(id);
        if self.peer(id).outbox.is_empty()
            && let Some(slot) = self.reserve(id, payload.len())
        {
            header.emit(slot.head);
            slot.payload.copy_from_slice(payload);
            self.commit(id);
            self.peer_mut(id).traffic.add_sent(payload.len() as u64);
            return;
        }
        self.peer_mut(id).traffic.stalls += 1;
        let peer = self.peer_mut(id);
        peer.outbox.push_back((header.to_bytes(), payload.to_vec()));
        peer.queued += 1;
        // If this rank leaves, no peer needs its credits and grants any more. Answers to probes, and packets, are still
        // needed.
        if matches!(header.kind, Kind::Begin | Kind::Packets) {
            peer.relied_on = peer.queued;
        }
        self.note_dirty(id);
    }

    /// Sends like [`Net::send_control`] if there is a link. If there is none, the peer learns the same when a link is
    /// made.
    pub(crate) fn send_if_linked(&mut self, id: PeerId, header: Header, payload: &[u8]) {
        if self.is_linked(id) {
            self.send_control(id, header, payload);
        }
    }

    /// Sends queued control frames and pushes buffered bytes. Returns whether a frame left the queue, and whether
    /// nothing is left.
    fn flush(&mut self, id: PeerId) -> (bool, bool) {
        let peer = &mut self.peers[id.0 as usize];
        let Some(link) = peer.link.as_mut() else { return (false, peer.outbox.is_empty()) };
        let (mut moved, mut is_broken) = (false, false);
        while let Some((head, payload)) = peer.outbox.front() {
            let slot = match link.try_reserve(payload.len()) {
                Ok(Some(slot)) => slot,
                Ok(None) => {
                    peer.wants_room = true;
                    self.room_wanted = true;
                    break;
                }
                // The link is broken or closed, and accepts nothing more.
                Err(_) => {
                    is_broken = true;
                    peer.outbox.clear();
                    break;
                }
            };
            *slot.head = *head;
            slot.payload.copy_from_slice(payload);
            peer.traffic.add_sent(payload.len() as u64);
            link.commit();
            peer.outbox.pop_front();
            moved = true;
        }
        // `check` or `peek` returns the error again and handles it. Nothing more can be sent then.
        let flushed = link.flush();
        let is_clean = matches!(flushed, Ok(true) | Err(_)) && peer.outbox.is_empty();
        if link.awaits_answer() && !std::mem::replace(&mut peer.is_unanswered, true) {
            self.unanswered.push(id);
        }
        if peer.wants_room || is_broken || flushed.is_err() {
            poll_for_room(&mut peer.is_polled, &mut self.polled, id);
        }
        (moved, is_clean)
    }

    /// Returns the number of control frames that wait for room.
    pub(crate) fn queued(&self) -> usize {
        self.peers.iter().map(|peer| peer.outbox.len()).sum()
    }

    /// Sends queued control frames and pushes buffered bytes of all peers. Returns whether a frame left a queue.
    pub fn flush_all(&mut self) -> bool {
        let mut moved = false;
        let mut index = 0;
        while let Some(&id) = self.dirty.get(index) {
            let (has_moved, is_clean) = self.flush(id);
            moved |= has_moved;
            if is_clean {
                self.peer_mut(id).is_dirty = false;
                self.dirty.swap_remove(index);
            } else {
                index += 1;
            }
        }
        moved
    }

    /// Flushes like [`Net::flush_all`], after a panic. If flushing panics again, returns the peer that caused it.
    pub(crate) fn flush_guarded(&mut self) -> std::result::Result<(), PeerId> {
        for id in self.dirty.clone() {
            catch_unwind(AssertUnwindSafe(|| self.flush(id))).map_err(|_| id)?;
        }
        Ok(())
    }

    /// Returns whether bytes have yet to leave this process. Their calls may already be done.
    pub fn has_unsent(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Returns whether a thread must drive progress even if no call is in flight.
    pub fn wants_driver(&self) -> bool {
        self.has_unsent() || self.listeners > 0
    }

    /// Returns a mark for everything sent to a peer so far.
    pub fn mark(&self, peer: PeerId) -> Mark {
        Mark { peer, position: self.position(peer), queued: self.has_queued(peer).then_some(self.peer(peer).relied_on) }
    }

    fn position(&self, peer: PeerId) -> u64 {
        self.peer(peer).link.as_ref().map_or(0, |link| link.position())
    }

    fn has_queued(&self, peer: PeerId) -> bool {
        let peer = self.peer(peer);
        peer.queued - (peer.outbox.len() as u64) < peer.relied_on
    }

    /// Returns the peers without a link that have queued frames on which they rely.
    pub fn unlinked_with_queue(&self) -> Vec<PeerId> {
        let all = (0..self.peers.len() as u32).map(PeerId);
        all.filter(|&id| self.is_unlinked(id) && self.has_queued(id)).collect()
    }

    /// Returns whether the peer's host has everything sent before the mark, or can never get it.
    pub fn is_delivered(&mut self, mark: &mut Mark) -> bool {
        if let Some(queued) = mark.queued {
            let peer = self.peer(mark.peer);
            if peer.queued - (peer.outbox.len() as u64) < queued {
                return false;
            }
            *mark = Mark { position: self.position(mark.peer), queued: None, ..*mark };
        }
        self.link(mark.peer).is_none_or(|link| link.is_delivered(mark.position))
    }

    /// Returns whether any peer's host has yet to acknowledge something.
    pub(crate) fn awaits_answers(&self) -> bool {
        !self.unanswered.is_empty()
    }

    /// Returns the peers whose hosts are unresponsive, and for how long.
    pub(crate) fn take_unresponsive(&mut self) -> Vec<(PeerId, Duration)> {
        let mut silent = Vec::new();
        let mut unanswered = std::mem::take(&mut self.unanswered);
        unanswered.retain(|&id| {
            let answers = self.link(id).map_or(Answers::Complete, Link::answers);
            let peer = self.peer_mut(id);
            peer.silent_for = match answers {
                Answers::Overdue(since) => Some(since),
                Answers::Complete | Answers::Awaited => None,
            };
            silent.extend(peer.silent_for.map(|since| (id, since)));
            peer.is_unanswered = answers != Answers::Complete;
            peer.is_unanswered
        });
        self.unanswered = unanswered;
        silent
    }

    /// Checks whether the peer still exists. The error describes how it disconnected.
    pub(crate) fn check(&mut self, id: PeerId) -> Result<()> {
        self.polls += 1;
        match self.link(id) {
            Some(link) => link.check_peer(),
            None => Ok(()),
        }
    }

    /// Marks a peer as vanished: dropping its link then does not wait for bytes in flight.
    pub(crate) fn abandon(&mut self, id: PeerId) {
        if let Some(link) = self.link(id) {
            link.abandon();
        }
    }

    /// Records that a peer is gone, and drops its link. The next look for departures fails the calls that need the
    /// peer.
    pub fn mark_gone(&mut self, id: PeerId, error: Error) {
        self.unlinked -= usize::from(self.is_unlinked(id));
        self.end_greeting(id);
        let peer = self.peer_mut(id);
        let is_new = peer.gone.is_none();
        if is_new {
            peer.gone = Some(if peer.has_disconnected { Gone::Left } else { Gone::Lost(error) });
        }
        let link = peer.link.take();
        let (slot, was_polled) = (peer.slot.take(), std::mem::take(&mut peer.is_polled));
        peer.outbox.clear();
        let uuid = peer.info.uuid;
        if std::mem::take(&mut peer.is_dirty) {
            self.dirty.retain(|&dirty| dirty != id);
        }
        if was_polled {
            self.polled.retain(|&polled| polled != id);
        }
        // Another link may have the slot by now.
        if let Some(slot) = slot.filter(|slot| self.by_slot.get(slot) == Some(&id)) {
            self.by_slot.remove(&slot);
        }
        if let Some(link) = &link {
            self.streams -= usize::from(!link.polls_without_syscall());
            self.listeners -= usize::from(link.needs_listener());
            self.linked.retain(|&linked| linked != id);
        }
        if self.handling == Some(id) && link.is_some() {
            self.retired = link;
        }
        if self.by_uuid.get(&uuid) == Some(&id) {
            self.by_uuid.remove(&uuid);
        }
        self.departures += u64::from(is_new);
    }

    /// Returns the number of peers that are gone so far.
    pub fn departures(&self) -> u64 {
        self.departures
    }

    /// Returns whether a peer has gone since the last call.
    pub(crate) fn take_departures(&mut self) -> bool {
        std::mem::replace(&mut self.departures_seen, self.departures) != self.departures
    }

    /// Returns the process with this identity if it was a peer and is gone.
    pub fn gone(&self, uuid: &[u8; 16]) -> Option<PeerId> {
        if self.by_uuid.contains_key(uuid) {
            return None;
        }
        let is_it = |peer: &Peer| peer.info.uuid == *uuid;
        self.peers.iter().rposition(is_it).map(|index| PeerId(index as u32))
    }

    /// Returns why a peer is gone; `None` if it is not.
    pub fn why_gone(&self, id: PeerId) -> Option<String> {
        match self.peer(id).gone.as_ref()? {
            Gone::Left => Some("it has left".to_owned()),
            Gone::Lost(error) => Some(error.message.clone()),
        }
    }

    /// Returns host and process of a peer, for messages: `host worker-3, pid 4711`.
    pub fn host_and_pid(&self, id: PeerId) -> String {
        let info = &self.peer(id).info;
        format!("host {}, pid {}", info.hostname, info.pid)
    }

    /// Returns transport and addresses of a peer's link.
    pub fn describe(&self, id: PeerId) -> String {
        let peer = self.peer(id);
        let without = if peer.gone.is_some() { "no link" } else { "no link yet" };
        peer.link.as_ref().map_or_else(|| without.to_owned(), |link| link.describe())
    }

    /// Returns transport and addresses of a peer's link, and the number of system calls made for it; `None` without a
    /// link.
    pub fn link_of(&self, id: PeerId) -> Option<(String, u64)> {
        self.peer(id).link.as_ref().map(|link| (link.describe(), link.system_calls()))
    }

    /// Returns all peers, including those that are gone.
    pub fn all(&self) -> impl Iterator<Item = PeerId> + use<> {
        (0..self.peers.len() as u32).map(PeerId)
    }

    /// Announces to all peers that this process sends nothing more.
    pub fn close_all(&mut self) {
        self.each_link(|link| {
            let _ = link.flush();
            link.close();
            link.force_poll();
            // Closing a socket with unread bytes resets the connection, which would discard bytes in flight to the
            // peer.
            while let Ok(Some(_)) = link.peek() {
                link.release();
            }
        });
    }
}
