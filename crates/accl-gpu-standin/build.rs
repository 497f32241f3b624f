//! Compiles the stand-in driver to a shared object, which tests open like a vendor's library.

use std::path::PathBuf;

fn main() {
    #[expect(clippy::disallowed_methods, reason = "cargo names its folders only in the environment")]
    let folder = |name: &str| PathBuf::from(std::env::var(name).expect("cargo sets its own variables"));
    let (source, out) = (folder("CARGO_MANIFEST_DIR").join("src"), folder("OUT_DIR"));
    // The execution model of the kernels' own tests.
    let model = folder("CARGO_MANIFEST_DIR").join("../accl-gpu/tests/host/model.hpp");
    println!("cargo::rerun-if-changed=src");
    println!("cargo::rerun-if-changed={}", model.display());
    let compiler = cc::Build::new().cpp(true).get_compiler();
    let mut command = compiler.to_command();
    command
        .args(["-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"])
        // A function of the interface is declared before it has an alias. Each copy of the library has its own state.
        .args(["-Wno-missing-attributes", "-fno-gnu-unique"])
        .arg(format!("-DSTANDIN_MODEL=\"{}\"", model.display()))
        .arg(format!("-DSTANDIN_FOLDER=\"{}\"", out.join("kernels").display()))
        .arg(source.join("standin.cpp"))
        .arg("-o")
        .arg(out.join("standin.so"))
        .arg("-ldl");
    let status = command.status().expect("the C++ compiler starts");
    assert!(status.success(), "{command:?} failed");
}
