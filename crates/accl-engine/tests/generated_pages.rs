//! The committed generated pages match the tables.

use std::path::Path;

fn is_current(name: &str, page: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name);
    #[allow(clippy::disallowed_methods, reason = "a switch for developers, not a setting")]
    let bless = std::env::var_os("ACCL_BLESS").is_some();
    if bless {
        std::fs::write(&path, page).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == page,
        "docs/{name} is stale; ACCL_BLESS=1 cargo test -p accl-engine --test generated_pages writes it again"
    );
}

#[test]
fn the_page_of_settings_is_current() {
    is_current("environment.md", &accl_engine::settings_page());
}

#[test]
fn the_page_of_device_tables_is_current() {
    is_current("device-tables.md", &accl_cclo::tables_page());
}
