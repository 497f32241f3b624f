//! Texts that ranks write into the store while a group is created. They are a rank's info, the list of all infos, the
//! leader's notice, and the reason why a session has ended.
//!
//! Owns the text formats. Parsing must survive arbitrary input, because the store is shared with other programs. The
//! parent module describes when each text is written and read.

use accl_schedule::cost::Machine;
use accl_types::{Error, ErrorKind, Rank, Result};
use accl_wire::frame::Cause;
use accl_wire::{EndpointInfo, PROTOCOL_VERSION};

use crate::cores::{Cores, HostLoad};

/// Start of the first line of a rank's info; the protocol version follows.
const CARD_MAGIC: &str = "accl-group";
/// The same for the text that a rank writes instead if it cannot create the group.
const REFUSAL_MAGIC: &str = "accl-refusal";
/// The same for the leader's notice.
const NOTICE_MAGIC: &str = "accl-notice";
/// Values for the lanes in a rank's info.
const AUTO_LANES: &str = "auto";
const FIXED_LANES: &str = "fixed";
/// Maximum number of earlier sessions that a notice lists; keys of older sessions stay in the store.
const MAX_EARLIER: usize = 64;

/// The info that a rank publishes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RankInfo {
    /// Number of groups that the process created before. It distinguishes groups of the same processes.
    pub(crate) counter: u64,
    /// Everything that the ranks must agree on.
    pub(crate) agreed: String,
    /// The cores that the rank may use.
    pub(crate) cores: Cores,
    /// Whether the number of useful lanes is to be computed from the ranks of its host.
    pub(crate) has_auto_lanes: bool,
    /// The load of its host, as seen in groups created before: the ranks of a smaller group share the host with other
    /// ranks.
    pub(crate) host_load: HostLoad,
    /// The constants by which all ranks choose algorithms; only in the first rank's info.
    pub(crate) machine: Option<Machine>,
    /// Endpoint address of the rank.
    pub(crate) info: EndpointInfo,
}

impl RankInfo {
    pub(super) fn to_text(&self) -> String {
        let machine = self.machine.map_or_else(String::new, |machine| machine.to_string());
        format!(
            "{CARD_MAGIC} {PROTOCOL_VERSION}\n{}\n{}\n{}\n{} {}\n{machine}\n{}",
            self.counter,
            self.agreed,
            self.cores,
            if self.has_auto_lanes { AUTO_LANES } else { FIXED_LANES },
            self.host_load,
            self.info.to_text()
        )
    }

    pub(super) fn from_text(text: &str) -> Result<Self> {
        let broken = |what: &str| Error::rendezvous(format!("the store holds an invalid rank entry: {what}"));
        let mut lines = text.splitn(7, '\n');
        check_version(lines.next(), CARD_MAGIC).map_err(|why| broken(&why))?;
        let counter = lines.next().and_then(|line| line.parse().ok()).ok_or_else(|| broken("no counter"))?;
        let agreed = lines.next().ok_or_else(|| broken("no settings"))?.to_owned();
        let cores = lines.next().and_then(|line| line.parse().ok()).ok_or_else(|| broken("no cores"))?;
        let (lanes, host_load) =
            lines.next().and_then(|line| line.split_once(' ')).ok_or_else(|| broken("no lanes"))?;
        let has_auto_lanes = match lanes {
            AUTO_LANES => true,
            FIXED_LANES => false,
            _ => return Err(broken("no lanes")),
        };
        let host_load = host_load.parse().map_err(|()| broken("no number of ranks"))?;
        let machine = match lines.next().ok_or_else(|| broken("no constants"))? {
            "" => None,
            text => Some(text.parse().map_err(|why: String| broken(&why))?),
        };
        let info = EndpointInfo::from_text(lines.next().ok_or_else(|| broken("no address"))?)?;
        Ok(Self { counter, agreed, cores, has_auto_lanes, host_load, machine, info })
    }

