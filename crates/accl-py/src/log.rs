//! What `ACCL_LOG` prints: the engine's events, on standard error.
//!
//! A line that cannot be written, to a full disk or a pipe that nobody reads any more, is lost, and nothing else is. A process that began
//! without standard error prints nothing: its descriptor has since become another file's.
//!
//! Who makes the progress tells of errors before it goes on itself: such a line is lost, too, where nobody takes it in time.
//!
//! Installed with the process's first engine, never at import; for what the command asks without an engine, while it asks. The
//! engine itself prints nothing.

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

/// How long a line about an error waits for room.
const PATIENCE: Duration = Duration::from_millis(50);

/// Notes whether Python began without standard error.
///
/// # Errors
/// Those of an interpreter without a module `sys`.
pub(crate) fn look_for_stderr(py: Python<'_>) -> PyResult<()> {
    LACKS_STDERR.store(py.import("sys")?.getattr("__stderr__")?.is_none(), Ordering::Relaxed);
    Ok(())
}

/// Prints events of `level` and above from now on. The first engine of the process decides.
pub(crate) fn follow(level: LogLevel) {
    // The tracing of this module is its own: nobody else can have set it, only an earlier engine.
    let _ = tracing::subscriber::set_global_default(printer(level));
}

/// Prints what happens on this thread inside `work`, and leaves the process as it is.
pub(crate) fn during<T>(level: LogLevel, work: impl FnOnce() -> T) -> T {
    tracing::subscriber::with_default(printer(level), work)
}

/// Warns of each variable under our prefix that has no effect.
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
    // It would tell of a line that it could not print by printing, which panics.
    printer.log_internal_errors(false).compact().finish()
}

/// Makes writers to standard error.
struct Stderr;

/// For one event.
enum Line {
    /// As long as it takes.
    Patient(io::Stderr),
    /// At once, without the lock that another line may have which waits.
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
                // A pipe that says so takes a whole line.
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
