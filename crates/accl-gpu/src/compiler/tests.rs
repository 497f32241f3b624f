//! Tests of the compiler with the vendors' libraries, and of the table with their headers.
//!
//! NVRTC and its headers lie in torch's packages, HIP's headers in triton's, hiprtc in a package of Debian. Where one is
//! missing, its test prints why and passes.

use std::path::PathBuf;
use std::process::Command;

use accl_kernels::codec::parse;
use accl_types::{Dtype, ReduceOp};

use super::*;
use crate::kernels::{KernelSet, ReductionSet};
use crate::library::Libraries;
use crate::support::{self, Prototypes};

/// Targets of CUDA that every release makes code for.
const CUDA_TARGETS: &[&str] = &["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"];
/// Targets of HIP whose wavefronts have 64 and 32 lanes.
const HIP_TARGETS: &[&str] = &["gfx90a", "gfx1030"];

/// A kernel with a template, for tests of the compiler itself.
const SOURCE: &str = "
template <int BITS> __device__ float level(float x) { return rintf(x * float((1 << BITS) - 1)); }
template <int BITS> __global__ void quantize(const float *from, unsigned *to, unsigned count) {
  const unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count) to[at] = unsigned(level<BITS>(from[at] / DIVISOR));
}
extern \"C\" __global__ void plain(unsigned *to) { *to = 1; }
";
const NAMES: &[&str] = &["quantize<4>", "quantize<8>", "plain"];
const OPTIONS: &[&str] = &["-DDIVISOR=3.0f"];

/// A source that every compiler must accept, for all targets.
struct Sample {
    source: String,
    names: Vec<&'static str>,
    options: Vec<String>,
}

/// Sources that are compiled for all targets.
fn samples() -> Vec<Sample> {
    vec![Sample {
        source: SOURCE.to_owned(),
        names: NAMES.to_vec(),
        options: OPTIONS.iter().map(|option| (*option).to_owned()).collect(),
    }]
}

fn nvrtc() -> Result<Compiler> {
    let path = support::nvrtc().map_err(Error::device)?;
    Compiler::open(Vendor::Cuda, &[path], i32::MAX)
}

#[test]
fn nvrtc_makes_code_without_spills_for_all_targets() {
    let compiler = match nvrtc() {
        Ok(compiler) => compiler,
        Err(why) => return println!("skipped: {why}"),
    };
    for Sample { source, names, options } in samples() {
        let options: Vec<&str> = options.iter().map(String::as_str).chain(["--ptxas-options=-v"]).collect();
        for target in CUDA_TARGETS {
            let compiled = compiler.compile(&source, &names, target, &options).unwrap();
            assert_no_spills(target, &compiled, names.len());
        }
    }
}

/// Codecs with settings that each take another way through the source. `ACCL_TEST_ALL_TARGETS=1` compiles each for all
/// targets, which takes some minutes; otherwise for one.
const CODECS: &[&str] = &[
    "raw",
    "bf16",
    "fp16",
    "maxmin:4",
    "maxmin:3,bucket=64,rounding=stochastic",
    "maxmin:8,bucket=8192,rounding=correlated,skip_incomplete",
    "absmax:2,meta=float16",
    "sign",
    "e4m3",
    "mxfp8_e5m2",
    "mxfp4",
    "nvfp4",
    "hadamard:4,bucket=8192",
    "topk:4",
];

#[test]
fn nvrtc_makes_the_kernels_of_the_first_codecs_without_spills() {
    check_kernels(&CODECS[..CODECS.len() / 2]);
}

#[test]
fn nvrtc_makes_the_kernels_of_the_other_codecs_without_spills() {
    check_kernels(&CODECS[CODECS.len() / 2..]);
}

/// Compiles the kernels of codecs, and the kernels of sums.
fn check_kernels(codecs: &[&str]) {
    let compiler = match nvrtc() {
        Ok(compiler) => compiler,
        Err(why) => return println!("skipped: {why}"),
    };
    let dtypes = [Dtype::F32, Dtype::F16, Dtype::BF16];
    let sums = dtypes.map(|dtype| ("sums", KernelSet::of_sums(dtype)));
    let codecs = codecs.iter().enumerate().map(|(number, text)| {
        let codec = parse(text).unwrap().summary();
        (*text, KernelSet::of_codec(codec, dtypes[number % 3]))
    });
    for (number, (text, set)) in sums.into_iter().chain(codecs).enumerate() {
        let set = set.unwrap_or_else(|| panic!("{text} has no kernels"));
        let mut names: Vec<&str> = set.kernels().iter().map(|&kernel| set.entry(kernel)).collect();
        names.sort_unstable();
        names.dedup();
        let options = set.options(set.kernels());
        let options: Vec<&str> = options.iter().map(String::as_str).chain(["--ptxas-options=-v"]).collect();
        for target in targets(number) {
            let compiled = compiler.compile(&set.source(), &names, target, &options).unwrap();
            assert_no_spills(&format!("{text} for {target}"), &compiled, names.len());
        }
    }
}

