//! The protocol of one message between two ranks: what its sender may send next, what its receiver places, and the
//! credit it owes.
//!
//! The first fragment of a message is sent eagerly, before its receiver issues the call, if the receiver's window has
//! room. The sender takes credit, and the receiver returns the credit when it has placed those bytes. Without room, the
//! first fragment carries no bytes and only announces the message. All other bytes need a grant.
//!
//! A receiver grants what it can place, and keeps a copy of bytes that arrive before it can place them. Everything that
//! arrives can therefore be taken off its link at once, and links never block each other.
//!
//! This module is pure: it owns the byte counts of a message, and its unexpected bytes. `run`, `p2p` and `fast_path`
//! find the message of a frame, decide how far its operation may go, and send frames. Read [`Outgoing`] first, then
//! [`Incoming`].

use std::collections::VecDeque;

/// Whether the first fragment of a message counts against its receiver's window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Window {
    /// The first fragment takes credit, and the receiver returns it.
    Counted,
    /// The first fragment is sent even without room. The engine's own messages are few, and must arrive even if
    /// messages of users have filled the window.
    Exempt,
}

/// Fate of bytes that arrive before they can be placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ahead {
    /// The bytes are copied, and placed later.
    Kept,
    /// The bytes are refused. Bytes of encoded chunks are always placed on arrival, when their checksums are checked. A
    /// point-to-point message has its receiver's memory before it is granted.
    Refused,
}

/// The sender's side of a message.
#[derive(Debug)]
pub(crate) struct Outgoing {
    total: u64,
    sent: u64,
    /// Total bytes that the receiver allows.
    granted: u64,
    window: Window,
    /// Whether the first fragment was sent.
    begun: bool,
    /// Whether the message is empty, was announced without room in the window, and still needs a grant.
    awaits_grant: bool,
    /// Bytes at the end that are never sent without a grant.
    withheld: u64,
}

/// Next fragment of a message to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fragment {
    pub(crate) is_first: bool,
    /// Bytes of the message in this fragment.
    pub(crate) bytes: u64,
    /// Whether the receiver is asked to grant the rest, or an empty message.
    pub(crate) wants_grant: bool,
    /// Credit that the fragment takes from the receiver's window, if it counts.
    pub(crate) credit: Option<u64>,
}

impl Fragment {
    /// Returns the first fragment of a counted message that fits it entirely, as [`Outgoing::next`] would for a message
    /// of at most a segment. Returns `None` if the window has no room.
    #[inline]
    pub(crate) fn whole(total: u64, has_room: impl FnOnce(u64) -> bool) -> Option<Self> {
        has_room(total).then_some(Self { is_first: true, bytes: total, wants_grant: false, credit: Some(total) })
    }
}

impl Outgoing {
    pub(crate) fn new(total: u64, window: Window) -> Self {
        Self { total, sent: 0, granted: 0, window, begun: false, awaits_grant: false, withheld: 0 }
    }

    /// Returns this message with bytes at its end that the receiver grants only when it has finished with the others.
    pub(crate) fn withholding(self, withheld: u64) -> Self {
        Self { withheld, ..self }
    }

    /// Creates a message that was already sent.
    pub(crate) fn finished(total: u64, window: Window) -> Self {
        Self { sent: total, granted: total, begun: true, ..Self::new(total, window) }
    }

    pub(crate) fn sent(&self) -> u64 {
        self.sent
    }

    /// Returns whether the whole message was sent, and no grant is awaited.
    pub(crate) fn is_complete(&self) -> bool {
        self.begun && self.sent == self.total && !self.awaits_grant
    }

    /// Returns whether more was granted than was sent.
    pub(crate) fn is_granted(&self) -> bool {
        self.granted > self.sent
    }

    /// Returns the fragment to send now, if any: at most a segment of the first `limit` bytes, which are readable.
    /// `has_room` returns whether the receiver's window has room for a message of the given bytes.
    pub(crate) fn next(&self, limit: u64, segment: u64, has_room: impl FnOnce(u64) -> bool) -> Option<Fragment> {
        if !self.begun {
            let first = (self.total - self.withheld).min(segment);
            if limit < first {
                return None;
            }
            let is_eager = self.window == Window::Exempt || has_room(first);
            // Without room, even an empty message waits for its receiver. Otherwise a receiver would have to remember
            // an unlimited number of them.
            let bytes = if is_eager { first } else { 0 };
            let wants_grant = bytes < self.total || !is_eager;
            let credit = (is_eager && self.window == Window::Counted).then_some(bytes);
            return Some(Fragment { is_first: true, bytes, wants_grant, credit });
        }
        let whole = segment.min(self.total - self.sent);
        let allowed = limit.min(self.granted);
        // Only whole segments are sent, unless the grant itself ends within one.
        let bytes = match () {
            () if allowed >= self.sent + whole => whole,
            () if self.granted <= limit => allowed - self.sent,
            () => 0,
        };
        let wants_grant = self.sent + bytes < self.total;
        (bytes > 0).then_some(Fragment { is_first: false, bytes, wants_grant, credit: None })
    }

