//! The calls of MPI that the transport makes, with their results checked.
//!
//! Owns the border to the C interface: what a call returns becomes a `Result`, handles become values. Knows no link. Every function but
//! [`Level`]'s may be called only where the MPI standard allows it for the process's level of thread support; [`crate::world`] sees to that.

use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

use accl_wire::table::{collectives, element_types, ops};
use mpi::ffi;

/// One of the four levels of thread support, the lowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    Single,
    Funneled,
    Serialized,
    Multiple,
}

impl Level {
    pub(crate) const ALL: [Level; 4] = [Level::Single, Level::Funneled, Level::Serialized, Level::Multiple];

    /// Its number in this library.
    fn number(self) -> c_int {
        // SAFETY: constants of the library, which nobody writes to.
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

    /// As mpi4py and people spell it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Level::Single => "single",
            Level::Funneled => "funneled",
            Level::Serialized => "serialized",
            Level::Multiple => "multiple",
        }
    }
}

/// Why a call has failed, in the library's words.
pub(crate) type Checked<T> = Result<T, String>;

fn check(code: c_int, call: &str) -> Checked<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0_u8; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut length = 0;
    // SAFETY: the text has room for the longest that there is.
    let said = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &raw mut length) };
    if said != ffi::MPI_SUCCESS as c_int {
        return Err(format!("{call} returns {code}"));
    }
    let text = String::from_utf8_lossy(&text[..usize::try_from(length).unwrap_or(0).min(text.len())]);
    Err(format!("{call}: {}", text.trim_end_matches('\0').trim()))
}

pub(crate) fn is_initialized() -> Checked<bool> {
    let mut flag = 0;
    // SAFETY: allowed at any time, from any thread.
    check(unsafe { ffi::MPI_Initialized(&raw mut flag) }, "MPI_Initialized").map(|()| flag != 0)
}

pub(crate) fn is_finalized() -> Checked<bool> {
    let mut flag = 0;
    // SAFETY: allowed at any time, from any thread.
    check(unsafe { ffi::MPI_Finalized(&raw mut flag) }, "MPI_Finalized").map(|()| flag != 0)
}

pub(crate) fn init(wanted: Level) -> Checked<Level> {
    let mut provided = 0;
    // SAFETY: no arguments are passed on; the caller has seen that MPI was neither started nor ended.
    let code =
        unsafe { ffi::MPI_Init_thread(std::ptr::null_mut(), std::ptr::null_mut(), wanted.number(), &raw mut provided) };
    check(code, "MPI_Init_thread").map(|()| Level::of(provided))
}

pub(crate) fn level() -> Checked<Level> {
    let mut provided = 0;
    // SAFETY: MPI is initialised.
    check(unsafe { ffi::MPI_Query_thread(&raw mut provided) }, "MPI_Query_thread").map(|()| Level::of(provided))
}

pub(crate) fn finalize() -> Checked<()> {
    // SAFETY: MPI is initialised, and the caller makes no call afterwards.
    check(unsafe { ffi::MPI_Finalize() }, "MPI_Finalize")
}

/// Which library this is, in its own words, which say how it was built, too.
pub(crate) fn library() -> Checked<String> {
    let mut text = vec![0_u8; ffi::MPI_MAX_LIBRARY_VERSION_STRING as usize + 1];
    let mut length = 0;
    // SAFETY: the text has room for the longest that there is; allowed at any time.
    let code = unsafe { ffi::MPI_Get_library_version(text.as_mut_ptr().cast(), &raw mut length) };
    check(code, "MPI_Get_library_version")?;
    let text = CStr::from_bytes_until_nul(&text).map_err(|_| "MPI_Get_library_version has no end".to_owned())?;
    Ok(text.to_string_lossy().into_owned())
}

/// The library's name for people, out of its own words: they go on with how it was built.
pub(crate) fn short_name(library: &str) -> String {
    let line = library.lines().next().unwrap_or_default();
    let name = line.split(',').next().unwrap_or_default();
    name.split_whitespace().collect::<Vec<_>>().join(" ").replace(" Version:", "")
}

/// A communicator of this process.
#[derive(Clone, Copy)]
pub(crate) struct Communicator(ffi::MPI_Comm);

/// An operation that is under way.
pub(crate) struct Request(ffi::MPI_Request);

