//! Links of a simulated world: they delay, stall, refuse, flip bits, break and fall silent as the faults of their wire
//! require.
//!
//! Owns the frames in flight. A *ring* behaves like a link over shared memory: a committed frame arrives soon, and the
//! peer is notified if it has armed its end. A *stream* behaves like TCP: committed frames leave with a flush as far as
//! the window allows, and every arrival is an event. Read [`SimulatedLink`] first.
//!
//! This file is long because rings and streams share the frames in flight and all faults of a wire.

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use accl_testkit::Rng;
use accl_transport::Poller;
use accl_transport::loopback::{self, LoopbackLink};
use accl_types::{Error, Result};
use accl_wire::{Answers, EventBitmap, Frame, FrameSlot, HEAD_BYTES, Link, Slot};

use super::clock::{self, Agenda, Event};
use accl_engine::sync::Mutex;

/// Nanoseconds in flight after which a frame to a vanished host is overdue.
const OVERDUE: u64 = 200_000_000;

/// Creates a process's link to itself. The link needs a waker, as outside the simulation; no thread sleeps on it here.
pub(super) fn self_link(max_payload_bytes: usize) -> LoopbackLink {
    static POLLER: LazyLock<Poller> = LazyLock::new(|| Poller::new().unwrap_or_else(|error| panic!("{error}")));
    loopback::self_link(max_payload_bytes, POLLER.waker())
}

/// How a wire carries frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Medium {
    /// Room for `frames` frames in each direction.
    Ring { frames: usize },
    /// Accepts a frame while at most `kept` bytes wait for a flush. A flush sends while fewer than `window` bytes are
    /// in flight.
    Stream { kept: usize, window: usize },
}

/// A bit that changes in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flip {
    pub(super) end: usize,
    /// Number of the frame, counted from 0 among the frames that the end commits.
    pub(super) frame: u64,
    /// Number of the bit, counted from the first bit of the head, modulo the bits of the frame.
    pub(super) bit: u64,
}

/// Parameters of a wire.
#[derive(Clone, Debug)]
pub(super) struct WireSpec {
    pub(super) medium: Medium,
    pub(super) max_payload_bytes: usize,
    /// A frame takes from `least` to `most` nanoseconds.
    pub(super) least: u64,
    pub(super) most: u64,
    pub(super) seed: u64,
    pub(super) flip: Option<Flip>,
}

/// A frame in flight. The payload is stored in words so that it is aligned.
#[derive(Debug)]
struct Parcel {
    head: [u8; HEAD_BYTES],
    words: Vec<u64>,
    len: usize,
    /// Arrival time in nanoseconds.
    at: u64,
}

impl Parcel {
    fn with_room(len: usize) -> Self {
        // The pattern keeps bytes that a sender does not write from holding data of an earlier frame.
        Self { words: vec![0xabab_abab_abab_abab; len.div_ceil(8)], len, head: [0; HEAD_BYTES], at: 0 }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: `words` is initialised, every byte is a valid `u8`, and `len` is at most eight times the number of
        // words.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), self.len) }
    }

    fn slot(&mut self) -> FrameSlot<'_> {
        // SAFETY: `words` is initialised and exclusively borrowed, `len` is at most eight times the number of words,
        // and any bytes make a valid `u64`.
        let payload = unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), self.len) };
        FrameSlot { head: &mut self.head, payload }
    }

    fn flip(&mut self, bit: u64) {
        let bits = 8 * (HEAD_BYTES + self.len) as u64;
        let bit = (bit % bits) as usize;
        match bit / 8 {
            byte @ 0..HEAD_BYTES => self.head[byte] ^= 1 << (bit % 8),
            byte => self.slot().payload[byte - HEAD_BYTES] ^= 1 << (bit % 8),
        }
    }
}

/// The event bitmap of a process. Posts are visible at once; delays are modelled by the frames and by the wake-up.
#[derive(Debug, Default)]
pub(super) struct SimulatedBitmap {
    posted: Mutex<BTreeSet<u32>>,
    listens: AtomicBool,
}

