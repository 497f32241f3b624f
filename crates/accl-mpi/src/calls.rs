//! The MPI calls of the transport, with checked results.
//!
//! Owns the border to the C interface: a return code becomes a `Result`, a handle becomes a value. Knows no link.
//! Except for [`Level`]'s functions, each function may be called only where the MPI standard allows it for the
//! process's level of thread support. [`crate::world`] ensures that.

use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

use accl_wire::table::{collectives, element_types, ops};
use mpi::ffi;

/// One of the four levels of thread support, in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    Single,
    Funneled,
    Serialized,
    Multiple,
}

impl Level {
    pub(crate) const ALL: [Level; 4] = [Level::Single, Level::Funneled, Level::Serialized, Level::Multiple];

    /// The level's number in this library.
    fn number(self) -> c_int {
        // SAFETY: reads constants of the library, which are never written.
        unsafe {
            match self {
                Level::Single => ffi::RSMPI_THREAD_SINGLE,
                Level::Funneled => ffi::RSMPI_THREAD_FUNNELED,
                Level::Serialized => ffi::RSMPI_THREAD_SERIALIZED,
                Level::Multiple => ffi::RSMPI_THREAD_MULTIPLE,
            }
        }
    }

    fn of(number: c_int) -> Level {
        Level::ALL.into_iter().rev().find(|level| level.number() <= number).unwrap_or(Level::Single)
    }

    /// The level's name, spelled as in mpi4py.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Level::Single => "single",
            Level::Funneled => "funneled",
            Level::Serialized => "serialized",
            Level::Multiple => "multiple",
        }
    }
}

/// The result of a call, or the library's error text.
pub(crate) type Checked<T> = Result<T, String>;

fn check(code: c_int, call: &str) -> Checked<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0_u8; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut length = 0;
    // SAFETY: `text` has room for the library's longest error string.
    let said = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &raw mut length) };
    if said != ffi::MPI_SUCCESS as c_int {
        return Err(format!("{call} returned error code {code}"));
    }
    let text = String::from_utf8_lossy(&text[..usize::try_from(length).unwrap_or(0).min(text.len())]);
    Err(format!("{call}: {}", text.trim_end_matches('\0').trim()))
}

pub(crate) fn is_initialized() -> Checked<bool> {
    let mut flag = 0;
    // SAFETY: `MPI_Initialized` may be called at any time from any thread, and `flag` is valid.
    check(unsafe { ffi::MPI_Initialized(&raw mut flag) }, "MPI_Initialized").map(|()| flag != 0)
}

pub(crate) fn is_finalized() -> Checked<bool> {
    let mut flag = 0;
    // SAFETY: `MPI_Finalized` may be called at any time from any thread, and `flag` is valid.
    check(unsafe { ffi::MPI_Finalized(&raw mut flag) }, "MPI_Finalized").map(|()| flag != 0)
}

pub(crate) fn init(wanted: Level) -> Checked<Level> {
    let mut provided = 0;
    // SAFETY: no arguments are passed; the caller has checked that MPI was neither started nor ended.
    let code =
        unsafe { ffi::MPI_Init_thread(std::ptr::null_mut(), std::ptr::null_mut(), wanted.number(), &raw mut provided) };
    check(code, "MPI_Init_thread").map(|()| Level::of(provided))
}

pub(crate) fn level() -> Checked<Level> {
    let mut provided = 0;
    // SAFETY: the caller has checked that MPI is initialised.
    check(unsafe { ffi::MPI_Query_thread(&raw mut provided) }, "MPI_Query_thread").map(|()| Level::of(provided))
}

pub(crate) fn finalize() -> Checked<()> {
    // SAFETY: MPI is initialised, and the caller makes no MPI call afterwards.
    check(unsafe { ffi::MPI_Finalize() }, "MPI_Finalize")
}

/// The library's version text, which also describes its build.
pub(crate) fn library() -> Checked<String> {
    let mut text = vec![0_u8; ffi::MPI_MAX_LIBRARY_VERSION_STRING as usize + 1];
    let mut length = 0;
    // SAFETY: `text` has room for the longest version string; `MPI_Get_library_version` may be called at any time.
    let code = unsafe { ffi::MPI_Get_library_version(text.as_mut_ptr().cast(), &raw mut length) };
    check(code, "MPI_Get_library_version")?;
    let text =
        CStr::from_bytes_until_nul(&text).map_err(|_| "MPI_Get_library_version: the text has no end".to_owned())?;
    Ok(text.to_string_lossy().into_owned())
}

