//! Tensors on accelerators: torch's streams, events and pinned memory behind the traits of `accl-accelerator`.
//!
//! Owns which side streams a call uses, and that nothing of torch is called once the process ends. The shim's unit
//! `accelerator` does what is asked for here. Read [`TorchAccelerators::staging`] first.

use std::collections::HashMap;
use std::ffi::c_int;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use accl_accelerator::{
    CallStreams, DeviceRoom, Direction, EagerCall, GpuDevice, GroupRoute, Issuing, Libraries, PeerRoute, Pinning,
    StreamCopy, StreamEvent, Vendor,
};
use accl_engine::{CallDesc, LentMemory, Phases, Staging};
use accl_types::{Dtype, Error, Result};
use cxx::{SharedPtr, UniquePtr};
use libloading::os::unix::Library;
use pyo3::pyfunction;
use rustix::system::sysinfo;

use crate::bridge::ffi::{
    self, AcceleratorCall, AcceleratorEvent, CallArgs, Outcome, PinnedMemory, TensorView, Waited,
};
use crate::group::{complete, complete_with};
use crate::snapshot::Counts;
use crate::status::INTERRUPTED;

/// Maximum time for which a small call on an accelerator polls for its copies.
const DEVICE_SPIN: Duration = Duration::from_micros(200);
/// `c10::DeviceType::CUDA`, which ROCm has, too.
const CUDA: i8 = 1;
/// `c10::DeviceType::PrivateUse1`, the type of the device in the tests.
const PRIVATE_USE_1: i8 = 20;
/// Maximum number of streams that have a side stream of their own.
const MOST_STREAMS: usize = 256;

/// Driver and compiler of the tests' device.
static STANDIN_DRIVER: OnceLock<Libraries> = OnceLock::new();

/// Sets the library that is driver and compiler of the tests' device, for the life of the process. For tests.
#[pyfunction]
pub(crate) fn _lend_gpu_driver(path: std::path::PathBuf) {
    // SAFETY: tests pass the library of the stand-in, which has the functions of the tables.
    let libraries = unsafe { Libraries::new(vec![path.clone()], vec![path]) };
    let _ = STANDIN_DRIVER.set(libraries);
}

/// Returns the GPU that is a device of torch; `None` if its type has no kernels.
pub(crate) fn gpu_of(device_type: i8, index: i8, is_rocm: bool) -> Option<GpuDevice> {
    let ordinal = u32::try_from(index).ok()?;
    let vendor = if is_rocm { Vendor::Hip } else { Vendor::Cuda };
    match device_type {
        CUDA => Some(GpuDevice { vendor, ordinal, libraries: None }),
        PRIVATE_USE_1 => {
            let libraries = STANDIN_DRIVER.get().cloned()?;
            Some(GpuDevice { vendor: Vendor::Cuda, ordinal, libraries: Some(libraries) })
        }
        _ => None,
    }
}

/// The accelerators of this process.
#[derive(Debug)]
pub(crate) struct TorchAccelerators {
    /// Maximum bytes of idle pinned memory.
    most_idle: u64,
    state: Mutex<DeviceTypes>,
    /// Set when nothing of torch may be called any more.
    is_over: Arc<AtomicBool>,
}

#[derive(Debug, Default)]
struct DeviceTypes {
    /// By device type. Few processes use two.
    types: HashMap<i8, Arc<accl_accelerator::Accelerators>>,
    /// Whether no new call may begin.
    is_closing: bool,
    side_streams: HashMap<SideKey, i64>,
}

/// Purpose of a side stream: device type and index, and the stream whose calls copy in on it; `None` for copies out.
///
/// Copies in wait for the stream of their call, so on a shared side stream they would wait for other streams, too. Copies out
/// are enqueued only when they need not wait, and share one stream.
type SideKey = (i8, i8, Option<i64>);

impl TorchAccelerators {
    /// Starts nothing before a call needs it.
    pub(crate) fn new(most_idle: u64) -> Self {
        Self { most_idle, state: Mutex::default(), is_over: Arc::default() }
    }

