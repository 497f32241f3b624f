//! The datagrams of the C example without descriptors. A doorbell over the bootstrap socket ends sleeps, as for
//! libraries that have no descriptor to wait for.
//!
//! Owns the doorbell, of two kinds. The plain bell rings whenever something is given to the peer. The thrifty bell
//! works as good doorbells do: a side that sleeps says so once, and the other side then rings once when it gives
//! something.
//!
//! If something was given before that message arrived, the message is answered with a ring when it is received. A
//! listener that sleeps on the link must receive it. Two links without an engine therefore do not suffice.

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::BorrowedFd;

use accl_transport::TransportV1;
use accl_wire::table::AGAIN;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::datagrams::datagrams_transport;

/// Messages over the bootstrap connection: this side sleeps, and the other side should not sleep.
const ASLEEP: u8 = b's';
const RING: u8 = b'!';
/// Interval in microseconds at which a link with an unsent frame is polled.
const INTERVAL_US: u64 = 500;

/// Context of a table with the thrifty bell; only its address matters.
static THRIFTY: u8 = 0;

/// A link of the example, and the bootstrap socket.
struct Rung {
    inner: *mut c_void,
    is_thrifty: bool,
    bootstrap: Option<c_int>,
    /// Whether the peer sleeps.
    peer_asleep: bool,
    /// Whether the peer knows that this side sleeps.
    announced_sleep: bool,
    /// Whether something was given to the peer since the last ring.
    has_given: bool,
    /// Whether a frame was committed and has not left.
    has_unsent: bool,
}

/// Returns the table of the example with a doorbell.
pub(super) fn table(is_thrifty: bool) -> TransportV1 {
    let inner = inner();
    TransportV1 {
        name: if is_thrifty { c"rung_thriftily" } else { c"rung" }.as_ptr(),
        context: if is_thrifty { (&raw const THRIFTY).cast_mut().cast() } else { std::ptr::null_mut() },
        about: c"datagrams between processes of one host, with a doorbell".as_ptr(),
        open: Some(open),
        connect: Some(connect),
        reserve: Some(reserve),
        commit: Some(commit),
        peek: Some(peek),
        release: Some(release),
        progress: Some(progress),
        descriptors: None,
        error: Some(error),
        close: Some(close),
        destroy: Some(destroy),
        attach: Some(attach),
        arm: Some(arm),
        ..inner
    }
}

fn inner() -> TransportV1 {
    // SAFETY: `datagrams_transport` returns the address of a static table.
    unsafe { *datagrams_transport() }
}

/// # Safety
/// `link` was created by `open` and has not been destroyed.
unsafe fn rung<'a>(link: *mut c_void) -> &'a mut Rung {
    // SAFETY: `link` points at a `Rung` from `open`, by this function's contract, and only one thread at a time uses a
    // link.
    unsafe { &mut *link.cast() }
}

