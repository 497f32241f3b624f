//! Libraries of a vendor, opened at run time, and the form of the tables of their functions.
//!
//! Owns where a library is looked for, and how its functions are found by name. Does not know what the functions do: the
//! tables are in `driver` and `compiler`. A library that was opened is never closed, because its code may still run.
//! Read [`Vendor`] and `functions!` first.

use std::path::{Path, PathBuf};

use accl_types::{Error, Result};
use libloading::Library;

/// File that lists the mappings of this process.
const MAPPED: &str = "/proc/self/maps";

/// A row of the tables: the vendor's interface whose functions are called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Vendor {
    /// NVIDIA's driver and NVRTC.
    Cuda,
    /// AMD's HIP and hiprtc. No test has run this row on a card: see decision 72.
    Hip,
}

impl Vendor {
    /// Name of the vendor's interface, for messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Vendor::Cuda => "CUDA",
            Vendor::Hip => "HIP",
        }
    }

    /// Name of a device in torch. torch gives AMD's cards the same name.
    pub(crate) fn device(self, ordinal: u32) -> String {
        format!("cuda:{ordinal}")
    }
}

/// Files of a vendor's libraries, in the order in which they are tried. A name without a folder is looked for by the
/// dynamic linker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Libraries {
    /// Candidates for the driver.
    pub(crate) driver: Vec<PathBuf>,
    /// Candidates for the compiler.
    pub(crate) compiler: Vec<PathBuf>,
}

impl Libraries {
    /// Creates a list of candidates for a driver and a compiler: for tests.
    ///
    /// # Safety
    /// Opening the libraries runs nothing that has preconditions. Their functions have the types of the tables.
    pub unsafe fn new(driver: Vec<PathBuf>, compiler: Vec<PathBuf>) -> Self {
        Self { driver, compiler }
    }

    /// Returns the same list with a first candidate for the compiler: for tests.
    ///
    /// # Safety
    /// The contract of [`Libraries::new`].
    #[must_use]
    pub unsafe fn with_compiler(mut self, path: PathBuf) -> Self {
        self.compiler.insert(0, path);
        self
    }

    /// Returns the libraries that this process has mapped, followed by those that the dynamic linker may know.
    ///
    /// torch maps the driver and the compiler that belong to it. A compiler of another version could make code that the
    /// driver does not load, so a mapped one comes first. CUDA's driver has one name, by which the linker finds a mapped one.
    pub fn of(vendor: Vendor) -> Self {
        let maps = std::fs::read_to_string(MAPPED).unwrap_or_default();
        let find = |stem: &str, names: &[&str]| {
            let mut found = mapped(&maps, stem);
            found.extend(names.iter().map(PathBuf::from));
            found
        };
        match vendor {
            Vendor::Cuda => Self {
                driver: vec!["libcuda.so.1".into()],
                compiler: find("libnvrtc.so", &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2"]),
            },
            Vendor::Hip => {
                let driver = find("libamdhip64.so", &["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"]);
                let mut compiler = find("libhiprtc.so", &["libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so"]);
                // Old versions have the compiler in the same library.
                compiler.extend(driver.iter().cloned());
                Self { driver, compiler }
            }
        }
    }
}

/// Returns the files in a list of mappings whose name begins with `stem`, each once.
fn mapped(maps: &str, stem: &str) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for path in maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..]))) {
        let is_wanted = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(stem));
        if is_wanted && !found.iter().any(|known| known == path) {
            found.push(path.to_owned());
        }
    }
    found
}

/// A library that stays open while the process lives.
#[derive(Debug)]
pub(crate) struct OpenLibrary {
    pub(crate) library: &'static Library,
    /// Name under which it was opened.
    pub(crate) name: String,
}

/// Opens one library.
///
/// # Errors
/// The dynamic linker's words.
pub(crate) fn open(path: &Path) -> std::result::Result<OpenLibrary, String> {
    // SAFETY: opening one of these libraries runs its own initializers only, which have no preconditions.
    let library = unsafe { Library::new(path) }.map_err(|error| error.to_string())?;
    // A library is leaked rather than closed: threads of the driver may run its code until the process ends.
    Ok(OpenLibrary { library: Box::leak(Box::new(library)), name: path.display().to_string() })
}

/// Returns the error for a library of which no candidate can be opened.
pub(crate) fn none_opens(what: &str, tried: &[(PathBuf, String)]) -> Error {
    let tried: Vec<String> = tried.iter().map(|(path, why)| format!("{} ({why})", path.display())).collect();
    let tried = if tried.is_empty() { "none is known".to_owned() } else { tried.join(", ") };
    Error::device(format!("cannot open {what}: tried {tried}"))
}

/// Returns the error for a function that a library lacks.
pub(crate) fn lacks(library: &OpenLibrary, function: &str) -> Error {
    let name = &library.name;
    Error::device(format!("{name} lacks the function {function}; install a version that torch supports"))
}

