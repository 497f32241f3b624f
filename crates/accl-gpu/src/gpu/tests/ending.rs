//! The driver after a process has begun to exit, and in a forked child.

use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use accl_gpu_standin::Standin;

use super::*;

/// The GPU of a process that exits or forks, and its stand-in.
static LAST: OnceLock<(Standin, Gpu)> = OnceLock::new();
/// Exit codes that report success, and failure.
const GOOD: i32 = 42;
const BAD: i32 = 43;

/// Returns the exit code: whether the driver is not called, and the error says why.
fn is_refused(why: &str) -> i32 {
    let (standin, gpu) = LAST.get().expect("the process has opened a GPU");
    let calls = standin.counts().calls;
    // A source that is not loaded yet would be compiled.
    let load = gpu.load(NAMES, SOURCE, &["-DOTHER=1"]).map(|_| ());
    let allocated = gpu.allocate(64).map(|_| ());
    let errors = [gpu.event().map(|_| ()), load, allocated, Gpu::open(Vendor::Cuda, 0).map(|_| ())];
    let is_refusal = |error: accl_types::Result<()>| error.is_err_and(|error| error.message.contains(why));
    let is_good = errors.into_iter().all(is_refusal) && standin.counts().calls == calls;
    if is_good { GOOD } else { BAD }
}

/// Whether the forked child has reported success. The exit code of a failed test is lost in `at_exit`.
static FORKED_WELL: AtomicBool = AtomicBool::new(false);

extern "C" fn at_exit() {
    let forked_well = FORKED_WELL.load(Ordering::Relaxed);
    let code = if forked_well { is_refused("because the process exits") } else { BAD };
    // SAFETY: the function ends the process.
    unsafe { libc::_exit(code) };
}

#[test]
fn a_process_that_exits_or_was_forked_does_not_call_the_driver() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "gpu::tests::ending::the_end_of_a_process_of_its_own",
            "--ignored",
            "--nocapture",
            "--test-threads=1",
        ])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(GOOD), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
#[ignore = "another test starts it in a process of its own"]
fn the_end_of_a_process_of_its_own() {
    // SAFETY: the function may run at any time of the exit. It was registered before the GPU is opened, so it runs later than
    // functions that the GPU registers.
    assert_eq!(unsafe { libc::atexit(at_exit) }, 0);
    let standin = Standin::new();
    let gpu = Gpu::open_apart(Vendor::Cuda, 0, libraries(&standin)).unwrap();
    assert!(gpu.event().is_ok());
    assert!(LAST.set((standin, gpu)).is_ok());
    // SAFETY: the child only calls the driver, and ends itself.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let code = is_refused("does not work in a forked process");
        // SAFETY: the function ends the child.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: `status` may be written to.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    FORKED_WELL.store(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == GOOD, Ordering::Relaxed);
}
