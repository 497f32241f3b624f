//! The peers of this process: one link each, shared by all groups.
//!
//! Owns links, the queue of control frames that found no room, and the record of who is gone. Knows no calls. Read
//! [`Net`] first.

use std::collections::{HashMap, VecDeque};
use std::ptr::NonNull;
use std::time::Duration;

use accl_transport::frame::Header;
use accl_transport::{Answers, Card, Frame, HEAD_BYTES, Link, Place};
use accl_types::{Error, Result};

/// Index of a peer process in [`Net`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PeerId(u32);

/// Whether and how a peer process has gone.
#[derive(Clone, Debug)]
pub(crate) enum Gone {
    /// It said goodbye first.
    Left,
    /// Without a word.
    Lost(Error),
}

pub(crate) struct Peer {
    /// `None` after it has gone.
    link: Option<Box<dyn Link>>,
    /// Control frames for which there was no room, oldest first.
    outbox: VecDeque<([u8; HEAD_BYTES], Vec<u8>)>,
    pub(crate) card: Card,
    pub(crate) said_goodbye: bool,
    pub(crate) gone: Option<Gone>,
    /// A send found no room since the last pass.
    wants_room: bool,
    /// Bytes are buffered in this process that the peer has not been sent yet.
    unsent: bool,
    /// For how long its host has not answered, when that was last looked at.
    pub(crate) silent_for: Option<Duration>,
}

/// How much of what this process sent to a peer its calls rely on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark {
    peer: PeerId,
    position: u64,
}

/// A frame that lies in a link, without the borrow.
#[derive(Clone, Copy)]
pub(crate) struct RawFrame {
    head: NonNull<[u8; HEAD_BYTES]>,
    payload: NonNull<[u8]>,
}

impl From<Frame<'_>> for RawFrame {
    fn from(frame: Frame<'_>) -> Self {
        Self { head: frame.head.into(), payload: frame.payload.into() }
    }
}

impl RawFrame {
    /// The frame.
    ///
    /// # Safety
    /// Not after [`Net::end_frame`].
    pub(crate) unsafe fn get<'a>(self) -> Frame<'a> {
        // SAFETY: links promise that a frame stays unchanged until it is released, which `end_frame` does; the net keeps
        // the link until then.
        unsafe { Frame { head: self.head.as_ref(), payload: self.payload.as_ref() } }
    }
}

/// All peers of this process.
#[derive(Default)]
pub(crate) struct Net {
    peers: Vec<Peer>,
    by_uuid: HashMap<[u8; 16], PeerId>,
    /// The peer of which a frame is being handled, and its link if it was given up meanwhile: the frame lies in it.
    handling: Option<PeerId>,
    retired: Option<Box<dyn Link>>,
    /// Some send found no room since the last [`Net::prepare_park`].
    room_wanted: bool,
    /// Peers that have gone so far.
    departures: u64,
    /// As `departures`, when absentees were last looked for.
    departures_seen: u64,
    /// Links whose look asks the system, unless it is known that nothing has come.
    streams: usize,
}

impl Net {
    /// The peer with this identity, unless it has gone.
    pub(crate) fn find(&self, card: &Card) -> Option<PeerId> {
        self.by_uuid.get(&card.uuid).copied().filter(|id| self.peer(*id).gone.is_none())
    }

    /// Adds a peer. What its link waits for is watched already.
    pub(crate) fn add(&mut self, card: Card, link: Box<dyn Link>) -> PeerId {
        let id = PeerId(self.peers.len() as u32);
        self.streams += usize::from(!link.is_cheap_to_look_at());
        self.by_uuid.insert(card.uuid, id);
        self.peers.push(Peer {
            link: Some(link),
            outbox: VecDeque::new(),
            card,
            said_goodbye: false,
            gone: None,
            wants_room: false,
            unsent: false,
            silent_for: None,
        });
        id
    }

