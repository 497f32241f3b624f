//! How much is measured, and Criterion set up for it.

use std::path::PathBuf;
use std::time::Duration;

use criterion::Criterion;

/// How many parameters the benches go through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sweep {
    /// The default: every algorithm, few sizes, two ranks.
    Moderate,
    /// Every combination.
    Full,
}

impl Sweep {
    /// What the variable `BENCH_SWEEP` asks for.
    ///
    /// # Panics
    /// Panics when it is neither `full` nor `moderate`.
    pub fn chosen() -> Self {
        #[expect(clippy::disallowed_methods, reason = "steers the benches and is no setting of the product")]
        let value = std::env::var("BENCH_SWEEP").unwrap_or_default();
        match value.as_str() {
            "" | "moderate" => Sweep::Moderate,
            "full" => Sweep::Full,
            other => panic!("BENCH_SWEEP: unknown value `{other}`; expected moderate or full"),
        }
    }

    /// The short list or the long one.
    pub fn pick<T>(self, moderate: T, full: T) -> T {
        match self {
            Sweep::Moderate => moderate,
            Sweep::Full => full,
        }
    }
}

/// Whether each bench shall run once, without measuring.
pub fn is_test() -> bool {
    let mut arguments = std::env::args();
    arguments.any(|argument| argument == "--test")
}

/// Criterion for benches with many parameters: short, with few samples. Arguments of the command line win.
pub fn criterion(measurement: Duration) -> Criterion {
    Criterion::default()
        .warm_up_time(measurement / 4)
        .measurement_time(measurement)
        .sample_size(15)
        .nresamples(5_000)
        .output_directory(&results_dir())
        .configure_from_args()
}

/// `criterion/` beside the directory of the profile that this was built in: `target/criterion` as a rule.
pub fn results_dir() -> PathBuf {
    let built = std::env::current_exe().ok().and_then(|exe| exe.ancestors().nth(3).map(PathBuf::from));
    built.unwrap_or_else(|| PathBuf::from("target")).join("criterion")
}
