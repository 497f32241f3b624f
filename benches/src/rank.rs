//! One rank of the engine, without torch: connects to the others, then follows a driver's orders until `quit`.
//!
//! Its arguments are `DIR RANK RANKS CORE [CODEC]`. The socket `DIR/socket` brings orders ([`RankOrder`]), times go to
//! the memory `DIR/board` ([`Board`]), and the ranks connect through the store `DIR/store`. With a codec all calls are
//! compressed. Owns the definition of a timed call. Read [`serve`] first.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use accl_engine::{CallDesc, Engine, Group, GroupRole, GroupSpec, Mode, config_from_environment};
use accl_schedule::Algorithm;
use accl_testkit::{DirStore, finish_submitted};
use accl_types::{Collective, Error, Rank, Result};

use crate::board::{Board, Span, now};
use crate::cases::{AUTO, Tensors, algorithm_name};
use crate::order::{RankOrder, Run};
use crate::pin;

/// Deadline of the creation of a group and of each call.
const DEADLINE: Duration = Duration::from_secs(120);

/// The parameters of a rank's process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankSpec {
    /// Directory shared by the ranks and the driver.
    pub dir: PathBuf,
    /// Rank of the process.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// The core to stay on; `None` if ranks share cores.
    pub core: Option<usize>,
    /// Codec that compresses all calls; `None` for no compression.
    pub codec: Option<String>,
}

impl RankSpec {
    /// Returns the arguments of the rank program.
    pub fn to_arguments(&self) -> Vec<String> {
        let core = self.core.map_or("-1".to_owned(), |core| core.to_string());
        let spec = [self.dir.to_string_lossy().into_owned(), self.rank.to_string(), self.ranks.to_string(), core];
        spec.into_iter().chain(self.codec.clone()).collect()
    }

    /// Parses arguments; `None` if they do not describe a rank.
    pub fn from_arguments(arguments: &[String]) -> Option<Self> {
        let [dir, rank, ranks, core, codec @ ..] = arguments else { return None };
        if codec.len() > 1 {
            return None;
        }
        Some(Self {
            dir: PathBuf::from(dir),
            rank: rank.parse().ok()?,
            ranks: ranks.parse().ok()?,
            core: usize::try_from(core.parse::<i64>().ok()?).ok(),
            codec: codec.first().cloned(),
        })
    }
}

/// Runs a rank until its driver says `quit` or has ended.
///
/// # Errors
/// If it cannot connect to the driver or the other ranks, or cannot read an order. The error of a call is sent to the
/// driver instead.
pub fn serve(spec: &RankSpec) -> Result<()> {
    // Pinned before the engine counts its cores, as launchers do.
    if let Some(core) = spec.core {
        pin::stay_on(core).map_err(|why| unable("the core", why))?;
    }
    let mut driver = UnixStream::connect(spec.dir.join("socket")).map_err(|why| unable("the socket", why))?;
    let orders = BufReader::new(UnixStream::try_clone(&driver).map_err(|why| unable("the socket", why))?);
    let mut answer = |text: &str| writeln!(driver, "{text}").map_err(|why| unable("the driver", why));
    // Sent before the ranks connect, so that the driver can end them if they never do.
    answer(&format!("pid {} {}", spec.rank, std::process::id()))?;
    let mut running = RunningRank::join(spec)?;
    answer(&format!("ready {}", env!("CARGO_PKG_VERSION")))?;
    for line in orders.lines() {
        let line = line.map_err(|why| unable("the driver", why))?;
        if line == "quit" {
            break;
        }
        answer(&match RankOrder::from_line(&line)? {
            None => "none".to_owned(),
            Some(order) => match running.obey(&order) {
                Ok(()) => "ok".to_owned(),
                Err(error) => format!("wrong {error}"),
            },
        })?;
    }
    Ok(())
}

fn unable(what: &str, why: std::io::Error) -> Error {
    Error::internal(format!("{what}: {why}"))
}

/// A running rank.
struct RunningRank {
    rank: u32,
    ranks: u32,
    engine: Arc<Engine>,
    /// Whether all calls are compressed.
    encodes: bool,
    store: DirStore,
    /// Groups: one for the engine's own choice, and one for each algorithm that is forced.
    groups: HashMap<(Option<Collective>, &'static str), Arc<Group>>,
    board: Board,
    tensors: Vec<Tensors>,
}

impl RunningRank {
    fn join(spec: &RankSpec) -> Result<Self> {
        let board = Board::open(&spec.dir.join("board")).map_err(|why| unable("the board", why))?;
        let mut config = config_from_environment()?;
        if let Some(codec) = &spec.codec {
            config.set_option("compression", codec)?;
            config.set_option("compressed_calls", "all")?;
        }
        let mut running = Self {
            rank: spec.rank,
            ranks: spec.ranks,
            engine: accl_calibrate::engine(config),
            encodes: spec.codec.is_some(),
            store: DirStore::new(spec.dir.join("store"))?,
            groups: HashMap::new(),
            board,
            tensors: Vec::new(),
        };
        running.group(Collective::AllReduce, None)?;
        Ok(running)
    }