    /// Returns the info of a process that cannot create the group and that no link leads to.
    pub(crate) fn of_no_endpoint() -> Result<Self> {
        let info = accl_transport::process_info()?;
        let (agreed, cores) = (String::new(), Cores::of_this_process());
        Ok(Self {
            counter: 0,
            agreed,
            cores,
            has_auto_lanes: false,
            host_load: HostLoad::default(),
            machine: None,
            info,
        })
    }

    /// Returns the info of a process that does not exist.
    #[cfg(test)]
    pub(crate) fn for_tests(counter: u64, agreed: &str) -> Self {
        let info = EndpointInfo {
            version: 1,
            uuid: [7; 16],
            pid: 1,
            uid: 2,
            hostname: "a b".to_owned(),
            host_id: "h".to_owned(),
            addresses: Vec::new(),
            unix_name: String::new(),
            transports: vec!["shm".to_owned()],
            lanes: 1,
        };
        let (agreed, cores) = (agreed.to_owned(), Cores::of_this_process());
        Self { counter, agreed, cores, has_auto_lanes: false, host_load: HostLoad::default(), machine: None, info }
    }

    /// Returns whether this is the info of the same process for the same attempt to create a group.
    pub(super) fn is_same_making(&self, other: &Self) -> bool {
        self.info.uuid == other.info.uuid && self.counter == other.counter
    }
}

/// Checks that a text's first line has the magic and the version of this process. The error is a readable reason.
fn check_version(line: Option<&str>, magic: &str) -> std::result::Result<(), String> {
    let version =
        line.and_then(|line| line.strip_prefix(magic)?.strip_prefix(' ')).ok_or("its first line is unknown")?;
    if version.parse() == Ok(PROTOCOL_VERSION) {
        return Ok(());
    }
    Err(format!(
        "its protocol version is {version}, but this process uses version {PROTOCOL_VERSION}; install the same version \
         of torch-accl on all hosts"
    ))
}

/// Formats why a rank cannot create the group. The rank writes it in place of its info; the leader later writes it in
/// place of the list.
pub(super) fn refusal_to_text(cause: &Cause) -> String {
    format!("{REFUSAL_MAGIC} {PROTOCOL_VERSION}\n{} {}\n{}", cause.origin, cause.kind as u8, cause.text)
}

/// Parses a refusal; `None` if the text is none.
pub(super) fn refusal_from_text(text: &str) -> Result<Option<Cause>> {
    let mut lines = text.splitn(3, '\n');
    if !text.starts_with(REFUSAL_MAGIC) {
        return Ok(None);
    }
    let broken = |what: &str| Error::rendezvous(format!("the store holds an invalid refusal: {what}"));
    check_version(lines.next(), REFUSAL_MAGIC).map_err(|why| broken(&why))?;
    let head = lines.next().and_then(|line| line.split_once(' '));
    let cause = head.zip(lines.next()).and_then(|((origin, kind), text)| {
        let kind = ErrorKind::from_code(kind.parse().ok()?)?;
        Some(Cause { kind, origin: Rank(origin.parse().ok()?), text: text.to_owned() })
    });
    cause.map(Some).ok_or_else(|| broken("no cause"))
}

/// Formats all ranks' infos in rank order, each preceded by its length.
pub(super) fn participants_to_text(infos: &[RankInfo]) -> String {
    joined(infos.iter().map(RankInfo::to_text))
}

pub(super) fn participants_from_text(text: &str) -> Result<Vec<RankInfo>> {
    let texts = split(text).ok_or_else(|| Error::rendezvous("the store holds an invalid participant list"))?;
    texts.into_iter().map(RankInfo::from_text).collect()
}

/// Formats the texts that all ranks exchange, in rank order.
pub(super) fn texts_to_text(texts: &[String]) -> String {
    joined(texts.iter().map(String::as_str))
}

