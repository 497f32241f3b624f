//! The transport `mpi`: frames as messages of the MPI library that a job was launched with.
//!
//! A Python module of its own, built against the site's `mpicc`. torch-accl uses only its table of C functions
//! ([`table`]). [`world`] owns MPI in this process, and [`link`] the frames of one link. [`doorbell`] wakes sleeping
//! peers. [`collectives`] owns the collectives that MPI runs as a whole.

use std::time::Duration;

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

mod address;
mod calls;
mod collectives;
mod doorbell;
mod frames;
mod groups;
mod link;
mod signals;
pub mod table;
mod table_collectives;
mod why;
mod world;

use calls::Level;

/// Starts MPI, or joins an MPI that other code has started. Returns the address of the transport's table.
///
/// `size` is the number of processes that the launcher has started, if known. `level` is the requested level of thread
/// support. `exclusive` promises that no other code calls MPI from the first group on. `communicator` is the Fortran
/// handle of a communicator, if other code has started MPI.
#[pyfunction]
#[pyo3(signature = (*, size=None, level="multiple", exclusive=false, communicator=None, timeout=60.0))]
fn start(
    py: Python<'_>,
    size: Option<i32>,
    level: &str,
    exclusive: bool,
    communicator: Option<i32>,
    timeout: f64,
) -> PyResult<usize> {
    let names = Level::ALL.map(Level::name);
    let level = Level::ALL.into_iter().find(|known| known.name() == level).ok_or_else(|| {
        PyValueError::new_err(format!(
            "ACCL_MPI_THREAD_LEVEL: value `{level}` is not accepted; expected one of {}",
            names.join(", ")
        ))
    })?;
    let timeout = seconds(timeout)?;
    let wanted = world::Wanted { size, level, is_exclusive: exclusive, communicator, timeout };
    py.detach(|| world::start(&wanted)).map_err(PyRuntimeError::new_err)?;
    Ok(table::accl_transport_v1().expose_provenance())
}

/// Returns the bytes that rank 0 of the job passes. All processes of the job must call this.
#[pyfunction]
fn broadcast<'py>(py: Python<'py>, given: Vec<u8>, timeout: f64) -> PyResult<Bound<'py, PyBytes>> {
    let timeout = seconds(timeout)?;
    let received = py.detach(|| world::broadcast(&given, timeout)).map_err(PyRuntimeError::new_err)?;
    Ok(PyBytes::new(py, &received))
}

/// Ends MPI if `start` has started it. All processes of the job must call this.
#[pyfunction]
fn finish(py: Python<'_>, timeout: f64) -> PyResult<()> {
    let timeout = seconds(timeout)?;
    py.detach(|| world::finish(timeout)).map_err(PyRuntimeError::new_err)
}

/// Returns the job as this process sees it: library, rank, size, thread level, and whether other code has started MPI.
#[pyfunction]
fn job(py: Python<'_>) -> PyResult<(String, i32, i32, &'static str, bool)> {
    let job = py.detach(|| world::with(|world| world.job.clone())).map_err(PyRuntimeError::new_err)?;
    Ok((calls::short_name(&job.library), job.rank, job.size, job.level.name(), job.is_shared))
}

/// Returns the name of the MPI library that this module is linked with.
#[pyfunction]
fn library() -> PyResult<String> {
    calls::library().map(|library| calls::short_name(&library)).map_err(PyRuntimeError::new_err)
}

fn seconds(timeout: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(timeout)
        .map_err(|_| PyValueError::new_err(format!("timeout: {timeout} s is out of range")))
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(start, module)?)?;
    module.add_function(wrap_pyfunction!(broadcast, module)?)?;
    module.add_function(wrap_pyfunction!(finish, module)?)?;
    module.add_function(wrap_pyfunction!(job, module)?)?;
    module.add_function(wrap_pyfunction!(library, module)?)
}
