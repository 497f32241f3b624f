//! The committed page says what the tables say.

use std::path::Path;

#[test]
fn the_page_of_settings_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/environment.md");
    let page = accl_engine::settings_page();
    #[allow(clippy::disallowed_methods, reason = "a switch for developers, not a setting")]
    let bless = std::env::var_os("ACCL_BLESS").is_some();
    if bless {
        std::fs::write(&path, &page).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == page,
        "docs/environment.md is stale; ACCL_BLESS=1 cargo test -p accl-engine --test generated_pages writes it anew"
    );
}
