//! The file in which a machine's constants are stored.
//!
//! Owns the file's location, text and atomic writing. Read [`read`] and [`write()`] first.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use accl_schedule::cost::{CONSTANTS, SIZES};
use accl_types::hash::hash_words;

use crate::fit::Fitted;

/// Version of the file's format. A file without a number is older and can still be read: each line names its constant,
/// and a constant without a line keeps its built-in value. Format 2 adds the line `at_bounds`.
const FORMAT: u64 = 2;

/// Maximum size of a file in bytes. A larger file cannot be one of ours.
const MAX_BYTES: u64 = 64 << 10;

/// The file for this machine, kernel and torch-accl version in the user's cache directory.
pub(super) fn path_in(cache_home: &Path) -> PathBuf {
    let hash = hash_words(identity().bytes().map(u64::from));
    cache_home.join("torch-accl").join(format!("machine-{hash:016x}.txt"))
}

/// The facts that constants depend on and that are cheap to read.
fn identity() -> String {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let of = |name: &str| {
        let line = cpuinfo.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split_once(':')).map(|(_, value)| value.trim().to_owned())
    };
    // Not every architecture names its model, so all parts that exist are used.
    let parts = ["vendor_id", "cpu family", "model", "model name", "CPU implementer", "CPU part"];
    let model: Vec<String> = parts.into_iter().filter_map(of).collect();
    let cores = cpuinfo.lines().filter(|line| line.starts_with("processor")).count();
    let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
    format!("{}, {cores} cores, Linux {kernel}, torch-accl {}", model.join(" "), env!("CARGO_PKG_VERSION"))
}

/// Reads the constants in a file and the list of those at their bounds. Returns `None` if there is no such file.
///
/// # Errors
/// A clause that names the file, if it cannot be read or is not a file of constants.
pub(super) fn read(path: &Path) -> Result<Option<Fitted>, String> {
    let wrong = |why: &str| format!("{}: {why}", path.display());
    match std::fs::metadata(path) {
        Ok(facts) if facts.is_file() && facts.len() <= MAX_BYTES => {}
        Ok(_) => return Err(wrong("this is not a file of machine constants")),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
        Err(error) => return Err(wrong(&error.to_string())),
    }
    let text = std::fs::read_to_string(path).map_err(|error| wrong(&error.to_string()))?;
    parse(&text).map(Some).map_err(|why| wrong(&format!("this is not a file of machine constants: {why}")))
}

pub(super) fn parse(text: &str) -> Result<Fitted, String> {
    let lines = text.lines().map(|line| line.split_once('#').map_or(line, |(before, _)| before).trim());
    let mut words: Vec<String> = lines.filter(|line| !line.is_empty()).map(|line| line.replace(' ', "")).collect();
    // A file is empty if the machine went down while it was being written.
    if words.is_empty() {
        return Err("it is empty".to_owned());
    }
    if let Some(format) = words[0].strip_prefix("format=") {
        if !format.parse::<u64>().is_ok_and(|format| (1..=FORMAT).contains(&format)) {
            return Err(format!(
                "its format is {format}, but this version of torch-accl reads formats up to {FORMAT}; use the version \
                 that wrote the file, or remove it to measure the constants again"
            ));
        }
        words.remove(0);
    }
    let is_list = |word: &String| word.starts_with("at_bounds=");
    let at_bounds =
        words.iter().find(|word| is_list(word)).map(|word| named(&word["at_bounds=".len()..])).transpose()?;
    words.retain(|word| !is_list(word));
    Ok(Fitted { machine: words.join(" ").parse()?, at_bounds: at_bounds.unwrap_or_default() })
}

/// The constants named in a comma-separated list.
fn named(list: &str) -> Result<Vec<&'static str>, String> {
    let constant = |name: &str| {
        let found = CONSTANTS.iter().find(|constant| constant.name == name).map(|constant| constant.name);
        found.ok_or_else(|| format!("at_bounds: unknown constant {name}"))
    };
    list.split(',').map(constant).collect()
}

/// Writes a file that readers see either whole or not at all.
///
/// # Errors
/// A clause that names the file.
pub(super) fn write(path: &Path, fitted: &Fitted) -> Result<(), String> {
    static WRITTEN: AtomicU32 = AtomicU32::new(0);
    let failed = |error: std::io::Error| format!("{}: the constants could not be stored: {error}", path.display());
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(failed)?;
    }
    let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
    let draft = path.with_extension(format!("{}-{number}.part", std::process::id()));
    let write = || {
        // Descriptors 0 to 2 are for the standard streams. If the file had one, the process's output would go into it.
        let mut file = File::from(rustix::io::fcntl_dupfd_cloexec(File::create(&draft)?, 3)?);
        file.write_all(text(fitted).as_bytes())?;
        std::fs::rename(&draft, path)
    };
    let kept = write();
    kept.map_err(|error| {
        let _ = std::fs::remove_file(&draft);
        failed(error)
    })
}

