//! The torch that this module was built for. The version gate compares it before it touches anything of torch.
//!
//! Owns the facts. The comparison and its messages are in `python/torch_accl/_gate.py`.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::bridge::ffi;

/// Returns the facts that decide whether this module fits an interpreter and its torch.
#[pyfunction]
fn built_for(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    // Taken from the shim itself: only the versions that it was compiled for count, whatever the build's settings were.
    let (torch, pybind11) = ffi::built_with().split_once('\n').unwrap_or_default();
    let facts = PyDict::new(py);
    facts.set_item("version", env!("CARGO_PKG_VERSION"))?;
    facts.set_item("torch", torch)?;
    facts.set_item("cxx11_abi", env!("ACCL_BUILT_WITH_CXX11_ABI") == "1")?;
    facts.set_item("pybind11", pybind11)?;
    Ok(facts)
}

/// Whether this interpreter uses the pybind11 that this module was compiled with. If torch is imported and this is
/// false, torch's classes are unknown to this module.
#[pyfunction]
fn _finds_pybind11(py: Python<'_>) -> PyResult<bool> {
    let (_, pybind11) = ffi::built_with().split_once('\n').unwrap_or_default();
    // SAFETY: the GIL is held, so there is a current interpreter. The dictionary is borrowed and lives as long as the
    // interpreter.
    let state = unsafe {
        let dict = pyo3::ffi::PyInterpreterState_GetDict(pyo3::ffi::PyInterpreterState_Get());
        Bound::from_borrowed_ptr_or_opt(py, dict)
    };
    state.map_or(Ok(false), |state| state.contains(pybind11))
}

/// Adds this file's functions to the module.
pub(crate) fn add_functions(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(built_for, module)?)?;
    module.add_function(wrap_pyfunction!(_finds_pybind11, module)?)
}
