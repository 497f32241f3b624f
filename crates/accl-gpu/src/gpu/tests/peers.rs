//! Device memory that processes share. The second process is this test's program with the name of another test.

use std::process::{Command, Output};

use accl_gpu_standin::{Order, Standin};

use super::*;

/// Bytes of the memory that is shared: some pages and a part of one.
const BYTES: u64 = 3 * 4096 + 100;
/// Variable with the handle that the second process imports, as hexadecimal digits, and the order of its streams.
const HANDLE: &str = "ACCL_TEST_IPC_HANDLE";
/// Line that the second process prints if the system lets it import the memory.
const GOOD: &str = "the second process has imported the memory";

fn content(salt: u64) -> Vec<u8> {
    (0..BYTES).map(|index| (index * 7 + salt * 31 + index / 256) as u8).collect()
}

fn open(standin: &Standin, vendor: Vendor) -> Gpu {
    Gpu::open_apart(vendor, 0, libraries(standin)).unwrap()
}

/// Starts the second process with a handle.
fn second(handle: &str, order: &str, ipc: &str) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "gpu::tests::peers::the_second_process", "--ignored", "--nocapture", "--test-threads=1"])
        .env(HANDLE, format!("{order} {handle}"))
        .env("ACCL_GPU_STANDIN_IPC", ipc)
        .output()
        .unwrap()
}

fn hexadecimal(handle: IpcHandle) -> String {
    handle.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn another_process_copies_from_and_to_an_allocation() {
    for vendor in [Vendor::Cuda, Vendor::Hip] {
        for order in ["early", "late"] {
            let standin = Standin::new();
            let gpu = open(&standin, vendor);
            let window = gpu.allocate(BYTES).unwrap();
            assert_eq!((window.len_bytes(), window.address() % 256), (BYTES, 0));
            standin.poke(window.address(), &content(1));
            let handle = window.export().unwrap();
            assert_eq!(window.export().unwrap(), handle, "a handle stays");
            assert_eq!(IpcHandle::from_bytes(handle.to_bytes()), handle);
            let output = second(&hexadecimal(handle), order, "");
            let said = String::from_utf8_lossy(&output.stdout);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && said.contains(GOOD), "{said}\n{errors}");
            let mut found = vec![0; BYTES as usize];
            standin.peek(window.address(), &mut found);
            assert!(found == content(2), "the second process has written to the allocation");
            assert_eq!(standin.counts().allocations, 1);
            drop((window, gpu));
            assert!(standin.counts().is_empty());
            // The file of the allocation is closed.
            let output = second(&hexadecimal(handle), order, "");
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(said.contains("CUDA_ERROR_INVALID_VALUE (1)"), "{said}");
        }
    }
}

#[test]
#[ignore = "another test starts it with a handle"]
fn the_second_process() {
    #[expect(clippy::disallowed_methods, reason = "no setting, but an argument of a test")]
    let argument = std::env::var(HANDLE).unwrap();
    let (order, digits) = argument.split_once(' ').unwrap();
    let bytes = (0..64).map(|at| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).unwrap());
    let handle = IpcHandle::from_bytes(bytes.collect::<Vec<_>>().try_into().unwrap());
    let standin = Standin::new();
    standin.order(if order == "late" { Order::Late } else { Order::Early }, 0);
    let gpu = open(&standin, Vendor::Cuda);
    // SAFETY: the first process keeps the allocation until this process has ended.
    let import = || unsafe { gpu.import(handle, BYTES) };
    let imported = match import() {
        Ok(imported) => imported,
        Err(error) => return println!("{}", error.message),
    };
    assert_eq!(imported.len_bytes(), BYTES);
    // The driver counts imports of the same memory.
    let again = import().unwrap();
    assert_eq!((again.address(), standin.counts().imports), (imported.address(), 2));
    drop(again);
    let mine = gpu.allocate(BYTES).unwrap();
    if let Err(error) = mine.export() {
        return println!("{}", error.message);
    }
    // SAFETY: the stand-in's streams are never destroyed. The memory lives until the event has come, and the first process
    // waits for this one.
    let (theirs, own, stream) = unsafe { (imported.memory(), mine.memory(), Stream::new(standin.stream(0))) };
    gpu.copy(own, theirs, stream).unwrap();
    let event = gpu.event().unwrap();
    event.record(stream).unwrap();
    while !event.has_come().unwrap() {}
    let mut found = vec![0; BYTES as usize];
    standin.peek(mine.address(), &mut found);
    assert!(found == content(1), "the content is the content of the first process");
    standin.poke(mine.address(), &content(2));
    let half = BYTES / 2;
    for (offset, bytes) in [(half, BYTES - half), (0, half)] {
        gpu.copy(theirs.part(offset, bytes).unwrap(), own.part(offset, bytes).unwrap(), stream).unwrap();
    }
    event.record(stream).unwrap();
    while !event.has_come().unwrap() {}
    // A kernel reads memory of the other process, and writes to it.
    kernel_on(&standin, &gpu, imported.address());
    assert_eq!(standin.counts().copies, 3);
    drop((imported, mine, event, gpu));
    assert!(standin.counts().is_empty(), "{:?}", standin.counts());
    println!("{GOOD}");
}

