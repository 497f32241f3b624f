//! The committed generated page matches the tables of devices.

#[test]
fn the_page_of_device_tables_is_current() {
    let command = "cargo test -p accl-device --test generated_pages";
    accl_testkit::pages::is_current("device-tables.md", &accl_cclo::tables_page(), command);
}
