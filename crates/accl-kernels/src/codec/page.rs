//! The table of codecs in `docs/codecs.md`, generated from their rows.
//!
//! Owns the table's columns and its position in the page. Read [`page_with_table`] first.

use accl_types::Dtype;

use super::CODECS;
use super::settings::{Setting, Settings};
use super::traits::Row;

const BEGIN: &str = "<!-- the table of codecs; from here on generated: ACCL_BLESS=1 cargo test -p accl-kernels -->\n";
const END: &str = "<!-- end of the table of codecs -->\n";

/// Number of elements from which the bits per element are computed.
const MANY: usize = 1 << 20;

/// Returns the page with the table as the rows define it; `None` if the page has no place for the table.
pub fn page_with_table(page: &str) -> Option<String> {
    let (before, rest) = page.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    let mut table = String::from("\n| codec | bits per element | settings | description |\n|---|---|---|---|\n");
    CODECS.iter().for_each(|row| table.push_str(&line(row)));
    Some(format!("{before}{BEGIN}{table}\n{END}{after}"))
}

fn line(row: &Row) -> String {
    let (least, most) = (*row.bits.start(), *row.bits.end());
    let (names, bits) = if row.has(Setting::Bits) {
        let names = format!("`{name}:{least}` to `{name}:{most}`", name = row.name);
        (names, format!("{} to {}", bits_of(row, least), bits_of(row, most)))
    } else {
        (format!("`{}`", row.name), bits_of(row, least))
    };
    let settings = row.settings.iter().filter(|setting| **setting != Setting::Bits);
    let settings: Vec<String> = settings.map(|setting| format!("`{}`", setting.name())).collect();
    let feedback = if row.needs_feedback { "; only with error feedback" } else { "" };
    format!("| {names} | {bits} | {} | {}{feedback} |\n", settings.join(", "), row.description)
}

/// Returns the bits per element of a large float32 tensor, including metadata.
fn bits_of(row: &Row, bits: u8) -> String {
    let codec = row.build(&Settings { bits, ..Settings::default() });
    let bytes = codec.map_or(0, |codec| codec.encoded_bytes(Dtype::F32, MANY));
    let bits = format!("{:.2}", 8.0 * bytes as f64 / MANY as f64);
    bits.trim_end_matches('0').trim_end_matches('.').to_owned()
}
