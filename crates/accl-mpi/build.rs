//! Compiles constants that the bindings to MPI leave out, because they are pointers in MPI's header.

fn main() {
    println!("cargo:rerun-if-changed=src/constants.c");
    println!("cargo:rerun-if-env-changed=MPICC");
    let mut build = cc::Build::new();
    build.file("src/constants.c");
    // The bindings' own build runs first and reports an unusable compiler.
    if let Ok(library) = build_probe_mpi::probe() {
        if let Some(compiler) = library.mpicc {
            build.compiler(compiler);
        }
        build.includes(library.include_paths);
    }
    build.compile("accl_mpi_constants");
}
