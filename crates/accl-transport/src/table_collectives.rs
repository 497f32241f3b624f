//! Collective offload by a library of another package: the last functions of its table.
//!
//! Owns the calls to these functions. Read [`TableCollectives::of`] first.

use std::ffi::{CStr, c_char, c_int, c_void};

use accl_wire::table::{AGAIN, CollectiveV1, OK, TransportV1};

use crate::collectives::{CollectiveCall, CollectiveGroup, Collectives, Opened};
use crate::transport::MAX_ADDRESS_BYTES;

type Open =
    unsafe extern "C" fn(*mut c_void, u32, u32, *const *const c_void, *const usize, u64, *mut *mut c_void) -> c_int;

/// The checked functions: all are present.
#[derive(Clone, Copy)]
pub(crate) struct TableCollectives {
    name: &'static str,
    context: *mut c_void,
    address: unsafe extern "C" fn(*mut c_void, *mut c_void, *mut usize) -> c_int,
    open: Open,
    start: unsafe extern "C" fn(*mut c_void, *const CollectiveV1, *mut *mut c_void) -> c_int,
    test: unsafe extern "C" fn(*mut c_void) -> c_int,
    abandon: unsafe extern "C" fn(*mut c_void),
    error: unsafe extern "C" fn() -> *const c_char,
    close: unsafe extern "C" fn(*mut c_void, c_int),
}

// SAFETY: functions and constants; `context` is only passed to the table's own functions, which any thread may call.
unsafe impl Send for TableCollectives {}
// SAFETY: a shared value is only read; `context` is only passed to the table's own functions, which any thread may
// call.
unsafe impl Sync for TableCollectives {}

impl TableCollectives {
    /// Takes the collective functions of a table; `None` if the table has none of them.
    ///
    /// # Errors
    /// The name of a function that the table lacks.
    pub(crate) fn of(table: &TransportV1, name: &'static str) -> Result<Option<Self>, &'static str> {
        let &TransportV1 { context, coll_address, coll_open, coll_start, .. } = table;
        let &TransportV1 { coll_test, coll_abandon, coll_error, coll_close, .. } = table;
        let has_any = coll_address.is_some()
            || coll_open.is_some()
            || coll_start.is_some()
            || coll_test.is_some()
            || coll_abandon.is_some()
            || coll_error.is_some()
            || coll_close.is_some();
        if !has_any {
            return Ok(None);
        }
        Ok(Some(Self {
            name,
            context,
            address: coll_address.ok_or("coll_address")?,
            open: coll_open.ok_or("coll_open")?,
            start: coll_start.ok_or("coll_start")?,
            test: coll_test.ok_or("coll_test")?,
            abandon: coll_abandon.ok_or("coll_abandon")?,
            error: coll_error.ok_or("coll_error")?,
            close: coll_close.ok_or("coll_close")?,
        }))
    }

    /// Returns the reason why the last function that this thread called has failed.
    fn why(&self) -> String {
        // SAFETY: by the header, `coll_error` takes no arguments and returns a string or null.
        let text = unsafe { (self.error)() };
        if text.is_null() {
            return format!("transport {} gives no reason", self.name);
        }
        // SAFETY: `text` is not null, so it is a C string that stays until this thread's next call.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

impl Collectives for TableCollectives {
    fn address(&self) -> Result<Vec<u8>, String> {
        let mut address = vec![0; MAX_ADDRESS_BYTES];
        let mut bytes = address.len();
        // SAFETY: the arguments are what the header requires for `coll_address`; `address` has as many bytes as passed.
        let written = unsafe { (self.address)(self.context, address.as_mut_ptr().cast(), &raw mut bytes) };
        if written != OK {
            return Err(self.why());
        }
        if bytes > address.len() {
            return Err(format!("transport {} returned an address of {bytes} bytes, which is too long", self.name));
        }
        address.truncate(bytes);
        Ok(address)
    }

    fn open(&self, rank: u32, addresses: &[Vec<u8>], key: u64) -> Result<Opened, String> {
        let world = u32::try_from(addresses.len()).map_err(|_| "the group has too many ranks".to_owned())?;
        let places: Vec<*const c_void> = addresses.iter().map(|address| address.as_ptr().cast()).collect();
        let lengths: Vec<usize> = addresses.iter().map(Vec::len).collect();
        let mut group = std::ptr::null_mut();
        // SAFETY: the arguments are what the header requires for `coll_open`. There is one address and one length per
        // rank, and they stay valid during the call.
        let opened =
            unsafe { (self.open)(self.context, rank, world, places.as_ptr(), lengths.as_ptr(), key, &raw mut group) };
        match opened {
            OK => Ok(Opened::Group(Box::new(TableGroup { table: *self, group }))),
            AGAIN => Ok(Opened::LeftToHost(self.why())),
            _ => Err(self.why()),
        }
    }
}

struct TableGroup {
    table: TableCollectives,
    group: *mut c_void,
}

// SAFETY: the header allows calls from any thread, one at a time.
unsafe impl Send for TableGroup {}

impl CollectiveGroup for TableGroup {
    unsafe fn start(&mut self, collective: &CollectiveV1) -> Result<Box<dyn CollectiveCall>, String> {
        let mut call = std::ptr::null_mut();
        // SAFETY: the group is open, and by this function's contract the memory of `collective` stays valid as
        // `coll_start` requires.
        let started = unsafe { (self.table.start)(self.group, collective, &raw mut call) };
        if started == OK { Ok(Box::new(TableCall { table: self.table, call })) } else { Err(self.table.why()) }
    }

    fn close(self: Box<Self>, has_failed: bool) {
        // SAFETY: `coll_open` made the group, and this is its only owner.
        unsafe { (self.table.close)(self.group, c_int::from(has_failed)) };
    }
}

struct TableCall {
    table: TableCollectives,
    call: *mut c_void,
}

// SAFETY: the header allows calls from any thread, one at a time.
unsafe impl Send for TableCall {}

impl CollectiveCall for TableCall {
    fn test(&mut self) -> Result<bool, String> {
        // SAFETY: `call` was started, and is not done yet, as `coll_test` requires.
        match unsafe { (self.table.test)(self.call) } {
            OK => Ok(true),
            AGAIN => Ok(false),
            _ => Err(self.table.why()),
        }
    }

    fn abandon(self: Box<Self>) {
        // SAFETY: the call is in flight or has failed, and consuming `self` ends all tests of it.
        unsafe { (self.table.abandon)(self.call) };
    }
}
