//! The output of `accl config`, `accl algorithms` and `accl info`, and the choices of `accl bench`, as Python values.

use accl_types::config::{Config, ROWS, Scope};
use accl_types::{Dtype, Error, ReduceOp};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::{log, offloads};

/// Returns the rows of the configuration table, with the values from the environment.
#[pyfunction]
fn config_rows(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyDict>>> {
    let config = offloads::config_from_environment().map_err(refused)?;
    log::during(config.log, log::warn_of_unused_variables);
    let default = Config::default();
    ROWS.iter()
        .map(|row| {
            let scope = match row.scope {
                Scope::Process => "process",
                Scope::Group => "group",
            };
            let dict = PyDict::new(py);
            dict.set_item("name", if row.is_variable() { row.name } else { "" })?;
            dict.set_item("option", row.option)?;
            dict.set_item("scope", scope)?;
            dict.set_item("agreed", row.agreed)?;
            dict.set_item("value", (row.show)(&config))?;
            dict.set_item("default", (row.show)(&default))?;
            dict.set_item("accepted", accl_engine::accepted(row))?;
            dict.set_item("effect", row.effect)?;
            Ok(dict)
        })
        .collect()
}

/// Returns the rows of the table of algorithms.
#[pyfunction]
fn algorithms(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyDict>>> {
    accl_engine::ALGORITHMS
        .iter()
        .map(|row| {
            let dict = PyDict::new(py);
            dict.set_item("collective", row.collective.name())?;
            dict.set_item("name", row.name)?;
            dict.set_item("steps", row.steps_formula)?;
            dict.set_item("bytes", row.bytes_formula)?;
            dict.set_item("requires", row.requires)?;
            dict.set_item("wins", row.wins)?;
            dict.set_item("source", row.source)?;
            Ok(dict)
        })
        .collect()
}

/// Returns the element types that can be sent: name, bytes per element, and the operators that reduce them.
#[pyfunction]
fn dtypes(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyDict>>> {
    Dtype::ALL
        .iter()
        .map(|&dtype| {
            let ops = ReduceOp::ALL.iter().filter(|&&op| accl_engine::supports(op, dtype));
            let dict = PyDict::new(py);
            dict.set_item("name", dtype.name())?;
            dict.set_item("bytes", dtype.size_bytes())?;
            dict.set_item("ops", ops.map(|op| op.name()).collect::<Vec<_>>())?;
            Ok(dict)
        })
        .collect()
}

/// Returns what this process would offer its peers. Briefly opens the port that it would listen on. Transports that
/// were announced but not registered are named and not used.
#[pyfunction]
fn host_facts(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let mut config = offloads::config_from_environment().map_err(refused)?;
    let named = config.transports.clone();
    let known = accl_engine::transports();
    config.transports.retain(|name| known.iter().any(|row| row.name == name));
    if config.transports.is_empty() {
        // Transports of other packages are set up over connections of `tcp`.
        config.transports.push("tcp".to_owned());
    }
    let info = accl_calibrate::engine(config).info().map_err(refused)?;
    let dict = PyDict::new(py);
    dict.set_item("hostname", info.hostname)?;
    dict.set_item("host_id", info.host_id)?;
    dict.set_item("instruction_set", accl_engine::describe_isa())?;
    dict.set_item("transports", named)?;
    dict.set_item("addresses", info.addresses.iter().map(ToString::to_string).collect::<Vec<_>>())?;
    Ok(dict)
}

/// Refuses an option that is not in the table, or a value that the option does not accept.
#[pyfunction]
fn check_option(option: &str, value: &str) -> PyResult<()> {
    let mut config = Config::default();
    config.set_option(option, value).and_then(|()| offloads::check_settings(&config)).map_err(refused)
}

fn refused(error: Error) -> PyErr {
    pyo3::exceptions::PyValueError::new_err(error.to_string())
}

/// Adds this file's functions to the module.
pub(crate) fn add_functions(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(config_rows, module)?)?;
    module.add_function(wrap_pyfunction!(algorithms, module)?)?;
    module.add_function(wrap_pyfunction!(dtypes, module)?)?;
    module.add_function(wrap_pyfunction!(host_facts, module)?)?;
    module.add_function(wrap_pyfunction!(check_option, module)?)
}
