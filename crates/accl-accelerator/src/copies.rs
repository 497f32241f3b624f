//! Copies of one direction of a call, and the events behind them.
//!
//! This module owns after which copies an event is recorded. Read [`Copier::issue`] first.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use accl_engine::ExternalCopy;
use accl_types::{Error, Result};
use parking_lot::Mutex;

use crate::enqueued::Flag;
use crate::streams::{CallStreams, Direction, StreamCopy, StreamEvent};

/// Bytes after which an event is recorded. More events cost more time than they save.
const EVENT_BYTES: u64 = 1 << 20;

/// Streams of one call, shared by its parts and directions.
pub(crate) type SharedStreams = Arc<Mutex<Box<dyn CallStreams>>>;

/// The parts of a call that copy to its tensors. The part that enqueues the last copy finishes the streams.
#[derive(Debug)]
pub(crate) struct CopiesOut {
    /// Number of parts that may still enqueue copies.
    left: AtomicUsize,
    /// Set when the last copy is enqueued.
    pub(crate) enqueued: Arc<Flag>,
}

impl CopiesOut {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { left: AtomicUsize::new(0), enqueued: Arc::default() })
    }

    /// Counts one more part. All parts are counted before one of them enqueues a copy.
    pub(crate) fn add_part(self: &Arc<Self>) -> Arc<Self> {
        self.left.fetch_add(1, Ordering::Relaxed);
        self.clone()
    }

    /// Returns whether this was the last part, which has enqueued all its copies.
    fn end_part(&self) -> bool {
        // Relaxed: the lock of the streams orders the parts.
        self.left.fetch_sub(1, Ordering::Relaxed) == 1
    }
}

/// Enqueues the copies of one direction of one part of a call.
#[derive(Debug)]
pub(crate) struct Copier {
    streams: SharedStreams,
    /// `None` for copies to host memory.
    copies_out: Option<Arc<CopiesOut>>,
    direction: Direction,
    /// Whether the streams take copies in this direction.
    may_copy: bool,
    is_pinned: bool,
}

/// Copies that were enqueued.
#[derive(Default)]
pub(crate) struct Issued {
    /// Number of copies that were enqueued.
    pub(crate) count: usize,
    /// Events that have yet to come, each with the number of copies that it ends.
    pub(crate) events: VecDeque<(usize, Box<dyn StreamEvent>)>,
    /// Why the device took no more copies.
    pub(crate) failure: Option<Error>,
    /// Whether copies were enqueued behind which no event is recorded.
    pub(crate) has_unknown: bool,
    /// Whether work is ready that cannot be enqueued yet: the streams do not take it, or memory for its figures is in use.
    pub(crate) is_held_up: bool,
    /// Owner of the host memory.
    _keeps: Option<Arc<dyn Any + Send + Sync>>,
}

impl fmt::Debug for Issued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Issued").field("count", &self.count).field("events", &self.events).finish_non_exhaustive()
    }
}

impl Issued {
    /// Returns that no copies were enqueued yet, to or from the memory that `keeps` owns.
    pub(crate) fn keeping(keeps: Arc<dyn Any + Send + Sync>) -> Self {
        Self { _keeps: Some(keeps), ..Self::default() }
    }

    /// Tries to follow work behind which no event was recorded. A device that has refused one piece of work may still show when
    /// the others are done.
    pub(crate) fn follow_unknown(&mut self, record: impl FnOnce() -> Result<Box<dyn StreamEvent>>) {
        if self.has_unknown
            && let Ok(event) = record()
        {
            self.events.push_back((self.count, event));
            self.has_unknown = false;
        }
    }

    /// Returns whether copies may be in flight.
    pub(crate) fn may_be_in_flight(&self) -> bool {
        !self.events.is_empty() || self.has_unknown
    }
}

impl Copier {
    pub(crate) fn into_host(streams: SharedStreams, is_pinned: bool) -> Self {
        Self { streams, copies_out: None, direction: Direction::In, may_copy: false, is_pinned }
    }

    pub(crate) fn to_tensors(streams: SharedStreams, copies_out: Arc<CopiesOut>, is_pinned: bool) -> Self {
        Self { streams, copies_out: Some(copies_out), direction: Direction::Out, may_copy: false, is_pinned }
    }

    /// Records an event behind all copies that were enqueued.
    pub(crate) fn record(&mut self) -> Result<Box<dyn StreamEvent>> {
        self.streams.lock().record(self.direction)
    }

    /// Enqueues copies up to number `ready`, and records events behind them. If the streams do not take copies yet, it
    /// enqueues none, and [`Issued::is_held_up`] is set.
    ///
    /// # Errors
    /// The error of the device. Copies may be in flight nevertheless, behind events that were recorded.
    pub(crate) fn issue(&mut self, copies: &[ExternalCopy], ready: usize, issued: &mut Issued) -> Result<()> {
        let mut streams = self.streams.lock();
        self.may_copy = self.may_copy || streams.may_copy(self.direction)?;
        issued.is_held_up = !self.may_copy && ready > issued.count;
        if !self.may_copy {
            return Ok(());
        }
        let mut since_event = 0;
        let mut is_last = false;
        for (index, copy) in copies.iter().enumerate().take(ready).skip(issued.count) {
            streams.copy(StreamCopy {
                direction: self.direction,
                piece: copy.piece,
                at: copy.at,
                host: copy.host.address(),
                len_bytes: copy.host.len_bytes(),
                is_pinned: self.is_pinned,
            })?;
            issued.count = index + 1;
            issued.has_unknown = true;
            since_event += copy.host.len_bytes();
            if index + 1 == copies.len() && self.copies_out.as_ref().is_some_and(|copies_out| copies_out.end_part()) {
                streams.finish()?;
                is_last = true;
            }
            if since_event >= EVENT_BYTES || index + 1 == ready {
                issued.events.push_back((index + 1, streams.record(self.direction)?));
                (issued.has_unknown, since_event) = (false, 0);
            }
        }
        drop(streams);
        if let Some(copies_out) = self.copies_out.as_ref().filter(|_| is_last) {
            copies_out.enqueued.set();
        }
        Ok(())
    }
}
