//! One rank of the engine, without torch: meets the others, then obeys a driver until it is told to quit.
//!
//! Its place is `DIR RANK RANKS CORE [CODEC]`; the socket `DIR/socket` brings orders ([`Order`]), `DIR/board` is the memory in which
//! times are told ([`Board`]), and in `DIR/store` the ranks meet. With a codec all calls are compressed. Owns what a timed call is.
//! Read [`serve`] first.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use accl_engine::{CallDesc, Engine, Group, GroupRole, GroupSpec, Mode, config_from_environment};
use accl_schedule::Algorithm;
use accl_testkit::{DirStore, finish_ran};
use accl_types::{Collective, Error, Rank, Result};

use crate::board::{Board, Span, now};
use crate::cases::{AUTO, Tensors, algorithm_name};
use crate::order::{Order, Run};
use crate::pin;

/// Deadline of the making of a group and of each call.
const DEADLINE: Duration = Duration::from_secs(120);

/// What a process needs to know of its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Where the ranks and the driver meet.
    pub dir: PathBuf,
    /// Its rank.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// The core to stay on, where every rank has its own.
    pub core: Option<usize>,
    /// What all calls are compressed with.
    pub codec: Option<String>,
}

impl Place {
    /// As arguments of the rank program.
    pub fn to_arguments(&self) -> Vec<String> {
        let core = self.core.map_or("-1".to_owned(), |core| core.to_string());
        let place = [self.dir.to_string_lossy().into_owned(), self.rank.to_string(), self.ranks.to_string(), core];
        place.into_iter().chain(self.codec.clone()).collect()
    }

    /// What arguments say; `None` when they are no place.
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

/// What a rank does until its driver says `quit` or is gone.
///
/// # Errors
/// When it cannot meet the driver or the other ranks, or cannot read an order. What a call had is answered to the driver.
pub fn serve(place: &Place) -> Result<()> {
    // Before the engine looks at what cores it has, as launchers do it.
    if let Some(core) = place.core {
        pin::stay_on(core).map_err(|why| unable("the core", why))?;
    }
    let mut driver = UnixStream::connect(place.dir.join("socket")).map_err(|why| unable("the socket", why))?;
    let orders = BufReader::new(UnixStream::try_clone(&driver).map_err(|why| unable("the socket", why))?);
    let mut answer = |text: &str| writeln!(driver, "{text}").map_err(|why| unable("the driver", why));
    // Before the ranks meet, so that the driver can end them should they never do.
    answer(&format!("pid {} {}", place.rank, std::process::id()))?;
    let mut member = Member::join(place)?;
    answer(&format!("ready {}", env!("CARGO_PKG_VERSION")))?;
    for line in orders.lines() {
        let line = line.map_err(|why| unable("the driver", why))?;
        if line == "quit" {
            break;
        }
        answer(&match Order::from_line(&line)? {
            None => "none".to_owned(),
            Some(order) => match member.obey(&order) {
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

/// A rank that is up.
struct Member {
    rank: u32,
    ranks: u32,
    engine: Arc<Engine>,
    /// All calls are compressed.
    encodes: bool,
    store: DirStore,
    /// One for the engine's own choice; each algorithm that is forced has another.
    groups: HashMap<(Option<Collective>, &'static str), Arc<Group>>,
    board: Board,
    tensors: Vec<Tensors>,
}

impl Member {
    fn join(place: &Place) -> Result<Self> {
        let board = Board::open(&place.dir.join("board")).map_err(|why| unable("the board", why))?;
        let mut config = config_from_environment()?;
        if let Some(codec) = &place.codec {
            config.set_option("compression", codec)?;
            config.set_option("compressed_calls", "all")?;
        }
        let mut member = Self {
            rank: place.rank,
            ranks: place.ranks,
            engine: accl_calibrate::engine(config),
            encodes: place.codec.is_some(),
            store: DirStore::new(place.dir.join("store"))?,
            groups: HashMap::new(),
            board,
            tensors: Vec::new(),
        };
        member.group(Collective::AllReduce, None)?;
        Ok(member)
    }

    fn obey(&mut self, order: &Order) -> Result<()> {
        let (case, rank, ranks) = (&order.case, self.rank, self.ranks);
        let group = self.group(case.collective, case.algorithm)?;
        self.tensors.resize_with(order.outstanding.max(self.tensors.len()), Tensors::default);
        let tensors = &mut self.tensors[..order.outstanding];
        let describe = |tensors: &mut Tensors| {
            let mut desc = tensors.call(case, rank, ranks, 0);
            desc.mode = order.mode;
            // Zeros, so that repeated sums in place stay what they are.
            match order.run {
                Some(_) => tensors.clear(case, ranks),
                None => tensors.fill(case, rank, ranks),
            }
            desc
        };
        let descs: Vec<CallDesc> = tensors.iter_mut().map(describe).collect();
        match order.run {
            Some(run) => self.time(&group, &descs, run),
            None => self.check(&group, &descs, order),
        }
    }

    fn check(&self, group: &Arc<Group>, descs: &[CallDesc], order: &Order) -> Result<()> {
        let case = &order.case;
        self.board.meet(self.rank, self.ranks);
        let mark = self.board.mark(self.rank);
        call(group, descs)?;
        if case.collective == Collective::Barrier && !self.board.all_marked(self.ranks, mark) {
            return Err(Error::internal("the barrier ended before all ranks came"));
        }
        self.tensors[..order.outstanding].iter().try_for_each(|one| {
            one.check(case, self.rank, self.ranks, 0, self.encodes).map_err(|what| {
                let name = algorithm_name(case.algorithm);
                Error::internal(format!("{} by {name} of {} bytes: {what}", case.collective, case.bytes))
            })
        })
    }

    fn time(&self, group: &Arc<Group>, descs: &[CallDesc], run: Run) -> Result<()> {
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
            self.board.tell(self.rank, batch, Span { begin, end: now() });
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

impl Drop for Member {
    fn drop(&mut self) {
        self.engine.shutdown();
    }
}

/// What counts as one call.
fn call(group: &Arc<Group>, descs: &[CallDesc]) -> Result<()> {
    match descs {
        [one] if one.mode == Mode::Blocking => finish_ran(&group.run(one)?),
        all if all.iter().all(|one| one.mode == Mode::Blocking) => {
            all.iter().try_for_each(|one| finish_ran(&group.run(one)?))
        }
        all => {
            let begun: Vec<_> = all.iter().map(|one| group.run(one)).collect::<Result<_>>()?;
            begun.iter().try_for_each(finish_ran)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_survives_the_command_line() {
        let plain = Place { dir: "/some where".into(), rank: 2, ranks: 4, core: None, codec: None };
        let pinned = Place { core: Some(3), codec: Some("maxmin:4".into()), ..plain.clone() };
        for place in [plain, pinned] {
            assert_eq!(Place::from_arguments(&place.to_arguments()), Some(place));
        }
        assert_eq!(Place::from_arguments(&["--bench".to_owned()]), None);
    }
}
