//! Windows: device memory of this process that others read, and windows of other processes that this one has imported.
//!
//! Owns allocation and reuse of windows, imports, and kernels that reduce. A window is lent to one call at a time. It is never
//! freed: another process may have imported it, and memory that is imported must not be freed. An import ends with the last
//! group that uses it. Read [`GpuPeers::lend`] first.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::sync::{Arc, Weak};

use accl_gpu::kernels::ReductionSet;
use accl_gpu::{Allocation, Gpu, Imported, Module, Stream, Vendor};
use accl_types::{Dtype, Error, ReduceOp, Result};
use parking_lot::Mutex;

use super::reference::WindowId;
use crate::gpu_codecs::open;
use crate::streams::GpuDevice;

/// Least bytes of a window. The driver gives allocations of a multiple of it blocks of their own.
const LEAST_WINDOW: u64 = 2 << 20;

/// The GPUs of this process whose memory others read.
#[derive(Debug, Default)]
pub(crate) struct AllGpuPeers(Mutex<HashMap<(Vendor, u32), Arc<GpuPeers>>>);

impl AllGpuPeers {
    /// Returns the windows of a GPU, which is opened if it is new.
    ///
    /// # Errors
    /// The errors of [`Gpu::open`].
    pub(crate) fn of(&self, device: &GpuDevice) -> Result<Arc<GpuPeers>> {
        let mut all = self.0.lock();
        if let Some(known) = all.get(&(device.vendor, device.ordinal)) {
            return Ok(known.clone());
        }
        let gpu = open(device)?;
        let peers = Arc::new(GpuPeers::new(gpu.stream()?, gpu));
        all.insert((device.vendor, device.ordinal), peers.clone());
        Ok(peers)
    }

    /// Bytes of all windows: lent to calls, and idle.
    pub(crate) fn counts(&self) -> WindowCounts {
        let mut counts = WindowCounts::default();
        for peers in self.0.lock().values() {
            let state = peers.state.lock();
            counts.bytes += state.own.values().map(|own| own.len_bytes).sum::<u64>();
            counts.idle_bytes += state.idle.iter().map(|window| window.id.len_bytes).sum::<u64>();
        }
        counts
    }
}

/// Bytes of windows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WindowCounts {
    pub(crate) bytes: u64,
    pub(crate) idle_bytes: u64,
}

/// The windows and imports of one GPU.
#[derive(Debug)]
pub(crate) struct GpuPeers {
    pub(crate) gpu: Gpu,
    /// Stream of trials, which waits for no work of the program.
    pub(crate) stream: Stream,
    state: Mutex<State>,
    modules: Mutex<HashMap<u64, Module>>,
}

#[derive(Debug, Default)]
struct State {
    idle: Vec<Window>,
    /// Windows of this process, by number.
    own: HashMap<u64, OwnWindow>,
    /// Imported windows, by number.
    imports: HashMap<u64, Weak<Import>>,
}

#[derive(Clone, Copy, Debug)]
struct OwnWindow {
    address: u64,
    len_bytes: u64,
}

/// Device memory that others may have imported.
#[derive(Debug)]
pub(crate) struct Window {
    allocation: Allocation,
    id: WindowId,
}

/// A window of another process.
#[derive(Debug)]
pub(crate) struct Import(Imported);

/// A window that is lent to a call. It serves the next call when this value is dropped.
#[derive(Debug)]
pub(crate) struct Lease {
    /// `None` only while the value is dropped.
    window: Option<Window>,
    home: Arc<GpuPeers>,
}

impl Lease {
    pub(crate) fn id(&self) -> WindowId {
        self.window().id
    }

    /// Returns the address of the first byte on the device.
    pub(crate) fn address(&self) -> u64 {
        self.window().allocation.address()
    }

    fn window(&self) -> &Window {
        self.window.as_ref().unwrap_or_else(|| unreachable!("a lease has its window until it is dropped"))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.home.state.lock().idle.extend(self.window.take());
    }
}

/// Memory of a window as this process sees it.
#[derive(Clone, Debug)]
pub(crate) enum Seen {
    /// Address of a window of this process.
    Own(u64),
    Other(Arc<Import>),
}

impl Seen {
    /// Returns the address of the first byte.
    pub(crate) fn address(&self) -> u64 {
        match self {
            Seen::Own(address) => *address,
            Seen::Other(import) => import.0.address(),
        }
    }
}

