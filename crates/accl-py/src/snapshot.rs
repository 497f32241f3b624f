//! A snapshot of a group as JSON, which the shim passes to Python's parser.
//!
//! Owns the names of its fields. Times are in seconds, sizes in bytes.

use accl_engine::{CallSnapshot, GroupSnapshot, PeerSnapshot, Snapshot, Traffic};
use serde_json::{Value, json};

/// Counters of a process for tensors on accelerators.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    /// Pinned memory that calls use.
    pub(crate) used_bytes: usize,
    /// Pinned memory that is kept for later calls.
    pub(crate) idle_bytes: usize,
    /// Number of times that the threads have asked devices for events.
    pub(crate) polls: u64,
    /// Device memory that other processes may read: all, and the part that no call uses.
    pub(crate) window_bytes: u64,
    pub(crate) idle_window_bytes: u64,
}

/// The snapshot of one group: the state of its calls, a list of its ranks, and the process's counters.
pub(crate) fn to_json(snapshot: &Snapshot, accelerators: &Counts) -> String {
    let group = snapshot.groups.first().map_or(Value::Null, group);
    let peers: Vec<Value> = snapshot.peers.iter().map(peer).collect();
    let work = json!({
        "passes": snapshot.work.passes,
        "links_looked_at": snapshot.work.links_polled,
        "parks": snapshot.parks,
        "looks": snapshot.polls,
        "system_calls": snapshot.system_calls(),
        "pinned_bytes": accelerators.used_bytes,
        "idle_pinned_bytes": accelerators.idle_bytes,
        "accelerator_polls": accelerators.polls,
        "window_bytes": accelerators.window_bytes,
        "idle_window_bytes": accelerators.idle_window_bytes,
    });
    json!({ "group": group, "ranks": peers, "process": work }).to_string()
}

fn group(group: &GroupSnapshot) -> Value {
    let in_flight: Vec<Value> = group.in_flight.iter().map(call).collect();
    json!({
        "name": group.name,
        "rank": group.rank.0,
        "world": group.world,
        "collectives": group.collectives,
        "messages": group.messages,
        "failed": group.failed,
        "failure": group.failure,
        "waits": group.waits,
        "waited_s": group.waited.as_secs_f64(),
        "traffic": traffic(&group.traffic),
        "in_flight": in_flight,
    })
}

fn call(call: &CallSnapshot) -> Value {
    json!({
        "collective": call.collective.name(),
        "seq": call.seq,
        "age_s": call.age.as_secs_f64(),
        "awaits": call.awaits.iter().map(|rank| rank.0).collect::<Vec<_>>(),
        "external": call.external,
    })
}

fn peer(peer: &PeerSnapshot) -> Value {
    json!({
        "rank": peer.rank.map(|rank| rank.0),
        "process": peer.process,
        "link": peer.link,
        "gone": peer.gone,
        "traffic": peer.of_group.as_ref().map(traffic),
        "link_traffic": traffic(&peer.traffic),
        "system_calls": peer.system_calls,
    })
}

fn traffic(traffic: &Traffic) -> Value {
    json!({
        "frames_sent": traffic.frames_sent,
        "bytes_sent": traffic.bytes_sent,
        "frames_received": traffic.frames_received,
        "bytes_received": traffic.bytes_received,
        "stalls": traffic.stalls,
    })
}
