//! The table of the compiler's functions, one line each.
//!
//! Owns the names and types. A test compares the types with the vendors' headers.

use std::ffi::{c_char, c_int, c_void};

use accl_types::Result;

use crate::library::{Function, OpenLibrary, Vendor, find, functions};

/// Types of the C interfaces, under the names that the table uses.
pub(crate) type Program = *mut c_void;
pub(crate) type Int = c_int;
/// Code of an error; 0 for none.
pub(crate) type Code = c_int;
pub(crate) type Text = *const c_char;
pub(crate) type Texts = *const *const c_char;
pub(crate) type OutProgram = *mut Program;
pub(crate) type OutInt = *mut c_int;
pub(crate) type OutSize = *mut usize;
pub(crate) type OutText = *mut *const c_char;
pub(crate) type OutBytes = *mut c_char;

functions! {
    both {
        version         "nvrtcVersion"           "hiprtcVersion"           (OutInt, OutInt) -> Code;
        error_text      "nvrtcGetErrorString"    "hiprtcGetErrorString"    (Code) -> Text;
        create          "nvrtcCreateProgram"     "hiprtcCreateProgram"     (OutProgram, Text, Text, Int, Texts, Texts) -> Code;
        add_name        "nvrtcAddNameExpression" "hiprtcAddNameExpression" (Program, Text) -> Code;
        compile         "nvrtcCompileProgram"    "hiprtcCompileProgram"    (Program, Int, Texts) -> Code;
        log_size        "nvrtcGetProgramLogSize" "hiprtcGetProgramLogSize" (Program, OutSize) -> Code;
        log             "nvrtcGetProgramLog"     "hiprtcGetProgramLog"     (Program, OutBytes) -> Code;
        lowered_name    "nvrtcGetLoweredName"    "hiprtcGetLoweredName"    (Program, Text, OutText) -> Code;
        code_size       "nvrtcGetCUBINSize"      "hiprtcGetCodeSize"       (Program, OutSize) -> Code;
        code            "nvrtcGetCUBIN"          "hiprtcGetCode"           (Program, OutBytes) -> Code;
        destroy         "nvrtcDestroyProgram"    "hiprtcDestroyProgram"    (OutProgram) -> Code;
    }
    cuda {
        count_targets   "nvrtcGetNumSupportedArchs" (OutInt) -> Code;
        targets         "nvrtcGetSupportedArchs"    (OutInt) -> Code;
    }
    hip {}
}
