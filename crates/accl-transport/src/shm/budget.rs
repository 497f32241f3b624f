//! How much shared memory a process may create: its own limit, and what its control groups and the machine have left.
//!
//! Near a control group's limit the kernel does not refuse memory but kills a process. Therefore the room is checked
//! first.
//! Owns the reading of these figures. Reads only below the root directory that it is given.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// One part in this many of a limit stays free for everything else.
const SPARE_SHARE: u64 = 16;

/// Shared memory that one endpoint may create, and the amount that it created and still holds.
#[derive(Clone, Debug)]
pub(crate) struct Budget {
    used: Arc<AtomicU64>,
    limit: u64,
    root: PathBuf,
}

/// A share of the budget in bytes, returned when dropped.
#[derive(Debug)]
pub(crate) struct Reserved {
    used: Arc<AtomicU64>,
    bytes: u64,
}

impl Budget {
    /// Creates a budget of `limit` bytes on this machine.
    pub(crate) fn new(limit: u64) -> Budget {
        Budget { used: Arc::default(), limit, root: PathBuf::from("/") }
    }

    /// Takes `bytes` out of the budget.
    ///
    /// # Errors
    /// A clause with the limit that would be exceeded.
    pub(crate) fn reserve(&self, bytes: u64) -> Result<Reserved, String> {
        let used = self.used.load(Ordering::Relaxed);
        if used.saturating_add(bytes) > self.limit {
            return Err(format!(
                "ACCL_SHM_LIMIT allows {} bytes, {used} are in use, {bytes} more are wanted",
                self.limit
            ));
        }
        if let Some((what, room)) = tightest(&self.root).filter(|&(_, room)| room < bytes) {
            return Err(format!("{what} leaves {room} bytes, {bytes} are wanted"));
        }
        // Only the endpoint's owner reserves, so no other reservation came in between. Other threads only return
        // memory.
        self.used.fetch_add(bytes, Ordering::Relaxed);
        Ok(Reserved { used: Arc::clone(&self.used), bytes })
    }
}

impl Budget {
    /// Whether the machine and the control groups have room for `bytes` that were reserved before.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        tightest(&self.root).is_none_or(|(_, room)| room >= bytes)
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Returns the limit with the least room, as its name and the bytes left. A file that cannot be read sets no limit.
fn tightest(root: &Path) -> Option<(&'static str, u64)> {
    let number = |path: PathBuf| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let text = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default();
    let machine = field_kib(&text("proc/meminfo"), "MemAvailable:")
        .zip(field_kib(&text("proc/meminfo"), "MemTotal:"))
        .map(|(available, total)| ("the machine's free memory", available.saturating_sub(total / SPARE_SHARE)));
    let groups = group_directories(&text("proc/self/cgroup")).into_iter().filter_map(|(directory, names)| {
        let directory = root.join(directory);
        let limit = number(directory.join(names.limit))?;
        let used = number(directory.join(names.used))?;
        // Clean file pages count as used, but the kernel drops them when memory is needed.
        let stat = std::fs::read_to_string(directory.join("memory.stat")).unwrap_or_default();
        let reclaimable = field(&stat, names.reclaimable).unwrap_or(0);
        let used = used.saturating_sub(reclaimable);
        Some(("the memory limit of the control group", limit.saturating_sub(limit / SPARE_SHARE).saturating_sub(used)))
    });
    machine.into_iter().chain(groups).min_by_key(|&(_, room)| room)
}

struct Names {
    limit: &'static str,
    used: &'static str,
    reclaimable: &'static str,
}

const UNIFIED: &Names = &Names { limit: "memory.max", used: "memory.current", reclaimable: "inactive_file" };
const LEGACY: &Names =
    &Names { limit: "memory.limit_in_bytes", used: "memory.usage_in_bytes", reclaimable: "total_inactive_file" };

/// Returns the directories whose limits bind this process: its control group and all groups above it.
/// Inside a container the path may be the host's path while the files are at the mount's top. The mount's top is in the
/// list as well.
fn group_directories(cgroup: &str) -> Vec<(PathBuf, &'static Names)> {
    let mut all = Vec::new();
    for line in cgroup.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (mount, names) = if controllers.is_empty() {
            ("sys/fs/cgroup", UNIFIED)
        } else if controllers.split(',').any(|c| c == "memory") {
            ("sys/fs/cgroup/memory", LEGACY)
        } else {
            continue;
        };
        let path = Path::new(path.trim_start_matches('/'));
        all.extend(path.ancestors().map(|above| (Path::new(mount).join(above), names)));
    }
    all
}

fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.split_whitespace().next() == Some(name))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

fn field_kib(text: &str, name: &str) -> Option<u64> {
    field(text, name)?.checked_mul(1024)
}

#[cfg(all(test, not(accl_loom)))]
mod tests {
    use super::*;

    fn room(files: &[(&str, &str)]) -> Option<u64> {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        tightest(root.path()).map(|(_, room)| room)
    }

    #[test]
    fn a_limit_of_the_own_group_or_one_above_binds() {
        let own = [
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/b/memory.max", "1600\n"),
            ("sys/fs/cgroup/a/b/memory.current", "1000\n"),
            ("sys/fs/cgroup/a/b/memory.stat", "anon 1\ninactive_file 300\n"),
        ];
        assert_eq!(room(&own), Some(1600 - 100 - 700));
        let above = [
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/b/memory.current", "10\n"),
            ("sys/fs/cgroup/a/memory.max", "160\n"),
            ("sys/fs/cgroup/a/memory.current", "155\n"),
        ];
        assert_eq!(room(&above), Some(0));
    }

    #[test]
    fn the_older_layout_is_read_as_well() {
        let files = [
            ("proc/self/cgroup", "5:cpu,memory:/x\n4:pids:/y\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "3200\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "200\n"),
        ];
        assert_eq!(room(&files), Some(2800));
    }

    #[test]
    fn the_machine_keeps_a_share_and_nothing_readable_is_no_limit() {
        let files = [("proc/meminfo", "MemTotal:       1600 kB\nMemAvailable:    900 kB\n")];
        assert_eq!(room(&files), Some(800 * 1024));
        assert_eq!(tightest(Path::new("/nonexistent")), None);
    }

    #[test]
    fn what_is_dropped_can_be_reserved_again() {
        let budget = Budget::new(100);
        let first = budget.reserve(60).unwrap();
        let why = budget.reserve(60).unwrap_err();
        assert!(why.contains("ACCL_SHM_LIMIT allows 100 bytes, 60 are in use"), "{why}");
        drop(first);
        budget.reserve(100).unwrap();
    }
}
