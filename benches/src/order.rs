//! Orders from a driver to ranks, as lines of text: `peers/ranks/rank.c` has the protocol.
//!
//! `check CALL DTYPE BYTES` makes one call and checks its result. `run CALL DTYPE BYTES BATCHES CALLS MEET` makes calls
//! and writes their times to the board. CALL is a collective; `all_reduce:ring` forces an algorithm. `all_reduce*100`
//! is a hundred calls that count as one, and `all_reduce&100` a hundred that are outstanding together.

use std::fmt;

use accl_engine::Mode;
use accl_schedule::{ALGORITHMS, Algorithm};
use accl_types::{Collective, Dtype, Error, Result};

use crate::board::BATCHES;
use crate::cases::{COLLECTIVES, CollectiveCase};

/// One order.
#[derive(Clone, Copy, Debug)]
pub struct RankOrder {
    /// The case to call.
    pub case: CollectiveCase,
    /// Whether the calls block.
    pub mode: Mode,
    /// Number of calls that are started before the first is waited for, each on its own tensors.
    pub outstanding: usize,
    /// The timed calls; `None` for one call whose result is checked.
    pub run: Option<Run>,
}

/// Number of timed calls, and how they are timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Number of batches, each with its own time.
    pub batches: usize,
    /// Number of calls in each batch.
    pub calls: usize,
    /// Whether ranks meet before every batch, or only before the first.
    pub meet: bool,
}

impl RankOrder {
    /// Returns an order for one call whose result is checked.
    pub fn check(case: CollectiveCase) -> Self {
        Self { case, mode: Mode::Blocking, outstanding: 1, run: None }
    }

    /// Returns an order for blocking calls that are timed.
    pub fn run(case: CollectiveCase, run: Run) -> Self {
        Self { run: Some(run), ..Self::check(case) }
    }

    /// Parses a line; `None` if there is no such call here.
    ///
    /// # Errors
    /// `Internal` if the line is not an order.
    pub fn from_line(line: &str) -> Result<Option<Self>> {
        let unreadable = || Error::internal(format!("cannot read the order `{line}`"));
        let words: Vec<&str> = line.split_whitespace().collect();
        let (&[verb, name, dtype, bytes], rest) = words.split_first_chunk().ok_or_else(unreadable)?;
        let number = |word: &str| word.parse::<usize>().map_err(|_| unreadable());
        let run = match (verb, rest) {
            ("check", []) => None,
            ("run", [batches, calls, meet]) => {
                let run = Run { batches: number(batches)?, calls: number(calls)?, meet: number(meet)? != 0 };
                Some(run).filter(|run| run.batches <= BATCHES).map(Some).ok_or_else(unreadable)?
            }
            _ => return Err(unreadable()),
        };
        let (name, mode, outstanding) = many(name);
        let Some((collective, algorithm)) = named(name) else { return Ok(None) };
        let Some(&dtype) = Dtype::ALL.iter().find(|known| known.name() == dtype) else { return Ok(None) };
        let case = CollectiveCase { collective, algorithm, dtype, bytes: number(bytes)? as u64 };
        Ok(Some(Self { case, mode, outstanding, run }))
    }
}

impl fmt::Display for RankOrder {
    /// Writes the order as a line.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CollectiveCase { collective, algorithm, dtype, bytes } = self.case;
        out.write_str(if self.run.is_some() { "run " } else { "check " })?;
        out.write_str(collective.name())?;
        algorithm.map_or(Ok(()), |row| write!(out, ":{}", row.name))?;
        match self.mode {
            Mode::Blocking if self.outstanding == 1 => {}
            Mode::Blocking => write!(out, "*{}", self.outstanding)?,
            Mode::Async => write!(out, "&{}", self.outstanding)?,
        }
        write!(out, " {} {bytes}", dtype.name())?;
        self.run.map_or(Ok(()), |run| write!(out, " {} {} {}", run.batches, run.calls, u8::from(run.meet)))
    }
}

fn many(name: &str) -> (&str, Mode, usize) {
    let parts = |sign| name.split_once(sign).and_then(|(name, count): (&str, &str)| Some((name, count.parse().ok()?)));
    match (parts('*'), parts('&')) {
        (Some((name, count)), _) => (name, Mode::Blocking, count),
        (_, Some((name, count))) => (name, Mode::Async, count),
        (None, None) => (name, Mode::Blocking, 1),
    }
}

/// Returns the collective, and the algorithm that is forced; `None` if either is unknown.
fn named(name: &str) -> Option<(Collective, Option<&'static Algorithm>)> {
    let (name, forced) = name.split_once(':').map_or((name, None), |(name, forced)| (name, Some(forced)));
    let &collective = COLLECTIVES.iter().find(|collective| collective.name() == name)?;
    let row = |forced| ALGORITHMS.iter().find(|row| row.collective == collective && row.name == forced);
    match forced {
        None => Some((collective, None)),
        Some(forced) => Some((collective, Some(row(forced)?))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_read_as_it_is_written() {
        for line in [
            "check barrier uint8 0",
            "check all_reduce:ring float32 4096",
            "run all_reduce float32 4 11 200 0",
            "run broadcast:binomial uint8 65536 4096 1 1",
            "run all_reduce*100 float32 4 3 1 0",
            "run all_reduce&100 bfloat16 4 3 1 0",
        ] {
            let order = RankOrder::from_line(line).unwrap().unwrap_or_else(|| panic!("{line}"));
            assert_eq!(order.to_string(), line);
        }
    }

    #[test]
    fn what_is_no_order_is_refused_and_what_is_not_here_is_none() {
        for line in
            ["", "check", "run all_reduce float32 4", "run all_reduce float32 4 5000 1 0", "look barrier uint8 0"]
        {
            assert!(RankOrder::from_line(line).is_err(), "{line}");
        }
        for line in ["check all_reduce:no float32 4", "check sum float32 4", "check all_reduce float33 4"] {
            assert!(RankOrder::from_line(line).unwrap().is_none(), "{line}");
        }
    }
}
