//! The encoding of calls, as set from Python.
//!
//! Owns the calling thread's setting for its next calls. torch's signatures have no argument for it, and a call is
//! described on the thread that issues it. Python decides which tensors to compress.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use accl_engine::codec::{self, CODECS, Codec, Loss, Setting};
use accl_engine::{
    Codecs as EngineCodecs, Encoded, Encoding, ErrorStats as EngineStats, Measured as EngineMeasured, MemoryKind,
    Probe, ResidualOwner, Residuals, TensorCodecs,
};
use accl_types::{Dtype, Elems, Error, HOLDS_MEMORY};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The memory of every device of torch: a call's tensors, and its residuals, lie on one of them.
pub(crate) const DEVICE_MEMORY: MemoryKind = MemoryKind::Device { id: 0 };

thread_local! {
    static ENCODING: RefCell<Option<Encoded>> = const { RefCell::new(None) };
}

/// The encoding of calls that this thread issues now.
pub(crate) fn current() -> Encoded {
    ENCODING.with_borrow(Clone::clone).unwrap_or_default()
}

/// An encoding of calls, as a Python object.
#[pyclass(frozen, name = "Encoding", module = "torch_accl._native")]
struct PyEncoding {
    inner: Encoded,
}

#[pymethods]
impl PyEncoding {
    /// `residuals` are addresses of float32 arrays, see `accl_engine::Residuals`. If `stats` is given, the call is
    /// measured, and one element in `one_in` is compared with the exact sum. If `on_device` is given, the residuals lie on the
    /// device of the tensors. It has the addresses of bytes that say which ones are used, and a function that moves them to host
    /// memory.
    #[new]
    #[pyo3(signature = (codecs, seed=0, step=0, residuals=None, stats=None, one_in=0, on_device=None))]
    fn new(
        codecs: PyRef<'_, Codecs>,
        seed: u64,
        step: u64,
        residuals: Option<(Vec<usize>, Vec<usize>)>,
        stats: Option<PyRef<'_, ErrorStats>>,
        one_in: u64,
        on_device: Option<(Vec<usize>, Py<PyAny>)>,
    ) -> Self {
        let residuals = residuals.map(|(contributions, sums)| {
            let Some((used, to_host)) = on_device else {
                return Arc::new(Residuals { contributions, sums, ..Residuals::default() });
            };
            let owner: Arc<dyn ResidualOwner> = Arc::new(PythonOwner(to_host));
            Arc::new(Residuals { contributions, sums, used, memory: DEVICE_MEMORY, owner: Some(owner) })
        });
        let probe = stats.map(|stats| Probe::new(stats.inner.clone(), one_in));
        Self { inner: Encoded::As(Encoding { codecs: codecs.inner.clone(), seed, step, residuals, probe }) }
    }

    /// Messages are not encoded, even in a group that encodes all calls.
    #[staticmethod]
    fn none() -> Self {
        Self { inner: Encoded::Never }
    }
}

/// A function of Python that moves residuals to host memory.
#[derive(Debug)]
struct PythonOwner(Py<PyAny>);

impl ResidualOwner for PythonOwner {
    fn to_host(&self) -> Result<Residuals, Error> {
        let moved = Python::attach(|py| self.0.call0(py)?.extract::<(Vec<usize>, Vec<usize>)>(py));
        let (contributions, sums) =
            moved.map_err(|error| Error::device(format!("residuals were not moved to host memory: {error}")))?;
        Ok(Residuals { contributions, sums, ..Residuals::default() })
    }
}

/// Measurements of the tensors of one kind of call, summed over completed calls.
#[pyclass(frozen, module = "torch_accl._native")]
struct ErrorStats {
    inner: Arc<EngineStats>,
}

#[pymethods]
impl ErrorStats {
    #[new]
    fn new(tensors: usize) -> Self {
        Self { inner: EngineStats::new(tensors) }
    }

    /// The measurements of each tensor.
    fn read(&self) -> Vec<Measured> {
        self.inner.read().into_iter().map(Measured::from).collect()
    }
}

/// The measurements of a tensor, see `accl_engine::Measured`.
#[pyclass(frozen, get_all, module = "torch_accl._native")]
struct Measured {
    calls: u64,
    compared: u64,
    error: f64,
    square: f64,
    carried_calls: u64,
    carried: f64,
    not_finite: usize,
    too_large: usize,
    nanos: u64,
}

impl From<EngineMeasured> for Measured {
    fn from(measured: EngineMeasured) -> Self {
        let EngineMeasured { calls, compared, error, square, residual_calls, residual, non_finite, nanos } = measured;
        let (not_finite, too_large) = (non_finite.not_finite, non_finite.too_large);
        let (carried_calls, carried) = (residual_calls, residual);
        Self { calls, compared, error, square, carried_calls, carried, not_finite, too_large, nanos }
    }
}

/// The codecs of a call's tensors.
#[pyclass(frozen, module = "torch_accl._native")]
struct Codecs {
    inner: Arc<EngineCodecs>,
}

