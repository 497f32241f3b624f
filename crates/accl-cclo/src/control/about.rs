//! Self-description of this project's emulator, and the comparison of the emulators of a world.

use serde::{Deserialize, Serialize};

use crate::hazards::HAZARDS;
use crate::memory_map::Network;

/// Self-description of this project's emulator for one of its ranks. The original emulator has no such reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct About {
    /// Version of the emulator.
    pub version: String,
    /// Number of ranks.
    pub ranks: u32,
    /// The rank that was asked.
    pub rank: u32,
    /// Network between the engines.
    pub network: Network,
    /// Numbers of the hazards that the emulator reproduces, in ascending order.
    pub hazards: Vec<u8>,
    /// Clock rate in cycles per second, in the time of the counter register.
    pub clock_hz: u64,
    /// Link bandwidth in bits per second, in the time of the counter register.
    pub link_bits_per_second: u64,
    /// Latency of a message in addition to its transfer, in picoseconds.
    pub hop_ps: u64,
    /// Ranks that the emulator's packets do not reach: they have not connected yet, or have disconnected.
    pub missing: Vec<u32>,
    /// Why calls have failed or do not end; empty if no fault is known.
    pub trouble: String,
    /// Description of the rank's owner; empty if no host has named one.
    pub owner: String,
    /// For how many seconds the owner has had the rank.
    pub owner_s: u64,
    /// Random number of the emulator's process; zero if the emulator does not send one.
    pub process: u64,
    /// Ranks of that process: the first rank, and the number of ranks.
    pub served: [u32; 2],
}

/// Fields of the reply.
#[derive(Deserialize, Serialize)]
pub(super) struct Fields {
    status: i64,
    version: String,
    ranks: u32,
    rank: u32,
    comms: String,
    hazards: Vec<u8>,
    clock_hz: u64,
    link_bits_per_second: u64,
    hop_ps: u64,
    missing: Vec<u32>,
    trouble: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    owner: String,
    #[serde(default, skip_serializing_if = "is_zero")]
    owner_s: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    process: u64,
    #[serde(default, skip_serializing_if = "are_none")]
    served: [u32; 2],
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

fn are_none(served: &[u32; 2]) -> bool {
    served[1] == 0
}

/// Names of networks as `--comms` takes them.
const NETWORKS: [(&str, Network); 3] = [("udp", Network::Udp), ("tcp", Network::Tcp), ("cyt_rdma", Network::Rdma)];

impl About {
    /// Returns the name of the network as `--comms` takes it.
    pub fn comms(&self) -> &'static str {
        NETWORKS.iter().find(|(_, network)| *network == self.network).map_or("", |(name, _)| name)
    }

    pub(super) fn to_json(&self) -> String {
        let fields = Fields {
            status: 0,
            version: self.version.clone(),
            ranks: self.ranks,
            rank: self.rank,
            comms: self.comms().to_owned(),
            hazards: self.hazards.clone(),
            clock_hz: self.clock_hz,
            link_bits_per_second: self.link_bits_per_second,
            hop_ps: self.hop_ps,
            missing: self.missing.clone(),
            trouble: self.trouble.clone(),
            owner: self.owner.clone(),
            owner_s: self.owner_s,
            process: self.process,
            served: self.served,
        };
        // Serialization of numbers and strings cannot fail.
        serde_json::to_string(&fields).unwrap_or_default()
    }

    /// Returns the reproduced hazards whose repair changes the data on the wire.
    fn kept_on_wire(&self) -> Vec<u8> {
        on_wire().filter(|number| self.hazards.contains(number)).collect()
    }
}

impl Fields {
    pub(super) fn about(self) -> Result<About, String> {
        let network = NETWORKS.iter().find(|(name, _)| *name == self.comms);
        let (_, network) = network.ok_or_else(|| format!("unknown comms `{}`", self.comms))?;
        Ok(About {
            version: self.version,
            ranks: self.ranks,
            rank: self.rank,
            network: *network,
            hazards: self.hazards,
            clock_hz: self.clock_hz,
            link_bits_per_second: self.link_bits_per_second,
            hop_ps: self.hop_ps,
            missing: self.missing,
            trouble: self.trouble,
            owner: self.owner,
            owner_s: self.owner_s,
            process: self.process,
            served: self.served,
        })
    }
}

