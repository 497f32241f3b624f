//! Tests of a GPU on the stand-in for a driver and its compiler.
//!
//! Each test has a copy of the stand-in, so it can fail functions without disturbing others. `lent` has streams that the
//! stand-in does not own, `ending` the end of a process, and `peers` memory that processes share. Read [`RoundTrip`] first.

mod ending;
mod lent;
mod peers;

use accl_gpu_standin::{Order, Standin};
use accl_types::ErrorKind;

use super::*;
use crate::{compiler, driver};

/// Kernels by the rules of this crate's source. `wild` writes outside of the memory.
const SOURCE: &str = "
struct Args { const char *from; char *to; unsigned count; float factor; };
KERNEL(scale, 64) {
  const unsigned at = BLOCK * 64 + THREAD;
  if (at < args.count) write_at<float>(args.to + 4 * at, FACTOR * args.factor * read_at<float>(args.from + 4 * at));
}
KERNEL(wild, 64) { write_at<float>(args.to + (1ull << 40), 1.0f); }
";
const NAMES: &[&str] = &["scale", "wild"];
const OPTIONS: &[&str] = &["-DFACTOR=2.0f"];
/// Number of elements: three whole blocks and a part of one.
const COUNT: usize = 200;
/// Code with which functions fail: out of memory.
const FAILURE: i32 = 2;

/// The parameter of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct Args {
    from: u64,
    to: u64,
    count: u32,
    factor: f32,
}

/// One use of everything: a source is loaded, and elements go to the device, through a kernel and back.
struct RoundTrip<'a> {
    standin: &'a Standin,
    vendor: Vendor,
    /// Factor that the kernel is compiled with.
    factor: f32,
    /// GPUs and modules that must live until the device has done its work.
    keeps: Vec<(Gpu, Option<Module>)>,
    input: Vec<f32>,
    output: Vec<f32>,
}

impl<'a> RoundTrip<'a> {
    fn new(standin: &'a Standin, vendor: Vendor) -> Self {
        let input = (0..COUNT).map(|index| index as f32 - 7.5).collect();
        Self { standin, vendor, factor: 2.0, keeps: Vec::new(), input, output: vec![0.0; COUNT] }
    }

    fn gpu(&mut self) -> Result<Gpu> {
        let gpu = Gpu::open_apart(self.vendor, 0, libraries(self.standin))?;
        self.keeps.push((gpu.clone(), None));
        Ok(gpu)
    }

    /// Returns a stream, memory for the input and the output on the device, and both on the host.
    fn memory(&mut self) -> (Stream, [DeviceMemory; 2], [HostMemory; 2]) {
        let bytes = 4 * COUNT as u64;
        // SAFETY: the stand-in's streams are never destroyed.
        let stream = unsafe { Stream::new(self.standin.stream(0)) };
        // SAFETY: the stand-in's memory is never freed, and each test has its own.
        let device = [(); 2].map(|()| unsafe { DeviceMemory::new(self.standin.allocate(0, bytes as usize), bytes) });
        let addresses = [self.input.as_mut_ptr(), self.output.as_mut_ptr()];
        // SAFETY: `end` lets the streams finish before the vectors are dropped, and `all` uses them after the event has come.
        let host = addresses.map(|address| unsafe { HostMemory::new(address.cast(), bytes) });
        (stream, device, host)
    }

    /// Returns the output once its event has come.
    fn all(&mut self) -> Result<&[f32]> {
        let gpu = self.gpu()?;
        assert_eq!(
            (gpu.device(), gpu.has_host_pointers(), gpu.title()?),
            ("cuda:0".to_owned(), true, "Stand-in".to_owned())
        );
        let module = gpu.load(NAMES, SOURCE, &[&format!("-DFACTOR={:.1}f", self.factor)])?;
        self.keeps.push((gpu.clone(), Some(module.clone())));
        let (stream, [from, to], [input, output]) = self.memory();
        gpu.copy_to_device(from, input, stream)?;
        let args = Args { from: from.address(), to: to.address(), count: COUNT as u32, factor: 0.25 };
        // SAFETY: the kernel accesses the stand-in's memory alone, which is never freed.
        unsafe { module.launch("scale", Grid::line(COUNT.div_ceil(64) as u32, 64), &[Argument::of(&args)], stream)? };
        gpu.copy_to_host(output, to, stream)?;
        let event = gpu.event()?;
        assert!(event.has_come()?, "an event that was not recorded has come");
        event.record(stream)?;
        while !event.has_come()? {}
        Ok(&self.output)
    }

