//! Compiles the C++ shim against the torch of the interpreter for which the module is built.
//!
//! Asks that interpreter for torch's version, headers and libraries, and refuses a torch minor other than the requested
//! one. The module states what it was built for (`src/built.rs`). Nothing is written outside the build's own directory,
//! so builds for several torches can share a source tree.

#![allow(clippy::disallowed_methods, reason = "variables of cargo and of the build are not product settings")]

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The torch minor to build for if `TORCH` is not set.
const DEFAULT_TORCH: &str = "2.15";

/// Prints one fact per line: torch's version, the file that states it, the C++ ABI, CPython's include directory,
/// torch's include directories, torch's library directory.
const PROBE: &str = "
import sysconfig
try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    raise SystemExit(f'torch cannot be imported: {error}')
print(torch.__version__)
print(torch.version.__file__)
print(int(torch._C._GLIBCXX_USE_CXX11_ABI))
print(sysconfig.get_path('include'))
print(';'.join(cpp_extension.include_paths()))
print(cpp_extension.library_paths()[0])
";

const SOURCES: &[&str] = &[
    "accelerator.cpp",
    "backend.cpp",
    "binding.cpp",
    "errors.cpp",
    "in_flight.cpp",
    "interpreter.cpp",
    "profile.cpp",
    "view_bits.cpp",
    "work.cpp",
];

/// Environment variable set for lints, which check the module without linking it.
const WITHOUT_SHIM: &str = "ACCL_WITHOUT_SHIM";

/// The oldest torch that users can build for.
const FIRST_TORCH: (u32, u32) = (2, 13);

/// Environment variable that allows an older torch, for the tests with a GPU alone (decision 69). Their folder has the
/// header `old_torch.h`, which supplies what such a torch lacks.
const OLD_TORCH: &str = "ACCL_TEST_OLD_TORCH";
const OLD_TORCH_FOLDER: &str = "tests/gpu";

fn main() {
    let root = Path::new(&variable("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository's root");
    let shim = root.join("cpp_shim");
    for path in [Path::new("src/bridge.rs"), Path::new("build.rs"), &shim] {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    for name in ["TORCH", "PYO3_PYTHON", WITHOUT_SHIM, OLD_TORCH] {
        println!("cargo::rerun-if-env-changed={name}");
    }

    let torch = Torch::probe();
    let minor = torch.minor();
    torch.refuse_unless_wanted(&minor);
    // Installing another torch in the same place changes the headers, so it must rebuild the shim.
    println!("cargo::rerun-if-changed={}", torch.version_file);
    println!("cargo::rustc-env=ACCL_BUILT_FOR_TORCH={minor}");
    println!("cargo::rustc-env=ACCL_BUILT_WITH_CXX11_ABI={}", torch.cxx11_abi);
    // Lints only check Rust, and compiling the shim would take longer than they do.
    if env::var_os(WITHOUT_SHIM).is_some() {
        return;
    }
    compile(&root, &shim, &torch);
    println!("cargo::rustc-link-search=native={}", torch.libraries.display());
    // Each library is named, because the module must list its dependencies: torch's libraries are loaded privately.
    // There is no rpath, because torch is imported first.
    for library in ["c10", "torch_cpu", "torch_python"] {
        println!("cargo::rustc-link-lib=dylib={library}");
    }
}

fn compile(root: &Path, shim: &Path, torch: &Torch) {
    // One translation unit: nine tenths of each file's compile time are spent in torch's headers.
    let whole = Path::new(&variable("OUT_DIR")).join("shim.cpp");
    let includes = SOURCES.iter().map(|source| format!("#include \"{source}\"\n")).collect::<String>();
    fs::write(&whole, includes).unwrap_or_else(|why| panic!("{} cannot be written: {why}", whole.display()));
    let mut build = cxx_build::bridge("src/bridge.rs");
    build
        .file(&whole)
        .std("c++20")
        .opt_level(2)
        .debug(false)
        .define("_GLIBCXX_USE_CXX11_ABI", torch.cxx11_abi.as_str())
        .define("TORCH_EXTENSION_NAME", "_native")
        .include(shim)
        // System includes suppress warnings in torch's headers.
        .flag("-isystem")
        .flag(&torch.python_include)
        .flag("-fvisibility=hidden")
        // Messages name source files by their paths in the repository.
        .flag(format!("-ffile-prefix-map={}=cpp_shim", shim.display()))
        .warnings(true)
        .flag("-Werror=switch");
    for include in &torch.includes {
        build.flag("-isystem").flag(include);
    }
    if torch.is_old() {
        build.include(root.join(OLD_TORCH_FOLDER));
    }
    build.compile("accl_shim");
}

/// The interpreter's facts about its torch.
struct Torch {
    version: String,
    version_file: String,
    cxx11_abi: String,
    python_include: String,
    includes: Vec<String>,
    libraries: PathBuf,
}

impl Torch {
    fn probe() -> Self {
        let python = env::var("PYO3_PYTHON").unwrap_or_else(|_| "python3".to_owned());
        let output = Command::new(&python)
            .args(["-c", PROBE])
            .output()
            .unwrap_or_else(|error| panic!("{python} could not be run: {error}; set PYO3_PYTHON to the interpreter"));
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            panic!("{python}: {}; install torch {} for it", said.trim(), wanted());
        }
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let mut lines = said.lines().map(str::to_owned);
        let mut next = || lines.next().expect("one line for each question of the probe");
        Self {
            version: next(),
            version_file: next(),
            cxx11_abi: next(),
            python_include: next(),
            includes: next().split(';').map(str::to_owned).collect(),
            libraries: next().into(),
        }
    }

    /// Returns `2.15` for `2.15.0+cpu`.
    fn minor(&self) -> String {
        minor_of(&self.version)
    }

    /// Whether users cannot have this torch.
    fn is_old(&self) -> bool {
        let mut parts = self.version.split('.').map(|part| part.parse().unwrap_or(u32::MAX));
        (parts.next().unwrap_or(0), parts.next().unwrap_or(0)) < FIRST_TORCH
    }

    fn refuse_unless_wanted(&self, minor: &str) {
        let (first, second) = FIRST_TORCH;
        assert!(
            !self.is_old() || env::var_os(OLD_TORCH).is_some(),
            "this interpreter has torch {}, and torch_accl needs torch {first}.{second} or newer: install that",
            self.version
        );
        let wanted = wanted();
        assert!(
            minor == wanted,
            "this interpreter has torch {}, but the build is for torch {wanted}: install torch {wanted}, or set TORCH={minor}",
            self.version
        );
    }
}

/// The requested torch minor.
fn wanted() -> String {
    minor_of(&env::var("TORCH").ok().filter(|text| !text.is_empty()).unwrap_or_else(|| DEFAULT_TORCH.to_owned()))
}

fn minor_of(version: &str) -> String {
    version.split('.').take(2).collect::<Vec<_>>().join(".")
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"))
}
