//! One rank of the engine without torch, among the contenders of `make bench-peers`: started as
//! `PROGRAM DIR RANK RANKS CORE [CODEC]` and told what to do over a socket. `rank.c` has the protocol, `board.h` the memory
//! in which times are told. With a codec the group compresses all calls.

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::yield_now;
use std::time::Duration;

use accl_benches::cases::{COLLECTIVES, Case, Tensors};
use accl_engine::{CallDesc, Group, GroupSpec, Mode, config_from_environment};
use accl_testkit::{DirStore, finish_ran};
use accl_types::{Collective, Dtype, Error, Rank, Result};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::process::{Signal, set_parent_process_death_signal};
use rustix::thread::{CpuSet, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};

fn main() -> ExitCode {
    // Of a parent that is gone already no signal comes, but its end of the socket is closed then.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(place) = Place::from_arguments(&arguments) else {
        eprintln!("usage: accl-peers-rank DIR RANK RANKS CORE [CODEC]");
        return ExitCode::from(2);
    };
    match serve(&place) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rank {}: {error}", place.rank);
            ExitCode::FAILURE
        }
    }
}

struct Place<'a> {
    dir: &'a Path,
    rank: u32,
    ranks: u32,
    core: Option<usize>,
    codec: Option<&'a str>,
}

impl<'a> Place<'a> {
    fn from_arguments(arguments: &'a [String]) -> Option<Self> {
        let [dir, rank, ranks, core, codec @ ..] = arguments else { return None };
        if codec.len() > 1 {
            return None;
        }
        let core = core.parse::<i64>().ok()?;
        Some(Self {
            dir: Path::new(dir),
            rank: rank.parse().ok()?,
            ranks: ranks.parse().ok()?,
            core: usize::try_from(core).ok(),
            codec: codec.first().map(String::as_str),
        })
    }
}

/// An order of the driver.
struct Order {
    case: Case,
    mode: Mode,
    /// Calls that are begun before the first is waited for, each on a tensor of its own.
    outstanding: usize,
    /// `None`: make one call, and look at its result.
    run: Option<Run>,
}

struct Run {
    batches: usize,
    calls: usize,
    /// Whether ranks begin each batch together, or only the first.
    meet: bool,
}

impl Order {
    /// `None` when there is no such call here.
    fn from_line(line: &str) -> Result<Option<Self>> {
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
        let collective = COLLECTIVES.iter().find(|collective| collective.name() == name);
        let dtype = Dtype::ALL.iter().find(|known| known.name() == dtype);
        let (Some(&collective), Some(&dtype)) = (collective, dtype) else { return Ok(None) };
        let case = Case { collective, algorithm: None, dtype, bytes: number(bytes)? as u64 };
        Ok(Some(Self { case, mode, outstanding, run }))
    }
}

/// `all_reduce*100` is a hundred calls that count as one, `all_reduce&100` a hundred that are outstanding together.
fn many(name: &str) -> (&str, Mode, usize) {
    let parts = |sign| name.split_once(sign).and_then(|(name, count): (&str, &str)| Some((name, count.parse().ok()?)));
    match (parts('*'), parts('&')) {
        (Some((name, count)), _) => (name, Mode::Blocking, count),
        (_, Some((name, count))) => (name, Mode::Async, count),
        (None, None) => (name, Mode::Blocking, 1),
    }
}

fn serve(place: &Place<'_>) -> Result<()> {
    let unable = |what: &str, why: std::io::Error| Error::internal(format!("{what}: {why}"));
    if let Some(core) = place.core {
        let mut one = CpuSet::new();
        one.set(core);
        sched_setaffinity(None, &one).map_err(|why| unable("the core", why.into()))?;
    }
    let mut driver = UnixStream::connect(place.dir.join("socket")).map_err(|why| unable("the socket", why))?;
    let orders = BufReader::new(UnixStream::try_clone(&driver).map_err(|why| unable("the socket", why))?);
    let mut answer = |text: &str| writeln!(driver, "{text}").map_err(|why| unable("the driver", why));
    let board = Board::open(&place.dir.join("board")).map_err(|why| unable("the board", why))?;
    // Before the ranks meet, so that the driver can end them should they never do.
    answer(&format!("pid {} {}", place.rank, std::process::id()))?;

    let mut config = config_from_environment()?;
    if let Some(codec) = place.codec {
        config.set_option("compression", codec)?;
        config.set_option("compressed_calls", "all")?;
    }
    let engine = accl_calibrate::engine(config);
    let spec = GroupSpec {
        name: "peers".to_owned(),
        rank: Rank(place.rank),
        world: place.ranks,
        timeout: Duration::from_secs(120),
        config: engine.config().clone(),
        master: None,
        global_ranks: Vec::new(),
    };
    let group = engine.create_group(spec, &DirStore::new(place.dir.join("store"))?, &mut || false)?;
    answer(&format!("ready {}", env!("CARGO_PKG_VERSION")))?;
    let mut member = Member { rank: place.rank, ranks: place.ranks, group, board, tensors: Vec::new() };
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
    engine.shutdown();
    Ok(())
}

