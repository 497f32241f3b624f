//! The peers of this process: one link each, shared by all groups, from when somebody first wants it.
//!
//! Owns links, the queue of control frames that found no room, which links are wanted, and the record of who is gone; which of the links
//! passes look at is in `polling`. Makes no link, and knows no calls. Read [`Net`] first.

mod polling;

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use accl_types::{Error, Result};
use accl_wire::frame::{Header, Kind};
use accl_wire::{Answers, EndpointInfo, Frame, HEAD_BYTES, Link, NewsBoard, Place, Slot};

use super::traffic::Traffic;

/// Looks in a row that find nothing before a link is armed: to tell of what comes next costs the peer more than a look costs here.
const LOOKS_BEFORE_ARMING: u32 = 256;

/// Index of a peer process in [`Net`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PeerId(u32);

/// Whether and how a peer process has gone.
#[derive(Clone, Debug)]
pub enum Gone {
    /// It said goodbye first.
    Left,
    /// Without a word.
    Lost(Error),
}

pub struct Peer {
    /// `None` before it is made, and after the peer has gone.
    link: Option<Box<dyn Link>>,
    /// The link has been asked for.
    is_wanted: bool,
    /// Why that takes long.
    trouble: Option<String>,
    /// It has yet to say in which groups it has this process: see [`Net::await_greeting`].
    is_to_greet: bool,
    /// A link to it will cost no system call to look at, as far as its info says.
    shares_memory: bool,
    /// Control frames for which there was no room, oldest first.
    outbox: VecDeque<([u8; HEAD_BYTES], Vec<u8>)>,
    /// Frames that were ever put there, and those until the latest that another rank relies on although this one has left.
    queued: u64,
    relied_on: u64,
    info: EndpointInfo,
    said_goodbye: bool,
    /// Nobody was left who could have heard its goodbye.
    is_goodbye_assumed: bool,
    gone: Option<Gone>,
    /// A send found no room since the last pass.
    wants_room: bool,
    /// Where its news are posted. `None`: nowhere, and it is always polled.
    slot: Option<Slot>,
    /// Passes look at its link.
    is_polled: bool,
    /// Looks in a row that have found nothing.
    idle_looks: u32,
    /// When it was armed last, a send waited for room.
    is_armed_for_room: bool,
    /// It is among those that a flush looks at.
    is_dirty: bool,
    /// It is among those whose hosts have yet to answer.
    is_unanswered: bool,
    /// For how long its host has not answered, when that was last looked at.
    silent_for: Option<Duration>,
    /// Of control frames, and of groups that have ended; those that there are count their own.
    traffic: Traffic,
}

impl Peer {
    /// Who it is.
    pub fn info(&self) -> &EndpointInfo {
        &self.info
    }

    /// How it went, once it has.
    #[inline]
    pub fn gone(&self) -> Option<&Gone> {
        self.gone.as_ref()
    }

    /// Nobody was left who could have heard its goodbye.
    pub(crate) fn is_goodbye_assumed(&self) -> bool {
        self.is_goodbye_assumed
    }

    /// For how long its host has not answered, when that was last looked at.
    pub(crate) fn silent_for(&self) -> Option<Duration> {
        self.silent_for
    }

    /// Of control frames, and of groups that have ended; those that there are count their own.
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }
}

/// How much of what this process sent to a peer its calls rely on.
#[derive(Clone, Copy, Debug)]
pub struct Mark {
    peer: PeerId,
    /// In what the link carries.
    position: u64,
    /// Frames that have to leave the queue before; `None`: none.
    queued: Option<u64>,
}

impl Mark {
    /// What has yet to find room in a link, or has none, does not count.
    pub(crate) fn of_link_alone(self) -> Self {
        Self { queued: None, ..self }
    }
}

/// A frame that lies in a link, without the borrow: its head and its payload.
type RawFrame = (NonNull<[u8; HEAD_BYTES]>, NonNull<[u8]>);

/// What becomes of a frame when it has been looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameEnd {
    /// It has been handled.
    Released,
    /// It stays where it is, and comes again.
    Held,
}

