//! One progress pass: frames come off the links, calls advance, and what can be sent is sent.
//!
//! Owns the order of these steps, and the frames that stay on their link for a call that is still to come. `core` has
//! the state, `parking` the sleep between passes. Read [`Core::pass`] first.

use accl_types::Moment;
use accl_wire::frame::{Header, Kind, LAST};

use super::context::Context;
use super::core::Core;
use super::inbox::Early;
use crate::peers::{FrameEnd, PeerId, handle_frame};

/// Maximum number of frames taken off one link before the other links get their turn.
const FRAMES_PER_TURN: usize = 32;
/// A frame of at least `MIN_HELD_BYTES` may belong to a call that was not issued here yet. It then stays on its link
/// for up to this many consecutive passes without progress. The call is likely to be issued soon, and then takes the
/// frame from the link without a copy.
const PASSES_HELD: u32 = 32;
const MIN_HELD_BYTES: usize = 2 << 10;
/// Maximum number of polls of all links before a reported failure of a group takes effect. Peers that keep sending must
/// not delay it forever.
const MAX_ROUNDS: usize = 1000;
/// Maximum number of consecutive calls that complete at once without a poll of the links.
const MAX_CALLS_WITHOUT_POLL: u32 = 16;

impl Core {
    /// Runs one progress pass: takes frames off the links, advances calls, and sends what can be sent. Returns whether
    /// there was progress.
    ///
    /// A panic in a pass is a defect of this library. The driving thread must survive it, and other threads must not
    /// wait for work that the panic left undone. Therefore all groups fail.
    pub fn pass(&mut self, now: Moment) -> bool {
        self.guarded(|core| core.pass_unguarded(now)).unwrap_or(true)
    }

    /// Runs [`Core::pass`] and leaves no frame on a link, for callers that will not poll again soon.
    pub fn pass_whole(&mut self, now: Moment) -> bool {
        self.idle = PASSES_HELD;
        self.pass(now)
    }

    fn pass_unguarded(&mut self, now: Moment) -> bool {
        self.passes += 1;
        let moved = self.drain_all(now);
        self.end_pass(moved, now)
    }

    /// Finishes a pass after frames were taken off links.
    fn end_pass(&mut self, mut moved: bool, now: Moment) -> bool {
        if !self.causes.is_empty() {
            self.handle_causes(now);
            moved = true;
        }
        moved |= self.advance(now);
        moved |= self.net.flush_all();
        // No other pass may detect the departure. The event was lost with the link, and a polling thread checks nothing
        // else.
        moved |= self.check_absentees(now);
        self.net.end_pass();
        if moved {
            self.driver_sleep.note_progress();
        }
        // A sleeping driver has armed all links, and only events on them wake it.
        if self.driver_sleep.is_unwatched() && self.net.arm_again() {
            (self.wake())();
        }
        self.idle = if moved { 0 } else { self.idle.saturating_add(1) };
        moved
    }

    /// Fails groups whose failure was reported, after everything that had arrived earlier is handled. A rank reports
    /// the failure on its own link, and a frame that completes a call may lie on another link.
    fn handle_causes(&mut self, now: Moment) {
        self.idle = PASSES_HELD;
        self.net.force_poll_all();
        for _ in 0..MAX_ROUNDS {
            if !self.drain_all(now) {
                break;
            }
        }
        for (peer, header, payload) in std::mem::take(&mut self.causes) {
            self.with_group(header.group, now, |group, context| {
                if let Some(from) = group.members().rank_of(peer) {
                    group.on_frame(from, &header, &payload, context);
                }
            });
        }
    }

    /// Advances the calls of active groups, without polling links.
    pub(crate) fn advance(&mut self, now: Moment) -> bool {
        let mut moved = false;
        let groups = &mut self.groups;
        let (net, completed, stopping) = (&mut self.net, &mut self.completed, &mut self.stopping);
        let segment = self.segment;
        self.active.retain(|id| {
            let Some(group) = groups.get_mut(id) else { return false };
            let mut context =
                Context { net: &mut *net, completed: &mut *completed, stopping: &mut *stopping, segment, now };
            moved |= group.advance(&mut context);
            group.set_listed(!group.is_idle());
            !group.is_idle()
        });
        if !self.stopping.is_empty() {
            moved |= self.stopping.advance(&mut self.completed, now);
        }
        moved
    }

