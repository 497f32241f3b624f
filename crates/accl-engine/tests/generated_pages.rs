//! The committed generated page matches the table of settings.

#[test]
fn the_page_of_settings_is_current() {
    let command = "cargo test -p accl-engine --test generated_pages";
    accl_testkit::pages::is_current("environment.md", &accl_engine::settings_page(), command);
}