    /// Returns a first fragment without bytes, which only announces a message that is not empty.
    pub(crate) fn announcement(&self) -> Option<Fragment> {
        let may_announce = !self.begun && self.total > 0;
        may_announce.then_some(Fragment { is_first: true, bytes: 0, wants_grant: true, credit: None })
    }

    /// Records that a fragment was sent.
    pub(crate) fn note_sent(&mut self, fragment: &Fragment) {
        if fragment.is_first {
            self.begun = true;
            self.awaits_grant = self.total == 0 && fragment.wants_grant;
        }
        self.sent += fragment.bytes;
        self.granted = self.granted.max(self.sent);
    }

    /// Records that the receiver allows `value` bytes in total. This may happen before the first fragment is sent.
    pub(crate) fn on_grant(&mut self, value: u64) {
        self.granted = self.granted.max(value.min(self.total));
        self.awaits_grant = false;
    }
}

/// Position of an arrived fragment in its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    First {
        wants_grant: bool,
    },
    /// Any fragment after the first.
    Next,
}

/// Action for bytes that have arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// Place the bytes at byte `at` of the message. They count as placed.
    Place { at: u64 },
    /// The bytes were copied, and are placed later.
    Kept,
    /// The bytes arrived before they could be placed, and may not be kept.
    Refused,
}

/// Error for a fragment that its message cannot have: more bytes than are left, a second first fragment, or a later one
/// before the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Excess;

/// The receiver's side of a message.
#[derive(Debug)]
pub(crate) struct Incoming {
    total: u64,
    /// Bytes that have arrived.
    arrived: u64,
    /// Bytes that have been placed.
    placed: u64,
    granted: u64,
    /// Credit to return once this number of bytes is placed; `None` if the sender took none, or it was returned.
    credit: Option<u64>,
    /// Bytes that arrived before they could be placed.
    unexpected: VecDeque<Vec<u8>>,
    /// Number of bytes of the first entry of `unexpected` that are already placed.
    unexpected_placed: usize,
    window: Window,
    ahead: Ahead,
    /// Whether the first fragment has arrived.
    begun: bool,
    /// Whether the sender cannot continue without a grant.
    wants_grant: bool,
    withheld: u64,
}

impl Incoming {
    pub(crate) fn new(total: u64, window: Window, ahead: Ahead) -> Self {
        Self {
            total,
            arrived: 0,
            placed: 0,
            granted: 0,
            credit: None,
            unexpected: VecDeque::new(),
            unexpected_placed: 0,
            window,
            ahead,
            begun: false,
            wants_grant: false,
            withheld: 0,
        }
    }

    /// See [`Outgoing::withholding`].
    pub(crate) fn withholding(self, withheld: u64) -> Self {
        Self { withheld, ..self }
    }

    /// Creates a message that has already arrived.
    pub(crate) fn finished(total: u64, window: Window, ahead: Ahead) -> Self {
        Self { arrived: total, placed: total, granted: total, begun: true, ..Self::new(total, window, ahead) }
    }

    /// Returns the credit to return for a counted message that arrived entirely in its first fragment, as
    /// [`Incoming::due_credit`] would.
    #[inline]
    pub(crate) fn credit_of_whole(total: u64) -> u64 {
        total
    }

    pub(crate) fn placed(&self) -> u64 {
        self.placed
    }

    /// Returns whether all of the message has arrived.
    pub(crate) fn has_arrived(&self) -> bool {
        self.begun && self.arrived == self.total
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.begun && self.placed == self.total
    }

