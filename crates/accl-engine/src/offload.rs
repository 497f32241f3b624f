//! Components that execute whole calls of a group instead of the engine's schedules: a device, or another library.
//!
//! Owns the interface between them and the engine. The components are crates of their own; a program registers each
//! kind with [`Engine::add_offload`](crate::Engine::add_offload). For every call the group asks its components in the
//! order of registration, and the host executes the calls that none of them takes. The executor begins a call of a
//! component once all ranks have issued it. Read [`OffloadKind`] first, then [`Offload`].

use std::fmt;
use std::sync::Arc;

use accl_executor::call::{CallDesc, External};
use accl_executor::group::PacketSink;
use accl_types::config::{Config, Redirect, RedirectTo};
use accl_types::{Error, Moment, Rank, Result, nearest};

use crate::api::spec::GroupSpec;

/// Function that a long step calls every 50 ms or so. Its error ends the step: the creation of the group was
/// interrupted, or another rank has given up.
pub type Poll<'a> = &'a mut dyn FnMut() -> Result<()>;

/// A kind of component that executes whole calls. An engine has one value of each registered kind, for all groups.
pub trait OffloadKind: Send + Sync {
    /// Returns the name of the kind.
    fn name(&self) -> &'static str;

    /// Returns whether users give collectives to the kind by its name, as in `sidestep="all_reduce=NAME"`
    /// ([`RedirectTo::Offload`]).
    fn is_named_by_sidestep(&self) -> bool {
        false
    }

    /// Returns what the ranks of a group must agree on; `None` if there is nothing.
    ///
    /// # Errors
    /// `Configuration` for settings of the group that cannot work. All ranks then fail with this error.
    fn agreed(&self, _group: &GroupSpec) -> Result<Option<String>> {
        Ok(None)
    }

    /// Begins to open the component for a group, on the thread that creates the group. If creation starts over, the
    /// component is dropped and opened again.
    ///
    /// # Errors
    /// The component cannot be opened; errors of `poll`. All ranks then fail with this error.
    fn open(&self, group: &OffloadGroup<'_>, poll: Poll<'_>) -> Result<Opening>;

    /// Ends everything that the kind runs in this process, at most until `until`. Returns a description of each
    /// component that is busy even then.
    fn shutdown(&self, _until: Moment) -> Vec<String> {
        Vec::new()
    }
}

/// Refuses settings for kinds that are not among `kinds`.
///
/// # Errors
/// `Configuration`, with the names that are accepted.
pub fn check(config: &Config, kinds: &[Arc<dyn OffloadKind>]) -> Result<()> {
    if config.device != Config::default().device && !kinds.iter().any(|kind| kind.name() == "device") {
        return Err(Error::configuration(format!("device `{}`: this engine cannot open devices", config.device)));
    }
    let named = || kinds.iter().filter(|kind| kind.is_named_by_sidestep()).map(|kind| kind.name());
    for Redirect { collective, to } in &config.redirects {
        let RedirectTo::Offload(name) = to else { continue };
        if !named().any(|known| known == name) {
            let known: Vec<&str> = std::iter::once("host").chain(named()).collect();
            let hint = nearest(name, known.iter().copied()).map(|near| format!("; did you mean {near}?"));
            return Err(Error::configuration(format!(
                "sidestep (ACCL_SIDESTEP): `{collective}={name}`: `{name}` cannot run collectives{}; expected one of {}",
                hint.unwrap_or_default(),
                known.join(", ")
            )));
        }
    }
    Ok(())
}

/// The group for which a component is opened.
#[derive(Clone, Copy, Debug)]
pub struct OffloadGroup<'a> {
    /// The group's description.
    pub spec: &'a GroupSpec,
    /// Identity of the group, the same on all ranks.
    pub id: u64,
    /// Time at which the group must exist.
    pub deadline: Moment,
}

/// Progress of a component that is being opened. All ranks must take the same steps.
pub enum Opening {
    /// The group does not use the component.
    Unused,
    /// All ranks exchange a text. Then the step gets the texts of all ranks, in rank order.
    Exchange(String, OpeningStep),
    /// The component accepts calls.
    Open(Arc<dyn Offload>),
}

/// The next step of opening a component, see [`Opening::Exchange`].
pub type OpeningStep = Box<dyn FnOnce(Vec<String>, Poll<'_>) -> Result<Opening>>;

/// A component that executes whole calls of one group. The group drops it when it was left.
pub trait Offload: Send + Sync + fmt::Debug {
    /// Returns the name that is reported in place of an algorithm for the calls of this component.
    fn name(&self) -> &'static str;

    /// Decides whether this component executes a call. The answer must be the same on all ranks, so it may depend only
    /// on values that they agree on. Called for every call of the group, by any thread: it must not block.
    fn route(&self, desc: &CallDesc) -> Route;

    /// Accepts the links to the same component of the other ranks, once the group exists. Returns the receiver of what
    /// they send. At most one component of a group may return one.
    fn connect(&self, _links: Arc<dyn PacketLinks>) -> Option<Arc<dyn PacketSink>> {
        None
    }

    /// Returns whether this component executes large calls in general, so that the group needs no other lanes.
    fn takes_large_calls(&self) -> bool {
        false
    }

    /// Registers the calling thread as a helper, because it waits for a call of this component. Returns whether
    /// [`Offload::help`] makes progress. The thread calls [`Offload::end_help`] if so.
    fn begin_help(&self) -> bool {
        false
    }

    /// Makes progress on the calls of this component without waiting.
    fn help(&self) -> Progress {
        Progress::Idle
    }

    /// Ends what [`Offload::begin_help`] began.
    fn end_help(&self) {}

    /// Returns a readable description in lines that end with a line break: the component, and what it has done.
    fn describe(&self) -> String;

    /// Ends the component's part in the group, after a failure or cleanly. No call follows, but calls in flight may
    /// still end. Must not wait for them.
    fn close(&self, has_failed: bool);
}

/// Executor of a call.
#[derive(Debug)]
pub enum Route {
    /// The component executes the call through this worker.
    Offload(Arc<dyn External>),
    /// Another component or the host executes the call, for the reason given in a clause.
    Host(&'static str),
}

/// Result of [`Offload::help`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// There is nothing to do.
    Idle,
    /// A call is in flight, or another thread makes progress on it.
    UnderWay,
    /// A call has begun or ended.
    Events,
}

/// The links of a group, for packets between the same component of different ranks.
pub trait PacketLinks: Send + Sync {
    /// Sends frames of packets. Calls the receivers of no rank, but takes the engine's lock: a caller must not hold a
    /// lock that its [`PacketSink`] takes.
    fn send(&self, frames: &[PacketFrame]);
}

/// Packets for another rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PacketFrame {
    /// The receiver.
    pub to: Rank,
    /// Number of bytes that this rank has taken from the receiver, in total.
    pub taken: u64,
    /// The packets, in the format of the component.
    pub packets: Vec<u8>,
}

/// A thread that helps a component; it stops when this is dropped.
pub(crate) struct Helping<'a>(&'a dyn Offload);

impl<'a> Helping<'a> {
    /// Begins to help; `None` if the component needs no help.
    pub(crate) fn begin(offload: &'a dyn Offload) -> Option<Self> {
        offload.begin_help().then_some(Self(offload))
    }

    pub(crate) fn help(&self) -> Progress {
        self.0.help()
    }
}

impl Drop for Helping<'_> {
    fn drop(&mut self) {
        self.0.end_help();
    }
}
