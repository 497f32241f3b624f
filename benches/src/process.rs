//! Ranks as processes: of a separate program ([`Children`]) or of the bench, which starts itself again for every rank
//! but 0 ([`Ranks`]).
//!
//! Owns their start, their end and their common directory. A rank ends with the process that started it: the kernel
//! kills the rank when that process dies. Dropping [`Children`] waits for its processes, and kills them after a
//! deadline. This module does not know the work of a rank. Read [`Children`] and [`started_as_rank`] first.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use accl_testkit::DirStore;
use accl_types::{Error, Result};
use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};

/// First argument of a program that was started as a rank.
const MARK: &str = "--as-rank-of-a-bench";
/// Time for a rank to end by itself.
const PATIENCE: Duration = Duration::from_secs(5);

/// The parameters of a rank's process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankProcess {
    /// Rank of the process.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// Transport for the ranks to use.
    pub transport: String,
    /// Common directory of the ranks.
    pub dir: PathBuf,
}

impl RankProcess {
    /// Opens the store through which the ranks connect.
    ///
    /// # Errors
    /// See [`DirStore::new`].
    pub fn store(&self) -> Result<DirStore> {
        DirStore::new(&self.dir)
    }

    fn to_arguments(&self, parent: Pid) -> [String; 6] {
        let dir = self.dir.to_string_lossy().into_owned();
        let parent = parent.as_raw_nonzero().to_string();
        [MARK.to_owned(), parent, self.rank.to_string(), self.ranks.to_string(), self.transport.clone(), dir]
    }

    fn from_arguments(arguments: &[String]) -> Option<(Self, i32)> {
        let [mark, parent, rank, ranks, transport, dir] = arguments else { return None };
        let process = Self {
            rank: rank.parse().ok()?,
            ranks: ranks.parse().ok()?,
            transport: transport.clone(),
            dir: dir.into(),
        };
        (mark == MARK).then_some((process, parent.parse().ok()?))
    }
}

/// Runs `body` in a process that was started as a rank, and returns the exit code with which the program must end.
/// Returns `None` in the bench itself. Call it before anything else.
pub fn started_as_rank(body: impl FnOnce(&RankProcess) -> Result<()>) -> Option<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (process, parent) = RankProcess::from_arguments(&arguments)?;
    // If the parent died before this line, no signal will come, but then the process already has another parent.
    let bound = set_parent_process_death_signal(Some(Signal::KILL)).is_ok();
    if !bound || getppid().map(Pid::as_raw_nonzero).is_none_or(|now| now.get() != parent) {
        return Some(ExitCode::FAILURE);
    }
    match body(&process) {
        Ok(()) => Some(ExitCode::SUCCESS),
        Err(error) => {
            eprintln!("rank {} of {} over {}: {error}", process.rank, process.ranks, process.transport);
            Some(ExitCode::FAILURE)
        }
    }
}

/// Processes that end when this value is dropped, and their directory.
#[derive(Debug)]
pub struct Children {
    dir: PathBuf,
    children: Vec<Child>,
}

impl Children {
    /// Creates a new directory, without processes yet.
    ///
    /// # Errors
    /// `Exhausted` if the directory cannot be created.
    pub fn in_new_dir() -> Result<Self> {
        static MADE: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        loop {
            let number = MADE.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let dir = std::env::temp_dir().join(format!("accl-bench-{}-{number}", std::process::id()));
            match std::fs::create_dir(&dir) {
                Ok(()) => return Ok(Self { dir, children: Vec::new() }),
                // The directory is left over from a killed process with the same number.
                Err(why) if why.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(why) => return Err(unable(&why)),
            }
        }
    }

    /// Returns the common directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Starts a process.
    ///
    /// # Errors
    /// `Exhausted` if it cannot be started.
    pub fn spawn(&mut self, command: &mut Command) -> Result<()> {
        self.children.push(command.spawn().map_err(|why| unable(&why))?);
        Ok(())
    }

    /// Returns whether any process has ended.
    pub fn any_ended(&mut self) -> bool {
        self.children.iter_mut().any(|child| !matches!(child.try_wait(), Ok(None)))
    }
}

impl Drop for Children {
    /// Waits for the processes, which have been ordered to end or have lost their connection.
    fn drop(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        for child in &mut self.children {
            while matches!(child.try_wait(), Ok(None)) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            if matches!(child.try_wait(), Ok(None)) {
                eprintln!("the rank in process {} did not exit and is killed", child.id());
                let _ = child.kill();
            }
            let _ = child.wait();
        }
        // Left-overs in the directory for temporary files do no harm.
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// The other ranks, until dropped.
#[derive(Debug)]
pub struct Ranks {
    own: RankProcess,
    _children: Children,
}

impl Ranks {
    /// Starts ranks 1 to `ranks` - 1.
    ///
    /// # Errors
    /// `Exhausted` if the directory cannot be created or a process cannot be started.
    pub fn start(transport: &str, ranks: u32) -> Result<Self> {
        let mut children = Children::in_new_dir()?;
        let process = RankProcess { rank: 0, ranks, transport: transport.to_owned(), dir: children.dir().to_owned() };
        let program = std::env::current_exe().map_err(|why| unable(&why))?;
        for rank in 1..ranks {
            let process = RankProcess { rank, ..process.clone() };
            let mut command = Command::new(&program);
            command.args(process.to_arguments(getpid())).stdin(Stdio::null()).stdout(Stdio::null());
            children.spawn(&mut command)?;
        }
        Ok(Self { own: process, _children: children })
    }

    /// Returns the process that started the others.
    pub fn own(&self) -> &RankProcess {
        &self.own
    }
}

fn unable(why: &std::io::Error) -> Error {
    Error::exhausted(format!("a rank cannot be started: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_process_survives_the_command_line() {
        let process = RankProcess { rank: 2, ranks: 4, transport: "shm".into(), dir: "/somewhere else".into() };
        let arguments = process.to_arguments(getpid());
        let (again, parent) = RankProcess::from_arguments(&arguments).unwrap();
        assert_eq!((again, parent), (process, getpid().as_raw_nonzero().get()));
        assert_eq!(RankProcess::from_arguments(&["--bench".to_owned()]), None);
    }
}
