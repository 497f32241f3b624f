//! The output of `accl simulate`, as Python values.

use accl_engine::Machine;
use accl_engine::predict::{Scenario, predict};
use accl_types::{Bytes, Collective, Error};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::log;

/// The network between hosts: picoseconds per KiB of a host's connection, and picoseconds of latency.
type Link = (u64, u64);

/// Predicts times of calls: for each size, the chosen algorithm and every algorithm's time in microseconds.
#[pyfunction]
fn simulate<'py>(
    py: Python<'py>,
    collective: &str,
    sizes: Vec<u64>,
    world: (u32, u32, u32),
    link: Option<Link>,
    machine_file: Option<&str>,
) -> PyResult<Vec<Bound<'py, PyDict>>> {
    let config = crate::offloads::config_from_environment().map_err(refused)?;
    let collective = Collective::ALL
        .iter()
        .copied()
        .find(|known| known.name() == collective)
        .ok_or_else(|| refused(Error::invalid_argument(format!("`{collective}` is not a collective"))))?;
    let mut constants: Machine = match machine_file {
        Some(path) => accl_calibrate::read_machine(path).map_err(refused)?,
        None => py.detach(|| log::during(config.log, || accl_calibrate::find(&config))).machine,
    };
    if let Some((sent_ps_per_kib, latency_ps)) = link {
        constants.network.sent_ps_per_kib = sent_ps_per_kib;
        constants.network.latency_ps = latency_ps;
    }
    let (ranks, ranks_per_host, cores_per_host) = world;
    let scenario = Scenario { machine: constants, ranks, ranks_per_host, cores_per_host, config };
    let sizes: Vec<Bytes> = sizes.into_iter().map(Bytes).collect();
    let found = py.detach(|| predict(&scenario, collective, &sizes)).map_err(refused)?;
    found
        .into_iter()
        .map(|prediction| {
            let times = PyDict::new(py);
            for (name, time_ps) in prediction.times_ps {
                times.set_item(name, time_ps as f64 / 1e6)?;
            }
            let dict = PyDict::new(py);
            dict.set_item("bytes", prediction.bytes.0)?;
            dict.set_item("chosen", prediction.chosen)?;
            dict.set_item("times_us", times)?;
            Ok(dict)
        })
        .collect()
}

/// Returns this machine's constants, the names of those that the measurement does not determine, their source, and its
/// age in seconds. If `again` is set, measures again.
#[pyfunction]
fn calibration(py: Python<'_>, again: bool) -> PyResult<Bound<'_, PyDict>> {
    let config = crate::offloads::config_from_environment().map_err(refused)?;
    let find = || if again { accl_calibrate::calibrate(&config) } else { Ok(accl_calibrate::find(&config)) };
    let found = py.detach(|| log::during(config.log, find));
    let found = found.map_err(refused)?;
    let constants = PyDict::new(py);
    for constant in accl_engine::CONSTANTS {
        match found.machine.values(constant)[..] {
            [value] => constants.set_item(constant.name, value)?,
            ref values => constants.set_item(constant.name, values)?,
        }
    }
    let dict = PyDict::new(py);
    dict.set_item("source", found.source.to_string())?;
    dict.set_item("age_s", found.age.map(|age| age.as_secs()))?;
    dict.set_item("constants", constants)?;
    dict.set_item("at_bounds", found.at_bounds)?;
    Ok(dict)
}

fn refused(error: Error) -> PyErr {
    pyo3::exceptions::PyValueError::new_err(error.to_string())
}

/// Adds this file's functions to the module.
pub(crate) fn add_functions(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(simulate, module)?)?;
    module.add_function(wrap_pyfunction!(calibration, module)?)
}
