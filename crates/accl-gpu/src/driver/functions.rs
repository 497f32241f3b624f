//! The table of the driver's functions, one line each.
//!
//! Owns the names, with the versions of the headers, and the types. A test compares them with the vendors' headers. The
//! table has the functions that encoded calls need: a device and its primary context, modules, launches, copies and events.
//! Memory and streams are torch's; `peer_functions` has a second table for other memory.

use std::ffi::{c_char, c_int, c_uint, c_void};

use accl_types::Result;

use crate::library::{Function, OpenLibrary, Vendor, find, functions};

/// Handle of a context, a module, a function, a stream or an event.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handle(pub(crate) *mut c_void);

// SAFETY: the drivers let every thread use every handle. Only the current context belongs to a thread, and it is set before
// each call.
unsafe impl Send for Handle {}
// SAFETY: the drivers lock their objects themselves.
unsafe impl Sync for Handle {}

/// Types of the C interfaces, under the names that the table uses.
pub(crate) type Int = c_int;
/// Code of an error; 0 for none.
pub(crate) type Code = c_int;
/// Number of an attribute, which is an enumeration in C.
pub(crate) type Attribute = c_int;
/// Number of an attribute of a function.
pub(crate) type FunctionAttribute = c_int;
pub(crate) type Uint = c_uint;
pub(crate) type Size = usize;
pub(crate) type Device = c_int;
pub(crate) type Context = Handle;
pub(crate) type Module = Handle;
pub(crate) type Kernel = Handle;
pub(crate) type Stream = Handle;
pub(crate) type Event = Handle;
/// Address of device memory.
pub(crate) type Address = u64;
pub(crate) type Text = *const c_char;
pub(crate) type Bytes = *const c_void;
pub(crate) type OutBytes = *mut c_void;
pub(crate) type OutText = *mut c_char;
pub(crate) type OutInt = *mut c_int;
pub(crate) type OutWords = *mut *const c_char;
pub(crate) type OutDevice = *mut c_int;
pub(crate) type OutContext = *mut Handle;
pub(crate) type OutModule = *mut Handle;
pub(crate) type OutKernel = *mut Handle;
pub(crate) type OutEvent = *mut Handle;
pub(crate) type Pointers = *mut *mut c_void;
/// Structure with the properties of a device in HIP, of [`PROPERTIES_BYTES`] bytes.
pub(crate) type OutProperties = *mut c_void;

/// Size in bytes of the structure of HIP's properties, in its layout of version 6.
pub(crate) const PROPERTIES_BYTES: usize = 1472;
/// Offset in bytes of the name of the architecture, which ends in zero.
pub(crate) const ARCHITECTURE_OFFSET: usize = 1160;
/// Size in bytes of the name of the architecture.
pub(crate) const ARCHITECTURE_BYTES: usize = 256;
/// Code of a query whose event has not come.
pub(crate) const NOT_READY: Code = 600;
/// Flag of events that measure no time.
pub(crate) const DISABLE_TIMING: Uint = 2;
/// Attribute: largest number of threads of a block.
pub(crate) const MAX_THREADS: FunctionAttribute = 0;
/// Attributes of a device: its compute capability.
pub(crate) const CUDA_MAJOR: Attribute = 75;
pub(crate) const CUDA_MINOR: Attribute = 76;
/// Attribute of a device, by row: whether it reaches pinned memory at the host's addresses.
pub(crate) const CUDA_HOST_POINTERS: Attribute = 91;
pub(crate) const HIP_HOST_POINTERS: Attribute = 4;

functions! {
    both {
        init              "cuInit"                       "hipInit"                    (Uint) -> Code;
        driver_version    "cuDriverGetVersion"           "hipDriverGetVersion"        (OutInt) -> Code;
        error_name        "cuGetErrorName"               "hipDrvGetErrorName"         (Code, OutWords) -> Code;
        error_text        "cuGetErrorString"             "hipDrvGetErrorString"       (Code, OutWords) -> Code;
        device            "cuDeviceGet"                  "hipDeviceGet"               (OutDevice, Int) -> Code;
        device_attribute  "cuDeviceGetAttribute"         "hipDeviceGetAttribute"      (OutInt, Attribute, Device) -> Code;
        device_name       "cuDeviceGetName"              "hipDeviceGetName"           (OutText, Int, Device) -> Code;
        context_retain    "cuDevicePrimaryCtxRetain"     "hipDevicePrimaryCtxRetain"  (OutContext, Device) -> Code;
        context_release   "cuDevicePrimaryCtxRelease_v2" "hipDevicePrimaryCtxRelease" (Device) -> Code;
        context_current   "cuCtxGetCurrent"              "hipCtxGetCurrent"           (OutContext) -> Code;
        context_set       "cuCtxSetCurrent"              "hipCtxSetCurrent"           (Context) -> Code;
        module_load       "cuModuleLoadData"             "hipModuleLoadData"          (OutModule, Bytes) -> Code;
        module_unload     "cuModuleUnload"               "hipModuleUnload"            (Module) -> Code;
        module_function   "cuModuleGetFunction"          "hipModuleGetFunction"       (OutKernel, Module, Text) -> Code;
        function_limit    "cuFuncGetAttribute"           "hipFuncGetAttribute"        (OutInt, FunctionAttribute, Kernel) -> Code;
        launch            "cuLaunchKernel"               "hipModuleLaunchKernel"      (Kernel, Uint, Uint, Uint, Uint, Uint, Uint, Uint, Stream, Pointers, Pointers) -> Code;
        copy_to_device    "cuMemcpyHtoDAsync_v2"         "hipMemcpyHtoDAsync"         (Address, Bytes, Size, Stream) -> Code;
        copy_to_host      "cuMemcpyDtoHAsync_v2"         "hipMemcpyDtoHAsync"         (OutBytes, Address, Size, Stream) -> Code;
        event_create      "cuEventCreate"                "hipEventCreateWithFlags"    (OutEvent, Uint) -> Code;
        event_record      "cuEventRecord"                "hipEventRecord"             (Event, Stream) -> Code;
        event_query       "cuEventQuery"                 "hipEventQuery"              (Event) -> Code;
        event_destroy     "cuEventDestroy_v2"            "hipEventDestroy"            (Event) -> Code;
    }
    cuda {}
    hip {
        properties        "hipGetDevicePropertiesR0600"  (OutProperties, Int) -> Code;
    }
}
