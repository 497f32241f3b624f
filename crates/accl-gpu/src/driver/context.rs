//! The primary context of a device, and the modules, kernels and events in it.
//!
//! Owns their handles: each is released once, when its value is dropped. Read [`Context::enter`] first: every call of the
//! driver on a device goes through it.

use std::ffi::{CStr, CString, c_void};
use std::sync::Arc;

use accl_types::{Error, Result};

use super::functions::{
    ARCHITECTURE_BYTES, ARCHITECTURE_OFFSET, Attribute, CUDA_HOST_POINTERS, CUDA_MAJOR, CUDA_MINOR, Code,
    DISABLE_TIMING, Device, Functions, HIP_HOST_POINTERS, Handle, MAX_THREADS, NOT_READY, PROPERTIES_BYTES,
};
use super::{Argument, DeviceMemory, Driver, Grid, HostMemory, Stream, life};
use crate::library::{Function, Vendor};

/// Size in bytes of a device's name.
const NAME_BYTES: usize = 256;

/// No handle.
const NONE: Handle = Handle(std::ptr::null_mut());

/// The primary context of a device, which is retained while this value lives.
#[derive(Debug)]
pub(crate) struct Context {
    driver: Arc<Driver>,
    device: Device,
    ordinal: u32,
    handle: Handle,
}

impl Context {
    /// Retains the primary context of a device. The driver creates it if torch has not used the device yet.
    ///
    /// # Errors
    /// `Device` with the driver's words.
    pub(crate) fn retain(driver: Arc<Driver>, ordinal: u32) -> Result<Arc<Self>> {
        life::check()?;
        let Functions { device: find, context_retain, .. } = &driver.functions;
        let index = i32::try_from(ordinal).unwrap_or(i32::MAX);
        let (mut device, mut handle) = (0, NONE);
        // SAFETY: `device` is an integer that may be written to, and the driver checks the index.
        let found = driver.done(*find, |call| unsafe { call(&mut device, index) });
        found.map_err(|error| on(driver.vendor, ordinal, error))?;
        // SAFETY: the driver has just given the device, and `handle` may be written to.
        let retained = driver.done(*context_retain, |call| unsafe { call(&mut handle, device) });
        retained.map_err(|error| on(driver.vendor, ordinal, error))?;
        Ok(Arc::new(Self { driver, device, ordinal, handle }))
    }

    /// Returns the driver.
    pub(crate) fn driver(&self) -> &Driver {
        &self.driver
    }

    /// Returns the device's name in torch, such as `cuda:0`.
    pub(crate) fn device(&self) -> String {
        self.driver.vendor.device(self.ordinal)
    }

    /// Returns the device's name in the shop, such as `NVIDIA H200`.
    pub(crate) fn title(&self) -> Result<String> {
        let mut name = [0_u8; NAME_BYTES];
        let bytes = NAME_BYTES as i32;
        // SAFETY: `name` has the number of bytes that is given.
        self.call(self.driver.functions.device_name, |call| unsafe {
            call(name.as_mut_ptr().cast(), bytes, self.device)
        })?;
        Ok(text_of(&name))
    }

    /// Returns whether the device reaches pinned memory at the host's addresses.
    pub(crate) fn has_host_pointers(&self) -> Result<bool> {
        let attribute = match self.driver.vendor {
            Vendor::Cuda => CUDA_HOST_POINTERS,
            Vendor::Hip => HIP_HOST_POINTERS,
        };
        Ok(self.attribute(attribute)? != 0)
    }

    /// Returns the major and minor compute capability of a device of CUDA.
    pub(crate) fn capability(&self) -> Result<(i32, i32)> {
        Ok((self.attribute(CUDA_MAJOR)?, self.attribute(CUDA_MINOR)?))
    }

    /// Returns the name of the architecture of a device of HIP, such as `gfx90a`.
    pub(crate) fn architecture(&self) -> Result<String> {
        let Some(properties) = self.driver.functions.properties else {
            return Err(Error::internal("a device of CUDA has no name of an architecture"));
        };
        // Twice the size: a newer version may append fields.
        let mut bytes = [0_u64; 2 * PROPERTIES_BYTES / size_of::<u64>()];
        let device = i32::try_from(self.ordinal).unwrap_or(i32::MAX);
        // SAFETY: `bytes` is aligned, and has room for the structure that this version of the function writes.
        self.call(properties, |call| unsafe { call(bytes.as_mut_ptr().cast(), device) })?;
        let bytes: Vec<u8> = bytes.iter().flat_map(|word| word.to_ne_bytes()).collect();
        Ok(text_of(&bytes[ARCHITECTURE_OFFSET..ARCHITECTURE_OFFSET + ARCHITECTURE_BYTES]))
    }

