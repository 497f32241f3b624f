//! Sizes in bytes, as text.

/// Unit names and sizes, largest first so that a size's text is the shortest.
const UNITS: &[(&str, u64)] = &[("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

/// Parses a size in bytes, optionally with the unit KiB, MiB, GiB or TiB. Returns `None` if the text is not a size.
pub fn parse_size(text: &str) -> Option<u64> {
    let unit = UNITS.iter().find_map(|(name, unit)| text.strip_suffix(name).map(|digits| (digits, *unit)));
    let (digits, unit) = unit.unwrap_or((text, 1));
    digits.trim().parse::<u64>().ok()?.checked_mul(unit)
}

/// Formats a size as its shortest text, which [`parse_size`] reads.
pub fn show_size(bytes: impl Into<u64>) -> String {
    let bytes = bytes.into();
    let unit = UNITS.iter().find(|(_, unit)| bytes > 0 && bytes.is_multiple_of(*unit));
    unit.map_or_else(|| bytes.to_string(), |(name, unit)| format!("{}{name}", bytes / unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_read_as_it_is_shown() {
        for (bytes, text) in
            [(0_u64, "0"), (100, "100"), (65536, "64KiB"), (4 << 20, "4MiB"), (1 << 30, "1GiB"), (1 << 40, "1TiB")]
        {
            assert_eq!((parse_size(text), show_size(bytes)), (Some(bytes), text.to_owned()));
        }
        assert_eq!(parse_size("1024KiB"), Some(1 << 20));
        for text in ["", "KiB", "-1", "1.5MiB", "64kb", "99999999TiB"] {
            assert_eq!(parse_size(text), None, "{text}");
        }
    }
}
