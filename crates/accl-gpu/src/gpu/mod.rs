//! One GPU: kernels are compiled for it when they are first needed, and launched on torch's streams.
//!
//! Owns which modules are loaded on a device, and the end of messages: what follows for the user. Knows neither
//! foreign functions (`driver`, `compiler`) nor what the kernels compute (`kernels`). Read [`Gpu::load`] and
//! [`Module::launch`] first.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::Arc;

use accl_types::{Error, Result};
use parking_lot::Mutex;

use crate::compiler::{Capability, Compiler};
use crate::driver::{
    self, Allocation, Argument, Context, DeviceMemory, Driver, Event, Grid, HostMemory, Image, Imported, IpcHandle,
    Stream, life,
};
use crate::library::{Libraries, Vendor};

/// End of every message about something without which no kernel can run.
const REMEDY: &str = "the CPU's codecs are used";

/// GPUs that were opened with the libraries of torch. They stay open until the process ends.
static OPEN: Mutex<Vec<Gpu>> = Mutex::new(Vec::new());

/// A GPU. A clone is the same GPU.
#[derive(Clone, Debug)]
pub struct Gpu(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    vendor: Vendor,
    ordinal: u32,
    context: Arc<Context>,
    has_host_pointers: bool,
    /// Candidates for the compiler's library.
    libraries: Libraries,
    compiler: Mutex<Option<Arc<Tools>>>,
    /// Each source that was asked for, with its module once it is loaded. The inner lock is held while it is compiled, so other
    /// threads that need it wait.
    modules: Mutex<HashMap<SourceKey, Arc<Mutex<Option<Module>>>>>,
}

/// The compiler, and what it makes code for.
#[derive(Debug)]
struct Tools {
    compiler: Compiler,
    target: String,
}

/// A source, the names of its kernels that are needed, and options of the compiler.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct SourceKey {
    source: String,
    names: Vec<String>,
    options: Vec<String>,
}

impl Gpu {
    /// Opens a GPU with the libraries that torch uses. Calls for the same GPU return the same one, which stays open until
    /// the process ends. `ordinal` is torch's index of the device.
    ///
    /// # Errors
    /// `Device` if the driver or a function of it is missing, or refuses the device. The message names it. Nothing is
    /// remembered, so a later call tries again.
    pub fn open(vendor: Vendor, ordinal: u32) -> Result<Self> {
        // Before the lock: in a forked child, a thread that does not exist may hold it.
        life::check()?;
        let mut open = OPEN.lock();
        if let Some(gpu) = open.iter().find(|gpu| gpu.0.vendor == vendor && gpu.0.ordinal == ordinal) {
            return Ok(gpu.clone());
        }
        let gpu = Self::open_apart(vendor, ordinal, Libraries::of(vendor))?;
        open.push(gpu.clone());
        Ok(gpu)
    }

    /// Opens a GPU with the given libraries. The modules that are loaded through the result are unloaded, and the device's
    /// context is released, when the last clone, module and event is dropped.
    ///
    /// # Errors
    /// The errors of [`Gpu::open`].
    pub fn open_apart(vendor: Vendor, ordinal: u32, libraries: Libraries) -> Result<Self> {
        let open = || {
            let driver = Driver::open(vendor, &libraries.driver)?;
            let context = Context::retain(driver, ordinal)?;
            let has_host_pointers = context.has_host_pointers()?;
            Ok((context, has_host_pointers))
        };
        let (context, has_host_pointers) = open().map_err(with_remedy)?;
        let (compiler, modules) = Default::default();
        Ok(Self(Arc::new(Inner { vendor, ordinal, context, has_host_pointers, libraries, compiler, modules })))
    }

    /// Returns the device's name in torch, such as `cuda:0`.
    pub fn device(&self) -> String {
        self.0.context.device()
    }

    /// Returns the name that the vendor gives the device, such as `NVIDIA H200`.
    ///
    /// # Errors
    /// `Device` with the driver's words.
    pub fn title(&self) -> Result<String> {
        self.0.context.title()
    }

