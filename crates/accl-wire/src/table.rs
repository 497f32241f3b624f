//! The table of C functions with which a library of another package describes its transport. A table may also offer
//! whole collectives. This module owns the layout of the table and its constants, which `accl_transport.h` repeats in
//! C. It calls no function of a table.

use std::ffi::{c_char, c_int, c_void};

/// Version of [`TransportV1`].
pub const TRANSPORT_ABI: u32 = 1;

/// Return code of the table's functions: the operation is complete, or there is something to read.
pub const OK: c_int = 0;
/// Return code: there is nothing to read, or no room, at the moment.
pub const AGAIN: c_int = 1;
/// Return code: the peer has closed its side or is gone, and everything that it sent was read.
pub const ENDED: c_int = -1;
/// Return code: the link is broken, or there is none.
pub const FAILED: c_int = -2;
/// Flag: the transport works only between processes of the same host and user.
pub const ONE_HOST: u64 = 1;
/// Flag: frames lie in memory that both processes share.
pub const IN_MEMORY: u64 = 2;

/// C struct `accl_transport_v1` of `accl_transport.h`, field by field.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the header describes each field")]
pub struct TransportV1 {
    pub abi: u32,
    pub size: u32,
    pub name: *const c_char,
    pub about: *const c_char,
    pub flags: u64,
    pub poll_interval_us: u64,
    pub context: *mut c_void,
    pub open: Option<
        unsafe extern "C" fn(
            *mut c_void,
            usize,
            *const c_void,
            usize,
            *mut *mut c_void,
            *mut c_void,
            *mut usize,
        ) -> c_int,
    >,
    pub connect: Option<unsafe extern "C" fn(*mut c_void, *const c_void, usize, usize) -> c_int>,
    pub reserve: Option<unsafe extern "C" fn(*mut c_void, usize, *mut *mut c_void, *mut *mut c_void) -> c_int>,
    pub commit: Option<unsafe extern "C" fn(*mut c_void)>,
    pub peek: Option<unsafe extern "C" fn(*mut c_void, *mut *const c_void, *mut *const c_void, *mut usize) -> c_int>,
    pub release: Option<unsafe extern "C" fn(*mut c_void)>,
    pub progress: Option<unsafe extern "C" fn(*mut c_void) -> c_int>,
    pub descriptors: Option<unsafe extern "C" fn(*mut c_void, *mut c_int, usize) -> usize>,
    pub error: Option<unsafe extern "C" fn(*mut c_void) -> *const c_char>,
    pub close: Option<unsafe extern "C" fn(*mut c_void)>,
    pub destroy: Option<unsafe extern "C" fn(*mut c_void)>,
    pub attach: Option<unsafe extern "C" fn(*mut c_void, c_int)>,
    pub arm: Option<unsafe extern "C" fn(*mut c_void) -> u64>,
    pub coll_address: Option<unsafe extern "C" fn(*mut c_void, *mut c_void, *mut usize) -> c_int>,
    pub coll_open: Option<
        unsafe extern "C" fn(*mut c_void, u32, u32, *const *const c_void, *const usize, u64, *mut *mut c_void) -> c_int,
    >,
    pub coll_start: Option<unsafe extern "C" fn(*mut c_void, *const CollectiveV1, *mut *mut c_void) -> c_int>,
    pub coll_test: Option<unsafe extern "C" fn(*mut c_void) -> c_int>,
    pub coll_abandon: Option<unsafe extern "C" fn(*mut c_void)>,
    pub coll_error: Option<unsafe extern "C" fn() -> *const c_char>,
    pub coll_close: Option<unsafe extern "C" fn(*mut c_void, c_int)>,
}

/// C struct `accl_collective_v1` of `accl_transport.h`, field by field.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the header describes each field")]
pub struct CollectiveV1 {
    pub size: u32,
    pub collective: u32,
    pub element_type: u32,
    pub op: u32,
    pub root: u32,
    pub flags: u32,
    pub count: u64,
    pub input: *const c_void,
    pub output: *mut c_void,
}

/// Codes of the collectives in [`CollectiveV1`].
pub mod collectives {
    #![expect(missing_docs, reason = "each is named after its collective")]
    pub const BROADCAST: u32 = 0;
    pub const ALL_REDUCE: u32 = 1;
    pub const REDUCE: u32 = 2;
    pub const ALL_GATHER: u32 = 3;
    pub const GATHER: u32 = 4;
    pub const SCATTER: u32 = 5;
    pub const REDUCE_SCATTER: u32 = 6;
    pub const ALL_TO_ALL: u32 = 7;
}

/// Codes of the element types in [`CollectiveV1`].
pub mod element_types {
    #![expect(missing_docs, reason = "each is named after its type")]
    /// Element type of collectives that only move data.
    pub const BYTES: u32 = 0;
    pub const INT8: u32 = 1;
    pub const UINT8: u32 = 2;
    pub const INT32: u32 = 3;
    pub const UINT32: u32 = 4;
    pub const INT64: u32 = 5;
    pub const UINT64: u32 = 6;
    pub const FLOAT: u32 = 7;
    pub const DOUBLE: u32 = 8;
    pub const FLOAT_COMPLEX: u32 = 9;
    pub const DOUBLE_COMPLEX: u32 = 10;
}

/// Codes of the operators in [`CollectiveV1`].
pub mod ops {
    #![expect(missing_docs, reason = "each is named after its operator")]
    pub const SUM: u32 = 0;
    pub const PRODUCT: u32 = 1;
    pub const MIN: u32 = 2;
    pub const MAX: u32 = 3;
    pub const BAND: u32 = 4;
    pub const BOR: u32 = 5;
    pub const BXOR: u32 = 6;
}

impl TransportV1 {
    /// Bytes of the smallest table of this version. Fields that were added later may be missing; a missing field counts
    /// as null.
    pub const LEAST_BYTES: usize = std::mem::offset_of!(TransportV1, attach);
}
