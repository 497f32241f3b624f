//! The codecs of this process as kernels, by GPU.
//!
//! This module owns which kernels are loaded, and what happens if they cannot be: the CPU's codecs are used, and one line says
//! so. It knows no calls. Read [`GpuCodecs::kernels`] first.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use accl_engine::codec::{Codec, Summary};
use accl_engine::{Codecs, CoderNeeds};
use accl_gpu::kernels::{Kernel, KernelSet};
use accl_gpu::{Gpu, Module, Vendor};
use accl_types::{Dtype, Error, Result};
use parking_lot::Mutex;

use crate::streams::{DeviceRoom, GpuDevice};

/// The GPUs of this process whose codecs were asked for.
#[derive(Debug, Default)]
pub(crate) struct AllGpuCodecs(Mutex<HashMap<(Vendor, u32), GpuState>>);

/// A GPU, or how often it could not be opened.
#[derive(Debug)]
enum GpuState {
    Open(Arc<GpuCodecs>),
    Failed(u32),
}

impl AllGpuCodecs {
    /// Returns the codecs of a GPU; `None` if the GPU cannot be opened.
    pub(crate) fn of(&self, device: &GpuDevice) -> Option<Arc<GpuCodecs>> {
        let mut all = self.0.lock();
        let state = all.entry((device.vendor, device.ordinal)).or_insert(GpuState::Failed(0));
        match state {
            GpuState::Open(gpu) => return Some(gpu.clone()),
            GpuState::Failed(failures) if *failures >= MOST_FAILURES => return None,
            GpuState::Failed(failures) => *failures += 1,
        }
        let opened = open(device).and_then(|gpu| match gpu.has_host_pointers() {
            true => Ok(gpu),
            false => {
                Err(Error::unsupported(format!("{} has other addresses for pinned memory than the host", gpu.device())))
            }
        });
        let gpu = opened.inspect_err(warn).ok()?;
        let gpu = Arc::new(GpuCodecs { gpu, sets: Mutex::default(), rooms: Mutex::default() });
        *state = GpuState::Open(gpu.clone());
        Some(gpu)
    }
}

/// Says that the CPU's codecs are used. The error says why, and names the device.
pub(crate) fn warn(error: &Error) {
    tracing::warn!(error = error.message, "codecs cannot run on the accelerator, so the CPU's are used");
}

/// The codecs of one GPU.
#[derive(Debug)]
pub(crate) struct GpuCodecs {
    gpu: Gpu,
    sets: Mutex<HashMap<ModuleKey, SetState>>,
    /// Memory for sums, by the native handle of the stream whose kernels share it.
    rooms: Mutex<HashMap<u64, DeviceRoom>>,
}

/// Purpose of the kernels of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Purpose {
    /// All but error feedback.
    Calls,
    /// Error feedback. Its kernels are a module of their own, because few calls need them, and each takes long to compile.
    Feedback,
}

/// A word of [`KernelSet::word`], and the purpose of the kernels.
type ModuleKey = (u64, Purpose);

/// State of the kernels of a set.
#[derive(Clone, Debug)]
enum SetState {
    /// They give the bytes of the CPU's codec.
    Right(Module),
    /// They give other bytes.
    Wrong,
    /// Number of times that something kept them from being loaded or checked.
    Failed(u32),
}

/// Number of failures after which a set is not tried again.
const MOST_FAILURES: u32 = 3;

impl GpuCodecs {
    /// Returns the kernels for the codecs of a call on tensors of this type. New ones are compiled, which takes up to two
    /// seconds for each codec, and `check` returns whether they give the bytes of the codec. `None` if a codec has none that do, which
    /// one line has said.
    pub(crate) fn kernels(
        &self,
        codecs: &Codecs,
        dtype: Dtype,
        needs: CoderNeeds,
        mut check: impl FnMut(&CallKernels, &Arc<dyn Codec>, Purpose) -> Result<bool>,
    ) -> Option<CallKernels> {
        let sums = KernelSet::of_sums(dtype)?;
        let mut kernels = CallKernels { dtype, sums, modules: HashMap::new() };
        let of_sums = self.module(&sums, Purpose::Calls, |_| Ok(true))?;
        kernels.modules.insert((sums.word(), Purpose::Calls), of_sums);
        let purposes = [Purpose::Calls].into_iter().chain(needs.residuals.then_some(Purpose::Feedback));
        for (codec, purpose) in codecs.all().flat_map(|codec| purposes.clone().map(move |purpose| (codec, purpose))) {
            let set = KernelSet::of_codec(codec.summary(), dtype)?;
            let key = (set.word(), purpose);
            if kernels.modules.contains_key(&key) {
                continue;
            }
            let module = self.module(&set, purpose, |module| {
                let modules = kernels.modules.iter().map(|(&key, module)| (key, module.clone()));
                let modules = modules.chain([(key, module.clone())]).collect();
                check(&CallKernels { dtype, sums, modules }, codec, purpose)
            })?;
            kernels.modules.insert(key, module);
        }
        Some(kernels)
    }

