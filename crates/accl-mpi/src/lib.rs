//! The transport `mpi`: frames as messages of the MPI library that a job was launched with.
//!
//! A Python module of its own, built against the site's `mpicc`; torch-accl takes its table of C functions ([`table`]) and knows nothing else
//! of it. [`world`] owns MPI in this process, [`link`] the frames of one link, [`bell`] what wakes who sleeps, [`collectives`] what MPI does as
//! a whole.

use std::time::Duration;

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

mod address;
mod bell;
mod calls;
mod collectives;
mod frames;
mod groups;
mod link;
mod signals;
pub mod table;
mod table_collectives;
mod why;
mod world;

use calls::Level;

/// Starts MPI, or joins whoever has started it, and returns the address of the transport's table.
///
/// `size` is how many processes the launcher has started, if it says so; `level` the level of thread support to ask for; `exclusive` that
/// nobody else calls MPI while a call is under way; `communicator` one of somebody who has started MPI, by its number in Fortran.
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
        PyValueError::new_err(format!("ACCL_MPI_THREAD_LEVEL: value `{level}` is not one of {}", names.join(", ")))
    })?;
    let timeout = seconds(timeout)?;
    let wanted = world::Wanted { size, level, is_exclusive: exclusive, communicator, timeout };
    py.detach(|| world::start(&wanted)).map_err(PyRuntimeError::new_err)?;
    Ok(table::accl_transport_v1().expose_provenance())
}

/// What rank 0 of the job gives, at all of its processes, which all have to call this.
#[pyfunction]
fn broadcast<'py>(py: Python<'py>, given: Vec<u8>, timeout: f64) -> PyResult<Bound<'py, PyBytes>> {
    let timeout = seconds(timeout)?;
    let told = py.detach(|| world::broadcast(&given, timeout)).map_err(PyRuntimeError::new_err)?;
    Ok(PyBytes::new(py, &told))
}

/// Ends MPI where `start` has started it; all processes of the job have to do so.
#[pyfunction]
fn finish(py: Python<'_>, timeout: f64) -> PyResult<()> {
    let timeout = seconds(timeout)?;
    py.detach(|| world::finish(timeout)).map_err(PyRuntimeError::new_err)
}

/// The job as this process sees it: library, rank, size, thread level, and whether somebody else has started MPI.
#[pyfunction]
fn job(py: Python<'_>) -> PyResult<(String, i32, i32, &'static str, bool)> {
    let job = py.detach(|| world::with(|world| world.job.clone())).map_err(PyRuntimeError::new_err)?;
    Ok((calls::short_name(&job.library), job.rank, job.size, job.level.name(), job.is_shared))
}

/// Which library this module was linked with.
#[pyfunction]
fn library() -> PyResult<String> {
    calls::library().map(|library| calls::short_name(&library)).map_err(PyRuntimeError::new_err)
}

fn seconds(timeout: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(timeout)
        .map_err(|_| PyValueError::new_err(format!("a timeout of {timeout} s is not possible")))
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(start, module)?)?;
    module.add_function(wrap_pyfunction!(broadcast, module)?)?;
    module.add_function(wrap_pyfunction!(finish, module)?)?;
    module.add_function(wrap_pyfunction!(job, module)?)?;
    module.add_function(wrap_pyfunction!(library, module)?)
}
