//! The instruction sets: one file and one row each.
//!
//! The files hold no algorithms: they compile the loops of `reduce` with their target features, and add what the
//! compiler cannot find by itself (conversion of float16). All of them give the same bits. Which of them a process uses is
//! chosen in `dispatch`.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(all(target_arch = "x86_64", accl_avx512))]
mod avx512;
mod row;
mod scalar;

pub(crate) use row::{CopyFn, Row};

/// The one that every machine has.
pub(crate) const PLAINEST: &Row = &scalar::ROW;

/// From the plainest to the best.
pub(crate) const ROWS: &[Row] = &[
    scalar::ROW,
    #[cfg(target_arch = "x86_64")]
    avx2::ROW,
    #[cfg(all(target_arch = "x86_64", accl_avx512))]
    avx512::ROW,
];

#[cfg(all(test, target_arch = "x86_64", accl_avx512, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_an_instruction_set_has_its_row() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/arch");
        let mut files: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned())
            .filter(|stem| stem != "mod" && stem != "row")
            .collect();
        let mut rows: Vec<String> = ROWS.iter().map(|row| row.isa.name().to_owned()).collect();
        files.sort();
        rows.sort();
        assert_eq!(files, rows);
    }
}
