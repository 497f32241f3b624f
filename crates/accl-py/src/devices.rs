//! The way groups of this process reach their devices, and the functions with which users inspect a device.
//!
//! Owns the buses to engines in this process, which the table of buses cannot open, and the functions behind `accl
//! device` and `accl emulator`. The text of a device is parsed elsewhere. Read [`Opener`] first.

use std::sync::Arc;
use std::time::{Duration, Instant};

use accl_cclo::bus::Bus;
use accl_cclo::buses;
use accl_cclo::device::{DeviceUrl, Open};
use accl_cclo::driver::{Picture, Settings, reset};
use accl_cclo::offload::{CollectiveRequest, route};
use accl_cclo::packets::Packets;
use accl_cclo::parse::keys;
use accl_device::OpenBus;
use accl_emulator::sim::SimBus;
use accl_emulator::{Faithful, command};
use accl_types::{Collective, Dtype, Error, Rank, ReduceOp, Result};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Maximum wait for a device's answer to a user's command.
const PATIENCE: Duration = Duration::from_secs(5);

/// Opens the engine of a rank in this process, from the settings of the rank and the transport of its packets.
type OpenEngine = fn(&Settings, Arc<dyn Packets>) -> Box<dyn Bus>;

/// Engines in this process, by scheme: one for each row of `BUSES` whose devices the layer above opens.
const ENGINES: [(&str, OpenEngine); 1] = [("sim", open_sim)];

/// Opens any device.
pub(crate) struct Opener;

impl OpenBus for Opener {
    fn open(
        &self,
        url: &DeviceUrl,
        settings: &Settings,
        packets: Arc<dyn Packets>,
        _go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Box<dyn Bus>> {
        match ENGINES.iter().find(|(scheme, _)| *scheme == url.scheme()) {
            Some((_, open)) => Ok(open(settings, packets)),
            None => buses::open(url, settings.rank),
        }
    }
}

fn open_sim(settings: &Settings, packets: Arc<dyn Packets>) -> Box<dyn Bus> {
    Box::new(SimBus::new(settings.network, Faithful::default(), settings.rank, packets))
}

fn refused(error: Error) -> PyErr {
    PyValueError::new_err(error.message)
}

fn failed(error: Error) -> PyErr {
    PyRuntimeError::new_err(error.message)
}

/// Parses the text of a device; `none` is refused.
fn device(text: &str) -> PyResult<DeviceUrl> {
    let url = DeviceUrl::parse(text).map_err(refused)?;
    url.ok_or_else(|| PyValueError::new_err("expected a device such as sim or emulator://localhost:5500, got `none`"))
}

/// Returns the keys of a device's text: name, accepted values, and purpose.
#[pyfunction]
fn device_keys() -> Vec<(&'static str, &'static str, &'static str)> {
    keys().into_iter().map(|key| (key.name, key.accepted, key.about)).collect()
}

/// Returns the meaning of a device's text for `world` ranks: the part that ranks must agree on, the driver's settings,
/// and where each collective runs.
#[pyfunction]
fn device_facts<'py>(py: Python<'py>, text: &str, world: u32) -> PyResult<Bound<'py, PyDict>> {
    let url = device(text)?;
    let settings = url.settings(0, world.max(1)).map_err(refused)?;
    let facts = PyDict::new(py);
    facts.set_item("device", url.to_string())?;
    facts.set_item("agreed", url.agreed())?;
    facts.set_item("design", url.design().name())?;
    facts.set_item("ranks", settings.world())?;
    facts.set_item("rx_buffers", settings.rx_buffers)?;
    facts.set_item("rx_bytes", settings.rx_bytes)?;
    facts.set_item("eager_bytes", settings.max_eager_bytes)?;
    facts.set_item("rendezvous_bytes", settings.max_rendezvous_bytes)?;
    facts.set_item("memory", if settings.memory.is_host() { "host" } else { "device" })?;
    facts.set_item("compression", url.wire().name())?;
    let mut routes = Vec::new();
    for &collective in Collective::ALL {
        let ops = if collective.reduces() { ReduceOp::ALL } else { &[ReduceOp::Sum] };
        for &op in ops {
            for &dtype in Dtype::ALL.iter().filter(|&&dtype| accl_engine::supports(op, dtype) || !collective.reduces())
            {
                let request =
                    CollectiveRequest { collective, dtype, op, root: Rank(0), block_bytes: 0, equal_blocks: true };
                let (device, why) = match route(&request, &settings) {
                    Ok(_) => (true, ""),
                    Err(why) => (false, why),
                };
                let op = collective.reduces().then(|| op.name());
                routes.push((collective.name(), op, dtype.name(), device, why));
            }
        }
    }
    facts.set_item("routes", routes)?;
    Ok(facts)
}

/// Opens the device of a rank for a user's command. Refuses devices that exist only in the ranks' processes.
fn reach(text: &str, rank: u32, world: u32) -> PyResult<(Box<dyn Bus>, Settings)> {
    let url = device(text)?;
    if let Open::Above(why) = url.bus().open {
        return Err(PyValueError::new_err(why));
    }
    let settings = url.settings(rank, world).map_err(refused)?;
    Ok((buses::open(&url, rank).map_err(failed)?, settings))
}

/// Returns the readable state of a rank's device.
#[pyfunction]
fn device_dump<'py>(py: Python<'py>, text: &str, rank: u32, world: u32) -> PyResult<Bound<'py, PyDict>> {
    let (name, picture) = py.detach(|| {
        let (mut bus, settings) = reach(text, rank, world)?;
        let begin = Instant::now();
        let picture = Picture::read(&mut *bus, &settings, || begin.elapsed() < PATIENCE).map_err(failed)?;
        Ok::<_, PyErr>((bus.describe(), picture))
    })?;
    let dump = PyDict::new(py);
    dump.set_item("device", name)?;
    let registers =
        picture.registers.iter().map(|(register, word)| (register.name, register.offset, *word, register.about));
    dump.set_item("registers", registers.collect::<Vec<_>>())?;
    dump.set_item("is_set_up", picture.tables.is_some())?;
    dump.set_item("state", picture.tables.map(|tables| tables.to_string()))?;
    Ok(dump)
}

/// Resets a rank's device and returns the device's name.
#[pyfunction]
fn device_reset(py: Python<'_>, text: &str, rank: u32, world: u32) -> PyResult<String> {
    py.detach(|| {
        let (mut bus, _) = reach(text, rank, world)?;
        let begin = Instant::now();
        reset(&mut *bus, || begin.elapsed() < PATIENCE).map_err(failed)?;
        Ok(bus.describe())
    })
}

/// Runs the emulator's command until a signal ends it; returns the exit status. The caller must leave signal handling
/// to the system.
#[pyfunction]
fn run_emulator(py: Python<'_>, arguments: Vec<std::ffi::OsString>) -> u8 {
    py.detach(|| command::run("accl emulator", arguments))
}

/// Adds this file's functions to the module.
pub(crate) fn add_functions(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(device_keys, module)?)?;
    module.add_function(wrap_pyfunction!(device_facts, module)?)?;
    module.add_function(wrap_pyfunction!(device_dump, module)?)?;
    module.add_function(wrap_pyfunction!(device_reset, module)?)?;
    module.add_function(wrap_pyfunction!(run_emulator, module)?)
}