    /// Returns what stages the tensors of a call. Called in the thread that issues the call.
    ///
    /// # Errors
    /// `Device` if the device gives no streams.
    pub(crate) fn staging(
        &self,
        call: &SharedPtr<AcceleratorCall>,
        args: &CallArgs,
        route: Option<PeerRoute>,
    ) -> Result<Arc<dyn Staging>> {
        let stream = call.stream();
        let (accelerators, copy_in, copy_out) = {
            let mut state = self.lock();
            let device = (stream.device_type, stream.device_index);
            let copy_out = state.side_stream((device.0, device.1, None), &[stream.id], call)?;
            let copy_in = state.side_stream((device.0, device.1, Some(stream.id)), &[stream.id, copy_out], call)?;
            (self.of_type(&mut state, stream.device_type)?, copy_in, copy_out)
        };
        call.begin(copy_in, copy_out).map_err(failed)?;
        Ok(accelerators.staging(Box::new(self.streams(call, args)), !args.waits_for_device, route))
    }

    /// Returns the way of a call, if it is by reference: see [`GroupRoute`].
    ///
    /// # Errors
    /// The errors of [`accl_accelerator::Accelerators::route_of`].
    pub(crate) fn route_of(
        &self,
        call: &AcceleratorCall,
        route: &GroupRoute,
        group: &accl_engine::Group,
        desc: &CallDesc,
    ) -> Result<Option<PeerRoute>> {
        let stream = call.stream();
        let device = gpu_of(stream.device_type, stream.device_index, stream.is_rocm);
        let accelerators = self.of_type(&mut self.lock(), stream.device_type)?;
        let mut complete = |desc: &mut CallDesc| {
            let waited = complete(group, desc)?;
            match waited.how {
                Outcome::Done => Ok(()),
                _ => Err(waited.status.to_error().unwrap_or_else(|| Error::aborted(INTERRUPTED))),
            }
        };
        let issuing = Issuing { complete: &mut complete, is_interrupted: &mut ffi::python_interrupted };
        accelerators.route_of(route, group, desc, device.as_ref(), issuing)
    }

    /// Begins a small blocking call, which its caller's thread does alone. Returns `None` if the call needs the streams of
    /// [`TorchAccelerators::staging`].
    ///
    /// # Errors
    /// `Device` if the device refuses a copy.
    pub(crate) fn begin_eager(
        &self,
        call: &SharedPtr<AcceleratorCall>,
        args: &CallArgs,
        desc: &CallDesc,
    ) -> Result<Option<EagerCall>> {
        if !are_apart(args.outputs) {
            return Ok(None);
        }
        let stream = call.stream();
        let accelerators = self.of_type(&mut self.lock(), stream.device_type)?;
        call.begin(stream.id, stream.id).map_err(failed)?;
        accelerators.begin_eager(desc, Box::new(self.streams(call, args)))
    }

    fn streams(&self, call: &SharedPtr<AcceleratorCall>, args: &CallArgs) -> TorchStreams {
        let dense = |views: &[TensorView]| views.iter().map(|view| view.dense).collect::<Vec<_>>();
        let outputs = dense(args.outputs);
        // A call in place copies in its outputs.
        let inputs = if args.inputs.is_empty() { outputs.clone() } else { dense(args.inputs) };
        TorchStreams { call: UntilTheEnd::new(call.clone(), &self.is_over), inputs, outputs }
    }

    fn of_type(&self, state: &mut DeviceTypes, device_type: i8) -> Result<Arc<accl_accelerator::Accelerators>> {
        if state.is_closing {
            return Err(over());
        }
        let new = || {
            let pinning = Arc::new(TorchPinning { device_type, is_over: self.is_over.clone() });
            let host_bytes = sysinfo().totalram.saturating_mul(u64::from(sysinfo().mem_unit.max(1)));
            let bytes = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
            accl_accelerator::Accelerators::new(pinning, bytes(self.most_idle), bytes(host_bytes / 2))
        };
        Ok(state.types.entry(device_type).or_insert_with(new).clone())
    }

    /// Ends the threads and frees idle memory. Nothing of torch is called afterwards.
    pub(crate) fn close(&self) {
        let types: Vec<_> = {
            let mut state = self.lock();
            state.is_closing = true;
            state.types.values().cloned().collect()
        };
        types.iter().for_each(|accelerators| accelerators.close());
        self.is_over.store(true, Ordering::Release);
    }

