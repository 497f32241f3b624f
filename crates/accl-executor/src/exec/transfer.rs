//! The protocol of one message between two ranks: what its sender may send next, what its receiver places, and what it owes.
//!
//! The first fragment of a message is sent eagerly, ahead of its receiver's call, if the receiver's window has room for it: its
//! sender takes credit, and its receiver returns the credit when it has placed those bytes. Without room the first fragment
//! carries no bytes and only says that the message is there. Everything else needs a grant. A receiver grants what it can place,
//! and keeps a copy of what comes before it can be placed. So whatever arrives can be taken off its link at once, and links
//! never block each other.
//!
//! Pure: owns the counts of a message and its unexpected bytes. Which message a frame is of, how far its operation may go, and
//! how a frame leaves are the matter of `run`, `p2p` and `fast_path`. Read [`Outgoing`] first, then [`Incoming`].

use std::collections::VecDeque;

/// Whether the first fragment of a message counts against its receiver's window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Window {
    /// It takes credit, and the receiver returns it.
    Counted,
    /// The first fragment goes whether there is room or not. The engine's own messages are few, and must come through when the
    /// messages of users have filled the window.
    Exempt,
}

/// What becomes of bytes that come before they can be placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ahead {
    /// They are copied, and placed later.
    Kept,
    /// They are refused. A plan places the bytes of encoded chunks as they come, and their checksums are looked at then; a
    /// message between two calls has its receiver's memory before it is granted.
    Refused,
}

/// A message on its sender's side.
#[derive(Debug)]
pub(crate) struct Outgoing {
    total: u64,
    sent: u64,
    /// How much the receiver allows in all.
    granted: u64,
    window: Window,
    /// The first fragment has left.
    begun: bool,
    /// It is empty, the window had no room for it, and its receiver has yet to grant it.
    awaits_grant: bool,
}

/// What is to be sent next of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fragment {
    pub(crate) is_first: bool,
    /// Bytes of the message that it carries.
    pub(crate) bytes: u64,
    /// The receiver is asked to grant the rest, or an empty message.
    pub(crate) wants_grant: bool,
    /// What it takes of the receiver's window, if it counts.
    pub(crate) credit: Option<u64>,
}

impl Fragment {
    /// A counted message that is whole in its first fragment, as [`Outgoing::next`] has it of a message of at most a segment. `None`:
    /// the window has no room for it.
    #[inline]
    pub(crate) fn whole(total: u64, has_room: impl FnOnce(u64) -> bool) -> Option<Self> {
        has_room(total).then_some(Self { is_first: true, bytes: total, wants_grant: false, credit: Some(total) })
    }
}

impl Outgoing {
    pub(crate) fn new(total: u64, window: Window) -> Self {
        Self { total, sent: 0, granted: 0, window, begun: false, awaits_grant: false }
    }

    /// A message that has gone already.
    pub(crate) fn finished(total: u64, window: Window) -> Self {
        Self { sent: total, granted: total, begun: true, ..Self::new(total, window) }
    }

    pub(crate) fn sent(&self) -> u64 {
        self.sent
    }

    /// Whether all of it has left, and nothing of its receiver is awaited.
    pub(crate) fn is_complete(&self) -> bool {
        self.begun && self.sent == self.total && !self.awaits_grant
    }

    /// Whether more was granted than has been sent.
    pub(crate) fn is_granted(&self) -> bool {
        self.granted > self.sent
    }

    /// What is to be sent now, if anything: of the first `limit` bytes, which can be read already, at most a segment. `has_room`
    /// says whether the receiver's window has room for a message of so many bytes.
    pub(crate) fn next(&self, limit: u64, segment: u64, has_room: impl FnOnce(u64) -> bool) -> Option<Fragment> {
        if !self.begun {
            let first = self.total.min(segment);
            if limit < first {
                return None;
            }
            let is_eager = self.window == Window::Exempt || has_room(first);
            // Also an empty message waits for its receiver where the window has no room, or there would be no limit to those that
            // a receiver has to remember.
            let bytes = if is_eager { first } else { 0 };
            let wants_grant = bytes < self.total || !is_eager;
            let credit = (is_eager && self.window == Window::Counted).then_some(bytes);
            return Some(Fragment { is_first: true, bytes, wants_grant, credit });
        }
        let whole = segment.min(self.total - self.sent);
        let allowed = limit.min(self.granted);
        // Whole segments only, unless the grant itself ends within one.
        let bytes = match () {
            () if allowed >= self.sent + whole => whole,
            () if self.granted <= limit => allowed - self.sent,
            () => 0,
        };
        let wants_grant = self.sent + bytes < self.total;
        (bytes > 0).then_some(Fragment { is_first: false, bytes, wants_grant, credit: None })
    }