/// A collective as MPI takes it; its numbers are those of the table of functions.
#[derive(Clone, Copy)]
pub(crate) struct Collective {
    pub(crate) number: u32,
    pub(crate) element_type: u32,
    pub(crate) op: u32,
    pub(crate) root: c_int,
    /// Elements of a block.
    pub(crate) count: c_int,
    /// Null where the contribution lies where the result will.
    pub(crate) input: *const c_void,
    /// Null where this process receives nothing.
    pub(crate) output: *mut c_void,
}

// SAFETY: who may touch the memory, and when, is the contract of `Communicator::collective`.
unsafe impl Send for Collective {}

unsafe extern "C" {
    /// `MPI_IN_PLACE`, which the bindings leave out.
    fn accl_mpi_in_place() -> *mut c_void;
}

fn datatype(number: u32) -> Checked<ffi::MPI_Datatype> {
    // SAFETY: constants of the library, which nobody writes to.
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
            other => return Err(format!("there is no element type {other}")),
        }
    })
}

fn operator(number: u32) -> Checked<ffi::MPI_Op> {
    // SAFETY: as in `datatype`.
    Ok(unsafe {
        match number {
            ops::SUM => ffi::RSMPI_SUM,
            ops::PRODUCT => ffi::RSMPI_PROD,
            ops::MIN => ffi::RSMPI_MIN,
            ops::MAX => ffi::RSMPI_MAX,
            ops::BAND => ffi::RSMPI_BAND,
            ops::BOR => ffi::RSMPI_BOR,
            ops::BXOR => ffi::RSMPI_BXOR,
            other => return Err(format!("there is no operator {other}")),
        }
    })
}

/// A message that has been matched and not received.
pub(crate) struct Message {
    handle: ffi::MPI_Message,
    pub(crate) source: c_int,
    pub(crate) tag: c_int,
    pub(crate) bytes: usize,
}

// SAFETY: the handles are the library's names for its own objects, which the level of thread support lets other threads use.
unsafe impl Send for Communicator {}
// SAFETY: as above; a communicator is a name that is only copied.
unsafe impl Sync for Communicator {}
// SAFETY: as above.
unsafe impl Send for Request {}

impl Communicator {
    /// All processes of the job.
    pub(crate) fn world() -> Communicator {
        // SAFETY: a constant of the library.
        Communicator(unsafe { ffi::RSMPI_COMM_WORLD })
    }

    /// One that somebody else has made, by its number in Fortran, which every library can give.
    pub(crate) fn from_fortran(handle: c_int) -> Communicator {
        // SAFETY: the caller has it from the library that this process uses.
        Communicator(unsafe { ffi::RSMPI_Comm_f2c(handle) })
    }

    pub(crate) fn rank(self) -> Checked<c_int> {
        let mut rank = 0;
        // SAFETY: a communicator of this process.
        check(unsafe { ffi::MPI_Comm_rank(self.0, &raw mut rank) }, "MPI_Comm_rank").map(|()| rank)
    }

    pub(crate) fn size(self) -> Checked<c_int> {
        let mut size = 0;
        // SAFETY: a communicator of this process.
        check(unsafe { ffi::MPI_Comm_size(self.0, &raw mut size) }, "MPI_Comm_size").map(|()| size)
    }

    /// The largest tag of a message.
    pub(crate) fn largest_tag(self) -> Checked<c_int> {
        let mut value: *mut c_int = std::ptr::null_mut();
        let mut flag = 0;
        // SAFETY: the value is a pointer to a number that belongs to the library.
        let code =
            unsafe { ffi::MPI_Comm_get_attr(self.0, ffi::MPI_TAG_UB as c_int, (&raw mut value).cast(), &raw mut flag) };
        check(code, "MPI_Comm_get_attr")?;
        // The standard has this much everywhere.
        const LEAST: c_int = 32_767;
        // SAFETY: there is a value, so the pointer is to it.
        Ok(if flag == 0 || value.is_null() { LEAST } else { unsafe { *value } })
    }

    /// The same processes apart from everybody else's messages, whose errors are returned. All of them have to do so.
    pub(crate) fn duplicate(self, until: Instant) -> Checked<Communicator> {
        // Never freed: who gives up does not know whether the library still writes to it.
        let copy = Box::leak(Box::new(MaybeUninit::uninit()));
        let mut request = MaybeUninit::uninit();
        // SAFETY: the one is written before the call returns, and the other stays.
        check(unsafe { ffi::MPI_Comm_idup(self.0, copy.as_mut_ptr(), request.as_mut_ptr()) }, "MPI_Comm_idup")?;
        // SAFETY: the call has succeeded.
        let mut request = Request(unsafe { request.assume_init() });
        request.complete(until)?;
        // SAFETY: the request has completed.
        let copy = Communicator(unsafe { copy.assume_init() });
        // SAFETY: a communicator of this process, and a constant of the library.
        let code = unsafe { ffi::MPI_Comm_set_errhandler(copy.0, ffi::RSMPI_ERRORS_RETURN) };
        check(code, "MPI_Comm_set_errhandler").map(|()| copy)
    }

