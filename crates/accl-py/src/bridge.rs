//! The bridge to the C++ shim: plain data and functions, in both directions.
//!
//! Owns the declarations; the Rust functions are defined in `group.rs`, `ticket.rs` and `repeat.rs`. Each function
//! returns its errors as data, and the macro in `guard.rs` guards it against panics. The enums repeat those in
//! `accl-types`, because C++ only sees what is declared here. `codes.rs` does not compile if they differ.

pub(crate) use crate::group::{Group, Runtime, new_group};
pub(crate) use crate::ticket::{Ticket, new_ticket};

/// Declarations of the bridge.
#[cxx::bridge(namespace = "accl::bridge")]
#[allow(missing_docs, reason = "cxx generates items that cannot carry comments")]
pub mod ffi {
    /// `ErrorKind`, with `Ok` for success.
    #[repr(u8)]
    enum Kind {
        InvalidArgument = 0,
        InvalidType = 1,
        Unsupported = 2,
        Configuration = 3,
        Mismatch = 4,
        Timeout = 5,
        PeerLost = 6,
        Network = 7,
        Rendezvous = 8,
        Protocol = 9,
        Device = 10,
        Exhausted = 11,
        Aborted = 12,
        Internal = 13,
        Ok = 255,
    }

    /// `Collective`.
    #[repr(u8)]
    enum Collective {
        AllReduce = 0,
        ReduceScatter = 1,
        AllGather = 2,
        Broadcast = 3,
        Reduce = 4,
        Gather = 5,
        Scatter = 6,
        AllToAll = 7,
        Barrier = 8,
        Send = 9,
        Recv = 10,
    }

    /// `ProfileNames`.
    #[repr(u8)]
    enum ProfileNames {
        Accl = 0,
        Ccl = 1,
        Pg = 2,
    }

    /// An event of a call in torch's profiler, or the name of the call's function in c10d.
    #[repr(u8)]
    enum EventName {
        Call,
        Wait,
        Phases,
        C10d,
    }

    /// `c10d::ErrorType`.
    #[repr(u8)]
    enum ErrorType {
        Success = 0,
        Timeout = 1,
        CommError = 2,
        RemoteError = 3,
    }

    /// The result of a wait.
    #[repr(u8)]
    enum Outcome {
        /// The call still runs. If a wait returns this, the wait's own timeout has passed and the status is that error.
        Running = 0,
        /// The outputs are written.
        Done = 1,
        /// The call failed; the status has the cause.
        Failed = 2,
        /// A Python signal handler raised; the exception is set on this thread.
        Interrupted = 3,
    }

    /// The result of a bridged function. Kinds cross as data: a cxx `Result` would only carry a string.
    struct Status {
        kind: Kind,
        /// The whole message, with its location.
        message: String,
        /// The rank that reports, or -1.
        rank: i64,
        /// The rank to blame, or -1.
        peer: i64,
        /// Whether the memory of the call's tensors must never be freed, because something that cannot be stopped may
        /// still write to it.
        must_leak_memory: bool,
    }

    /// A tensor's memory. The shape is borrowed from the tensor and read before the function returns.
    #[derive(Clone, Copy)]
    struct TensorView {
        /// Address of the first element.
        data: usize,
        /// Address of `dim` sizes, or 0 for a dense tensor of `count` elements.
        sizes: usize,
        /// Address of `dim` strides, in elements.
        strides: usize,
        /// Number of dimensions.
        dim: usize,
        /// Number of elements of a dense tensor.
        count: i64,
        /// Address of the elements in row-major order, if the tensor is on an accelerator; 0 in host memory.
        dense: usize,
        /// The code that `dtype_code` returns.
        dtype: u8,
        /// Whether the memory holds the conjugate.
        conj: bool,
        /// Whether the memory holds the negative.
        neg: bool,
    }