impl SimulatedBitmap {
    /// Sets the bit of `slot`. Returns whether the process must be woken.
    fn post(&self, slot: Slot) -> bool {
        let mut posted = self.posted.lock();
        let is_first = posted.is_empty();
        posted.insert(slot.0);
        is_first && self.listens.load(Ordering::Relaxed)
    }
}

impl EventBitmap for SimulatedBitmap {
    fn take(&self, found: &mut dyn FnMut(Slot)) {
        std::mem::take(&mut *self.posted.lock()).into_iter().for_each(|slot| found(Slot(slot)));
    }

    fn listen(&self) -> bool {
        self.listens.store(true, Ordering::Relaxed);
        !self.posted.lock().is_empty()
    }

    fn mute(&self) {
        self.listens.store(false, Ordering::Relaxed);
    }
}

/// One end of a wire, and what it has sent.
#[derive(Debug, Default)]
struct End {
    process: usize,
    bitmap: Arc<SimulatedBitmap>,
    /// Frames that were committed and not yet flushed.
    kept: VecDeque<Parcel>,
    under_way: VecDeque<Parcel>,
    committed: u64,
    /// The process of this end is to be notified of frames.
    is_armed: bool,
    /// The process of this end is to be notified of room.
    wants_room: bool,
    /// This end sends no more.
    closed: bool,
    /// This end receives no more.
    gone: bool,
    /// Nothing that this end sends arrives before this time, in nanoseconds.
    stalled_until: u64,
    /// Time of the last arrival, in nanoseconds.
    last_arrival: u64,
    /// The system has an event that the process has not fetched yet.
    has_event: bool,
    /// The process has fetched an event, and the link has not been polled since; see `accl_transport`'s `LinkEvents`.
    has_events: bool,
    /// The last poll found nothing.
    is_empty: bool,
}

impl End {
    fn kept_bytes(&self) -> usize {
        self.kept.iter().map(|parcel| parcel.len).sum()
    }

    fn bytes_under_way(&self) -> usize {
        self.under_way.iter().map(|parcel| parcel.len + 1).sum()
    }
}

/// The wire between two processes, with both ends.
#[derive(Debug)]
pub(super) struct Wire {
    index: usize,
    spec: WireSpec,
    ends: [End; 2],
    rng: Rng,
    /// Time at which the wire was cut, in nanoseconds.
    cut_at: Option<u64>,
    /// Time since which nothing arrives and no end is notified, in nanoseconds.
    silent_since: Option<u64>,
    agenda: Arc<Mutex<Agenda>>,
}

impl Wire {
    pub(super) fn new(
        index: usize,
        processes: [(usize, &Arc<SimulatedBitmap>); 2],
        spec: WireSpec,
        agenda: &Arc<Mutex<Agenda>>,
    ) -> Arc<Mutex<Self>> {
        let ends = processes.map(|(process, bitmap)| End { process, bitmap: bitmap.clone(), ..End::default() });
        let rng = Rng::new(spec.seed);
        let (cut_at, silent_since) = (None, None);
        Arc::new(Mutex::new(Self { index, spec, ends, rng, cut_at, silent_since, agenda: agenda.clone() }))
    }

    pub(super) fn is_ring(&self) -> bool {
        matches!(self.spec.medium, Medium::Ring { .. })
    }

    pub(super) fn latency(&mut self) -> u64 {
        self.spec.least + self.rng.below(self.spec.most - self.spec.least + 1)
    }

    fn enter(&self, wait: u64, event: Event) {
        self.agenda.lock().enter(wait, event);
    }

    /// Returns the slot of an end on the bitmap of its process.
    pub(super) fn slot(&self, end: usize) -> Slot {
        Slot(self.ends[1 - end].process as u32)
    }

    /// Records a system event for an end, and wakes its process.
    fn ring(&mut self, end: usize) {
        self.ends[end].has_event = true;
        let (wait, process) = (self.latency(), self.ends[end].process);
        self.enter(wait, Event::Ring { process });
    }

