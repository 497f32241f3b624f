//! The table of bandwidths, in the format of nccl-tests, from the estimates that Criterion wrote to files.
//!
//! Owns the columns. Read [`Table::to_text`] first.

use std::fs;
use std::path::Path;

use crate::cases::{CollectiveCase, algorithm_name};

/// The cases that were run, in their order.
#[derive(Debug, Default)]
pub struct Table {
    rows: Vec<TableRow>,
}

#[derive(Debug)]
struct TableRow {
    case: CollectiveCase,
    transport: String,
    ranks: u32,
    /// Name of Criterion's group; `bench` is the name of its benchmark.
    group: String,
    bench: String,
}

/// Criterion's estimate of one call's time, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Estimate {
    median: f64,
    low: f64,
    high: f64,
}

impl Table {
    /// Records that a case was run.
    pub fn add(&mut self, case: CollectiveCase, transport: &str, ranks: u32, group: &str, bench: &str) {
        let (transport, group, bench) = (transport.to_owned(), group.to_owned(), bench.to_owned());
        self.rows.push(TableRow { case, transport, ranks, group, bench });
    }

    /// Returns the table, with the estimates below `results`: medians with their 95 % intervals. Bandwidths are in GB/s
    /// of 10^9 bytes. Cases without an estimate, as after a test run, are left out.
    pub fn to_text(&self, results: &Path) -> String {
        let mut text = String::new();
        let mut title = None;
        for row in &self.rows {
            let Some(estimate) = read(&results.join(file_name(&row.group)).join(file_name(&row.bench))) else {
                continue;
            };
            let of = (row.case.collective, &row.transport, row.ranks);
            if title != Some(of) {
                title = Some(of);
                text.push_str(&format!(
                    "\n# {} over {}, {} ranks\n{:>12} {:>10} {:>9} {:>20} {:>12} {:>12} {:>12} {:>10} {:>10}\n",
                    of.0, of.1, of.2, "size", "count", "type", "algorithm", "time", "low", "high", "algbw", "busbw"
                ));
                text.push_str(&format!(
                    "{:>12} {:>10} {:>9} {:>20} {:>12} {:>12} {:>12} {:>10} {:>10}\n",
                    "(B)", "(elements)", "", "", "(us)", "(us)", "(us)", "(GB/s)", "(GB/s)"
                ));
            }
            text.push_str(&line(row, estimate));
        }
        text
    }
}

fn line(row: &TableRow, estimate: Estimate) -> String {
    // Bytes per nanosecond are gigabytes per second.
    let algbw = row.case.bytes as f64 / estimate.median;
    let [time, low, high] = [estimate.median, estimate.low, estimate.high].map(|nanos| nanos / 1e3);
    format!(
        "{:>12} {:>10} {:>9} {:>20} {time:>12.2} {low:>12.2} {high:>12.2} {algbw:>10.3} {:>10.3}\n",
        row.case.bytes,
        row.case.count_elems(),
        row.case.dtype.name(),
        algorithm_name(row.case.algorithm),
        algbw * row.case.bus_factor(row.ranks),
    )
}

fn read(bench: &Path) -> Option<Estimate> {
    parse(&fs::read_to_string(bench.join("new").join("estimates.json")).ok()?)
}

fn parse(text: &str) -> Option<Estimate> {
    let estimates: serde_json::Value = serde_json::from_str(text).ok()?;
    let median = &estimates["median"];
    let interval = &median["confidence_interval"];
    Some(Estimate {
        median: median["point_estimate"].as_f64()?,
        low: interval["lower_bound"].as_f64()?,
        high: interval["upper_bound"].as_f64()?,
    })
}

/// Returns Criterion's directory name for a group or benchmark.
fn file_name(id: &str) -> String {
    id.replace(['?', '"', '/', '\\', '*', '<', '>', ':', '|', '^'], "_")
}

#[cfg(test)]
mod tests {
    use super::*;
    use accl_types::Collective;

    #[test]
    fn bus_bandwidth_of_an_all_reduce_of_four_is_one_and_a_half_times_its_algorithm_bandwidth() {
        let case = CollectiveCase {
            collective: Collective::AllReduce,
            algorithm: None,
            dtype: accl_types::Dtype::F32,
            bytes: 1_000_000,
        };
        let row = TableRow { case, transport: "shm".into(), ranks: 4, group: String::new(), bench: String::new() };
        let text = line(&row, Estimate { median: 1e6, low: 9e5, high: 2e6 });
        let words: Vec<&str> = text.split_whitespace().collect();
        assert_eq!(words, ["1000000", "250000", "float32", "auto", "1000.00", "900.00", "2000.00", "1.000", "1.500"]);
    }

    #[test]
    fn an_estimate_is_the_median_with_its_interval() {
        let text = r#"{"mean": {"point_estimate": 1.0}, "median": {"confidence_interval": {"confidence_level": 0.95,
            "lower_bound": 2.0, "upper_bound": 4.0}, "point_estimate": 3.0, "standard_error": 0.1}}"#;
        assert_eq!(parse(text), Some(Estimate { median: 3.0, low: 2.0, high: 4.0 }));
        assert_eq!(parse("{}"), None);
    }
}
