//! The interface between the engine and every transport. Owns no implementation. Read [`Link`] first.

use std::time::Duration;

use accl_types::Result;

/// Looks without a pause between them.
const HASTY_LOOKS: u32 = 16;

/// Looks until something is there, but for the last of `looks`, which the caller makes itself.
#[inline]
pub fn look_until(looks: u32, mut is_there: impl FnMut() -> bool) {
    for look in 1..looks {
        if is_there() {
            break;
        }
        // The first looks follow at once: what comes next is often on its way.
        if look > HASTY_LOOKS {
            std::hint::spin_loop();
        }
    }
}

/// Bytes of a frame's head.
pub const HEAD_BYTES: usize = 40;

/// A frame that came in: a head of fixed size and a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// What the frame is.
    pub head: &'a [u8; HEAD_BYTES],
    /// What it carries, 8-byte aligned.
    pub payload: &'a [u8],
}

/// A place for a frame that goes out.
#[derive(Debug, PartialEq, Eq)]
pub struct Place<'a> {
    /// As in [`Frame`].
    pub head: &'a mut [u8; HEAD_BYTES],
    /// As in [`Frame`].
    pub payload: &'a mut [u8],
}

/// What the peer's host has said to what it was sent. A process that is stopped has a host that answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answers {
    /// It has everything.
    Complete,
    /// Something is under way.
    Awaited,
    /// Something was repeated several times, and nothing has come from the host for so long.
    Overdue(Duration),
}

/// The first-in-first-out path between two processes, shared by all groups. Carries opaque frames both ways.
///
/// One thread at a time uses a link (the engine holds its progress lock); nothing here blocks. Once an error was
/// returned, it is returned again.
///
/// # Safety
/// A peeked frame stays where it is, unchanged, until [`Link::release`] or the end of the link, whatever else is done with
/// it meanwhile; a reserved place until [`Link::commit`] or the next [`Link::try_reserve`]. The engine handles a frame while
/// it sends over the same link.
#[expect(unsafe_code, reason = "whoever uses a link reads where it says that a frame is")]
pub unsafe trait Link: Send {
    /// Most bytes of one payload: at least the configured segment plus [`crate::frame::OVERHEAD_BYTES`].
    fn max_payload_bytes(&self) -> usize;

    /// A place for one frame with a payload of exactly `payload_bytes`; `None` when there is no room now.
    /// Reserving again without a commit gives up the earlier place.
    ///
    /// # Errors
    /// `PeerLost` or `Network` when the link is broken; `Internal` when the payload is longer than allowed.
    fn try_reserve(&mut self, payload_bytes: usize) -> Result<Option<Place<'_>>>;

    /// Publishes the reserved frame and posts it if the peer has armed its end. Without a reservation it does nothing.
    fn commit(&mut self);

    /// The next complete incoming frame; the same one until it is released.
    ///
    /// # Errors
    /// `PeerLost` after everything that had arrived was read; `Protocol` for bytes that cannot be a frame.
    fn peek(&mut self) -> Result<Option<Frame<'_>>>;

