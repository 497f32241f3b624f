//! What `ACCL_LOG` prints: the engine's events, on standard error.
//!
//! Installed with the process's first engine, never at import; for what the command asks without an engine, while it asks. The
//! engine itself prints nothing.

use accl_types::config::LogLevel;
use tracing::Subscriber;
use tracing_subscriber::filter::LevelFilter;

/// Prints events of `level` and above from now on. The first engine of the process decides.
pub(crate) fn follow(level: LogLevel) {
    // The tracing of this module is its own: nobody else can have set it, only an earlier engine.
    let _ = tracing::subscriber::set_global_default(printer(level));
}

/// Prints what happens on this thread inside `work`, and leaves the process as it is.
pub(crate) fn during<T>(level: LogLevel, work: impl FnOnce() -> T) -> T {
    tracing::subscriber::with_default(printer(level), work)
}

fn printer(level: LogLevel) -> impl Subscriber + Send + Sync {
    let level = match level {
        LogLevel::Off => LevelFilter::OFF,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    };
    tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr).with_ansi(false).compact().finish()
}