    /// Records that bytes have arrived. The first `limit` bytes of the message may be placed; with `None`, no bytes may
    /// be placed.
    ///
    /// # Errors
    /// [`Excess`]; then nothing has changed.
    pub(crate) fn arrive(&mut self, part: Part, payload: &[u8], limit: Option<u64>) -> Result<Arrival, Excess> {
        let bytes = payload.len() as u64;
        if bytes > self.total - self.arrived || (part != Part::Next) == self.begun {
            return Err(Excess);
        }
        if let Part::First { wants_grant } = part {
            self.begun = true;
            self.wants_grant = wants_grant;
            // A fragment that only announces the message has taken no credit.
            let is_eager = self.window == Window::Counted && (bytes > 0 || !wants_grant);
            self.credit = is_eager.then_some(bytes);
        }
        self.arrived += bytes;
        let at = self.placed;
        let fits = limit.is_some_and(|limit| at + bytes <= limit);
        if fits && self.unexpected.is_empty() {
            self.placed += bytes;
            return Ok(Arrival::Place { at });
        }
        if bytes > 0 {
            if self.ahead == Ahead::Refused {
                return Ok(Arrival::Refused);
            }
            self.unexpected.push_back(payload.to_vec());
        }
        Ok(Arrival::Kept)
    }

    /// Passes kept bytes that may now be placed to `place`, with their position in the message.
    pub(crate) fn place_unexpected(&mut self, limit: u64, mut place: impl FnMut(u64, &[u8])) {
        while let Some(first) = self.unexpected.front() {
            let rest = &first[self.unexpected_placed..];
            // Elements are not split, because limits move in whole elements.
            let n = rest.len().min((limit - self.placed) as usize);
            if n > 0 {
                place(self.placed, &rest[..n]);
                self.placed += n as u64;
            }
            if n < rest.len() {
                self.unexpected_placed += n;
                return;
            }
            self.unexpected.pop_front();
            self.unexpected_placed = 0;
        }
    }

    /// Returns the credit to return now, once.
    pub(crate) fn due_credit(&mut self) -> Option<u64> {
        let placed = self.placed;
        self.credit.take_if(|credit| placed >= *credit)
    }

    /// Returns the grant to send now, once. It allows the bytes that may be placed and `segments_ahead` more segments,
    /// or is 0 for an empty message that waits. A message that will need a grant gets one before it has begun.
    pub(crate) fn due_grant(
        &mut self,
        limit: Option<u64>,
        segment: u64,
        segments_ahead: impl FnOnce() -> u64,
    ) -> Option<u64> {
        if self.is_complete() {
            return (self.total == 0 && std::mem::take(&mut self.wants_grant)).then_some(0);
        }
        if !self.wants_grant && (self.total <= segment || limit.is_none()) {
            return None;
        }
        let grant = self.total.min(limit.unwrap_or(0) + segments_ahead() * segment);
        let is_worth_it = grant >= self.total - self.withheld || grant >= self.granted + segment;
        if grant <= self.granted || grant <= self.arrived || !is_worth_it {
            return None;
        }
        self.granted = grant;
        Some(grant)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Window bytes that a message costs in addition to its payload.
    const MESSAGE_BYTES: u64 = 16;

    /// Pseudo-random numbers with a seed.
    struct Draws(u64);

    impl Draws {
        fn below(&mut self, bound: u64) -> u64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut x = self.0;
            x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (x ^ (x >> 31)) % bound
        }
    }

    /// Both sides of one message, the frames and grants in flight, and how far each side's dependencies let it go.
    struct Both {
        outgoing: Outgoing,
        incoming: Incoming,
        total: u64,
        segment: u64,
        segments_ahead: u64,
        window: Window,
        /// Current room in the window, which other messages also use.
        room: u64,
        readable: u64,
        placeable: Option<u64>,
        frames: VecDeque<(Part, Vec<u8>)>,
        grants: VecDeque<u64>,
        /// Largest grant given so far.
        granted: u64,
        /// Credits taken by the sender.
        taken: Vec<u64>,
        /// Credits returned by the receiver.
        returned: Vec<u64>,
        eager: u64,
        received: Vec<u8>,
    }

    fn byte(at: u64) -> u8 {
        (at * 7 + 3) as u8
    }

    impl Both {
        fn new(total: u64, segment: u64, segments_ahead: u64, window: Window, room: u64, ahead: Ahead) -> Self {
            Self {
                outgoing: Outgoing::new(total, window),
                incoming: Incoming::new(total, window, ahead),
                total,
                segment,
                segments_ahead,
                window,
                room,
                readable: 0,
                placeable: None,
                frames: VecDeque::new(),
                grants: VecDeque::new(),
                granted: 0,
                taken: Vec::new(),
                returned: Vec::new(),
                eager: 0,
                received: vec![0; total as usize],
            }
        }