    /// Checks the output.
    fn check(&mut self) {
        let wanted: Vec<f32> = self.input.iter().map(|value| value * self.factor * 0.25).collect();
        assert_eq!(self.all().unwrap(), wanted);
    }

    /// Lets the streams finish, releases everything and checks that nothing is left.
    fn end(self) {
        let Self { standin, keeps, .. } = self;
        standin.draw(0, 0, 0);
        standin.order(Order::Early, 0);
        drop(keeps);
        let counts = standin.counts();
        assert!(counts.is_empty() && counts.tasks == 0, "{counts:?}");
    }
}

fn libraries(standin: &Standin) -> Libraries {
    Libraries { driver: vec![standin.path().to_owned()], compiler: vec![standin.path().to_owned()] }
}

/// Names of all functions of a row: the driver's, then the compiler's.
fn functions(vendor: Vendor) -> [Vec<&'static str>; 2] {
    [driver::SYMBOLS, compiler::SYMBOLS].map(|symbols| {
        let names = symbols.iter().map(|(cuda, hip, ..)| if vendor == Vendor::Cuda { *cuda } else { *hip });
        names.filter(|name| !name.is_empty()).collect()
    })
}

#[test]
fn elements_go_through_a_kernel_in_every_order_of_streams() {
    for vendor in [Vendor::Cuda, Vendor::Hip] {
        for (order, seeds) in [(Order::Early, 1), (Order::Late, 1), (Order::Random, 20)] {
            let standin = Standin::new();
            for seed in 0..seeds {
                standin.order(order, seed);
                let mut run = RoundTrip::new(&standin, vendor);
                run.check();
                run.end();
            }
        }
    }
}

#[test]
fn each_module_has_its_own_code() {
    let standin = Standin::new();
    for factor in [2.0, 3.0, 4.0] {
        let mut run = RoundTrip { factor, ..RoundTrip::new(&standin, Vendor::Cuda) };
        run.check();
        run.end();
    }
}

#[test]
fn an_event_comes_after_the_work_before_it() {
    let standin = Standin::new();
    standin.order(Order::Late, 0);
    let mut run = RoundTrip::new(&standin, Vendor::Cuda);
    let gpu = run.gpu().unwrap();
    let (stream, [from, _], [input, output]) = run.memory();
    gpu.copy_to_device(from, input, stream).unwrap();
    gpu.copy_to_host(output, from, stream).unwrap();
    let event = gpu.event().unwrap();
    event.record(stream).unwrap();
    // Each question does one task: two copies, then the event.
    assert_eq!([(); 4].map(|()| event.has_come().unwrap()), [false, false, true, true]);
    assert_eq!(run.output, run.input);
    drop((gpu, event));
    run.end();
}

#[test]
fn a_missing_function_is_an_error_with_its_name() {
    for vendor in [Vendor::Cuda, Vendor::Hip] {
        for name in functions(vendor).concat() {
            let standin = Standin::without(name);
            let mut run = RoundTrip::new(&standin, vendor);
            let error = run.all().unwrap_err();
            let wanted = format!("lacks the function {name}; install a version that torch supports; {REMEDY}");
            assert!(error.kind == ErrorKind::Device && error.message.ends_with(&wanted), "{name}: {error}");
            run.end();
        }
    }
}

#[test]
fn a_missing_library_is_an_error_with_its_name() {
    let standin = Standin::new();
    let nowhere = Libraries { driver: vec!["libaccl-none.so".into()], ..libraries(&standin) };
    let error = Gpu::open_apart(Vendor::Cuda, 0, nowhere).unwrap_err();
    assert!(error.message.starts_with("cannot open CUDA's driver: tried libaccl-none.so ("), "{error}");
    assert!(error.message.ends_with(REMEDY), "{error}");
    let nowhere = Libraries { compiler: vec!["libaccl-none.so".into()], ..libraries(&standin) };
    let gpu = Gpu::open_apart(Vendor::Cuda, 0, nowhere).unwrap();
    let error = gpu.load(NAMES, SOURCE, OPTIONS).unwrap_err();
    assert!(error.message.starts_with("cannot open CUDA's compiler: tried libaccl-none.so ("), "{error}");
    assert!(error.message.ends_with(REMEDY), "{error}");
    let error = Gpu::open_apart(Vendor::Cuda, 7, libraries(&standin)).unwrap_err();
    let wanted = "cuda:7: cuDeviceGet failed with CUDA_ERROR_INVALID_DEVICE (101): invalid device ordinal; ";
    assert!(error.message.starts_with(wanted), "{error}");
}

