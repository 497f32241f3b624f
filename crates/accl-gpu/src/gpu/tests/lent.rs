//! Streams and memory that another stand-in lends to the driver's one.

use std::ffi::c_void;

use accl_gpu_standin::{Host, Standin, Work};

use super::*;

/// Streams and memory that are lent, and how often tasks were given access.
#[derive(Default)]
struct Lender {
    memory: Vec<u64>,
    tasks: Vec<(i32, usize, Work, usize)>,
    advances: usize,
    access: Vec<(i32, i32)>,
}

/// Returns the lender of a call.
fn lender<'a>(own: *mut c_void) -> &'a Mutex<Lender> {
    // SAFETY: the test lends a lender that lives as long as the stand-in is used.
    unsafe { &*own.cast::<Mutex<Lender>>() }
}

extern "C" fn enqueue(own: *mut c_void, device: i32, stream: *mut c_void, work: Work, data: *mut c_void) {
    lender(own).lock().tasks.push((device, stream as usize, work, data as usize));
}

extern "C" fn advance(own: *mut c_void, _: i32, _: *mut c_void) {
    lender(own).lock().advances += 1;
}

extern "C" fn access(own: *mut c_void, device: i32, on: i32) {
    lender(own).lock().access.push((device, on));
}

extern "C" fn memory(own: *mut c_void, _: i32, index: i32, begin: *mut u64, end: *mut u64) -> i32 {
    let range = lender(own).lock().memory.as_ptr_range();
    // SAFETY: the stand-in passes two numbers that may be written to.
    unsafe { (*begin, *end) = (range.start as u64, range.end as u64) };
    i32::from(index == 0)
}

#[test]
fn the_stand_in_uses_streams_and_memory_that_are_lent() {
    let standin = Standin::new();
    let lent = Mutex::new(Lender { memory: vec![0; COUNT], ..Lender::default() });
    standin.lend(&Host { own: (&raw const lent).cast_mut().cast(), enqueue, advance, access, memory });
    let gpu = Gpu::open_apart(Vendor::Cuda, 1, libraries(&standin)).unwrap();
    let module = gpu.load(NAMES, SOURCE, OPTIONS).unwrap();
    let (input, mut output) = (vec![3.0_f32; COUNT], vec![0.0_f32; COUNT]);
    let bytes = 4 * COUNT as u64;
    let begin = lent.lock().memory.as_ptr() as u64;
    // SAFETY: the lent memory has twice as many bytes, and the vectors live until the tasks have run below. The lender takes
    // every stream.
    let (device, from, to, stream) = unsafe {
        let host = |address: *const f32| HostMemory::new(address.cast_mut().cast(), bytes);
        (DeviceMemory::new(begin, 2 * bytes), host(input.as_ptr()), host(output.as_mut_ptr()), Stream::new(5))
    };
    let [first, second] = [device.part(0, bytes).unwrap(), device.part(bytes, bytes).unwrap()];
    gpu.copy_to_device(first, from, stream).unwrap();
    let args = Args { from: first.address(), to: second.address(), count: COUNT as u32, factor: 1.0 };
    // SAFETY: the kernel accesses the lent memory alone, which lives until the tasks have run.
    unsafe { module.launch("scale", Grid::line(4, 64), &[Argument::of(&args)], stream) }.unwrap();
    gpu.copy_to_host(to, second, stream).unwrap();
    let event = gpu.event().unwrap();
    event.record(stream).unwrap();
    assert!(!event.has_come().unwrap());
    let tasks = std::mem::take(&mut lent.lock().tasks);
    assert_eq!(tasks.iter().map(|task| (task.0, task.1)).collect::<Vec<_>>(), [(1, 5); 4]);
    assert_eq!(lent.lock().advances, 1);
    assert!(lent.lock().access.is_empty(), "no task has run");
    for (_, _, work, data) in tasks {
        work(data as *mut c_void);
    }
    assert_eq!(lent.lock().access, [(1, 1), (1, 0)].repeat(4));
    assert!(event.has_come().unwrap() && output == vec![6.0; COUNT]);
}

