//! Lists of CPUs as Linux writes them: `0-3,8`.

/// Maximum length of a range minus one. No machine has more CPUs, so a longer range is refused.
const LONGEST_RUN: u32 = 1 << 16;

/// Parses a CPU list; the numbers keep their written order. Returns `None` if the text is not a CPU list.
pub fn parse_cpus(text: &str) -> Option<Vec<u32>> {
    let mut numbers = Vec::new();
    for run in text.split(',').map(str::trim).filter(|run| !run.is_empty()) {
        let (first, last) = run.split_once('-').unwrap_or((run, run));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        if last < first || last - first > LONGEST_RUN {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

/// Formats the numbers as a CPU list that [`parse_cpus`] reads.
pub fn show_cpus(numbers: &[u32]) -> String {
    let run = |run: &[u32]| match run {
        [first, .., last] => format!("{first}-{last}"),
        one => one.iter().map(u32::to_string).collect(),
    };
    let runs: Vec<String> = numbers.chunk_by(|a, b| a.checked_add(1) == Some(*b)).map(run).collect();
    runs.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_as_linux_writes_them_and_keep_their_order() {
        for (text, numbers) in
            [("", vec![]), ("5", vec![5]), ("0-3,8", vec![0, 1, 2, 3, 8]), ("6-7,0-1", vec![6, 7, 0, 1])]
        {
            assert_eq!(parse_cpus(text).unwrap(), numbers);
            assert_eq!(show_cpus(&numbers), text);
        }
        assert_eq!(parse_cpus(" 1 , 2").unwrap(), [1, 2]);
        for text in ["a", "3-1", "-1", "1-", "0-99999999", "4294967296"] {
            assert_eq!(parse_cpus(text), None, "{text}");
        }
    }
}
