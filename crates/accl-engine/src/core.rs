//! What the engine's lock protects: the net, the groups, and one pass of progress over them.
//!
//! Owns taking frames off links and finding their group. Who may run a pass is decided in `engine`; nothing here blocks
//! or sleeps. Read [`Core::pass`] first.

use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use accl_transport::frame::{Header, Kind};
use accl_transport::{Card, Link, Poller};
use accl_types::{Error, Result};

use crate::completion::CompletionPool;
use crate::net::{Net, PeerId};
use crate::state::{GroupState, Hands, Tell};

/// Frames taken off one link before the others have their turn.
const FRAMES_PER_TURN: usize = 32;
/// Bytes of frames kept for groups that are being made on this rank.
const MAX_ORPHAN_BYTES: usize = 64 << 20;

pub(crate) struct Core {
    pub(crate) net: Net,
    pub(crate) groups: HashMap<u64, GroupState>,
    /// Groups with calls in flight.
    active: Vec<u64>,
    /// Frames of groups that do not exist here yet.
    orphans: HashMap<u64, Vec<(PeerId, Header, Vec<u8>)>>,
    orphan_bytes: usize,
    /// Groups that were destroyed here: what still comes for them is dropped.
    ended: HashSet<u64>,
    pub(crate) pool: CompletionPool,
    pub(crate) segment: u64,
    /// Until when the driver is parked in the poller, if it is.
    pub(crate) parked: Option<Instant>,
}

impl Core {
    pub(crate) fn new(pool: CompletionPool, segment: u64) -> Self {
        Self {
            net: Net::default(),
            groups: HashMap::new(),
            active: Vec::new(),
            orphans: HashMap::new(),
            orphan_bytes: 0,
            ended: HashSet::new(),
            pool,
            segment,
            parked: None,
        }
    }

    /// Runs `f` on a group with what it needs.
    pub(crate) fn with_group<R>(
        &mut self,
        id: u64,
        now: Instant,
        f: impl FnOnce(&mut GroupState, &mut Hands<'_>) -> R,
    ) -> Option<R> {
        let group = self.groups.get_mut(&id)?;
        let mut hands = Hands { net: &mut self.net, pool: &self.pool, segment: self.segment, now };
        let result = f(group, &mut hands);
        if !group.is_idle() && !self.active.contains(&id) {
            self.active.push(id);
        }
        Some(result)
    }

    /// Adds a group and hands it the frames that came before it.
    pub(crate) fn add_group(&mut self, group: GroupState, now: Instant) {
        let id = group.id;
        self.groups.insert(id, group);
        let orphans = self.orphans.remove(&id).unwrap_or_default();
        self.orphan_bytes -= orphans.iter().map(|(_, _, payload)| payload.len()).sum::<usize>();
        for (peer, header, payload) in orphans {
            self.with_group(id, now, |group, hands| {
                if let Some(from) = group.members.rank_of(peer) {
                    group.on_frame(from, &header, &payload, hands);
                }
            });
        }
    }

    pub(crate) fn remove_group(&mut self, id: u64) {
        self.groups.remove(&id);
        self.active.retain(|active| *active != id);
        self.ended.insert(id);
    }

    /// Whether any call is in flight, or bytes of an ended one have yet to leave.
    pub(crate) fn has_work(&self) -> bool {
        !self.active.is_empty() || self.net.has_unsent()
    }

    /// The earliest deadline of any call in flight.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.active.iter().filter_map(|id| self.groups.get(id)?.next_deadline()).min()
    }

    /// Whether the parked driver must look again: a call has an earlier deadline, or waits for room.
    pub(crate) fn must_wake_driver(&self, deadline: Option<Instant>) -> bool {
        self.parked.is_some_and(|until| self.net.is_room_wanted() || deadline.is_some_and(|deadline| deadline < until))
    }

