//! How the ranks of a group find each other: what each publishes in the store, and what is made of it.
//!
//! Owns the keys and texts; connections are made by `accl-transport`. Read [`meet`] first.

use std::time::{Duration, Instant};

use accl_schedule::cost::Machine;
use accl_transport::Card;
use accl_types::{Error, Result};

use crate::cores::Cores;
use crate::group::GroupSpec;
use crate::hash::hash_words;
use crate::store::Store;

/// The store is asked in slices of this length, so that an interrupt is seen and missing ranks can be listed.
const SLICE: Duration = Duration::from_millis(200);
/// First line of what a rank publishes; another text is another version.
const MAGIC: &str = "accl-group 2";

/// What a rank publishes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GroupCard {
    /// How many groups the process made before: tells groups of the same processes apart.
    pub(crate) counter: u64,
    /// Everything the ranks must agree on.
    pub(crate) agreed: String,
    /// The cores that it may use.
    pub(crate) cores: Cores,
    /// Of the first rank the constants by which all choose algorithms.
    pub(crate) machine: Option<Machine>,
    /// Its endpoint.
    pub(crate) card: Card,
}

impl GroupCard {
    pub(crate) fn to_text(&self) -> String {
        let machine = self.machine.map_or_else(String::new, |machine| machine.to_string());
        format!("{MAGIC}\n{}\n{}\n{}\n{machine}\n{}", self.counter, self.agreed, self.cores, self.card.to_text())
    }

    pub(crate) fn from_text(text: &str) -> Result<Self> {
        let broken =
            |what: &str| Error::rendezvous(format!("the store holds something that is no rank's card: {what}"));
        let mut lines = text.splitn(6, '\n');
        if lines.next() != Some(MAGIC) {
            return Err(broken("another version of torch-accl? install the same one on all hosts"));
        }
        let counter = lines.next().and_then(|line| line.parse().ok()).ok_or_else(|| broken("no counter"))?;
        let agreed = lines.next().ok_or_else(|| broken("no settings"))?.to_owned();
        let cores = lines.next().and_then(|line| line.parse().ok()).ok_or_else(|| broken("no cores"))?;
        let machine = match lines.next().ok_or_else(|| broken("no constants"))? {
            "" => None,
            text => Some(text.parse().map_err(|why: String| broken(&why))?),
        };
        let card = Card::from_text(lines.next().ok_or_else(|| broken("no address"))?)?;
        Ok(Self { counter, agreed, cores, machine, card })
    }
}

/// Publishes `mine` and returns all ranks' cards in rank order.
///
/// # Errors
/// `Timeout` listing the ranks that did not come; `Configuration` when settings differ; `Rendezvous` when the store
/// fails or two processes claim one rank; `Aborted` when interrupted.
pub(crate) fn meet(
    spec: &GroupSpec,
    mine: &GroupCard,
    store: &dyn Store,
    deadline: Instant,
    interrupt: &mut dyn FnMut() -> bool,
) -> Result<Vec<GroupCard>> {
    let rank = spec.rank.0;
    // torch gives disjoint sub-groups of one parent the same name and keys: the ranks in the job tell them apart.
    let place = format!("accl/{:016x}", hash_words(spec.global_ranks.iter().copied()));
    // Each making of the group over the same store is an incarnation of its own.
    let incarnation = store.add(&format!("{place}/rank/{rank}"), 1)?;
    let key = |incarnation: i64, rank: u32| format!("{place}/{incarnation}/{rank}");
    if incarnation > 1 {
        refuse_second_process(&key(incarnation - 1, rank), rank, mine, store)?;
    }
    let key = |rank: u32| key(incarnation, rank);
    store.set(&key(rank), mine.to_text().as_bytes())?;
    let keys: Vec<String> = (0..spec.world).map(key).collect();
    let began = Instant::now();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if store.wait(&keys, left.min(SLICE))? {
            break;
        }
        if interrupt() {
            return Err(Error::aborted("interrupted while waiting for the other ranks"));
        }
        if Instant::now() >= deadline {
            return Err(incomplete(spec, &keys, store, began)?);
        }
    }
    let mut cards = Vec::with_capacity(keys.len());
    for (rank, key) in keys.iter().enumerate() {
        let text = String::from_utf8_lossy(&store.get(key)?).into_owned();
        let card = GroupCard::from_text(&text)?;
        if card.agreed != mine.agreed {
            return Err(settings_differ(mine, &card, spec.rank.0, rank));
        }
        cards.push(card);
    }
    Ok(cards)
}

fn incomplete(spec: &GroupSpec, keys: &[String], store: &dyn Store, began: Instant) -> Result<Error> {
    let mut missing = Vec::new();
    for (rank, key) in keys.iter().enumerate() {
        if !store.check(std::slice::from_ref(key))? {
            missing.push(rank.to_string());
        }
    }
    let waited = began.elapsed().as_millis();
    Ok(Error::timeout(format!(
        "Timed out waiting {waited}ms for the group to be complete: {} of {} ranks are missing: {}; start them, or raise \
         the timeout",
        missing.len(),
        spec.world,
        missing.join(", ")
    )))
}

/// A rank that comes again over the same store must be the same process, or one whose predecessor has ended.
fn refuse_second_process(earlier: &str, rank: u32, mine: &GroupCard, store: &dyn Store) -> Result<()> {
    if !store.check(&[earlier.to_owned()])? {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&store.get(earlier)?).into_owned();
    let Ok(other) = GroupCard::from_text(&text) else { return Ok(()) };
    if other.card.uuid == mine.card.uuid {
        return Ok(());
    }
    let same_host = other.card.host_id == mine.card.host_id;
    if same_host && !process_is_alive(other.card.pid) {
        return Ok(());
    }
    Err(Error::rendezvous(format!(
        "rank {rank} is taken already by process {} on host {}; give every process a rank of its own",
        other.card.pid, other.card.hostname
    )))
}

fn process_is_alive(pid: u32) -> bool {
    let Some(pid) = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw) else { return false };
    !matches!(rustix::process::test_kill_process(pid), Err(rustix::io::Errno::SRCH))
}

fn settings_differ(mine: &GroupCard, other: &GroupCard, my_rank: u32, rank: usize) -> Error {
    let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let (mine, other) = (words(&mine.agreed), words(&other.agreed));
    let differing: Vec<String> = mine
        .iter()
        .zip(&other)
        .filter(|(a, b)| a != b)
        .map(|(a, b)| format!("rank {my_rank} has {a}, rank {rank} has {b}"))
        .collect();
    let detail = if differing.is_empty() { "the lists of settings differ".to_owned() } else { differing.join("; ") };
    Error::configuration(format!(
        "the ranks' settings disagree: {detail}; give all ranks the same environment and options"
    ))
}
