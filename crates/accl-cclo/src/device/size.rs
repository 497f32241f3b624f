//! Sizes in bytes, as text.

/// Largest first, so that the text of a size is the shortest.
const UNITS: [(&str, u32); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

/// From its text; `None`: it is no size below 4 GiB.
pub(super) fn parse(text: &str) -> Option<u32> {
    let unit = UNITS.iter().find_map(|(name, unit)| text.strip_suffix(name).map(|digits| (digits, *unit)));
    let (digits, unit) = unit.unwrap_or((text, 1));
    digits.trim().parse::<u32>().ok()?.checked_mul(unit)
}

/// Its text.
pub(super) fn show(bytes: u32) -> String {
    let unit = UNITS.iter().find(|(_, unit)| bytes > 0 && bytes.is_multiple_of(*unit));
    unit.map_or_else(|| bytes.to_string(), |(name, unit)| format!("{}{name}", bytes / unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_read_as_it_is_shown() {
        for (bytes, text) in [(0, "0"), (100, "100"), (65536, "64KiB"), (4 << 20, "4MiB"), (1 << 30, "1GiB")] {
            assert_eq!((parse(text), show(bytes)), (Some(bytes), text.to_owned()));
        }
        assert_eq!(parse("1024KiB"), Some(1 << 20));
        for text in ["", "KiB", "-1", "4GiB", "1.5MiB", "64kb"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