#[pymethods]
impl Codecs {
    /// For each tensor: the codecs inside hosts, of partial sums and of results, and an id that makes its random
    /// numbers differ from other tensors'.
    #[new]
    fn new(tensors: Vec<(String, String, String, u64)>) -> PyResult<Self> {
        let mut known: HashMap<String, Arc<dyn Codec>> = HashMap::new();
        let mut codec = |text: String| {
            if let Some(codec) = known.get(&text) {
                return Ok(codec.clone());
            }
            let codec = codec::parse(&text)?;
            known.insert(text, codec.clone());
            Ok(codec)
        };
        let mut tensor = |(intra_node, reduce, result, id)| {
            Ok(TensorCodecs { intra_node: codec(intra_node)?, reduce: codec(reduce)?, result: codec(result)?, id })
        };
        let tensors = tensors.into_iter().map(&mut tensor).collect::<Result<_, Error>>().map_err(refused)?;
        Ok(Self { inner: EngineCodecs::new(tensors).map_err(refused)? })
    }

    /// The codecs as text.
    #[getter]
    fn text(&self) -> &str {
        self.inner.text()
    }

    /// Encoded bytes of the tensor at this position: as a contribution to a sum, and as a result.
    fn encoded_bytes(&self, position: usize, dtype: &str, elements: u64) -> PyResult<(u64, u64)> {
        let dtype =
            Dtype::ALL.iter().copied().find(|known| known.name() == dtype).filter(|dtype| codec::encodes(*dtype));
        let dtype =
            dtype.ok_or_else(|| refused(Error::invalid_type("only float32, float16 and bfloat16 are encoded")))?;
        if position >= self.inner.tensors() {
            return Err(pyo3::exceptions::PyIndexError::new_err(format!("there are {} tensors", self.inner.tensors())));
        }
        let (reduce, result) = self.inner.encoded_bytes(position as u32, dtype, Elems(elements));
        Ok((reduce.0, result.0))
    }

    fn __len__(&self) -> usize {
        self.inner.tensors()
    }

    fn __repr__(&self) -> String {
        format!("Codecs({})", self.inner.text())
    }
}

/// Sets the encoding of calls that this thread issues from now on; `None` means the group's default. Returns the
/// previous setting.
#[pyfunction]
fn encode_calls(encoding: Option<PyRef<'_, PyEncoding>>) -> Option<PyEncoding> {
    ENCODING.replace(encoding.map(|encoding| encoding.inner.clone())).map(|inner| PyEncoding { inner })
}

/// Returns a codec's text with all omitted settings filled in.
#[pyfunction]
fn check_codec(text: &str) -> PyResult<String> {
    codec::parse(text).map(|codec| codec.summary().to_string()).map_err(refused)
}

/// Returns whether the text of an error says that memory of the call may still be used.
#[pyfunction]
fn _holds_memory(error: &str) -> bool {
    error.contains(HOLDS_MEMORY)
}

/// Returns the rows of the table of codecs.
#[pyfunction]
fn codecs(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyDict>>> {
    let row = |row: &codec::Row| {
        let dict = PyDict::new(py);
        dict.set_item("name", row.name)?;
        dict.set_item("spelled", row.spelled())?;
        dict.set_item("description", row.description)?;
        dict.set_item("settings", row.settings.iter().map(|setting| setting.name()).collect::<Vec<_>>())?;
        dict.set_item("bits", row.has(Setting::Bits).then(|| (*row.bits.start(), *row.bits.end())))?;
        dict.set_item("buckets", row.has(Setting::Bucket).then(|| row.buckets.to_string()))?;
        dict.set_item("needs_feedback", row.needs_feedback)?;
        dict.set_item("auto", row.auto.to_vec())?;
        Ok(dict)
    };
    CODECS.iter().map(row).collect()
}

/// Returns the facts about a codec with its settings.
#[pyfunction]
fn codec_facts<'py>(py: Python<'py>, text: &str) -> PyResult<Bound<'py, PyDict>> {
    let codec = codec::parse(text).map_err(refused)?;
    let summary = codec.summary();
    let (row, loss) = (summary.row(), summary.loss());
    let dict = PyDict::new(py);
    dict.set_item("text", summary.to_string())?;
    dict.set_item("name", row.name)?;
    dict.set_item("is_exact", loss == Loss::None)?;
    dict.set_item("is_coarse", loss >= Loss::Coarse)?;
    dict.set_item("is_divergent", loss >= Loss::Divergent)?;
    dict.set_item("is_cast", row.is_cast)?;
    dict.set_item("needs_feedback", row.needs_feedback)?;
    dict.set_item("hides_magnitudes", row.hides_magnitudes)?;
    dict.set_item("next_finer", summary.next_finer().map(|finer| finer.to_string()))?;
    Ok(dict)
}

fn refused(error: Error) -> PyErr {
    pyo3::exceptions::PyValueError::new_err(error.to_string())
}

/// Adds this file's classes and functions to the module.
pub(crate) fn add_functions(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(_holds_memory, module)?)?;
    module.add_class::<Codecs>()?;
    module.add_class::<PyEncoding>()?;
    module.add_class::<ErrorStats>()?;
    module.add_class::<Measured>()?;
    module.add_function(wrap_pyfunction!(encode_calls, module)?)?;
    module.add_function(wrap_pyfunction!(check_codec, module)?)?;
    module.add_function(wrap_pyfunction!(codec_facts, module)?)?;
    module.add_function(wrap_pyfunction!(codecs, module)?)
}