    /// Counters of all types of devices together.
    pub(crate) fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        for accelerators in self.lock().types.values() {
            let pinned = accelerators.pinned();
            counts.used_bytes += pinned.used_bytes;
            counts.idle_bytes += pinned.idle_bytes;
            counts.polls += accelerators.polls();
            let (bytes, idle_bytes) = accelerators.window_bytes();
            counts.window_bytes += bytes;
            counts.idle_window_bytes += idle_bytes;
        }
        counts
    }

    fn lock(&self) -> MutexGuard<'_, DeviceTypes> {
        // The state is consistent at every step, so a panic of an earlier holder does not matter.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DeviceTypes {
    /// Returns the side stream for a purpose, which is none of `others`.
    fn side_stream(&mut self, key: SideKey, others: &[i64], call: &AcceleratorCall) -> Result<i64> {
        if let Some(&stream) = self.side_streams.get(&key).filter(|stream| !others.contains(stream)) {
            return Ok(stream);
        }
        // torch's pool hands its streams out in turn, to programs as well.
        let refused =
            |error: cxx::Exception| Error::unsupported(format!("the device has no side streams: {}", error.what()));
        let mut stream = call.pool_stream().map_err(refused)?;
        for _ in 0..others.len() {
            if others.contains(&stream) {
                stream = call.pool_stream().map_err(refused)?;
            }
        }
        if self.side_streams.len() >= MOST_STREAMS {
            // Streams of a program that creates them for each call are not seen again.
            self.side_streams.clear();
        }
        self.side_streams.insert(key, stream);
        Ok(stream)
    }
}

/// Completes a small call on an accelerator in its caller's thread. Returns `None` if the device has other work first: then
/// the engine waits for it, with the call's deadline.
pub(crate) fn complete_eagerly(
    group: &accl_engine::Group,
    mut eager: EagerCall,
    phases: &mut Option<Arc<Phases>>,
) -> Result<Option<Waited>> {
    let begun = Instant::now();
    while !eager.is_copied_in()? {
        if begun.elapsed() > DEVICE_SPIN {
            return Ok(None);
        }
        std::thread::yield_now();
    }
    let waited = catch_unwind(AssertUnwindSafe(|| complete_with(group, eager.desc(), phases)));
    let must_leak = match &waited {
        Ok(Ok(waited)) => waited.status.must_leak_memory,
        Ok(Err(error)) => error.context.must_leak_memory,
        Err(_) => true,
    };
    if must_leak {
        eager.leak_memory();
    } else if matches!(&waited, Ok(Ok(waited)) if waited.how == Outcome::Done) {
        eager.copy_out()?;
    }
    waited.unwrap_or_else(|panic| resume_unwind(panic)).map(Some)
}

/// Returns whether outputs are dense and follow each other in memory, so that none overlaps another or itself.
fn are_apart(outputs: &[TensorView]) -> bool {
    let mut end_of_last = 0;
    outputs.iter().all(|view| {
        let bytes = view.count as usize * Dtype::from_code(view.dtype).map_or(0, Dtype::size_bytes);
        view.sizes == 0 && view.data >= std::mem::replace(&mut end_of_last, view.data + bytes)
    })
}

fn over() -> Error {
    Error::aborted("the process exits")
}

fn failed(error: cxx::Exception) -> Error {
    Error::device(error.what())
}

/// A value of torch. It is leaked if it is dropped after the end of Python: freeing it would call the device.
struct UntilTheEnd<T> {
    value: ManuallyDrop<T>,
    is_over: Arc<AtomicBool>,
}

impl<T> UntilTheEnd<T> {
    fn new(value: T, is_over: &Arc<AtomicBool>) -> Self {
        Self { value: ManuallyDrop::new(value), is_over: is_over.clone() }
    }
}