    /// Begins to give the first process's bytes to all. All of them have to ask.
    ///
    /// # Safety
    /// The bytes stay, and are left alone until the request has completed.
    pub(crate) unsafe fn broadcast(self, bytes: *mut u8, length: usize) -> Checked<Request> {
        let length = c_int::try_from(length).map_err(|_| "MPI_Ibcast: the message is too long".to_owned())?;
        let mut request = MaybeUninit::uninit();
        // SAFETY: the caller keeps the bytes.
        let code =
            unsafe { ffi::MPI_Ibcast(bytes.cast(), length, ffi::RSMPI_UINT8_T, 0, self.0, request.as_mut_ptr()) };
        check(code, "MPI_Ibcast")?;
        // SAFETY: the call has succeeded.
        Ok(Request(unsafe { request.assume_init() }))
    }

    /// A communicator of some of the processes, in this order, of which all have to ask, with one tag. Waits for them, and for no others.
    pub(crate) fn of_some(self, ranks: &[c_int], tag: c_int) -> Checked<Communicator> {
        let count = c_int::try_from(ranks.len()).map_err(|_| "MPI_Group_incl: there are too many ranks".to_owned())?;
        let mut all = MaybeUninit::uninit();
        // SAFETY: a communicator of this process; the group is written when the call succeeds.
        check(unsafe { ffi::MPI_Comm_group(self.0, all.as_mut_ptr()) }, "MPI_Comm_group")?;
        // SAFETY: the call has succeeded.
        let mut all = unsafe { all.assume_init() };
        let (mut some, mut made) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: there are as many ranks as it is told; the group is written when the call succeeds.
        let code = unsafe { ffi::MPI_Group_incl(all, count, ranks.as_ptr(), some.as_mut_ptr()) };
        let included = check(code, "MPI_Group_incl");
        let created = included.and_then(|()| {
            // SAFETY: the call has succeeded.
            let mut some = unsafe { some.assume_init() };
            // SAFETY: a communicator and a group of this process; the other is written when the call succeeds.
            let code = unsafe { ffi::MPI_Comm_create_group(self.0, some, tag, made.as_mut_ptr()) };
            // SAFETY: nobody else knows of the group.
            let _ = unsafe { ffi::MPI_Group_free(&raw mut some) };
            check(code, "MPI_Comm_create_group")
        });
        // SAFETY: as above.
        let _ = unsafe { ffi::MPI_Group_free(&raw mut all) };
        created?;
        // SAFETY: the call has succeeded.
        let made = Communicator(unsafe { made.assume_init() });
        // SAFETY: a communicator of this process, and a constant of the library.
        let code = unsafe { ffi::MPI_Comm_set_errhandler(made.0, ffi::RSMPI_ERRORS_RETURN) };
        check(code, "MPI_Comm_set_errhandler").map(|()| made)
    }

    /// Gives it back. All of its processes do so, and nothing is under way in it.
    pub(crate) fn free(mut self) -> Checked<()> {
        // SAFETY: a communicator that this process has made, which nobody uses from here on.
        check(unsafe { ffi::MPI_Comm_free(&raw mut self.0) }, "MPI_Comm_free")
    }