/// The library's short name, from the start of its version text.
pub(crate) fn short_name(library: &str) -> String {
    let line = library.lines().next().unwrap_or_default();
    let name = line.split(',').next().unwrap_or_default();
    name.split_whitespace().collect::<Vec<_>>().join(" ").replace(" Version:", "")
}

/// A communicator of this process.
#[derive(Clone, Copy)]
pub(crate) struct Communicator(ffi::MPI_Comm);

/// An operation in flight.
pub(crate) struct Request(ffi::MPI_Request);

/// A collective in MPI's terms. Its codes are the codes of `accl_wire::table`.
#[derive(Clone, Copy)]
pub(crate) struct Collective {
    pub(crate) number: u32,
    pub(crate) element_type: u32,
    pub(crate) op: u32,
    pub(crate) root: c_int,
    /// Number of elements in a block.
    pub(crate) count: c_int,
    /// Null if the contribution is already in `output`.
    pub(crate) input: *const c_void,
    /// Null if this process receives nothing.
    pub(crate) output: *mut c_void,
}

// SAFETY: the contract of `Communicator::collective` states which thread may access the memory, and when.
unsafe impl Send for Collective {}

unsafe extern "C" {
    /// Returns `MPI_IN_PLACE`, which the bindings leave out.
    fn accl_mpi_in_place() -> *mut c_void;
}

fn datatype(number: u32) -> Checked<ffi::MPI_Datatype> {
    // SAFETY: reads constants of the library, which are never written.
    Ok(unsafe {
        match number {
            element_types::BYTES | element_types::UINT8 => ffi::RSMPI_UINT8_T,
            element_types::INT8 => ffi::RSMPI_INT8_T,
            element_types::INT32 => ffi::RSMPI_INT32_T,
            element_types::UINT32 => ffi::RSMPI_UINT32_T,
            element_types::INT64 => ffi::RSMPI_INT64_T,
            element_types::UINT64 => ffi::RSMPI_UINT64_T,
            element_types::FLOAT => ffi::RSMPI_FLOAT,
            element_types::DOUBLE => ffi::RSMPI_DOUBLE,
            element_types::FLOAT_COMPLEX => ffi::RSMPI_FLOAT_COMPLEX,
            element_types::DOUBLE_COMPLEX => ffi::RSMPI_DOUBLE_COMPLEX,
            other => return Err(format!("unknown element type {other}")),
        }
    })
}

fn operator(number: u32) -> Checked<ffi::MPI_Op> {
    // SAFETY: reads constants of the library, which are never written.
    Ok(unsafe {
        match number {
            ops::SUM => ffi::RSMPI_SUM,
            ops::PRODUCT => ffi::RSMPI_PROD,
            ops::MIN => ffi::RSMPI_MIN,
            ops::MAX => ffi::RSMPI_MAX,
            ops::BAND => ffi::RSMPI_BAND,
            ops::BOR => ffi::RSMPI_BOR,
            ops::BXOR => ffi::RSMPI_BXOR,
            other => return Err(format!("unknown operator {other}")),
        }
    })
}

/// A message that was matched and not yet received.
pub(crate) struct Message {
    handle: ffi::MPI_Message,
    pub(crate) source: c_int,
    pub(crate) tag: c_int,
    pub(crate) bytes: usize,
}

// SAFETY: a communicator is a handle of the library, which other threads may use at the checked level of thread
// support.
unsafe impl Send for Communicator {}
// SAFETY: a communicator is a handle that is only copied, so sharing a reference to it is harmless.
unsafe impl Sync for Communicator {}
// SAFETY: a request is a handle of the library, which other threads may use at the checked level of thread support.
unsafe impl Send for Request {}

impl Communicator {
    /// The communicator of all processes of the job.
    pub(crate) fn world() -> Communicator {
        // SAFETY: reads a constant of the library.
        Communicator(unsafe { ffi::RSMPI_COMM_WORLD })
    }

    /// A communicator that other code has created, from its Fortran handle, which every library provides.
    pub(crate) fn from_fortran(handle: c_int) -> Communicator {
        // SAFETY: the caller got the handle from the library that this process uses.
        Communicator(unsafe { ffi::RSMPI_Comm_f2c(handle) })
    }

    pub(crate) fn rank(self) -> Checked<c_int> {
        let mut rank = 0;
        // SAFETY: `self` is a communicator of this process, and `rank` is valid.
        check(unsafe { ffi::MPI_Comm_rank(self.0, &raw mut rank) }, "MPI_Comm_rank").map(|()| rank)
    }

    pub(crate) fn size(self) -> Checked<c_int> {
        let mut size = 0;
        // SAFETY: `self` is a communicator of this process, and `size` is valid.
        check(unsafe { ffi::MPI_Comm_size(self.0, &raw mut size) }, "MPI_Comm_size").map(|()| size)
    }

