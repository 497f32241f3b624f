//! The committed page equals the page that is generated from the table.

use std::path::Path;

#[test]
fn the_page_of_algorithms_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/algorithms.md");
    let page = accl_schedule::algorithms_page();
    #[allow(clippy::disallowed_methods, reason = "a switch for developers, not a setting")]
    let bless = std::env::var_os("ACCL_BLESS").is_some();
    if bless {
        std::fs::write(&path, &page).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(committed == page, "docs/algorithms.md is stale; ACCL_BLESS=1 cargo test -p accl-schedule writes it again");
}