    /// Returns the module of a set, which is loaded and checked if it is new.
    fn module(&self, set: &KernelSet, purpose: Purpose, check: impl FnOnce(&Module) -> Result<bool>) -> Option<Module> {
        let key = (set.word(), purpose);
        let failures = match self.sets.lock().get(&key) {
            Some(SetState::Right(module)) => return Some(module.clone()),
            Some(SetState::Wrong) => return None,
            Some(SetState::Failed(failures)) if *failures >= MOST_FAILURES => return None,
            Some(SetState::Failed(failures)) => *failures,
            None => 0,
        };
        // Without the lock, because this takes long. Two threads may do it at the same time, with the same result.
        let state = match self.load(set, purpose).and_then(|module| Ok((check(&module)?, module))) {
            Ok((true, module)) => SetState::Right(module),
            Ok((false, _)) => SetState::Wrong,
            Err(error) => {
                warn(&error);
                SetState::Failed(failures + 1)
            }
        };
        let module = if let SetState::Right(module) = &state { Some(module.clone()) } else { None };
        self.sets.lock().insert(key, state);
        module
    }

    fn load(&self, set: &KernelSet, purpose: Purpose) -> Result<Module> {
        load(&self.gpu, set, &used(set, purpose))
    }

    /// Returns the address of memory for sums on a stream, which `allocate` provides once.
    ///
    /// # Errors
    /// The error of `allocate`.
    pub(crate) fn room(&self, stream: u64, allocate: impl FnOnce() -> Result<DeviceRoom>) -> Result<u64> {
        match self.rooms.lock().entry(stream) {
            Entry::Occupied(room) => Ok(room.get().address),
            Entry::Vacant(none) => Ok(none.insert(allocate()?).address),
        }
    }
}

/// Opens a GPU.
///
/// # Errors
/// The errors of [`Gpu::open`].
pub(crate) fn open(device: &GpuDevice) -> Result<Gpu> {
    match &device.libraries {
        Some(libraries) => Gpu::open_apart(device.vendor, device.ordinal, libraries.clone()),
        None => Gpu::open(device.vendor, device.ordinal),
    }
}

/// Compiles and loads kernels of a set.
///
/// # Errors
/// The errors of [`Gpu::load`].
pub(crate) fn load(gpu: &Gpu, set: &KernelSet, kernels: &[Kernel]) -> Result<Module> {
    let mut names: Vec<&str> = kernels.iter().map(|&kernel| set.entry(kernel)).collect();
    names.sort_unstable();
    names.dedup();
    let options = set.options(kernels);
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    gpu.load(&names, &set.source(), &options)
}

/// Returns the kernels of a set that calls use.
fn used(set: &KernelSet, purpose: Purpose) -> Vec<Kernel> {
    let is_used = |kernel: &Kernel| *kernel != Kernel::CombineSums && purpose_of(*kernel) == purpose;
    set.kernels().iter().copied().filter(is_used).collect()
}

fn purpose_of(kernel: Kernel) -> Purpose {
    if kernel.has_feedback() { Purpose::Feedback } else { Purpose::Calls }
}

/// The kernels of one call.
#[derive(Debug)]
pub(crate) struct CallKernels {
    dtype: Dtype,
    sums: KernelSet,
    modules: HashMap<ModuleKey, Module>,
}

impl CallKernels {
    /// Returns the set and the module that have a kernel of a codec; `None` asks for the kernels of unencoded sums.
    ///
    /// # Errors
    /// `Internal` if the call was prepared without it.
    pub(crate) fn find(&self, codec: Option<Summary>, kernel: Kernel) -> Result<(KernelSet, &Module)> {
        let set = codec.map_or(Some(self.sums), |codec| KernelSet::of_codec(codec, self.dtype));
        let found = set.and_then(|set| Some((set, self.modules.get(&(set.word(), purpose_of(kernel)))?)));
        found.ok_or_else(|| Error::internal(format!("{kernel:?} of {codec:?} was not loaded")))
    }
}
