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

use crate::spec::GroupSpec;

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

    /// Returns what the ranks of a group must agree on, without white space; `None` if there is nothing.
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

/// A component that executes whole calls of one group. The group and calls in flight hold it. Its last reference may be
/// dropped under the engine's lock, so `drop` must not wait for another thread.
pub trait Offload: Send + Sync + fmt::Debug {
    /// Returns the name that is reported in place of an algorithm for the calls of this component.
    fn name(&self) -> &'static str;

    /// Decides whether this component executes a call. The answer must be the same on all ranks, so it may depend only
    /// on values that they agree on: collective, dtype, operator, root, [`CallDesc::size_bytes`], settings. If ranks
    /// decide otherwise, the call fails on all. Any thread may ask, also without a call: it must neither block nor have
    /// an effect.
    ///
    /// The engine asks only for collectives with equal blocks in host memory that are not compressed
    /// ([`CallDesc::why_on_host`]), if no component before this one has taken them.
    fn route(&self, desc: &CallDesc) -> Route;

    /// Accepts the links to the same component of the other ranks, before the first call. Returns the receiver of what
    /// they send. A group whose components return two receivers cannot be created.
    fn connect(&self, _links: Arc<dyn PacketLinks>) -> Option<Arc<dyn PacketSink>> {
        None
    }

    /// Returns whether this component executes large calls in general, so that the group needs no other lanes.
    fn takes_large_calls(&self) -> bool {
        false
    }

    /// Returns whether threads that wait for a call of this component should help it meanwhile.
    fn needs_help(&self) -> bool {
        false
    }

    /// Registers the calling thread as a helper, because it waits for a call of this component. The thread then calls
    /// [`Offload::help`] again and again, and [`Offload::end_help`] at the end.
    fn begin_help(&self) {}

    /// Makes progress on the calls of this component without waiting.
    fn help(&self) -> Progress {
        Progress::Idle
    }

    /// Ends what [`Offload::begin_help`] began.
    fn end_help(&self) {}

    /// Returns a readable description in lines that end with a line break: the component, and what it has done.
    fn describe(&self) -> String {
        String::new()
    }

    /// Ends the component's part in the group, after a failure or cleanly. Also called if the group could not be
    /// created after all. No call follows, but calls in flight may still end. Must not wait for them.
    fn close(&self, _has_failed: bool) {}
}

/// Executor of a call.
#[derive(Debug)]
pub enum Route {
    /// The component executes the call through this worker.
    Offload(Arc<dyn External>),
    /// Another component or the host executes the call. The clause says why, for logs of the component.
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
    /// Sends frames of packets; a frame to a rank that does not exist is dropped. Takes the engine's lock, under which
    /// the [`PacketSink`] of this rank runs. So a caller must not hold a lock that its sink takes.
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

/// The components of a group that is being created. They are closed if it is not created.
#[derive(Default)]
pub(crate) struct OpenOffloads(Vec<Arc<dyn Offload>>);

impl OpenOffloads {
    pub(crate) fn add(&mut self, offload: Arc<dyn Offload>) {
        self.0.push(offload);
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<dyn Offload>> {
        self.0.iter()
    }

    /// Returns the components, for a group that was created.
    pub(crate) fn take(mut self) -> Vec<Arc<dyn Offload>> {
        std::mem::take(&mut self.0)
    }
}

impl Drop for OpenOffloads {
    fn drop(&mut self) {
        self.0.iter().for_each(|offload| offload.close(true));
    }
}

/// A thread that helps a component; it stops when this is dropped.
pub(crate) struct Helping<'a>(&'a dyn Offload);

impl<'a> Helping<'a> {
    pub(crate) fn begin(offload: &'a dyn Offload) -> Self {
        offload.begin_help();
        Self(offload)
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