    fn drain_all(&mut self, now: Moment) -> bool {
        self.net.take_events();
        let mut moved = false;
        let mut index = 0;
        while let Some(id) = self.net.polled(index) {
            let has_found = self.drain(id, now);
            moved |= has_found;
            self.net.note_poll(id, has_found);
            // If the peer is gone or no longer polled, another peer may have taken its index.
            index += usize::from(self.net.polled(index) == Some(id));
        }
        moved
    }

    fn drain(&mut self, id: PeerId, now: Moment) -> bool {
        let mut moved = false;
        for _ in 0..FRAMES_PER_TURN {
            let handled = handle_frame(
                self,
                |core| &mut core.net,
                id,
                |core, frame| {
                    let payload_bytes = frame.payload.len();
                    match Header::parse(frame.head) {
                        Ok(header) if core.is_held(&header, frame.payload) => return FrameEnd::Held,
                        Ok(header) => {
                            core.on_frame(id, &header, frame.payload, now);
                            // Groups count the frames of their own calls.
                            if !header.kind.carries_data() {
                                core.net.count_received(id, payload_bytes);
                            }
                        }
                        Err(error) => core.net.mark_gone(id, error),
                    }
                    FrameEnd::Released
                },
            );
            match handled {
                Ok(Some(FrameEnd::Released)) => moved = true,
                Ok(Some(FrameEnd::Held) | None) => break,
                Err(error) => {
                    self.net.mark_gone(id, error);
                    return true;
                }
            }
        }
        moved
    }

    /// Returns whether a frame stays on its link for now.
    fn is_held(&self, header: &Header, payload: &[u8]) -> bool {
        payload.len() >= MIN_HELD_BYTES
            && self.idle < PASSES_HELD
            && self.groups.get(&header.group).is_some_and(|group| group.is_early(header))
    }

    pub(super) fn on_frame(&mut self, peer: PeerId, header: &Header, payload: &[u8], now: Moment) {
        if header.group == 0 {
            match header.kind {
                Kind::Disconnect => self.net.note_disconnect(peer, false),
                Kind::Hello => {
                    if header.flags & LAST != 0 {
                        self.net.end_greeting(peer);
                    }
                    if let Err(error) = self.answer_groups(peer, payload, now) {
                        self.net.mark_gone(peer, error);
                    }
                }
                _ => {}
            }
            return;
        }
        if header.kind == Kind::Cause && self.groups.contains_key(&header.group) {
            self.causes.push((peer, *header, payload.to_vec()));
            return;
        }
        let known = self.with_group(header.group, now, |group, context| {
            if let Some(from) = group.members().rank_of(peer) {
                group.on_frame(from, header, payload, context);
            }
        });
        if known.is_some() && header.kind == Kind::Disconnect {
            self.left.push(header.group);
        }
        if known.is_none() && !self.ended.contains(header.group) {
            self.early_frames.push(header.group, Early { peer, header: *header, payload: payload.to_vec() });
        }
    }

    /// Follows a call that completed when it was issued. Polls the links now and then, because otherwise a rank that
    /// only sends would never receive events.
    pub(crate) fn ended_at_once(&mut self) {
        self.calls_without_poll += 1;
        if self.calls_without_poll >= MAX_CALLS_WITHOUT_POLL {
            self.calls_without_poll = 0;
            self.poll_due = self.net.has_streams();
            self.pass_whole((self.clock)());
        }
    }

    /// Returns, and clears, whether a thread should ask the system for events. Otherwise no thread would, as long as
    /// calls complete when they are issued and no thread waits.
    #[inline]
    pub fn take_poll_due(&mut self) -> bool {
        std::mem::take(&mut self.poll_due)
    }
}
