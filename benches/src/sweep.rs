//! The amount of measuring, and a Criterion instance set up for it.

use std::path::PathBuf;
use std::time::Duration;

use criterion::Criterion;

/// The range of parameters that the benches cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sweep {
    /// The default: every algorithm, few sizes, two ranks.
    Moderate,
    /// Every combination.
    Full,
}

impl Sweep {
    /// Returns the sweep that the variable `BENCH_SWEEP` selects.
    ///
    /// # Panics
    /// Panics if it is neither `full` nor `moderate`.
    pub fn chosen() -> Self {
        #[expect(clippy::disallowed_methods, reason = "controls the benches only; the library does not read it")]
        let value = std::env::var("BENCH_SWEEP").unwrap_or_default();
        match value.as_str() {
            "" | "moderate" => Sweep::Moderate,
            "full" => Sweep::Full,
            other => panic!("BENCH_SWEEP: unknown value `{other}`; expected moderate or full"),
        }
    }

    /// Returns the short list or the long one.
    pub fn pick<T>(self, moderate: T, full: T) -> T {
        match self {
            Sweep::Moderate => moderate,
            Sweep::Full => full,
        }
    }
}

/// Returns whether each bench must run once, without measuring.
pub fn is_test() -> bool {
    let mut arguments = std::env::args();
    arguments.any(|argument| argument == "--test")
}

/// Returns a Criterion for benches with many parameters: short runs, few samples. Command-line arguments take
/// precedence.
pub fn criterion(measurement: Duration) -> Criterion {
    Criterion::default()
        .warm_up_time(measurement / 4)
        .measurement_time(measurement)
        .sample_size(15)
        .nresamples(5_000)
        .output_directory(&results_dir())
        .configure_from_args()
}

/// Returns `criterion/` next to the directory of this program's build profile, usually `target/criterion`.
pub fn results_dir() -> PathBuf {
    let built = std::env::current_exe().ok().and_then(|exe| exe.ancestors().nth(3).map(PathBuf::from));
    built.unwrap_or_else(|| PathBuf::from("target")).join("criterion")
}