#[test]
fn candidates_are_tried_in_turn_and_the_first_error_of_an_open_one_is_reported() {
    let (standin, lacking) = (Standin::new(), Standin::without("cuInit"));
    let nowhere = std::path::PathBuf::from("libaccl-none.so");
    let order = vec![nowhere.clone(), lacking.path().to_owned(), standin.path().to_owned()];
    let all = Libraries { driver: order.clone(), compiler: vec![nowhere.clone(), standin.path().to_owned()] };
    let gpu = Gpu::open_apart(Vendor::Cuda, 0, all).unwrap();
    gpu.load(NAMES, SOURCE, OPTIONS).unwrap();
    let some = Libraries { driver: order[..2].to_vec(), compiler: Vec::new() };
    let error = Gpu::open_apart(Vendor::Cuda, 0, some).unwrap_err();
    assert!(error.message.contains("lacks the function cuInit"), "{error}");
}

/// Functions whose failure is not reported, because nothing can be done about it or another error matters more.
const SILENT: &[&str] = &["cuDevicePrimaryCtxRelease_v2", "cuModuleUnload", "cuEventDestroy_v2", "nvrtcDestroyProgram"];

#[test]
fn a_failing_function_is_an_error_with_its_words_and_leaves_nothing_behind() {
    for order in [Order::Early, Order::Late] {
        let standin = Standin::new();
        let [of_driver, of_compiler] = functions(Vendor::Cuda);
        for name in of_driver.iter().chain(&of_compiler) {
            let mut failures = 0;
            loop {
                standin.order(order, 0);
                standin.fail(name, failures, FAILURE);
                let mut run = RoundTrip::new(&standin, Vendor::Cuda);
                let result = run.all().map(<[f32]>::to_vec);
                let has_failed = !standin.failed().is_empty();
                match result {
                    Err(error) => {
                        let words = match of_driver.contains(name) {
                            true => "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory",
                            false => "NVRTC_ERROR_PROGRAM_CREATION_FAILURE (2)",
                        };
                        let wanted = format!("{name} failed with {words}");
                        assert!(has_failed && error.message.contains(&wanted), "{name}, call {failures}: {error}");
                        assert_eq!(error.kind, ErrorKind::Device);
                    }
                    // A context that cannot be restored, or entered for a release, does not spoil the result.
                    Ok(_) => assert!(!has_failed || SILENT.contains(name) || name.starts_with("cuCtx"), "{name}"),
                }
                run.end();
                if !has_failed {
                    break;
                }
                failures += 1;
            }
            let is_only_for_words = name.starts_with("cuGetError") || *name == "nvrtcGetErrorString";
            assert!(failures > 0 || is_only_for_words || SILENT.contains(name), "{name} is called");
            standin.set_current(None);
            let mut run = RoundTrip::new(&standin, Vendor::Cuda);
            run.check();
            run.end();
        }
    }
}

#[test]
fn an_error_without_words_has_its_number() {
    for (first, wanted) in [
        ("cuGetErrorName", "cuDeviceGet failed with an unknown error (101): invalid device ordinal"),
        ("cuGetErrorString", "cuDeviceGet failed with CUDA_ERROR_INVALID_DEVICE (101);"),
    ] {
        let standin = Standin::new();
        standin.fail(first, 0, FAILURE);
        let error = Gpu::open_apart(Vendor::Cuda, 7, libraries(&standin)).unwrap_err();
        assert!(error.message.contains(wanted), "{error}");
    }
    let standin = Standin::new();
    let gpu = Gpu::open_apart(Vendor::Cuda, 0, libraries(&standin)).unwrap();
    standin.fail("nvrtcGetErrorString", 0, FAILURE);
    let error = gpu.load(NAMES, "wrong", &[]).unwrap_err();
    assert!(error.message.contains("nvrtcCompileProgram failed with unknown error (6) for sm_90: "), "{error}");
}

#[test]
fn functions_that_fail_or_are_missing_at_random_leave_nothing_behind() {
    let mut failed = 0;
    for seed in 0..300_u64 {
        let names = functions(Vendor::Cuda).concat();
        let missing = (seed % 8 == 7).then(|| names[seed as usize / 8 % names.len()]);
        let standin = missing.map_or_else(Standin::new, Standin::without);
        standin.order(Order::Random, seed);
        standin.draw(seed, 10_000, FAILURE);
        let mut run = RoundTrip::new(&standin, Vendor::Cuda);
        match run.all().map(<[f32]>::to_vec) {
            Ok(output) => assert!(missing.is_none() && output[0] == -3.75, "seed {seed}"),
            Err(error) => {
                failed += 1;
                let name = names.iter().any(|name| error.message.contains(name));
                let is_asked_for = missing.is_some() || !standin.failed().is_empty();
                assert!(name && is_asked_for && error.kind == ErrorKind::Device, "seed {seed}: {error}");
            }
        }
        run.end();
        if missing.is_none() {
            standin.set_current(None);
            let mut run = RoundTrip::new(&standin, Vendor::Cuda);
            run.check();
            run.end();
        }
    }
    assert!((100..280).contains(&failed), "{failed} of 300 runs failed");
}