    /// Begins a collective, which all processes have to do in one order.
    ///
    /// # Safety
    /// The memory has the room that the collective says, and is left alone until the request has completed.
    pub(crate) unsafe fn collective(self, what: &Collective) -> Checked<Request> {
        let &Collective { number, element_type, op, root, count, input, output } = what;
        let in_place = input.is_null() && !output.is_null();
        // SAFETY: a constant of the library.
        let from = if in_place { unsafe { accl_mpi_in_place() }.cast_const() } else { input };
        let (element, op) = (datatype(element_type)?, operator(op)?);
        let mut request = MaybeUninit::uninit();
        let into = request.as_mut_ptr();
        let comm = self.0;
        // SAFETY: the caller keeps the memory, which has the room that the collective says.
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
                other => return Err(format!("there is no collective {other}")),
            }
        };
        check(code, name)?;
        // SAFETY: the call has succeeded.
        Ok(Request(unsafe { request.assume_init() }))
    }

    /// Begins to wait until all processes have come so far.
    pub(crate) fn barrier(self) -> Checked<Request> {
        let mut request = MaybeUninit::uninit();
        // SAFETY: a communicator of this process; the request is written when the call succeeds.
        check(unsafe { ffi::MPI_Ibarrier(self.0, request.as_mut_ptr()) }, "MPI_Ibarrier")?;
        // SAFETY: the call has succeeded.
        Ok(Request(unsafe { request.assume_init() }))
    }

    /// Begins to send.
    ///
    /// # Safety
    /// The bytes stay as they are until the request has completed.
    pub(crate) unsafe fn send(self, bytes: *const u8, length: usize, to: c_int, tag: c_int) -> Checked<Request> {
        let length = c_int::try_from(length).map_err(|_| "MPI_Isend: the message is too long".to_owned())?;
        let mut request = MaybeUninit::uninit();
        // SAFETY: the caller keeps the bytes.
        let code =
            unsafe { ffi::MPI_Isend(bytes.cast(), length, ffi::RSMPI_UINT8_T, to, tag, self.0, request.as_mut_ptr()) };
        check(code, "MPI_Isend")?;
        // SAFETY: the call has succeeded.
        Ok(Request(unsafe { request.assume_init() }))
    }

    /// The next message from anybody.
    pub(crate) fn probe(self) -> Checked<Option<Message>> {
        let mut flag = 0;
        let mut handle = MaybeUninit::uninit();
        let mut status = MaybeUninit::<ffi::MPI_Status>::uninit();
        // SAFETY: all of it is written to when there is a message.
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
        // SAFETY: there is a message, so its status was written.
        let code = unsafe { ffi::MPI_Get_count(status.as_ptr(), ffi::RSMPI_UINT8_T, &raw mut bytes) };
        check(code, "MPI_Get_count")?;
        let bytes = usize::try_from(bytes).map_err(|_| "MPI_Get_count: the message has no length".to_owned())?;
        // SAFETY: there is a message, so both were written.
        let (handle, status) = unsafe { (handle.assume_init(), status.assume_init()) };
        Ok(Some(Message { handle, source: status.MPI_SOURCE, tag: status.MPI_TAG, bytes }))
    }
}

impl Message {
    /// Begins to receive it.
    ///
    /// # Safety
    /// There is room for as many bytes as it has, which stays and is left alone until the request has completed.
    pub(crate) unsafe fn receive(mut self, into: *mut u8) -> Checked<Request> {
        let length = c_int::try_from(self.bytes).map_err(|_| "MPI_Imrecv: the message is too long".to_owned())?;
        let mut request = MaybeUninit::uninit();
        // SAFETY: the caller keeps the room.
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
        // SAFETY: the call has succeeded.
        Ok(Request(unsafe { request.assume_init() }))
    }
}

impl Request {
    /// Whether it has completed. What has, completes again.
    pub(crate) fn is_complete(&mut self) -> Checked<bool> {
        let mut flag = 0;
        // SAFETY: a request of this process, which the library replaces by none when it is complete.
        let code = unsafe { ffi::MPI_Test(&raw mut self.0, &raw mut flag, ffi::RSMPI_STATUS_IGNORE) };
        check(code, "MPI_Test").map(|()| flag != 0)
    }

    pub(crate) fn complete(&mut self, until: Instant) -> Checked<()> {
        while !self.is_complete()? {
            if Instant::now() >= until {
                return Err("not all processes of the MPI job have come".to_owned());
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    }
}

/// Calls `then` when somebody else finalises MPI, before it ends: the attributes of this communicator are deleted first.
pub(crate) fn before_finalize(then: fn()) -> Checked<()> {
    unsafe extern "C" fn deleted(_: ffi::MPI_Comm, _: c_int, value: *mut c_void, _: *mut c_void) -> c_int {
        // SAFETY: the value is the function that the attribute was set to.
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
        // SAFETY: the library passes the place for the answer.
        unsafe { *flag = 0 };
        ffi::MPI_SUCCESS as c_int
    }
    let mut key = 0;
    // SAFETY: the functions have the types that the standard gives them.
    let code =
        unsafe { ffi::MPI_Comm_create_keyval(Some(not_copied), Some(deleted), &raw mut key, std::ptr::null_mut()) };
    check(code, "MPI_Comm_create_keyval")?;
    // SAFETY: the value is passed back and not followed.
    let code = unsafe { ffi::MPI_Comm_set_attr(ffi::RSMPI_COMM_SELF, key, then as *mut c_void) };
    check(code, "MPI_Comm_set_attr")
}
