//! The driver and the compiler on a real GPU. On a machine without one, the test prints why and passes.
//!
//! `ACCL_TEST_NVRTC` names NVRTC's library, unless the dynamic linker finds it.

use std::ffi::{c_int, c_uint, c_void};

use accl_gpu::{Argument, DeviceMemory, Gpu, Grid, HostMemory, Libraries, Stream, Vendor};
use libloading::Library;

/// A kernel with a template, and one with C's name, whose parameter is a structure.
const SOURCE: &str = "
struct Args { const float *from; float *to; unsigned count; float factor; };
template <int TIMES> __global__ void repeated(const float *from, float *to, unsigned count) {
  const unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count) to[at] = TIMES * from[at];
}
extern \"C\" __global__ void scale(const __grid_constant__ Args args) {
  const unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < args.count) args.to[at] = __fdiv_rn(args.from[at], args.factor) + OFFSET;
}
";
const COUNT: usize = 1_000_003;

#[derive(Clone, Copy)]
#[repr(C)]
struct Args {
    from: u64,
    to: u64,
    count: u32,
    factor: f32,
}

/// Functions of CUDA's driver that torch calls in the product.
struct Torch(Library);

impl Torch {
    /// Calls a function of type `F`, and checks its result.
    fn call<F: Copy>(&self, name: &str, call: impl FnOnce(F) -> c_int) {
        // SAFETY: each caller below gives the type that CUDA's documentation declares.
        let function = unsafe { self.0.get::<F>(name.as_bytes()) }.unwrap();
        assert_eq!(call(*function), 0, "{name}");
    }

    /// Makes the primary context of device 0 current, as torch does.
    fn enter(&self) {
        let mut context: *mut c_void = std::ptr::null_mut();
        type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;
        type Set = unsafe extern "C" fn(*mut c_void) -> c_int;
        // SAFETY: `context` may be written to.
        self.call("cuDevicePrimaryCtxRetain", |retain: Retain| unsafe { retain(&mut context, 0) });
        // SAFETY: the context was retained, and stays so.
        self.call("cuCtxSetCurrent", |set: Set| unsafe { set(context) });
    }

    fn device_memory(&self, bytes: usize) -> DeviceMemory {
        let mut address = 0;
        type Allocate = unsafe extern "C" fn(*mut u64, usize) -> c_int;
        // SAFETY: `address` may be written to, and a context is current.
        self.call("cuMemAlloc_v2", |allocate: Allocate| unsafe { allocate(&mut address, bytes) });
        // SAFETY: the memory is never freed, and only this test uses it.
        unsafe { DeviceMemory::new(address, bytes as u64) }
    }

    /// Returns pinned memory as elements and as memory to copy.
    fn pinned(&self) -> (*mut f32, HostMemory) {
        let mut address: *mut c_void = std::ptr::null_mut();
        type Allocate = unsafe extern "C" fn(*mut *mut c_void, usize) -> c_int;
        // SAFETY: `address` may be written to, and a context is current.
        self.call("cuMemAllocHost_v2", |allocate: Allocate| unsafe { allocate(&mut address, 4 * COUNT) });
        // SAFETY: the memory is never freed, and the test waits for events before it reads.
        (address.cast(), unsafe { HostMemory::new(address.cast(), 4 * COUNT as u64) })
    }

    fn stream(&self) -> Stream {
        let mut stream: *mut c_void = std::ptr::null_mut();
        type Create = unsafe extern "C" fn(*mut *mut c_void, c_uint) -> c_int;
        // SAFETY: `stream` may be written to, a context is current, and 1 is a stream that does not wait for others.
        self.call("cuStreamCreate", |create: Create| unsafe { create(&mut stream, 1) });
        // SAFETY: the stream is never destroyed.
        unsafe { Stream::new(stream as u64) }
    }
}

#[test]
fn kernels_are_compiled_loaded_and_launched_in_the_order_of_a_stream() {
    let mut libraries = Libraries::of(Vendor::Cuda);
    #[expect(clippy::disallowed_methods, reason = "no setting, but an argument of tests")]
    if let Some(path) = std::env::var_os("ACCL_TEST_NVRTC") {
        // SAFETY: the variable names NVRTC.
        libraries = unsafe { libraries.with_compiler(path.into()) };
    }
    let gpu = match Gpu::open_apart(Vendor::Cuda, 0, libraries) {
        Ok(gpu) => gpu,
        Err(error) => return println!("skipped: {}", error.message),
    };
    println!("{}: {}, host pointers: {}", gpu.device(), gpu.title().unwrap(), gpu.has_host_pointers());
    // SAFETY: the driver is open already.
    let torch = Torch(unsafe { Library::new("libcuda.so.1") }.unwrap());
    torch.enter();
    let module = gpu.load(&["repeated<3>", "scale"], SOURCE, &["-DOFFSET=0.5f"]).unwrap();
    let (device, stream) = ([(); 3].map(|()| torch.device_memory(4 * COUNT)), torch.stream());
    let (from, to) = (torch.pinned(), torch.pinned());
    // SAFETY: the memory has `COUNT` elements, and no work uses it yet.
    let input = unsafe { std::slice::from_raw_parts_mut(from.0, COUNT) };
    for (index, value) in input.iter_mut().enumerate() {
        *value = index as f32 * 0.37 - 1000.0;
    }
    let event = gpu.event().unwrap();
    assert!(event.has_come().unwrap());
    // Other threads have no current context.
    std::thread::scope(|scope| {
        let input = from.1;
        let (gpu, module) = (&gpu, &module);
        scope.spawn(move || {
            let [first, second, third] = device;
            let grid = Grid::line(COUNT.div_ceil(256) as u32, 256);
            gpu.copy_to_device(first, input, stream).unwrap();
            let (from, to, count) = (first.address(), second.address(), COUNT as u32);
            let arguments = [Argument::of(&from), Argument::of(&to), Argument::of(&count)];
            // SAFETY: the kernel accesses memory that stays until the end of the test.
            unsafe { module.launch("repeated<3>", grid, &arguments, stream) }.unwrap();
            let args = Args { from: second.address(), to: third.address(), count, factor: 7.0 };
            // SAFETY: the kernel accesses memory that stays until the end of the test, as the first one does.
            unsafe { module.launch("scale", grid, &[Argument::of(&args)], stream) }.unwrap();
        });
    });
    gpu.copy_to_host(to.1, device[2], stream).unwrap();
    event.record(stream).unwrap();
    let mut questions = 1;
    while !event.has_come().unwrap() {
        questions += 1;
    }
    // SAFETY: the event has come, so the copy is made.
    let output = unsafe { std::slice::from_raw_parts(to.0, COUNT) };
    for (value, result) in input.iter().zip(output) {
        assert_eq!(result.to_bits(), (3.0 * value / 7.0 + 0.5).to_bits(), "{value}");
    }
    // SAFETY: the launch is refused.
    let error = unsafe { module.launch("scale", Grid::line(1, 2048), &[], stream) }.unwrap_err();
    assert!(error.message.contains("expected at most "), "{error}");
    let error = gpu.load(&["wrong"], "__global__ void wrong() { missing(); }", &[]).unwrap_err();
    assert!(error.message.contains("missing"), "{error}");
    println!("{COUNT} elements have the right bits; the event came at question {questions}");
}