    /// A fragment has left.
    pub(crate) fn note_sent(&mut self, fragment: &Fragment) {
        if fragment.is_first {
            self.begun = true;
            self.awaits_grant = self.total == 0 && fragment.wants_grant;
        }
        self.sent += fragment.bytes;
        self.granted = self.granted.max(self.sent);
    }

    /// The receiver allows so many bytes in all. It may do so before the first fragment has left.
    pub(crate) fn on_grant(&mut self, value: u64) {
        self.granted = self.granted.max(value.min(self.total));
        self.awaits_grant = false;
    }
}

/// Which fragment of a message has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    First {
        wants_grant: bool,
    },
    /// Any other.
    Next,
}

/// What is to be done with bytes that have come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// They are to be placed at this byte of the message, and count as placed.
    Place { at: u64 },
    /// They were copied, and are to be placed later.
    Kept,
    /// They came before they could be placed, and may not be kept.
    Refused,
}

/// A fragment that its message cannot have: more bytes than are left, or a beginning that has been.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Excess;

/// A message on its receiver's side.
#[derive(Debug)]
pub(crate) struct Incoming {
    total: u64,
    /// Bytes that have come.
    arrived: u64,
    /// Bytes that have been placed.
    placed: u64,
    granted: u64,
    /// Credit to be returned when so many bytes are placed, if its sender took any.
    credit: Option<u64>,
    /// Bytes that came before they could be placed.
    unexpected: VecDeque<Vec<u8>>,
    /// Bytes of the first of these that are placed already.
    unexpected_placed: usize,
    window: Window,
    ahead: Ahead,
    /// The first fragment has come.
    begun: bool,
    /// The sender cannot go on without a grant.
    wants_grant: bool,
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
        }
    }

    /// A message that has come already.
    pub(crate) fn finished(total: u64, window: Window, ahead: Ahead) -> Self {
        Self { arrived: total, placed: total, granted: total, begun: true, ..Self::new(total, window, ahead) }
    }

    /// The credit to be returned for a counted message that came whole in its first fragment, as [`Incoming::due_credit`] has it.
    #[inline]
    pub(crate) fn credit_of_whole(total: u64) -> u64 {
        total
    }

    pub(crate) fn placed(&self) -> u64 {
        self.placed
    }

    /// Whether nothing more comes of it.
    pub(crate) fn has_arrived(&self) -> bool {
        self.begun && self.arrived == self.total
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.begun && self.placed == self.total
    }

    /// Bytes have come, and the first `limit` bytes of the message may be placed; none at all where there is no limit.
    ///
    /// # Errors
    /// [`Excess`], and nothing has changed.
    pub(crate) fn arrive(&mut self, part: Part, payload: &[u8], limit: Option<u64>) -> Result<Arrival, Excess> {
        let bytes = payload.len() as u64;
        if bytes > self.total - self.arrived || (part != Part::Next) == self.begun {
            return Err(Excess);
        }
        if let Part::First { wants_grant } = part {
            self.begun = true;
            self.wants_grant = wants_grant;
            // What only says that it is there has taken no credit.
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

    /// Hands over what was kept and may be placed by now, with its byte of the message.
    pub(crate) fn place_unexpected(&mut self, limit: u64, mut place: impl FnMut(u64, &[u8])) {
        while let Some(first) = self.unexpected.front() {
            let rest = &first[self.unexpected_placed..];
            // Elements are not split: limits move in whole elements.
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

    /// The credit that is to be returned now, once.
    pub(crate) fn due_credit(&mut self) -> Option<u64> {
        let placed = self.placed;
        self.credit.take_if(|credit| placed >= *credit)
    }

    /// What is to be granted now, once: as many bytes as may be placed and `segments_ahead` more, or 0 for an empty message that
    /// waits. A message that will need a grant gets one before it has begun.
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
        let is_worth_it = grant == self.total || grant >= self.granted + segment;
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

    /// What counts against a window beyond the payload.
    const MESSAGE_BYTES: u64 = 16;

    /// Draws small numbers that end.
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

    /// One message on both sides, what is under way between them, and how far each side's dependencies let it go.
    struct Both {
        outgoing: Outgoing,
        incoming: Incoming,
        total: u64,
        segment: u64,
        segments_ahead: u64,
        window: Window,
        /// Room in the window at the moment. Other messages take of it and give back.
        room: u64,
        readable: u64,
        placeable: Option<u64>,
        frames: VecDeque<(Part, Vec<u8>)>,
        grants: VecDeque<u64>,
        /// Largest grant that has been given, and credit that was taken and returned.
        granted: u64,
        taken: Vec<u64>,
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

        /// Both sides may go on to the end; what is left happens in turns.
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
                        // The dependencies move: what was kept may be placed, and more be granted.
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
            // As messages between two calls go: the receiver matches when the first fragment has come, and then grants all.
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
