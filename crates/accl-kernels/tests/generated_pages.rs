//! Committed files agree with the table of codecs: the documentation page, and the permanent numbers of codecs.

use std::fs;
use std::path::{Path, PathBuf};

use accl_kernels::codec::{CODECS, page_with_table};

fn at(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

#[allow(clippy::disallowed_methods, reason = "a switch for developers, not a setting")]
fn is_blessing() -> bool {
    std::env::var_os("ACCL_BLESS").is_some()
}

#[test]
fn the_table_of_codecs_in_the_page_is_current() {
    let path = at("../../docs/codecs.md");
    let committed = fs::read_to_string(&path).unwrap();
    let page = page_with_table(&committed).expect("docs/codecs.md has the two lines around the table of codecs");
    if is_blessing() {
        fs::write(&path, &page).unwrap();
    } else {
        assert!(committed == page, "docs/codecs.md is stale; ACCL_BLESS=1 cargo test -p accl-kernels writes it again");
    }
}

/// Numbers of codecs are in the words that ranks of one version compare, in files and in logs. A number must never name
/// another codec.
#[test]
fn numbers_that_codecs_were_given_stay_theirs() {
    let path = at("tests/codec_numbers.txt");
    let committed = fs::read_to_string(&path).unwrap_or_default();
    let mut known: Vec<(u8, &str)> = committed
        .lines()
        .map(|line| {
            line.split_once(' ').and_then(|(id, name)| Some((id.parse().ok()?, name))).expect("a number and a name")
        })
        .collect();
    for &(id, name) in &known {
        let row = CODECS.iter().find(|row| row.id == id || row.name == name);
        let is_same = row.is_some_and(|row| row.id == id && row.name == name);
        assert!(
            is_same,
            "number {id} was given to {name}; a codec that is gone takes its number with it: leave its line"
        );
    }
    let new: Vec<(u8, &str)> =
        CODECS.iter().map(|row| (row.id, row.name)).filter(|given| !known.contains(given)).collect();
    if is_blessing() {
        known.extend(new);
        known.sort();
        fs::write(&path, known.iter().map(|(id, name)| format!("{id} {name}\n")).collect::<String>()).unwrap();
    } else {
        assert!(new.is_empty(), "not on record: {new:?}; ACCL_BLESS=1 cargo test -p accl-kernels keeps them");
    }
}