    /// The largest tag that a message may have.
    pub(crate) fn largest_tag(self) -> Checked<c_int> {
        let mut value: *mut c_int = std::ptr::null_mut();
        let mut flag = 0;
        // SAFETY: the library writes to `value` a pointer to a number that it owns.
        let code =
            unsafe { ffi::MPI_Comm_get_attr(self.0, ffi::MPI_TAG_UB as c_int, (&raw mut value).cast(), &raw mut flag) };
        check(code, "MPI_Comm_get_attr")?;
        // The minimum that the standard guarantees.
        const LEAST: c_int = 32_767;
        // SAFETY: `flag` is set and the pointer is not null, so it points to the value.
        Ok(if flag == 0 || value.is_null() { LEAST } else { unsafe { *value } })
    }

    /// Creates a communicator of the same processes with separate messages, which returns errors instead of aborting.
    /// All processes must call this.
    pub(crate) fn duplicate(self, until: Instant) -> Checked<Communicator> {
        // Leaked: if this gives up, the library may still write to it.
        let copy = Box::leak(Box::new(MaybeUninit::uninit()));
        let mut request = MaybeUninit::uninit();
        // SAFETY: `request` is written before the call returns, and `copy` is leaked, so it stays valid.
        check(unsafe { ffi::MPI_Comm_idup(self.0, copy.as_mut_ptr(), request.as_mut_ptr()) }, "MPI_Comm_idup")?;
        // SAFETY: the call succeeded, so `request` is initialised.
        let mut request = Request(unsafe { request.assume_init() });
        request.complete(until)?;
        // SAFETY: the request completed, so `copy` is initialised.
        let copy = Communicator(unsafe { copy.assume_init() });
        // SAFETY: `copy` is a communicator of this process, and the error handler is a constant of the library.
        let code = unsafe { ffi::MPI_Comm_set_errhandler(copy.0, ffi::RSMPI_ERRORS_RETURN) };
        check(code, "MPI_Comm_set_errhandler").map(|()| copy)
    }

    /// Starts a broadcast of the first process's bytes to all processes. All processes must call this.
    ///
    /// # Safety
    /// The bytes stay valid and are not accessed until the request has completed.
    pub(crate) unsafe fn broadcast(self, bytes: *mut u8, length: usize) -> Checked<Request> {
        let length = c_int::try_from(length).map_err(|_| "MPI_Ibcast: the message is too long".to_owned())?;
        let mut request = MaybeUninit::uninit();
        // SAFETY: the bytes stay valid by this function's contract.
        let code =
            unsafe { ffi::MPI_Ibcast(bytes.cast(), length, ffi::RSMPI_UINT8_T, 0, self.0, request.as_mut_ptr()) };
        check(code, "MPI_Ibcast")?;
        // SAFETY: the call succeeded, so `request` is initialised.
        Ok(Request(unsafe { request.assume_init() }))
    }

    /// Creates a communicator of some of the processes, in this order. All of them must call this, with the same tag.
    /// Waits for these processes only.
    pub(crate) fn of_some(self, ranks: &[c_int], tag: c_int) -> Checked<Communicator> {
        let count = c_int::try_from(ranks.len()).map_err(|_| "MPI_Group_incl: too many ranks".to_owned())?;
        let mut all = MaybeUninit::uninit();
        // SAFETY: `self` is a communicator of this process; the call writes `all` if it succeeds.
        check(unsafe { ffi::MPI_Comm_group(self.0, all.as_mut_ptr()) }, "MPI_Comm_group")?;
        // SAFETY: the call succeeded, so `all` is initialised.
        let mut all = unsafe { all.assume_init() };
        let (mut some, mut made) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: `ranks` has `count` entries; the call writes `some` if it succeeds.
        let code = unsafe { ffi::MPI_Group_incl(all, count, ranks.as_ptr(), some.as_mut_ptr()) };
        let included = check(code, "MPI_Group_incl");
        let created = included.and_then(|()| {
            // SAFETY: the call succeeded, so `some` is initialised.
            let mut some = unsafe { some.assume_init() };
            // SAFETY: `self` and `some` belong to this process; the call writes `made` if it succeeds.
            let code = unsafe { ffi::MPI_Comm_create_group(self.0, some, tag, made.as_mut_ptr()) };
            // SAFETY: no other code has the group `some`.
            let _ = unsafe { ffi::MPI_Group_free(&raw mut some) };
            check(code, "MPI_Comm_create_group")
        });
        // SAFETY: no other code has the group `all`.
        let _ = unsafe { ffi::MPI_Group_free(&raw mut all) };
        created?;
        // SAFETY: the call succeeded, so `made` is initialised.
        let made = Communicator(unsafe { made.assume_init() });
        // SAFETY: `made` is a communicator of this process, and the error handler is a constant of the library.
        let code = unsafe { ffi::MPI_Comm_set_errhandler(made.0, ffi::RSMPI_ERRORS_RETURN) };
        check(code, "MPI_Comm_set_errhandler").map(|()| made)
    }

