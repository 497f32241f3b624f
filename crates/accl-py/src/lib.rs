//! The native module of torch_accl: PyO3 bindings and the bridge to the C++ shim.
//!
//! Owns the process's engine, which it passes to groups, and the functions with which Python queries it. Calls do not
//! pass through here: they come from torch through the shim and the functions of `bridge`. Read `bridge.rs` first.

mod accelerator;
mod bridge;
mod built;
mod calls;
mod codes;
mod compression;
mod devices;
mod group;
mod guard;
mod in_order;
mod info;
mod log;
mod multigrid;
mod offloads;
mod profile;
mod repeat;
mod simulate;
mod single_kernels;
mod snapshot;
mod status;
mod store;
mod ticket;
mod transports;

use pyo3::prelude::*;

use crate::bridge::ffi;

/// The process's engine. There is one per process, owned by the Python package.
#[pyclass(frozen, module = "torch_accl._native")]
#[derive(Default)]
struct Runtime {
    inner: group::Runtime,
}

#[pymethods]
impl Runtime {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Creates a backend over `store`: collective over all ranks. Blocks until they are connected or the timeout has
    /// passed. All ranks must pass the same `is_default`: whether this is the default process group.
    fn create_backend<'py>(
        &self,
        store: &Bound<'py, PyAny>,
        rank: i32,
        size: i32,
        options: &Bound<'py, PyAny>,
        is_default: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (store_address, options) = (store.as_ptr() as usize, options.as_ptr() as usize);
        let address = ffi::create_backend(&self.inner, store_address, rank, size, options, is_default);
        // SAFETY: the shim returns a new reference, or null with a Python exception set. The GIL is held.
        unsafe { Bound::from_owned_ptr_or_err(store.py(), address as *mut pyo3::ffi::PyObject) }
    }

    /// Disconnects from all peers, waits until they have received everything sent to them, and stops the threads.
    /// Bounded in time; may be called repeatedly. With `await_calls`, first waits for asynchronous collectives.
    #[pyo3(signature = (await_calls = false))]
    fn shutdown(&self, py: Python<'_>, await_calls: bool) -> PyResult<()> {
        if let Some(engine) = self.inner.engine() {
            py.detach(|| {
                engine.shutdown_unless(await_calls, &mut ffi::python_interrupted_at_end);
                self.inner.close_accelerators();
            });
        }
        // A signal handler that raised ends the wait, but not the shutdown.
        PyErr::take(py).map_or(Ok(()), Err)
    }
}

/// Returns the names of all functions that C++ calls across the bridge.
#[pyfunction]
fn _bridged_functions() -> Vec<&'static str> {
    guard::BRIDGED.to_vec()
}

/// Makes the next call of a bridged function from this thread panic. For tests.
#[pyfunction]
fn _panic_for_test(name: &str) -> PyResult<()> {
    if guard::panic_next(name) {
        return Ok(());
    }
    Err(pyo3::exceptions::PyValueError::new_err(format!("no bridged function is called {name}")))
}

/// Fills the module; must be called once. This is not done at load time, because the first class derives from one of
/// torch's classes. Before that, the version gate must compare `built_for` with the running torch.
#[pyfunction]
#[pyo3(pass_module)]
fn _define(module: &Bound<'_, PyModule>) -> PyResult<()> {
    if !ffi::define_classes(module.as_ptr() as usize) {
        return Err(PyErr::fetch(module.py()));
    }
    log::find_stderr(module.py())?;
    module.add_class::<Runtime>()?;
    module.add_function(wrap_pyfunction!(_bridged_functions, module)?)?;
    module.add_function(wrap_pyfunction!(_panic_for_test, module)?)?;
    module.add_function(wrap_pyfunction!(accelerator::_lend_gpu_driver, module)?)?;
    info::add_functions(module)?;
    offloads::add_functions(module)?;
    transports::add_functions(module)?;
    compression::add_functions(module)?;
    devices::add_functions(module)?;
    simulate::add_functions(module)?;
    multigrid::add_functions(module)?;
    single_kernels::add_functions(module)
}

// The build backend searches the file for this sentence, to know a module's torch without loading it.
#[pymodule]
#[doc = concat!("The native module of torch_accl, built for torch ", env!("ACCL_BUILT_FOR_TORCH"), ".")]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    built::add_functions(module)?;
    module.add_function(wrap_pyfunction!(_define, module)?)
}