    /// One pass: takes frames off links, advances calls, sends what can be sent. Returns whether anything moved.
    ///
    /// A panic in it is a defect of ours. Whoever happens to drive must not die of it, and others must not wait for what
    /// it left undone: all groups fail.
    pub(crate) fn pass(&mut self, now: Instant) -> bool {
        catch_unwind(AssertUnwindSafe(|| self.pass_unguarded(now))).unwrap_or_else(|panic| {
            let said = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let said = said.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
            let error = Error::internal(format!("panic while making progress: {said}; please report it"));
            for id in self.groups.keys().copied().collect::<Vec<_>>() {
                self.with_group(id, now, |group, hands| group.fail(error.clone(), hands, Tell::Peers));
            }
            true
        })
    }

    fn pass_unguarded(&mut self, now: Instant) -> bool {
        let mut moved = false;
        for id in self.net.ids() {
            moved |= self.drain(id, now);
        }
        moved |= self.advance(now);
        moved |= self.net.flush_all();
        moved
    }

    /// Advances the calls of active groups, without looking at links.
    pub(crate) fn advance(&mut self, now: Instant) -> bool {
        let mut moved = false;
        let groups = &mut self.groups;
        let (net, pool, segment) = (&mut self.net, &self.pool, self.segment);
        self.active.retain(|id| {
            let Some(group) = groups.get_mut(id) else { return false };
            let mut hands = Hands { net: &mut *net, pool, segment, now };
            moved |= group.advance(&mut hands);
            !group.is_idle()
        });
        moved
    }

    /// Fails calls whose deadline passed or whose peers have gone. Done now and then, and before parking.
    pub(crate) fn check(&mut self, now: Instant) {
        for id in self.net.ids() {
            if let Err(error) = self.net.check(id) {
                self.net.mark_gone(id, error);
            }
        }
        for id in self.active.clone() {
            self.with_group(id, now, GroupState::check);
        }
    }

    fn drain(&mut self, id: PeerId, now: Instant) -> bool {
        let Some(mut link) = self.net.take(id) else { return false };
        let mut moved = false;
        let mut failure = None;
        for _ in 0..FRAMES_PER_TURN {
            let parsed = match link.peek() {
                Ok(Some(frame)) => Header::parse(frame),
                Ok(None) => break,
                Err(error) => Err(error),
            };
            match parsed {
                Ok((header, payload)) => self.on_frame(id, &header, payload, now),
                Err(error) => {
                    failure = Some(error);
                    break;
                }
            }
            link.release();
            moved = true;
        }
        self.net.put_back(id, link);
        if let Some(error) = failure {
            self.net.mark_gone(id, error);
            moved = true;
        }
        moved
    }

    fn on_frame(&mut self, peer: PeerId, header: &Header, payload: &[u8], now: Instant) {
        if header.group == 0 {
            if header.kind == Kind::Goodbye {
                self.net.peer_mut(peer).said_goodbye = true;
            }
            return;
        }
        let known = self.with_group(header.group, now, |group, hands| {
            if let Some(from) = group.members.rank_of(peer) {
                group.on_frame(from, header, payload, hands);
            }
        });
        if known.is_none() && !self.ended.contains(&header.group) {
            self.orphan_bytes += payload.len();
            if self.orphan_bytes <= MAX_ORPHAN_BYTES {
                self.orphans.entry(header.group).or_default().push((peer, *header, payload.to_vec()));
            } else {
                self.orphan_bytes -= payload.len();
                tracing::warn!(group = header.group, "frames of a group unknown here are dropped: too many");
            }
        }
    }

    /// Says goodbye to every peer.
    pub(crate) fn say_goodbye(&mut self) {
        for id in self.net.ids() {
            self.net.send_control(id, Header::new(Kind::Goodbye), &[]);
            self.net.flush(id);
        }
        self.net.close_all();
    }

    /// Has the poller watch a new link and adds it.
    pub(crate) fn add_link(&mut self, card: Card, link: Box<dyn Link>, poller: &Poller) -> Result<PeerId> {
        self.net.add(card, link, poller)
    }
}
