//! Ranks as processes, of a program of their own ([`Children`]) or of the bench, which starts itself again for every rank but 0
//! ([`Ranks`]).
//!
//! Owns their start, their end and the directory in which all meet. A rank ends with the process that started it: the
//! kernel kills it when that one dies, and dropping [`Children`] waits for it, and kills it after a deadline. What a rank
//! does is not known here. Read [`Children`] and [`started_as_rank`] first.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use accl_testkit::DirStore;
use accl_types::{Error, Result};
use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};

/// First argument of a program that was started as a rank.
const MARK: &str = "--as-rank-of-a-bench";
/// How long a rank has to end by itself.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a process needs to know of its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its rank.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// Transport that the ranks shall use.
    pub transport: String,
    /// Where they meet.
    pub dir: PathBuf,
}

impl Place {
    /// The store in which all ranks meet.
    ///
    /// # Errors
    /// As [`DirStore::new`].
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
        let place = Self {
            rank: rank.parse().ok()?,
            ranks: ranks.parse().ok()?,
            transport: transport.clone(),
            dir: dir.into(),
        };
        (mark == MARK).then_some((place, parent.parse().ok()?))
    }
}

/// In a process that was started as a rank: runs `body`, and the program shall end with the returned code. In the bench
/// itself `None`. To be called before anything else.
pub fn started_as_rank(body: impl FnOnce(&Place) -> Result<()>) -> Option<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (place, parent) = Place::from_arguments(&arguments)?;
    // A parent that died before this line will send no signal, but the process has another one by now.
    let bound = set_parent_process_death_signal(Some(Signal::KILL)).is_ok();
    if !bound || getppid().map(Pid::as_raw_nonzero).is_none_or(|now| now.get() != parent) {
        return Some(ExitCode::FAILURE);
    }
    match body(&place) {
        Ok(()) => Some(ExitCode::SUCCESS),
        Err(error) => {
            eprintln!("rank {} of {} over {}: {error}", place.rank, place.ranks, place.transport);
            Some(ExitCode::FAILURE)
        }
    }
}

/// Processes that end with this value, and the directory that is theirs.
#[derive(Debug)]
pub struct Children {
    dir: PathBuf,
    children: Vec<Child>,
}

impl Children {
    /// None yet, and a new directory.
    ///
    /// # Errors
    /// `Exhausted` when it cannot be made.
    pub fn in_new_dir() -> Result<Self> {
        static MADE: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        loop {
            let number = MADE.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let dir = std::env::temp_dir().join(format!("accl-bench-{}-{number}", std::process::id()));
            match std::fs::create_dir(&dir) {
                Ok(()) => return Ok(Self { dir, children: Vec::new() }),
                // Of a process with the same number that was killed.
                Err(why) if why.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(why) => return Err(unable(&why)),
            }
        }
    }

    /// Where they meet.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Starts one.
    ///
    /// # Errors
    /// `Exhausted` when it cannot be started.
    pub fn spawn(&mut self, command: &mut Command) -> Result<()> {
        self.children.push(command.spawn().map_err(|why| unable(&why))?);
        Ok(())
    }

    /// Whether one has ended.
    pub fn any_ended(&mut self) -> bool {
        self.children.iter_mut().any(|child| !matches!(child.try_wait(), Ok(None)))
    }
}

impl Drop for Children {
    /// They have been told to end, or have seen their peer leave.
    fn drop(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        for child in &mut self.children {
            while matches!(child.try_wait(), Ok(None)) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            if matches!(child.try_wait(), Ok(None)) {
                eprintln!("rank in process {} did not end and is killed", child.id());
                let _ = child.kill();
            }
            let _ = child.wait();
        }
        // Left-overs in the directory for temporary files harm nobody.
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// The other ranks, as long as they are needed.
#[derive(Debug)]
pub struct Ranks {
    place: Place,
    _children: Children,
}

impl Ranks {
    /// Starts ranks 1 to `ranks` - 1.
    ///
    /// # Errors
    /// `Exhausted` when the directory cannot be made or a process cannot be started.
    pub fn start(transport: &str, ranks: u32) -> Result<Self> {
        let mut children = Children::in_new_dir()?;
        let place = Place { rank: 0, ranks, transport: transport.to_owned(), dir: children.dir().to_owned() };
        let program = std::env::current_exe().map_err(|why| unable(&why))?;
        for rank in 1..ranks {
            let place = Place { rank, ..place.clone() };
            let mut command = Command::new(&program);
            command.args(place.to_arguments(getpid())).stdin(Stdio::null()).stdout(Stdio::null());
            children.spawn(&mut command)?;
        }
        Ok(Self { place, _children: children })
    }

    /// The place of the process that started the others.
    pub fn place(&self) -> &Place {
        &self.place
    }
}

fn unable(why: &std::io::Error) -> Error {
    Error::exhausted(format!("a rank could not be started: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_survives_the_command_line() {
        let place = Place { rank: 2, ranks: 4, transport: "shm".into(), dir: "/somewhere else".into() };
        let arguments = place.to_arguments(getpid());
        let (again, parent) = Place::from_arguments(&arguments).unwrap();
        assert_eq!((again, parent), (place, getpid().as_raw_nonzero().get()));
        assert_eq!(Place::from_arguments(&["--bench".to_owned()]), None);
    }
}
