//! The interface between the executor and every transport. This module owns no implementation. Read [`Link`] first.

use std::time::Duration;

use accl_types::Result;

/// Number of polls before [`poll_until`] starts to pause between polls.
const HASTY_POLLS: u32 = 16;

/// Polls `is_there` up to `polls - 1` times, until it returns `true`. The caller makes the last poll itself.
#[inline]
pub fn poll_until(polls: u32, mut is_there: impl FnMut() -> bool) {
    for poll in 1..polls {
        if is_there() {
            break;
        }
        // The first polls follow each other at once, because the next frame is often already on its way.
        if poll > HASTY_POLLS {
            std::hint::spin_loop();
        }
    }
}

/// Bytes of a frame's head.
pub const HEAD_BYTES: usize = 40;

/// An incoming frame: a head of fixed size and a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// Encoded [`crate::frame::Header`].
    pub head: &'a [u8; HEAD_BYTES],
    /// Payload, aligned to 8 bytes.
    pub payload: &'a [u8],
}

/// Buffer for one outgoing frame.
#[derive(Debug, PartialEq, Eq)]
pub struct FrameSlot<'a> {
    /// Room for the encoded [`crate::frame::Header`].
    pub head: &'a mut [u8; HEAD_BYTES],
    /// Room for the payload, aligned to 8 bytes.
    pub payload: &'a mut [u8],
}

/// Acknowledgement by the peer's host of the bytes that were sent to it. The host also answers for a stopped process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answers {
    /// The host has acknowledged everything.
    Complete,
    /// Some bytes are in flight.
    Awaited,
    /// The system has retransmitted some bytes several times, and the host has been unresponsive for this time.
    Overdue(Duration),
}

/// A first-in-first-out path between two processes, shared by all groups. It carries opaque frames in both directions.
///
/// One thread at a time uses a link: the engine holds its progress lock. No function here blocks. After a function has
/// returned an error, it keeps returning that error.
///
/// # Safety
/// A peeked frame must keep its address and contents until [`Link::release`] or the end of the link. No other use of
/// the link may change that. A reserved slot must stay valid until [`Link::commit`] or the next [`Link::try_reserve`].
/// The executor relies on this: it handles a frame while it sends over the same link.
#[expect(unsafe_code, reason = "users of a link read frames at the addresses that it returns")]
pub unsafe trait Link: Send {
    /// Returns the maximum payload bytes of one frame. This is at least the configured segment plus
    /// [`crate::frame::OVERHEAD_BYTES`].
    fn max_payload_bytes(&self) -> usize;

    /// Reserves a slot for one frame with a payload of exactly `payload_bytes`. Returns `None` if there is no room
    /// now. A second reservation without a commit gives up the first.
    ///
    /// # Errors
    /// `PeerLost` or `Network` if the link is broken; `Internal` if the payload is longer than allowed.
    fn try_reserve(&mut self, payload_bytes: usize) -> Result<Option<FrameSlot<'_>>>;

    /// Publishes the reserved frame, and posts an event if the peer has armed its end. Does nothing without a
    /// reservation.
    fn commit(&mut self);

    /// Returns the next complete incoming frame. Returns the same frame until it is released.
    ///
    /// # Errors
    /// `PeerLost` once all frames that had arrived were read; `Protocol` for bytes that cannot be a frame.
    fn peek(&mut self) -> Result<Option<Frame<'_>>>;