    /// One call. Blocks are given as the number of tensors in each.
    struct CallArgs<'a> {
        collective: Collective,
        /// `c10d::ReduceOp::RedOpType`, which has the codes of `ReduceOp`.
        op: u8,
        /// Factor of `PREMUL_SUM`.
        factor: f64,
        /// Root of a rooted collective.
        root: u32,
        /// Other side of a send or receive, -1 for any.
        peer: i64,
        /// Tag of a send or receive.
        tag: u32,
        /// The timeout in milliseconds, or -1 for the group's timeout.
        timeout_ms: i64,
        inputs: &'a [TensorView],
        input_blocks: &'a [u32],
        outputs: &'a [TensorView],
        output_blocks: &'a [u32],
        /// Whether all ranks' blocks have equal sizes by construction.
        equal_blocks: bool,
        /// A reserved sequence number, or -1 for the next one.
        seq: i64,
        /// Whether the times of the call's phases are recorded.
        is_profiled: bool,
        /// Whether waiting threads wait until an accelerator has made the last copy, not only until it is enqueued.
        waits_for_device: bool,
    }

    /// A stream of torch.
    struct AcceleratorStream {
        /// `c10::DeviceType` of its device.
        device_type: i8,
        /// Index of the device.
        device_index: i8,
        /// `c10::StreamId`.
        id: i64,
        /// Whether its device type belongs to ROCm.
        is_rocm: bool,
    }

    /// The times of a call's phases in nanoseconds; they add up to its duration.
    struct PhaseNanos {
        /// Whether the times were recorded; if not, all are zero.
        is_known: bool,
        /// Time until this rank began the call.
        queue: i64,
        /// Time for copies between host memory and an accelerator that no other phase hides.
        bus: i64,
        /// Time from then until the first message of a peer arrived.
        peers: i64,
        /// Time for moving bytes and waiting for more of them.
        transfer: i64,
        /// Time for arithmetic.
        reduce: i64,
    }

    /// The arguments of a group's creation.
    struct GroupArgs<'a> {
        name: &'a str,
        rank: u32,
        world: u32,
        timeout_ms: i64,
        global_ranks: &'a [u64],
        /// Whether it is the default process group.
        is_default: bool,
        /// Host name of the store's master, or empty.
        master: &'a str,
        /// Names and values of options, alternating.
        settings: &'a [String],
    }

    /// The result of a wait.
    struct Waited {
        how: Outcome,
        status: Status,
    }

    /// The result of a call, and the times of its phases.
    struct Profiled {
        waited: Waited,
        phases: PhaseNanos,
    }

    /// A number, or the error instead of it.
    struct Numbered {
        value: i64,
        status: Status,
    }

    /// A text, or the error instead of it.
    struct Described {
        text: String,
        status: Status,
    }

    /// The nanoseconds of each sample, or the error instead of them.
    struct Repeated {
        nanos: Vec<i64>,
        status: Status,
    }

    extern "Rust" {
        type Runtime;
        type Group;
        type Ticket;

        fn new_group() -> Box<Group>;
        fn new_ticket() -> Box<Ticket>;
        /// Number of forks between the first process that used the engine and this process; 0 in the first one.
        fn fork_generation() -> u64;

        fn group_create(group: &mut Group, runtime: &Runtime, args: &GroupArgs, store: &StoreRef) -> Status;
        fn group_create_sibling(group: &mut Group, other: &Group, args: &GroupArgs, store: &StoreRef) -> Status;
        fn group_call(group: &Group, args: &CallArgs, tensors: &SharedPtr<AcceleratorCall>) -> Profiled;
        fn group_submit(
            group: &Group,
            args: &CallArgs,
            tensors: &SharedPtr<AcceleratorCall>,
            ticket: &mut Ticket,
        ) -> Status;
        fn group_spawn(group: &Group, task: UniquePtr<Task>, ticket: &mut Ticket) -> Status;
        fn group_reserve(group: &Group, count: u64) -> Numbered;
        fn group_conclude(group: &Group, first: i64, count: u64, outcome: &Status) -> Status;
        fn group_next_seq(group: &Group) -> Numbered;
        fn group_monitored_barrier(group: &Group, timeout_ms: i64, wait_all: bool) -> Waited;
        fn group_connect_all(group: &Group) -> Waited;
        fn group_abort(group: &Group, reason: &str) -> Status;
        fn group_shutdown(group: &Group, wait: bool) -> Status;
        fn group_set_timeout(group: &Group, timeout_ms: i64) -> Status;
        fn group_enable_timing(group: &Group) -> Status;
        fn group_first_error(group: &Group) -> Status;
        fn group_error_type(group: &Group) -> ErrorType;
        fn group_profile_names(group: &Group) -> Numbered;
        fn group_describe(group: &Group) -> Described;
        fn group_snapshot(group: &Group) -> Described;
        fn group_algorithm(group: &Group, args: &CallArgs) -> Described;
        fn group_repeat(group: &Group, args: &CallArgs, samples: u32, calls: u32, fenced: bool) -> Repeated;
        fn collective_code(name: &str) -> Numbered;
        /// The code of the dtype of torch's `ScalarType`, or 255 if its elements cannot be sent.
        fn dtype_code(scalar_type: i8) -> u8;
        fn event_name(style: ProfileNames, event: EventName, title: &str, elements: i64) -> Described;

        fn ticket_done(ticket: &Ticket) -> Waited;
        fn ticket_poll(ticket: &Ticket) -> Waited;
        fn ticket_wait(ticket: &Ticket, timeout_ms: i64) -> Waited;
        fn ticket_error(ticket: &Ticket) -> Status;
        fn ticket_held(ticket: &Ticket) -> Status;
        fn ticket_report(ticket: &Ticket) -> Numbered;
        fn ticket_abort(ticket: &Ticket, reason: &str) -> Status;
        fn ticket_seq(ticket: &Ticket) -> Numbered;
        fn ticket_source(ticket: &Ticket) -> Numbered;
        fn ticket_nanos(ticket: &Ticket) -> Numbered;
        fn ticket_phases(ticket: &Ticket) -> PhaseNanos;
        fn ticket_when_done(ticket: &Ticket, task: UniquePtr<CompletionTask>) -> Status;
        fn ticket_when_through(ticket: &Ticket, task: UniquePtr<CompletionTask>) -> Status;
    }

    unsafe extern "C++" {
        include!("bridge_types.h");

        /// A c10d store, used while a group is created.
        type StoreRef;
        fn store_set(store: &StoreRef, key: &str, value: &[u8]) -> Result<()>;
        fn store_get(store: &StoreRef, key: &str) -> Result<Vec<u8>>;
        fn store_compare_set(store: &StoreRef, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>>;
        fn store_add(store: &StoreRef, key: &str, delta: i64) -> Result<i64>;
        fn store_check(store: &StoreRef, key: &str) -> Result<bool>;
        fn store_delete(store: &StoreRef, key: &str) -> Result<bool>;

        /// A task that issues several calls and waits for them, run on a completion thread.
        type Task;
        fn run(self: Pin<&mut Task>) -> Status;

        /// Completes a call that has ended while no caller waits for it. `run` returns false if it must be
        /// called again soon.
        type CompletionTask;
        fn run(self: Pin<&mut CompletionTask>) -> bool;

        /// A point in a stream of an accelerator. Errors of a device cross the bridge as text.
        type AcceleratorEvent;
        fn has_come(self: &AcceleratorEvent) -> Result<bool>;

        /// Host memory from which and to which accelerators copy without the processor.
        type PinnedMemory;
        fn address(self: &PinnedMemory) -> usize;
        fn pin_memory(device_type: i8, bytes: usize) -> Result<UniquePtr<PinnedMemory>>;

        /// The copies of one call on an accelerator. `out` is the direction to the tensors.
        type AcceleratorCall;
        fn device_name(self: &AcceleratorCall) -> String;
        /// The stream on which the call was issued.
        fn stream(self: &AcceleratorCall) -> AcceleratorStream;
        /// The id of another stream of the device, from torch's pool.
        fn pool_stream(self: &AcceleratorCall) -> Result<i64>;
        /// Sets the side streams, and packs tensors that are not dense. Copies follow the work that the call's stream has
        /// now.
        fn begin(self: &AcceleratorCall, in_stream: i64, out_stream: i64) -> Result<()>;
        fn may_copy(self: &AcceleratorCall, out: bool) -> Result<bool>;
        fn copy(
            self: &AcceleratorCall,
            out: bool,
            tensor: usize,
            host: usize,
            bytes: u64,
            is_pinned: bool,
        ) -> Result<()>;
        fn record(self: &AcceleratorCall, out: bool) -> Result<UniquePtr<AcceleratorEvent>>;
        fn finish(self: &AcceleratorCall) -> Result<()>;
        /// Sets the native handle of the stream of copies out. Returns memory of the device for kernels there; null for no
        /// bytes.
        fn allocate(self: &AcceleratorCall, bytes: u64, stream: &mut u64) -> Result<UniquePtr<PinnedMemory>>;
        /// Makes the current stream follow a call that is enqueued.
        fn follow(self: &AcceleratorCall, earlier: &AcceleratorCall) -> Result<()>;

        /// Runs Python's signal handlers if this is Python's main thread. Returns true if one raised.
        fn python_interrupted() -> bool;
        /// The same at process exit, where the main thread runs nothing else: also runs Python's pending calls.
        fn python_interrupted_at_end() -> bool;

        /// The versions of torch and pybind11 that the shim was compiled for, one per line. Uses nothing of torch.
        fn built_with() -> &'static str;
        /// Address of the store below all prefixes, for `Store::identity`.
        fn store_identity(store: &StoreRef) -> u64;
        /// Adds the shim's classes to the module at this address.
        fn define_classes(module: usize) -> bool;
        /// Returns a backend as a new Python reference, or 0 with a Python error set.
        fn create_backend(
            runtime: &Runtime,
            store: usize,
            rank: i32,
            world: i32,
            options: usize,
            is_default: bool,
        ) -> usize;
    }

    impl WeakPtr<AcceleratorCall> {}
}

