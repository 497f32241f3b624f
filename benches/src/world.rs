//! Worlds of rank processes, seen from their driver: the ranks run [`crate::rank`]'s program, started when first
//! needed, one world at a time.
//!
//! Owns the start, the orders and the end of a world, and the calculation of a call's time from the spans of its ranks.
//! Read [`Worlds::get`] first.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use accl_types::{Collective, Error, Result};

use crate::board::{BATCHES, Board, Span};
use crate::cases::CollectiveCase;
use crate::order::{RankOrder, Run};
use crate::pin;
use crate::process::Children;
use crate::rank::RankSpec;

/// Deadline for the ranks to connect, and for the calls of an order. It exceeds the engine's own deadline, whose error
/// is more precise.
const DEADLINE: Duration = Duration::from_secs(150);
/// Time to wait for one rank before the others are polled.
const LOOK: Duration = Duration::from_millis(50);
/// Time for the other ranks to answer once one has failed.
const GRACE: Duration = Duration::from_secs(2);

/// A running world.
#[derive(Debug)]
pub struct BenchWorld {
    // Dropped before the processes, which end when these are closed.
    ranks: Vec<BufReader<UnixStream>>,
    board: Board,
    _children: Children,
}

impl BenchWorld {
    /// Starts `program`, the rank program, as all ranks, over one transport, and waits until they are ready.
    ///
    /// # Errors
    /// `Exhausted` if a process cannot be started, `Internal` if a rank does not get ready.
    pub fn start(program: &Path, transport: &str, count: u32) -> Result<Self> {
        let mut children = Children::in_new_dir()?;
        let dir = children.dir().to_owned();
        let board = Board::create(&dir.join("board")).map_err(|why| broken("the board", &why))?;
        let listener = UnixListener::bind(dir.join("socket")).map_err(|why| broken("the socket", &why))?;
        listener.set_nonblocking(true).map_err(|why| broken("the socket", &why))?;
        let cores = pin::cores();
        for rank in 0..count {
            let core = pin::core_of(rank as usize, count as usize, &cores);
            let spec = RankSpec { dir: dir.clone(), rank, ranks: count, core, codec: None };
            let mut command = Command::new(program);
            command.args(spec.to_arguments()).env("ACCL_TRANSPORTS", transport);
            children.spawn(command.stdin(Stdio::null()).stdout(Stdio::null()))?;
        }
        let ranks = gather(&listener, &mut children, count)?;
        let mut world = Self { ranks, board, _children: children };
        world.answers("ready")?;
        Ok(world)
    }

    /// Makes a call on all ranks, and checks its result.
    ///
    /// # Errors
    /// The call's error, or a description of the wrong result.
    pub fn check(&mut self, case: CollectiveCase) -> Result<()> {
        self.order(&RankOrder::check(case))
    }

    /// Makes calls on all ranks, and returns their total time.
    ///
    /// Calls of a rooted collective are timed one by one: otherwise a root that only sends would get many calls ahead.
    ///
    /// # Errors
    /// The first error of any call.
    pub fn run(&mut self, case: CollectiveCase, calls: u64) -> Result<Duration> {
        let mut nanos = 0;
        if case.collective.is_rooted() {
            let mut left = calls as usize;
            while left > 0 {
                let batches = left.min(BATCHES);
                left -= batches;
                self.order(&RankOrder::run(case, Run { batches, calls: 1, meet: true }))?;
                nanos += (0..batches).map(|batch| took(case.collective, &self.spans(batch))).sum::<u64>();
            }
        } else {
            self.order(&RankOrder::run(case, Run { batches: 1, calls: calls as usize, meet: false }))?;
            nanos = took(case.collective, &self.spans(0));
        }
        // At least one nanosecond, because Criterion divides by it.
        Ok(Duration::from_nanos(nanos.max(1)))
    }

    fn spans(&self, batch: usize) -> Vec<Span> {
        (0..self.ranks.len() as u32).map(|rank| self.board.span(rank, batch)).collect()
    }

    fn order(&mut self, order: &RankOrder) -> Result<()> {
        for rank in &mut self.ranks {
            writeln!(rank.get_mut(), "{order}").map_err(|why| broken("a rank", &why))?;
        }
        self.answers("ok")
    }