pub(super) fn texts_from_text(text: &str) -> Result<Vec<String>> {
    let texts = split(text);
    let texts = texts.ok_or_else(|| Error::rendezvous("the store holds an invalid list of rank texts"))?;
    Ok(texts.into_iter().map(str::to_owned).collect())
}

/// Joins texts, each preceded by its length.
fn joined<T: AsRef<str>>(texts: impl Iterator<Item = T>) -> String {
    texts.map(|text| format!("{}\n{}\n", text.as_ref().len(), text.as_ref())).collect()
}

fn split(mut text: &str) -> Option<Vec<&str>> {
    let mut texts = Vec::new();
    while !text.is_empty() {
        let (len, rest) = text.split_once('\n')?;
        let len: usize = len.parse().ok()?;
        texts.push(rest.get(..len)?);
        text = rest[len..].strip_prefix('\n')?;
    }
    Some(texts)
}

/// State of the leader's session, as its notice reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The leader collects infos or has written the list.
    Gathering,
    /// Creation has failed; no rank leads.
    Over,
}

impl Phase {
    const ALL: &'static [(Phase, &'static str)] = &[(Phase::Gathering, "gathering"), (Phase::Over, "over")];
}

/// Points the other ranks to the leader's session. All keys of a session contain the session's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Notice {
    pub(super) session: String,
    pub(super) world: u32,
    pub(super) phase: Phase,
    /// Identity of the leader's process, and a description of it.
    pub(super) uuid: [u8; 16],
    pub(super) process: String,
    /// Earlier sessions whose keys have not been deleted, with their world sizes.
    pub(super) earlier: Vec<(String, u32)>,
}

impl Notice {
    pub(super) fn to_text(&self) -> String {
        let phase = Phase::ALL.iter().find(|(phase, _)| *phase == self.phase).map_or("", |(_, name)| *name);
        let uuid = u128::from_be_bytes(self.uuid);
        let earlier = self.earlier.iter().rev().take(MAX_EARLIER).rev();
        let earlier: String = earlier.map(|(session, world)| format!("\n{world} {session}")).collect();
        format!(
            "{NOTICE_MAGIC} {PROTOCOL_VERSION}\n{}\n{}\n{phase}\n{uuid:032x} {}{earlier}",
            self.session, self.world, self.process
        )
    }

    pub(super) fn from_text(text: &str) -> Result<Self> {
        let broken = |what: &str| Error::rendezvous(format!("the store holds an invalid leader's notice: {what}"));
        let mut lines = text.split('\n');
        check_version(lines.next(), NOTICE_MAGIC).map_err(|why| broken(&why))?;
        let session = lines.next().ok_or_else(|| broken("no session"))?.to_owned();
        let world = lines.next().and_then(|line| line.parse().ok()).ok_or_else(|| broken("no world"))?;
        let phase = lines.next().and_then(|line| Phase::ALL.iter().find(|(_, name)| *name == line));
        let phase = phase.ok_or_else(|| broken("no phase"))?.0;
        let (uuid, process) = lines.next().and_then(|line| line.split_once(' ')).ok_or_else(|| broken("no process"))?;
        let uuid = u128::from_str_radix(uuid, 16).map_err(|_| broken("no process"))?.to_be_bytes();
        let process = process.to_owned();
        let earlier = lines
            .map(|line| {
                line.split_once(' ').and_then(|(world, session)| Some((session.to_owned(), world.parse().ok()?)))
            })
            .collect::<Option<_>>()
            .ok_or_else(|| broken("no earlier session"))?;
        Ok(Self { session, world, phase, uuid, process, earlier })
    }
}

/// Why a session ended before its group was created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// A rank was replaced: the live ranks meet again in another session.
    Moved,
    /// Another process leads; this is its description.
    Taken(String),
    /// A rank could not create the group.
    Failed(Cause),
    /// The session did not end early: the group is created.
    Complete,
}

