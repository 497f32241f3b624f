//! Checks whether this compiler supports AVX-512: the target features are stable from Rust 1.89, one release after the
//! minimum version.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(accl_avx512)");
    if rustc_minor().is_some_and(|minor| minor >= 89) {
        println!("cargo::rustc-cfg=accl_avx512");
    }
}

/// Returns the `y` of the compiler's version `1.y.z`, or `None` if the compiler prints something else.
#[allow(clippy::disallowed_methods)] // cargo names the compiler only in the environment
fn rustc_minor() -> Option<u32> {
    let output = Command::new(std::env::var_os("RUSTC")?).arg("--version").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.strip_prefix("rustc 1.")?.split('.').next()?.parse().ok()
}
