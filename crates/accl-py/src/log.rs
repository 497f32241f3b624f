//! What `ACCL_LOG` prints: the engine's events, on standard error.
//!
//! Installed with the process's first engine, never at import. The engine itself prints nothing.

use accl_types::config::LogLevel;
use tracing_subscriber::filter::LevelFilter;

/// Prints events of `level` and above from now on. The first engine of the process decides.
pub(crate) fn follow(level: LogLevel) {
    let level = match level {
        LogLevel::Off => LevelFilter::OFF,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    };
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .compact()
        .finish();
    // The tracing of this module is its own: nobody else can have set it, only an earlier engine.
    let _ = tracing::subscriber::set_global_default(subscriber);
}