    /// As [`Link::peek`], looking up to `looks` times.
    ///
    /// # Errors
    /// As [`Link::peek`].
    fn await_frame(&mut self, looks: u32) -> Result<Option<Frame<'_>>> {
        let mut look = || {
            self.look_again();
            !matches!(self.peek(), Ok(None))
        };
        look_until(looks, &mut look);
        look();
        self.peek()
    }

    /// Gives the peeked frame's place back and tells a peer that waits for room. Without a peeked frame it does
    /// nothing.
    fn release(&mut self);

    /// Pushes buffered bytes towards the peer; never blocks. `true`: nothing is left in this process.
    ///
    /// # Errors
    /// `PeerLost` or `Network` when the link is broken.
    fn flush(&mut self) -> Result<bool>;

    /// Arms the link: nobody looks at it from now on, so that whatever comes (and room, if asked for) must be posted on the board of
    /// this process, or end its sleep where it has none. Then looks once more, unless an event would come before anything that is to be found.
    /// `true`: something came up, and the link is to be looked at. What was posted has disarmed the link as far as the peer is concerned.
    /// A loss that was returned already is nothing new, so that a lost link that is still in the caller's list keeps nobody awake.
    fn arm(&mut self, wants_room: bool) -> bool;

    /// Somebody looks at the link again.
    fn disarm(&mut self);

    /// Looks whether the peer is still there, unless it was when this was last asked and the poller has seen nothing since; called
    /// now and then while spinning.
    ///
    /// # Errors
    /// `PeerLost` when it is gone and everything it sent was read.
    fn check_peer(&mut self) -> Result<()>;

    /// Says that nothing more will be sent: flushes, then half-closes. What the peer sent can still be read.
    fn close(&mut self);

    /// How many bytes were committed so far, for [`Link::is_delivered`].
    fn position(&self) -> u64 {
        0
    }

    /// Whether the peer's host has everything up to this position, so that it survives the end of this process; also when
    /// the link is broken and nothing more can arrive.
    fn is_delivered(&mut self, position: u64) -> bool {
        let _ = position;
        true
    }

    /// Whether a look at [`Link::answers`] may find more than [`Answers::Complete`]. Costs nothing.
    fn awaits_answer(&self) -> bool {
        false
    }

    /// Asks what the peer's host has answered. A host that has vanished is found here long before the system gives up.
    fn answers(&mut self) -> Answers {
        Answers::Complete
    }

    /// As [`Link::commit`], but the peer is told by the next [`Link::wake_peer`] only: several steps need one look at
    /// whether its end is armed.
    fn commit_quietly(&mut self) {
        self.commit();
    }

    /// As [`Link::release`], in the same way.
    fn release_quietly(&mut self) {
        self.release();
    }

    /// Tells the peer if its end is armed and was given anything quietly.
    fn wake_peer(&mut self) {}

    /// Whether frames are seen without the system: no [`Link::peek`] that finds nothing costs a system call.
    fn is_cheap_to_look_at(&self) -> bool {
        false
    }

    /// The peer has vanished: what is on its way to it is worth no wait when the link is dropped.
    fn abandon(&mut self) {}

    /// The next look asks the system what has come, even if nobody has seen an event: for who expects something here.
    fn look_again(&mut self) {}

    /// How long an armed link may be left alone: `None` when news of it are posted as soon as there is something to find. Asked after each
    /// [`Link::arm`].
    fn poll_interval(&self) -> Option<Duration> {
        None
    }

    /// Whether nothing tells of what comes while something is under way, so that it has to be looked for again and again. Who waits for a call
    /// then does so for as long as something comes, since each sleep costs more than it lasts.
    fn is_polled(&self) -> bool {
        false
    }

    /// Whether somebody must sleep on the link even while no call is in flight: the peer says over it that it sleeps, and has to be woken for
    /// what was sent before that was heard.
    fn needs_listener(&self) -> bool {
        false
    }

    /// System calls made for this link so far, as far as the transport counts them.
    fn system_calls(&self) -> u64 {
        0
    }

    /// Name of the transport's table row.
    fn transport(&self) -> &'static str;

    /// Transport and place for a person: `shm, 1 MiB rings` or `tcp 10.0.0.1:5000 -> 10.0.0.2:40000`.
    fn describe(&self) -> String;
}

// SAFETY: the link inside keeps the promise.
#[expect(unsafe_code, reason = "as the trait")]
unsafe impl<L: Link + ?Sized> Link for Box<L> {
    fn max_payload_bytes(&self) -> usize {
        (**self).max_payload_bytes()
    }

    fn try_reserve(&mut self, payload_bytes: usize) -> Result<Option<Place<'_>>> {
        (**self).try_reserve(payload_bytes)
    }

    fn commit(&mut self) {
        (**self).commit();
    }

    fn peek(&mut self) -> Result<Option<Frame<'_>>> {
        (**self).peek()
    }

    fn await_frame(&mut self, looks: u32) -> Result<Option<Frame<'_>>> {
        (**self).await_frame(looks)
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

    fn is_cheap_to_look_at(&self) -> bool {
        (**self).is_cheap_to_look_at()
    }

    fn look_again(&mut self) {
        (**self).look_again();
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