/// Calls `attempt` with each candidate that opens, until it succeeds.
///
/// # Errors
/// The first error of `attempt`, or that no candidate opens.
pub(crate) fn first_of<T>(what: &str, candidates: &[PathBuf], attempt: impl Fn(OpenLibrary) -> Result<T>) -> Result<T> {
    let mut tried = Vec::new();
    let mut first = None;
    for path in candidates {
        match open(path) {
            Ok(library) => match attempt(library) {
                Ok(value) => return Ok(value),
                Err(error) => first = first.or(Some(error)),
            },
            Err(why) => tried.push((path.clone(), why)),
        }
    }
    Err(first.unwrap_or_else(|| none_opens(what, &tried)))
}

/// A function of a library, and its name there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Function<F> {
    pub(crate) name: &'static str,
    pub(crate) call: F,
}

/// Declares the functions of a table: the name of each in both rows, its argument types and its result type. Functions
/// in the blocks `cuda` and `hip` exist in one row only. The types are also kept as text, for a test.
macro_rules! functions {
    (
        both { $($field:ident $cuda:literal $hip:literal ($($argument:ident),*) -> $result:ident;)+ }
        cuda { $($cuda_field:ident $cuda_only:literal ($($cuda_argument:ident),*) -> $cuda_result:ident;)* }
        hip { $($hip_field:ident $hip_only:literal ($($hip_argument:ident),*) -> $hip_result:ident;)* }
    ) => {
        /// Functions of a library that is never closed.
        #[derive(Debug)]
        pub(crate) struct Functions {
            $(pub(crate) $field: Function<unsafe extern "C" fn($($argument),*) -> $result>,)+
            $(pub(crate) $cuda_field: Option<Function<unsafe extern "C" fn($($cuda_argument),*) -> $cuda_result>>,)*
            $(pub(crate) $hip_field: Option<Function<unsafe extern "C" fn($($hip_argument),*) -> $hip_result>>,)*
        }

        /// Names in both rows (empty for none), argument types and result type of each function.
        #[cfg(test)]
        pub(crate) const SYMBOLS: &[(&str, &str, &[&str], &str)] = &[
            $(($cuda, $hip, &[$(stringify!($argument)),*], stringify!($result)),)+
            $(($cuda_only, "", &[$(stringify!($cuda_argument)),*], stringify!($cuda_result)),)*
            $(("", $hip_only, &[$(stringify!($hip_argument)),*], stringify!($hip_result)),)*
        ];

        impl Functions {
            /// Finds all functions of a row.
            ///
            /// # Errors
            /// `Device`, with the name of the first function that is missing.
            pub(crate) fn of(vendor: Vendor, library: &OpenLibrary) -> Result<Self> {
                $(
                    // SAFETY: the table declares the type that the vendor's headers give the function, as a test checks.
                    let $field = unsafe { find(library, match vendor { Vendor::Cuda => $cuda, Vendor::Hip => $hip }) }?;
                )+
                $(
                    // SAFETY: as for the functions of both rows.
                    let $cuda_field = unsafe { (vendor == Vendor::Cuda).then(|| find(library, $cuda_only)).transpose() }?;
                )*
                $(
                    // SAFETY: as for the functions of both rows.
                    let $hip_field = unsafe { (vendor == Vendor::Hip).then(|| find(library, $hip_only)).transpose() }?;
                )*
                Ok(Self { $($field,)+ $($cuda_field,)* $($hip_field,)* })
            }
        }
    };
}
pub(crate) use functions;

/// Finds a function by its name.
///
/// # Safety
/// `F` is the type of a pointer to the function of this name.
pub(crate) unsafe fn find<F: Copy>(library: &OpenLibrary, name: &'static str) -> Result<Function<F>> {
    // SAFETY: the caller knows the function's type. The library is never closed, so the pointer stays valid.
    let symbol = unsafe { library.library.get::<F>(name.as_bytes()) };
    Ok(Function { name, call: *symbol.map_err(|_| lacks(library, name))? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapped_library_comes_before_those_of_the_linker() {
        let maps = "7f00-7f01 r-xp 00000000 08:01 1  /a/nvidia/lib/libnvrtc.so.13\n\
                    7f01-7f02 r--p 00000000 08:01 1  /a/nvidia/lib/libnvrtc.so.13\n\
                    7f02-7f03 r--p 00000000 08:01 2  /a/nvidia/lib/libnvrtc-builtins.so.13.2\n\
                    7f03-7f04 rw-p 00000000 00:00 0  [heap]\n";
        assert_eq!(mapped(maps, "libnvrtc.so"), [PathBuf::from("/a/nvidia/lib/libnvrtc.so.13")]);
        assert!(mapped(maps, "libcuda.so").is_empty());
        let known = Libraries::of(Vendor::Cuda);
        assert!(known.compiler.contains(&"libnvrtc.so.13".into()) && known.driver == [PathBuf::from("libcuda.so.1")]);
        assert_eq!(Libraries::of(Vendor::Hip).compiler.last(), Some(&"libamdhip64.so".into()));
    }

    #[test]
    fn a_library_that_is_nowhere_is_an_error_with_its_names() {
        let error = first_of("CUDA's driver", &["libaccl-none.so.1".into()], |_| Ok(())).unwrap_err();
        assert!(error.message.starts_with("cannot open CUDA's driver: tried libaccl-none.so.1 ("), "{error}");
        let error = first_of("CUDA's driver", &[], |_| Ok(())).unwrap_err();
        assert!(error.message.contains("tried none is known"), "{error}");
    }
}