fn on_wire() -> impl Iterator<Item = u8> {
    HAZARDS.iter().filter(|hazard| hazard.is_on_wire).map(|hazard| hazard.number)
}

/// Returns which two emulators of a world are incompatible, and why, in a sentence. Returns `None` if all are compatible.
///
/// `answers` holds the reply of each rank, in rank order. `None` stands for an original emulator, which reproduces every hazard and does not describe
/// itself. Hazards that do not affect the wire may differ.
pub fn difference(answers: &[Option<About>]) -> Option<String> {
    let ranks = answers.len();
    let known = || (0u32..).zip(answers).filter_map(|(rank, about)| Some((rank, about.as_ref()?)));
    for (rank, about) in known() {
        if about.rank != rank {
            return Some(format!(
                "the emulator at the address of rank {rank} serves rank {}; correct the address",
                about.rank
            ));
        }
        if about.ranks as usize != ranks {
            return Some(format!(
                "the emulator of rank {rank} was started for {} ranks, but there are {ranks}",
                about.ranks
            ));
        }
    }
    let is_of_another_world = |about: &About, (rank, other): &(u32, &About)| {
        let [first, ranks] = about.served;
        about.process != 0 && other.process != about.process && (first..first.saturating_add(ranks)).contains(rank)
    };
    let strange =
        known().find_map(|(rank, about)| Some((rank, known().find(|other| is_of_another_world(about, other))?.0)));
    if let Some((rank, other)) = strange {
        return Some(format!(
            "the emulators of ranks {rank} and {other} belong to two jobs, because the process of rank {rank} serves its own rank {other}; \
             give all ranks addresses of one job"
        ));
    }
    if let Some((first, about)) = known().next()
        && let Some((other, differs)) = known().find(|(_, other)| other.network != about.network)
    {
        return Some(format!(
            "the emulators of ranks {first} and {other} cannot reach each other: they use {} and {}; start all with the same --comms",
            about.comms(),
            differs.comms()
        ));
    }
    let (first, about) = known().next()?;
    if let Some((other, differs)) = known().find(|(_, other)| other.version != about.version) {
        return Some(format!(
            "the emulators of ranks {first} and {other} have versions {} and {}; install the same version on all hosts",
            about.version, differs.version
        ));
    }
    let kept = about.kept_on_wire();
    if let Some((other, differs)) = known().find(|(_, other)| other.kept_on_wire() != kept) {
        return Some(format!(
            "the emulators of ranks {first} and {other} send different packets: they keep hazards {} and {}; start all with the same \
             --faithful",
            numbers(&kept),
            numbers(&differs.kept_on_wire())
        ));
    }
    let original = answers.iter().position(Option::is_none)?;
    let all: Vec<u8> = on_wire().collect();
    (kept != all).then(|| {
        format!(
            "the emulator of rank {original} is ACCL's own, or does not describe itself, and the emulator of rank {first} sends other \
             packets; start the emulators of torch-accl with --faithful={}",
            numbers(&all)
        )
    })
}