    /// Returns whether kernels reach pinned memory at the host's addresses.
    pub fn has_host_pointers(&self) -> bool {
        self.0.has_host_pointers
    }

    /// Returns the module of a source, which is compiled and loaded by the first call: this takes up to two
    /// seconds. Calls with the same arguments return the same module. Loading may wait for work on the device, so
    /// call this before a stream waits for the host.
    ///
    /// `names` are the kernels that the caller needs, as expressions in the source, such as `encode<4, float>`. `options`
    /// are options of the compiler in addition to those that fix the arithmetic, such as `-DBITS=4`. The source is trusted:
    /// its kernels use only memory that their arguments name.
    ///
    /// # Errors
    /// `Device` if the compiler is missing, does not know the device or rejects the source, or if the driver refuses the
    /// code. Nothing is remembered, so a later call tries again.
    pub fn load(&self, names: &[&str], source: &str, options: &[&str]) -> Result<Module> {
        let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        let key = SourceKey { source: source.to_owned(), names: owned(names), options: owned(options) };
        life::check().map_err(with_remedy)?;
        let entry = self.0.modules.lock().entry(key.clone()).or_default().clone();
        let mut module = entry.lock();
        if let Some(module) = &*module {
            return Ok(module.clone());
        }
        let loaded = self.0.load(key).map_err(with_remedy)?;
        *module = Some(loaded.clone());
        Ok(loaded)
    }

    /// Enqueues a copy from host memory. The host may continue before the copy is made if the memory is pinned.
    ///
    /// # Errors
    /// `InvalidArgument` if the lengths differ. `Device` with the driver's words, for example because earlier work has failed.
    pub fn copy_to_device(&self, to: DeviceMemory, from: HostMemory, stream: Stream) -> Result<()> {
        self.0.context.copy_to_device(to, from, stream)
    }

    /// Enqueues a copy to host memory. The host may continue before the copy is made if the memory is pinned.
    ///
    /// # Errors
    /// The errors of [`Gpu::copy_to_device`].
    pub fn copy_to_host(&self, to: HostMemory, from: DeviceMemory, stream: Stream) -> Result<()> {
        self.0.context.copy_to_host(to, from, stream)
    }

    /// Enqueues a copy from device memory to device memory. Each may be memory of this device or imported memory.
    ///
    /// # Errors
    /// `InvalidArgument` if the lengths differ, or if source and target overlap. `Device` with the driver's words, or if
    /// the driver lacks a function for shared memory; the message names it.
    pub fn copy(&self, to: DeviceMemory, from: DeviceMemory, stream: Stream) -> Result<()> {
        driver::copy(&self.0.context, to, from, stream)
    }

    /// Allocates device memory that other processes can import. Its content has no meaning. The driver may wait for the
    /// device.
    ///
    /// # Errors
    /// `Exhausted` with the driver's words if the device has too little memory. `Device` with the driver's words, for
    /// example because `len_bytes` is 0, or if the driver lacks a function for shared memory; the message names it.
    pub fn allocate(&self, len_bytes: u64) -> Result<Allocation> {
        Allocation::new(&self.0.context, len_bytes)
    }

    /// Maps memory that another process of this host has exported. Its device may be another one that this device reaches. A
    /// process cannot import its own memory.
    ///
    /// # Safety
    /// The handle was returned by [`Allocation::export`] in another process, for an allocation of at least `len_bytes`
    /// bytes. The other process keeps this allocation until the result is dropped.
    ///
    /// # Errors
    /// `Device` with the driver's words, for example because the devices do not reach each other, or if the driver lacks a
    /// function for shared memory; the message names it.
    pub unsafe fn import(&self, handle: IpcHandle, len_bytes: u64) -> Result<Imported> {
        // SAFETY: by this function's contract.
        unsafe { Imported::new(&self.0.context, handle, len_bytes) }
    }

    /// Creates a stream that waits for no other stream. It lives as long as the process, so callers keep and share it.
    ///
    /// # Errors
    /// `Device` with the driver's words, or if the driver lacks the function; the message names it.
    pub fn stream(&self) -> Result<Stream> {
        driver::stream(&self.0.context)
    }