#[test]
fn lent_streams_copy_between_lent_memory_and_allocations() {
    let standin = Standin::new();
    let lent = Mutex::new(Lender { memory: vec![7; COUNT], ..Lender::default() });
    standin.lend(&Host { own: (&raw const lent).cast_mut().cast(), enqueue, advance, access, memory });
    let gpu = Gpu::open_apart(Vendor::Cuda, 0, libraries(&standin)).unwrap();
    let window = gpu.allocate(8 * COUNT as u64).unwrap();
    let begin = lent.lock().memory.as_ptr() as u64;
    // SAFETY: the lent memory has as many bytes as the allocation, and both live until the tasks have run below. The lender
    // takes every stream.
    let (from, to, stream) = unsafe { (DeviceMemory::new(begin, window.len_bytes()), window.memory(), Stream::new(5)) };
    gpu.copy(to, from, stream).unwrap();
    let module = gpu.load(NAMES, SOURCE, OPTIONS).unwrap();
    let args = Args { from: window.address(), to: window.address(), count: 1, factor: 0.0 };
    // SAFETY: the kernel accesses the allocation alone, which lives until the tasks have run.
    unsafe { module.launch("scale", Grid::line(1, 64), &[Argument::of(&args)], stream) }.unwrap();
    // A later allocation does not disturb tasks that other threads run.
    let later = gpu.allocate(1).unwrap();
    let tasks = std::mem::take(&mut lent.lock().tasks);
    std::thread::scope(|scope| {
        for (_, _, work, data) in tasks {
            scope.spawn(move || work(data as *mut c_void)).join().unwrap();
        }
    });
    let mut found = vec![0; 8 * COUNT];
    standin.peek(window.address(), &mut found);
    let wanted: Vec<u8> = std::iter::once(0).chain(vec![7; COUNT - 1]).flat_map(u64::to_ne_bytes).collect();
    assert!(found[4..] == wanted[4..] && found[..4] == [0; 4], "{found:?}");
    drop((window, later, module, gpu));
    assert!(standin.counts().is_empty());
}

#[test]
fn tasks_that_run_at_the_same_time_have_access_to_allocations() {
    let standin = Standin::new();
    let lent = Mutex::new(Lender { memory: vec![9; COUNT], ..Lender::default() });
    standin.lend(&Host { own: (&raw const lent).cast_mut().cast(), enqueue, advance, access, memory });
    let gpu = Gpu::open_apart(Vendor::Cuda, 0, libraries(&standin)).unwrap();
    let begin = lent.lock().memory.as_ptr() as u64;
    for _ in 0..20 {
        let windows: Vec<_> = (0..8).map(|_| gpu.allocate(8 * COUNT as u64).unwrap()).collect();
        for window in &windows {
            // SAFETY: the lent memory has as many bytes as the allocation, and both live until the tasks have run below. The
            // lender takes every stream.
            let (from, to, stream) =
                unsafe { (DeviceMemory::new(begin, window.len_bytes()), window.memory(), Stream::new(5)) };
            gpu.copy(to, from, stream).unwrap();
        }
        let tasks = std::mem::take(&mut lent.lock().tasks);
        std::thread::scope(|scope| {
            for (_, _, work, data) in tasks {
                scope.spawn(move || work(data as *mut c_void));
            }
            for _ in 0..8 {
                gpu.allocate(4096).unwrap();
            }
        });
        for window in &windows {
            let mut found = vec![0; 8 * COUNT];
            standin.peek(window.address(), &mut found);
            assert!(found.chunks(8).all(|bytes| bytes == 9_u64.to_ne_bytes()), "{found:?}");
        }
    }
    assert_eq!(standin.counts().allocations, 0);
}
