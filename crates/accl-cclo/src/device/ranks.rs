//! The ranks file, which lists the address of each rank's engine.

use std::net::Ipv4Addr;
use std::path::Path;

use accl_types::{Error, ErrorKind, Result};
use serde::Deserialize;

/// Port of rank 0 if a file lists addresses only; each further rank has the next port.
pub const FIRST_PORT: u16 = 5500;

/// A file's entry for one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RankLine {
    pub(crate) ip: String,
    pub(crate) port: u16,
    pub(crate) session: Option<u32>,
    pub(crate) segment_bytes: Option<u32>,
}

/// Both forms of the file: addresses only, as ACCL's programs take them, or objects.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    ips: Option<Vec<String>>,
    ranks: Option<Vec<Object>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Object {
    ip: String,
    port: Option<u16>,
    session: Option<u32>,
    max_segment: Option<u32>,
}

/// Reads all entries of a file.
pub(crate) fn read(path: &Path) -> Result<Vec<RankLine>> {
    let text = std::fs::read_to_string(path).map_err(|error| refused(path, &format!("cannot be read: {error}")))?;
    parse(&text).map_err(|why| refused(path, &why))
}

fn parse(text: &str) -> std::result::Result<Vec<RankLine>, String> {
    const ACCEPTED: &str = "expected {\"ips\": [ADDRESS, ...]} or \
                            {\"ranks\": [{\"ip\": ADDRESS, \"port\": N, \"session\": N, \"max_segment\": N}, ...]}";
    let file: File = serde_json::from_str(text).map_err(|error| format!("is invalid: {error}; {ACCEPTED}"))?;
    let port = |rank: usize, port: Option<u16>| {
        let counted = || u16::try_from(rank).ok().and_then(|rank| FIRST_PORT.checked_add(rank));
        port.or_else(counted).ok_or_else(|| format!("has no port below 65536 for rank {rank}"))
    };
    let objects = match (file.ips, file.ranks) {
        (Some(ips), None) => {
            ips.into_iter().map(|ip| Object { ip, port: None, session: None, max_segment: None }).collect()
        }
        (None, Some(ranks)) => ranks,
        (Some(_), Some(_)) | (None, None) => return Err(format!("must have exactly one of its keys; {ACCEPTED}")),
    };
    if objects.is_empty() {
        return Err("names no rank".to_owned());
    }
    objects
        .into_iter()
        .enumerate()
        .map(|(rank, Object { ip, port: given, session, max_segment })| {
            Ok(RankLine { ip, port: port(rank, given)?, session, segment_bytes: max_segment })
        })
        .collect()
}

impl RankLine {
    /// Returns the address in the form that an engine takes.
    pub(super) fn address(&self, path: &Path, rank: usize) -> Result<Ipv4Addr> {
        self.ip.parse().map_err(|_| {
            refused(
                path,
                &format!("gives rank {rank} the address `{}`; expected an IPv4 address such as 10.10.10.1", self.ip),
            )
        })
    }
}

/// Returns the error for an invalid file.
pub(super) fn refused(path: &Path, why: &str) -> Error {
    Error::new(ErrorKind::Configuration, format!("the ranks file {} {why}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_are_read() {
        let line =
            |ip: &str, port, session, segment_bytes| RankLine { ip: ip.to_owned(), port, session, segment_bytes };
        assert_eq!(
            parse(r#"{"ips": ["10.1.2.3", "10.1.2.4"]}"#),
            Ok(vec![line("10.1.2.3", 5500, None, None), line("10.1.2.4", 5501, None, None)])
        );
        assert_eq!(
            parse(r#"{"ranks": [{"ip": "10.1.2.3", "port": 7, "session": 3, "max_segment": 1024}, {"ip": "h"}]}"#),
            Ok(vec![line("10.1.2.3", 7, Some(3), Some(1024)), line("h", 5501, None, None)])
        );
    }

    #[test]
    fn what_is_no_file_of_ranks_says_what_one_is() {
        for text in ["", "[]", "{}", r#"{"ips": [], "ranks": []}"#, r#"{"ips": [1]}"#, r#"{"hosts": []}"#] {
            let why = parse(text).unwrap_err();
            assert!(why.contains(r#"{"ips": [ADDRESS, ...]}"#), "{why}");
        }
        assert_eq!(parse(r#"{"ips": []}"#).unwrap_err(), "names no rank");
        let missing = read(Path::new("/nowhere/ranks.json")).unwrap_err();
        assert!(missing.message.starts_with("the ranks file /nowhere/ranks.json cannot be read: "), "{missing}");
    }
}