/// Lets a kernel multiply memory by 1: its elements are read, and written.
fn kernel_on(standin: &Standin, gpu: &Gpu, address: u64) {
    let module = gpu.load(&["scale"], SOURCE, &["-DFACTOR=1.0f"]).unwrap();
    // SAFETY: the stand-in's streams are never destroyed.
    let stream = unsafe { Stream::new(standin.stream(0)) };
    let args = Args { from: address, to: address, count: 64, factor: 1.0 };
    // SAFETY: the kernel accesses 256 bytes at the address, which stay until the event has come.
    unsafe { module.launch("scale", Grid::line(1, 64), &[Argument::of(&args)], stream) }.unwrap();
    let event = gpu.event().unwrap();
    event.record(stream).unwrap();
    while !event.has_come().unwrap() {}
}

#[test]
fn a_system_that_shares_no_memory_is_an_error_with_the_drivers_words() {
    let standin = Standin::new();
    let gpu = open(&standin, Vendor::Cuda);
    let window = gpu.allocate(BYTES).unwrap();
    standin.poke(window.address(), &content(1));
    let handle = window.export().unwrap();
    let said = |ipc| String::from_utf8_lossy(&second(&hexadecimal(handle), "early", ipc).stdout).into_owned();
    let words =
        "cuda:0: cuIpcOpenMemHandle_v2 failed with CUDA_ERROR_PEER_ACCESS_UNSUPPORTED (217): peer access is not";
    assert!(said("import").contains(words));
    let words = "cuda:0: cuIpcGetMemHandle failed with CUDA_ERROR_NOT_SUPPORTED (801): operation not supported";
    assert!(said("none").contains(words), "exports fail, and imports do not");
    // SAFETY: the memory is not imported.
    let error = unsafe { gpu.import(handle, BYTES) }.unwrap_err();
    let words = "cuda:0: cuIpcOpenMemHandle_v2 failed with CUDA_ERROR_INVALID_CONTEXT (201): invalid device context";
    assert_eq!(
        (error.kind, error.message.as_str()),
        (ErrorKind::Device, words),
        "a process cannot import its own memory"
    );
    // SAFETY: the memory is not imported.
    let error = unsafe { gpu.import(IpcHandle::from_bytes([0; 64]), BYTES) }.unwrap_err();
    assert!(error.message.contains("cuIpcOpenMemHandle_v2 failed with CUDA_ERROR_INVALID_VALUE (1)"), "{error}");
}

#[test]
fn a_device_without_memory_is_exhausted() {
    let standin = Standin::new();
    let gpu = open(&standin, Vendor::Cuda);
    standin.memory_limit(10_000);
    let first = gpu.allocate(6000).unwrap();
    let error = gpu.allocate(6000).unwrap_err();
    let words = "cuda:0: cuMemAlloc_v2 failed with CUDA_ERROR_OUT_OF_MEMORY (2): out of memory for 6000 bytes";
    assert_eq!((error.kind, error.message.as_str()), (ErrorKind::Exhausted, words));
    drop(first);
    let second = gpu.allocate(10_000).unwrap();
    standin.memory_limit(0);
    assert_eq!(gpu.allocate(u64::MAX).unwrap_err().kind, ErrorKind::Exhausted);
    assert_eq!(gpu.allocate(0).unwrap_err().kind, ErrorKind::Device);
    drop((second, gpu));
    assert!(standin.counts().is_empty());
}

/// One use of the functions for shared memory in one process: two allocations, a handle and a copy. The allocations are left
/// in `keeps`.
fn own_round_trip(standin: &Standin, gpu: &Gpu, keeps: &mut Vec<Allocation>) -> Result<()> {
    for _ in 0..2 {
        keeps.push(gpu.allocate(BYTES)?);
    }
    let [from, to] = [&keeps[0], &keeps[1]];
    from.export()?;
    standin.poke(from.address(), &content(3));
    // SAFETY: the stand-in's streams are never destroyed, and the streams finish before the allocations are dropped.
    let (source, target, stream) = unsafe { (from.memory(), to.memory(), Stream::new(standin.stream(0))) };
    let copied = gpu.copy(target, source, stream);
    standin.order(Order::Early, 0);
    copied?;
    let mut found = vec![0; BYTES as usize];
    standin.peek(to.address(), &mut found);
    assert!(found == content(3));
    Ok(())
}

