//! Copies of every length on every instruction set, and the list of available instruction sets.

use accl_kernels::{Isa, available_isas, copy, copy_with_isa};

/// From this many bytes on, this crate's own vector loops copy.
const LONG_BYTES: usize = 1 << 10;

#[test]
#[cfg(not(miri))]
fn every_instruction_set_copies_all_bytes_and_no_others() {
    let src: Vec<u8> = (0..9000).map(|i| (i * 31 % 251) as u8).collect();
    for isa in available_isas() {
        for (from, to, len) in [(0, 0, 64), (0, 1, 64), (1, 0, 1000), (63, 64, 1024), (5, 7, 4096), (0, 0, 8192)] {
            let mut dst = vec![0xee_u8; 9000];
            // SAFETY: both ranges lie within the vectors, which do not overlap.
            unsafe { copy_with_isa(isa, dst.as_mut_ptr().add(to), src.as_ptr().add(from), len) }.unwrap();
            assert!(dst[to..to + len] == src[from..from + len], "{isa} {from} {to} {len}");
            assert!(dst[..to].iter().chain(&dst[to + len..]).all(|&byte| byte == 0xee), "{isa} {from} {to} {len}");
        }
    }
}

#[test]
fn every_length_around_the_limit_is_copied() {
    let src: Vec<u8> = (0..3000).map(|i| (i % 253) as u8).collect();
    for len in (0..40).chain(LONG_BYTES - 2..LONG_BYTES + 300) {
        let mut dst = vec![0_u8; len];
        // SAFETY: both hold `len` bytes from their addresses on.
        unsafe { copy(dst.as_mut_ptr(), src.as_ptr().add(3), len) };
        assert!(dst[..] == src[3..3 + len], "{len}");
    }
}

#[test]
fn the_plainest_isa_is_always_there_and_comes_first() {
    assert_eq!(available_isas().first(), Some(&Isa::Scalar));
    assert!(available_isas().contains(&Isa::best()));
}

#[test]
fn an_isa_that_is_not_there_is_refused_by_name() {
    for isa in [Isa::Scalar, Isa::Avx2, Isa::Avx512] {
        let (src, mut dst) = ([7_u8; 64], [0_u8; 64]);
        // SAFETY: both hold 64 bytes.
        match unsafe { copy_with_isa(isa, dst.as_mut_ptr(), src.as_ptr(), 64) } {
            Ok(()) => assert!(available_isas().contains(&isa)),
            Err(error) => assert!(error.message.contains(isa.name()), "{error}"),
        }
    }
}

#[test]
#[cfg(not(miri))]
fn every_file_of_an_instruction_set_has_its_row() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/arch");
    let table = std::fs::read_to_string(format!("{folder}/mod.rs")).unwrap();
    let stem = |entry: std::io::Result<std::fs::DirEntry>| {
        entry.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned()
    };
    let files: Vec<String> =
        std::fs::read_dir(folder).unwrap().map(stem).filter(|name| name != "mod" && name != "row").collect();
    assert!(files.len() >= 3, "{files:?}");
    for file in files {
        assert!(table.contains(&format!("    {file}::ROW,\n")), "{file}.rs is not in ROWS of arch/mod.rs");
    }
}