/// Hands the next frame of a peer to `handle`, which may send to that peer and lose it meanwhile. `net` finds the net of its state.
/// `None`: nothing has come.
///
/// # Errors
/// As [`Link::peek`].
#[inline]
pub(crate) fn handle_frame<S>(
    state: &mut S,
    net: impl Fn(&mut S) -> &mut Net,
    id: PeerId,
    handle: impl FnOnce(&mut S, Frame<'_>) -> FrameEnd,
) -> Result<Option<FrameEnd>> {
    let Some((head, payload)) = net(state).begin_frame(id)? else { return Ok(None) };
    // SAFETY: links promise that a frame stays unchanged until it is released, which only the end of this function does; until then the
    // net keeps the link, also when it is given up.
    let frame = unsafe { Frame { head: head.as_ref(), payload: payload.as_ref() } };
    let end = handle(state, frame);
    match end {
        FrameEnd::Released => net(state).end_frame(id),
        FrameEnd::Held => net(state).handling = None,
    }
    Ok(Some(end))
}

/// A frame that is sent besides the link, to a process that may not look at it.
pub struct Note {
    /// The process.
    pub to: EndpointInfo,
    /// The number of the group that it is about.
    pub group: u64,
    /// Head and payload.
    pub bytes: Vec<u8>,
}

/// All peers of this process.
pub struct Net {
    peers: Vec<Peer>,
    /// Those with links.
    linked: Vec<PeerId>,
    /// Those whose links passes look at.
    polled: Vec<PeerId>,
    /// Where news of the others are posted.
    board: Option<Arc<dyn NewsBoard>>,
    by_slot: HashMap<Slot, PeerId>,
    /// How often a link has been looked at so far.
    looks: u64,
    looks_before_arming: u32,
    /// Those without that have not gone.
    unlinked: usize,
    /// Links or notes have been asked for since whoever makes them was told.
    has_wanted: bool,
    /// Those whose links have been.
    wanted: Vec<PeerId>,
    /// Frames for peers that may look at no link, since whoever sends them was told.
    notes: Vec<Note>,
    /// Those whose greeting is awaited.
    to_greet: usize,
    /// Those that were given something since the last flush, or have not taken all of it.
    dirty: Vec<PeerId>,
    by_uuid: HashMap<[u8; 16], PeerId>,
    /// The peer of which a frame is being handled, and its link if it was given up meanwhile: the frame lies in it.
    handling: Option<PeerId>,
    retired: Option<Box<dyn Link>>,
    /// Some send found no room since links were last armed.
    room_wanted: bool,
    /// A send that waits for room has to try again before links are armed: see [`Net::end_pass`].
    owes_pass: bool,
    /// Those to which something was sent since their hosts were last seen to have everything.
    unanswered: Vec<PeerId>,
    /// Peers that have gone so far.
    departures: u64,
    /// As `departures`, when absentees were last looked for.
    departures_seen: u64,
    /// Links whose look asks the system, unless it is known that nothing has come.
    streams: usize,
    /// Links that somebody must sleep on even while no call is in flight.
    listeners: usize,
    /// How long the links may be left alone, as they were last told that the driver sleeps: `None` when events tell of everything.
    poll_interval: Option<Duration>,
}

impl Default for Net {
    fn default() -> Self {
        Self {
            peers: Vec::new(),
            linked: Vec::new(),
            polled: Vec::new(),
            board: None,
            by_slot: HashMap::new(),
            looks: 0,
            looks_before_arming: LOOKS_BEFORE_ARMING,
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

/// As [`Net::poll_link`], of a link on which a send has found no room, or that is broken: it stays armed, which does no harm, for what it was
/// refused is remembered until it is armed again.
fn poll_for_room(is_polled: &mut bool, polled: &mut Vec<PeerId>, id: PeerId) {
    if !std::mem::replace(is_polled, true) {
        polled.push(id);
    }
}

impl Net {
    /// The peer with this identity, unless it has gone.
    pub fn find(&self, uuid: &[u8; 16]) -> Option<PeerId> {
        self.by_uuid.get(uuid).copied()
    }

    /// The peer with this info, which need not have a link yet. `shares_memory`: one to it will be over shared memory.
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
            said_goodbye: false,
            is_goodbye_assumed: false,
            gone: None,
            wants_room: false,
            slot: None,
            is_polled: false,
            idle_looks: 0,
            is_armed_for_room: false,
            is_dirty: false,
            is_unanswered: false,
            silent_for: None,
            traffic: Traffic::default(),
        });
        id
    }

    /// Gives a peer its link, unless it has one or has gone. What the link waits for is watched already; its news are posted at `slot`
    /// of the board.
    pub fn attach(&mut self, id: PeerId, link: Box<dyn Link>, slot: Option<Slot>) {
        let peer = &mut self.peers[id.0 as usize];
        if peer.link.is_some() || peer.gone.is_some() {
            return;
        }
        self.streams += usize::from(!link.is_cheap_to_look_at());
        self.listeners += usize::from(link.needs_listener());
        self.unlinked -= 1;
        (peer.link, peer.slot, peer.is_polled) = (Some(link), slot, true);
        self.linked.push(id);
        self.polled.push(id);
        if let Some(slot) = slot {
            self.by_slot.insert(slot, id);
        }
    }

    /// Whether a peer has a link.
    pub fn is_linked(&self, id: PeerId) -> bool {
        self.peer(id).link.is_some()
    }

    /// Whether a peer may get a link yet.
    pub fn is_unlinked(&self, id: PeerId) -> bool {
        let peer = self.peer(id);
        peer.link.is_none() && peer.gone.is_none()
    }

    /// Whether there are peers that may get a link yet.
    #[inline]
    pub(crate) fn has_unlinked(&self) -> bool {
        self.unlinked > 0
    }

    /// A peer with a new link is about to greet: this process may have nothing else to do, and looks for it all the same.
    pub(crate) fn await_greeting(&mut self, id: PeerId) {
        if self.is_linked(id) {
            self.to_greet += usize::from(!std::mem::replace(&mut self.peer_mut(id).is_to_greet, true));
        }
    }

    /// A peer has greeted.
    pub(crate) fn end_greeting(&mut self, id: PeerId) {
        self.to_greet -= usize::from(std::mem::take(&mut self.peer_mut(id).is_to_greet));
    }

    /// Whether this peer's greeting is.
    pub(crate) fn awaits_greeting_of(&self, id: PeerId) -> bool {
        self.peer(id).is_to_greet
    }

    /// Whether some peer's greeting is awaited.
    pub(crate) fn awaits_greeting(&self) -> bool {
        self.to_greet > 0
    }

    /// Why a peer that is wanted has no link yet.
    pub fn set_trouble(&mut self, uuid: &[u8; 16], why: &str) {
        if let Some(id) = self.find(uuid) {
            self.peer_mut(id).trouble = Some(why.to_owned());
        }
    }

    /// Why a peer that may get a link has none, if that takes long.
    pub(crate) fn trouble(&self, id: PeerId) -> Option<&str> {
        self.peer(id).trouble.as_deref().filter(|_| self.is_unlinked(id))
    }

    /// Asks for a link to a peer, unless there is one: whoever waits for a peer learns of its end on their link.
    #[cold]
    pub fn want(&mut self, id: PeerId) {
        if self.is_unlinked(id) && !std::mem::replace(&mut self.peer_mut(id).is_wanted, true) {
            self.wanted.push(id);
            self.has_wanted = true;
        }
    }

    /// Whether there is something for [`Net::take_wanted`].
    #[inline]
    pub(crate) fn has_wanted(&self) -> bool {
        self.has_wanted
    }

    /// Has a frame sent besides the link.
    pub(crate) fn note(&mut self, id: PeerId, header: Header, payload: &[u8]) {
        let peer = self.peer(id);
        if peer.gone.is_none() {
            let bytes = [&header.to_bytes()[..], payload].concat();
            let note = Note { to: peer.info.clone(), group: header.group, bytes };
            self.notes.push(note);
            self.has_wanted = true;
        }
    }

    /// Infos of the peers whose links have been asked for since this was last asked, and what is to be sent besides the links.
    pub fn take_wanted(&mut self) -> (Vec<EndpointInfo>, Vec<Note>) {
        self.has_wanted = false;
        let wanted = std::mem::take(&mut self.wanted).into_iter().map(|id| self.peer(id).info.clone()).collect();
        (wanted, std::mem::take(&mut self.notes))
    }

    /// Adds a peer with its link: see [`Net::attach`].
    pub fn add(&mut self, info: &EndpointInfo, link: Box<dyn Link>, slot: Option<Slot>) -> PeerId {
        let shares_memory = link.is_cheap_to_look_at();
        let id = self.introduce(info, shares_memory);
        self.attach(id, link, slot);
        id
    }

    /// A peer without a link, for tests.
    #[cfg(test)]
    pub(crate) fn add_stranger(&mut self) -> PeerId {
        PeerId(self.peers.len() as u32)
    }

    /// The peers with links.
    pub fn linked(&self) -> &[PeerId] {
        &self.linked
    }

    /// What is known of a peer.
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

    /// What is done to every link.
    fn each_link(&mut self, mut f: impl FnMut(&mut (dyn Link + 'static))) {
        for id in &self.linked {
            if let Some(link) = &mut self.peers[id.0 as usize].link {
                f(&mut **link);
            }
        }
    }

    #[inline]
    fn link(&mut self, id: PeerId) -> Option<&mut (dyn Link + 'static)> {
        self.peers[id.0 as usize].link.as_deref_mut()
    }

    /// The next frame of a peer, without the borrow. It stays where it is until [`Net::end_frame`], also when the link is given up
    /// meanwhile.
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

    /// A place for a frame with a payload of so many bytes, or `None` when there is no room now, no link yet, or the peer has
    /// gone.
    #[inline(always)]
    pub(crate) fn reserve(&mut self, id: PeerId, payload_bytes: usize) -> Option<Place<'_>> {
        if self.has_unlinked() {
            self.want(id);
        }
        let peer = &mut self.peers[id.0 as usize];
        let link = peer.link.as_deref_mut()?;
        // A broken link is noticed by `check`; here it only has no room.
        match link.try_reserve(payload_bytes) {
            Ok(Some(place)) => Some(place),
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

    /// A peer has said goodbye, or that is only assumed.
    pub(crate) fn note_goodbye(&mut self, id: PeerId, is_assumed: bool) {
        let peer = self.peer_mut(id);
        (peer.said_goodbye, peer.is_goodbye_assumed) = (true, is_assumed);
    }

    /// What calls of a group that has ended have sent and received.
    pub(crate) fn add_traffic(&mut self, id: PeerId, traffic: Traffic) {
        let total = &mut self.peer_mut(id).traffic;
        *total = total.plus(traffic);
    }

    /// A frame that is of no group's calls has come from a peer.
    pub(crate) fn count_received(&mut self, id: PeerId, payload_bytes: usize) {
        self.peer_mut(id).traffic.add_received(payload_bytes as u64);
    }

    /// Whether nothing tells of what comes over this peer's link while something is under way.
    pub(crate) fn is_polled(&self, id: PeerId) -> bool {
        self.peer(id).link.as_ref().is_some_and(|link| link.is_polled())
    }

    /// Whether a look at this peer's link costs no system call, or will cost none.
    pub(crate) fn is_cheap_to_look_at(&self, id: PeerId) -> bool {
        let peer = self.peer(id);
        match &peer.link {
            Some(link) => link.is_cheap_to_look_at(),
            None => peer.shares_memory && peer.gone.is_none(),
        }
    }

    /// Whether the system must be asked for news of some links.
    pub fn has_streams(&self) -> bool {
        self.streams > 0
    }

    /// The next pass looks at this peer's link, and asks the system, whatever is known.
    pub fn look_again(&mut self, id: PeerId) {
        if let Some(link) = self.link(id) {
            link.look_again();
            self.poll_link(id);
        }
    }

    /// As [`Net::look_again`], if the last look at this peer's link has found something.
    pub(crate) fn look_again_if_flowing(&mut self, id: PeerId) {
        let peer = self.peer(id);
        if peer.is_polled && peer.idle_looks == 0 {
            self.look_again(id);
        }
    }

    /// As [`Net::look_again`], of all peers: a system call for each of them follows.
    pub fn look_again_everywhere(&mut self) {
        for index in 0..self.linked.len() {
            self.look_again(self.linked[index]);
        }
    }

    /// The next frame, if it comes while this looks for it up to `looks` times. Errors are left to a pass.
    #[inline]
    pub(crate) fn await_frame(&mut self, id: PeerId, looks: u32) -> Option<Frame<'_>> {
        self.link(id)?.await_frame(looks).ok()?
    }

    /// As [`Net::commit`], for links that send without a flush; [`Net::wake`] follows soon.
    #[inline]
    pub(crate) fn commit_quietly(&mut self, id: PeerId) {
        if let Some(link) = self.link(id) {
            link.commit_quietly();
        }
    }

    /// As [`Net::release`]; [`Net::wake`] follows soon.
    #[inline]
    pub(crate) fn release_quietly(&mut self, id: PeerId) {
        if let Some(link) = self.link(id) {
            link.release_quietly();
        }
    }

    /// Tells a peer that does not look that it was given something quietly.
    #[inline]
    pub(crate) fn wake(&mut self, id: PeerId) {
        if let Some(link) = self.link(id) {
            link.wake_peer();
        }
    }

    /// Gives the frame's place back.
    #[inline]
    pub(crate) fn release(&mut self, id: PeerId) {
        if let Some(link) = self.link(id) {
            link.release();
        }
    }

    /// Sends a frame now or as soon as there is room; order among control frames is kept.
    pub(crate) fn send_control(&mut self, id: PeerId, header: Header, payload: &[u8]) {
        if self.peer(id).gone.is_some() {
            return;
        }
        self.want(id);
        if self.peer(id).outbox.is_empty()
            && let Some(place) = self.reserve(id, payload.len())
        {
            header.emit(place.head);
            place.payload.copy_from_slice(payload);
            self.commit(id);
            self.peer_mut(id).traffic.add_sent(payload.len() as u64);
            return;
        }
        self.peer_mut(id).traffic.stalls += 1;
        let peer = self.peer_mut(id);
        peer.outbox.push_back((header.to_bytes(), payload.to_vec()));
        peer.queued += 1;
        // Credits and grants are of no use to anybody when this rank has left; answers to probes and packets are.
        if matches!(header.kind, Kind::Begin | Kind::Packets) {
            peer.relied_on = peer.queued;
        }
        self.note_dirty(id);
    }

    /// As [`Net::send_control`], unless there is no link: whoever makes one is told then.
    pub(crate) fn send_if_linked(&mut self, id: PeerId, header: Header, payload: &[u8]) {
        if self.is_linked(id) {
            self.send_control(id, header, payload);
        }
    }

    /// Sends queued control frames and pushes buffered bytes. Returns whether a frame left the queue, and whether nothing is left.
    fn flush(&mut self, id: PeerId) -> (bool, bool) {
        let peer = &mut self.peers[id.0 as usize];
        let Some(link) = peer.link.as_mut() else { return (false, peer.outbox.is_empty()) };
        let (mut moved, mut is_broken) = (false, false);
        while let Some((head, payload)) = peer.outbox.front() {
            let place = match link.try_reserve(payload.len()) {
                Ok(Some(place)) => place,
                Ok(None) => {
                    peer.wants_room = true;
                    self.room_wanted = true;
                    break;
                }
                // Broken or closed: it takes nothing any more.
                Err(_) => {
                    is_broken = true;
                    peer.outbox.clear();
                    break;
                }
            };
            *place.head = *head;
            place.payload.copy_from_slice(payload);
            peer.traffic.add_sent(payload.len() as u64);
            link.commit();
            peer.outbox.pop_front();
            moved = true;
        }
        // An error shows again in `check` or `peek`, where it is handled; nothing more can be sent then.
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

    /// Control frames that have found no room.
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

    /// As [`Net::flush_all`], after a panic: the peer of which one of its own comes.
    pub(crate) fn flush_guarded(&mut self) -> std::result::Result<(), PeerId> {
        for id in self.dirty.clone() {
            catch_unwind(AssertUnwindSafe(|| self.flush(id))).map_err(|_| id)?;
        }
        Ok(())
    }

    /// Whether bytes of calls that may be done already have yet to leave this process.
    pub fn has_unsent(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Whether somebody must drive even if no call is in flight.
    pub fn wants_driver(&self) -> bool {
        self.has_unsent() || self.listeners > 0
    }

    /// What was sent to a peer until now.
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

    /// The peers without a link for which something waits.
    pub fn unlinked_with_queue(&self) -> Vec<PeerId> {
        let all = (0..self.peers.len() as u32).map(PeerId);
        all.filter(|&id| self.is_unlinked(id) && self.has_queued(id)).collect()
    }

    /// Whether the peer's host has what was sent until then, or never will.
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

    /// Whether any peer's host has yet to acknowledge something.
    pub(crate) fn awaits_answers(&self) -> bool {
        !self.unanswered.is_empty()
    }

    /// The peers whose hosts have not answered what they should have, and for how long.
    pub(crate) fn look_for_answers(&mut self) -> Vec<(PeerId, Duration)> {
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

    /// Looks whether the peer is still there; the error says how it went.
    pub(crate) fn check(&mut self, id: PeerId) -> Result<()> {
        self.looks += 1;
        match self.link(id) {
            Some(link) => link.check_peer(),
            None => Ok(()),
        }
    }

    /// Nothing that is on its way to a peer is worth a wait when its link is dropped.
    pub(crate) fn abandon(&mut self, id: PeerId) {
        if let Some(link) = self.link(id) {
            link.abandon();
        }
    }

    /// Records that a peer has gone and drops its link. Calls that need it are failed by who looks for departures.
    pub fn mark_gone(&mut self, id: PeerId, error: Error) {
        self.unlinked -= usize::from(self.is_unlinked(id));
        self.end_greeting(id);
        let peer = self.peer_mut(id);
        let is_new = peer.gone.is_none();
        if is_new {
            peer.gone = Some(if peer.said_goodbye { Gone::Left } else { Gone::Lost(error) });
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
        // The place may be another link's by now.
        if let Some(slot) = slot.filter(|slot| self.by_slot.get(slot) == Some(&id)) {
            self.by_slot.remove(&slot);
        }
        if let Some(link) = &link {
            self.streams -= usize::from(!link.is_cheap_to_look_at());
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

    /// How many peers have gone so far.
    pub fn departures(&self) -> u64 {
        self.departures
    }

    /// Whether a peer has gone since this was last asked.
    pub(crate) fn take_departures(&mut self) -> bool {
        std::mem::replace(&mut self.departures_seen, self.departures) != self.departures
    }

    /// The process with this identity, if it was a peer and has gone.
    pub fn gone(&self, uuid: &[u8; 16]) -> Option<PeerId> {
        if self.by_uuid.contains_key(uuid) {
            return None;
        }
        let is_it = |peer: &Peer| peer.info.uuid == *uuid;
        self.peers.iter().rposition(is_it).map(|index| PeerId(index as u32))
    }

    /// Why a peer has gone, if it has.
    pub fn why_gone(&self, id: PeerId) -> Option<String> {
        match self.peer(id).gone.as_ref()? {
            Gone::Left => Some("it has left".to_owned()),
            Gone::Lost(error) => Some(error.message.clone()),
        }
    }

    /// Who a peer process is, for messages: `host worker-3, pid 4711`.
    pub fn host_and_pid(&self, id: PeerId) -> String {
        let info = &self.peer(id).info;
        format!("host {}, pid {}", info.hostname, info.pid)
    }

    /// Transport and addresses of a peer's link.
    pub fn describe(&self, id: PeerId) -> String {
        let peer = self.peer(id);
        let without = if peer.gone.is_some() { "no link" } else { "no link yet" };
        peer.link.as_ref().map_or_else(|| without.to_owned(), |link| link.describe())
    }

    /// The transport and addresses of a peer's link, if it has one, and the system calls made for it.
    pub fn link_of(&self, id: PeerId) -> Option<(String, u64)> {
        self.peer(id).link.as_ref().map(|link| (link.describe(), link.system_calls()))
    }

    /// All peers that there have been.
    pub fn all(&self) -> impl Iterator<Item = PeerId> + use<> {
        (0..self.peers.len() as u32).map(PeerId)
    }

    /// Says that nothing more will be sent to anybody.
    pub fn close_all(&mut self) {
        self.each_link(|link| {
            let _ = link.flush();
            link.close();
            link.look_again();
            // A socket that ends with unread bytes resets the connection, which takes back what is under way.
            while let Ok(Some(_)) = link.peek() {
                link.release();
            }
        });
    }
}