    /// Frees the communicator. All of its processes must do so, with nothing in flight.
    pub(crate) fn free(mut self) -> Checked<()> {
        // SAFETY: this process created the communicator, and no code uses it from here on.
        check(unsafe { ffi::MPI_Comm_free(&raw mut self.0) }, "MPI_Comm_free")
    }

    /// Starts a collective. All processes must start their collectives in the same order.
    ///
    /// # Safety
    /// The memory is as large as the collective needs, and is not accessed until the request has completed.
    pub(crate) unsafe fn collective(self, what: &Collective) -> Checked<Request> {
        let &Collective { number, element_type, op, root, count, input, output } = what;
        let in_place = input.is_null() && !output.is_null();
        // SAFETY: the function returns a constant of the library.
        let from = if in_place { unsafe { accl_mpi_in_place() }.cast_const() } else { input };
        let (element, op) = (datatype(element_type)?, operator(op)?);
        let mut request = MaybeUninit::uninit();
        let into = request.as_mut_ptr();
        let comm = self.0;
        // SAFETY: the memory is valid and large enough by this function's contract.
        let (code, name) = unsafe {
            match number {
                collectives::BROADCAST => (ffi::MPI_Ibcast(output, count, element, root, comm, into), "MPI_Ibcast"),
                collectives::ALL_REDUCE => {
                    (ffi::MPI_Iallreduce(from, output, count, element, op, comm, into), "MPI_Iallreduce")
                }
                collectives::REDUCE => {
                    (ffi::MPI_Ireduce(from, output, count, element, op, root, comm, into), "MPI_Ireduce")
                }
                collectives::ALL_GATHER => {
                    (ffi::MPI_Iallgather(from, count, element, output, count, element, comm, into), "MPI_Iallgather")
                }
                collectives::GATHER => {
                    (ffi::MPI_Igather(from, count, element, output, count, element, root, comm, into), "MPI_Igather")
                }
                collectives::SCATTER => {
                    (ffi::MPI_Iscatter(input, count, element, output, count, element, root, comm, into), "MPI_Iscatter")
                }
                collectives::REDUCE_SCATTER => (
                    ffi::MPI_Ireduce_scatter_block(from, output, count, element, op, comm, into),
                    "MPI_Ireduce_scatter_block",
                ),
                collectives::ALL_TO_ALL => {
                    (ffi::MPI_Ialltoall(input, count, element, output, count, element, comm, into), "MPI_Ialltoall")
                }
                other => return Err(format!("unknown collective {other}")),
            }
        };
        check(code, name)?;
        // SAFETY: the call succeeded, so `request` is initialised.
        Ok(Request(unsafe { request.assume_init() }))
    }

    /// Starts a barrier of all processes.
    pub(crate) fn barrier(self) -> Checked<Request> {
        let mut request = MaybeUninit::uninit();
        // SAFETY: `self` is a communicator of this process; the call writes `request` if it succeeds.
        check(unsafe { ffi::MPI_Ibarrier(self.0, request.as_mut_ptr()) }, "MPI_Ibarrier")?;
        // SAFETY: the call succeeded, so `request` is initialised.
        Ok(Request(unsafe { request.assume_init() }))
    }

    /// Starts a send.
    ///
    /// # Safety
    /// The bytes stay valid and unchanged until the request has completed.
    pub(crate) unsafe fn send(self, bytes: *const u8, length: usize, to: c_int, tag: c_int) -> Checked<Request> {
        let length = c_int::try_from(length).map_err(|_| "MPI_Isend: the message is too long".to_owned())?;
        let mut request = MaybeUninit::uninit();
        // SAFETY: the bytes stay valid by this function's contract.
        let code =
            unsafe { ffi::MPI_Isend(bytes.cast(), length, ffi::RSMPI_UINT8_T, to, tag, self.0, request.as_mut_ptr()) };
        check(code, "MPI_Isend")?;
        // SAFETY: the call succeeded, so `request` is initialised.
        Ok(Request(unsafe { request.assume_init() }))
    }

