//! Compiles what the bindings to MPI leave out: constants that are pointers in its header.

fn main() {
    println!("cargo:rerun-if-changed=src/constants.c");
    println!("cargo:rerun-if-env-changed=MPICC");
    let mut build = cc::Build::new();
    build.file("src/constants.c");
    // What is wrong with the library's compiler is said by the bindings' own build, which comes first.
    if let Ok(library) = build_probe_mpi::probe() {
        if let Some(compiler) = library.mpicc {
            build.compiler(compiler);
        }
        build.includes(library.include_paths);
    }
    build.compile("accl_mpi_constants");
}