    /// Creates an event. It can be recorded repeatedly.
    ///
    /// # Errors
    /// `Device` with the driver's words.
    pub fn event(&self) -> Result<Event> {
        self.0.context.event()
    }
}

impl Inner {
    fn load(&self, key: SourceKey) -> Result<Module> {
        let tools = self.tools()?;
        let (names, options) = (texts(&key.names), texts(&key.options));
        let compiled = tools.compiler.compile(&key.source, &names, &tools.target, &options)?;
        let image = self.context.load(&compiled.code, &compiled.lowered).map_err(|error| {
            let (driver, compiler, target) = (self.context.driver().name(), tools.compiler.title(), &tools.target);
            let message =
                format!("{}; {compiler} made the code for {target}, and the driver is {driver}", error.message);
            Error { message, ..error }
        })?;
        let device = self.context.device();
        Ok(Module(Arc::new(Loaded { device, image, names: key.names })))
    }

    /// Returns the compiler, which the first call opens.
    fn tools(&self) -> Result<Arc<Tools>> {
        let mut tools = self.compiler.lock();
        if let Some(tools) = &*tools {
            return Ok(tools.clone());
        }
        let version = self.context.driver().version()?;
        let most_major = match self.vendor {
            Vendor::Cuda => version / 1000,
            Vendor::Hip => i32::MAX,
        };
        let compiler = Compiler::open(self.vendor, &self.libraries.compiler, most_major)?;
        let target = match self.vendor {
            Vendor::Cuda => {
                let (major, minor) = self.context.capability()?;
                compiler.cuda_target(Capability { major, minor })?
            }
            Vendor::Hip => self.context.architecture()?,
        };
        Ok(tools.insert(Arc::new(Tools { compiler, target })).clone())
    }
}

/// Code that is loaded on a GPU. A clone is the same code. It must stay until the device has done all launches of it.
#[derive(Clone, Debug)]
pub struct Module(Arc<Loaded>);

#[derive(Debug)]
struct Loaded {
    device: String,
    image: Image,
    /// Names of the kernels, in the order of the image.
    names: Vec<String>,
}

impl Module {
    /// Enqueues a launch of a kernel on a stream. `name` is one of the names with which the module was loaded. The
    /// arguments have the types that the source declares, in its order. A grid without blocks is not launched.
    ///
    /// # Safety
    /// The arguments have the number and the types of the kernel's parameters. The kernel accesses only memory of this device, or
    /// pinned memory, that the arguments name. That memory and the module stay, and nothing else accesses the memory in a way that the kernel's
    /// accesses do not allow, until the device has done the launch.
    ///
    /// # Errors
    /// `Internal` if the module has no such kernel. `Device` if a block has more threads than the kernel can have, or with the
    /// driver's words, for example because earlier work has failed.
    pub unsafe fn launch(&self, name: &str, grid: Grid, arguments: &[Argument<'_>], stream: Stream) -> Result<()> {
        let Loaded { device, image, names } = &*self.0;
        let kernel = names.iter().position(|known| known == name).and_then(|index| image.kernel(index));
        let kernel = kernel.ok_or_else(|| Error::internal(format!("{device}: no kernel {name} is loaded")))?;
        if grid.threads() > u64::from(kernel.max_threads) {
            let (most, got) = (kernel.max_threads, grid.threads());
            return Err(Error::device(format!(
                "{device}: expected at most {most} threads in a block of {name}, got {got}"
            )));
        }
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        // SAFETY: by this function's contract.
        unsafe { image.launch(kernel, grid, arguments, stream) }.map_err(|error| {
            let message = format!("{} in the launch of {name}", error.message);
            Error { message, ..error }
        })
    }
}

fn texts(owned: &[String]) -> Vec<&str> {
    owned.iter().map(String::as_str).collect()
}

/// Adds to an error what follows from it for calls.
fn with_remedy(error: Error) -> Error {
    Error { message: format!("{}; {REMEDY}", error.message), ..error }
}
