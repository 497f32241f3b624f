//! Checks that a committed page, generated from a table, is current.

use std::path::Path;

/// Checks the page `docs/NAME`. With `ACCL_BLESS=1` in the environment, writes it first.
///
/// # Panics
/// Panics if the committed page differs from `page`; the message names `command`, which writes it again.
pub fn is_current(name: &str, page: &str, command: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name);
    #[expect(clippy::disallowed_methods, reason = "a switch for developers, not a setting")]
    let bless = std::env::var_os("ACCL_BLESS").is_some();
    if bless {
        std::fs::write(&path, page).expect("docs/ is writable");
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(committed == page, "docs/{name} is stale; ACCL_BLESS=1 {command} writes it again");
}