#[test]
fn nvrtc_makes_the_kernels_of_reductions_without_spills() {
    let compiler = match nvrtc() {
        Ok(compiler) => compiler,
        Err(why) => return println!("skipped: {why}"),
    };
    let pairs = ReduceOp::ALL.iter().flat_map(|op| Dtype::ALL.iter().map(move |dtype| (*op, *dtype)));
    let mut sets: Vec<ReductionSet> = pairs.filter_map(|(op, dtype)| ReductionSet::new(op, dtype)).collect();
    sets.sort_by_key(ReductionSet::options);
    sets.dedup_by_key(|set| set.options());
    for (number, set) in sets.iter().enumerate() {
        let options = set.options();
        let options: Vec<&str> = options.iter().map(String::as_str).chain(["--ptxas-options=-v"]).collect();
        for target in targets(number) {
            let compiled = compiler.compile(&set.source(), &[set.entry()], target, &options).unwrap();
            assert_no_spills(&format!("{set} for {target}"), &compiled, 1);
        }
    }
}

/// Returns the targets for the sample with a number: one, or all if `ACCL_TEST_ALL_TARGETS` is set.
fn targets(number: usize) -> impl Iterator<Item = &'static str> {
    #[expect(clippy::disallowed_methods, reason = "tests alone read this variable")]
    let takes_all = std::env::var_os("ACCL_TEST_ALL_TARGETS").is_some();
    let all = CUDA_TARGETS.iter().enumerate();
    all.filter(move |(index, _)| takes_all || *index == number % CUDA_TARGETS.len()).map(|(_, target)| *target)
}

/// Checks that the log of the compiler has no register of a kernel in memory.
fn assert_no_spills(what: &str, compiled: &Compiled, kernels: usize) {
    assert!(compiled.code.starts_with(b"\x7fELF"), "{what}");
    assert_eq!(compiled.lowered.len(), kernels, "{what}");
    let spills: Vec<&str> = compiled.log.lines().filter(|line| line.contains("bytes spill")).collect();
    assert!(spills.len() >= kernels, "{what}: the log has the figures of each kernel: {}", compiled.log);
    for line in spills {
        assert!(line.contains(" 0 bytes spill stores, 0 bytes spill loads"), "{what}: {line}\n{}", compiled.log);
    }
}

#[test]
fn nvrtcs_operators_are_rounded_each_by_itself() {
    let compiler = match nvrtc() {
        Ok(compiler) => compiler,
        Err(why) => return println!("skipped: {why}"),
    };
    let code = |value: &str| {
        let source = format!("extern \"C\" __global__ void one(float *x) {{ *x = {value}; }}");
        compiler.compile(&source, &["one"], "sm_80", &[]).unwrap().code
    };
    // Options do not change the assembler's instructions.
    let sum = |name| {
        format!(
            "[=] {{ float sum; asm(\"{name} %0, %1, %2;\" : \"=f\"(sum) : \"f\"(x[1]), \"f\"(x[2])); return sum; }}()"
        )
    };
    for (plain, exact, other) in [
        ("x[1] * x[2] + x[3]", "__fadd_rn(__fmul_rn(x[1], x[2]), x[3])", "__fmaf_rn(x[1], x[2], x[3])"),
        ("x[1] / x[2]", "__fdiv_rn(x[1], x[2])", "__fdividef(x[1], x[2])"),
        ("sqrtf(x[1])", "__fsqrt_rn(x[1])", "__fsqrt_rd(x[1])"),
        ("x[1] + x[2]", &sum("add.rn.f32"), &sum("add.rn.ftz.f32")),
    ] {
        assert!(code(plain) == code(exact), "{plain} is not {exact}");
        assert!(code(plain) != code(other), "{plain} is {other}");
    }
}

#[test]
fn nvrtcs_names_are_lowered_and_its_log_is_in_the_error() {
    let compiler = match nvrtc() {
        Ok(compiler) => compiler,
        Err(why) => return println!("skipped: {why}"),
    };
    let compiled = compiler.compile(SOURCE, NAMES, "sm_80", OPTIONS).unwrap();
    assert_eq!(compiled.lowered[0].to_str().unwrap(), "_Z8quantizeILi4EEvPKfPjj");
    assert_eq!(compiled.lowered[2].to_str().unwrap(), "plain");
    let error = compiler.compile("__global__ void wrong() { missing(); }", &["wrong"], "sm_80", &[]).unwrap_err();
    for words in [
        "nvrtcCompileProgram failed with NVRTC_ERROR_COMPILATION (6) for sm_80: ",
        "torch-accl.cu(1): error",
        "missing",
    ] {
        assert!(error.message.contains(words), "{error}");
    }
    let error = compiler.compile(SOURCE, NAMES, "sm_11", OPTIONS).unwrap_err();
    assert!(error.message.contains("for sm_11: "), "{error}");
    let error = compiler.compile(SOURCE, &["quantize<4"], "sm_80", OPTIONS).unwrap_err();
    assert!(error.message.contains("nvrtc"), "{error}");
    assert_eq!(compiler.cuda_target(Capability { major: 9, minor: 0 }).unwrap(), "sm_90");
    let error = compiler.cuda_target(Capability { major: 3, minor: 5 }).unwrap_err();
    assert!(error.message.contains("makes no code for a device of compute capability 3.5, only for "), "{error}");
}

