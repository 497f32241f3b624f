//! What `ACCL_LOG=debug` and `trace` tell of calls and of their frames, and what is told of ranks that have gone.
//!
//! Owns the form of these events; who makes them asks first whether anybody listens, so that they cost nothing otherwise. None is made
//! under the driver's lock but those of frames. Read [`begun`], [`ended`] and [`of_frames`].

use std::time::Duration;

use accl_transport::{Tell, Way};
use accl_types::{Collective, Error};
use accl_wire::HEAD_BYTES;
use accl_wire::frame::Header;
use tracing::Level;

use accl_executor::call::{CallDesc, CallState};

/// Whether somebody follows calls.
#[inline]
pub(crate) fn follows_calls() -> bool {
    tracing::enabled!(Level::DEBUG)
}

/// Whether somebody follows frames.
pub(crate) fn follows_frames() -> bool {
    tracing::enabled!(Level::TRACE)
}

/// A call has begun; with the algorithm of a collective.
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

/// A call has ended.
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

/// A call has begun and ended on the fast path.
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

/// A group has failed because of a rank that has gone. Told at once, before callbacks run and the thread goes on that has seen it: some
/// launchers end all ranks within milliseconds after the first, and the text would be lost with the exception.
#[cold]
pub(crate) fn lost(error: &Error) {
    tracing::error!("{error}");
}

/// Tells of the frames of a link to this peer.
pub(crate) fn of_frames(peer: String) -> Tell {
    Box::new(move |way: Way, head: &[u8; HEAD_BYTES], bytes: usize| {
        let what = match way {
            Way::Out => "sent",
            Way::In => "received",
        };
        match Header::parse(head) {
            Ok(Header { kind, group, seq, edge, tag, value, .. }) => {
                tracing::trace!(peer, ?kind, group = %format_args!("{group:016x}"), seq, edge, tag, value, bytes, "{what}");
            }
            Err(error) => tracing::trace!(peer, bytes, "{what} what is no frame: {error}"),
        }
    })
}