#[test]
fn a_missing_function_for_shared_memory_is_named_at_its_first_use_and_kernels_do_not_need_it() {
    for vendor in [Vendor::Cuda, Vendor::Hip] {
        for (cuda, hip, ..) in driver::PEER_SYMBOLS {
            let name = if vendor == Vendor::Cuda { cuda } else { hip };
            let standin = Standin::without(name);
            let mut run = RoundTrip::new(&standin, vendor);
            run.check();
            let gpu = run.gpu().unwrap();
            let wanted = format!("lacks the function {name}; install a version that torch supports");
            // SAFETY: the memory and the stream are not used.
            let (memory, stream) = unsafe { (DeviceMemory::new(4096, 8), Stream::new(0)) };
            // SAFETY: nothing is imported.
            let imported = unsafe { gpu.import(IpcHandle::from_bytes([0; 64]), 8) }.map(|_| ());
            for result in [gpu.allocate(8).map(|_| ()), imported, gpu.copy(memory, memory, stream)] {
                let error = result.unwrap_err();
                assert!(error.kind == ErrorKind::Device && error.message.ends_with(&wanted), "{name}: {error}");
            }
            drop(gpu);
            run.end();
        }
    }
}

#[test]
fn functions_for_shared_memory_that_fail_at_random_leave_nothing_behind() {
    let mut failed = 0;
    for seed in 0..200_u64 {
        let standin = Standin::new();
        let gpu = open(&standin, Vendor::Cuda);
        standin.order(Order::Random, seed);
        standin.draw(seed, 40_000, 719);
        let mut keeps = Vec::new();
        let result = own_round_trip(&standin, &gpu, &mut keeps);
        let name = standin.failed();
        // Memory can be freed only if its context can be entered.
        standin.draw(0, 0, 0);
        drop(keeps);
        if let Err(error) = result {
            failed += 1;
            assert!(error.kind == ErrorKind::Device, "seed {seed}: {error}");
            assert!(
                error.message.contains(" failed with ") && error.message.contains("(719)"),
                "seed {seed}, {name}: {error}"
            );
        }
        let counts = standin.counts();
        assert_eq!((counts.allocations, counts.imports, counts.tasks), (0, 0, 0), "seed {seed}");
        standin.set_current(None);
        own_round_trip(&standin, &gpu, &mut Vec::new()).unwrap();
        drop(gpu);
        assert_eq!(standin.counts().allocations, 0);
    }
    assert!((40..190).contains(&failed), "{failed} of 200 runs failed");
}

#[test]
fn a_copy_checks_its_lengths_and_that_nothing_overlaps() {
    let standin = Standin::new();
    let gpu = open(&standin, Vendor::Cuda);
    let window = gpu.allocate(BYTES).unwrap();
    // SAFETY: the stand-in's streams are never destroyed, and run at once.
    let (memory, stream) = unsafe { (window.memory(), Stream::new(standin.stream(0))) };
    let part = |offset, bytes| memory.part(offset, bytes).unwrap();
    for (to, from, words) in [
        (part(0, 8), part(8, 9), "a copy has 9 bytes at its source, and 8 at its target"),
        (part(0, 100), part(99, 100), "a copy of 100 bytes overlaps: its source and its target are 99 bytes apart"),
        (part(5, 1), part(5, 1), "a copy of 1 bytes overlaps: its source and its target are 0 bytes apart"),
    ] {
        let error = gpu.copy(to, from, stream).unwrap_err();
        assert_eq!((error.kind, error.message.as_str()), (ErrorKind::InvalidArgument, words));
    }
    gpu.copy(part(0, 100), part(100, 100), stream).unwrap();
    assert_eq!(standin.counts().copies, 1);
}

#[test]
fn tasks_of_several_threads_and_new_allocations_have_access() {
    let standin = Standin::new();
    let gpus: Vec<Gpu> = (0..4).map(|_| open(&standin, Vendor::Cuda)).collect();
    std::thread::scope(|scope| {
        for gpu in &gpus {
            scope.spawn(|| (0..50).for_each(|_| own_round_trip(&standin, gpu, &mut Vec::new()).unwrap()));
        }
    });
    assert_eq!((standin.counts().allocations, standin.counts().copies), (0, 200));
}