impl Why {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        match self {
            Why::Moved => b"moved ".to_vec(),
            Why::Taken(process) => format!("taken {process}").into_bytes(),
            Why::Failed(cause) => [&b"failed "[..], cause.to_bytes(16 << 10).as_slice()].concat(),
            Why::Complete => b"complete ".to_vec(),
        }
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let space = bytes.iter().position(|&byte| byte == b' ').unwrap_or(bytes.len());
        let (word, rest) = (&bytes[..space], bytes.get(space + 1..).unwrap_or_default());
        match word {
            b"moved" => Ok(Why::Moved),
            b"taken" => Ok(Why::Taken(String::from_utf8_lossy(rest).into_owned())),
            b"failed" => Cause::parse(rest).map(Why::Failed),
            b"complete" => Ok(Why::Complete),
            _ => Err(Error::rendezvous("the store holds an invalid reason for the end of a session")),
        }
    }
}

/// Returns the error that lists the settings that differ.
pub(super) fn settings_differ(mine: &RankInfo, other: &RankInfo, my_rank: u32, rank: usize) -> Error {
    let mine: Vec<&str> = mine.agreed.split(' ').collect();
    let other: Vec<&str> = other.agreed.split(' ').collect();
    let key = |word: &str| word.split('=').next().unwrap_or_default().to_owned();
    let of_key = |words: &[&str], wanted: &str| {
        words.iter().find(|word| key(word) == wanted).map_or_else(|| format!("no {wanted}"), |word| (*word).to_owned())
    };
    let mut keys: Vec<String> = mine.iter().map(|word| key(word)).collect();
    keys.extend(other.iter().map(|word| key(word)).filter(|each| !mine.iter().any(|word| key(word) == *each)));
    let differing: Vec<String> = keys
        .iter()
        .map(|each| (of_key(&mine, each), of_key(&other, each)))
        .filter(|(a, b)| a != b)
        .map(|(a, b)| format!("rank {my_rank} has {a}, rank {rank} has {b}"))
        .collect();
    let detail =
        if differing.is_empty() { "the order of their offloads differs".to_owned() } else { differing.join("; ") };
    Error::configuration(format!(
        "the ranks' settings disagree: {detail}; give all ranks the same environment and options"
    ))
}

#[cfg(all(test, not(accl_loom)))]
mod tests {
    use accl_kernels::codec;
    use accl_schedule::ALGORITHMS;
    use accl_types::config::Config;
    use proptest::prelude::*;

    use super::*;
    use accl_executor::call::TILE_HEADER_BYTES;
    use accl_executor::memory::TileHead;

    fn info(counter: u64, agreed: &str) -> RankInfo {
        RankInfo::for_tests(counter, agreed)
    }

