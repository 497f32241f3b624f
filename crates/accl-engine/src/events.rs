//! Log events of calls and frames (`ACCL_LOG=debug` and `trace`), and of lost ranks.
//!
//! Owns the form of these events. A caller checks first whether the level is enabled, so that disabled events cost
//! nothing. Only frame events are logged under the driver's lock. Read [`begun`], [`ended`] and [`of_frames`].

use std::time::Duration;

use accl_transport::{FrameDirection, FrameObserver};
use accl_types::{Collective, Error};
use accl_wire::HEAD_BYTES;
use accl_wire::frame::Header;
use tracing::Level;

use accl_executor::call::{CallDesc, CallState};

/// Returns whether call events are enabled.
#[inline]
pub(crate) fn follows_calls() -> bool {
    tracing::enabled!(Level::DEBUG)
}

/// Returns whether frame events are enabled.
pub(crate) fn follows_frames() -> bool {
    tracing::enabled!(Level::TRACE)
}

/// Logs that a call has begun; `algorithm` is given for collectives.
#[cold]
pub(crate) fn begun(call: &CallState, desc: &CallDesc, algorithm: Option<&str>) {
    tracing::debug!(
        group = &*call.group,
        rank = call.rank.0,
        call = call.collective.name(),
        seq = call.seq,
        bytes = desc.bytes(),
        algorithm,
        peer = desc.peer.map(|rank| rank.0),
        "begun"
    );
}

/// Logs that a call has ended.
#[cold]
pub(crate) fn ended(call: &CallState) {
    tracing::debug!(
        group = &*call.group,
        rank = call.rank.0,
        call = call.collective.name(),
        seq = call.seq,
        us = call.elapsed().as_nanos() as f64 / 1e3,
        peer = call.source_rank().map(|rank| rank.0),
        error = call.error().map(|error| error.message),
        "ended"
    );
}

/// Logs a call that began and ended on the fast path.
#[cold]
pub(crate) fn ended_at_once(group: &str, rank: u32, collective: Collective, seq: u64, bytes: u64, took: Duration) {
    tracing::debug!(
        group,
        rank,
        call = collective.name(),
        seq,
        bytes,
        us = took.as_nanos() as f64 / 1e3,
        "ended on the fast path"
    );
}

/// Logs that a group has failed because a rank was lost. It is logged at once, before callbacks run and before the
/// detecting thread continues. Some launchers end all ranks within milliseconds after the first, and the text would be
/// lost with the exception.
#[cold]
pub(crate) fn lost(error: &Error) {
    tracing::error!("{error}");
}

/// Returns a function that logs the frames of the link to this peer.
pub(crate) fn of_frames(peer: String) -> FrameObserver {
    Box::new(move |direction: FrameDirection, head: &[u8; HEAD_BYTES], bytes: usize| {
        let what = match direction {
            FrameDirection::Out => "sent",
            FrameDirection::In => "received",
        };
        match Header::parse(head) {
            Ok(Header { kind, group, seq, edge, tag, value, .. }) => {
                tracing::trace!(peer, ?kind, group = %format_args!("{group:016x}"), seq, edge, tag, value, bytes, "{what}");
            }
            Err(error) => tracing::trace!(peer, bytes, "{what} an invalid frame: {error}"),
        }
    })
}
