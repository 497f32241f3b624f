//! The nearest known name for a mistyped one, for messages that suggest the correct spelling.

/// The candidate with the smallest edit distance to `name`; among equals, the first one.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    nearest_within(name, known, usize::MAX)
}

/// The candidate with the smallest edit distance, if that distance is at most `limit`.
pub fn nearest_within<'a>(name: &str, known: impl IntoIterator<Item = &'a str>, limit: usize) -> Option<&'a str> {
    let distances = known.into_iter().map(|candidate| (edit_distance(name, candidate), candidate));
    distances.min_by_key(|(distance, _)| *distance).filter(|(distance, _)| *distance <= limit).map(|(_, near)| near)
}

/// Number of inserted, omitted, replaced and swapped neighbouring characters. This is the restricted
/// Damerau-Levenshtein distance: each character takes part in at most one edit.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut before_last: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=b.len()).collect();
    let mut previous = None;
    for (i, ca) in a.chars().enumerate() {
        let mut row = vec![i + 1];
        for (j, &cb) in b.iter().enumerate() {
            let mut least = (last[j] + usize::from(ca != cb)).min(row[j] + 1).min(last[j + 1] + 1);
            if j > 0 && previous == Some(cb) && ca == b[j - 1] {
                least = least.min(before_last[j - 1] + 1);
            }
            row.push(least);
        }
        before_last = std::mem::replace(&mut last, row);
        previous = Some(ca);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_typo_finds_its_name() {
        let known = ["ACCL_LOG", "ACCL_PORT_RANGE", "ACCL_SOCKET_IFNAME"];
        assert_eq!(nearest("ACCL_PORTRANGE", known), Some("ACCL_PORT_RANGE"));
        assert_eq!(nearest("ACCL_SOCKET_IFNAMES", known), Some("ACCL_SOCKET_IFNAME"));
        assert_eq!(nearest("x", []), None);
        assert_eq!(nearest_within("ACCL_LGO", known, 1), Some("ACCL_LOG"));
        assert_eq!(nearest_within("ACCL_PATH", known, 1), None);
    }

    #[test]
    fn distances_are_those_of_levenshtein_and_an_exchange_is_one_mistake() {
        assert_eq!(edit_distance("kitten", "sitting"), 3);
        assert_eq!(edit_distance("", "abc"), 3);
        assert_eq!(edit_distance("abc", ""), 3);
        assert_eq!(edit_distance("abc", "abc"), 0);
        assert_eq!(edit_distance("abcd", "acbd"), 1);
        assert_eq!(edit_distance("abab", "baba"), 2);
    }
}