    /// Matches the next message from any process; `None` if there is no message.
    pub(crate) fn probe(self) -> Checked<Option<Message>> {
        let mut flag = 0;
        let mut handle = MaybeUninit::uninit();
        let mut status = MaybeUninit::<ffi::MPI_Status>::uninit();
        // SAFETY: all pointers are valid; the call writes to them if there is a message.
        let code = unsafe {
            ffi::MPI_Improbe(
                ffi::RSMPI_ANY_SOURCE,
                ffi::RSMPI_ANY_TAG,
                self.0,
                &raw mut flag,
                handle.as_mut_ptr(),
                status.as_mut_ptr(),
            )
        };
        check(code, "MPI_Improbe")?;
        if flag == 0 {
            return Ok(None);
        }
        let mut bytes = 0;
        // SAFETY: there is a message, so `status` is initialised.
        let code = unsafe { ffi::MPI_Get_count(status.as_ptr(), ffi::RSMPI_UINT8_T, &raw mut bytes) };
        check(code, "MPI_Get_count")?;
        let bytes = usize::try_from(bytes).map_err(|_| "MPI_Get_count: the message has no length".to_owned())?;
        // SAFETY: there is a message, so `handle` and `status` are initialised.
        let (handle, status) = unsafe { (handle.assume_init(), status.assume_init()) };
        Ok(Some(Message { handle, source: status.MPI_SOURCE, tag: status.MPI_TAG, bytes }))
    }
}

impl Message {
    /// Starts to receive the message.
    ///
    /// # Safety
    /// `into` has room for all bytes of the message. It stays valid and is not accessed until the request has
    /// completed.
    pub(crate) unsafe fn receive(mut self, into: *mut u8) -> Checked<Request> {
        let length = c_int::try_from(self.bytes).map_err(|_| "MPI_Imrecv: the message is too long".to_owned())?;
        let mut request = MaybeUninit::uninit();
        // SAFETY: `into` is valid and large enough by this function's contract.
        let code = unsafe {
            ffi::MPI_Imrecv(
                into.cast::<c_void>(),
                length,
                ffi::RSMPI_UINT8_T,
                &raw mut self.handle,
                request.as_mut_ptr(),
            )
        };
        check(code, "MPI_Imrecv")?;
        // SAFETY: the call succeeded, so `request` is initialised.
        Ok(Request(unsafe { request.assume_init() }))
    }
}

impl Request {
    /// Whether the request has completed. May be called again after that.
    pub(crate) fn is_complete(&mut self) -> Checked<bool> {
        let mut flag = 0;
        // SAFETY: `self` is a request of this process, which the library replaces by the null request when it
        // completes.
        let code = unsafe { ffi::MPI_Test(&raw mut self.0, &raw mut flag, ffi::RSMPI_STATUS_IGNORE) };
        check(code, "MPI_Test").map(|()| flag != 0)
    }

    pub(crate) fn complete(&mut self, until: Instant) -> Checked<()> {
        while !self.is_complete()? {
            if Instant::now() >= until {
                return Err("not all processes of the MPI job arrived in time".to_owned());
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    }
}

/// Calls `then` when other code finalises MPI, before MPI ends: MPI first deletes the attributes of `MPI_COMM_SELF`.
pub(crate) fn before_finalize(then: fn()) -> Checked<()> {
    unsafe extern "C" fn deleted(_: ffi::MPI_Comm, _: c_int, value: *mut c_void, _: *mut c_void) -> c_int {
        // SAFETY: `value` is the function pointer that `MPI_Comm_set_attr` stores below.
        let then = unsafe { std::mem::transmute::<*mut c_void, fn()>(value) };
        then();
        ffi::MPI_SUCCESS as c_int
    }
    unsafe extern "C" fn not_copied(
        _: ffi::MPI_Comm,
        _: c_int,
        _: *mut c_void,
        _: *mut c_void,
        _: *mut c_void,
        flag: *mut c_int,
    ) -> c_int {
        // SAFETY: the library passes a valid `flag`.
        unsafe { *flag = 0 };
        ffi::MPI_SUCCESS as c_int
    }
    let mut key = 0;
    // SAFETY: the callbacks have the types that the standard prescribes, and `key` is valid.
    let code =
        unsafe { ffi::MPI_Comm_create_keyval(Some(not_copied), Some(deleted), &raw mut key, std::ptr::null_mut()) };
    check(code, "MPI_Comm_create_keyval")?;
    // SAFETY: the library passes the value back and does not dereference it.
    let code = unsafe { ffi::MPI_Comm_set_attr(ffi::RSMPI_COMM_SELF, key, then as *mut c_void) };
    check(code, "MPI_Comm_set_attr")
}
