//! A rendezvous store in a directory, for processes of one host that share no other store.
//!
//! Each key is a file. It is written under another name and renamed, so a reader sees a whole value or none. Counters
//! change under a file lock, which the kernel releases if its holder dies. Does not own the directory: its creator
//! removes it.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use accl_engine::Store;
use accl_types::{Error, Result};
use rustix::fs::{FlockOperation, flock};

/// Time between two polls of a waiter.
const POLL: Duration = Duration::from_micros(500);
/// Name of the lock file; no key has this name, see [`file_name`].
const LOCK: &str = "=lock";

/// Number of the next temporary file of this process.
static WRITTEN: AtomicU64 = AtomicU64::new(0);

/// A store in a directory. Two stores with the same directory share their contents, also across processes.
#[derive(Clone, Debug)]
pub struct DirStore {
    dir: PathBuf,
    prefix: String,
}

impl DirStore {
    /// Opens the store in `dir`, and creates the directory if it does not exist.
    ///
    /// # Errors
    /// `Rendezvous` if the directory cannot be created.
    pub fn new(dir: impl Into<PathBuf>) -> Result<Self> {
        let dir = dir.into();
        fs::create_dir_all(&dir).map_err(|why| failed("made", &dir, &why))?;
        Ok(Self { dir, prefix: String::new() })
    }

    /// Returns the same store under a prefix, as torch gives each group one.
    pub fn prefixed(&self, prefix: &str) -> Self {
        Self { dir: self.dir.clone(), prefix: format!("{}{prefix}/", self.prefix) }
    }

    /// Polls until the key has a value, and returns the value. `None` if there is none after `timeout`.
    ///
    /// # Errors
    /// `Rendezvous` if the key cannot be read.
    pub fn wait(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(value) = self.get(key)? {
                return Ok(Some(value));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            std::thread::sleep(left.min(POLL));
        }
    }

    fn path(&self, key: &str) -> PathBuf {
        self.dir.join(file_name(&format!("{}{key}", self.prefix)))
    }

    fn write(&self, path: &Path, value: &[u8]) -> Result<()> {
        let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
        let aside = self.dir.join(format!("=new-{}-{number}", std::process::id()));
        fs::write(&aside, value).and_then(|()| fs::rename(&aside, path)).map_err(|why| failed("written", path, &why))
    }
}

impl Store for DirStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.write(&self.path(key), value)
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let path = self.path(key);
        match fs::read(&path) {
            Ok(value) => Ok(Some(value)),
            Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(why) => Err(failed("read", &path, &why)),
        }
    }

    fn identity(&self) -> u64 {
        accl_types::hash::hash_words(self.dir.as_os_str().as_encoded_bytes().iter().map(|&byte| u64::from(byte)))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        let lock_path = self.dir.join(LOCK);
        let lock = File::create(&lock_path).map_err(|why| failed("made", &lock_path, &why))?;
        rustix::io::retry_on_intr(|| flock(&lock, FlockOperation::LockExclusive))
            .map_err(|why| failed("locked", &lock_path, &why.into()))?;
        let path = self.path(key);
        let old = match fs::read_to_string(&path) {
            Ok(text) => text.parse().map_err(|_| Error::rendezvous(format!("{key} does not hold a number")))?,
            Err(why) if why.kind() == io::ErrorKind::NotFound => 0,
            Err(why) => return Err(failed("read", &path, &why)),
        };
        let value: i64 = old + delta;
        // The lock is released when `lock` is dropped, after this write.
        self.write(&path, value.to_string().as_bytes())?;
        Ok(value)
    }

    fn delete(&self, key: &str) -> Result<bool> {
        let path = self.path(key);
        match fs::remove_file(&path) {
            Ok(()) => Ok(true),
            Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(why) => Err(failed("deleted", &path, &why)),
        }
    }
}

/// Returns a file name without separators; different keys have different names. In such a name, two hexadecimal digits
/// follow each `=`. The store's own files have other characters after it.
fn file_name(key: &str) -> String {
    let mut name = String::with_capacity(key.len());
    for byte in key.bytes() {
        if byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-' {
            name.push(char::from(byte));
        } else {
            // Writing to a string cannot fail.
            let _ = write!(name, "={byte:02x}");
        }
    }
    name
}

fn failed(what: &str, path: &Path, why: &io::Error) -> Error {
    Error::rendezvous(format!("{} could not be {what}: {why}", path.display()))
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    fn store() -> (TempDir, DirStore) {
        let dir = TempDir::new().unwrap();
        let store = DirStore::new(dir.path().to_owned()).unwrap();
        (dir, store)
    }

    #[test]
    fn concurrent_additions_all_count() {
        let (_dir, store) = store();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..50).for_each(|_| assert!(store.add("n/one", 1).unwrap() > 0)));
            }
        });
        assert_eq!(store.add("n/one", 0).unwrap(), 200);
        assert_eq!(store.get("n/one").unwrap().unwrap(), b"200");
    }

    #[test]
    fn a_waiter_sees_what_another_one_sets_and_gives_up_in_time() {
        let (_dir, store) = store();
        store.set("a", b"1").unwrap();
        assert_eq!(store.wait("b", Duration::from_millis(2)).unwrap(), None);
        std::thread::scope(|scope| {
            scope.spawn(|| store.set("b", b"").unwrap());
            assert_eq!(store.wait("b", Duration::from_secs(30)).unwrap().unwrap(), b"");
        });
        assert_eq!(store.wait("a", Duration::ZERO).unwrap().unwrap(), b"1");
        assert!(store.delete("a").unwrap() && !store.delete("a").unwrap());
        assert_eq!(store.get("a").unwrap(), None);
    }

    #[test]
    fn keys_that_look_like_paths_stay_apart_and_inside() {
        let (_dir, store) = store();
        let keys = ["x/y", "x", "../x", "x=2fy", "=lock", "x/", "."];
        for key in keys {
            store.set(key, key.as_bytes()).unwrap();
        }
        for key in keys {
            assert_eq!(store.get(key).unwrap().unwrap(), key.as_bytes(), "{key}");
        }
        assert_eq!(store.prefixed("x").get("y").unwrap().unwrap(), b"x/y");
        assert_eq!(store.get("absent").unwrap(), None);
    }
}