use accl_engine::fork_generation;

use crate::group::{
    dtype_code, group_abort, group_call, group_conclude, group_connect_all, group_create, group_create_sibling,
    group_describe, group_enable_timing, group_error_type, group_first_error, group_monitored_barrier, group_next_seq,
    group_profile_names, group_reserve, group_set_timeout, group_shutdown, group_snapshot, group_spawn, group_submit,
};
use crate::profile::event_name;
use crate::repeat::{collective_code, group_algorithm, group_repeat};
use crate::ticket::{
    ticket_abort, ticket_done, ticket_error, ticket_held, ticket_nanos, ticket_phases, ticket_poll, ticket_report,
    ticket_seq, ticket_source, ticket_wait, ticket_when_done, ticket_when_through,
};

// SAFETY: a task is moved as a whole and run by one thread. It holds tensors and a raw group reference that the shim
// keeps alive until the task has run.
unsafe impl Send for ffi::Task {}
// SAFETY: torch's streams and events may be used by any thread. One thread at a time changes a call: the one that issues
// it, then the one that has the lock of its `CallStreams`. `follow` reads a call that no thread changes any more.
unsafe impl Send for ffi::AcceleratorCall {}
// SAFETY: the lock of the call's `CallStreams` lets one thread at a time change it; see above.
unsafe impl Sync for ffi::AcceleratorCall {}
// SAFETY: any thread may query and destroy an event of torch.
unsafe impl Send for ffi::AcceleratorEvent {}
// SAFETY: any thread may free pinned memory of torch.
unsafe impl Send for ffi::PinnedMemory {}
// SAFETY: a shared reference gives access to nothing but the address.
unsafe impl Sync for ffi::PinnedMemory {}
// SAFETY: a completion task is moved as a whole and used by one thread.
unsafe impl Send for ffi::CompletionTask {}