    /// A peer without a link, for tests.
    #[cfg(test)]
    pub(crate) fn add_stranger(&mut self) -> PeerId {
        PeerId(self.peers.len() as u32)
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = PeerId> + use<> {
        (0..self.peers.len() as u32).map(PeerId)
    }

    pub(crate) fn peer(&self, id: PeerId) -> &Peer {
        &self.peers[id.0 as usize]
    }

    pub(crate) fn peer_mut(&mut self, id: PeerId) -> &mut Peer {
        &mut self.peers[id.0 as usize]
    }

    #[inline]
    fn link(&mut self, id: PeerId) -> Option<&mut (dyn Link + 'static)> {
        self.peers[id.0 as usize].link.as_deref_mut()
    }

    /// The next frame of a peer, to be handled. It stays where it is until [`Net::end_frame`], also when the link is
    /// given up meanwhile.
    #[inline]
    pub(crate) fn begin_frame(&mut self, id: PeerId) -> Result<Option<RawFrame>> {
        self.retired = None;
        let Some(link) = self.link(id) else { return Ok(None) };
        let frame = link.peek()?.map(RawFrame::from);
        self.handling = frame.and(Some(id));
        Ok(frame)
    }

    /// Leaves a frame where it is: it comes again.
    pub(crate) fn leave_frame(&mut self) {
        self.handling = None;
    }

    /// Ends the handling of a frame.
    #[inline]
    pub(crate) fn end_frame(&mut self, id: PeerId) {
        self.handling = None;
        self.retired = None;
        self.release(id);
    }

    /// A place for a frame with a payload of so many bytes, or `None` when there is no room now or the peer has gone.
    #[inline]
    pub(crate) fn reserve(&mut self, id: PeerId, payload_bytes: usize) -> Option<Place<'_>> {
        let peer = &mut self.peers[id.0 as usize];
        let link = peer.link.as_deref_mut()?;
        // A broken link is noticed by `check`; here it only has no room.
        match link.try_reserve(payload_bytes) {
            Ok(Some(place)) => Some(place),
            Ok(None) | Err(_) => {
                peer.wants_room = true;
                self.room_wanted = true;
                None
            }
        }
    }

    #[inline]
    pub(crate) fn commit(&mut self, id: PeerId) {
        if let Some(link) = self.link(id) {
            link.commit();
        }
    }

    /// Whether a look at this peer's link costs no system call.
    pub(crate) fn is_cheap_to_look_at(&self, id: PeerId) -> bool {
        self.peer(id).link.as_ref().is_some_and(|link| link.is_cheap_to_look_at())
    }

    /// Whether the system must be asked for news of some links.
    pub(crate) fn has_streams(&self) -> bool {
        self.streams > 0
    }

    /// The next look at this peer's link asks the system, whatever is known.
    pub(crate) fn look_again(&mut self, id: PeerId) {
        if let Some(link) = self.link(id) {
            link.look_again();
        }
    }

    /// As [`Net::look_again`], of all peers: a system call for each of them follows.
    pub(crate) fn look_again_everywhere(&mut self) {
        self.peers.iter_mut().filter_map(|peer| peer.link.as_mut()).for_each(|link| link.look_again());
    }