#[test]
fn a_call_restores_the_context_that_was_current() {
    let standin = Standin::new();
    for device in [None, Some(1), Some(0)] {
        standin.set_current(device);
        let before = standin.current();
        let mut run = RoundTrip::new(&standin, Vendor::Cuda);
        run.check();
        assert_eq!(standin.current(), before);
        // Another thread has no context.
        std::thread::scope(|scope| {
            let call = || (standin.current(), run.keeps[0].0.event().is_ok(), standin.current());
            assert_eq!(scope.spawn(call).join().unwrap(), (0, true, 0));
        });
        drop(run);
    }
}

#[test]
fn a_source_is_compiled_once_for_each_device() {
    let standin = Standin::new();
    let gpus = [0, 1].map(|ordinal| Gpu::open_apart(Vendor::Cuda, ordinal, libraries(&standin)).unwrap());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| gpus[0].load(NAMES, SOURCE, OPTIONS).unwrap());
        }
    });
    let counts = standin.counts();
    assert_eq!((counts.compiles, counts.loads, counts.modules), (1, 1, 1));
    for (gpu, options) in [(&gpus[0], &["-DFACTOR=3.0f"]), (&gpus[1], &["-DFACTOR=2.0f"])] {
        gpu.load(NAMES, SOURCE, options).unwrap();
    }
    gpus[0].load(&["scale"], SOURCE, OPTIONS).unwrap();
    let counts = standin.counts();
    assert_eq!((counts.compiles, counts.loads, counts.modules, counts.contexts), (4, 4, 4, 2));
    drop(gpus);
    assert!(standin.counts().is_empty());
}

#[test]
fn a_driver_or_a_device_that_does_not_fit_the_compiler_is_named() {
    let refusal = |driver, major, minor| {
        let standin = Standin::new();
        standin.version(driver, major, minor);
        let gpu = Gpu::open_apart(Vendor::Cuda, 0, libraries(&standin)).unwrap();
        gpu.load(NAMES, SOURCE, OPTIONS).map(|_| ()).map_err(|error| error.message)
    };
    // The device runs code for an older minor version, and the driver is newer than the compiler.
    assert_eq!([refusal(13020, 9, 3), refusal(13000, 8, 9), refusal(14000, 12, 1)], [Ok(()), Ok(()), Ok(())]);
    let error = refusal(12090, 9, 0).unwrap_err();
    assert!(
        error.contains("it loads code for CUDA 12, and the compiler makes code for CUDA 13.2; update the driver"),
        "{error}"
    );
    let error = refusal(13020, 7, 0).unwrap_err();
    assert!(error.contains("makes no code for a device of compute capability 7.0, only for 7.5, 8.0, 9.0"), "{error}");
    assert!(error.ends_with(REMEDY), "{error}");
}

#[test]
fn code_that_the_driver_refuses_is_an_error_with_both_versions() {
    let standin = Standin::new();
    standin.fail("cuModuleLoadData", 0, 200);
    let gpu = Gpu::open_apart(Vendor::Cuda, 0, libraries(&standin)).unwrap();
    let error = gpu.load(NAMES, SOURCE, OPTIONS).unwrap_err();
    let path = standin.path().display();
    let wanted = format!(
        "cuda:0: cuModuleLoadData failed with CUDA_ERROR_INVALID_IMAGE (200): device kernel image is invalid; {path} (CUDA \
         13.2) made the code for sm_90, and the driver is {path}; {REMEDY}"
    );
    assert_eq!(error.message, wanted);
}

#[test]
fn a_source_that_is_wrong_is_an_error_with_the_compilers_log() {
    let standin = Standin::new();
    let gpu = Gpu::open_apart(Vendor::Cuda, 0, libraries(&standin)).unwrap();
    let error = gpu.load(&["scale"], &SOURCE.replace("args.factor", "args.nothing"), OPTIONS).unwrap_err();
    assert!(
        error.message.contains("nvrtcCompileProgram failed with NVRTC_ERROR_COMPILATION (6) for sm_90: "),
        "{error}"
    );
    assert!(error.message.contains("torch-accl.cu:5") && error.message.contains("nothing"), "{error}");
    let error = gpu.load(&["no\0name"], SOURCE, OPTIONS).unwrap_err();
    assert_eq!(error.kind, ErrorKind::InvalidArgument);
    drop(gpu);
    assert!(standin.counts().is_empty());
}

