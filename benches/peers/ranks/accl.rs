//! One rank of the engine without torch: a library of `make bench-peers`, and the ranks of `cargo bench --bench
//! collectives`. The work is in `src/rank.rs`.

use std::process::ExitCode;

use accl_benches::rank::{Place, serve};
use rustix::process::{Signal, set_parent_process_death_signal};

fn main() -> ExitCode {
    // If the parent has ended already, no signal comes, but its end of the socket is closed then.
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