    proptest! {
        #[test]
        fn texts_come_back_as_they_went(
            counter: u64, agreed in "[ -~]{0,40}", session in "[ -~]{1,40}", world: u32, uuid: [u8; 16],
            earlier in proptest::collection::vec(("[ -~]{1,20}", any::<u32>()), 0..5), process in "[ -~]{0,30}",
        ) {
            let infos = vec![info(counter, &agreed), info(3, "")];
            prop_assert_eq!(participants_from_text(&participants_to_text(&infos)).unwrap(), infos);
            let texts = vec![agreed.clone(), String::new(), format!("{process}\n{session}")];
            prop_assert_eq!(texts_from_text(&texts_to_text(&texts)).unwrap(), texts);
            for &(phase, _) in Phase::ALL {
                let notice = Notice { session: session.clone(), world, phase, uuid, process: process.clone(), earlier: earlier.clone() };
                prop_assert_eq!(Notice::from_text(&notice.to_text()).unwrap(), notice);
            }
            let cause = Cause { kind: ErrorKind::Network, origin: Rank(world), text: process.clone() };
            prop_assert_eq!(refusal_from_text(&refusal_to_text(&cause)).unwrap(), Some(cause.clone()));
            for why in [Why::Moved, Why::Complete, Why::Taken(process), Why::Failed(cause)] {
                prop_assert_eq!(Why::from_bytes(&why.to_bytes()).unwrap(), why);
            }
        }

        #[test]
        fn anything_else_is_refused_without_a_panic(text: String, bytes: Vec<u8>) {
            prop_assert!(Notice::from_text(&text).is_err());
            prop_assert!(text.is_empty() || participants_from_text(&text).is_err());
            prop_assert!(RankInfo::from_text(&text).is_err());
            let _ = texts_from_text(&text);
            prop_assert_eq!(refusal_from_text(&text).unwrap(), None);
            let _ = refusal_from_text(&format!("{REFUSAL_MAGIC} {PROTOCOL_VERSION}\n{text}"));
            let _ = Why::from_bytes(&bytes);
        }

        #[test]
        fn a_damaged_participant_list_does_not_panic(at in any::<prop::sample::Index>(), with: char, cut: bool) {
            let mut text: Vec<char> = participants_to_text(&[info(1, "a=b"), info(2, "")]).chars().collect();
            let at = at.index(text.len());
            if cut { text.truncate(at) } else { text[at] = with }
            let _ = participants_from_text(&text.into_iter().collect::<String>());
        }
    }

    /// If this test fails, raise `PROTOCOL_VERSION`; the snapshot of the version before is then deleted.
    #[test]
    fn what_ranks_say_to_each_other_is_that_of_its_version() {
        let agreed = Config::default().agreed_text();
        let machine = Some(Machine::default());
        let cores = "0-3,8/2".parse().unwrap();
        let info = RankInfo {
            machine,
            cores,
            has_auto_lanes: true,
            host_load: HostLoad { ranks: 8, share: 4 },
            ..info(7, &agreed)
        };
        let cause = Cause { kind: ErrorKind::Network, origin: Rank(2), text: "why".to_owned() };
        let earlier = vec![("before".to_owned(), 3)];
        let notice = Notice {
            session: "run.0.session".to_owned(),
            world: 4,
            phase: Phase::Gathering,
            uuid: [7; 16],
            process: "a b pid 1".to_owned(),
            earlier,
        };
        let mut lines = vec![participants_to_text(&[info]), notice.to_text()];
        for why in [Why::Moved, Why::Complete, Why::Taken("there".to_owned()), Why::Failed(cause)] {
            lines.push(format!("why {:?}", String::from_utf8_lossy(&why.to_bytes())));
        }
        for has_checksum in [false, true] {
            let mut tile: Vec<u8> = (0..TILE_HEADER_BYTES as u8 + 8).collect();
            TileHead { elems: 1000, settings: 77, has_checksum }.seal(&mut tile);
            lines.push(format!("tile {tile:?}"));
        }
        lines.extend(ALGORITHMS.iter().map(|row| format!("algorithm {} {} {}", row.collective, row.id, row.name)));
        let word = |text: &str| codec::parse(text).unwrap().summary().word();
        for text in ["raw", "maxmin:3,bucket=128,meta=bfloat16,rounding=correlated,skip_incomplete", "topk:6"] {
            lines.push(format!("summary {:#010x} {text}", word(text)));
        }
        insta::assert_snapshot!(format!("protocol_version_{PROTOCOL_VERSION}"), lines.join("\n"));
    }

    #[test]
    fn an_endpoint_of_another_version_is_refused_with_both_versions() {
        let text = info(1, "").to_text().replacen(&format!("accl-group {PROTOCOL_VERSION}"), "accl-group 999", 1);
        let message = RankInfo::from_text(&text).unwrap_err().message;
        assert!(message.contains("version is 999") && message.contains(&PROTOCOL_VERSION.to_string()), "{message}");
        let notice = Notice::from_text("accl-notice 2\n").unwrap_err().message;
        assert!(notice.contains("version is 2,"), "{notice}");
    }
}