    fn attribute(&self, attribute: Attribute) -> Result<i32> {
        let mut value = 0;
        // SAFETY: `value` is an integer that may be written to, and the device is one of the driver's.
        self.call(self.driver.functions.device_attribute, |call| unsafe { call(&mut value, attribute, self.device) })?;
        Ok(value)
    }

    /// Enqueues a copy from host memory.
    pub(crate) fn copy_to_device(&self, to: DeviceMemory, from: HostMemory, stream: Stream) -> Result<()> {
        let bytes = same_length(to, from)?;
        let from: *const c_void = from.address().cast();
        // SAFETY: the creators of the memory and the stream have promised that they live until the work is done, and both
        // sides have `bytes` bytes.
        self.call(self.driver.functions.copy_to_device, |call| unsafe { call(to.address(), from, bytes, stream.0) })
    }

    /// Enqueues a copy to host memory.
    pub(crate) fn copy_to_host(&self, to: HostMemory, from: DeviceMemory, stream: Stream) -> Result<()> {
        let bytes = same_length(from, to)?;
        let to: *mut c_void = to.address().cast();
        // SAFETY: as for copies to the device.
        self.call(self.driver.functions.copy_to_host, |call| unsafe { call(to, from.address(), bytes, stream.0) })
    }

    /// Creates an event that was not recorded yet.
    pub(crate) fn event(self: &Arc<Self>) -> Result<Event> {
        let mut handle = NONE;
        // SAFETY: `handle` may be written to, and the context is current.
        self.call(self.driver.functions.event_create, |call| unsafe { call(&mut handle, DISABLE_TIMING) })?;
        Ok(Event { context: self.clone(), handle })
    }

    /// Loads code, and finds its kernels by their names in the code. All kernels are loaded now, because a launch that loads
    /// its kernel may wait for the device.
    pub(crate) fn load(self: &Arc<Self>, code: &[u8], names: &[CString]) -> Result<Image> {
        let Functions { module_load, module_function, function_limit, .. } = &self.driver.functions;
        let mut handle = NONE;
        // SAFETY: the code is a whole object of the compiler, which the driver copies, and `handle` may be written to.
        self.call(*module_load, |call| unsafe { call(&mut handle, code.as_ptr().cast()) })?;
        let mut image = Image { context: self.clone(), handle, kernels: Vec::with_capacity(names.len()) };
        for name in names {
            let (mut function, mut max_threads) = (NONE, 0);
            // SAFETY: the module is loaded, the name ends in zero, and `function` may be written to.
            self.call(*module_function, |call| unsafe { call(&mut function, handle, name.as_ptr()) })?;
            // SAFETY: the function belongs to a module that is loaded, and `max_threads` may be written to.
            self.call(*function_limit, |call| unsafe { call(&mut max_threads, MAX_THREADS, function) })?;
            image.kernels.push(Kernel { function, max_threads: u32::try_from(max_threads).unwrap_or_default() });
        }
        Ok(image)
    }

    /// Calls a function of the driver in the context. The error names the device.
    pub(super) fn call<F: Copy>(&self, function: Function<F>, call: impl FnOnce(F) -> Code) -> Result<()> {
        let code = {
            let _entered = self.enter()?;
            call(function.call)
        };
        if code == 0 {
            Ok(())
        } else {
            Err(on(self.driver.vendor, self.ordinal, self.driver.error(function.name, code)))
        }
    }

    /// Calls a function that releases a handle. A failure cannot be reported: the handle is then left to the end of the
    /// context. To enter the context is tried twice, because a handle that is not released occupies the device.
    pub(super) fn release<F: Copy>(&self, function: Function<F>, call: impl FnOnce(F) -> Code) {
        if let Ok(_entered) = self.enter().or_else(|_| self.enter()) {
            let _ = call(function.call);
        }
    }

    /// Makes the context current in this thread, until the result is dropped.
    fn enter(&self) -> Result<Entered<'_>> {
        life::check()?;
        let Functions { context_current, context_set, .. } = &self.driver.functions;
        let mut before = NONE;
        // SAFETY: `before` may be written to.
        let asked = self.driver.done(*context_current, |call| unsafe { call(&mut before) });
        asked.map_err(|error| on(self.driver.vendor, self.ordinal, error))?;
        if before == self.handle {
            return Ok(Entered { context: self, before: None });
        }
        // SAFETY: the context is retained while this value lives.
        let set = self.driver.done(*context_set, |call| unsafe { call(self.handle) });
        set.map_err(|error| on(self.driver.vendor, self.ordinal, error))?;
        Ok(Entered { context: self, before: Some(before) })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if life::lives() {
            // SAFETY: this value has retained the context once. Modules and events keep this value, so none is left. A
            // failure cannot be reported.
            let _ = unsafe { (self.driver.functions.context_release.call)(self.device) };
        }
    }
}

