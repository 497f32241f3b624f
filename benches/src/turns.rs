//! Times a subject and a reference alternately, because the rate of memory changes from one second to the next.

use std::time::Instant;

use crate::memory_level::MemoryLevel;
use crate::sweep;

const TURNS: usize = 11;
/// Approximate nanoseconds of a turn of calls within the cache; a turn from memory is one call.
const TURN_NS: f64 = 300e3;

/// Medians over all turns.
#[derive(Clone, Copy, Debug)]
pub struct Comparison {
    /// Nanoseconds of one call of the subject.
    pub ns: f64,
    /// Nanoseconds of one call of the reference.
    pub reference_ns: f64,
    /// The rate of the subject over the rate of the reference, turn by turn.
    pub share: f64,
}

/// Calls both alternately on the data `on`.
pub fn compare<T>(on: &mut T, level: MemoryLevel, reference: impl Fn(&mut T), subject: impl Fn(&mut T)) -> Comparison {
    let once = [nanos(1, || reference(on)), nanos(1, || subject(on))];
    let calls = once.map(|once| match level {
        MemoryLevel::L2 => (TURN_NS / once).ceil() as usize,
        MemoryLevel::Dram => 1,
    });
    let turns = if sweep::is_test() { 1 } else { TURNS };
    let turns: Vec<(f64, f64)> =
        (0..turns).map(|_| (nanos(calls[0], || reference(on)), nanos(calls[1], || subject(on)))).collect();
    let median = |of: fn(&(f64, f64)) -> f64| {
        let mut values: Vec<f64> = turns.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    Comparison { ns: median(|turn| turn.1), reference_ns: median(|turn| turn.0), share: median(|turn| turn.0 / turn.1) }
}

/// Returns the nanoseconds of one of `calls` calls.
fn nanos(calls: usize, mut call: impl FnMut()) -> f64 {
    let began = Instant::now();
    (0..calls).for_each(|_| call());
    began.elapsed().as_secs_f64() * 1e9 / calls as f64
}
