//! The choice of a target: code of CUDA runs on devices of the same major version and of no older minor version.

use std::fmt;

/// Compute capability of a device of NVIDIA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Capability {
    pub(crate) major: i32,
    pub(crate) minor: i32,
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Returns the newest of the compiler's targets (10 times the major version plus the minor one) whose code runs on a device.
pub(super) fn newest(targets: &[i32], device: Capability) -> Option<String> {
    let wanted = device.major * 10 + device.minor;
    let fits = |target: &&i32| **target / 10 == device.major && **target <= wanted;
    targets.iter().filter(fits).max().map(|target| format!("sm_{target}"))
}

/// Returns a list of targets as compute capabilities, for messages.
pub(super) fn listed(targets: &[i32]) -> String {
    let names: Vec<String> = targets.iter().map(|target| format!("{}.{}", target / 10, target % 10)).collect();
    names.join(", ")
}
