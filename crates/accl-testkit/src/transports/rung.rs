//! The datagrams of the C example without descriptors: a doorbell over the carrier ends sleeps, as transports need it whose library has
//! nothing to wait for.
//!
//! Owns the doorbell, of two kinds. The plain one rings for whatever is given. The thrifty one is as good ones are: who sleeps says so once, and
//! whoever gives it something then rings once; what was given before that was heard is rung for as soon as it is, by somebody who sleeps on
//! the link, so that two links without an engine do not suffice.

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::BorrowedFd;

use accl_transport::TransportV1;
use accl_wire::table::AGAIN;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::datagrams::datagrams_transport;

/// What is said over the carrier: that this side sleeps, and that the other should not.
const ASLEEP: u8 = b's';
const RING: u8 = b'!';
/// What is under way is looked for so often.
const INTERVAL_US: u64 = 500;

/// Of a table whose bell is the thrifty one.
static THRIFTY: u8 = 0;

/// A link of the example, and the carrier's socket.
struct Rung {
    inner: *mut c_void,
    is_thrifty: bool,
    carrier: Option<c_int>,
    /// The peer sleeps.
    peer_asleep: bool,
    /// The peer knows that this side sleeps.
    has_told: bool,
    /// Something was given to the peer since it was rung last.
    has_given: bool,
    /// A frame was committed and has not left.
    has_unsent: bool,
}

/// The example with a doorbell.
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
    // SAFETY: the function returns the address of a table.
    unsafe { *datagrams_transport() }
}

/// # Safety
/// The link is one that `open` has made and nobody has destroyed.
unsafe fn rung<'a>(link: *mut c_void) -> &'a mut Rung {
    // SAFETY: as above; one thread at a time uses a link.
    unsafe { &mut *link.cast() }
}

impl Rung {
    fn say(&self, word: u8) {
        if let Some(carrier) = self.carrier {
            // SAFETY: it stays open as long as the link. Words are few, since each waits for one of the other side.
            let _ =
                send(unsafe { BorrowedFd::borrow_raw(carrier) }, &[word], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
    }

    /// Something was given to the peer.
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

    fn hear(&mut self) {
        let mut bytes = [0; 64];
        let Some(carrier) = self.carrier else { return };
        // SAFETY: it stays open as long as the link.
        let carrier = unsafe { BorrowedFd::borrow_raw(carrier) };
        while let Ok((count @ 1.., _)) = recv(carrier, &mut bytes[..], RecvFlags::DONTWAIT) {
            for word in &bytes[..count.min(bytes.len())] {
                match *word {
                    ASLEEP => self.peer_asleep = true,
                    _ => self.has_told = false,
                }
            }
        }
        if self.is_thrifty {
            self.ring();
        }
    }

    fn tell_asleep(&mut self) {
        if self.is_thrifty && !std::mem::replace(&mut self.has_told, true) {
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
    // SAFETY: the arguments are handed on, and so are the promises of the header.
    unsafe {
        let opened =
            inner().open.unwrap()(context, max_payload_bytes, peer, peer_bytes, &raw mut made, address, address_bytes);
        if opened == 0 {
            *link = Box::into_raw(Box::new(Rung {
                inner: made,
                is_thrifty: !context.is_null(),
                carrier: None,
                peer_asleep: false,
                has_told: false,
                has_given: false,
                has_unsent: false,
            }))
            .cast();
        }
        opened
    }
}

unsafe extern "C" fn connect(link: *mut c_void, peer: *const c_void, bytes: usize, max_payload_bytes: usize) -> c_int {
    // SAFETY: the arguments are handed on, and so are the promises of the header.
    unsafe { inner().connect.unwrap()(rung(link).inner, peer, bytes, max_payload_bytes) }
}

unsafe extern "C" fn reserve(
    link: *mut c_void,
    payload_bytes: usize,
    head: *mut *mut c_void,
    payload: *mut *mut c_void,
) -> c_int {
    // SAFETY: the arguments are handed on, and so are the promises of the header.
    unsafe {
        // To make room a frame may leave.
        progress(link);
        inner().reserve.unwrap()(rung(link).inner, payload_bytes, head, payload)
    }
}

unsafe extern "C" fn commit(link: *mut c_void) {
    // SAFETY: the arguments are handed on, and so are the promises of the header.
    unsafe {
        inner().commit.unwrap()(rung(link).inner);
        // Who is rung for what has not left yet finds nothing, and sleeps again.
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
    // SAFETY: the arguments are handed on, and so are the promises of the header.
    unsafe { inner().peek.unwrap()(rung(link).inner, head, payload, payload_bytes) }
}

unsafe extern "C" fn release(link: *mut c_void) {
    // SAFETY: the arguments are handed on, and so are the promises of the header. Room there is news for who waits for it.
    unsafe {
        inner().release.unwrap()(rung(link).inner);
        rung(link).give();
    }
}

unsafe extern "C" fn progress(link: *mut c_void) -> c_int {
    // SAFETY: the arguments are handed on, and so are the promises of the header.
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
        // SAFETY: it is not null, so it is a link.
        unsafe { rung(link).inner }
    };
    // SAFETY: the argument is handed on, and so are the promises of the header.
    unsafe { inner().error.unwrap()(inner_link) }
}

unsafe extern "C" fn close(link: *mut c_void) {
    // SAFETY: the arguments are handed on, and so are the promises of the header.
    unsafe {
        inner().close.unwrap()(rung(link).inner);
        rung(link).give();
    }
}

unsafe extern "C" fn destroy(link: *mut c_void) {
    // SAFETY: `open` has made it, and this is the last use of it.
    unsafe {
        let rung = Box::from_raw(link.cast::<Rung>());
        inner().destroy.unwrap()(rung.inner);
    }
}

unsafe extern "C" fn attach(link: *mut c_void, carrier: c_int) {
    // SAFETY: as the header has it.
    unsafe { rung(link) }.carrier = Some(carrier);
}

unsafe extern "C" fn arm(link: *mut c_void) -> u64 {
    // SAFETY: as the header has it.
    unsafe {
        rung(link).hear();
        if progress(link) != 0 {
            return INTERVAL_US;
        }
        rung(link).tell_asleep();
        0
    }
}