#[test]
fn a_launch_checks_its_sizes_and_a_kernel_that_fails_breaks_the_device() {
    let standin = Standin::new();
    let mut run = RoundTrip::new(&standin, Vendor::Cuda);
    let gpu = run.gpu().unwrap();
    let module = gpu.load(NAMES, SOURCE, OPTIONS).unwrap();
    let (stream, [from, to], [input, _]) = run.memory();
    let args = Args { from: from.address(), to: to.address(), count: 0, factor: 1.0 };
    // SAFETY: no launch is accepted.
    let launch = |name, grid| unsafe { module.launch(name, grid, &[Argument::of(&args)], stream) };
    let error = launch("none", Grid::line(1, 64)).unwrap_err();
    assert_eq!((error.kind, error.message.as_str()), (ErrorKind::Internal, "cuda:0: no kernel none is loaded"));
    let error = launch("scale", Grid { blocks: [1; 3], threads: [1024, 2, 1], shared_bytes: 0 }).unwrap_err();
    assert_eq!(error.message, "cuda:0: expected at most 1024 threads in a block of scale, got 2048");
    let calls = standin.counts().calls;
    launch("wild", Grid::line(0, 64)).unwrap();
    assert_eq!(standin.counts().calls, calls, "a grid without blocks is not launched");
    let error = launch("scale", Grid::line(1, 0)).unwrap_err();
    assert!(error.message.ends_with("(1): invalid argument in the launch of scale"), "{error}");
    assert!(
        gpu.copy_to_device(from.part(0, 4).unwrap(), input, stream)
            .unwrap_err()
            .message
            .contains("4 bytes on the device")
    );
    let event = gpu.event().unwrap();
    launch("wild", Grid::line(1, 64)).unwrap();
    let error = event.has_come().unwrap_err();
    assert_eq!(
        error.message,
        "cuda:0: cuEventQuery failed with CUDA_ERROR_LAUNCH_FAILED (719): unspecified launch failure"
    );
    assert!(launch("scale", Grid::line(1, 64)).is_err() && gpu.event().is_err());
}

#[test]
fn a_module_that_ends_before_its_launches_breaks_the_device() {
    let standin = Standin::new();
    standin.order(Order::Late, 0);
    let mut run = RoundTrip::new(&standin, Vendor::Cuda);
    let (stream, [from, to], _) = run.memory();
    let gpu = run.gpu().unwrap();
    let event = gpu.event().unwrap();
    run.keeps.clear();
    let module = gpu.load(NAMES, SOURCE, OPTIONS).unwrap();
    let args = Args { from: from.address(), to: to.address(), count: 0, factor: 1.0 };
    // SAFETY: the kernel accesses the stand-in's memory alone, which is never freed.
    unsafe { module.launch("scale", Grid::line(1, 64), &[Argument::of(&args)], stream) }.unwrap();
    event.record(stream).unwrap();
    // The event keeps the context, and nothing keeps the module.
    drop((gpu, module));
    assert!(event.has_come().unwrap_err().message.contains("CUDA_ERROR_LAUNCH_FAILED"));
}

#[test]
fn parts_of_memory_are_inside_of_it() {
    // SAFETY: the memory is not used.
    let (device, host) = unsafe { (DeviceMemory::new(4096, 100), HostMemory::new(std::ptr::dangling_mut(), 100)) };
    let part = device.part(60, 40).unwrap();
    assert_eq!((part.address(), part.len_bytes()), (4156, 40));
    assert_eq!(host.part(60, 40).unwrap().len_bytes(), 40);
    for (offset, bytes) in [(61, 40), (101, 0), (u64::MAX, 2)] {
        assert_eq!(device.part(offset, bytes).unwrap_err().kind, ErrorKind::InvalidArgument);
        assert_eq!(host.part(offset, bytes).unwrap_err().kind, ErrorKind::InvalidArgument);
    }
}

#[test]
fn a_machine_without_a_driver_is_an_error_with_its_name() {
    match Gpu::open(Vendor::Cuda, 0) {
        Ok(gpu) => println!("skipped: this machine has a GPU, {}", gpu.title().unwrap()),
        Err(error) => {
            let is_named = error.message.starts_with("cannot open CUDA's driver: tried libcuda.so.1 (");
            assert!(is_named || error.message.starts_with("cuInit failed with "), "{error}");
            assert!(error.message.ends_with("; the CPU's codecs are used"), "{error}");
        }
    }
}
