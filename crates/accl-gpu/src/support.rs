//! Help for the tests of the tables: where the vendors' libraries and headers lie, and the check of prototypes.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::library::Vendor;

/// Variable with the path of NVRTC's library, for a run outside of the project's virtual environment.
const NVRTC: &str = "ACCL_TEST_NVRTC";
/// Variable with which tests download HIP.
const HIP: &str = "ACCL_TEST_HIP";

/// Returns the path of NVRTC's library. The error says where it was looked for.
pub(crate) fn nvrtc() -> Result<PathBuf, String> {
    #[expect(clippy::disallowed_methods, reason = "no setting, but an argument of tests")]
    if let Some(path) = std::env::var_os(NVRTC) {
        return Ok(PathBuf::from(path));
    }
    let files = packages().into_iter().flat_map(|folder| below(&folder, &["nvidia", "*", "lib"]));
    let mut found = files.flat_map(|folder| entries(&folder));
    let name = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libnvrtc.so."));
    found.find(name).ok_or_else(|| {
        format!("{NVRTC} is not set, and no libnvrtc.so.* is in .venv/lib/python*/site-packages/nvidia/*/lib")
    })
}

/// Folders of Python packages: in the project's virtual environment, and around the NVRTC that was named.
fn packages() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut all = below(&root, &[".venv", "lib", "python*", "site-packages"]);
    #[expect(clippy::disallowed_methods, reason = "no setting, but an argument of tests")]
    if let Some(path) = std::env::var_os(NVRTC) {
        // nvidia/cu13/lib/libnvrtc.so.13
        all.extend(Path::new(&path).ancestors().nth(4).map(Path::to_owned));
    }
    all
}

/// Returns the folders below `root` along a path, whose names may end in a star.
fn below(root: &Path, names: &[&str]) -> Vec<PathBuf> {
    let Some((first, rest)) = names.split_first() else { return vec![root.to_owned()] };
    let fits = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        first.strip_suffix('*').map_or(name == *first, |stem| name.starts_with(stem))
    };
    entries(root).into_iter().filter(fits).flat_map(|path| below(&path, rest)).collect()
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    all.sort();
    all
}

/// Folder of Debian's libraries, below a root.
pub(crate) const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
/// Packages of Debian's HIP: the library, its header, and what the library needs.
const HIP_PACKAGES: &[&str] = &[
    "libamdhip64-5",
    "libamdhip64-dev",
    "libamd-comgr2",
    "libhsa-runtime64-1",
    "libhsakmt1",
    "libdrm-amdgpu1",
    "libdrm2",
    "libnuma1",
    "libllvm15",
    "libelf1",
    "libedit2",
    "libz3-4",
    "libbsd0",
    "libmd0",
    "libxml2",
    "libicu72",
    "libtinfo6",
];

/// Unpacks Debian's HIP into a folder. Returns the root of its files. The error says why that failed.
pub(crate) fn hip(folder: &Path) -> Result<PathBuf, String> {
    #[expect(clippy::disallowed_methods, reason = "tests alone read this variable")]
    if std::env::var_os(HIP).is_none() {
        return Err(format!("Debian's HIP is downloaded only if {HIP} is set"));
    }
    let run = |program: &str, arguments: &[&str]| {
        // A slow mirror must not block the test.
        let output = Command::new("timeout").arg("120").arg(program).args(arguments).current_dir(folder).output();
        let output = output.map_err(|error| format!("{program}: {error}"))?;
        let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
        if output.status.success() { Ok(()) } else { Err(format!("{program} {}: {said}", arguments.join(" "))) }
    };
    run("apt-get", &[&["download"], HIP_PACKAGES].concat())?;
    let root = folder.join("root");
    for path in entries(folder) {
        if path.extension().is_some_and(|extension| extension == "deb") {
            run("dpkg", &["-x", &path.to_string_lossy(), &root.to_string_lossy()])?;
        }
    }
    Ok(root)
}

/// The check of a table against a vendor's header.
pub(crate) struct Prototypes {
    /// Header, relative to a folder of headers.
    pub(crate) header: &'static str,
    pub(crate) vendor: Vendor,
    /// Name of each type in the table, its type in C by row, and its size in Rust.
    pub(crate) types: &'static [(&'static str, &'static str, &'static str, usize)],
    /// Names in both rows, argument types and result type of each function.
    pub(crate) symbols: &'static [(&'static str, &'static str, &'static [&'static str], &'static str)],
}

impl Prototypes {
    /// Checks the table with a header in Python's packages. `wrong` is code that must be rejected, and `extra` code that must
    /// be accepted. Prints why if the header is missing here.
    pub(crate) fn run(&self, wrong: &str, extra: &str) {
        let folders: &[&[&str]] = match self.vendor {
            Vendor::Cuda => &[&["nvidia", "*", "include"]],
            Vendor::Hip => &[&["triton", "backends", "amd", "include"], &["_rocm_sdk_*", "include"]],
        };
        let folders = packages().into_iter().flat_map(|root| folders.iter().flat_map(move |names| below(&root, names)));
        let all: Vec<PathBuf> = folders.collect();
        if !all.iter().any(|folder| folder.join(self.header).is_file()) {
            return println!("skipped: no {} in the Python packages of .venv", self.header);
        }
        self.run_in(&all, wrong, extra);
    }

    /// Compiles a file in which pointers of the table's types are initialised with the functions of a header in `folders`.
    pub(crate) fn run_in(&self, folders: &[PathBuf], wrong: &str, extra: &str) {
        let text = self.text();
        compile(&format!("{text}{extra}"), folders).unwrap_or_else(|said| panic!("{said}\n{text}"));
        assert!(compile(&format!("{text}{extra}{wrong}\n"), folders).is_err(), "a wrong prototype is found");
    }

    fn text(&self) -> String {
        let mut text = format!(
            "#define __HIP_PLATFORM_AMD__ 1\n#include <cstddef>\n#include <string_view>\n#include <{}>\n\
             #define TEXT_OF(name) #name\n#define TEXT(name) TEXT_OF(name)\n",
            self.header
        );
        for (name, cuda, hip, bytes) in self.types {
            let c = if self.vendor == Vendor::Cuda { cuda } else { hip };
            writeln!(text, "using Our{name} = {c};\nstatic_assert(sizeof(Our{name}) == {bytes}, \"{name}\");").unwrap();
        }
        for (cuda, hip, arguments, result) in self.symbols {
            let name = if self.vendor == Vendor::Cuda { cuda } else { hip };
            if name.is_empty() {
                continue;
            }
            let ours = arguments.iter().map(|argument| format!("Our{argument}")).collect::<Vec<_>>().join(", ");
            writeln!(text, "Our{result} (*our_{name})({ours}) = {name};").unwrap();
            // A header's macro that renames the name means that the table has an old version of the function.
            writeln!(text, "static_assert(std::string_view(TEXT({name})) == \"{name}\");").unwrap();
        }
        text
    }
}

/// Checks C++ code. The error is what the compiler has printed.
fn compile(text: &str, folders: &[PathBuf]) -> Result<(), String> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prototypes.cpp");
    std::fs::write(&file, text).unwrap();
    let includes = folders.iter().map(|folder| format!("-I{}", folder.display()));
    let output =
        Command::new("g++").args(["-std=c++17", "-fsyntax-only", "-w"]).args(includes).arg(&file).output().unwrap();
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}