impl GpuPeers {
    fn new(stream: Stream, gpu: Gpu) -> Self {
        Self { gpu, stream, state: Mutex::default(), modules: Mutex::default() }
    }

    /// Lends a window of at least `len_bytes` bytes: the smallest idle one that fits and is at most four times as large, or a new
    /// one. If the device has no memory for a new one, any idle one that fits.
    ///
    /// # Errors
    /// `Exhausted` if the device has no memory. `Device` if its driver cannot share memory.
    pub(crate) fn lend(self: &Arc<Self>, len_bytes: u64) -> Result<Lease> {
        let len_bytes = len_bytes.max(LEAST_WINDOW).next_power_of_two();
        let lent = |window| Lease { window: Some(window), home: self.clone() };
        if let Some(window) = self.take_idle(len_bytes..=len_bytes.saturating_mul(4)) {
            return Ok(lent(window));
        }
        // Without the lock, because the driver may wait for the device.
        let allocated = self.gpu.allocate(len_bytes);
        if let Some(window) = allocated.as_ref().err().and_then(|_| self.take_idle(len_bytes..=u64::MAX)) {
            return Ok(lent(window));
        }
        let allocation = allocated.map_err(|error| {
            let message = format!(
                "{}; free memory of the device, or set ACCL_GPU_ROUTE=staged or a smaller ACCL_GPU_WINDOW on all ranks",
                error.message
            );
            Error { message, ..error }
        })?;
        let id = WindowId { handle: allocation.export()?, number: new_number()?, len_bytes };
        self.state.lock().own.insert(id.number, OwnWindow { address: allocation.address(), len_bytes });
        Ok(lent(Window { allocation, id }))
    }

    /// Takes the smallest idle window whose length is in a range.
    fn take_idle(&self, lengths: RangeInclusive<u64>) -> Option<Window> {
        let idle = &mut self.state.lock().idle;
        let fitting = idle.iter().enumerate().filter(|(_, window)| lengths.contains(&window.id.len_bytes));
        let (index, _) = fitting.min_by_key(|(_, window)| window.id.len_bytes)?;
        Some(idle.swap_remove(index))
    }

    /// Returns how this process sees a window, which is imported if it is new.
    ///
    /// # Errors
    /// `Device` with the driver's words.
    pub(crate) fn see(&self, window: WindowId) -> Result<Seen> {
        if let Some(known) = self.known(window) {
            return Ok(known);
        }
        // SAFETY: the handle comes from a rank of the group, in a message whose signature says that it publishes. Its process
        // keeps a window for as long as it lives. Without the lock, because the driver may take long. If two threads import it at the
        // same time, each has an import of its own.
        let import = Arc::new(Import(unsafe { self.gpu.import(window.handle, window.len_bytes) }?));
        let mut state = self.state.lock();
        state.imports.retain(|_, import| import.strong_count() > 0);
        state.imports.insert(window.number, Arc::downgrade(&import));
        Ok(Seen::Other(import))
    }

    fn known(&self, window: WindowId) -> Option<Seen> {
        let state = self.state.lock();
        let own = state.own.get(&window.number).map(|own| Seen::Own(own.address));
        own.or_else(|| state.imports.get(&window.number).and_then(Weak::upgrade).map(Seen::Other))
    }

    /// Returns the kernel that reduces elements of a type, which is compiled if it is new.
    ///
    /// # Errors
    /// `Unsupported` if there is none. The errors of [`Gpu::load`].
    pub(crate) fn reduction(&self, op: ReduceOp, dtype: Dtype) -> Result<(ReductionSet, Module)> {
        let set = ReductionSet::new(op, dtype)
            .ok_or_else(|| Error::unsupported(format!("no kernel reduces {dtype} by {op}; use another dtype")))?;
        if let Some(module) = self.modules.lock().get(&set.word()) {
            return Ok((set, module.clone()));
        }
        let options = set.options();
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        // Without the lock, because this takes long. Two threads may do it at the same time, with the same result.
        let module = self.gpu.load(&[set.entry()], &set.source(), &options)?;
        Ok((set, self.modules.lock().entry(set.word()).or_insert(module).clone()))
    }
}

/// Draws the number of a window. The system draws it, because numbers of a generator in this process could be drawn again in a
/// process that was forked from it.
fn new_number() -> Result<u64> {
    let mut number = [0; 8];
    getrandom::fill(&mut number)
        .map_err(|error| Error::device(format!("no random number for a window of device memory: {error}")))?;
    Ok(u64::from_ne_bytes(number))
}