        fn send(&mut self) -> bool {
            let room = self.room;
            let next = self.outgoing.next(self.readable, self.segment, |bytes| room >= bytes + MESSAGE_BYTES);
            let Some(fragment) = next else { return false };
            assert!(fragment.bytes <= self.segment);
            let at = self.outgoing.sent();
            assert!(at + fragment.bytes <= self.readable, "it sends what cannot be read yet");
            if fragment.is_first {
                self.eager = fragment.bytes;
                let is_counted = self.window == Window::Counted && (fragment.bytes > 0 || !fragment.wants_grant);
                assert_eq!(fragment.credit, is_counted.then_some(fragment.bytes));
                if let Some(credit) = fragment.credit {
                    assert!(room >= credit + MESSAGE_BYTES, "it goes without room");
                    self.taken.push(credit);
                }
            } else {
                assert!(fragment.bytes > 0 && fragment.credit.is_none());
            }
            self.outgoing.note_sent(&fragment);
            let most = self.granted.max(self.eager);
            assert!(self.outgoing.sent() <= most, "{} bytes were sent, {most} were allowed", self.outgoing.sent());
            let part = if fragment.is_first { Part::First { wants_grant: fragment.wants_grant } } else { Part::Next };
            self.frames.push_back((part, (at..at + fragment.bytes).map(byte).collect()));
            true
        }

        fn receive(&mut self) -> bool {
            let Some((part, payload)) = self.frames.pop_front() else { return false };
            match self.incoming.arrive(part, &payload, self.placeable).expect("what the other side sends is taken") {
                Arrival::Place { at } => {
                    assert!(at + payload.len() as u64 <= self.placeable.expect("it is placed within a limit"));
                    self.received[at as usize..at as usize + payload.len()].copy_from_slice(&payload);
                }
                Arrival::Kept => {}
                Arrival::Refused => panic!("bytes came early"),
            }
            self.settle();
            true
        }

        fn settle(&mut self) {
            let kept = self.incoming.unexpected.iter().map(Vec::len).sum::<usize>() as u64;
            let most = (1 + self.segments_ahead) * self.segment;
            assert!(kept <= most, "{kept} bytes are kept, where {most} were sent ahead");
            if let Some(limit) = self.placeable {
                let received = &mut self.received;
                self.incoming.place_unexpected(limit, |at, bytes| {
                    assert!(at + bytes.len() as u64 <= limit);
                    received[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
                });
            }
            self.returned.extend(self.incoming.due_credit());
            if let Some(grant) = self.incoming.due_grant(self.placeable, self.segment, || self.segments_ahead) {
                assert!(grant > self.granted || self.total == 0, "a grant allows nothing new");
                self.granted = grant;
                self.grants.push_back(grant);
            }
        }

        fn take_grant(&mut self) -> bool {
            let Some(grant) = self.grants.pop_front() else { return false };
            self.outgoing.on_grant(grant);
            true
        }

        /// Lets both sides go on to the end; the remaining steps happen in turns.
        fn finish(&mut self) {
            (self.readable, self.placeable) = (self.total, Some(self.total));
            self.settle();
            while self.send() | self.receive() | self.take_grant() {}
        }

        fn check_end(&self) {
            assert!(self.outgoing.is_complete() && self.incoming.is_complete() && self.incoming.has_arrived());
            assert!(self.received.iter().copied().eq((0..self.total).map(byte)), "other bytes came than were sent");
            assert_eq!(self.taken, self.returned, "credit is returned as it was taken, once");
            assert!(self.frames.is_empty() && self.grants.is_empty() && self.incoming.unexpected.is_empty());
        }
    }

    fn window() -> impl Strategy<Value = Window> {
        prop_oneof![Just(Window::Counted), Just(Window::Exempt)]
    }