impl Rung {
    fn say(&self, word: u8) {
        if let Some(bootstrap) = self.bootstrap {
            // A thrifty message waits for one of the other side, so there are few. If the socket has no room for a plain
            // ring, the peer has unread ones.
            // SAFETY: the bootstrap socket stays open as long as the link.
            let _ =
                send(unsafe { BorrowedFd::borrow_raw(bootstrap) }, &[word], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
    }

    /// Notes that something was given to the peer, and rings if the bell requires it.
    fn give(&mut self) {
        self.has_given = true;
        self.ring();
    }

    fn ring(&mut self) {
        if !self.is_thrifty {
            self.say(RING);
        } else if self.peer_asleep && self.has_given {
            (self.peer_asleep, self.has_given) = (false, false);
            self.say(RING);
        }
    }

    fn receive(&mut self) {
        let mut bytes = [0; 64];
        let Some(bootstrap) = self.bootstrap else { return };
        // SAFETY: the bootstrap socket stays open as long as the link.
        let bootstrap = unsafe { BorrowedFd::borrow_raw(bootstrap) };
        while let Ok((count @ 1.., _)) = recv(bootstrap, &mut bytes[..], RecvFlags::DONTWAIT) {
            for word in &bytes[..count.min(bytes.len())] {
                match *word {
                    ASLEEP => self.peer_asleep = true,
                    _ => self.announced_sleep = false,
                }
            }
        }
        if self.is_thrifty {
            self.ring();
        }
    }

    fn announce_sleep(&mut self) {
        if self.is_thrifty && !std::mem::replace(&mut self.announced_sleep, true) {
            self.say(ASLEEP);
        }
    }
}

unsafe extern "C" fn open(
    context: *mut c_void,
    max_payload_bytes: usize,
    peer: *const c_void,
    peer_bytes: usize,
    link: *mut *mut c_void,
    address: *mut c_void,
    address_bytes: *mut usize,
) -> c_int {
    let mut made = std::ptr::null_mut();
    // SAFETY: the caller keeps the header's contract of `open`, which is also the contract of the inner function.
    // `link` is valid for a write.
    unsafe {
        let opened =
            inner().open.unwrap()(context, max_payload_bytes, peer, peer_bytes, &raw mut made, address, address_bytes);
        if opened == 0 {
            *link = Box::into_raw(Box::new(Rung {
                inner: made,
                is_thrifty: !context.is_null(),
                bootstrap: None,
                peer_asleep: false,
                announced_sleep: false,
                has_given: false,
                has_unsent: false,
            }))
            .cast();
        }
        opened
    }
}

unsafe extern "C" fn connect(link: *mut c_void, peer: *const c_void, bytes: usize, max_payload_bytes: usize) -> c_int {
    // SAFETY: by the header's contract `link` comes from `open`; the inner `connect` gets the caller's other arguments
    // unchanged.
    unsafe { inner().connect.unwrap()(rung(link).inner, peer, bytes, max_payload_bytes) }
}

unsafe extern "C" fn reserve(
    link: *mut c_void,
    payload_bytes: usize,
    head: *mut *mut c_void,
    payload: *mut *mut c_void,
) -> c_int {
    // SAFETY: by the header's contract `link` comes from `open`; the inner `reserve` gets the caller's other arguments
    // unchanged.
    unsafe {
        // A frame may leave here and make room.
        progress(link);
        inner().reserve.unwrap()(rung(link).inner, payload_bytes, head, payload)
    }
}

unsafe extern "C" fn commit(link: *mut c_void) {
    // SAFETY: by the header's contract `link` comes from `open`, and a frame was reserved, as the inner `commit`
    // requires.
    unsafe {
        inner().commit.unwrap()(rung(link).inner);
        // A peer that is woken for a frame that has not left yet finds nothing and sleeps again.
        progress(link);
        rung(link).give();
    }
}

unsafe extern "C" fn peek(
    link: *mut c_void,
    head: *mut *const c_void,
    payload: *mut *const c_void,
    payload_bytes: *mut usize,
) -> c_int {
    // SAFETY: by the header's contract `link` comes from `open`; the inner `peek` gets the caller's other arguments
    // unchanged.
    unsafe { inner().peek.unwrap()(rung(link).inner, head, payload, payload_bytes) }
}

unsafe extern "C" fn release(link: *mut c_void) {
    // SAFETY: by the header's contract `link` comes from `open`, and a frame was peeked, as the inner `release`
    // requires. The peer may wait for the room that this makes.
    unsafe {
        inner().release.unwrap()(rung(link).inner);
        rung(link).give();
    }
}

unsafe extern "C" fn progress(link: *mut c_void) -> c_int {
    // SAFETY: by the header's contract `link` comes from `open`, so its inner link is valid.
    unsafe {
        let found = inner().progress.unwrap()(rung(link).inner);
        let is_under_way = found == AGAIN;
        if std::mem::replace(&mut rung(link).has_unsent, is_under_way) && !is_under_way {
            rung(link).give();
        }
        found
    }
}

unsafe extern "C" fn error(link: *mut c_void) -> *const c_char {
    let inner_link = if link.is_null() {
        link
    } else {
        // SAFETY: `link` is not null, so by the header's contract it comes from `open`.
        unsafe { rung(link).inner }
    };
    // SAFETY: the inner `error` accepts null or a valid inner link.
    unsafe { inner().error.unwrap()(inner_link) }
}

unsafe extern "C" fn close(link: *mut c_void) {
    // SAFETY: by the header's contract `link` comes from `open`, so its inner link is valid.
    unsafe {
        inner().close.unwrap()(rung(link).inner);
        rung(link).give();
    }
}

unsafe extern "C" fn destroy(link: *mut c_void) {
    // SAFETY: `open` created `link` with `Box::into_raw`, and this is its last use.
    unsafe {
        let rung = Box::from_raw(link.cast::<Rung>());
        inner().destroy.unwrap()(rung.inner);
    }
}

unsafe extern "C" fn attach(link: *mut c_void, bootstrap: c_int) {
    // SAFETY: by the header's contract `link` comes from `open`.
    unsafe { rung(link) }.bootstrap = Some(bootstrap);
}

unsafe extern "C" fn arm(link: *mut c_void) -> u64 {
    // SAFETY: by the header's contract `link` comes from `open`, and so does the argument of `progress`.
    unsafe {
        rung(link).receive();
        if progress(link) != 0 {
            return INTERVAL_US;
        }
        rung(link).announce_sleep();
        0
    }
}