    /// Notifies an armed end through shared memory and disarms it. Wakes its process if the process sleeps.
    fn notify(&mut self, end: usize) {
        (self.ends[end].is_armed, self.ends[end].wants_room) = (false, false);
        if self.ends[end].bitmap.post(self.slot(end)) {
            let (wait, process) = (self.latency(), self.ends[end].process);
            self.enter(wait, Event::Ring { process });
        }
    }

    /// Records that the system has noticed that the other end is closed.
    pub(super) fn on_end(&mut self, end: usize) {
        self.ends[end].has_event = true;
    }

    /// Handles the arrival of a frame, or of a wake-up, at an end.
    pub(super) fn on_arrival(&mut self, end: usize, is_quiet: bool) {
        self.ends[end].last_arrival = clock::nanos();
        if self.is_silent() {
            return;
        }
        if !self.is_ring() {
            self.ends[end].has_event = true;
            let process = self.ends[end].process;
            self.enter(0, Event::Ring { process });
        } else if self.ends[end].is_armed && !is_quiet {
            self.notify(end);
        }
    }

    /// Fetches the pending system events for a process.
    pub(super) fn ask(&mut self, process: usize) {
        for end in 0..2 {
            if self.ends[end].process == process && std::mem::take(&mut self.ends[end].has_event) {
                self.ends[end].has_events = true;
                // A process that fetches events is awake, so it needs no wake-up.
                let _ = self.ends[end].bitmap.post(self.slot(end));
            }
        }
    }

    /// Whether polling would find nothing, because no event was fetched since the last poll found nothing.
    fn is_known_empty(&mut self, end: usize) -> bool {
        if self.is_ring() {
            return false;
        }
        let end = &mut self.ends[end];
        if std::mem::take(&mut end.has_events) {
            end.is_empty = false;
        }
        end.is_empty
    }

    /// Cuts the wire for both ends.
    pub(super) fn cut(&mut self) {
        self.cut_at.get_or_insert(clock::nanos());
        (0..2).for_each(|end| self.ring(end));
    }

    /// Stops all arrivals from now on.
    pub(super) fn fall_silent(&mut self) {
        self.silent_since.get_or_insert(clock::nanos());
    }

    /// Delays everything that an end sends from now on until `wait` nanoseconds from now.
    pub(super) fn stall(&mut self, end: usize, wait: u64) {
        let until = clock::nanos() + wait;
        self.ends[end].stalled_until = self.ends[end].stalled_until.max(until);
    }

    pub(super) fn is_silent(&self) -> bool {
        self.silent_since.is_some()
    }

    pub(super) fn is_cut(&self) -> bool {
        self.cut_at.is_some()
    }

    /// Whether a frame with arrival time `at` can be read now.
    fn has_arrived(&self, at: u64) -> bool {
        at <= clock::nanos()
            && self.cut_at.is_none_or(|cut| at <= cut)
            && self.silent_since.is_none_or(|since| at <= since)
    }

    /// Returns since when an end has had everything that the other end sent, in nanoseconds. `None` while data is in
    /// flight or unsent.
    pub(super) fn has_all_since(&self, end: usize) -> Option<u64> {
        let theirs = &self.ends[1 - end];
        let is_on_its_way =
            !theirs.kept.is_empty() || theirs.under_way.iter().any(|parcel| !self.has_arrived(parcel.at));
        (!is_on_its_way).then_some(self.ends[end].last_arrival)
    }

    /// Returns since when an end has waited for an answer of a vanished host, in nanoseconds.
    pub(super) fn unanswered_since(&self, end: usize) -> Option<u64> {
        let is_open = !self.is_ring() && !self.is_cut() && !self.ends[end].closed;
        self.silent_since.filter(|_| is_open).and(self.oldest(end))
    }