/// A thread in which a context is current.
struct Entered<'a> {
    context: &'a Context,
    /// Context that was current before; `None` if it was the same.
    before: Option<Handle>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: this context was current in this thread before, and the thread has not left the call since. A
            // failure cannot be reported: the error of the call itself matters more.
            let _ = unsafe { (self.context.driver.functions.context_set.call)(before) };
        }
    }
}

/// Code that is loaded in a context, with its kernels.
#[derive(Debug)]
pub(crate) struct Image {
    context: Arc<Context>,
    handle: Handle,
    /// In the order of the names that were asked for.
    kernels: Vec<Kernel>,
}

/// A kernel of an image.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel {
    function: Handle,
    /// Largest number of threads of a block.
    pub(crate) max_threads: u32,
}

impl Image {
    /// Returns the kernel at an index in the list of names.
    pub(crate) fn kernel(&self, index: usize) -> Option<Kernel> {
        self.kernels.get(index).copied()
    }

    /// Enqueues a launch of a kernel of this image.
    ///
    /// # Safety
    /// The contract of [`crate::Module::launch`].
    pub(crate) unsafe fn launch(
        &self,
        kernel: Kernel,
        grid: Grid,
        arguments: &[Argument<'_>],
        stream: Stream,
    ) -> Result<()> {
        let Grid { blocks: [gx, gy, gz], threads: [bx, by, bz], shared_bytes } = grid;
        let mut pointers: Vec<*mut c_void> = arguments.iter().map(|argument| argument.pointer()).collect();
        let (values, none) = (pointers.as_mut_ptr(), std::ptr::null_mut());
        let Kernel { function, .. } = kernel;
        self.context.call(self.context.driver.functions.launch, |call| {
            // SAFETY: the kernel belongs to this image, which is loaded; the rest is this function's contract. The driver copies
            // the arguments.
            unsafe { call(function, gx, gy, gz, bx, by, bz, shared_bytes, stream.0, values, none) }
        })
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // SAFETY: this value alone owns the module, and nothing uses its kernels afterwards.
        self.context.release(self.context.driver.functions.module_unload, |call| unsafe { call(self.handle) });
    }
}

/// A point in a stream. It measures no time.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    handle: Handle,
}

impl Event {
    /// Records the event behind the work that the stream has now. An earlier record is forgotten.
    ///
    /// # Errors
    /// `Device` with the driver's words.
    pub fn record(&self, stream: Stream) -> Result<()> {
        // SAFETY: the event is open, and the stream's creator has promised that it is one of this device.
        self.context.call(self.context.driver.functions.event_record, |call| unsafe { call(self.handle, stream.0) })
    }

    /// Returns whether the device has come to the newest record; `true` if there is none. Never blocks.
    ///
    /// # Errors
    /// `Device` with the driver's words if the device has failed. The event will not come then.
    pub fn has_come(&self) -> Result<bool> {
        let mut come = true;
        self.context.call(self.context.driver.functions.event_query, |call| {
            // SAFETY: the event is open.
            match unsafe { call(self.handle) } {
                NOT_READY => {
                    come = false;
                    0
                }
                code => code,
            }
        })?;
        Ok(come)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: this value alone owns the event, and nothing uses it afterwards. The driver keeps it until its record has
        // come.
        self.context.release(self.context.driver.functions.event_destroy, |call| unsafe { call(self.handle) });
    }
}

/// Adds the device to the message of an error.
fn on(vendor: Vendor, ordinal: u32, error: Error) -> Error {
    Error { message: format!("{}: {}", vendor.device(ordinal), error.message), ..error }
}

/// Returns the length in bytes that both sides of a copy have.
fn same_length(device: DeviceMemory, host: HostMemory) -> Result<usize> {
    if device.len_bytes() != host.len_bytes() {
        let (device, host) = (device.len_bytes(), host.len_bytes());
        return Err(Error::invalid_argument(format!(
            "a copy has {device} bytes on the device, and {host} on the host"
        )));
    }
    usize::try_from(device.len_bytes()).map_err(|_| Error::invalid_argument("a copy exceeds the address space"))
}

/// Returns the text in bytes that end in zero.
fn text_of(bytes: &[u8]) -> String {
    CStr::from_bytes_until_nul(bytes).map(CStr::to_string_lossy).unwrap_or_default().into_owned()
}