struct Member {
    rank: u32,
    ranks: u32,
    group: std::sync::Arc<Group>,
    board: Board,
    tensors: Vec<Tensors>,
}

impl Member {
    fn obey(&mut self, order: &Order) -> Result<()> {
        let (case, rank, ranks) = (&order.case, self.rank, self.ranks);
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
        let Some(run) = &order.run else {
            self.board.meet(rank, ranks);
            let mark = self.board.mark(rank);
            call(&self.group, &descs)?;
            if case.collective == Collective::Barrier && !self.board.all_marked(ranks, mark) {
                return Err(Error::internal("the barrier ended before all ranks came"));
            }
            let mut results = self.tensors[..order.outstanding].iter();
            return results.try_for_each(|one| one.check(case, rank, ranks, 0).map_err(Error::internal));
        };
        self.board.meet(rank, ranks);
        for _ in 0..run.batches * run.calls / 10 + 1 {
            call(&self.group, &descs)?;
        }
        for batch in 0..run.batches {
            if run.meet || batch == 0 {
                self.board.meet(rank, ranks);
            }
            let begin = now();
            for _ in 0..run.calls {
                call(&self.group, &descs)?;
            }
            self.board.tell(rank, batch, begin, now());
        }
        Ok(())
    }
}

/// What counts as one call.
fn call(group: &std::sync::Arc<Group>, descs: &[CallDesc]) -> Result<()> {
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

fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

const RANKS: usize = 64;
const BATCHES: usize = 4096;
const LINE_WORDS: usize = 8;
const MARKS_AT: usize = RANKS * LINE_WORDS;
const SPANS_AT: usize = 2 * MARKS_AT;
const BOARD_WORDS: usize = SPANS_AT + RANKS * BATCHES * 2;
const SPINS_BEFORE_YIELD: u32 = 20;

/// The memory shared with the driver, see `board.h`. Mapped until the end of the process.
struct Board {
    words: NonNull<AtomicU64>,
}

impl Board {
    fn open(path: &Path) -> std::io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let len = BOARD_WORDS * size_of::<u64>();
        // SAFETY: a new mapping at a place that the kernel chooses; the driver has made the file as long and never
        // shortens it.
        let base =
            unsafe { mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0)? };
        let words = NonNull::new(base.cast()).ok_or(std::io::ErrorKind::InvalidInput)?;
        Ok(Self { words })
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < BOARD_WORDS, "the board ends before word {index}");
        // SAFETY: inside the mapping, which stays; all sides treat it as atomics or take turns.
        unsafe { self.words.add(index).as_ref() }
    }

    /// Returns when all ranks have called it as often as this one.
    fn meet(&self, rank: u32, ranks: u32) {
        let arrivals = |rank: u32| self.word(rank as usize * LINE_WORDS);
        let mine = arrivals(rank).load(Ordering::Relaxed) + 1;
        arrivals(rank).store(mine, Ordering::Release);
        for other in 0..ranks {
            let mut looks = 0;
            while arrivals(other).load(Ordering::Acquire) < mine {
                if looks < SPINS_BEFORE_YIELD {
                    std::hint::spin_loop()
                } else {
                    yield_now()
                }
                looks += 1;
            }
        }
    }

    /// Leaves a mark, by which the others see that this rank has come to a barrier.
    fn mark(&self, rank: u32) -> u64 {
        self.word(MARKS_AT + rank as usize * LINE_WORDS).fetch_add(1, Ordering::SeqCst) + 1
    }

    fn all_marked(&self, ranks: u32, mark: u64) -> bool {
        (0..ranks).all(|rank| self.word(MARKS_AT + rank as usize * LINE_WORDS).load(Ordering::SeqCst) >= mark)
    }

    fn tell(&self, rank: u32, batch: usize, begin: u64, end: u64) {
        let at = SPANS_AT + (rank as usize * BATCHES + batch) * 2;
        self.word(at).store(begin, Ordering::Relaxed);
        self.word(at + 1).store(end, Ordering::Relaxed);
    }
}
