//! "Did you mean": the nearest of several known names.

/// The name of `known` with the smallest edit distance to `name`, first of equals. `None` if `known` is empty.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    known.into_iter().min_by_key(|candidate| edit_distance(name, candidate))
}

fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, &cb) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(ca != cb);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
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
    }

    #[test]
    fn distances_are_those_of_levenshtein() {
        assert_eq!(edit_distance("kitten", "sitting"), 3);
        assert_eq!(edit_distance("", "abc"), 3);
        assert_eq!(edit_distance("abc", "abc"), 0);
    }
}