    /// Sends a frame.
    fn carry(&mut self, from: usize, mut parcel: Parcel, is_quiet: bool) {
        let wait = self.latency();
        let before = self.ends[from].under_way.back().map_or(0, |last| last.at);
        parcel.at = (clock::nanos() + wait).max(before).max(self.ends[from].stalled_until);
        let at = parcel.at;
        self.ends[from].under_way.push_back(parcel);
        self.agenda.lock().enter_at(at, Event::Arrive { wire: self.index, end: 1 - from, is_quiet });
    }

    fn room_for(&self, end: usize) -> bool {
        let mine = &self.ends[end];
        match self.spec.medium {
            Medium::Ring { frames } => mine.under_way.len() < frames,
            Medium::Stream { kept, .. } => mine.kept_bytes() <= kept,
        }
    }

    /// Whether an end can still send, as far as it knows.
    fn takes_more(&self, end: usize) -> bool {
        !self.is_cut() && !self.ends[end].closed && (!self.ends[1 - end].gone || self.is_silent())
    }

    fn has_window(&self, end: usize) -> bool {
        match self.spec.medium {
            Medium::Ring { .. } => true,
            Medium::Stream { window, .. } => self.ends[end].bytes_under_way() < window,
        }
    }

    fn flush(&mut self, end: usize) {
        while self.has_window(end)
            && let Some(parcel) = self.ends[end].kept.pop_front()
        {
            self.carry(end, parcel, false);
        }
    }

    fn is_readable(&self, end: usize) -> bool {
        self.ends[1 - end].under_way.front().is_some_and(|parcel| self.has_arrived(parcel.at))
    }

    fn end_of(&self, end: usize) -> Option<Error> {
        let theirs = &self.ends[1 - end];
        if self.is_readable(end) {
            return None;
        }
        if self.is_cut() {
            return Some(Error::peer_lost("the simulated link was cut"));
        }
        let is_closed = theirs.closed && theirs.under_way.is_empty() && theirs.kept.is_empty() && !self.is_silent();
        is_closed.then(|| Error::peer_lost("the simulated link was closed by its peer"))
    }

    /// Whether the system knows that no more frames will be sent. Frames that have arrived may still be unread.
    fn has_ended(&self, end: usize) -> bool {
        self.is_cut() || (self.ends[1 - end].closed && !self.is_silent())
    }

    fn oldest(&self, end: usize) -> Option<u64> {
        let mine = &self.ends[end];
        let late = mine.under_way.iter().find(|parcel| !self.has_arrived(parcel.at)).map(|parcel| parcel.at);
        late.or_else(|| (!mine.kept.is_empty()).then(clock::nanos))
    }
}

/// One end of a [`Wire`].
#[derive(Debug)]
pub(super) struct SimulatedLink {
    wire: Arc<Mutex<Wire>>,
    end: usize,
    reserved: Option<Parcel>,
    peeked: Option<Parcel>,
    /// A frame was committed or released quietly since the last `wake_peer`.
    is_owed_wake: bool,
    /// The end of the link was returned to the caller.
    is_end_reported: bool,
    /// For a ring, whose frames are visible without the system, but whose end is not: the system was asked for the end
    /// of the peer. `sees_end` is set once the system has reported it.
    has_asked: bool,
    sees_end: bool,
}

impl SimulatedLink {
    pub(super) fn new(wire: &Arc<Mutex<Wire>>, end: usize) -> Self {
        let wire = wire.clone();
        Self {
            wire,
            end,
            reserved: None,
            peeked: None,
            is_owed_wake: false,
            is_end_reported: false,
            has_asked: false,
            sees_end: false,
        }
    }

    fn send(&mut self, is_quiet: bool) {
        let Some(mut parcel) = self.reserved.take() else { return };
        let mut wire = self.wire.lock();
        let end = self.end;
        if let Some(flip) = wire.spec.flip.filter(|flip| flip.end == end && flip.frame == wire.ends[end].committed) {
            parcel.flip(flip.bit);
        }
        wire.ends[end].committed += 1;
        if wire.is_ring() {
            wire.carry(end, parcel, is_quiet);
        } else {
            wire.ends[end].kept.push_back(parcel);
        }
    }

