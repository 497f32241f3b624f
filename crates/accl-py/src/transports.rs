//! Transports that Python registers: a table of C functions, by address or in a capsule.

use std::ffi::CStr;

use accl_engine::TransportV1;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

/// Name of a capsule that contains such a table.
const CAPSULE: &CStr = c"accl_transport_v1";

/// Adds a transport that `ACCL_TRANSPORTS` may then name; returns its name.
#[pyfunction]
fn register_transport(table: &Bound<'_, PyAny>) -> PyResult<&'static str> {
    let table: *const TransportV1 = if let Ok(capsule) = table.cast::<PyCapsule>() {
        capsule.pointer_checked(Some(CAPSULE))?.as_ptr().cast_const().cast()
    } else {
        let address = table.extract::<usize>().map_err(|_| {
            let given = table.get_type();
            PyTypeError::new_err(format!("expected a capsule or the address of an accl_transport_v1, got {given}"))
        })?;
        std::ptr::with_exposed_provenance(address)
    };
    // SAFETY: the caller ensures that the table is valid, as the documentation of `torch_accl.register_transport`
    // requires.
    let row = unsafe { accl_engine::register_table(table) };
    row.map(|row| row.name).map_err(|why| PyValueError::new_err(why.to_string()))
}

/// Lets settings name a transport that is registered later.
#[pyfunction]
fn announce_transport(name: &str) {
    accl_engine::announce_transport(name);
}

/// Adds this file's functions to the module.
pub(crate) fn add_functions(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(register_transport, module)?)?;
    module.add_function(wrap_pyfunction!(announce_transport, module)?)
}
