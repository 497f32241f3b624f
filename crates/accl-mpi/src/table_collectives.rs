//! The functions of the table that run whole collectives.
//!
//! Owns the border to the engine: pointers become groups and calls of [`crate::collectives`], and no panic crosses.
//! Knows no MPI.

use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use accl_wire::table::{AGAIN, CollectiveV1, FAILED, OK};

use crate::address::Address;
use crate::calls::{Checked, Collective};
use crate::collectives::{Call, Group};
use crate::groups::{self, Opened};
use crate::why::{self, explain};
use crate::world;

/// Returns the code of `work`. For an error or a panic, stores the text and returns `FAILED`.
fn guarded(work: impl FnOnce() -> Checked<c_int>) -> c_int {
    let done = catch_unwind(AssertUnwindSafe(|| world::guard_fork().and_then(|()| work())));
    match done.unwrap_or_else(|_| Err("an internal error of torch-accl-mpi".to_owned())) {
        Ok(returned) => returned,
        Err(why) => explain(FAILED, why),
    }
}

pub(crate) unsafe extern "C" fn address(_context: *mut c_void, address: *mut c_void, bytes: *mut usize) -> c_int {
    guarded(|| {
        let ours = groups::address()?.to_bytes();
        // SAFETY: by `accl_transport.h`, `address` has room for `*bytes` bytes, and `bytes` is valid.
        unsafe { why::write_address(&ours, address, bytes) };
        Ok(OK)
    })
}

pub(crate) unsafe extern "C" fn open(
    _context: *mut c_void,
    rank: u32,
    world: u32,
    addresses: *const *const c_void,
    lengths: *const usize,
    key: u64,
    group: *mut *mut c_void,
) -> c_int {
    guarded(|| {
        let read = |other: usize| {
            // SAFETY: by `accl_transport.h`, there are `world` addresses and lengths, and each address has its length
            // in bytes.
            let bytes = unsafe { std::slice::from_raw_parts((*addresses.add(other)).cast(), *lengths.add(other)) };
            Address::from_bytes(bytes).map_err(|why| format!("rank {other}: {why}"))
        };
        let addresses = (0..world as usize).map(read).collect::<Checked<Vec<Address>>>()?;
        match groups::open(rank, &addresses, key)? {
            Opened::Group(made) => {
                // SAFETY: by `accl_transport.h`, `group` is valid.
                unsafe { *group = Arc::into_raw(made).cast_mut().cast() };
                Ok(OK)
            }
            Opened::LeftToHost(why) => Ok(explain(AGAIN, why)),
        }
    })
}

pub(crate) unsafe extern "C" fn start(group: *mut c_void, what: *const CollectiveV1, call: *mut *mut c_void) -> c_int {
    guarded(|| {
        // SAFETY: `open` returned the group, and it is not closed.
        let group = unsafe { &*group.cast::<Group>() };
        // SAFETY: by `accl_transport.h`, `what` points to a collective.
        let &CollectiveV1 { collective, element_type, op, root, count, input, output, .. } = unsafe { &*what };
        let count = c_int::try_from(count).map_err(|_| format!("a count of {count} elements is too large for MPI"))?;
        let root = c_int::try_from(root).map_err(|_| format!("root {root} is not a rank"))?;
        let what = Collective { number: collective, element_type, op, root, count, input, output };
        // SAFETY: the pointer came from `Arc::into_raw` in `open`, and that reference lives until `close`.
        let group = unsafe {
            Arc::increment_strong_count(std::ptr::from_ref(group));
            Arc::from_raw(std::ptr::from_ref(group))
        };
        let made = Arc::new(Mutex::new(group.call(what)));
        world::start_collective(&made)?;
        // SAFETY: by `accl_transport.h`, `call` is valid.
        unsafe { *call = Arc::into_raw(made).cast_mut().cast() };
        Ok(OK)
    })
}

pub(crate) unsafe extern "C" fn test(call: *mut c_void) -> c_int {
    guarded(|| {
        let call = call.cast_const().cast::<Mutex<Call>>();
        // SAFETY: `start` returned the call, and it has not ended before.
        match world::test_collective(unsafe { &*call }) {
            None => Ok(AGAIN),
            Some(Err(why)) => Err(why),
            Some(Ok(())) => {
                // SAFETY: the pointer came from `Arc::into_raw` in `start`, and the engine does not use it from here
                // on.
                drop(unsafe { Arc::from_raw(call) });
                Ok(OK)
            }
        }
    })
}

pub(crate) unsafe extern "C" fn abandon(call: *mut c_void) {
    guarded(|| {
        // SAFETY: the pointer came from `Arc::into_raw` in `start`, and the engine does not use it from here on.
        let call = unsafe { Arc::from_raw(call.cast_const().cast::<Mutex<Call>>()) };
        world::abandon_collective(&call);
        // Leaked, because the library may still work on it.
        std::mem::forget(call);
        Ok(OK)
    });
}

pub(crate) unsafe extern "C" fn error() -> *const c_char {
    why::last()
}

pub(crate) unsafe extern "C" fn close(group: *mut c_void, has_failed: c_int) {
    guarded(|| {
        // SAFETY: the pointer came from `Arc::into_raw` in `open`, and the engine does not use it from here on.
        let group = unsafe { Arc::from_raw(group.cast_const().cast::<Group>()) };
        let gives_back = group.close();
        world::with(|world| {
            if has_failed != 0 {
                world.note_doubt();
            } else if gives_back {
                world.give_back_first_communicator();
            }
        })?;
        Ok(OK)
    });
}
