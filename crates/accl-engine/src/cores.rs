//! The cores that the ranks of a host may use, which decide whether a waiting rank takes a core from another rank.
//!
//! Each rank publishes the cores that it may use. A pinned rank sees one core and cannot know from that alone whether
//! the other ranks have cores of their own.

use std::fmt;
use std::str::FromStr;

use accl_types::{parse_cpus, show_cpus};

/// The cores that a process may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cores {
    /// Numbers of the cores, ascending.
    numbers: Vec<u32>,
    /// Number of cores that a CPU quota allows; 0 without a quota.
    quota: u32,
}

impl Cores {
    /// Returns the cores of the calling thread. They stand for the process, because torch's threads are pinned
    /// together.
    pub(crate) fn of_this_process() -> Self {
        let usable = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
        let numbers: Vec<u32> = match rustix::thread::sched_getaffinity(None) {
            Ok(set) => {
                (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).map(|cpu| cpu as u32).collect()
            }
            Err(_) => (0..usable).collect(),
        };
        let quota = if usable < numbers.len() as u32 { usable } else { 0 };
        Self { numbers, quota }
    }

    /// Returns whether the process is bound to a single core.
    pub(crate) fn is_one(&self) -> bool {
        self.numbers.len() == 1
    }

    /// Returns whether these processes, all on one host, outnumber the cores that they have together.
    pub(crate) fn are_shared<'a>(all: impl Iterator<Item = &'a Cores> + Clone) -> bool {
        all.clone().count() > Cores::in_all(all)
    }

    /// Returns the number of cores that these processes, all on one host, have together.
    pub(crate) fn in_all<'a>(all: impl Iterator<Item = &'a Cores> + Clone) -> usize {
        let mut union: Vec<u32> = all.clone().flat_map(|cores| cores.numbers.iter().copied()).collect();
        union.sort_unstable();
        union.dedup();
        let quota = all.map(|cores| cores.quota).filter(|&quota| quota > 0).min();
        quota.map_or(union.len(), |quota| union.len().min(quota as usize))
    }
}

/// Number of ranks on a host, and number of cores for each of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HostLoad {
    /// Number of ranks on the host; 0 if not known.
    pub(crate) ranks: u32,
    pub(crate) share: u32,
}

impl HostLoad {
    /// Counts these processes, all on one host.
    pub(crate) fn of<'a>(all: impl Iterator<Item = &'a Cores> + Clone) -> Self {
        let ranks = all.clone().count() as u32;
        Self { ranks, share: Cores::in_all(all) as u32 / ranks.max(1) }
    }

    /// Returns the larger of the two: the job's, if the other covers only some of its ranks.
    pub(crate) fn or(self, other: Self) -> Self {
        if self.ranks > other.ranks { self } else { other }
    }
}

/// Format: ranks, then cores per rank, such as `16:4`.
impl fmt::Display for HostLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.ranks, self.share)
    }
}

impl FromStr for HostLoad {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (ranks, share) = text.split_once(':').ok_or(())?;
        let number = |text: &str| text.parse().map_err(drop);
        Ok(Self { ranks: number(ranks)?, share: number(share)? })
    }
}

/// Format: the numbers, then the quota if there is one, such as `0-3,8/2`.
impl fmt::Display for Cores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&show_cpus(&self.numbers))?;
        if self.quota > 0 { write!(f, "/{}", self.quota) } else { Ok(()) }
    }
}

impl FromStr for Cores {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (runs, quota) = match text.split_once('/') {
            Some((runs, quota)) => (runs, quota.parse().map_err(drop)?),
            None => (text, 0),
        };
        let numbers = parse_cpus(runs).ok_or(())?;
        Ok(Self { numbers, quota })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cores(text: &str) -> Cores {
        text.parse().unwrap()
    }

    #[test]
    fn the_text_is_read_as_it_was_written() {
        for text in ["", "0", "0-3", "0-3,8", "1,3,5-6/2"] {
            assert_eq!(cores(text).to_string(), text);
        }
        let mine = Cores::of_this_process();
        assert!(!mine.numbers.is_empty());
        assert_eq!(cores(&mine.to_string()), mine);
        for wrong in ["x", "3-1", "0-9999999", "1/x", "-"] {
            assert_eq!(wrong.parse::<Cores>(), Err(()), "{wrong}");
        }
    }

    #[test]
    fn pinned_ranks_have_own_cores_and_crowded_ranks_do_not() {
        let shared = |texts: &[&str]| {
            let all: Vec<Cores> = texts.iter().map(|text| cores(text)).collect();
            Cores::are_shared(all.iter())
        };
        assert!(!shared(&["0", "1"]));
        assert!(!shared(&["0-1", "0-1"]));
        assert!(shared(&["0", "0"]));
        assert!(shared(&["0-1", "0-1", "0-1"]));
        assert!(shared(&["0-7/1", "0-7/1"]));
        assert!(!shared(&["0-7/2", "0-7/2"]));
    }
}