impl<T> Deref for UntilTheEnd<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> Drop for UntilTheEnd<T> {
    fn drop(&mut self) {
        if !self.is_over.load(Ordering::Acquire) {
            // SAFETY: the value is dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

/// The side streams of one call.
struct TorchStreams {
    call: UntilTheEnd<SharedPtr<AcceleratorCall>>,
    /// Addresses of the dense tensors on the device, by piece.
    inputs: Vec<usize>,
    outputs: Vec<usize>,
}

impl fmt::Debug for TorchStreams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TorchStreams").field("device", &self.device()).finish_non_exhaustive()
    }
}

fn is_out(direction: Direction) -> bool {
    direction == Direction::Out
}

impl CallStreams for TorchStreams {
    fn device(&self) -> String {
        self.call.device_name()
    }

    fn may_copy(&mut self, direction: Direction) -> Result<bool> {
        self.call.may_copy(is_out(direction)).map_err(failed)
    }

    fn copy(&mut self, copy: StreamCopy) -> Result<()> {
        let StreamCopy { direction, piece, at, host, len_bytes, is_pinned } = copy;
        let side = if is_out(direction) { &self.outputs } else { &self.inputs };
        let tensor = side[piece as usize] + at as usize;
        let made = self.call.copy(is_out(direction), tensor, host as usize, len_bytes, is_pinned);
        made.map_err(failed)
    }

    fn record(&mut self, direction: Direction) -> Result<Box<dyn StreamEvent>> {
        let event = self.call.record(is_out(direction)).map_err(failed)?;
        Ok(Box::new(TorchEvent(UntilTheEnd::new(event, &self.call.is_over))))
    }

    fn finish(&mut self) -> Result<()> {
        self.call.finish().map_err(failed)
    }

    fn gpu(&self) -> Option<GpuDevice> {
        let stream = self.call.stream();
        gpu_of(stream.device_type, stream.device_index, stream.is_rocm)
    }

    fn native_stream(&mut self) -> Result<u64> {
        let mut stream = 0;
        self.call.allocate(0, &mut stream).map_err(failed)?;
        Ok(stream)
    }

    fn allocate(&mut self, len_bytes: u64) -> Result<DeviceRoom> {
        let memory = self.call.allocate(len_bytes, &mut 0).map_err(failed)?;
        let address = memory.address() as u64;
        Ok(DeviceRoom { address, owner: Box::new(Owner(UntilTheEnd::new(memory, &self.call.is_over))) })
    }
}

struct TorchEvent(UntilTheEnd<UniquePtr<AcceleratorEvent>>);

impl fmt::Debug for TorchEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TorchEvent").finish_non_exhaustive()
    }
}

impl StreamEvent for TorchEvent {
    fn has_come(&self) -> Result<bool> {
        if self.0.is_over.load(Ordering::Acquire) {
            return Err(over());
        }
        self.0.has_come().map_err(failed)
    }
}

/// Pinned memory of torch.
#[derive(Debug)]
struct TorchPinning {
    device_type: i8,
    is_over: Arc<AtomicBool>,
}

impl Pinning for TorchPinning {
    fn allocate(&self, len_bytes: usize) -> Option<LentMemory> {
        if self.is_over.load(Ordering::Acquire) {
            return None;
        }
        let memory = ffi::pin_memory(self.device_type, len_bytes).ok()?;
        let address = memory.address();
        let owner = UntilTheEnd::new(memory, &self.is_over);
        // SAFETY: the owner has memory of this size, and gives no other code access to it.
        Some(unsafe { LentMemory::new(address as *mut u8, len_bytes, Box::new(Owner(owner))) })
    }

    fn enter_thread(&self) {
        if self.device_type == CUDA {
            relax_captures();
        }
    }
}

/// Lets this thread ask the device for events while another thread captures a graph. torch offers this to code that links with
/// the device's library alone. Both libraries have the same modes.
fn relax_captures() {
    type Exchange = unsafe extern "C" fn(*mut c_int) -> c_int;
    let process = Library::this();
    for name in ["cudaThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode"] {
        // SAFETY: both libraries declare this type.
        let Ok(exchange) = (unsafe { process.get::<Exchange>(name.as_bytes()) }) else { continue };
        let mut relaxed = 2;
        // SAFETY: the function reads and writes one integer.
        unsafe { exchange(&mut relaxed) };
    }
}

/// Owner of memory of torch.
struct Owner(#[expect(dead_code, reason = "held until it is dropped")] UntilTheEnd<UniquePtr<PinnedMemory>>);
