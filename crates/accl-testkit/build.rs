//! Compiles the example transport in C, which the tests run.

fn main() {
    let include = "../../python/torch_accl/include";
    let example = "../../examples/transport/datagrams.c";
    println!("cargo::rerun-if-changed={include}");
    println!("cargo::rerun-if-changed={example}");
    cc::Build::new().file(example).include(include).std("c11").warnings_into_errors(true).compile("datagrams");
}
