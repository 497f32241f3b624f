//! The table of C functions for torch-accl: `accl_transport_v1` of `accl_transport.h`.
//!
//! Owns the border to the engine: pointers become indices of links in [`crate::world`], and no panic crosses. Knows no
//! MPI.

use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use accl_wire::HEAD_BYTES;
use accl_wire::table::{AGAIN, ENDED, FAILED, OK, TRANSPORT_ABI, TransportV1};

use crate::address::Address;
use crate::doorbell::Doorbell;
use crate::link::Polled;
use crate::table_collectives;
use crate::why;
use crate::world::{self, World};

static TABLE: Holder = Holder(TransportV1 {
    abi: TRANSPORT_ABI,
    size: size_of::<TransportV1>() as u32,
    name: c"mpi".as_ptr(),
    about: c"messages of the MPI library that the job was launched with".as_ptr(),
    flags: 0,
    poll_interval_us: 0,
    context: std::ptr::null_mut(),
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
    coll_address: Some(table_collectives::address),
    coll_open: Some(table_collectives::open),
    coll_start: Some(table_collectives::start),
    coll_test: Some(table_collectives::test),
    coll_abandon: Some(table_collectives::abandon),
    coll_error: Some(table_collectives::error),
    coll_close: Some(table_collectives::close),
});

struct Holder(TransportV1);

// SAFETY: the table consists of constants and of functions that any thread may call.
unsafe impl Sync for Holder {}

/// Returns the table, which is valid for the life of the process.
#[unsafe(no_mangle)]
pub extern "C" fn accl_transport_v1() -> *const TransportV1 {
    &raw const TABLE.0
}

/// The engine's handle of a link: the link's index plus one, because null means no link.
fn name_of(index: usize) -> *mut c_void {
    std::ptr::without_provenance_mut(index + 1)
}

fn index_of(link: *mut c_void) -> usize {
    link.addr() - 1
}

/// Returns the result of `work` on the world, or `otherwise` without a world or after a panic.
fn with<T: Copy>(otherwise: T, work: impl FnOnce(&mut World) -> T) -> T {
    catch_unwind(AssertUnwindSafe(|| world::with(work).unwrap_or(otherwise))).unwrap_or(otherwise)
}

fn refuse(why: String) -> c_int {
    why::explain(FAILED, why)
}

unsafe extern "C" fn open(
    _context: *mut c_void,
    max_payload_bytes: usize,
    peer: *const c_void,
    peer_bytes: usize,
    link: *mut *mut c_void,
    address: *mut c_void,
    address_bytes: *mut usize,
) -> c_int {
    // A forked child may create links of its own. The engine calls no other function there.
    if let Err(why) = world::guard_fork() {
        return refuse(why);
    }
    let peer = if peer.is_null() {
        None
    } else {
        // SAFETY: by `accl_transport.h`, `peer` points to `peer_bytes` bytes.
        match Address::from_bytes(unsafe { std::slice::from_raw_parts(peer.cast(), peer_bytes) }) {
            Ok(peer) => Some(peer),
            Err(why) => return refuse(why),
        }
    };
    let opened = catch_unwind(AssertUnwindSafe(|| {
        world::with(|world| {
            let (index, ours) = world.open(max_payload_bytes)?;
            if let Some(peer) = &peer
                && let Err(why) = world.connect(index, peer, max_payload_bytes)
            {
                world.destroy(index);
                return Err(why);
            }
            Ok((index, ours.to_bytes()))
        })
        .and_then(|opened| opened)
    }));
    match opened.unwrap_or_else(|_| Err("an internal error of torch-accl-mpi".to_owned())) {
        // SAFETY: by `accl_transport.h`, `address` has room for `*address_bytes` bytes, and `address_bytes` and `link`
        // are valid.
        Ok((index, ours)) => unsafe {
            why::write_address(&ours, address, address_bytes);
            *link = name_of(index);
            OK
        },
        Err(why) => refuse(why),
    }
}

unsafe extern "C" fn connect(link: *mut c_void, peer: *const c_void, bytes: usize, max_payload_bytes: usize) -> c_int {
    // SAFETY: by `accl_transport.h`, `peer` points to `bytes` bytes.
    let peer = Address::from_bytes(unsafe { std::slice::from_raw_parts(peer.cast(), bytes) });
    with(FAILED, |world| {
        let index = index_of(link);
        match peer.and_then(|peer| world.connect(index, &peer, max_payload_bytes)) {
            Ok(()) => OK,
            Err(why) => {
                if let Ok(link) = world.link(index) {
                    link.fail(why);
                }
                FAILED
            }
        }
    })
}

