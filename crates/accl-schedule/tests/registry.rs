//! The table and the files agree.

use std::collections::HashSet;
use std::path::Path;

use accl_schedule::{ALGORITHMS, Topology};

#[test]
fn every_file_is_registered_under_its_name() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/algorithms");
    let mut files = HashSet::new();
    for collective in std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()) {
        if collective.is_dir() {
            for file in std::fs::read_dir(&collective).unwrap().map(|entry| entry.unwrap().path()) {
                let name = |path: &Path| path.file_stem().unwrap().to_str().unwrap().to_owned();
                files.insert((name(&collective), name(&file)));
            }
        }
    }
    let rows: HashSet<_> =
        ALGORITHMS.iter().map(|row| (row.collective.name().to_owned(), row.name.to_owned())).collect();
    let missing: Vec<_> = files.difference(&rows).collect();
    assert!(missing.is_empty(), "files without a line in the table of src/algorithms/mod.rs: {missing:?}");
    let misnamed: Vec<_> = rows.difference(&files).collect();
    assert!(misnamed.is_empty(), "rows whose name or collective differs from their file: {misnamed:?}");
}

#[test]
fn ids_are_unique() {
    let mut seen = HashSet::new();
    let next = (1..=u8::MAX).find(|id| ALGORITHMS.iter().all(|row| row.id != *id));
    for row in ALGORITHMS {
        assert!(row.id > 0 && seen.insert(row.id), "id {} of {} is taken; {next:?} is free", row.id, row.name);
    }
}

#[test]
fn ids_do_not_change() {
    // Ids are sent between processes, which may run different versions.
    let ids: Vec<_> = ALGORITHMS.iter().map(|row| format!("{} {}/{}", row.id, row.collective, row.name)).collect();
    let known = [
        "1 all_reduce/direct",
        "2 all_reduce/direct_two_phase",
        "3 all_reduce/recursive_doubling",
        "4 all_reduce/rabenseifner",
        "5 all_reduce/ring",
        "20 reduce_scatter/direct",
        "40 all_gather/direct",
        "61 broadcast/binomial",
        "81 reduce/binomial",
        "100 gather/flat",
        "120 scatter/flat",
        "140 all_to_all/direct",
        "160 barrier/dissemination",
    ];
    for known in known {
        assert!(ids.iter().any(|id| id == known), "{known} is gone");
    }
}

#[test]
fn one_rank_alone_sends_nothing() {
    for row in ALGORITHMS.iter().filter(|row| (row.applies)(1, &Topology::flat(1))) {
        assert_eq!((row.steps)(1, &Topology::flat(1)), 0, "{} {}", row.collective, row.name);
        assert_eq!((row.bytes)(1, &Topology::flat(1)).num, 0, "{} {}", row.collective, row.name);
    }
}