    fn take(&mut self, is_quiet: bool) {
        if self.peeked.take().is_none() {
            return;
        }
        let mut wire = self.wire.lock();
        let peer = 1 - self.end;
        match wire.spec.medium {
            Medium::Ring { .. } if wire.ends[peer].wants_room && !is_quiet => wire.notify(peer),
            Medium::Stream { .. } if !wire.ends[peer].kept.is_empty() && !wire.is_silent() => wire.ring(peer),
            Medium::Ring { .. } | Medium::Stream { .. } => {}
        }
    }

    fn announce(&mut self, wants_room: bool) -> bool {
        self.ask_for_end();
        let mut wire = self.wire.lock();
        let end = self.end;
        if !wire.is_ring() {
            wire.flush(end);
        }
        wire.ends[end].is_armed = true;
        wire.ends[end].wants_room = wants_room;
        let polls = !wire.is_known_empty(end);
        let knows_end = self.sees_end || !wire.is_ring();
        let has_end = polls && knows_end && wire.end_of(end).is_some() && !self.is_end_reported;
        let has_frame = polls && wire.is_readable(end);
        if polls {
            wire.ends[end].is_empty = !has_frame && !has_end;
        }
        self.peeked.is_some() || has_frame || has_end || (wants_room && wire.takes_more(end) && wire.room_for(end))
    }

    fn retract(&mut self) {
        let mut wire = self.wire.lock();
        let end = self.end;
        wire.ends[end].is_armed = false;
        wire.ends[end].wants_room = false;
    }

    /// Asks the system for the death of the peer, as a link over shared memory does. Asks again only after an event.
    fn ask_for_end(&mut self) {
        let mut wire = self.wire.lock();
        let has_events = std::mem::take(&mut wire.ends[self.end].has_events);
        if wire.is_ring() && (has_events || !self.has_asked) {
            self.has_asked = true;
            self.sees_end = self.sees_end || wire.has_ended(self.end);
        } else {
            wire.ends[self.end].has_events = has_events;
        }
    }

    fn check_end(&mut self) -> Result<()> {
        if self.peeked.is_some() {
            return Ok(());
        }
        let mut wire = self.wire.lock();
        if wire.is_ring() && !self.sees_end {
            return Ok(());
        }
        if wire.is_known_empty(self.end) {
            return Ok(());
        }
        match wire.end_of(self.end) {
            Some(error) => {
                self.is_end_reported = true;
                Err(error)
            }
            None => {
                wire.ends[self.end].is_empty = !wire.is_readable(self.end);
                Ok(())
            }
        }
    }
}

// SAFETY: the link owns `peeked` and `reserved`, and each frame has memory of its own, so neither moves or changes
// while it is borrowed.
unsafe impl Link for SimulatedLink {
    fn max_payload_bytes(&self) -> usize {
        self.wire.lock().spec.max_payload_bytes
    }