#[test]
fn a_driver_that_is_too_old_is_named() {
    let path = match support::nvrtc() {
        Ok(path) => path,
        Err(why) => return println!("skipped: {why}"),
    };
    let error = Compiler::open(Vendor::Cuda, &[path], 10).unwrap_err();
    assert!(error.message.starts_with("the driver is too old for "), "{error}");
    assert!(error.message.contains("it loads code for CUDA 10, and the compiler makes code for CUDA "), "{error}");
}

#[test]
fn code_of_an_older_minor_version_runs_and_of_another_major_version_does_not() {
    let known = [75, 80, 86, 89, 90, 100, 103, 120];
    let newest = |major, minor| target::newest(&known, Capability { major, minor });
    assert_eq!(newest(8, 6), Some("sm_86".to_owned()));
    assert_eq!(newest(8, 8), Some("sm_86".to_owned()));
    assert_eq!(newest(12, 1), Some("sm_120".to_owned()));
    assert_eq!(newest(10, 1), Some("sm_100".to_owned()));
    assert_eq!(newest(7, 0), None);
    assert_eq!(newest(13, 0), None);
}

#[test]
fn a_long_log_is_shortened() {
    assert_eq!(shortened("one"), "one");
    assert_eq!(shortened(""), "the compiler's log is empty");
    let long = shortened(&"x".repeat(MOST_LOG + 7));
    assert!(long.ends_with("x ... (7 more characters)") && long.len() < MOST_LOG + 40, "{long}");
}

#[test]
fn prototypes_are_those_of_hiprtcs_header_and_it_makes_code_for_64_and_32_lanes() {
    let folder = tempfile::tempdir().unwrap();
    let root = match support::hip(folder.path()) {
        Ok(root) => root,
        Err(why) => return println!("skipped: no libamdhip64 of Debian's: {why}"),
    };
    let check = Prototypes { header: "hip/hiprtc.h", vendor: Vendor::Hip, types: TYPES, symbols: SYMBOLS };
    check.run_in(&[root.join("usr/include")], "int (*wrong)(hiprtcProgram) = hiprtcDestroyProgram;", "");
    // The dynamic linker reads the search path when a process starts, so another process compiles.
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "compiler::tests::hiprtc_in_a_process_of_its_own", "--ignored", "--nocapture"])
        .env("LD_LIBRARY_PATH", root.join(support::LIBRARIES))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("hiprtc: all targets"),
        "{said}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
#[ignore = "another test starts it with a search path for libraries"]
fn hiprtc_in_a_process_of_its_own() {
    let mut candidates = Libraries::of(Vendor::Hip).compiler;
    candidates.push(PathBuf::from("libamdhip64.so.5"));
    let compiler = Compiler::open(Vendor::Hip, &candidates, i32::MAX).unwrap();
    for Sample { source, names, options } in samples() {
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        for target in HIP_TARGETS {
            let compiled = compiler.compile(&source, &names, target, &options).unwrap();
            assert!(compiled.code.len() > 1000, "{target}: {} bytes", compiled.code.len());
            assert_eq!(compiled.lowered.len(), names.len());
        }
    }
    let error = compiler.compile("__global__ void wrong() { missing(); }", &["wrong"], "gfx90a", &[]).unwrap_err();
    assert!(
        error.message.contains("hiprtcCompileProgram failed with ") && error.message.contains("missing"),
        "{error}"
    );
    println!("hiprtc: all targets");
}

/// Types of the table in C, by row.
const TYPES: &[(&str, &str, &str, usize)] = &[
    ("Program", "nvrtcProgram", "hiprtcProgram", size_of::<Program>()),
    ("Code", "nvrtcResult", "hiprtcResult", size_of::<Code>()),
    ("Int", "int", "int", size_of::<functions::Int>()),
    ("Text", "const char *", "const char *", size_of::<functions::Text>()),
    ("Texts", "const char *const *", "const char **", size_of::<functions::Texts>()),
    ("OutProgram", "nvrtcProgram *", "hiprtcProgram *", size_of::<functions::OutProgram>()),
    ("OutInt", "int *", "int *", size_of::<functions::OutInt>()),
    ("OutSize", "size_t *", "size_t *", size_of::<functions::OutSize>()),
    ("OutText", "const char **", "const char **", size_of::<functions::OutText>()),
    ("OutBytes", "char *", "char *", size_of::<functions::OutBytes>()),
];

#[test]
fn prototypes_are_those_of_nvrtcs_header() {
    let check = Prototypes { header: "nvrtc.h", vendor: Vendor::Cuda, types: TYPES, symbols: SYMBOLS };
    check.run("int (*wrong)(nvrtcProgram) = nvrtcDestroyProgram;", "");
}
