//! Single kernels of codecs, for the figures of the GPU bundle.
//!
//! Owns nothing but the translation of names. Calls with tensors do not pass here.

use accl_accelerator::{KernelMemory, SingleKernels, Work};
use accl_engine::codec;
use accl_types::{Dtype, Error};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::accelerator::gpu_of;

/// Kernels of one codec, for tensors of one dtype on one device of torch.
#[pyclass(frozen, module = "torch_accl._native")]
struct _SingleKernels {
    inner: SingleKernels,
}

#[pymethods]
impl _SingleKernels {
    /// `device_type` is torch's number of the type of device.
    #[new]
    fn new(device_type: i8, index: i8, is_rocm: bool, codec: &str, dtype: &str) -> PyResult<Self> {
        let load = || {
            let device = gpu_of(device_type, index, is_rocm)
                .ok_or_else(|| Error::unsupported("this type of device has no kernels"))?;
            let dtype = Dtype::ALL.iter().copied().find(|each| each.name() == dtype);
            let dtype = dtype.ok_or_else(|| Error::invalid_argument("the dtype is unknown"))?;
            SingleKernels::load(&device, codec::parse(codec)?, dtype)
        };
        Ok(Self { inner: load().map_err(raised)? })
    }

    /// Bytes of the tiles of `elems` elements.
    fn code_bytes(&self, elems: u64) -> u64 {
        self.inner.code_bytes(elems)
    }

    /// Enqueues one kernel on a native stream. The addresses are memory of the device that stays until the kernel is done.
    fn launch(&self, work: &str, values: u64, code: u64, sums: u64, elems: u64, stream: u64) -> PyResult<()> {
        let named = Work::ALL.into_iter().find(|(name, _)| *name == work);
        let (_, work) = named.ok_or_else(|| raised(Error::invalid_argument("the work is unknown")))?;
        // SAFETY: the caller gives memory of the device and a stream of it, as the documentation asks.
        unsafe { self.inner.launch(work, KernelMemory { values, code, sums, elems }, stream) }.map_err(raised)
    }
}

fn raised(error: Error) -> PyErr {
    PyRuntimeError::new_err(error.message)
}

pub(crate) fn add_functions(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<_SingleKernels>()
}