    proptest! {
        #[test]
        fn any_interleaving_ends_complete_within_its_grants(
            seed: u64, total in 0_u64..200, segment in 1_u64..40, ahead in 1_u64..9, window in window(), room in 0_u64..80, steps in 0_usize..400,
        ) {
            let mut draws = Draws(seed);
            let mut both = Both::new(total, segment, ahead, window, room, Ahead::Kept);
            for _ in 0..steps {
                match draws.below(6) {
                    0 => { both.send(); }
                    1 => { both.receive(); }
                    2 => { both.take_grant(); }
                    3 => both.readable = total.min(both.readable + draws.below(2 * segment)),
                    4 => {
                        // The dependencies progress: kept bytes may be placed, and more may be granted.
                        both.placeable = Some(total.min(both.placeable.map_or(0, |now| now + draws.below(2 * segment))));
                        both.settle();
                    }
                    _ => both.room = draws.below(80),
                }
            }
            both.finish();
            both.check_end();
        }

        #[test]
        fn a_message_whose_memory_is_there_is_never_refused(
            seed: u64, total in 0_u64..200, segment in 1_u64..40, window in window(), room in 0_u64..80, steps in 0_usize..100,
        ) {
            // This is how point-to-point messages work: the receiver matches when the first fragment has arrived, and
            // then grants all.
            let mut draws = Draws(seed);
            let mut both = Both::new(total, segment, 0, window, room, Ahead::Refused);
            (both.readable, both.placeable) = (total, Some(total));
            for _ in 0..steps {
                match draws.below(4) {
                    0 => { both.send(); }
                    1 => { both.receive(); }
                    2 => { both.take_grant(); }
                    _ => both.room = draws.below(80),
                }
            }
            both.finish();
            both.check_end();
        }

        #[test]
        fn a_whole_message_is_what_a_first_fragment_would_be(total in 0_u64..100, more in 0_u64..100, room in 0_u64..200) {
            let has_room = |bytes| room >= bytes + MESSAGE_BYTES;
            let segment = (total + more).max(1);
            let mut outgoing = Outgoing::new(total, Window::Counted);
            let next = outgoing.next(total, segment, has_room).unwrap();
            let whole = Fragment::whole(total, has_room);
            prop_assert_eq!(whole, Some(next).filter(|fragment| !fragment.wants_grant));
            let Some(whole) = whole else { return Ok(()) };
            outgoing.note_sent(&whole);
            prop_assert!(outgoing.is_complete());
            let mut incoming = Incoming::new(total, Window::Counted, Ahead::Kept);
            let part = Part::First { wants_grant: whole.wants_grant };
            prop_assert_eq!(incoming.arrive(part, &vec![0; total as usize], Some(total)), Ok(Arrival::Place { at: 0 }));
            prop_assert_eq!(incoming.due_credit(), Some(Incoming::credit_of_whole(total)));
            prop_assert_eq!(whole.credit, Some(Incoming::credit_of_whole(total)));
            prop_assert!(incoming.is_complete() && incoming.due_grant(Some(total), segment, || 1).is_none());
        }

        #[test]
        fn a_grant_of_anything_sends_no_more_than_the_message(total in 0_u64..100, segment in 1_u64..20, values: Vec<u64>) {
            let mut outgoing = Outgoing::new(total, Window::Counted);
            let mut values = values.into_iter().chain([u64::MAX]);
            loop {
                while let Some(fragment) = outgoing.next(total, segment, |_| false) {
                    prop_assert!(outgoing.sent() + fragment.bytes <= total);
                    outgoing.note_sent(&fragment);
                }
                let Some(value) = values.next() else { break };
                outgoing.on_grant(value);
            }
            prop_assert!(outgoing.is_complete());
        }
    }

    #[test]
    fn an_empty_message_without_room_waits_for_its_receiver() {
        let mut both = Both::new(0, 8, 1, Window::Counted, 0, Ahead::Kept);
        assert!(both.send());
        assert!(!both.outgoing.is_complete());
        assert!(both.receive() && both.incoming.is_complete());
        both.settle();
        assert_eq!(both.grants, [0], "the grant is given once");
        assert!(both.take_grant() && both.outgoing.is_complete());
    }

    #[test]
    fn bytes_beyond_the_end_and_a_second_beginning_are_excess() {
        let mut incoming = Incoming::new(4, Window::Counted, Ahead::Kept);
        let first = Part::First { wants_grant: true };
        assert_eq!(incoming.arrive(Part::Next, &[0; 2], Some(4)), Err(Excess), "nothing has begun");
        assert_eq!(incoming.arrive(first, &[0; 5], Some(4)), Err(Excess));
        assert_eq!(incoming.arrive(first, &[0; 2], Some(4)), Ok(Arrival::Place { at: 0 }));
        assert_eq!(incoming.arrive(first, &[0; 2], Some(4)), Err(Excess));
        assert_eq!(incoming.arrive(Part::Next, &[0; 3], Some(4)), Err(Excess));
        assert_eq!(incoming.arrive(Part::Next, &[0; 2], Some(4)), Ok(Arrival::Place { at: 2 }));
        assert!(incoming.is_complete());
    }

    #[test]
    fn bytes_that_may_not_be_kept_are_refused_and_an_announcement_is_not() {
        let mut incoming = Incoming::new(4, Window::Counted, Ahead::Refused);
        assert_eq!(incoming.arrive(Part::First { wants_grant: true }, &[], None), Ok(Arrival::Kept));
        assert_eq!(incoming.arrive(Part::Next, &[0; 4], Some(3)), Ok(Arrival::Refused));
    }
}