    /// Polls for a frame like [`Link::peek`], up to `polls` times.
    ///
    /// # Errors
    /// Returns the errors of [`Link::peek`].
    fn await_frame(&mut self, polls: u32) -> Result<Option<Frame<'_>>> {
        let mut poll = || {
            self.force_poll();
            !matches!(self.peek(), Ok(None))
        };
        poll_until(polls, &mut poll);
        poll();
        self.peek()
    }

    /// Frees the slot of the peeked frame, and wakes a peer that waits for room. Does nothing without a peeked frame.
    fn release(&mut self);

    /// Pushes buffered bytes towards the peer without blocking. Returns `true` if no bytes are left in this process.
    ///
    /// # Errors
    /// `PeerLost` or `Network` if the link is broken.
    fn flush(&mut self) -> Result<bool>;

    /// Arms the link: from now on no thread polls it. Later frames (and room, if `wants_room`) must therefore be posted
    /// on the board of this process. If the process has no board, they must end the sleep of its poller.
    ///
    /// Then polls once more, unless an event is certain to precede anything new. Returns `true` if something was found
    /// and the link must be polled. A post has already disarmed the link on the peer's side. A loss that was returned
    /// before is not new, so a lost link that is still in the caller's list does not prevent sleep.
    fn arm(&mut self, wants_room: bool) -> bool;

    /// Ends [`Link::arm`]: a thread polls the link again.
    fn disarm(&mut self);

    /// Checks whether the peer still exists. The transport may skip the check if the peer existed at the last call and
    /// the poller has seen no event since. Callers call this now and then while they spin.
    ///
    /// # Errors
    /// `PeerLost` if the peer is gone and everything that it sent was read.
    fn check_peer(&mut self) -> Result<()>;

    /// Announces that this side sends nothing more: flushes, then half-closes. Frames from the peer can still be read.
    fn close(&mut self);

    /// Returns the number of bytes committed so far, for [`Link::is_delivered`].
    fn position(&self) -> u64 {
        0
    }

    /// Returns whether the peer's host has all bytes up to `position`, so that they arrive even if this process exits.
    /// Also returns `true` if the link is broken and nothing more can arrive.
    fn is_delivered(&mut self, position: u64) -> bool {
        let _ = position;
        true
    }

    /// Returns whether [`Link::answers`] may return anything but [`Answers::Complete`]. This is free.
    fn awaits_answer(&self) -> bool {
        false
    }

    /// Asks the system what the peer's host has acknowledged. This detects a vanished host long before the system gives
    /// up.
    fn answers(&mut self) -> Answers {
        Answers::Complete
    }

    /// Commits like [`Link::commit`], but the next [`Link::wake_peer`] wakes the peer. Several commits and releases
    /// then need only one check whether the peer's end is armed.
    fn commit_quietly(&mut self) {
        self.commit();
    }

    /// Releases like [`Link::release`], but the next [`Link::wake_peer`] wakes the peer.
    fn release_quietly(&mut self) {
        self.release();
    }

    /// Posts an event if the peer's end is armed and frames or room were given to it quietly.
    fn wake_peer(&mut self) {}

    /// Returns whether frames arrive without the system: a [`Link::peek`] that finds nothing then costs no system call.
    fn polls_without_syscall(&self) -> bool {
        false
    }

    /// Marks the peer as vanished. Dropping the link then does not wait for bytes in flight to the peer.
    fn abandon(&mut self) {}

    /// Makes the next poll ask the system, even if no event was seen. Callers that expect a frame use it.
    fn force_poll(&mut self) {}

    /// Returns the time for which an armed link may be left unpolled, asked after each [`Link::arm`]. `None` means that
    /// events of the link are posted as soon as there is something to find.
    fn poll_interval(&self) -> Option<Duration> {
        None
    }

    /// Returns whether no event announces incoming frames while a call is in flight, so that the link must be polled. A
    /// waiting thread then keeps polling as long as frames arrive, because each sleep would cost more time than it
    /// lasts.
    fn is_polled(&self) -> bool {
        false
    }

    /// Returns whether a thread must sleep on the link even while no call is in flight. The peer announces over the
    /// link that it sleeps, and must be woken for frames that were sent before the announcement arrived.
    fn needs_listener(&self) -> bool {
        false
    }

    /// Returns the number of system calls made for this link so far, as far as the transport counts them.
    fn system_calls(&self) -> u64 {
        0
    }

    /// Returns the name of the transport in its table.
    fn transport(&self) -> &'static str;

    /// Returns transport and endpoints for messages: `shm, 1 MiB rings` or `tcp 10.0.0.1:5000 -> 10.0.0.2:40000`.
    fn describe(&self) -> String;
}

// SAFETY: every function forwards to the boxed link, which fulfils the contract of the trait.
#[expect(unsafe_code, reason = "as the trait")]
unsafe impl<L: Link + ?Sized> Link for Box<L> {
    fn max_payload_bytes(&self) -> usize {
        (**self).max_payload_bytes()
    }

    fn try_reserve(&mut self, payload_bytes: usize) -> Result<Option<FrameSlot<'_>>> {
        (**self).try_reserve(payload_bytes)
    }

    fn commit(&mut self) {
        (**self).commit();
    }

    fn peek(&mut self) -> Result<Option<Frame<'_>>> {
        (**self).peek()
    }

    fn await_frame(&mut self, polls: u32) -> Result<Option<Frame<'_>>> {
        (**self).await_frame(polls)
    }

    fn release(&mut self) {
        (**self).release();
    }

    fn flush(&mut self) -> Result<bool> {
        (**self).flush()
    }

    fn arm(&mut self, wants_room: bool) -> bool {
        (**self).arm(wants_room)
    }

    fn disarm(&mut self) {
        (**self).disarm();
    }

    fn check_peer(&mut self) -> Result<()> {
        (**self).check_peer()
    }

    fn close(&mut self) {
        (**self).close();
    }

    fn position(&self) -> u64 {
        (**self).position()
    }

    fn is_delivered(&mut self, position: u64) -> bool {
        (**self).is_delivered(position)
    }

    fn awaits_answer(&self) -> bool {
        (**self).awaits_answer()
    }

    fn answers(&mut self) -> Answers {
        (**self).answers()
    }

    fn commit_quietly(&mut self) {
        (**self).commit_quietly();
    }

    fn release_quietly(&mut self) {
        (**self).release_quietly();
    }

    fn wake_peer(&mut self) {
        (**self).wake_peer();
    }

    fn polls_without_syscall(&self) -> bool {
        (**self).polls_without_syscall()
    }

    fn force_poll(&mut self) {
        (**self).force_poll();
    }

    fn abandon(&mut self) {
        (**self).abandon();
    }

    fn poll_interval(&self) -> Option<Duration> {
        (**self).poll_interval()
    }

    fn is_polled(&self) -> bool {
        (**self).is_polled()
    }

    fn needs_listener(&self) -> bool {
        (**self).needs_listener()
    }

    fn system_calls(&self) -> u64 {
        (**self).system_calls()
    }

    fn transport(&self) -> &'static str {
        (**self).transport()
    }

    fn describe(&self) -> String {
        (**self).describe()
    }
}