fn numbers(hazards: &[u8]) -> String {
    if hazards.is_empty() {
        return "none".to_owned();
    }
    hazards.iter().map(u8::to_string).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::super::Reply;
    use super::*;

    fn about(rank: u32) -> About {
        About {
            version: "0.1.0".to_owned(),
            ranks: 3,
            rank,
            network: Network::Udp,
            hazards: vec![],
            clock_hz: 250_000_000,
            link_bits_per_second: 100_000_000_000,
            hop_ps: 2_000_000,
            missing: vec![],
            trouble: String::new(),
            owner: String::new(),
            owner_s: 0,
            process: 0,
            served: [0, 0],
        }
    }

    #[test]
    fn what_is_said_is_read_as_it_was() {
        let about = About {
            network: Network::Rdma,
            hazards: vec![4, 12],
            missing: vec![1, 2],
            trouble: "a \"sentence\"".to_owned(),
            ..about(2)
        };
        let reply = Reply::About(about);
        assert_eq!(
            reply.to_json(),
            r#"{"status":0,"version":"0.1.0","ranks":3,"rank":2,"comms":"cyt_rdma","hazards":[4,12],"clock_hz":250000000,"link_bits_per_second":100000000000,"hop_ps":2000000,"missing":[1,2],"trouble":"a \"sentence\""}"#
        );
        assert_eq!(Reply::from_json(reply.to_json().as_bytes()), Ok(reply));
        let owned = Reply::About(About { owner: "process 7 of host h".to_owned(), owner_s: 3, ..self::about(1) });
        assert!(owned.to_json().ends_with(r#""owner":"process 7 of host h","owner_s":3}"#));
        assert_eq!(Reply::from_json(owned.to_json().as_bytes()), Ok(owned));
        let other = r#"{"status":0,"version":"0.1.0","ranks":3,"rank":2,"comms":"ib","hazards":[],"clock_hz":1,"link_bits_per_second":1,"hop_ps":0,"missing":[],"trouble":""}"#;
        assert_eq!(Reply::from_json(other.as_bytes()), Err("unknown comms `ib`".to_owned()));
        assert!(Reply::from_json(br#"{"status":0,"version":"0.1.0"}"#).is_err());
        let placed = Reply::About(About { process: 1 << 60, served: [4, 2], ..self::about(5) });
        assert_eq!(Reply::from_json(placed.to_json().as_bytes()), Ok(placed));
    }

    #[test]
    fn emulators_of_two_jobs_are_refused_if_one_process_serves_the_ranks_of_the_other() {
        let of = |rank, process, served| Some(About { process, served, ..about(rank) });
        assert_eq!(difference(&[of(0, 7, [0, 2]), of(1, 7, [0, 2]), of(2, 8, [2, 1])]), None);
        let text = difference(&[of(0, 7, [0, 3]), of(1, 7, [0, 3]), of(2, 9, [0, 3])]).unwrap();
        assert!(text.starts_with("the emulators of ranks 0 and 2 belong to two jobs"), "{text}");
        // Values from a socket can at most yield a sentence, never a panic.
        assert_eq!(difference(&[of(0, 7, [u32::MAX, u32::MAX]), of(1, 8, [1, u32::MAX]), of(2, 8, [1, 2])]), None);
    }

    #[test]
    fn emulators_that_understand_each_other_do_not_differ() {
        let [first, second] =
            [0, 1].map(|rank| Some(About { hazards: vec![4], clock_hz: u64::from(rank), ..about(rank) }));
        let other = About { hazards: vec![5, 9], ..about(2) };
        assert_eq!(difference(&[first, second, Some(other)]), None, "what stays within one is not looked at");
        let faithful = |rank| Some(About { hazards: vec![1, 2, 3, 7, 12], ..about(rank) });
        assert_eq!(difference(&[faithful(0), None, faithful(2)]), None, "ours do on the wire as the original");
        assert_eq!(difference(&[None, None]), None);
        assert_eq!(difference(&[]), None);
    }

    #[test]
    fn emulators_that_differ_are_named_with_what_they_differ_in() {
        let all = [0, 1, 2].map(|rank| Some(about(rank)));
        let with = |rank: usize, other: About| {
            let mut all = all.clone();
            all[rank] = Some(other);
            difference(&all).unwrap()
        };
        assert_eq!(
            with(2, About { network: Network::Rdma, ..about(2) }),
            "the emulators of ranks 0 and 2 cannot reach each other: they use udp and cyt_rdma; start all with the same --comms"
        );
        assert_eq!(
            with(1, About { hazards: vec![1, 4, 12], ..about(1) }),
            "the emulators of ranks 0 and 1 send different packets: they keep hazards none and 1,12; start all with the same --faithful"
        );
        assert_eq!(
            with(2, About { version: "0.2.0".to_owned(), ..about(2) }),
            "the emulators of ranks 0 and 2 have versions 0.1.0 and 0.2.0; install the same version on all hosts"
        );
        assert_eq!(
            with(1, About { ranks: 2, ..about(1) }),
            "the emulator of rank 1 was started for 2 ranks, but there are 3"
        );
        assert_eq!(with(1, about(2)), "the emulator at the address of rank 1 serves rank 2; correct the address");
        let mut all = all;
        all[2] = None;
        let original = "the emulator of rank 2 is ACCL's own, or does not describe itself, and the emulator of rank 0 sends other \
                        packets; start the emulators of torch-accl with --faithful=1,2,3,12";
        assert_eq!(difference(&all).unwrap(), original);
        for about in all.iter_mut().flatten() {
            about.hazards = vec![1, 2];
        }
        assert_eq!(difference(&all).unwrap(), original, "a part is not enough");
    }
}