    /// Reads the next line of every rank, which must begin with `word`. The error names the first rank that answers
    /// otherwise or has ended: other ranks may wait for it.
    fn answers(&mut self, word: &str) -> Result<()> {
        let mut deadline = Instant::now() + DEADLINE;
        let mut wrong: Option<String> = None;
        let mut waiting: Vec<(usize, String)> = (0..self.ranks.len()).map(|number| (number, String::new())).collect();
        while !waiting.is_empty() && Instant::now() < deadline {
            let ranks = &mut self.ranks;
            waiting.retain_mut(|(number, line)| {
                let said = match ranks[*number].read_line(line) {
                    Ok(0) => "the process has exited".to_owned(),
                    Ok(_) if line.split_whitespace().next() == Some(word) => return false,
                    Ok(_) => line.trim().to_owned(),
                    Err(why) if matches!(why.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => return true,
                    Err(why) => why.to_string(),
                };
                if wrong.is_none() {
                    deadline = deadline.min(Instant::now() + GRACE);
                    wrong = Some(format!("rank {number}: {said}"));
                }
                false
            });
        }
        if let Some(what) = wrong {
            return Err(Error::internal(what));
        }
        waiting.first().map_or(Ok(()), |(number, _)| {
            Err(Error::internal(format!("rank {number} has not answered within {} s", DEADLINE.as_secs())))
        })
    }
}

impl Drop for BenchWorld {
    fn drop(&mut self) {
        // A rank that has ended does not need the order.
        for rank in &mut self.ranks {
            let _ = writeln!(rank.get_mut(), "quit");
        }
    }
}

/// Returns the connections of all ranks in rank order, once each has sent its number.
fn gather(listener: &UnixListener, children: &mut Children, count: u32) -> Result<Vec<BufReader<UnixStream>>> {
    let deadline = Instant::now() + DEADLINE;
    let mut found = Vec::new();
    while found.len() < count as usize {
        match listener.accept() {
            Ok((stream, _)) => found.push(numbered(stream)?),
            Err(why) if why.kind() == ErrorKind::WouldBlock => {
                if children.any_ended() {
                    return Err(Error::internal("a rank exited during its start"));
                }
                if Instant::now() > deadline {
                    return Err(Error::internal("the ranks did not connect in time"));
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(why) => return Err(broken("the socket", &why)),
        }
    }
    found.sort_by_key(|&(number, _)| number);
    Ok(found.into_iter().map(|(_, rank)| rank).collect())
}

/// Reads a rank's number, which it sends first.
fn numbered(stream: UnixStream) -> Result<(u32, BufReader<UnixStream>)> {
    stream.set_nonblocking(false).map_err(|why| broken("a rank", &why))?;
    let mut rank = BufReader::new(stream);
    let mut line = String::new();
    let first = rank.get_ref().set_read_timeout(Some(DEADLINE)).and_then(|()| rank.read_line(&mut line));
    first.and_then(|_| rank.get_ref().set_read_timeout(Some(LOOK))).map_err(|why| broken("a rank", &why))?;
    let number = line.strip_prefix("pid ").and_then(|rest| rest.split_whitespace().next()?.parse().ok());
    let number = number.ok_or_else(|| {
        Error::internal(format!("the first line of a rank is `{}`, expected `pid NUMBER`", line.trim()))
    })?;
    Ok((number, rank))
}

fn broken(what: &str, why: &std::io::Error) -> Error {
    Error::internal(format!("{what}: {why}"))
}

/// Returns the time of a batch: of its slowest rank, or for a rooted collective from the earliest possible start to the
/// end of the last rank.
///
/// A broadcast or scatter starts at the root, which has the data. A reduce or gather starts when the last rank has
/// started, because the root waits for all.
fn took(collective: Collective, ranks: &[Span]) -> u64 {
    let end = ranks.iter().map(|span| span.end).max().unwrap_or(0);
    let begin = match collective {
        Collective::Broadcast | Collective::Scatter => ranks.first().map_or(0, |root| root.begin),
        Collective::Reduce | Collective::Gather => ranks.iter().map(|span| span.begin).max().unwrap_or(0),
        _ => return ranks.iter().map(|span| span.end - span.begin).max().unwrap_or(0),
    };
    end.saturating_sub(begin)
}

/// The world that is running, if any.
#[derive(Debug)]
pub struct Worlds {
    program: PathBuf,
    running: Option<(String, u32, BenchWorld)>,
}

impl Worlds {
    /// Returns a value without a world; worlds will run `program` as their ranks.
    pub fn of(program: impl Into<PathBuf>) -> Self {
        Self { program: program.into(), running: None }
    }

    /// Returns the world with this transport and number of ranks. Another running world is ended first, because its
    /// processes would share the cores.
    ///
    /// # Panics
    /// Panics if it cannot be started: a bench cannot go on.
    pub fn get(&mut self, transport: &str, ranks: u32) -> &mut BenchWorld {
        let fits = |(of, count, _): &(String, u32, BenchWorld)| of == transport && *count == ranks;
        if !self.running.as_ref().is_some_and(fits) {
            self.running = None;
            let world = BenchWorld::start(&self.program, transport, ranks)
                .unwrap_or_else(|error| panic!("cannot start {ranks} ranks over {transport}: {error}"));
            self.running = Some((transport.to_owned(), ranks, world));
        }
        match &mut self.running {
            Some((_, _, world)) => world,
            None => unreachable!("a world was started"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_of_a_root_lasts_until_the_last_rank_is_done_and_others_as_long_as_the_slowest() {
        let ranks = [Span { begin: 10, end: 30 }, Span { begin: 25, end: 60 }];
        assert_eq!(took(Collective::AllReduce, &ranks), 35);
        assert_eq!(took(Collective::Broadcast, &ranks), 50);
        assert_eq!(took(Collective::Gather, &ranks), 35);
        assert_eq!(took(Collective::Reduce, &[Span { begin: 0, end: 30 }, Span { begin: 25, end: 26 }]), 5);
    }
}