    fn obey(&mut self, order: &RankOrder) -> Result<()> {
        let (case, rank, ranks) = (&order.case, self.rank, self.ranks);
        let group = self.group(case.collective, case.algorithm)?;
        self.tensors.resize_with(order.outstanding.max(self.tensors.len()), Tensors::default);
        let tensors = &mut self.tensors[..order.outstanding];
        let describe = |tensors: &mut Tensors| {
            let mut desc = tensors.call(case, rank, ranks, 0);
            desc.mode = order.mode;
            // Zeros, so that repeated sums in place do not change.
            match order.run {
                Some(_) => tensors.clear(case, ranks),
                None => tensors.fill(case, rank, ranks),
            }
            desc
        };
        let mut descs: Vec<CallDesc> = tensors.iter_mut().map(describe).collect();
        match order.run {
            Some(run) => self.time(&group, &mut descs, run),
            None => self.check(&group, &mut descs, order),
        }
    }

    fn check(&self, group: &Arc<Group>, descs: &mut [CallDesc], order: &RankOrder) -> Result<()> {
        let case = &order.case;
        self.board.meet(self.rank, self.ranks);
        let mark = self.board.mark(self.rank);
        call(group, descs)?;
        if case.collective == Collective::Barrier && !self.board.all_marked(self.ranks, mark) {
            return Err(Error::internal("the barrier completed before all ranks arrived"));
        }
        self.tensors[..order.outstanding].iter().try_for_each(|one| {
            one.check(case, self.rank, self.ranks, 0, self.encodes).map_err(|what| {
                let name = algorithm_name(case.algorithm);
                Error::internal(format!("{} by {name} of {} bytes: {what}", case.collective, case.bytes))
            })
        })
    }

    fn time(&self, group: &Arc<Group>, descs: &mut [CallDesc], run: Run) -> Result<()> {
        self.board.meet(self.rank, self.ranks);
        for _ in 0..run.batches * run.calls / 10 + 1 {
            call(group, descs)?;
        }
        for batch in 0..run.batches {
            if run.meet || batch == 0 {
                self.board.meet(self.rank, self.ranks);
            }
            let begin = now();
            for _ in 0..run.calls {
                call(group, descs)?;
            }
            self.board.publish(self.rank, batch, Span { begin, end: now() });
        }
        Ok(())
    }

    fn group(&mut self, collective: Collective, algorithm: Option<&'static Algorithm>) -> Result<Arc<Group>> {
        let name = algorithm_name(algorithm);
        let vacant = match self.groups.entry((algorithm.map(|_| collective), name)) {
            Entry::Occupied(made) => return Ok(made.get().clone()),
            Entry::Vacant(vacant) => vacant,
        };
        let mut config = self.engine.config().clone();
        let mut title = AUTO.to_owned();
        if algorithm.is_some() {
            config.set_option("algorithm", &format!("{collective}={name}"))?;
            title = format!("{collective}/{name}");
        }
        let spec = GroupSpec {
            name: title.clone(),
            rank: Rank(self.rank),
            world: self.ranks,
            timeout: DEADLINE,
            config,
            master: None,
            global_ranks: Vec::new(),
            role: GroupRole::Default,
        };
        let group = self.engine.create_group(spec, &self.store.prefixed(&title), &mut || false)?;
        Ok(vacant.insert(group).clone())
    }
}

impl Drop for RunningRank {
    fn drop(&mut self) {
        self.engine.shutdown();
    }
}

/// Runs the calls that count as one.
fn call(group: &Arc<Group>, descs: &mut [CallDesc]) -> Result<()> {
    match descs {
        [one] if one.mode == Mode::Blocking => finish_submitted(&group.submit_blocking(one)?),
        all if all.iter().all(|one| one.mode == Mode::Blocking) => {
            all.iter_mut().try_for_each(|one| finish_submitted(&group.submit_blocking(one)?))
        }
        all => {
            let begun: Vec<_> = all.iter_mut().map(|one| group.submit_blocking(one)).collect::<Result<_>>()?;
            begun.iter().try_for_each(finish_submitted)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_spec_survives_the_command_line() {
        let plain = RankSpec { dir: "/some where".into(), rank: 2, ranks: 4, core: None, codec: None };
        let pinned = RankSpec { core: Some(3), codec: Some("maxmin:4".into()), ..plain.clone() };
        for spec in [plain, pinned] {
            assert_eq!(RankSpec::from_arguments(&spec.to_arguments()), Some(spec));
        }
        assert_eq!(RankSpec::from_arguments(&["--bench".to_owned()]), None);
    }
}