unsafe extern "C" fn reserve(
    link: *mut c_void,
    payload_bytes: usize,
    head: *mut *mut c_void,
    payload: *mut *mut c_void,
) -> c_int {
    with(FAILED, |world| {
        let Some((link, spare)) = world.link_and_spare(index_of(link)) else { return FAILED };
        if link.broken.is_some() {
            return FAILED;
        }
        if !link.has_room() {
            return AGAIN;
        }
        let address = link.reserve(payload_bytes, spare);
        // SAFETY: by `accl_transport.h`, `head` and `payload` are valid; the buffer has room for the head and the
        // payload after it.
        unsafe {
            *head = address.cast();
            *payload = address.add(HEAD_BYTES).cast();
        }
        OK
    })
}

unsafe extern "C" fn commit(link: *mut c_void) {
    let index = index_of(link);
    with((), |world| {
        if world.link(index).is_ok_and(|link| link.commit()) {
            world.send(index);
        }
    });
}

unsafe extern "C" fn peek(
    link: *mut c_void,
    head: *mut *const c_void,
    payload: *mut *const c_void,
    payload_bytes: *mut usize,
) -> c_int {
    let index = index_of(link);
    with(FAILED, |world| {
        for is_last in [false, true] {
            let Ok(link) = world.link(index) else { return FAILED };
            match link.poll() {
                Polled::Frame(message) => {
                    let address = message.buffer.as_ptr();
                    // SAFETY: by `accl_transport.h`, the result pointers are valid; the message is at least as long as
                    // a head.
                    unsafe {
                        *head = address.cast();
                        *payload = address.add(HEAD_BYTES).cast();
                        *payload_bytes = message.bytes - HEAD_BYTES;
                    }
                    return OK;
                }
                Polled::Ended => {
                    if link.doorbell.as_ref().is_some_and(Doorbell::has_died) {
                        world.note_death();
                    }
                    return ENDED;
                }
                Polled::Broken => return FAILED,
                Polled::Nothing if is_last => {}
                Polled::Nothing => world.turn(index),
            }
        }
        AGAIN
    })
}

unsafe extern "C" fn release(link: *mut c_void) {
    with((), |world| {
        if let Some((link, spare)) = world.link_and_spare(index_of(link)) {
            link.release(spare);
        }
    });
}

unsafe extern "C" fn progress(link: *mut c_void) -> c_int {
    let index = index_of(link);
    with(FAILED, |world| {
        let Ok(link) = world.link(index) else { return FAILED };
        if link.broken.is_some() {
            return FAILED;
        }
        if link.outgoing.is_empty() {
            return OK;
        }
        world.turn(index);
        match world.link(index) {
            Ok(link) if link.outgoing.is_empty() => OK,
            Ok(_) => AGAIN,
            Err(_) => FAILED,
        }
    })
}

unsafe extern "C" fn attach(link: *mut c_void, bootstrap: c_int) {
    with((), |world| {
        if let Ok(link) = world.link(index_of(link)) {
            link.doorbell = Some(Doorbell::new(bootstrap));
        }
    });
}

unsafe extern "C" fn arm(link: *mut c_void) -> u64 {
    let index = index_of(link);
    // If something is wrong, the next poll reports it.
    const SOON_US: u64 = 1000;
    with(SOON_US, |world| {
        world.turn(index);
        let Ok(link) = world.link(index) else { return SOON_US };
        // Zero means no time limit.
        link.arm().map_or(0, |interval| u64::try_from(interval.as_micros()).map_or(SOON_US, |us| us.max(1)))
    })
}

unsafe extern "C" fn error(link: *mut c_void) -> *const c_char {
    if link.is_null() {
        return why::last();
    }
    with(std::ptr::null(), |world| match world.link(index_of(link)) {
        // The text lives as long as the link and is never replaced.
        Ok(link) => link.broken.as_ref().map_or(std::ptr::null(), |why| why.as_ptr()),
        Err(_) => std::ptr::null(),
    })
}

unsafe extern "C" fn close(link: *mut c_void) {
    let index = index_of(link);
    with((), |world| {
        if let Ok(link) = world.link(index) {
            link.close();
        }
    });
}

unsafe extern "C" fn destroy(link: *mut c_void) {
    with((), |world| world.destroy(index_of(link)));
}