    fn try_reserve(&mut self, payload_bytes: usize) -> Result<Option<FrameSlot<'_>>> {
        {
            let wire = self.wire.lock();
            if payload_bytes > wire.spec.max_payload_bytes {
                return Err(Error::internal(format!("a payload of {payload_bytes} bytes is too long")));
            }
            if !wire.takes_more(self.end) {
                return Err(Error::peer_lost("the simulated link takes no more"));
            }
            if !wire.room_for(self.end) {
                return Ok(None);
            }
        }
        Ok(Some(self.reserved.insert(Parcel::with_room(payload_bytes)).slot()))
    }

    fn commit(&mut self) {
        self.send(false);
    }

    fn peek(&mut self) -> Result<Option<Frame<'_>>> {
        if self.peeked.is_none() {
            let mut wire = self.wire.lock();
            if !wire.is_known_empty(self.end) && wire.is_readable(self.end) {
                self.peeked = wire.ends[1 - self.end].under_way.pop_front();
            }
        }
        self.check_end()?;
        Ok(self.peeked.as_ref().map(|parcel| Frame { head: &parcel.head, payload: parcel.bytes() }))
    }

    fn release(&mut self) {
        self.take(false);
    }

    fn flush(&mut self) -> Result<bool> {
        let mut wire = self.wire.lock();
        wire.flush(self.end);
        if wire.is_cut() {
            return Err(Error::peer_lost("the simulated link was cut"));
        }
        Ok(wire.ends[self.end].kept.is_empty())
    }

    fn arm(&mut self, wants_room: bool) -> bool {
        self.announce(wants_room)
    }

    fn disarm(&mut self) {
        self.retract();
    }

    fn check_peer(&mut self) -> Result<()> {
        self.ask_for_end();
        self.check_end()
    }

    fn close(&mut self) {
        let mut wire = self.wire.lock();
        let end = self.end;
        wire.flush(end);
        wire.ends[end].closed = true;
        let wait = wire.latency();
        let last = wire.ends[end].under_way.back().map_or(0, |parcel| parcel.at);
        let at = last.max(clock::nanos() + wait);
        let process = wire.ends[1 - end].process;
        // Rings and streams both see the end of their peer by an event of the system.
        if !wire.is_silent() {
            wire.agenda.lock().enter_at(at, Event::Ended { wire: wire.index, end: 1 - end, process });
        }
    }

    fn position(&self) -> u64 {
        self.wire.lock().ends[self.end].committed
    }

    fn is_delivered(&mut self, position: u64) -> bool {
        let wire = self.wire.lock();
        let mine = &wire.ends[self.end];
        let late = mine.under_way.iter().filter(|parcel| !wire.has_arrived(parcel.at)).count() + mine.kept.len();
        wire.is_ring() || wire.is_cut() || mine.committed - late as u64 >= position
    }

    fn awaits_answer(&self) -> bool {
        let wire = self.wire.lock();
        !wire.is_ring() && wire.oldest(self.end).is_some()
    }

    fn answers(&mut self) -> Answers {
        let wire = self.wire.lock();
        if wire.is_ring() {
            return Answers::Complete;
        }
        let Some(oldest) = wire.oldest(self.end) else { return Answers::Complete };
        let since = clock::nanos().saturating_sub(oldest);
        if wire.is_silent() && since > OVERDUE {
            Answers::Overdue(Duration::from_nanos(since))
        } else {
            Answers::Awaited
        }
    }

    fn commit_quietly(&mut self) {
        self.is_owed_wake = true;
        self.send(true);
    }

    fn release_quietly(&mut self) {
        self.is_owed_wake = true;
        self.take(true);
    }

    fn wake_peer(&mut self) {
        if !std::mem::take(&mut self.is_owed_wake) {
            return;
        }
        let mut wire = self.wire.lock();
        if !wire.is_ring() {
            return;
        }
        let peer = 1 - self.end;
        if wire.ends[peer].wants_room {
            wire.notify(peer);
        }
        // The wake-up arrives with the last frame: over real shared memory, the frames would be visible before the peer
        // wakes.
        let last = wire.ends[self.end].under_way.back().map_or(0, |parcel| parcel.at).max(clock::nanos());
        wire.agenda.lock().enter_at(last, Event::Arrive { wire: wire.index, end: peer, is_quiet: false });
    }

    fn polls_without_syscall(&self) -> bool {
        self.wire.lock().is_ring()
    }

    fn force_poll(&mut self) {
        self.has_asked = false;
        self.wire.lock().ends[self.end].is_empty = false;
    }

    fn transport(&self) -> &'static str {
        if self.wire.lock().is_ring() { "ring" } else { "stream" }
    }

    fn describe(&self) -> String {
        format!("simulated {}", self.transport())
    }
}

impl Drop for SimulatedLink {
    fn drop(&mut self) {
        self.reserved = None;
        {
            let mut wire = self.wire.lock();
            wire.ends[self.end].gone = true;
            // Frames that the process had not given to the system are lost, unless the process closed the link
            // properly.
            if !wire.ends[self.end].closed {
                wire.ends[self.end].kept.clear();
            }
        }
        if !self.wire.lock().ends[self.end].closed {
            self.close();
        }
    }
}
