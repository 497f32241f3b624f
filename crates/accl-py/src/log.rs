//! Printing of the engine's events on standard error, by `ACCL_LOG`.
//!
//! If a line cannot be written, because the disk is full or the reader of a pipe is gone, only the line is lost. A
//! process that began without standard error prints nothing, because the descriptor may since belong to another file.
//!
//! The thread that makes progress reports errors before it continues. Such a line is also lost if the reader does not
//! take it in time.
//!
//! Installed with the process's first engine, never at import. For commands that work without an engine it is installed
//! while they run. The engine itself prints nothing.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use accl_types::config::LogLevel;
use pyo3::prelude::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing::{Level, Metadata, Subscriber};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::MakeWriter;

static LACKS_STDERR: AtomicBool = AtomicBool::new(false);

/// Maximum wait for room for a line about an error.
const PATIENCE: Duration = Duration::from_millis(50);

/// Records whether Python began without standard error.
///
/// # Errors
/// If the interpreter has no module `sys`.
pub(crate) fn find_stderr(py: Python<'_>) -> PyResult<()> {
    LACKS_STDERR.store(py.import("sys")?.getattr("__stderr__")?.is_none(), Ordering::Relaxed);
    Ok(())
}

/// Prints events of `level` and above from now on. Only the process's first call has an effect.
pub(crate) fn follow(level: LogLevel) {
    // This module has its own copy of `tracing`, so only an earlier engine can have set the subscriber.
    let _ = tracing::subscriber::set_global_default(printer(level));
}

/// Prints the events of this thread inside `work`, and changes nothing else in the process.
pub(crate) fn during<T>(level: LogLevel, work: impl FnOnce() -> T) -> T {
    tracing::subscriber::with_default(printer(level), work)
}

/// Logs a warning for each variable under our prefix that has no effect.
pub(crate) fn warn_of_unused_variables() {
    for (name, why) in accl_engine::unused_variables() {
        tracing::warn!("{name} is not a setting of torch-accl and has no effect on it: {why}");
    }
}

fn printer(level: LogLevel) -> impl Subscriber + Send + Sync {
    let level = match level {
        _ if LACKS_STDERR.load(Ordering::Relaxed) => LevelFilter::OFF,
        LogLevel::Off => LevelFilter::OFF,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    };
    let printer = tracing_subscriber::fmt().with_max_level(level).with_writer(Stderr).with_ansi(false);
    // Reporting an internal error, such as a line that could not be printed, would print to standard error and panic.
    printer.log_internal_errors(false).compact().finish()
}

/// Creates writers to standard error.
struct Stderr;

/// A writer for one event.
enum Line {
    /// Blocks until the line is written.
    Patient(io::Stderr),
    /// Waits for room at most [`PATIENCE`], without the lock, which another line may hold while it waits.
    Prompt(io::Stderr),
}

impl MakeWriter<'_> for Stderr {
    type Writer = Line;

    fn make_writer(&self) -> Line {
        Line::Patient(io::stderr())
    }

    fn make_writer_for(&self, event: &Metadata<'_>) -> Line {
        if *event.level() == Level::ERROR { Line::Prompt(io::stderr()) } else { self.make_writer() }
    }
}

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Line::Patient(stderr) => stderr.write(bytes),
            Line::Prompt(stderr) => {
                let patience = Timespec::try_from(PATIENCE).ok();
                let mut has_room = [PollFd::new(&*stderr, PollFlags::OUT)];
                // A pipe that reports room takes a whole line.
                if poll(&mut has_room, patience.as_ref())? == 0 {
                    return Ok(bytes.len());
                }
                Ok(rustix::io::write(stderr.as_fd(), bytes)?)
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
