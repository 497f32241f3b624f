//! Copies of one direction of a call, and the events behind them.
//!
//! This module owns after which copies an event is recorded. Read [`Copier::issue`] first.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use accl_engine::ExternalCopy;
use accl_types::{Error, Result};
use parking_lot::Mutex;

use crate::streams::{CallStreams, Direction, StreamCopy, StreamEvent};

/// Bytes after which an event is recorded. More events cost more time than they save.
const EVENT_BYTES: u64 = 1 << 20;

/// Enqueues the copies of one direction.
#[derive(Debug, Clone)]
pub(crate) struct Copier {
    streams: Arc<Mutex<Box<dyn CallStreams>>>,
    direction: Direction,
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
    /// Whether copies were enqueued behind which no event could be recorded.
    pub(crate) has_unknown: bool,
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
}

impl Copier {
    pub(crate) fn new(streams: Arc<Mutex<Box<dyn CallStreams>>>, direction: Direction, is_pinned: bool) -> Self {
        Self { streams, direction, is_pinned }
    }

    /// Enqueues copies up to number `ready`, and records events behind them.
    ///
    /// # Errors
    /// The error of the device. Copies may be in flight nevertheless, behind events that were recorded.
    pub(crate) fn issue(&self, copies: &[ExternalCopy], ready: usize, issued: &mut Issued) -> Result<()> {
        let mut streams = self.streams.lock();
        let mut since_event = 0;
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
            if since_event >= EVENT_BYTES || index + 1 == ready {
                issued.events.push_back((index + 1, streams.record(self.direction)?));
                (issued.has_unknown, since_event) = (false, 0);
            }
        }
        if self.direction == Direction::Out && issued.count == copies.len() {
            streams.issued();
        }
        Ok(())
    }

    /// Records that no more copies will be enqueued.
    pub(crate) fn give_up(&self) {
        if self.direction == Direction::Out {
            self.streams.lock().issued();
        }
    }
}