    /// The next frame, if it comes while this looks for it up to `looks` times. Errors are left to a pass.
    #[inline]
    pub(crate) fn await_frame(&mut self, id: PeerId, looks: u32) -> Option<Frame<'_>> {
        self.link(id)?.await_frame(looks).ok()?
    }

    /// As [`Net::commit`]; [`Net::wake`] follows soon.
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

    /// Wakes a peer that sleeps although it was given something quietly.
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
        if self.peer(id).outbox.is_empty()
            && let Some(place) = self.reserve(id, payload.len())
        {
            header.emit(place.head);
            place.payload.copy_from_slice(payload);
            self.commit(id);
            return;
        }
        self.peer_mut(id).outbox.push_back((header.to_bytes(), payload.to_vec()));
    }

    /// Sends queued control frames and pushes buffered bytes. Returns whether a frame left the queue.
    pub(crate) fn flush(&mut self, id: PeerId) -> bool {
        let peer = &mut self.peers[id.0 as usize];
        let Some(link) = peer.link.as_mut() else { return false };
        let mut moved = false;
        while let Some((head, payload)) = peer.outbox.front() {
            let Ok(Some(place)) = link.try_reserve(payload.len()) else {
                peer.wants_room = true;
                self.room_wanted = true;
                break;
            };
            *place.head = *head;
            place.payload.copy_from_slice(payload);
            link.commit();
            peer.outbox.pop_front();
            moved = true;
        }
        // An error shows again in `check` or `peek`, where it is handled; nothing more can be sent then.
        peer.unsent = !link.flush().unwrap_or(true) || !peer.outbox.is_empty();
        moved
    }

    /// Control frames that have found no room.
    #[cfg(test)]
    pub(crate) fn queued(&self) -> usize {
        self.peers.iter().map(|peer| peer.outbox.len()).sum()
    }

    /// Flushes all peers.
    pub(crate) fn flush_all(&mut self) -> bool {
        let mut moved = false;
        for id in self.ids() {
            moved |= self.flush(id);
        }
        moved
    }

    /// Whether bytes of calls that may be done already have yet to leave this process.
    pub(crate) fn has_unsent(&self) -> bool {
        self.peers.iter().any(|peer| peer.unsent)
    }

    /// What was sent to a peer until now.
    pub(crate) fn mark(&self, peer: PeerId) -> Mark {
        Mark { peer, position: self.peer(peer).link.as_ref().map_or(0, |link| link.position()) }
    }

    /// Whether the peer's host has what was sent until then, or never will.
    pub(crate) fn is_delivered(&mut self, mark: &Mark) -> bool {
        self.link(mark.peer).is_none_or(|link| link.is_delivered(mark.position))
    }

    /// Whether any peer's host has yet to acknowledge something.
    pub(crate) fn awaits_answers(&self) -> bool {
        self.peers.iter().filter_map(|peer| peer.link.as_ref()).any(|link| link.awaits_answer())
    }

    /// For how long the peer's host has not answered, if it should have.
    pub(crate) fn look_for_answers(&mut self, id: PeerId) -> Option<Duration> {
        let silent_for = match self.link(id).map(Link::answers) {
            Some(Answers::Overdue(since)) => Some(since),
            Some(Answers::Complete | Answers::Awaited) | None => None,
        };
        self.peer_mut(id).silent_for = silent_for;
        silent_for
    }

    /// Looks whether the peer is still there; the error says how it went.
    pub(crate) fn check(&mut self, id: PeerId) -> Result<()> {
        match self.link(id) {
            Some(link) => link.check_peer(),
            None => Ok(()),
        }
    }

    /// Records that a peer has gone and drops its link. Calls that need it are failed by who looks for departures.
    pub(crate) fn mark_gone(&mut self, id: PeerId, error: Error) {
        let peer = self.peer_mut(id);
        let is_new = peer.gone.is_none();
        if is_new {
            peer.gone = Some(if peer.said_goodbye { Gone::Left } else { Gone::Lost(error) });
        }
        let link = peer.link.take();
        let is_stream = link.as_ref().is_some_and(|link| !link.is_cheap_to_look_at());
        peer.unsent = false;
        peer.outbox.clear();
        let uuid = peer.card.uuid;
        self.streams -= usize::from(is_stream);
        if self.handling == Some(id) {
            self.retired = link;
        }
        if self.by_uuid.get(&uuid) == Some(&id) {
            self.by_uuid.remove(&uuid);
        }
        self.departures += u64::from(is_new);
    }

    /// How many peers have gone so far.
    pub(crate) fn departures(&self) -> u64 {
        self.departures
    }

    /// Whether a peer has gone since this was last asked.
    pub(crate) fn take_departures(&mut self) -> bool {
        std::mem::replace(&mut self.departures_seen, self.departures) != self.departures
    }

    /// Publishes "parked" on all links. `true`: something came up meanwhile.
    pub(crate) fn prepare_park(&mut self) -> bool {
        let mut ready = false;
        self.room_wanted = false;
        for peer in &mut self.peers {
            let wants_room = std::mem::take(&mut peer.wants_room) || !peer.outbox.is_empty();
            if let Some(link) = peer.link.as_mut() {
                ready |= link.prepare_park(wants_room);
            }
        }
        ready
    }

    /// A thread looks at all links while the driver sleeps: see [`Link::suspend_park`].
    pub(crate) fn suspend_park(&mut self) {
        for link in self.peers.iter_mut().filter_map(|peer| peer.link.as_mut()) {
            link.suspend_park();
        }
    }

    /// It looks no more: see [`Link::resume_park`]. `true`: something came up meanwhile.
    pub(crate) fn resume_park(&mut self) -> bool {
        let mut ready = false;
        self.room_wanted = false;
        for peer in &mut self.peers {
            let wants_room = std::mem::take(&mut peer.wants_room) || !peer.outbox.is_empty();
            if let Some(link) = peer.link.as_mut() {
                ready |= link.resume_park(wants_room);
            }
        }
        ready
    }

    /// Whether a parked driver does not know yet that somebody waits for room.
    pub(crate) fn is_room_wanted(&self) -> bool {
        self.room_wanted
    }

    pub(crate) fn unpark(&mut self) {
        for link in self.peers.iter_mut().filter_map(|peer| peer.link.as_mut()) {
            link.unpark();
        }
    }

    /// The process with this identity, if it was a peer and has gone.
    pub(crate) fn gone(&self, uuid: &[u8; 16]) -> Option<PeerId> {
        if self.by_uuid.contains_key(uuid) {
            return None;
        }
        self.ids().find(|id| self.peer(*id).card.uuid == *uuid)
    }

    /// Who a peer process is, for messages: `host worker-3, pid 4711`.
    pub(crate) fn place(&self, id: PeerId) -> String {
        let card = &self.peer(id).card;
        format!("host {}, pid {}", card.hostname, card.pid)
    }

    /// Transport and addresses of a peer's link.
    pub(crate) fn describe(&self, id: PeerId) -> String {
        self.peer(id).link.as_ref().map_or_else(|| "no link".to_owned(), |link| link.describe())
    }

    /// Says that nothing more will be sent to anybody.
    pub(crate) fn close_all(&mut self) {
        for link in self.peers.iter_mut().filter_map(|peer| peer.link.as_mut()) {
            let _ = link.flush();
            link.close();
            link.look_again();
            // A socket that ends with unread bytes resets the connection, which takes back what is under way.
            while let Ok(Some(_)) = link.peek() {
                link.release();
            }
        }
    }
}
