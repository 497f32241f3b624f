//! The driver of a GPU: its library, the primary context of a device, and what belongs to that context.
//!
//! Owns the table of functions, all handles that it opens, the current context of a thread during a call, and the words
//! of errors. Does not know kernels, compilers or torch: callers pass code, and the native handle of a stream. The
//! unsafe code is here: calls of foreign functions. Read `functions` first: it is the table, and `peer_functions` is a second one. Then
//! read [`Context`].
//!
//! Rules for callers:
//! * The driver is not called after the process has begun to exit, and not in a forked child: see `life`.
//! * torch works in the primary context of a device. A call makes it current in its thread, and restores what was current.
//! * Load modules before work waits on the device, because loading may wait for the device.

mod context;
mod functions;
mod launch;
pub(crate) mod life;
mod memory;
mod peer;
mod peer_functions;
#[cfg(test)]
mod tests;

use std::ffi::{CStr, c_char};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use accl_types::{Error, Result};

use crate::library::{Function, OpenLibrary, Vendor, first_of};
pub use context::Event;
pub(crate) use context::{Context, Image};
#[cfg(test)]
pub(crate) use functions::SYMBOLS;
use functions::{Code, Functions};
pub use launch::{Argument, Grid};
pub use memory::{DeviceMemory, HostMemory, Stream};
pub use peer::{Allocation, Imported};
pub(crate) use peer::{copy, stream};
pub use peer_functions::IpcHandle;
#[cfg(test)]
pub(crate) use peer_functions::SYMBOLS as PEER_SYMBOLS;

/// An open driver.
#[derive(Debug)]
pub(crate) struct Driver {
    vendor: Vendor,
    functions: Functions,
    /// Functions for memory that processes share, once they were needed.
    peer_functions: OnceLock<peer_functions::Functions>,
    library: OpenLibrary,
}

impl Driver {
    /// Opens the first candidate and initialises it. A driver that torch has initialised already stays as it is.
    ///
    /// # Errors
    /// `Device` if no candidate opens, one lacks a function, or the driver finds no device.
    pub(crate) fn open(vendor: Vendor, candidates: &[PathBuf]) -> Result<Arc<Self>> {
        life::watch();
        life::check()?;
        first_of(&format!("{}'s driver", vendor.name()), candidates, |library| {
            let functions = Functions::of(vendor, &library)?;
            let driver = Self { vendor, functions, peer_functions: OnceLock::new(), library };
            // SAFETY: the function has no preconditions, and may be called repeatedly.
            driver.done(driver.functions.init, |init| unsafe { init(0) })?;
            Ok(Arc::new(driver))
        })
    }

    /// Returns the name under which the library was opened.
    pub(crate) fn name(&self) -> &str {
        &self.library.name
    }

    /// Returns the functions for memory that processes share. The first call finds them.
    ///
    /// # Errors
    /// `Device` with the name of a function that the driver lacks.
    fn peer_functions(&self) -> Result<&peer_functions::Functions> {
        if let Some(functions) = self.peer_functions.get() {
            return Ok(functions);
        }
        let found = peer_functions::Functions::of(self.vendor, &self.library)?;
        Ok(self.peer_functions.get_or_init(|| found))
    }

    /// Returns the newest version of CUDA that the driver serves, as 1000 times the major version plus 10 times the minor
    /// one; for HIP, the version in HIP's own form.
    ///
    /// # Errors
    /// `Device` with the driver's words.
    pub(crate) fn version(&self) -> Result<i32> {
        let mut version = 0;
        // SAFETY: `version` is an integer that may be written to.
        self.done(self.functions.driver_version, |call| unsafe { call(&mut version) })?;
        Ok(version)
    }

    /// Calls a function, and turns a code other than 0 into an error.
    fn done<F: Copy>(&self, function: Function<F>, call: impl FnOnce(F) -> Code) -> Result<()> {
        match call(function.call) {
            0 => Ok(()),
            code => Err(self.error(function.name, code)),
        }
    }

    /// Returns the error for the code of a function, with the driver's name and text for it.
    fn error(&self, function: &str, code: Code) -> Error {
        let words = |function: Function<unsafe extern "C" fn(Code, *mut *const c_char) -> Code>| {
            let mut words = std::ptr::null();
            // SAFETY: the function accepts any code, and `words` may be written to.
            let known = unsafe { (function.call)(code, &mut words) };
            if known != 0 || words.is_null() {
                return None;
            }
            // SAFETY: the driver has returned a text of its own that ends in zero and is never freed.
            Some(unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned())
        };
        let name = words(self.functions.error_name).unwrap_or_else(|| "an unknown error".to_owned());
        let text = words(self.functions.error_text).map(|text| format!(": {text}")).unwrap_or_default();
        Error::device(format!("{function} failed with {name} ({code}){text}"))
    }
}