/// The file's text: one constant per line, with its effect as a comment.
fn text(fitted: &Fitted) -> String {
    let Fitted { machine, at_bounds } = fitted;
    let sizes: Vec<String> = SIZES.iter().map(|size| format!("{} KiB", size >> 10)).collect();
    let mut text = format!(
        "# Constants of torch-accl's cost model. Five numbers are for calls of {}.\n# {}\nformat = {FORMAT}\n",
        sizes.join(", "),
        identity()
    );
    for constant in CONSTANTS {
        let values: Vec<String> = machine.values(constant).iter().map(u64::to_string).collect();
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{} = {}  # {}", constant.name, values.join(", "), constant.effect);
    }
    if !at_bounds.is_empty() {
        let _ = writeln!(
            text,
            "at_bounds = {}  # not determined by the measurement: the lowest possible values",
            at_bounds.join(", ")
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use accl_schedule::cost::Machine;
    use tempfile::tempdir;

    use super::*;

    fn machine(switch_ps: u64) -> Fitted {
        Fitted { machine: Machine { switch_ps, ..Machine::default() }, at_bounds: Vec::new() }
    }

    #[test]
    fn what_was_written_is_read() {
        let folder = tempdir().unwrap();
        let path = path_in(&folder.path().join("not/yet/there"));
        assert_eq!(read(&path), Ok(None));
        write(&path, &machine(77)).unwrap();
        assert_eq!(read(&path), Ok(Some(machine(77))));
        write(&path, &machine(78)).unwrap();
        assert_eq!(read(&path), Ok(Some(machine(78))));
        let left = std::fs::read_dir(path.parent().unwrap()).unwrap().count();
        assert_eq!(left, 1, "a draft was left behind");
    }

    #[test]
    fn constants_at_their_bounds_are_named_in_the_file() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("constants");
        let fitted = Fitted { at_bounds: vec!["shm_call_ps", "switch_ps"], ..machine(300_000) };
        write(&path, &fitted).unwrap();
        assert_eq!(read(&path), Ok(Some(fitted)));
        let written = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, written.replace("at_bounds = shm_call_ps", "at_bounds = speed")).unwrap();
        assert!(read(&path).unwrap_err().contains("at_bounds: unknown constant speed"));
    }

    #[test]
    fn a_file_of_a_newer_format_is_refused_and_one_without_a_format_is_read() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("constants");
        write(&path, &machine(77)).unwrap();
        let written = std::fs::read_to_string(&path).unwrap();
        let line = format!("format = {FORMAT}\n");
        assert!(written.contains(&line), "{written}");
        std::fs::write(&path, written.replace(&line, "")).unwrap();
        assert_eq!(read(&path), Ok(Some(machine(77))), "written before there was a number");
        for newer in [(FORMAT + 1).to_string(), "0".to_owned(), "next".to_owned()] {
            std::fs::write(&path, written.replace(&line, &format!("format = {newer}\n"))).unwrap();
            let why = read(&path).unwrap_err();
            assert!(why.contains(&format!("its format is {newer}, but this version")), "{why}");
            assert!(why.contains("constants") && why.contains("measure the constants again"), "{why}");
        }
    }

    #[test]
    fn garbage_is_refused_with_the_name_of_the_file() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("constants");
        for garbage in [&b""[..], b"{\"a\": 1}", b"switch_ps = fast", b"\xff\xfe\0", b"speed = 3\n", &[b'#'; 1 << 17]] {
            std::fs::write(&path, garbage).unwrap();
            assert!(read(&path).unwrap_err().contains("constants"), "{garbage:?}");
        }
        assert!(read(folder.path()).unwrap_err().contains("not a file of machine constants"));
    }

    #[test]
    fn a_place_that_cannot_be_written_is_an_error() {
        let folder = tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        // A regular file cannot contain a directory, not even for root.
        let why = write(&file.join("torch-accl/machine.txt"), &machine(1)).unwrap_err();
        assert!(why.contains("could not be stored"), "{why}");
        assert_eq!(read(&file.join("torch-accl/machine.txt")), Ok(None));
    }

    #[test]
    fn who_reads_while_others_write_sees_one_of_them_whole() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("constants");
        write(&path, &machine(0)).unwrap();
        std::thread::scope(|scope| {
            for writer in 0..4 {
                let path = &path;
                scope.spawn(move || (0..50).for_each(|turn| write(path, &machine(writer * 100 + turn)).unwrap()));
            }
            for _ in 0..200 {
                assert!(matches!(read(&path), Ok(Some(_))));
            }
        });
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
