//! Single kernels of a codec on memory of the caller, for measurements.
//!
//! This module owns the layout of tiles in that memory. Calls use `tiles`. Read [`SingleKernels::load`] first.

use std::sync::Arc;

use accl_engine::codec::{Codec, RngKey};
use accl_engine::{TILE_ELEMS, TILE_HEADER_BYTES};
use accl_gpu::kernels::{Kernel, KernelSet, Options, Span};
use accl_gpu::{Argument, Grid, Module, Stream};
use accl_types::{Dtype, Error, Result};

use crate::gpu_codecs;
use crate::streams::GpuDevice;

/// Kernels of one codec, for tensors of one dtype on one GPU.
#[derive(Debug)]
pub struct SingleKernels {
    codec: Arc<dyn Codec>,
    dtype: Dtype,
    set: KernelSet,
    module: Module,
}

/// Work of a single kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Encodes values.
    Encode,
    /// Encodes values with the residual in `sums`.
    Feedback,
    /// Decodes to values.
    Decode,
    /// Adds decoded elements to `sums`.
    DecodeAdd,
}

impl Work {
    /// All kinds of work, with their names.
    pub const ALL: [(&'static str, Work); 4] = [
        ("encode", Work::Encode),
        ("feedback", Work::Feedback),
        ("decode", Work::Decode),
        ("decode_add", Work::DecodeAdd),
    ];

    fn kernel(self) -> Kernel {
        match self {
            Work::Encode => Kernel::Encode,
            Work::Feedback => Kernel::Feedback,
            Work::Decode => Kernel::Decode,
            Work::DecodeAdd => Kernel::DecodeAdd,
        }
    }
}

/// KernelMemory of a launch, as addresses of the GPU. Work that does not use one of them ignores it.
#[derive(Clone, Copy, Debug)]
pub struct KernelMemory {
    /// Address of `elems` elements of the dtype.
    pub values: u64,
    /// Address of [`SingleKernels::code_bytes`] bytes, a multiple of 16.
    pub code: u64,
    /// Address of `elems` float32.
    pub sums: u64,
    /// Number of elements.
    pub elems: u64,
}

impl SingleKernels {
    /// Compiles and loads the kernels, which takes some seconds.
    ///
    /// # Errors
    /// `Device` as for [`accl_gpu::Gpu::open`] and [`accl_gpu::Gpu::load`]. `Unsupported` if there are no kernels for the codec and the dtype.
    pub fn load(device: &GpuDevice, codec: Arc<dyn Codec>, dtype: Dtype) -> Result<Self> {
        let none = || Error::unsupported(format!("no kernel encodes {dtype} by {codec:?}"));
        let set = KernelSet::of_codec(codec.summary(), dtype).ok_or_else(none)?;
        let module = gpu_codecs::load(&gpu_codecs::open(device)?, &set, &Work::ALL.map(|(_, work)| work.kernel()))?;
        Ok(Self { codec, dtype, set, module })
    }

    /// Elements of a tile: whole buckets.
    fn tile(&self) -> u64 {
        TILE_ELEMS - TILE_ELEMS % self.codec.grain() as u64
    }

    fn stride(&self) -> u64 {
        (TILE_HEADER_BYTES + self.codec.encoded_bytes(self.dtype, self.tile() as usize)) as u64
    }

    /// Returns the bytes of the tiles of `elems` elements, with their headers.
    pub fn code_bytes(&self, elems: u64) -> u64 {
        elems.div_ceil(self.tile()) * self.stride()
    }

    /// Enqueues one kernel for all elements.
    ///
    /// # Errors
    /// `Device` if the driver refuses it.
    ///
    /// # Safety
    /// `stream` is a stream of the GPU. The memory stays, and nothing else accesses it, until the kernel is done.
    pub unsafe fn launch(&self, work: Work, memory: KernelMemory, stream: u64) -> Result<()> {
        let KernelMemory { values, code, sums, elems } = memory;
        let span = Span {
            values,
            code: code + TILE_HEADER_BYTES as u64,
            sums,
            elements: elems,
            key: RngKey::keyed(&[1]).into(),
            tile: self.tile() as u32,
            stride: self.stride() as u32,
            ..Span::default()
        };
        let kernel = work.kernel();
        let launch = self.set.launch(kernel, &[span], &Options::default());
        let grid = Grid::line(launch.blocks, launch.threads);
        // SAFETY: this function's contract covers the stream and all addresses; each kernel has one parameter of this type.
        unsafe { self.module.launch(self.set.entry(kernel), grid, &[Argument::of(&launch.args)], Stream::new(stream)) }
    }
}
